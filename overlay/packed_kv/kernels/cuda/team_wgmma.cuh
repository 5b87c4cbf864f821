// Products of a team by the instructions of warpgroups, for head_dim 128 and codes of 4 bits. What warps unpack are left
// operands in registers: 16 tokens of K each, then 32 channels of V each. Queries and weights lie in shared memory in
// panels, a row of 64 channels or tokens for each column. A tile is a micro-block for each warp.
#pragma once
#include "team.cuh"
#include "wgmma.cuh"

constexpr int PANEL_BYTES = 128 * COLUMNS;  // rows are swizzled as `matrix_descriptor` says
static_assert(WARPS == 4 && TILE_BLOCKS == 1 && HEAD_DIM == 128, "a warpgroup");

// Unpacked K and V are values times `TEAM_UNIT`: with that, fp16 has them all, whatever their scales. Codes are multiplied
// first by a power of 2, which is exact, and then by their scale.
//
// A power of 2 as both halves of a pair.
constexpr u32 halves_of(float power) {
    int exponent = 15;
    while (power > 1) power /= 2, exponent++;
    while (power < 1) power *= 2, exponent--;
    return exponent * 0x04000400u;
}

// The 16-byte piece of a column's row in a panel.
INLINE u32 piece_of_panel(int column, int piece) { return 128 * column + ((piece ^ column % 8) << 4); }

INLINE u32 panel_descriptor(u32 panel) { return matrix_descriptor(panel, 16); }

// Puts queries into shared memory.
INLINE void share_queries(const Arguments& a, const Request& request, int head) {
    constexpr int pieces = HEAD_DIM / 8;
    const u32 target = shared_address(shared_memory()) + QUERIES_AT;
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS * pieces; i += WARPS * 32) {
        const int column = i / pieces, piece = i % pieces;
        Quad q{0, 0, 0, 0};
        if (request.has(column)) q = ((const Quad*)a.query)[request.row(head, column) * pieces + piece];
        store_shared_4(target + piece / 8 * PANEL_BYTES + piece_of_panel(column, piece % 8), q);
    }
    fence_async();
}

// Computes the scores of a warp's micro-block. `decode` decodes a group into fp16 pairs, which times `lift` and the two
// tokens' scales are K in `TEAM_UNIT`.
template <class Decode>
INLINE void score_columns(u32 queries, Decode&& decode, float (&scores)[SCORES]) {
    u32 pairs[GROUPS][8];
    for_each<GROUPS>([&](auto g) {
        constexpr int group = g.value;
        u32(&p)[8] = pairs[group];
        decode(g, p);
        const u32 first[4] = {p[0], p[4], p[1], p[5]}, second[4] = {p[2], p[6], p[3], p[7]};
        const u32 columns = queries + (group / 2 * PANEL_BYTES + group % 2 * 64 >> 4);
        wgmma_fence();
        Product<COLUMNS>::add(scores, first, columns, group > 0);
        Product<COLUMNS>::add(scores, second, columns + 2, 1);
        wgmma_commit();
        wgmma_wait<(group < GROUPS - 1)>();
    });
}
// Multiplies the decoded pairs of K by their unit's factor and their tokens' scales, each twice in a pair.
template <u32 LIFT> INLINE void scale_key(u32 (&pairs)[8], u32 low, u32 high) {
    for_each<8>([&](auto i) {
        pairs[i.value] = multiply_halves(multiply_halves(pairs[i.value], LIFT), i.value < 4 ? low : high);
    });
}
template <u32 LIFT> INLINE void scale_value(u32 (&pairs)[8], u32 scales) {
    const u32 low = scale_pair(scales, 0x4140), high = scale_pair(scales, 0x4342);
    for_each<8>([&](auto i) {
        pairs[i.value] = multiply_halves(multiply_halves(pairs[i.value], LIFT), i.value % 2 ? high : low);
    });
}
template <int GROUP> constexpr u32 page_lift() { return halves_of(TEAM_UNIT * group_layout(GROUP).key_factor); }
template <int GROUP> constexpr float value_gain() {
    return group_layout(GROUP).value_factor / group_layout(GROUP).key_factor;
}
constexpr u32 RING_LIFT = halves_of(TEAM_UNIT * RING_UNIT);

INLINE void score_pages(const Tables& tables, const Lane& lane, u32 queries, u32 micro_block, float (&scores)[SCORES]) {
    Words words;
    load_words(words, micro_block + KEY_WORDS_AT, micro_block + KEY_HALF_WORDS_AT, lane.index);
    u32 scales[GROUPS / 2];
    load_key_scales(micro_block, lane, scales);
    score_columns(
        queries,
        [&](auto g, u32(&pairs)[8]) {
            constexpr int group = g.value, byte = group % 2 * 2;
            decode_group<group>(words, pairs, tables);
            scale_key<page_lift<group>()>(pairs, scale_pair(scales[group / 2], 0x4040 + 0x0101 * byte),
                                          scale_pair(scales[group / 2], 0x4141 + 0x0101 * byte));
        },
        scores);
}
INLINE void score_ring(const Lane& lane, u32 queries, u32 tile, float (&scores)[SCORES]) {
    const u32 address = tile + lane.row * RING_SLOT_BYTES + RING_KEY_SCALES_AT;
    const u32 low = load_shared(address), high = load_shared(address + 8 * RING_SLOT_BYTES);
    score_columns(
        queries,
        [&](auto g, u32(&pairs)[8]) {
            constexpr u32 selector = 0x4040 + 0x0101 * g.value;
            ring_key_pairs(tile, lane, g.value, pairs);
            scale_key<RING_LIFT>(pairs, scale_pair(low, selector), scale_pair(high, selector));
        },
        scores);
}

// Puts weights into shared memory, see `share_weights`.
struct WeightsOfWarp {
    u32 own;
    INLINE WeightsOfWarp(u32 panel, int warp, const Lane& lane)
        : own(panel + piece_of_panel(lane.index / 16 * 8 + lane.index % 8, 2 * warp + lane.index / 8 % 2)) {}
    INLINE u32 operand(u32 weights) const { return weights; }
    template <class Tile, class Pair> INLINE void operator()(Tile, Pair pair, const u32 (&x)[4]) const {
        store_matrices_transposed(own + pair.value * (16 * 128), x);
    }
    INLINE void finish() const { fence_async(); }
};

// Adds V of a tile. `unpack(i, pairs)` unpacks the warp's group of micro-block i, in `TEAM_UNIT`. Some
// products are still to be waited for at the end.
template <class Unpack> INLINE void add_values(TeamState& state, u32 weights, Unpack&& unpack) {
    const u32 columns = panel_descriptor(weights);
    u32 values[4][2][4];
    for_each<4>([&](auto i) {
        u32(&own)[2][4] = values[i.value];
        u32 p[8];
        unpack(i, p);
        for_each<2>([&](auto half) {
            constexpr int first = 4 * half.value;
            own[half.value][0] = p[first], own[half.value][1] = p[first + 2];
            own[half.value][2] = p[first + 1], own[half.value][3] = p[first + 3];
        });
        wgmma_fence();
        for_each<2>([&](auto half) {
            Product<COLUMNS>::add(state.output[half.value], own[half.value], columns + 2 * i.value, 1);
        });
        wgmma_commit();
        if constexpr (i.value < 3) wgmma_wait<1>();
    });
}

// The offset of a lane's word in a vector's words.
template <int WORD, int CHUNK = 0, int START = 0> INLINE u32 word_offset(int lane) {
    constexpr int width = chunk_width(CHUNK);
    if constexpr (WORD < START + width) return 128 * START + 4 * width * lane + 4 * (WORD - START);
    else return word_offset<WORD, CHUNK + 1, START + width>(lane);
}
// The addresses in a micro-block of the words and scales of V of the warp's group. Its warps unpack by the same
// instructions, which is faster than each by its own.
struct OwnValues {
    u32 words, scales;
    INLINE OwnValues(int warp, const Lane& lane) : words(0), scales(0) {
        for_own_group(warp, [&](auto group) {
            words = VALUE_WORDS_AT + word_offset<group_layout(group.value).word>(lane.index);
            scales = VALUE_SCALES_AT + lane.column * (4 * GROUPS) + 4 * group.value;
        });
    }
};

INLINE void add_pages(TeamState& state, const Tables& tables, const OwnValues& own, u32 tile, u32 weights) {
    u32 words[4][2], scales[4];
    for_each<4>([&](auto i) {
        const u32 micro_block = tile + i.value * MICRO_BLOCK_BYTES;
        load_shared_2(micro_block + own.words, words[i.value]);
        scales[i.value] = load_shared(micro_block + own.scales);
    });
    add_values(state, weights, [&](auto i, u32(&pairs)[8]) {
        for_each<2>([&](auto half) { decode_4_bits(words[i.value][half.value], pairs + 4 * half.value, tables); });
        scale_value<page_lift<0>()>(pairs, scales[i.value]);
    });
}
// The first token of the tile is `first`, and each warp's are `step` tokens after the former one's.
INLINE void add_ring(TeamState& state, const Request& request, int warp, const Lane& lane, u32 tile, int first, int step,
                     u32 weights) {
    add_values(state, weights, [&](auto i, u32(&pairs)[8]) {
        const u32 own = tile + i.value * RING_TILE_BYTES;
        u32 scales[SETS];
        ring_value_scales(request, own, first + i.value * step, lane, scales);
        for_own_group(warp, [&](auto group) {
            ring_value_pairs(own, lane, group.value, pairs);
            scale_value<RING_LIFT>(pairs, scales[group.value]);
        });
    });
    wgmma_wait<0>();
}

// What outputs of the ring are multiplied by before those of pages are added, and what all are at the end.
template <int GROUP> constexpr float ring_to_pages() { return 1 / value_gain<GROUP>(); }
template <int GROUP> constexpr float output_factor() { return value_gain<GROUP>() / TEAM_UNIT; }

INLINE WeightsOfWarp weights_of_ring(u32 weights, int warp, const Lane& lane) { return {weights, warp, lane}; }
INLINE WeightsOfWarp weights_of_pages(u32 weights, int warp, const Lane& lane) { return {weights, warp, lane}; }
