// Tiles of pages: which tiles a warp or a block reads, how they come into shared memory, and which tokens are masked.
#pragma once
#include "combine.cuh"
#include "ring.cuh"

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
    INLINE void copy(LoadsDone done, int tile, const u32 (&blocks)[TILE_BLOCKS], u32 target, u32 barrier) const {
        if (!elect_lane()) return;
        expect_bytes(barrier, TILE_BYTES);
        for_each<TILE_BLOCKS>([&](auto i) {
            const u32 offset = micro_block(tile, i.value) % MICRO_BLOCKS * MICRO_BLOCK_BYTES;
            copy_bulk<MICRO_BLOCK_BYTES>(done, target + i.value * MICRO_BLOCK_BYTES, barrier,
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

INLINE void load_key_scales(u32 micro_block, const Lane& lane, u32 (&key)[GROUPS / 2]) {
    const u32 keys = micro_block + KEY_SCALES_AT + lane.row * (2 * GROUPS);
    if constexpr (GROUPS == 8) load_shared_4(keys, key);
    else if constexpr (GROUPS == 4) load_shared_2(keys, key);
    else key[0] = load_shared(keys);
}
INLINE void load_scales(u32 micro_block, const Lane& lane, u32 (&key)[GROUPS / 2], u32 (&value)[SETS]) {
    load_key_scales(micro_block, lane, key);
    const u32 values = micro_block + VALUE_SCALES_AT + lane.column * (4 * GROUPS);
    if constexpr (TWICE) {
        for_each<SETS>([&](auto set) { value[set.value] = load_shared(values + lane.row / 4 * 4 + 8 * set.value); });
    } else if constexpr (GROUPS % 4 == 0) {
        for_each<GROUPS / 4>([&](auto i) { load_shared_4(values + 16 * i.value, value + 4 * i.value); });
    } else {
        load_shared_2(values, value);
    }
}

// Mask for this lane's bytes of V scales in a micro-block: ones for the first `count` tokens, which are stored.
INLINE u32 stored_bytes(const Lane& lane, int count) {
    u32 stored = 0;
    for_each<4>([&](auto i) {
        if (value_token(lane, i.value) < count) stored |= 0xFFu << 8 * i.value;
    });
    return stored;
}

// Masks a tile at an end of the sequence: the scores of tokens that a query does not see, and the V scales of tokens
// that are not stored, whose bytes may be anything.
INLINE void mask(const Arguments& a, const Lane& lane, int first_token, float (&scores)[TILE_BLOCKS][SCORES],
                 u32 (&scales)[TILE_BLOCKS][SETS]) {
    const Request request(a, shared_work_item());
    if (HAS_BIAS && first_token == 0)
        Biases(a, request, hide_from_optimizer(blockIdx.y), lane).add_first(a, lane, PAGE_FACTOR, scores[0]);
    for_each<TILE_BLOCKS>([&](auto b) {
        const int token = first_token + 16 * b.value;
        for_each<SCORES>([&](auto r) {
            const int limit = request.page_limit(request.limit(own_column(lane, own_of_score(r.value))));
            if (token + lane.row + r.value / 2 % 2 * 8 >= limit) scores[b.value][r.value] = minus_infinity();
        });
        const u32 stored = stored_bytes(lane, request.seq_len - token);
        for_each<SETS>([&](auto set) { scales[b.value][set.value] &= stored; });
    });
    if (HAS_VALUE_MEANS && !IS_WIDE && first_token == 0)
        Biases(a, request, hide_from_optimizer(blockIdx.y), lane).keep_first(a, request, lane, PAGE_FACTOR, scores[0]);
}

// The stages of a warp or a team, used in turn, behind `Front`; `owner` is its number.
struct Stages {
    u32 first, first_barrier, stage, barrier, parity;

    INLINE explicit Stages(int owner) {
        const u32 shared = shared_address(shared_memory());
        stage = first = hide_from_optimizer(shared + STAGES_AT + owner * STAGES * STAGE_BYTES);
        barrier = first_barrier = hide_from_optimizer(shared + OFFSET_OF(Front, stage_full) + owner * STAGES * 8);
        parity = 0;
    }
    // Called by one of the warps that share the stages.
    INLINE void init_barriers(const Lane& lane) const {
        if (lane.index < STAGES) barrier_init<WARPS / STAGE_OWNERS>(barrier + 8 * lane.index);
        barrier_init_fence();
        sync_warp();
    }
    INLINE void next() {
        stage += STAGE_BYTES, barrier += 8;
        if (stage == first + STAGES * STAGE_BYTES) stage = first, barrier = first_barrier, parity ^= 1;
    }
};
