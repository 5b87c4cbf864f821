// Attention of one warp over tiles of tokens, for up to 32 columns. A tile is unpacked once for all of them.
#pragma once
#include "combine.cuh"

namespace narrow {

// Queries of 24 and 32 columns lie in shared memory, once for each warp: a lane reads what it wrote. Others are in
// registers.
constexpr bool SHARES_QUERIES = OCTETS > 2;
// Shared memory at the end, in place of the stages of all warps.
struct WarpResults {
    float statistics[WARPS][COLUMNS][2], outputs[WARPS][COLUMNS][ROW];
    Combined combined;
};
static_assert(!IS_FINAL || WARPS * ROW >= 32, "the weights of 32 parts replace the outputs of the warps");
struct Tiles {
    u8 stages[WARPS][STAGES][STAGE_BYTES];
    u8 queries[WARPS][2 * COLUMNS * HEAD_DIM];  // fp16 [octet][group][lane][8], with SHARES_QUERIES
};
struct SharedMemory {
    Front front;
    alignas(16) u8 rest[most_of(SHARES_QUERIES ? sizeof(Tiles) : sizeof(Tiles::stages),
                                IS_FINAL ? sizeof(WarpResults) : 0)];  // `Tiles`, then `WarpResults`
};
static_assert(AT(rest) == STAGES_AT, "where `Stages` has them");

// What a warp carries from tile to tile.
struct State {
    float output[OCTETS][GROUPS][2][4];  // [..][group][channels 0-15, 16-31]; rows are channels
    float maximum[OWN], total[OWN];      // of this lane's columns, see `Biases`; a total is of this lane's tokens
    float ceiling;
    u32 scale_guard;  // bits of scales that end the headroom; 0 after its end

    INLINE State() : ceiling(0), scale_guard(LARGE_SCALES) {
        for_each<OWN>([&](auto c) { maximum[c.value] = -1e30f, total[c.value] = 0; });
        for_each<OCTETS * GROUPS * 8>([&](auto i) {
            output[i.value / 8 / GROUPS][i.value / 8 % GROUPS][i.value / 4 % 2][i.value % 4] = 0;
        });
    }
    INLINE void shrink(int own, float factor) {
        total[own] *= factor;
        for_each<GROUPS * 4>([&](auto i) {
            output[own / 2][i.value / 4][i.value / 2 % 2][i.value % 2 * 2 + own % 2] *= factor;
        });
    }
};

// Queries as right operands of products, [octet][group][channels 8 k + 2 column ..].
struct Queries {
    u32 pairs[SHARES_QUERIES ? 1 : OCTETS][GROUPS][4], address;

    INLINE Queries(int warp, const Lane& lane)
        : address(shared_address(shared_memory()) + AT(rest) + OFFSET_OF(Tiles, queries) +
                  warp * sizeof(Tiles::queries[0]) + 16 * lane.index) {}
    INLINE void load_pairs(int octet, int group, u32 (&q)[4]) const {
        if (SHARES_QUERIES) load_shared_4(address + (octet * GROUPS + group) * 512, q);
        else for_each<4>([&](auto k) { q[k.value] = pairs[octet][group][k.value]; });
    }
    INLINE void store(int octet, int group, const u32 (&q)[4]) {
        if (SHARES_QUERIES) store_shared_4(address + (octet * GROUPS + group) * 512, {q[0], q[1], q[2], q[3]});
        else for_each<4>([&](auto k) { pairs[octet][group][k.value] = q[k.value]; });
    }
    // Converts queries for scores of pages. Scores of the ring need no conversion: all its codes have one unit.
    INLINE void to_page_unit() {
        for_each<OCTETS * GROUPS>([&](auto i) {
            constexpr int octet = i.value / GROUPS, group = i.value % GROUPS;
            constexpr float factor = SCORE_UNIT * Key::group(group).factor;
            if constexpr (factor != 1) {
                u32 q[4];
                load_pairs(octet, group, q);
                for_each<4>([&](auto k) { q[k.value] = multiply_halves(q[k.value], to_halves(factor, factor)); });
                store(octet, group, q);
            }
        });
    }
};

// Computes the weights of TILES micro-blocks, 2^(score * score_factor - maximum), and their sums per column.
template <int TILES>
INLINE void softmax_weights(const State& state, const float (&scores)[TILES][SCORES], float score_factor,
                            float (&weights)[TILES][SCORES], float (&sums)[OWN]) {
    for_each<TILES * SCORES>([&](auto i) {
        constexpr int tile = i.value / SCORES, r = i.value % SCORES;
        weights[tile][r] = exp2_fast(__fmaf_rn(scores[tile][r], score_factor, -state.maximum[own_of_score(r)]));
    });
    for_each<TILES * OWN>([&](auto i) {
        constexpr int tile = i.value / OWN, c = i.value % OWN, r = c / 2 * 4 + c % 2;
        const float sum = weights[tile][r] + weights[tile][2 + r];
        sums[c] = tile == 0 ? sum : sums[c] + sum;
    });
}

// Updates the state for the scores of TILES micro-blocks, and returns their weights as right operands of `mma`,
// [TILES][octet, n3]. `scales` are V's.
template <int TILES>
INLINE void online_softmax_update(State& state, const float (&scores)[TILES][SCORES], float score_factor,
                                  const u32 (&scales)[TILES][SETS], u32 (&operands)[TILES][OWN]) {
    float weights[TILES][SCORES], sums[OWN];
    softmax_weights(state, scores, score_factor, weights, sums);
    u32 bytes = 0;
    for_each<TILES * SETS>([&](auto i) { bytes |= scales[i.value / SETS][i.value % SETS]; });
    float sum = sums[0] + sums[1];
    for_each<OCTETS - 1>([&](auto o) { sum += sums[2 * o.value + 2] + sums[2 * o.value + 3]; });
    if (any_lane((bytes & state.scale_guard) != 0 || !(sum < state.ceiling))) {
        if (any_lane(bytes & LARGE_SCALES)) state.scale_guard = 0;
        const float headroom = state.scale_guard ? HEADROOM : -2;
        state.ceiling = state.scale_guard ? 16384 : 1;
        for_each<OWN>([&](auto c) {
            constexpr int r = c.value / 2 * 4 + c.value % 2;
            float top = -1e30f / score_factor;
            for_each<TILES>([&](auto t) {
                top = maximum_of(top, maximum_of(scores[t.value][r], scores[t.value][2 + r]));
            });
            for_each<3>([&](auto i) { top = maximum_of(top, shuffle_xor(top, 4 << i.value)); });
            float maximum = maximum_of(state.maximum[c.value], top * score_factor - headroom);
            state.shrink(c.value, exp2_fast(state.maximum[c.value] - maximum));
            state.maximum[c.value] = maximum;
        });
        softmax_weights(state, scores, score_factor, weights, sums);
    }
    for_each<OWN>([&](auto c) { state.total[c.value] += sums[c.value]; });
    for_each<TILES * OWN>([&](auto i) {
        const float* pair = &weights[i.value / OWN][i.value % OWN * 2];
        operands[i.value / OWN][i.value % OWN] = transpose_matrix(to_halves(pair[0], pair[1]));
    });
}

// Computes the scores of 16 tokens, the rows of accumulators. `decode` decodes a group into fp16 pairs; `scale`
// returns a set's two scales.
template <class Decode, class Scale>
INLINE void score(const Queries& queries, Decode&& decode, Scale&& scale, float (&scores)[SCORES]) {
    for_each<SETS>([&](auto s) {
        constexpr int set = s.value;
        float sums[OCTETS][4];
        for_each<GROUPS_PER_SET>([&](auto i) {
            constexpr int group = set * GROUPS_PER_SET + i.value;
            constexpr bool is_first = i.value == 0;  // NVRTC takes no constant from a captured `i`
            u32 pairs[8];
            decode(Index<group>{}, pairs);
            for_each<OCTETS>([&](auto o) {
                float(&sum)[4] = sums[o.value];
                u32 q[4];
                queries.load_pairs(o.value, group, q);
                if constexpr (is_first) mma(sum, pairs[0], pairs[4], pairs[1], pairs[5], q[0], q[1], 0, 0, 0, 0);
                else mma(sum, pairs[0], pairs[4], pairs[1], pairs[5], q[0], q[1]);
                mma(sum, pairs[2], pairs[6], pairs[3], pairs[7], q[2], q[3]);
            });
        });
        float low, high;
        scale(s, low, high);
        for_each<SCORES>([&](auto r) {
            const float factor = r.value % 4 < 2 ? low : high, sum = sums[r.value / 4][r.value % 4];
            if constexpr (set == 0) scores[r.value] = sum * factor;
            else scores[r.value] = __fmaf_rn(sum, factor, scores[r.value]);
        });
    });
    if constexpr (TWICE) for_each<4>([&](auto r) { scores[r.value] += shuffle_xor(scores[r.value], 2); });
}

// Adds the V of 16 tokens, multiplied by the weights `operands`. `scales` [set] has one byte per token n3 n0.
template <class Decode>
INLINE void add_values(State& state, Decode&& decode, const u32 (&scales)[SETS], const u32 (&operands)[OWN]) {
    for_each<SETS>([&](auto s) {
        constexpr int set = s.value;
        const u32 low_scales = scale_pair(scales[set], 0x4140), high_scales = scale_pair(scales[set], 0x4342);
        u32 low[OCTETS], high[OCTETS];
        for_each<OCTETS>([&](auto o) {
            low[o.value] = multiply_halves(low_scales, operands[2 * o.value]);
            high[o.value] = multiply_halves(high_scales, operands[2 * o.value + 1]);
        });
        for_each<GROUPS_PER_SET>([&](auto i) {
            constexpr int group = set * GROUPS_PER_SET + i.value;
            u32 pairs[8];
            decode(Index<group>{}, pairs);
            for_each<OCTETS>([&](auto o) {
                float(&output)[2][4] = state.output[o.value][group];
                mma(output[0], pairs[0], pairs[2], pairs[1], pairs[3], low[o.value], high[o.value]);
                mma(output[1], pairs[4], pairs[6], pairs[5], pairs[7], low[o.value], high[o.value]);
            });
        });
    });
}

INLINE Queries load_queries(const Arguments& a, const Request& request, int head, int warp, const Lane& lane) {
    Queries queries(warp, lane);
    for_each<OCTETS>([&](auto o) {
        const int column = 8 * o.value + lane.row % COLUMNS;
        const u32* q = (const u32*)a.query + request.row(head, column) * (HEAD_DIM / 2) + lane.column;
        const bool there = request.has(column);
        for_each<GROUPS>([&](auto g) {
            constexpr int group = g.value;
            const bool takes_part = there && (!TWICE || lane.row / 4 == group % 2);
            u32 pairs[4];
            for_each<4>([&](auto k) { pairs[k.value] = takes_part ? q[group * 16 + 4 * k.value] : 0; });
            queries.store(o.value, group, pairs);
        });
    });
    return queries;
}

}  // namespace narrow
