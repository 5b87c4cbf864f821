// Split-KV decode attention over packed pages for sm_90, the second implementation of `kernels/triton/decode.py`.
//
// IS_FINAL: blocks write the output; the grid is (1, KV heads, jobs), and `jobs.py` says what a block does. Else it is
// (blocks of a pair, KV heads, requests), and results are partial, for `merge.py`. A block is WARPS warps; each has a
// contiguous share of what the block has of the pages of a (request, KV head) pair, and streams them through stages of
// its own in shared memory: one lane copies a tile with bulk copies, STAGES tiles ahead, so that no register holds bytes
// that are under way and hardly an instruction moves them. Tiles of the ring of recent tokens go the same way, before
// those of pages. `launch.py` gives the constants:
//
//   HEAD_DIM, GROUP_BITS                of the format
//   TABLE_*, *_3, *_2, *UNIT*           of `units.py`
//   KV_HEADS, QUERY_GROUP, COLUMNS      of the model and its drafts
//   MICRO_BLOCKS, TILE_BLOCKS           micro-blocks of a page, of a tile
//   CUT_TILES                           a request is cut in parts at multiples of so many tiles
//   RING_BLOCK, RECENT, HAS_BIAS        as in decode.py
//   WARPS, STAGES, BLOCKS               warps of a block, stages of a warp, blocks of a multiprocessor
//   IS_FINAL, OUTPUT                    see above; 0: fp16, 1: bf16, 2: fp32
//   HAS_SUMS                            where the output is written, the sums of weights are, too
//   STAGE_BYTES, SHARED_BYTES           of a stage, and of a block
struct Arguments {
    // of a call
    void* output;
    // of a step
    const void* query;
    const int *block_table, *query_start, *seq_lens;
    const float* query_bias;
    const int *ring_table, *ring_first, *jobs;
    float *partial_output, *partial_stats, *sums;
    unsigned table_stride, ring_table_stride;
    // of a layer
    const unsigned char *cache, *ring;
    const void* matrix;
    int* counters;  // zeros, and left so
    unsigned block_stride, head_stride, ring_block_stride, ring_head_stride;
    unsigned matrix_head_stride, output_token_stride, output_head_stride;
};

#include "ptx.cuh"

constexpr int ALL_STAGES = WARPS * STAGES * STAGE_BYTES, JOBS = ALL_STAGES + WARPS * STAGES * 8;

// A block's part of the `parts` of a request of so many tokens: those of its tiles of pages from `begin` to `end`, the
// last part's to the last, with the ring's. Results of the parts go to places `first` and on. Request -1: there is
// nothing to do.
struct Job {
    int request, first, tokens, begin, part, end, parts;
    INLINE explicit Job(const Quad& x)
        : request((int)x.x < 0 ? -1 : x.x & 0xFFFF), first(x.x >> 16), tokens(x.y), begin((x.z & 0xFFFFFF) * CUT_TILES),
          part(x.z >> 24), end((x.w & 0xFFFFFF) * CUT_TILES), parts(x.w >> 24) {}
    INLINE bool is_last() const { return part == parts - 1; }
};
// Read once from global memory, and then from shared memory, each warp from a place of its own: registers are few.
INLINE Quad first_job(const Arguments& a) {
    if constexpr (IS_FINAL) return load_constant_16(a.jobs + 4 * blockIdx.z);
    return {blockIdx.z, (u32)a.seq_lens[blockIdx.z], 0, 1 << 24};
}
INLINE Job kept_job() {
    u32 words[4];
    load_shared_4(shared_address(shared_memory()) + JOBS + threadIdx.x / 32 * 16, words);
    return Job({words[0], words[1], words[2], words[3]});
}

#include "attend.cuh"
#include "combine.cuh"
#include "ring.cuh"

constexpr int TILE_TOKENS = 16 * TILE_BLOCKS, TILE_BYTES = TILE_BLOCKS * MICRO_BLOCK_BYTES;
static_assert(STAGE_BYTES >= TILE_BYTES && (RING_BLOCK == 0 || STAGE_BYTES >= RING_TILE_BYTES), "a tile in a stage");
static_assert(JOBS % 16 == 0 && SHARED_BYTES >= JOBS + WARPS * 16, "stages, their barriers and jobs");
static_assert(!IS_FINAL || SHARED_BYTES >= COMBINE_BYTES, "what warps leave for each other");

// The pages of one (request, KV head) pair, and where the micro-blocks of a tile lie in them. Past the end of the
// sequence they are its last one.
struct Pages {
    const u8* cache;
    const int* table;
    u32 block_stride;
    int last_micro_block;

    INLINE u32 micro_block(int tile, int i) const { return min(TILE_BLOCKS * tile + i, last_micro_block); }
    // Entries of the block table.
    INLINE void find(int tile, u32 (&entries)[TILE_BLOCKS]) const {
        for_each<TILE_BLOCKS>([&](auto i) { entries[i.value] = table[micro_block(tile, i.value) / MICRO_BLOCKS]; });
    }
    INLINE void copy(int tile, const u32 (&entries)[TILE_BLOCKS], u32 target, u32 barrier) const {
        if (!elect_lane()) return;
        expect_bytes(barrier, TILE_BYTES);
        for_each<TILE_BLOCKS>([&](auto i) {
            const u32 offset = micro_block(tile, i.value) % MICRO_BLOCKS * MICRO_BLOCK_BYTES;
            copy_bulk<MICRO_BLOCK_BYTES>(target + i.value * MICRO_BLOCK_BYTES, barrier,
                                         cache + (u64)entries[i.value] * block_stride + offset);
        });
    }
};

// A job's tiles of pages and of the ring, which a request's last job has, are dealt out evenly, those of the ring to the
// first splits: each split has tiles split, split + splits, ... of the ring, `ring` in all, and `count` of the pages from
// `low` on.
struct Share {
    int ring, low, count;

    INLINE Share(const Request& request, const Job& job, int split, int splits) {
        int pages = (max(request.page_limit(request.seq_len), 0) + TILE_TOKENS - 1) / TILE_TOKENS;
        if (!job.is_last()) pages = min(pages, job.end);
        const int tiles = job.is_last() ? request.ring_tiles() : 0, more = tiles % splits;
        const int own = (max(pages - job.begin, 0) + tiles + splits - 1) / splits - tiles / splits;
        ring = tiles / splits + (split < more);
        low = job.begin + split * own - min(split, more);
        count = max(0, min(own - (split < more), pages - low));
    }
};

INLINE void load_scales(u32 micro_block, const Lane& lane, u32 (&key)[GROUPS / 2], u32 (&value)[SETS]) {
    const u32 keys = micro_block + KEY_SCALES + lane.row * (2 * GROUPS);
    if constexpr (GROUPS == 4) load_shared_2(keys, key);
    else key[0] = load_shared(keys);
    const u32 values = micro_block + VALUE_SCALES + lane.column * (4 * GROUPS);
    if constexpr (TWICE) {
        for_each<SETS>([&](auto set) { value[set.value] = load_shared(values + lane.row / 4 * 4 + 8 * set.value); });
    } else if constexpr (GROUPS == 4) {
        load_shared_4(values, value);
    } else {
        load_shared_2(values, value);
    }
}

// A tile at an end: nothing of tokens that a query does not see, and nothing of bytes that may be anything.
INLINE void mask(const Arguments& a, const Lane& lane, int first_token, float (&scores)[TILE_BLOCKS][4],
                 u32 (&scales)[TILE_BLOCKS][SETS]) {
    const Request request(a, kept_job());
    if (HAS_BIAS && first_token == 0) add_first_bias(a, request, again(blockIdx.y), lane, 1 / SCORE_UNIT, scores[0]);
    for_each<TILE_BLOCKS>([&](auto b) {
        const int token = first_token + 16 * b.value;
        for_each<4>([&](auto r) {
            const int limit = request.page_limit(request.limit(own_column(lane, r.value % 2)));
            if (token + lane.row + r.value / 2 * 8 >= limit) scores[b.value][r.value] = minus_infinity();
        });
        u32 stored = 0;
        for_each<4>([&](auto i) {
            if (token + value_token(lane, i.value) < request.seq_len) stored |= 0xFFu << 8 * i.value;
        });
        for_each<SETS>([&](auto set) { scales[b.value][set.value] &= stored; });
    });
}

// A tile's scores and V's scales.
INLINE void score_tile(const Queries& queries, const Tables& tables, const Lane& lane, u32 tile,
                       float (&scores)[TILE_BLOCKS][4], u32 (&scales)[TILE_BLOCKS][SETS]) {
    const u32 key_selector = lane.column / 2 ? 0x4342 : 0x4140;
    for_each<TILE_BLOCKS>([&](auto b) {
        const u32 micro_block = tile + b.value * MICRO_BLOCK_BYTES;
        Words words;
        load_words(words, micro_block, lane.index);
        u32 key_scales[GROUPS / 2];
        load_scales(micro_block, lane, key_scales, scales[b.value]);
        score(
            queries, [&](auto group, u32* pairs) { decode_group<group.value>(words, pairs, tables); },
            [&](auto set, float& low, float& high) {
                constexpr int word = set.value * GROUPS_A_SET / 2;
                const u32 pair = scale_pair(key_scales[word], TWICE ? key_selector : set.value % 2 ? 0x4342 : 0x4140);
                low = low_float(pair), high = high_float(pair);
            },
            scores[b.value]);
    });
}

// From scores to weights.
INLINE void weigh_tile(const Arguments& a, State& state, const Lane& lane, int first_token, int masked_from,
                       float (&scores)[TILE_BLOCKS][4], u32 (&scales)[TILE_BLOCKS][SETS],
                       u32 (&operands)[TILE_BLOCKS][2]) {
    if (__builtin_expect(first_token + TILE_TOKENS > masked_from || (HAS_BIAS && first_token == 0), 0))
        mask(a, lane, first_token, scores, scales);
    soften(state, scores, 1 / SCORE_UNIT, scales, operands);
}

INLINE void add_tile(State& state, const Tables& tables, const Lane& lane, u32 tile,
                     const u32 (&scales)[TILE_BLOCKS][SETS], const u32 (&operands)[TILE_BLOCKS][2]) {
    for_each<TILE_BLOCKS>([&](auto b) {
        Words words;
        load_words(words, tile + b.value * MICRO_BLOCK_BYTES + VALUE_CODES, lane.index);
        add_values(
            state, [&](auto group, u32* pairs) { decode_group<group.value>(words, pairs, tables); },
            scales[b.value], operands[b.value]);
    });
}

// The stages of a warp, which are used in turn.
struct Stages {
    u32 first, first_barrier, stage, barrier, parity;

    INLINE Stages(int warp, const Lane& lane) {
        const u32 shared = shared_address(shared_memory());
        stage = first = again(shared + warp * STAGES * STAGE_BYTES);
        barrier = first_barrier = again(shared + ALL_STAGES + warp * STAGES * 8);
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
    const Quad to_do = first_job(a);
    const Job job(to_do);
    if (job.request < 0) return;
    const int index = job.request;
    if (lane.index == 0) store_shared_4(shared_address(shared_memory()) + JOBS + warp * 16, to_do);
    Stages stages(warp, lane);
    const Request request(a, job);
    if (request.count <= 0) return;
    const int last_micro_block = (request.seq_len - 1) / 16;
    const int split = IS_FINAL ? warp : blockIdx.x * WARPS + warp, splits = IS_FINAL ? WARPS : gridDim.x * WARPS;
    const Share share(request, job, split, splits);
    const Pages pages{again(a.cache + (u64)head * a.head_stride), again(a.block_table + (u64)index * a.table_stride),
                      a.block_stride, last_micro_block};
    const Ring ring(a, request, index, head);
    // Tiles of the share by number, the ring's first. Entries of the block table come early: copies wait for them.
    auto find = [&](int number, u32 (&entries)[TILE_BLOCKS]) {
        pages.find(share.low + max(number - share.ring, 0), entries);
    };
    auto copy = [&](int number, const u32 (&entries)[TILE_BLOCKS], u32 stage, u32 barrier) {
        if (RING_BLOCK && number < share.ring) {
            ring.copy(request, split + number * splits, stage, barrier, lane);
        } else if (number < share.ring + share.count) {
            pages.copy(share.low + number - share.ring, entries, stage, barrier);
        }
    };
    u32 first_entries[STAGES][TILE_BLOCKS];
    for_each<STAGES>([&](auto s) { find(s.value, first_entries[s.value]); });
    for_each<STAGES>([&](auto s) {
        copy(s.value, first_entries[s.value], stages.stage + s.value * STAGE_BYTES, stages.barrier + s.value * 8);
    });

    State state;
    Queries queries = load_queries(a, request, head, lane);
    if (RING_BLOCK && share.ring) {
#pragma unroll 1
        for (int number = 0; number < share.ring; number++) {
            u32 entries[TILE_BLOCKS];
            find(number + STAGES, entries);
            barrier_wait(stages.barrier, stages.parity);
            attend_ring_tile(a, request, head, split + number * splits, stages.stage, queries, lane, state);
            sync_warp();
            copy(number + STAGES, entries, stages.stage, stages.barrier);
            stages.next();
        }
        to_page_unit(state);
    }
    queries.to_page_unit();
    const int masked_from = request.page_limit(request.seq_len - request.count + 1), last = share.low + share.count;
    const Tables tables((u32)(request.seq_len >> 31));
#pragma unroll 1
    for (int tile = share.low; tile < last; tile++) {
        u32 next[TILE_BLOCKS];
        pages.find(tile + STAGES, next);
        float scores[TILE_BLOCKS][4];
        u32 scales[TILE_BLOCKS][SETS], operands[TILE_BLOCKS][2];
        barrier_wait(stages.barrier, stages.parity);
        score_tile(queries, tables, lane, stages.stage, scores, scales);
        weigh_tile(a, state, lane, TILE_TOKENS * tile, masked_from, scores, scales, operands);
        add_tile(state, tables, lane, stages.stage, scales, operands);
        sync_warp();
        if (tile + STAGES < last) pages.copy(tile + STAGES, next, stages.stage, stages.barrier);
        stages.next();
    }
    finish(state);
    if constexpr (IS_FINAL) combine_warps(a, request, head, kept_job(), warp, lane, state);
    else store_partial(a, request, head, split, splits, lane, state);
}
