// Attention of a block for 64 columns by two warpgroups, for head_dim 128 and codes of 4 bits. One unpacks: its
// warps copy and unpack a micro-block of each tile, and leave K and V as fp16 in shared memory. The other attends, as
// kernels over fp16 caches do: columns are the 64 rows of its products, so its softmax is that of rows in registers.
//
// Tiles of the ring come before those of pages. The raw bytes of one take the room of two of pages, and none is copied
// while another is unpacked: there are few.
//
// Tiles of 64 tokens lie in two stages, K as [2 panels of 64 channels][token][channel] and V as [channel][token], in
// rows of 128 bytes that are swizzled as `matrix_descriptor` says.
#pragma once
#include "pages.cuh"

namespace roles {

constexpr int HALF_BYTES = 64 * 128, TEAM_TILE_BYTES = 2 * HALF_BYTES, TEAM_STAGES = 2;
static_assert(WARPS == 4 && UNPACKERS == 4 && TILE_BLOCKS == 1 && HEAD_DIM == 128, "two warpgroups");
constexpr int RAW_BYTES = STAGES * MICRO_BLOCK_BYTES;  // of a warp
static_assert(STAGES == 3 && (!RING_BLOCK || RING_TILE_BYTES <= 2 * MICRO_BLOCK_BYTES), "a ring's tile and a page's");

// `*_full`: barriers at which those arrive who fill, and those wait that read. `*_empty`: the other way.
struct SharedMemory {
    Front front;  // its barriers are not used
    u64 raw_full[UNPACKERS][STAGES], ring_full[UNPACKERS];  // raw bytes: a warp's copy fills, the warp reads
    u64 keys_full[2], keys_empty[2];      // K of a stage: warps that unpack fill, those that attend read
    u64 values_full[2], values_empty[2];  // V of a stage, and `are_small`
    u8 are_small[2][UNPACKERS];           // whether V of a warp's 16 tokens is small
    alignas(512) u8 raw[UNPACKERS][RAW_BYTES];  // from here on, the block's results replace tiles
    alignas(1024) u8 queries[TEAM_TILE_BYTES];
    u8 keys[TEAM_STAGES][TEAM_TILE_BYTES], values[TEAM_STAGES][TEAM_TILE_BYTES];
};
static_assert(sizeof(SharedMemory) >= AT(raw) + sizeof(TeamResults), "the block's results");

// Registers of a thread of each warpgroup; both begin with 128.
constexpr int ATTEND_REGISTERS = 184, UNPACK_REGISTERS = 72;

constexpr u32 halves_of(float power) {  // a power of 2 as both halves of a pair
    int exponent = 15;
    while (power > 1) power /= 2, exponent++;
    while (power < 1) power *= 2, exponent--;
    return exponent * 0x04000400u;
}
// Unpacked K and V are values times `TEAM_UNIT`. Codes are lifted first, so that fp16 has all products with scales; if
// all scales are below 2, they are lifted instead, which are fewer.
//
// V of 16 tokens is small if all their scales are below 2^-SMALL. In that unit fp16 would keep few bits of it, so it is
// lifted by 2^SMALL, and the tokens' weights are divided by that: HEADROOM leaves them the room.
constexpr u32 LIFT = halves_of(TEAM_UNIT * group_layout(0).key_factor), RING_LIFT = halves_of(TEAM_UNIT * RING_UNIT);
constexpr int SMALL = 7;
constexpr u32 NOT_SMALL = 0xC0C0C0C0;  // a scale of at least 2^-SMALL has one of these bits
constexpr float VALUE_GAIN = group_layout(0).value_factor / group_layout(0).key_factor;  // of pages

// The tiles of a block are numbered, those of the ring first. Each has 16 tokens of each unpacking warp.
struct TeamTiles {
    int low, ring, all, split, splits, first_ring_tile;
    INLINE TeamTiles(const Request& request, const TileRange& range, int split, int splits)
        : low(range.low), ring(RING_BLOCK ? (range.ring + 3) / 4 : 0), all(ring + (range.count + 3) / 4), split(split),
          splits(splits), first_ring_tile(RING_BLOCK ? request.first_ring_tile() : 0) {}
    INLINE int ring_tile(int number, int warp) const { return split + (number * 4 + warp) * splits; }
    // 16 tokens of a sequence.
    INLINE int tile(int number, int warp) const {
        return number < ring ? first_ring_tile + ring_tile(number, warp) : low + 4 * (number - ring) + warp;
    }
};

INLINE void share_queries(const Arguments& a, const Request& request, int head) {
    const u32 target = shared_address(shared_memory()) + AT(queries);
#pragma unroll 1
    for (int i = threadIdx.x; i < 64 * 16; i += (WARPS + UNPACKERS) * 32) {
        const int row = i / 16, piece = i % 16;
        Quad q{0, 0, 0, 0};
        if (request.has(row)) q = ((const Quad*)a.query)[request.row(head, row) * 16 + piece];
        store_shared_4(target + piece / 8 * HALF_BYTES + 128 * row + ((piece % 8 ^ row % 8) << 4), q);
    }
    fence_async();
}

// ---- unpacking

template <u32 BY, bool IS_LIFTED> INLINE u32 lifted(u32 pair) { return IS_LIFTED ? multiply_halves(pair, BY) : pair; }
// Unpacks K of 16 tokens. `decode(g, pairs)` decodes a group, `scale(g)` returns the scales of its two tokens.
template <u32 BY, bool LIFTS_CODES, class Decode, class Scale>
INLINE void unpack_keys(u32 even, u32 odd, Decode&& decode, Scale&& scale) {
    for_each<GROUPS>([&](auto g) {
        constexpr int group = g.value;
        u32 p[8];
        decode(g, p);
        const u32 scales = lifted<BY, !LIFTS_CODES>(scale(g));
        for_each<8>([&](auto i) {
            const u32 pair = lifted<BY, LIFTS_CODES>(p[i.value]);
            p[i.value] = i.value < 4 ? multiply_by_lower(pair, scales) : multiply_by_upper(pair, scales);
        });
        const u32 target = (group % 2 ? odd : even) + group / 2 * HALF_BYTES;
        store_matrices(target, p), store_matrices(target + 8 * 128, p + 4);
    });
}
INLINE bool are_small(u32 value_scales) { return !any_lane(value_scales & NOT_SMALL); }
// Unpacks V of 16 tokens, whose scales of a group are the bytes n3 n0 of a word. With `is_small`, LIFTS_CODES
// must be set.
template <u32 BY, bool LIFTS_CODES, class Decode>
INLINE void unpack_values(u32 target, Decode&& decode, const u32 (&scales)[4], bool is_small) {
    const u32 factor = LIFTS_CODES ? (is_small ? halves_of(1 << SMALL) : halves_of(1)) : BY;
    for_each<GROUPS>([&](auto g) {
        constexpr int group = g.value;
        u32 p[8];
        decode(g, p);
        const u32 low = multiply_halves(scale_pair(scales[group], 0x4140), factor);
        const u32 high = multiply_halves(scale_pair(scales[group], 0x4342), factor);
        for_each<8>([&](auto i) {
            p[i.value] = multiply_halves(lifted<BY, LIFTS_CODES>(p[i.value]), i.value % 2 ? high : low);
        });
        store_matrices(target + 32 * group * 128, p), store_matrices(target + (32 * group + 16) * 128, p + 4);
    });
}
// Ends a warp's stores, which the products of other warps read.
INLINE void finish_stores(u32 barrier, const Lane& lane) {
    fence_async();
    sync_warp();
    if (lane.index == 0) arrive(barrier);
}

INLINE void unpack_tiles(const Arguments& a, const Request& request, const Pages& pages, const TeamTiles& tiles,
                         int head, int warp, const Lane& lane) {
    const u32 shared = shared_address(shared_memory());
    const u32 first_raw = hide_from_optimizer(shared + AT(raw) + warp * RAW_BYTES);
    const u32 first_barrier = hide_from_optimizer(shared + AT(raw_full) + 8 * STAGES * warp);
    const Tables tables((u32)(request.seq_len >> 31));
    const int count = tiles.all - tiles.ring, first_stage = tiles.ring ? 2 : 0;
    u32 next[1];
    auto copy = [&](LoadsDone done, int number, int stage) {  // of pages
        const int tile = tiles.low + 4 * number + warp;
        pages.load_blocks(tile, next);
        if (number < count)
            pages.copy(done, tile, next, first_raw + stage * MICRO_BLOCK_BYTES, first_barrier + 8 * stage);
    };
    copy(nothing_loaded(), 0, first_stage);
    if (!tiles.ring) copy(nothing_loaded(), 1, 1), copy(nothing_loaded(), 2, 2);
    // Row j of matrix i, whose address this lane gives, is a token of K, or a channel of V.
    const int i = lane.index / 8, j = lane.index % 8;
    const u32 keys = shared + AT(keys) + 2048 * warp + 128 * j + ((i ^ j) << 4);
    const u32 values = shared + AT(values) + 128 * (i / 2 * 8 + j) + (((2 * warp + i % 2) ^ j) << 4);
    // `refill` copies to the raw bytes, which are in registers.
    auto fill = [&](int number, bool is_small, auto&& unpack_k, auto&& refill, auto&& unpack_v) {
        const u32 stage = number % 2, parity = (number / 2 + 1) % 2;
        const u32 even = keys + stage * TEAM_TILE_BYTES;
        barrier_wait(shared + AT(keys_empty) + 8 * stage, parity);
        unpack_k(even, even ^ 64);
        if (lane.index == 0) shared_memory()[AT(are_small) + 4 * stage + warp] = is_small;
        finish_stores(shared + AT(keys_full) + 8 * stage, lane);
        refill();
        barrier_wait(shared + AT(values_empty) + 8 * stage, parity);
        unpack_v(values + stage * TEAM_TILE_BYTES);
        finish_stores(shared + AT(values_full) + 8 * stage, lane);
    };
    if (RING_BLOCK && tiles.ring) {
        const Ring ring(a, request, request.index, head);
        const u32 barrier = shared + AT(ring_full) + 8 * warp;
#pragma unroll 1
        for (int number = 0; number < tiles.ring; number++) {
            ring.copy(LastLoad(first_raw).wait(), request, tiles.ring_tile(number, warp), first_raw, barrier, lane);
            wait_for_copies_of(barrier, number % 2);
            const u32 own = first_raw + lane.row * RING_SLOT_BYTES + RING_KEY_SCALES_AT;
            u32 key_scales[2] = {load_shared(own), load_shared(own + 8 * RING_SLOT_BYTES)}, value_scales[4];
            ring_value_scales(request, first_raw, 16 * tiles.tile(number, warp), lane, value_scales);
            const bool is_small = are_small(value_scales[0] | value_scales[1] | value_scales[2] | value_scales[3]);
            fill(
                number, is_small,
                [&](u32 even, u32 odd) {
                    unpack_keys<RING_LIFT, true>(
                        even, odd, [&](auto g, u32(&pairs)[8]) { ring_key_pairs(first_raw, lane, g.value, pairs); },
                        [&](auto g) {
                            return scale_pair(key_scales[0], 0x4440 + g.value) |
                                   scale_pair(key_scales[1], 0x4044 + 0x0100 * g.value);
                        });
                },
                [] {},
                [&](u32 target) {
                    unpack_values<RING_LIFT, true>(
                        target, [&](auto g, u32(&pairs)[8]) { ring_value_pairs(first_raw, lane, g.value, pairs); },
                        value_scales, is_small);
                });
        }
        const LoadsDone done = LastLoad(first_raw).wait();
        copy(done, 1, 0), copy(done, 2, 1);
    }
    pages.load_blocks(tiles.low + 4 * STAGES + warp, next);
    u32 raw = first_raw + first_stage * MICRO_BLOCK_BYTES, barrier = first_barrier + 8 * first_stage, raw_parity = 0;
#pragma unroll 1
    for (int number = 0; number < count; number++) {
        const int tile = tiles.low + 4 * number + warp;
        wait_for_copies_of(barrier, raw_parity);
        Words k, v;
        u32 key_scales[2], value_scales[4];
        load_words(k, raw + KEY_WORDS_AT, raw + KEY_HALF_WORDS_AT, lane.index);
        load_key_scales(raw, lane, key_scales);
        load_words(v, raw + VALUE_WORDS_AT, raw + VALUE_HALF_WORDS_AT, lane.index);
        load_shared_4(raw + VALUE_SCALES_AT + lane.column * (4 * GROUPS), value_scales);
        const LastLoad last_load(raw);
        if (__builtin_expect(16 * tile + 16 > request.seq_len, 0)) {
            const u32 stored = stored_bytes(lane.in_rare_branch(), request.seq_len - 16 * tile);
            for_each<4>([&](auto g) { value_scales[g.value] &= stored; });
        }
        const u32 of_values = value_scales[0] | value_scales[1] | value_scales[2] | value_scales[3];
        const bool is_large = any_lane((key_scales[0] | key_scales[1] | of_values) & LARGE_SCALES);
        const bool is_small = are_small(of_values);
        auto key_scale = [&](auto g) { return scale_pair(key_scales[g.value / 2], g.value % 2 ? 0x4342 : 0x4140); };
        auto decode_key = [&](auto g, u32(&pairs)[8]) { decode_group<g.value>(k, pairs, tables); };
        auto decode_value = [&](auto g, u32(&pairs)[8]) { decode_group<g.value>(v, pairs, tables); };
        fill(
            tiles.ring + number, is_small,
            [&](u32 even, u32 odd) {
                if (__builtin_expect(is_large, 0)) unpack_keys<LIFT, true>(even, odd, decode_key, key_scale);
                else unpack_keys<LIFT, false>(even, odd, decode_key, key_scale);
            },
            [&] {
                const LoadsDone done = last_load.wait();
                if (number + STAGES < count) pages.copy(done, tile + 4 * STAGES, next, raw, barrier);
                pages.load_blocks(tile + 4 * (STAGES + 1), next);
                raw += MICRO_BLOCK_BYTES, barrier += 8;
                if (barrier == first_barrier + 8 * STAGES) raw = first_raw, barrier = first_barrier;
                if (barrier == first_barrier + 8 * first_stage) raw_parity ^= 1;
            },
            [&](u32 target) {
                if (__builtin_expect(is_large || is_small, 0))
                    unpack_values<LIFT, true>(target, decode_value, value_scales, is_small);
                else unpack_values<LIFT, false>(target, decode_value, value_scales, false);
            });
    }
}

// ---- attending

struct RowState {
    float output[64];  // of channels 8 i + 2 column + {0, 1}, rows r and r + 8
    float maximum[2], total[2];
    u32 element;  // the maxima are those of scores without this bias, see `Biases`
};
// The element of the rows' biases, of a column or of one that the request has.
INLINE float load_bias(const Arguments& a, const Request& request, int row, u32 element) {
    return a.query_bias[request.row(blockIdx.y, request.has(row) ? row : 0) * a.bias_stride + element];
}

// Masks scores of a tile, and puts in them what `Biases` says: the correction of token 0, and the difference of the
// bias of a token's block to that of the tile's first one. The maxima become those of scores without the bias of the
// tile's first block.
INLINE void prepare_scores(const Arguments& a, const Request& request, const TeamTiles& tiles, int number, int end,
                           int row, const Lane& lane, RowState& state, float (&scores)[32]) {
    const bool is_ring = RING_BLOCK && number < tiles.ring;
    const u32 element = HAS_BIAS ? Biases::element(a, tiles.tile(number, 0)) : 0;
    for_each<2>([&](auto r) {
        const int own_row = row + 8 * r.value, limit = request.limit(own_row);
        const int last = is_ring ? limit : min(request.page_limit(limit), end);
        const int first = is_ring ? max(limit - RECENT, request.recent) : 0;
        float bias = 0;
        if constexpr (HAS_BIAS) {
            bias = load_bias(a, request, own_row, element);
            if (element != state.element) state.maximum[r.value] += load_bias(a, request, own_row, state.element) - bias;
        }
        for_each<4>([&](auto block) {
            const int tile = tiles.tile(number, block.value), token = 16 * tile + 2 * lane.column;
            float change = 0;
            if constexpr (HAS_BIAS) {
                const u32 own = Biases::element(a, tile);
                if (own != element) change = (load_bias(a, request, own_row, own) - bias) / PAGE_FACTOR;
                if (block.value == 0 && token == 0)
                    scores[2 * r.value] += load_bias(a, request, own_row, 0) / PAGE_FACTOR;
            }
            for_each<4>([&](auto i) {
                float& score = scores[8 * block.value + i.value / 2 * 4 + 2 * r.value + i.value % 2];
                const int own = token + i.value / 2 * 8 + i.value % 2;
                score = own >= first && own < last ? score + change : minus_infinity();
            });
        });
    });
    state.element = element;
}

// A lane's weights of a tile and row add up to less than this, so fp16 has each. If all scores are alike, its 16 are
// 2^HEADROOM, which must not look like a maximum that has to move (32 x 8192, 64 columns: 220 us for 180).
constexpr float CEILING = 32768;
static_assert(HEADROOM == 10, "16 weights of 2^HEADROOM are below the ceiling");

// Computes the weights of a tile in `p`, and returns whether the sum of a lane's exceeds `ceiling`.
INLINE bool weigh(const float (&scores)[32], const float (&maximum)[2], float ceiling, u32 (&p)[16], float (&sums)[2]) {
    sums[0] = sums[1] = 0;
    for_each<16>([&](auto k) {
        constexpr int r = k.value % 2;
        const float x = exp2_fast(__fmaf_rn(scores[2 * k.value], PAGE_FACTOR, -maximum[r]));
        const float y = exp2_fast(__fmaf_rn(scores[2 * k.value + 1], PAGE_FACTOR, -maximum[r]));
        sums[r] += x + y;
        p[k.value] = to_halves(x, y);
    });
    return any_lane(!(maximum_of(sums[0], sums[1]) < ceiling));
}

INLINE void add_scores(float (&scores)[32], u32 queries, u32 keys) {
    wgmma_fence();
    for_each<8>([&](auto k) {
        constexpr u32 step = (k.value / 4 * HALF_BYTES + k.value % 4 * 32) / 16;
        SharedProduct<64>::add(scores, queries + step, keys + step, k.value > 0);
    });
    wgmma_commit();
}

INLINE void attend_tiles(const Arguments& a, const Request& request, const TeamTiles& tiles, int end_tile, int warp,
                         const Lane& lane, RowState& state) {
    const u32 shared = shared_address(shared_memory());
    const u32 queries = matrix_descriptor(shared + AT(queries), 16), keys = matrix_descriptor(shared + AT(keys), 16);
    const u32 values = matrix_descriptor(shared + AT(values), 16);
    const int end = 16 * end_tile;
    int change = HAS_BIAS ? 0 : 1 << 30;  // the first token of the next block of means; 0: token 0 may come
    const int unmasked = min(request.page_limit(request.seq_len - request.count + 1), end);
    float(&o)[64] = state.output;
    for_each<64>([&](auto i) { o[i.value] = 0; });
    for_each<2>([&](auto r) { state.maximum[r.value] = -1e30f, state.total[r.value] = 0; });
    state.element = HAS_BIAS ? Biases::element(a, tiles.tile(0, 0)) : 0;
    if (tiles.all <= 0) return;
    float ceiling = 0, first_scores[32], second_scores[32];
    barrier_wait(shared + AT(keys_full), 0);
    add_scores(first_scores, queries, keys);
    // The scores of the next tile are computed while this one's become weights.
    auto turn = [&](int number, auto odd, auto is_last, float (&scores)[32], float (&next)[32]) {
        constexpr u32 stage = odd.value;
        const u32 parity = number / 2 % 2;
        if constexpr (!is_last.value) {
            barrier_wait(shared + AT(keys_full) + 8 * (stage ^ 1), (number + 1) / 2 % 2);
            add_scores(next, queries, keys + (stage ^ 1) * (TEAM_TILE_BYTES / 16));
        }
        const u32 small = load_shared(shared + AT(are_small) + 4 * stage);  // a byte for each 16 tokens
        wgmma_wait<!is_last.value>();
        sync_warp();
        if (lane.index == 0) arrive(shared + AT(keys_empty) + 8 * stage);
        // A tile of the ring, one with tokens of the next block of means, or one with tokens that a query does not see.
        if (__builtin_expect((RING_BLOCK && number <= tiles.ring) || 16 * tiles.tile(number, 4) > min(unmasked, change), 0)) {
            if (RING_BLOCK && number == tiles.ring)
                for_each<64>([&](auto i) { o[i.value] *= 1 / VALUE_GAIN; });
            prepare_scores(a, request, tiles, number, end, 16 * warp + lane.row, lane, state, scores);
            if constexpr (HAS_BIAS && TILES_A_BLOCK)
                change = 16 * (tiles.tile(number, 0) / Biases::DIVISOR + 1) * Biases::DIVISOR;
            else change = 1 << 30;
        }
        u32 p[16];
        float sums[2], factors[2] = {1, 1};
        const bool moves = weigh(scores, state.maximum, ceiling, p, sums);
        if (__builtin_expect(moves, 0)) {
            ceiling = CEILING;
            for_each<2>([&](auto r) {
                float top = -1e30f / PAGE_FACTOR;
                for_each<16>([&](auto i) {
                    top = maximum_of(top, scores[i.value / 2 * 4 + 2 * r.value + i.value % 2]);
                });
                top = maximum_of(top, shuffle_xor(top, 1)), top = maximum_of(top, shuffle_xor(top, 2));
                const float old = state.maximum[r.value], maximum = maximum_of(old, top * PAGE_FACTOR - HEADROOM);
                factors[r.value] = exp2_fast(old - maximum);
                state.total[r.value] *= factors[r.value], state.maximum[r.value] = maximum;
            });
            weigh(scores, state.maximum, ceiling, p, sums);
            for_each<64>([&](auto i) { o[i.value] *= factors[i.value / 2 % 2]; });
        }
        for_each<2>([&](auto r) { state.total[r.value] += sums[r.value]; });
        if (__builtin_expect(small, 0)) for_each<4>([&](auto k) {
            const u32 factor = small >> 8 * k.value & 1 ? halves_of(1.f / (1 << SMALL)) : halves_of(1);
            for_each<4>([&](auto i) { p[4 * k.value + i.value] = multiply_halves(p[4 * k.value + i.value], factor); });
        });
        barrier_wait(shared + AT(values_full) + 8 * stage, parity);
        const u32 own = values + stage * (TEAM_TILE_BYTES / 16);
        wgmma_fence();
        for_each<4>([&](auto k) { Product<128>::add(o, p + 4 * k.value, own + 2 * k.value, 1); });
        wgmma_commit();
        wgmma_wait<0>();  // ptxas serialises all products otherwise
        if (lane.index == 0) arrive(shared + AT(values_empty) + 8 * stage);
    };
    int number = 0;
#pragma unroll 1
    for (; number + 2 < tiles.all; number += 2) {
        turn(number, Index<0>{}, Index<0>{}, first_scores, second_scores);
        turn(number + 1, Index<1>{}, Index<0>{}, second_scores, first_scores);
    }
    if (number + 2 == tiles.all) {
        turn(number, Index<0>{}, Index<0>{}, first_scores, second_scores);
        turn(number + 1, Index<1>{}, Index<1>{}, second_scores, first_scores);
    } else {
        turn(number, Index<0>{}, Index<1>{}, first_scores, second_scores);
    }
}

// `gain`: what outputs are to be multiplied by.
INLINE void store_rows(const Arguments& a, const Request& request, int head, const WorkItem& item, int split,
                       int splits, int warp, const Lane& lane, const RowState& state, float gain) {
    float *weights = (float*)(shared_memory() + AT(raw)), *combined = weights + COLUMNS * 32;  // `weights`: of parts
    const bool is_alone = IS_FINAL && item.parts == 1;
    sync_columns();  // all warps have done with the tiles that were here
    for_each<2>([&](auto r) {
        float total = state.total[r.value];
        total += shuffle_xor(total, 1), total += shuffle_xor(total, 2);
        const int column = 16 * warp + lane.row + 8 * r.value;
        WeightedSum sum{state.maximum[r.value], total};
        if constexpr (HAS_BIAS) sum.maximum += load_bias(a, request, column, state.element);
        const bool writes_statistics = lane.column == 0 && request.has(column);
        float factor = gain;
        float* target = combined + column * ROW;
        if (is_alone) {
            factor = total > 0 ? factor / total : 0;
            if (HAS_LSE && writes_statistics) a.lse[request.row(head, column)] = sum.lse();
        } else {
            const long long row =
                IS_FINAL ? part_row(item, item.part, head, column) : request.row(head, column) * splits + split;
            target = a.partial_output + row * HEAD_DIM;
            if (writes_statistics) a.partial_stats[2 * row] = sum.maximum, a.partial_stats[2 * row + 1] = total;
        }
        if (is_alone || request.has(column)) for_each<16>([&](auto i) {
            const float* own = state.output + 4 * i.value + 2 * r.value;
            *(Floats*)(target + 8 * i.value + 2 * lane.column) = {own[0] * factor, own[1] * factor};
        });
    });
    if constexpr (IS_FINAL) end_block(a, request, head, item, is_alone, warp, lane, weights, combined);
}

INLINE void attend(const Arguments& a) {
    const Lane lane;
    const int group = warpgroup(), warp = threadIdx.x / 32 % 4, head = blockIdx.y;
    const WorkItem item(load_work_item(a));
    if (item.request < 0) return;
    const Request request(a, item);
    if (request.count <= 0) return;
    const int split = IS_FINAL ? 0 : blockIdx.x, splits = IS_FINAL ? 1 : gridDim.x;
    const TileRange range(request, item, split, splits);
    const TeamTiles tiles(request, range, split, splits);
    const u32 shared = shared_address(shared_memory());
    if (threadIdx.x == 0) {
        for (int i = 0; i < UNPACKERS * (STAGES + 1); i++) barrier_init<1>(shared + AT(raw_full) + 8 * i);
        for (int i = 0; i < 8; i++) barrier_init<4>(shared + AT(keys_full) + 8 * i);
        barrier_init_fence();
    }
    share_queries(a, request, head);
    sync_block();
    if (group == 0) {
        set_registers<ATTEND_REGISTERS, 128>();
        RowState state;
        attend_tiles(a, request, tiles, range.low + range.count, warp, lane, state);
        const float gain = (tiles.all > tiles.ring ? VALUE_GAIN : 1) / TEAM_UNIT;
        store_rows(a, request, head, item, split, splits, warp, lane, state, gain);
    } else {
        set_registers<UNPACK_REGISTERS, 128>();
        const Pages pages{a.cache + (u64)head * a.head_stride, a.block_table + (u64)request.index * a.table_stride,
                          a.block_stride, (request.seq_len - 1) / 16};
        unpack_tiles(a, request, pages, tiles, head, warp, lane);
    }
}

}  // namespace roles
