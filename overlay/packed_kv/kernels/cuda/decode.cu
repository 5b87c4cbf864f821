// Split-KV decode attention over packed pages for sm_90, the second implementation of `kernels/triton/decode.py`.
//
// With IS_FINAL, blocks write the output: the grid is (1, KV heads, work items), and `schedule.py` assigns the items.
// Without, they write partial results for `merge.py`: the grid is (blocks per pair, KV heads, requests), where a pair
// is a request and a KV head. A block has WARPS warps. Each warp reads a contiguous range of the block's tiles through
// STAGES stages of its own in shared memory. One lane issues bulk copies STAGES tiles ahead, so bytes in flight occupy
// no registers and take hardly any instructions. Tiles of the ring buffer, which holds the recent window, come before
// those of pages.
//
// `launch.py` defines:
//
//   HEAD_DIM, GROUP_TABLE, WORDS, CHUNKS, HAS_HALF, MICRO_BLOCK_BYTES, *_AT, RING_SLOT_BYTES, SCORE_UNIT
//                                       the fields of `KernelLayout`; *_AT are offsets in a micro-block or ring slot
//   TABLE_*, *_3, *_2                   values of `units.py`
//   KV_HEADS, QUERY_GROUP               KV heads, and query heads per KV head
//   COLUMNS                             at least QUERY_GROUP times the query tokens of a request: 4, 8 or 16
//   MICRO_BLOCKS, TILE_BLOCKS           micro-blocks per page, and per tile
//   CUT_TILES, SLOT_SHIFT, PART_SHIFT   the encoding of work items (`schedule.py`)
//   RING_BLOCK, RECENT                  tokens of a ring block (0: no ring), and of the recent window
//   HAS_BIAS, HAS_LSE                   whether keys are centred, and whether blocks write log-sum-exps
//   TILES_A_BLOCK                       tiles of pages that a block of means serves (0: one block serves all)
//   OUTPUT                              dtype of the output: 0 is fp16, 1 bf16, 2 fp32
//   WARPS, STAGES, BLOCKS               warps per block, stages per warp, blocks per SM
//   STAGE_BYTES, SHARED_BYTES           bytes of a stage, and of a block's shared memory
// Tensors are contiguous but where there is a stride, which counts elements.
struct Arguments {
    // differs from call to call
    void* output;  // OUTPUT [tokens, KV heads, QUERY_GROUP, HEAD_DIM], unit stride over channels
    // the same for all layers of a step
    const void* query;         // fp16 [tokens, KV heads, QUERY_GROUP, HEAD_DIM], rotated and scaled
    const int* block_table;    // [requests, blocks]
    const int* query_start;    // [requests + 1], first query token of each request, and their number
    const int* seq_lens;       // [requests], tokens in the cache, those of the query included
    const float* query_bias;   // [tokens, query heads, bias_stride]; see `Biases`
    const int* ring_table;     // [requests, ring blocks]
    const int* ring_first;     // [requests], the first token that is in the ring
    const int* schedule;       // [items, 4], the words of `WorkItem`
    float* partial_output;     // [tokens, query heads, splits, HEAD_DIM]; IS_FINAL: [items, KV heads, COLUMNS, ..]
    float* partial_stats;      // [.., 2], the maximum of the scores and the sum of the weights of each partial output
    float* lse;                // [tokens, query heads]
    unsigned table_stride, ring_table_stride, bias_stride;
    // fixed for a layer
    const unsigned char* cache;  // [blocks, KV heads, 16 MICRO_BLOCKS tokens, slot bytes]
    const unsigned char* ring;   // [blocks, KV heads, RING_BLOCK, RING_SLOT_BYTES]
    const void* matrix;          // fp16 [1 or KV heads, HEAD_DIM / 16, HEAD_DIM / 16, 32, 8]
    int* counters;               // [items, KV heads], 0 before and after each launch
    unsigned block_stride, head_stride, ring_block_stride, ring_head_stride;
    unsigned matrix_head_stride, output_token_stride, output_head_stride;  // of the matrix in 16 bytes
};

#include "ptx.cuh"

// Shared memory: the stages of all warps, their barriers, and the work item once per warp.
constexpr int BARRIERS = WARPS * STAGES * STAGE_BYTES, WORK_ITEMS = BARRIERS + WARPS * STAGES * 8;

// What a block does, part `part` of `parts` of a request of `tokens` tokens: its tiles of pages from `begin` to `end`.
// The last part has the tiles up to the last one, and those of the ring. Partial results of the request's parts lie in
// slots `first_slot` and following. Request -1: an unused item.
struct WorkItem {
    int request, first_slot, tokens, begin, part, end, parts;
    INLINE explicit WorkItem(const Quad& x)
        : request((int)x.x < 0 ? -1 : x.x & ((1u << SLOT_SHIFT) - 1)), first_slot(x.x >> SLOT_SHIFT), tokens(x.y),
          begin((x.z & ((1u << PART_SHIFT) - 1)) * CUT_TILES), part(x.z >> PART_SHIFT),
          end((x.w & ((1u << PART_SHIFT) - 1)) * CUT_TILES), parts(x.w >> PART_SHIFT) {}
    INLINE bool is_last() const { return part == parts - 1; }
};
// Work items are read from global memory once, and from shared memory thereafter: holding one takes registers.
INLINE Quad load_work_item(const Arguments& a) {
    if constexpr (IS_FINAL) return load_constant_16(a.schedule + 4 * blockIdx.z);
    return {blockIdx.z, (u32)a.seq_lens[blockIdx.z], 0, 1 << PART_SHIFT};
}
INLINE u32 shared_work_item_address() {
    return shared_address(shared_memory()) + WORK_ITEMS + threadIdx.x / 32 * 16;
}
INLINE WorkItem shared_work_item() {
    u32 words[4];
    load_shared_4(shared_work_item_address(), words);
    return WorkItem({words[0], words[1], words[2], words[3]});
}

#include "attend.cuh"
#include "combine.cuh"
#include "ring.cuh"

constexpr int TILE_TOKENS = 16 * TILE_BLOCKS, TILE_BYTES = TILE_BLOCKS * MICRO_BLOCK_BYTES;
static_assert(STAGE_BYTES >= TILE_BYTES && (RING_BLOCK == 0 || STAGE_BYTES >= RING_TILE_BYTES), "a stage holds a tile");
static_assert(WORK_ITEMS % 16 == 0 && SHARED_BYTES >= WORK_ITEMS + WARPS * 16, "stages, barriers and work items fit");
static_assert(!IS_FINAL || SHARED_BYTES >= COMBINE_BYTES, "the outputs of all warps fit");

// The pages of one (request, KV head) pair. Micro-blocks past the end of the sequence are replaced by its last one.
struct Pages {
    const u8* cache;
    const int* table;
    u32 block_stride;
    int last_micro_block;

    INLINE u32 micro_block(int tile, int i) const { return min(TILE_BLOCKS * tile + i, last_micro_block); }
    // The numbers of the blocks that hold the tile's micro-blocks.
    INLINE void load_blocks(int tile, u32 (&blocks)[TILE_BLOCKS]) const {
        for_each<TILE_BLOCKS>([&](auto i) { blocks[i.value] = table[micro_block(tile, i.value) / MICRO_BLOCKS]; });
    }
    INLINE void copy(int tile, const u32 (&blocks)[TILE_BLOCKS], u32 target, u32 barrier) const {
        if (!elect_lane()) return;
        expect_bytes(barrier, TILE_BYTES);
        for_each<TILE_BLOCKS>([&](auto i) {
            const u32 offset = micro_block(tile, i.value) % MICRO_BLOCKS * MICRO_BLOCK_BYTES;
            copy_bulk<MICRO_BLOCK_BYTES>(target + i.value * MICRO_BLOCK_BYTES, barrier,
                                         cache + (u64)blocks[i.value] * block_stride + offset);
        });
    }
};

// The tiles of one of `splits` splits of a work item. All splits have equally many, give or take one. A split has tiles
// split, split + splits, ... of the ring, `ring` in all, and `count` consecutive tiles of pages from `low`.
struct TileRange {
    int ring, low, count;

    INLINE TileRange(const Request& request, const WorkItem& item, int split, int splits) {
        int pages = (max(request.page_limit(request.seq_len), 0) + TILE_TOKENS - 1) / TILE_TOKENS;
        if (!item.is_last()) pages = min(pages, item.end);
        const int tiles = item.is_last() ? request.ring_tiles() : 0, more = tiles % splits;
        const int own = (max(pages - item.begin, 0) + tiles + splits - 1) / splits - tiles / splits;
        ring = tiles / splits + (split < more);
        low = item.begin + split * own - min(split, more);
        count = max(0, min(own - (split < more), pages - low));
    }
};

INLINE void load_scales(u32 micro_block, const Lane& lane, u32 (&key)[GROUPS / 2], u32 (&value)[SETS]) {
    const u32 keys = micro_block + KEY_SCALES_AT + lane.row * (2 * GROUPS);
    if constexpr (GROUPS == 4) load_shared_2(keys, key);
    else key[0] = load_shared(keys);
    const u32 values = micro_block + VALUE_SCALES_AT + lane.column * (4 * GROUPS);
    if constexpr (TWICE) {
        for_each<SETS>([&](auto set) { value[set.value] = load_shared(values + lane.row / 4 * 4 + 8 * set.value); });
    } else if constexpr (GROUPS == 4) {
        load_shared_4(values, value);
    } else {
        load_shared_2(values, value);
    }
}

// Masks a tile at an end of the sequence: the scores of tokens that a query does not see, and the V scales of tokens
// that are not stored, whose bytes may be anything.
INLINE void mask(const Arguments& a, const Lane& lane, int first_token, float (&scores)[TILE_BLOCKS][SCORES],
                 u32 (&scales)[TILE_BLOCKS][SETS]) {
    const Request request(a, shared_work_item());
    if (HAS_BIAS && first_token == 0)
        Biases(a, request, hide_from_optimizer(blockIdx.y), lane).add_first(a, lane, 1 / SCORE_UNIT, scores[0]);
    for_each<TILE_BLOCKS>([&](auto b) {
        const int token = first_token + 16 * b.value;
        for_each<SCORES>([&](auto r) {
            const int limit = request.page_limit(request.limit(own_column(lane, own_of_score(r.value))));
            if (token + lane.row + r.value / 2 % 2 * 8 >= limit) scores[b.value][r.value] = minus_infinity();
        });
        u32 stored = 0;
        for_each<4>([&](auto i) {
            if (token + value_token(lane, i.value) < request.seq_len) stored |= 0xFFu << 8 * i.value;
        });
        for_each<SETS>([&](auto set) { scales[b.value][set.value] &= stored; });
    });
}

// Computes a tile's scores, and loads its V scales.
INLINE void score_tile(const Queries& queries, const Tables& tables, const Lane& lane, u32 tile,
                       float (&scores)[TILE_BLOCKS][SCORES], u32 (&scales)[TILE_BLOCKS][SETS]) {
    const u32 key_selector = lane.column / 2 ? 0x4342 : 0x4140;
    for_each<TILE_BLOCKS>([&](auto b) {
        const u32 micro_block = tile + b.value * MICRO_BLOCK_BYTES;
        Words words;
        load_words(words, micro_block + KEY_WORDS_AT, micro_block + KEY_HALF_WORDS_AT, lane.index);
        u32 key_scales[GROUPS / 2];
        load_scales(micro_block, lane, key_scales, scales[b.value]);
        score(
            queries, [&](auto group, u32* pairs) { decode_group<group.value>(words, pairs, tables); },
            [&](auto set, float& low, float& high) {
                constexpr int word = set.value * GROUPS_PER_SET / 2;
                const u32 pair = scale_pair(key_scales[word], TWICE ? key_selector : set.value % 2 ? 0x4342 : 0x4140);
                low = low_float(pair), high = high_float(pair);
            },
            scores[b.value]);
    });
}

// Turns a tile's scores into weights; `operands` are as `online_softmax_update` returns them.
INLINE void update_softmax(const Arguments& a, State& state, const Lane& lane, int first_token, int masked_from,
                           float (&scores)[TILE_BLOCKS][SCORES], u32 (&scales)[TILE_BLOCKS][SETS],
                           u32 (&operands)[TILE_BLOCKS][OWN]) {
    if (__builtin_expect(first_token + TILE_TOKENS > masked_from || (HAS_BIAS && first_token == 0), 0))
        mask(a, lane.in_rare_branch(), first_token, scores, scales);
    online_softmax_update(state, scores, 1 / SCORE_UNIT, scales, operands);
}

// Adds a tile's V, multiplied by its weights, to the output.
INLINE void add_tile(State& state, const Tables& tables, const Lane& lane, u32 tile,
                     const u32 (&scales)[TILE_BLOCKS][SETS], const u32 (&operands)[TILE_BLOCKS][OWN]) {
    for_each<TILE_BLOCKS>([&](auto b) {
        const u32 micro_block = tile + b.value * MICRO_BLOCK_BYTES;
        Words words;
        load_words(words, micro_block + VALUE_WORDS_AT, micro_block + VALUE_HALF_WORDS_AT, lane.index);
        add_values(
            state, [&](auto group, u32* pairs) { decode_group<group.value>(words, pairs, tables); },
            scales[b.value], operands[b.value]);
    });
}

// The stages of a warp, used in turn.
struct Stages {
    u32 first, first_barrier, stage, barrier, parity;

    INLINE Stages(int warp, const Lane& lane) {
        const u32 shared = shared_address(shared_memory());
        stage = first = hide_from_optimizer(shared + warp * STAGES * STAGE_BYTES);
        barrier = first_barrier = hide_from_optimizer(shared + BARRIERS + warp * STAGES * 8);
        parity = 0;
        if (lane.index < STAGES) barrier_init(barrier + 8 * lane.index);
        barrier_init_fence();
        sync_warp();
    }
    INLINE void next() {
        stage += STAGE_BYTES, barrier += 8;
        if (stage == first + STAGES * STAGE_BYTES) stage = first, barrier = first_barrier, parity ^= 1;
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) decode(const __grid_constant__ Arguments a) {
    const Lane lane;
    const int warp = threadIdx.x / 32, head = blockIdx.y;
    const Quad words = load_work_item(a);
    const WorkItem item(words);
    if (item.request < 0) return;
    const int index = item.request;
    if (lane.index == 0) store_shared_4(shared_work_item_address(), words);
    Stages stages(warp, lane);
    const Request request(a, item);
    if (request.count <= 0) return;
    const int last_micro_block = (request.seq_len - 1) / 16;
    const int split = IS_FINAL ? warp : blockIdx.x * WARPS + warp, splits = IS_FINAL ? WARPS : gridDim.x * WARPS;
    const TileRange range(request, item, split, splits);
    const Pages pages{hide_from_optimizer(a.cache + (u64)head * a.head_stride),
                      hide_from_optimizer(a.block_table + (u64)index * a.table_stride), a.block_stride,
                      last_micro_block};
    const Ring ring(a, request, index, head);
    // The range's tiles are numbered, the ring's first. Block numbers are loaded early, because copies wait for them.
    auto load_blocks = [&](int number, u32 (&blocks)[TILE_BLOCKS]) {
        pages.load_blocks(range.low + max(number - range.ring, 0), blocks);
    };
    auto copy = [&](int number, const u32 (&blocks)[TILE_BLOCKS], u32 stage, u32 barrier) {
        if (RING_BLOCK && number < range.ring) {
            ring.copy(request, split + number * splits, stage, barrier, lane);
        } else if (number < range.ring + range.count) {
            pages.copy(range.low + number - range.ring, blocks, stage, barrier);
        }
    };
    u32 first_blocks[STAGES][TILE_BLOCKS];
    for_each<STAGES>([&](auto s) { load_blocks(s.value, first_blocks[s.value]); });
    for_each<STAGES>([&](auto s) {
        copy(s.value, first_blocks[s.value], stages.stage + s.value * STAGE_BYTES, stages.barrier + s.value * 8);
    });

    State state;
    Queries queries = load_queries(a, request, head, lane);
    if (RING_BLOCK && range.ring) {
#pragma unroll 1
        for (int number = 0; number < range.ring; number++) {
            u32 next[TILE_BLOCKS];
            load_blocks(number + STAGES, next);
            const int tile = split + number * splits;
            if (number)
                Biases(a, request, head, lane).go_on(a, state, page_tile(request, tile - splits),
                                                     page_tile(request, tile));
            barrier_wait(stages.barrier, stages.parity);
            attend_ring_tile(a, request, head, tile, stages.stage, queries, lane, state);
            sync_warp();
            copy(number + STAGES, next, stages.stage, stages.barrier);
            stages.next();
        }
        to_page_unit(state);
        const int ring_tile = page_tile(request, split + (range.ring - 1) * splits);
        const Biases bias(a, request, head, lane);
        if (range.count) bias.go_on(a, state, ring_tile, range.low);
        else bias.make_whole(a, state, ring_tile);
    }
    queries.to_page_unit();
    const int masked_from = request.page_limit(request.seq_len - request.count + 1), last = range.low + range.count;
    const Tables tables((u32)(request.seq_len >> 31));
#pragma unroll 1
    for (int tile = range.low; tile < last; tile++) {
        u32 next[TILE_BLOCKS];
        pages.load_blocks(tile + STAGES, next);
        float scores[TILE_BLOCKS][SCORES];
        u32 scales[TILE_BLOCKS][SETS], operands[TILE_BLOCKS][OWN];
        barrier_wait(stages.barrier, stages.parity);
        score_tile(queries, tables, lane, stages.stage, scores, scales);
        update_softmax(a, state, lane, TILE_TOKENS * tile, masked_from, scores, scales, operands);
        add_tile(state, tables, lane, stages.stage, scales, operands);
        sync_warp();
        if (tile + STAGES < last) pages.copy(tile + STAGES, next, stages.stage, stages.barrier);
        stages.next();
        if (Biases::ends_block(tile) && tile + 1 < last) {
            const Request again(a, shared_work_item());
            Biases(a, again, hide_from_optimizer(blockIdx.y), lane.in_rare_branch()).go_on(a, state, tile, tile + 1);
        }
    }
    if (HAS_BIAS && range.count) {
        const Request again(a, shared_work_item());
        Biases(a, again, hide_from_optimizer(blockIdx.y), lane.in_rare_branch()).make_whole(a, state, last - 1);
    }
    finish(state);
    if constexpr (IS_FINAL) combine_warps(a, request, head, shared_work_item(), warp, lane, state);
    else store_partial(a, request, head, split, splits, lane, state);
}
