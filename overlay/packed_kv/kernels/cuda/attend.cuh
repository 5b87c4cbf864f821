// Attention of one warp over tiles of tokens, for up to 8 columns.
#pragma once
#include "columns.cuh"

// What a warp carries from tile to tile.
struct State {
    float output[GROUPS][2][4];  // [group][channels 0-15, 16-31]; rows are channels
    float maximum[2], total[2];  // of this lane's columns, see `Biases`; a total is of this lane's tokens
    float ceiling;
    u32 watched;  // bits of scales that end the headroom; 0 once it has ended

    INLINE State() : maximum{-1e30f, -1e30f}, total{0, 0}, ceiling(0), watched(LARGE_SCALES) {
        for_each<GROUPS * 8>([&](auto i) { output[i.value / 8][i.value / 4 % 2][i.value % 4] = 0; });
    }
    INLINE void shrink(int column, float factor) {
        total[column] *= factor;
        for_each<GROUPS * 4>([&](auto i) { output[i.value / 4][i.value / 2 % 2][i.value % 2 * 2 + column] *= factor; });
    }
};

struct Queries {
    u32 pairs[GROUPS][4];  // [group][channels 8 k + 2 column ..]

    // Converts queries for scores of pages. Scores of the ring need no conversion: all its codes have one unit.
    INLINE void to_page_unit() {
        for_each<GROUPS * 4>([&](auto i) {
            constexpr int group = i.value / 4;
            constexpr float factor = SCORE_UNIT * group_layout(group).key_factor;
            u32& pair = pairs[group][i.value % 4];
            if constexpr (factor != 1) pair = multiply_halves(pair, to_halves(factor, factor));
        });
    }
};

// Computes the weights of TILES micro-blocks, 2^(score * score_factor - maximum), and their sums per column.
template <int TILES>
INLINE void softmax_weights(const State& state, const float (&scores)[TILES][4], float score_factor,
                            float (&weights)[TILES][4], float (&sums)[2]) {
    for_each<TILES * 4>([&](auto i) {
        constexpr int tile = i.value / 4, r = i.value % 4;
        weights[tile][r] = exp2_fast(__fmaf_rn(scores[tile][r], score_factor, -state.maximum[r % 2]));
    });
    for_each<TILES * 2>([&](auto i) {
        constexpr int tile = i.value / 2, c = i.value % 2;
        const float sum = weights[tile][c] + weights[tile][2 + c];
        sums[c] = tile == 0 ? sum : sums[c] + sum;
    });
}

// Updates the state for the scores of TILES micro-blocks, and returns their weights as right operands of `mma`,
// [TILES][n3]. `scales` are those of V.
template <int TILES>
INLINE void online_softmax_update(State& state, const float (&scores)[TILES][4], float score_factor,
                                  const u32 (&scales)[TILES][SETS], u32 (&operands)[TILES][2]) {
    float weights[TILES][4], sums[2];
    softmax_weights(state, scores, score_factor, weights, sums);
    u32 bytes = 0;
    for_each<TILES * SETS>([&](auto i) { bytes |= scales[i.value / SETS][i.value % SETS]; });
    if (any_lane((bytes & state.watched) != 0 || !(sums[0] + sums[1] < state.ceiling))) {
        if (any_lane(bytes & LARGE_SCALES)) state.watched = 0;
        const float headroom = state.watched ? HEADROOM : -2;
        state.ceiling = state.watched ? 16384 : 1;
        for_each<2>([&](auto c) {
            float top = -1e30f / score_factor;
            for_each<TILES>([&](auto t) {
                top = maximum_of(top, maximum_of(scores[t.value][c.value], scores[t.value][2 + c.value]));
            });
            for_each<3>([&](auto i) { top = maximum_of(top, shuffle_xor(top, 4 << i.value)); });
            float maximum = maximum_of(state.maximum[c.value], top * score_factor - headroom);
            state.shrink(c.value, exp2_fast(state.maximum[c.value] - maximum));
            state.maximum[c.value] = maximum;
        });
        softmax_weights(state, scores, score_factor, weights, sums);
    }
    state.total[0] += sums[0], state.total[1] += sums[1];
    for_each<TILES>([&](auto t) {
        operands[t.value][0] = transpose_matrix(to_halves(weights[t.value][0], weights[t.value][1]));
        operands[t.value][1] = transpose_matrix(to_halves(weights[t.value][2], weights[t.value][3]));
    });
}

// Computes the scores of 16 tokens, the rows of an accumulator. `decode` decodes a group into fp16 pairs; `scale`
// returns a set's two scales.
template <class Decode, class Scale>
INLINE void score(const Queries& queries, Decode&& decode, Scale&& scale, float (&scores)[4]) {
    for_each<SETS>([&](auto s) {
        constexpr int set = s.value;
        float sums[4];
        for_each<GROUPS_PER_SET>([&](auto i) {
            constexpr int group = set * GROUPS_PER_SET + i.value;
            u32 pairs[8];
            decode(Index<group>{}, pairs);
            const u32* q = queries.pairs[group];
            if constexpr (i.value == 0) mma(sums, pairs[0], pairs[4], pairs[1], pairs[5], q[0], q[1], 0, 0, 0, 0);
            else mma(sums, pairs[0], pairs[4], pairs[1], pairs[5], q[0], q[1]);
            mma(sums, pairs[2], pairs[6], pairs[3], pairs[7], q[2], q[3]);
        });
        float low, high;
        scale(s, low, high);
        for_each<4>([&](auto r) {
            float factor = r.value < 2 ? low : high;
            if constexpr (set == 0) scores[r.value] = sums[r.value] * factor;
            else scores[r.value] = __fmaf_rn(sums[r.value], factor, scores[r.value]);
        });
    });
    if constexpr (TWICE) for_each<4>([&](auto r) { scores[r.value] += shuffle_xor(scores[r.value], 2); });
}

// Adds the V of 16 tokens, multiplied by the weights `operands`. `scales` [set] has one byte per token n3 n0.
template <class Decode>
INLINE void add_values(State& state, Decode&& decode, const u32 (&scales)[SETS], const u32 (&operands)[2]) {
    for_each<SETS>([&](auto s) {
        constexpr int set = s.value;
        u32 low = multiply_halves(scale_pair(scales[set], 0x4140), operands[0]);
        u32 high = multiply_halves(scale_pair(scales[set], 0x4342), operands[1]);
        for_each<GROUPS_PER_SET>([&](auto i) {
            constexpr int group = set * GROUPS_PER_SET + i.value;
            u32 pairs[8];
            decode(Index<group>{}, pairs);
            mma(state.output[group][0], pairs[0], pairs[2], pairs[1], pairs[3], low, high);
            mma(state.output[group][1], pairs[4], pairs[6], pairs[5], pairs[7], low, high);
        });
    });
}

INLINE Queries load_queries(const Arguments& a, const Request& request, int head, const Lane& lane) {
    Queries queries;
    const u32* q = (const u32*)a.query + request.row(head, lane.row % COLUMNS) * (HEAD_DIM / 2) + lane.column;
    const bool there = request.has(lane.row % COLUMNS);
    for_each<GROUPS>([&](auto g) {
        constexpr int group = g.value;
        const bool takes_part = there && (!TWICE || lane.row / 4 == group % 2);
        for_each<4>([&](auto k) { queries.pairs[group][k.value] = takes_part ? q[group * 16 + 4 * k.value] : 0; });
    });
    return queries;
}
