// A team of warps, which shares the unpacking of 32 or 64 columns: its scores, weights and outputs. `wide.cuh` says how.
#pragma once
#include "pages.cuh"

constexpr int TEAM_BLOCKS = WARPS * TILE_BLOCKS;  // micro-blocks of a team's tile
constexpr int TEAM_TOKENS = 16 * TEAM_BLOCKS;
constexpr int OPERAND = 32 * 16;  // bytes that a warp loads at once, 16 a lane
constexpr int WEIGHTS_OF_BLOCK = OCTETS / 2 * OPERAND, WEIGHTS_OF_TILE = TEAM_BLOCKS * WEIGHTS_OF_BLOCK;

// Shared memory: after what `decode.cu` says, queries [octet][group], weights [2][micro-block][two octets], and for each
// warp and column the maximum and the largest score of a tile.
constexpr int QUERIES_AT = WORK_ITEMS + WARPS * 16, WEIGHTS_AT = QUERIES_AT + OCTETS * GROUPS * OPERAND;
constexpr int MAXIMA_AT = WEIGHTS_AT + 2 * WEIGHTS_OF_TILE, TOPS_AT = MAXIMA_AT + 4 * WARPS * COLUMNS;
static_assert(WARPS == GROUPS && OCTETS % 2 == 0, "a warp for each group, and pairs of octets");
static_assert(SHARED_BYTES >= TOPS_AT + 4 * WARPS * COLUMNS, "shared memory");
static_assert(!IS_FINAL || SHARED_BYTES >= 4 * COLUMNS * (ROW + 32) + 16, "the combined outputs, and weights of parts");

// The headroom of weights, see `HEADROOM`. A lane sums those of all its columns, and compares the sum with the ceiling.
constexpr float WIDE_HEADROOM = HEADROOM - (OCTETS == 2 ? 1 : OCTETS == 4 ? 2 : 3);

// What a warp carries from tile to tile; outputs are those of its group of channels.
struct TeamState {
    float output[OCTETS][2][4];  // [..][channels 0-15, 16-31]; rows are channels
    float total[OWN];            // of the lane's tokens
    float ceiling;
    u32 watched;
    int bias_tile;  // the warp's maxima are those of scores of this tile of pages, see `Biases`

    INLINE TeamState() : ceiling(0), watched(LARGE_SCALES), bias_tile(0) {
        for_each<OCTETS * 8>([&](auto i) { output[i.value / 8][i.value / 4 % 2][i.value % 4] = 0; });
        for_each<OWN>([&](auto c) { total[c.value] = 0; });
    }
    INLINE void multiply(float factor) {
        for_each<OCTETS * 8>([&](auto i) { output[i.value / 8][i.value / 4 % 2][i.value % 4] *= factor; });
    }
};

// Calls `function` with the group of the warp.
template <class Function> INLINE void for_own_group(int warp, Function&& function) {
    for_each<GROUPS>([&](auto group) {
        if (warp == group.value) function(group);
    });
}

// The address of the numbers of this lane's first two columns in a row of columns; those of each octet are 32 bytes on.
INLINE u32 own_numbers(int at, int warp, const Lane& lane) {
    return shared_address(shared_memory()) + at + 4 * COLUMNS * warp + 8 * lane.column;
}

// Puts queries into shared memory, as `to_page_unit` of Queries has them if there is no ring.
INLINE void share_queries(const Arguments& a, const Request& request, int head, int warp, const Lane& lane) {
    for_each<OCTETS>([&](auto o) {
        const int column = 8 * o.value + lane.row;
        const u32* q = (const u32*)a.query + request.row(head, column) * (HEAD_DIM / 2) + lane.column + 16 * warp;
        const bool there = request.has(column);
        u32 pairs[4];
        for_each<4>([&](auto k) { pairs[k.value] = there ? q[4 * k.value] : 0; });
        store_shared_4(shared_address(shared_memory()) + QUERIES_AT + (o.value * GROUPS + warp) * OPERAND +
                           16 * lane.index, {pairs[0], pairs[1], pairs[2], pairs[3]});
    });
}
// Converts the queries for scores of pages; each warp those of its group.
INLINE void queries_to_page_unit(int warp, const Lane& lane) {
    for_own_group(warp, [&](auto group) {
        constexpr float factor = SCORE_UNIT * group_layout(group.value).key_factor;
        if constexpr (factor != 1) for_each<OCTETS>([&](auto o) {
            const u32 address = shared_address(shared_memory()) + QUERIES_AT +
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
    const u32 queries = shared_address(shared_memory()) + QUERIES_AT + 16 * lane.index;
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
    Words words[TILE_BLOCKS];
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

// Masks the V scales of a warp's tile in shared memory, where the other warps read them: only the first `count` tokens
// are stored. No copy follows to the stage of a tile at the end of a sequence.
INLINE void mask_shared_scales(const Lane& lane, u32 tile, int count) {
    if (count >= TILE_TOKENS || lane.row >= GROUPS) return;
    for_each<TILE_BLOCKS>([&](auto b) {
        const u32 scales = tile + b.value * MICRO_BLOCK_BYTES + VALUE_SCALES_AT;
        const u32 address = scales + lane.column * (4 * GROUPS) + 4 * lane.row;
        store_shared(address, load_shared(address) & stored_bytes(lane, count - 16 * b.value));
    });
}

// Moves the maxima of all warps to those of a tile's scores, whose V has `scale_bits`. All warps of the block call it.
template <int TILES>
INLINE void move_maxima(const Arguments& a, TeamState& state, int warp, const Lane& lane, float score_factor,
                        const float (&scores)[TILES][SCORES], u32 scale_bits) {
    float biases[OWN];
    for_each<OWN>([&](auto c) { biases[c.value] = 0; });
    if constexpr (HAS_BIAS) {
        const Biases bias(a, Request(a, shared_work_item()), hide_from_optimizer(blockIdx.y), lane);
        for_each<OWN>([&](auto c) {
            biases[c.value] = bias.load(a, c.value, Biases::element(a, state.bias_tile));
        });
    }
    const u32 tops = own_numbers(TOPS_AT, 0, lane), maxima = own_numbers(MAXIMA_AT, warp, lane);
    for_each<OWN>([&](auto c) {
        constexpr int r = c.value / 2 * 4 + c.value % 2;
        float top = -1e30f / score_factor;
        for_each<TILES>([&](auto t) {
            top = maximum_of(top, maximum_of(scores[t.value][r], scores[t.value][2 + r]));
        });
        for_each<3>([&](auto i) { top = maximum_of(top, shuffle_xor(top, 4 << i.value)); });
        if (lane.row == 0)
            store_shared(tops + 4 * COLUMNS * warp + c.value / 2 * 32 + c.value % 2 * 4,
                         __float_as_int(top * score_factor + biases[c.value]));
    });
    if (any_thread(scale_bits & LARGE_SCALES)) state.watched = 0;
    const float headroom = state.watched ? WIDE_HEADROOM : WIDE_HEADROOM - HEADROOM - 2;
    state.ceiling = state.watched ? 16384 : 1;
    for_each<OWN>([&](auto c) {
        constexpr int column = c.value / 2 * 32 + c.value % 2 * 4;
        float top = -1e30f;
        for_each<WARPS>([&](auto w) {
            top = maximum_of(top, __int_as_float(load_shared(tops + 4 * COLUMNS * w.value + column)));
        });
        const float old = __int_as_float(load_shared(maxima + column)) + biases[c.value];
        const float maximum = maximum_of(old, top - headroom), factor = exp2_fast(old - maximum);
        state.total[c.value] *= factor;
        for_each<4>([&](auto i) { state.output[c.value / 2][i.value / 2][i.value % 2 * 2 + c.value % 2] *= factor; });
        sync_warp();
        if (lane.row == 0) store_shared(maxima + column, __float_as_int(maximum - biases[c.value]));
    });
    sync_warp();
}

// Computes the weights of TILES micro-blocks, and puts them into shared memory at `target` as right operands of `mma`.
// Returns whether the maxima must move first; then the tile is to be scored again. All warps call it.
template <int TILES>
INLINE bool share_weights(TeamState& state, int warp, const Lane& lane, float score_factor, bool moved,
                          const float (&scores)[TILES][SCORES], u32 scale_bits, u32 target) {
    const u32 maxima = own_numbers(MAXIMA_AT, warp, lane);
    float sums[OWN], sum = 0;
    for_each<OCTETS / 2>([&](auto pair) {
        constexpr int first_octet = 2 * pair.value;
        float top[4];
        for_each<2>([&](auto o) { load_shared_2(maxima + 32 * (first_octet + o.value), (u32*)top + 2 * o.value); });
        for_each<TILES>([&](auto t) {
            constexpr bool is_first = t.value == 0;
            u32 operands[4];
            for_each<2>([&](auto o) {
                constexpr int octet = first_octet + o.value, own = 2 * octet;
                float weights[4];
                for_each<4>([&](auto r) {
                    weights[r.value] = exp2_fast(__fmaf_rn(scores[t.value][4 * octet + r.value], score_factor,
                                                           -top[2 * o.value + r.value % 2]));
                });
                for_each<2>([&](auto c) {
                    const float both = weights[c.value] + weights[2 + c.value];
                    sums[own + c.value] = is_first ? both : sums[own + c.value] + both;
                    operands[2 * o.value + c.value] =
                        transpose_matrix(to_halves(weights[2 * c.value], weights[2 * c.value + 1]));
                });
            });
            store_shared_4(target + t.value * WEIGHTS_OF_BLOCK + pair.value * OPERAND + 16 * lane.index,
                           {operands[0], operands[1], operands[2], operands[3]});
        });
        for_each<4>([&](auto c) { sum += sums[4 * pair.value + c.value]; });
    });
    if (any_thread(!moved && ((scale_bits & state.watched) != 0 || !(sum < state.ceiling)))) return true;
    for_each<OWN>([&](auto c) { state.total[c.value] += sums[c.value]; });
    return false;
}

// Adds V of 16 tokens, decoded to `pairs`, multiplied by the weights at `weights`. `scales` has one byte per token n3 n0.
INLINE void add_group(TeamState& state, const u32 (&pairs)[8], u32 scales, u32 weights) {
    const u32 low_scales = scale_pair(scales, 0x4140), high_scales = scale_pair(scales, 0x4342);
    for_each<OCTETS / 2>([&](auto pair) {
        u32 words[4];
        load_shared_4(weights + pair.value * OPERAND, words);
        for_each<2>([&](auto o) {
            float(&output)[2][4] = state.output[2 * pair.value + o.value];
            const u32 low = multiply_halves(low_scales, words[2 * o.value]);
            const u32 high = multiply_halves(high_scales, words[2 * o.value + 1]);
            mma(output[0], pairs[0], pairs[2], pairs[1], pairs[3], low, high);
            mma(output[1], pairs[4], pairs[6], pairs[5], pairs[7], low, high);
        });
    });
}

// Adds V of a tile of pages.
template <int GROUP>
INLINE void add_group_of_tile(TeamState& state, const Tables& tables, const Lane& lane, u32 tile, u32 weights) {
#pragma unroll 4
    for (int i = 0; i < TEAM_BLOCKS; i++) {
        const u32 micro_block = tile + i * MICRO_BLOCK_BYTES;
        Words words;
        load_group_words<GROUP>(words, micro_block + VALUE_WORDS_AT, micro_block + VALUE_HALF_WORDS_AT, lane.index);
        const u32 scales = load_shared(micro_block + VALUE_SCALES_AT + lane.column * (4 * GROUPS) + 4 * GROUP);
        u32 pairs[8];
        decode_group<GROUP>(words, pairs, tables);
        add_group(state, pairs, scales, weights + i * WEIGHTS_OF_BLOCK);
    }
}
