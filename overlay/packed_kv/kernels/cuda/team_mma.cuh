// Products of a team by `mma`: queries [octet][group] and weights [micro-block][two octets] lie in shared memory as right
// operands. A tile is TILE_BLOCKS micro-blocks a warp.
#pragma once
#include "team.cuh"

namespace wide {

constexpr int WEIGHTS_OF_BLOCK = OCTET_PAIRS * OPERAND;

// Puts queries into shared memory; without a ring, in the unit of `Queries::to_page_unit`.
INLINE void share_queries(const Arguments& a, const Request& request, int head, int warp, const Lane& lane) {
    for_each<OCTETS * OWN_GROUPS>([&](auto i) {
        constexpr int octet = i.value / OWN_GROUPS;
        const int column = 8 * octet + lane.row, group = warp * OWN_GROUPS + i.value % OWN_GROUPS;
        const u32* q = (const u32*)a.query + request.row(head, column) * (HEAD_DIM / 2) + lane.column + 16 * group;
        const bool there = request.has(column);
        u32 pairs[4];
        for_each<4>([&](auto k) { pairs[k.value] = there ? q[4 * k.value] : 0; });
        store_shared_4(shared_address(shared_memory()) + AT(team.queries) + (octet * GROUPS + group) * OPERAND +
                           16 * lane.index, {pairs[0], pairs[1], pairs[2], pairs[3]});
    });
}
// Converts the queries for scores of pages; each warp converts its groups'.
INLINE void queries_to_page_unit(int warp, const Lane& lane) {
    for_own_groups(warp, [&](auto group) {
        constexpr float factor = SCORE_UNIT * Key::group(group.value).factor;
        if constexpr (factor != 1) for_each<OCTETS>([&](auto o) {
            const u32 address = shared_address(shared_memory()) + AT(team.queries) +
                                (o.value * GROUPS + group.value) * OPERAND + 16 * lane.index;
            u32 q[4];
            load_shared_4(address, q);
            for_each<4>([&](auto k) { q[k.value] = multiply_halves(q[k.value], to_halves(factor, factor)); });
            store_shared_4(address, {q[0], q[1], q[2], q[3]});
        });
    });
}

// Computes the scores of TILES micro-blocks. `decode` decodes a group of one into fp16 pairs; `scale` returns its two
// scales.
template <int TILES, class Decode, class Scale>
INLINE void score_octets(const Lane& lane, Decode&& decode, Scale&& scale, float (&scores)[TILES][SCORES]) {
    const u32 queries = shared_address(shared_memory()) + AT(team.queries) + 16 * lane.index;
    for_each<GROUPS>([&](auto g) {
        constexpr int group = g.value;
        u32 pairs[TILES][8];
        float factors[TILES][2];
        for_each<TILES>([&](auto b) {
            decode(b, g, pairs[b.value]);
            scale(b, g, factors[b.value][0], factors[b.value][1]);
        });
        for_each<OCTETS>([&](auto o) {
            constexpr int octet = o.value;
            u32 q[4];
            load_shared_4(queries + (octet * GROUPS + group) * OPERAND, q);
            for_each<TILES>([&](auto b) {
                const u32(&p)[8] = pairs[b.value];
                float sums[4];
                mma(sums, p[0], p[4], p[1], p[5], q[0], q[1], 0, 0, 0, 0);
                mma(sums, p[2], p[6], p[3], p[7], q[2], q[3]);
                for_each<4>([&](auto r) {
                    float& score = scores[b.value][4 * octet + r.value];
                    const float factor = factors[b.value][r.value / 2];
                    if constexpr (group == 0) score = sums[r.value] * factor;
                    else score = __fmaf_rn(sums[r.value], factor, score);
                });
            });
        });
    });
}

// Computes the scores of a warp's own micro-blocks, and loads their V scales.
INLINE void score_team_tile(const Tables& tables, const Lane& lane, u32 tile, float (&scores)[TILE_BLOCKS][SCORES],
                            u32 (&scales)[TILE_BLOCKS][SETS]) {
    Words<Key> words[TILE_BLOCKS];
    u32 key_scales[TILE_BLOCKS][GROUPS / 2];
    for_each<TILE_BLOCKS>([&](auto b) {
        const u32 micro_block = tile + b.value * MICRO_BLOCK_BYTES;
        load_words(words[b.value], micro_block + KEY_WORDS_AT, micro_block + KEY_HALF_WORDS_AT, lane.index);
        load_scales(micro_block, lane, key_scales[b.value], scales[b.value]);
    });
    score_octets<TILE_BLOCKS>(
        lane, [&](auto b, auto group, u32* pairs) { decode_group<group.value>(words[b.value], pairs, tables); },
        [&](auto b, auto group, float& low, float& high) {
            const u32 pair = scale_pair(key_scales[b.value][group.value / 2], group.value % 2 ? 0x4342 : 0x4140);
            low = low_float(pair), high = high_float(pair);
        },
        scores);
}

// Puts weights into shared memory, see `share_weights`; the warp's weights begin at `target`.
struct WeightsOfWarp {
    u32 target;
    const Lane& lane;
    INLINE u32 operand(u32 weights) const { return transpose_matrix(weights); }
    template <class Tile, class Pair> INLINE void operator()(Tile tile, Pair pair, const u32 (&x)[4]) const {
        store_shared_4(target + tile.value * WEIGHTS_OF_BLOCK + pair.value * OPERAND + 16 * lane.index,
                       {x[0], x[1], x[2], x[3]});
    }
    INLINE void finish() const {}
};

INLINE void load_weights(u32 weights, int pair, u32 (&operands)[4]) { load_shared_4(weights + pair * OPERAND, operands); }

// Adds V of 16 tokens and one group, decoded to `pairs`, multiplied by weights; `load` loads the weights of a pair of
// octets. `scales` has one byte per token n3 n0.
template <class Load>
INLINE void add_group(float (&output)[2][SCORES], const u32 (&pairs)[8], u32 scales, Load&& load) {
    const u32 low_scales = scale_pair(scales, 0x4140), high_scales = scale_pair(scales, 0x4342);
    for_each<OCTET_PAIRS>([&](auto pair) {
        constexpr int first_octet = 2 * pair.value;
        u32 words[4];
        load(pair, words);
        for_each<octets_of_pair(first_octet / 2)>([&](auto o) {
            constexpr int first = 4 * (first_octet + o.value);
            float(&low_channels)[4] = *(float(*)[4])(output[0] + first);
            float(&high_channels)[4] = *(float(*)[4])(output[1] + first);
            const u32 low = multiply_halves(low_scales, words[2 * o.value]);
            const u32 high = multiply_halves(high_scales, words[2 * o.value + 1]);
            mma(low_channels, pairs[0], pairs[2], pairs[1], pairs[3], low, high);
            mma(high_channels, pairs[4], pairs[6], pairs[5], pairs[7], low, high);
        });
    });
}

// Adds V of a tile of pages, of the groups from FIRST on. Several groups share the loads of weights.
template <int FIRST>
INLINE void add_groups_of_tile(TeamState& state, const Tables& tables, const Lane& lane, u32 tile, u32 weights) {
#pragma unroll(OWN_GROUPS > 1 ? 1 : GROUPS > 4 ? 2 : 4)
    for (int i = 0; i < TEAM_BLOCKS; i++) {
        const u32 micro_block = tile + i * MICRO_BLOCK_BYTES, own_weights = weights + i * WEIGHTS_OF_BLOCK;
        u32 shared[OCTET_PAIRS][4];
        if constexpr (OWN_GROUPS > 1)
            for_each<OCTET_PAIRS>([&](auto pair) { load_weights(own_weights, pair.value, shared[pair.value]); });
        for_each<OWN_GROUPS>([&](auto own) {
            constexpr int group = FIRST + own.value;
            Words<Value> words;
            load_group_words<group>(words, micro_block + VALUE_WORDS_AT, micro_block + VALUE_HALF_WORDS_AT, lane.index);
            const u32 scales = load_shared(micro_block + VALUE_SCALES_AT + lane.column * (4 * GROUPS) + 4 * group);
            u32 pairs[8];
            decode_group<group>(words, pairs, tables);
            add_group(state.output[own.value], pairs, scales, [&](auto pair, u32(&operands)[4]) {
                if constexpr (OWN_GROUPS > 1)
                    for_each<4>([&](auto k) { operands[k.value] = shared[pair.value][k.value]; });
                else load_weights(own_weights, pair.value, operands);
            });
        });
    }
}

// Adds V of a tile of the ring, 16 tokens per warp; the first is `first`, and each warp's tokens begin `step` tokens
// after the previous warp's.
template <int GROUP>
INLINE void add_group_of_ring(TeamState& state, const Request& request, const Lane& lane, u32 tile, int first, int step,
                              u32 weights) {
#pragma unroll 1
    for (int i = 0; i < RING_WARPS; i++) {
        const u32 own = tile + i * RING_TILE_BYTES;
        u32 scales[SETS], pairs[8];
        ring_value_scales(request, own, first + i * step, lane, scales);
        ring_value_pairs(own, lane, GROUP, pairs);
        add_group(state.output[GROUP % OWN_GROUPS], pairs, scales[GROUP], [&](auto pair, u32(&operands)[4]) {
            load_weights(weights + i * WEIGHTS_OF_BLOCK, pair.value, operands);
        });
    }
}
INLINE void add_ring(TeamState& state, const Request& request, int warp, const Lane& lane, u32 tile, int first, int step,
                     u32 weights) {
    for_own_groups(warp, [&](auto group) {
        add_group_of_ring<group.value>(state, request, lane, tile, first, step, weights + 16 * lane.index);
    });
}
INLINE void score_ring(const Lane& lane, u32 tile, float (&scores)[1][SCORES]) {
    score_octets<1>(
        lane, [&](auto, auto group, u32* pairs) { ring_key_pairs(tile, lane, group.value, pairs); },
        [&](auto, auto group, float& low, float& high) { ring_key_scales(tile, lane, group.value, low, high); },
        scores);
}

// Factors of the ring's outputs before the pages' outputs are added, and of all outputs at the end.
template <int GROUP> constexpr float ring_to_pages() { return RING_UNIT / Value::group(GROUP).factor; }
template <int GROUP> constexpr float output_factor() { return Value::group(GROUP).factor; }

INLINE WeightsOfWarp weights_of_ring(u32 weights, int warp, const Lane& lane) {
    return {weights + warp * WEIGHTS_OF_BLOCK, lane};
}
INLINE WeightsOfWarp weights_of_pages(u32 weights, int warp, const Lane& lane) {
    return {weights + warp * (TILE_BLOCKS * WEIGHTS_OF_BLOCK), lane};
}

}  // namespace wide
