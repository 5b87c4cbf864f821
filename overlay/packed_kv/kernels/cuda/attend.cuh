// Attention of one warp over tiles of tokens, for 8 or 16 columns. A column is a query head of a query token.
//
// The tensor core takes 8 columns at a time, an octet. A tile is unpacked once for all of them.
//
// TWICE: there are up to 4 columns. The tensor core has 8, so each query is there twice: columns 0 to 3 have its even
// groups of channels, 4 to 7 its odd ones. One product with K then serves two groups, and the work on scales halves.
// A set is the groups that share a product with K and scaled weights: two, or one if there are more columns.
#pragma once
#include "codes.cuh"

constexpr bool TWICE = COLUMNS == 4;
constexpr int SETS = TWICE ? GROUPS / 2 : GROUPS;
constexpr int GROUPS_PER_SET = GROUPS / SETS;
constexpr int OCTETS = COLUMNS > 8 ? COLUMNS / 8 : 1;
constexpr int OWN = 2 * OCTETS;  // columns of a lane's accumulators, two of each octet
// A lane's accumulators of a product with K: two of each octet for its row of tokens, and two for 8 rows further.
constexpr int SCORES = 4 * OCTETS;
constexpr int own_of_score(int r) { return r / 4 * 2 + r % 2; }

// This lane's row and column in the operands of `mma`.
struct Lane {
    int index, row, column;
    INLINE Lane()
        : index(hide_from_optimizer(threadIdx.x % 32)), row(hide_from_optimizer(index / 4)),
          column(hide_from_optimizer(index % 4)) {}
    // A copy for rare branches of a loop: what depends on it is not computed ahead of the loop.
    INLINE Lane in_rare_branch() const {
        Lane copy = *this;
        copy.row = hide_from_optimizer(row), copy.column = hide_from_optimizer(column);
        return copy;
    }
};

// What a warp carries from tile to tile. Weights are 2^(score - maximum), where `maximum` is any number that keeps
// them within fp16. It changes only when the sum of a lane's weights of a tile reaches `ceiling`, which costs one vote
// per tile. The largest weight then becomes 2^HEADROOM: small enough for weights to grow, large enough for products
// with V's small scales to keep their bits. Scales of 2 and more leave no headroom: from the first one on, no weight
// exceeds 1.
constexpr float HEADROOM = 10;
constexpr u32 LARGE_SCALES = 0x80808080;

struct State {
    float output[OCTETS][GROUPS][2][4];  // [..][group][channels 0-15, 16-31]; rows are channels
    float maximum[OWN], total[OWN];      // of this lane's columns, see `Biases`; a total is of this lane's tokens
    float ceiling;
    u32 watched;  // bits of scales that end the headroom; 0 once it has ended

    INLINE State() : ceiling(0), watched(LARGE_SCALES) {
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

struct Queries {
    u32 pairs[OCTETS][GROUPS][4];  // [..][group][channels 8 k + 2 column ..]

    // Converts queries for scores of pages. Scores of the ring need no conversion: all its codes have one unit.
    INLINE void to_page_unit() {
        for_each<OCTETS * GROUPS * 4>([&](auto i) {
            constexpr int group = i.value / 4 % GROUPS;
            constexpr float factor = SCORE_UNIT * group_layout(group).over_unit;
            u32& pair = pairs[i.value / 4 / GROUPS][group][i.value % 4];
            if constexpr (factor != 1) pair = multiply_halves(pair, to_halves(factor, factor));
        });
    }
};

// Computes the weights of TILES micro-blocks, 2^(score * over_unit - maximum), and their sums per column.
template <int TILES>
INLINE void softmax_weights(const State& state, const float (&scores)[TILES][SCORES], float over_unit,
                            float (&weights)[TILES][SCORES], float (&sums)[OWN]) {
    for_each<TILES * SCORES>([&](auto i) {
        constexpr int tile = i.value / SCORES, r = i.value % SCORES;
        weights[tile][r] = exp2_fast(__fmaf_rn(scores[tile][r], over_unit, -state.maximum[own_of_score(r)]));
    });
    for_each<TILES * OWN>([&](auto i) {
        constexpr int tile = i.value / OWN, c = i.value % OWN, r = c / 2 * 4 + c % 2;
        const float sum = weights[tile][r] + weights[tile][2 + r];
        sums[c] = tile == 0 ? sum : sums[c] + sum;
    });
}

// Updates the state for the scores of TILES micro-blocks, and returns their weights as right operands of `mma`,
// [TILES][octet, n3]. `scales` are those of V.
template <int TILES>
INLINE void online_softmax_update(State& state, const float (&scores)[TILES][SCORES], float over_unit,
                                  const u32 (&scales)[TILES][SETS], u32 (&operands)[TILES][OWN]) {
    float weights[TILES][SCORES], sums[OWN];
    softmax_weights(state, scores, over_unit, weights, sums);
    u32 bytes = 0;
    for_each<TILES * SETS>([&](auto i) { bytes |= scales[i.value / SETS][i.value % SETS]; });
    float sum = sums[0] + sums[1];
    if constexpr (OCTETS == 2) sum += sums[2] + sums[3];
    if (any_lane((bytes & state.watched) != 0 || !(sum < state.ceiling))) {
        if (any_lane(bytes & LARGE_SCALES)) state.watched = 0;
        const float headroom = state.watched ? HEADROOM : -2;
        state.ceiling = state.watched ? 16384 : 1;
        for_each<OWN>([&](auto c) {
            constexpr int r = c.value / 2 * 4 + c.value % 2;
            float top = -1e30f / over_unit;
            for_each<TILES>([&](auto t) {
                top = maximum_of(top, maximum_of(scores[t.value][r], scores[t.value][2 + r]));
            });
            for_each<3>([&](auto i) { top = maximum_of(top, shuffle_xor(top, 4 << i.value)); });
            float maximum = maximum_of(state.maximum[c.value], top * over_unit - headroom);
            state.shrink(c.value, exp2_fast(state.maximum[c.value] - maximum));
            state.maximum[c.value] = maximum;
        });
        softmax_weights(state, scores, over_unit, weights, sums);
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
                const u32* q = queries.pairs[o.value][group];
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

// A request's query tokens, and which of its keys are read from pages and which from the ring.
struct Request {
    int start, count, seq_len, recent;  // the ring has the tokens from `recent`

    INLINE Request(const Arguments& a, const WorkItem& item) {
        start = a.query_start[item.request], count = a.query_start[item.request + 1] - start;
        seq_len = item.tokens;
        recent = RING_BLOCK ? max(a.ring_first[item.request], 0) : seq_len;
    }
    // A query that sees the tokens below `limit` reads those below the result from pages.
    INLINE int page_limit(int limit) const { return RING_BLOCK ? min(limit, max(limit - RECENT, recent)) : limit; }
    // Tiles of the ring have 16 tokens and begin at multiples of 16.
    INLINE int first_ring_tile() const { return recent / 16; }
    INLINE int ring_tiles() const { return recent < seq_len ? (seq_len + 15) / 16 - recent / 16 : 0; }
    INLINE int limit(int column) const { return seq_len - count + column / QUERY_GROUP + 1; }
    INLINE bool has(int column) const { return column < COLUMNS && column < count * QUERY_GROUP; }
    INLINE long long row(int head, int column) const {
        return ((long long)(start + column / QUERY_GROUP) * KV_HEADS + head) * QUERY_GROUP + column % QUERY_GROUP;
    }
};

// The request's column of this lane's accumulator column c < OWN.
INLINE int own_column(const Lane& lane, int c) { return (c / 2 * 8 + 2 * lane.column + c % 2) % COLUMNS; }

// The biases of this lane's columns: what the scores of centred keys lack. It is one number for all keys of a block of
// means, and a correction of token 0, whose key has a mean of its own.
//
// Tiles are attended without the bias of their block; instead, `State::maximum` is less by it. So it changes where a
// warp goes on to another block, and is that of whole scores again at the end. The loop holds no bias, and no rows.
struct Biases {
    static constexpr u32 DIVISOR = TILES_A_BLOCK ? TILES_A_BLOCK : 1;  // a divisor must not be 0
    u32 rows[OWN];  // first elements in `query_bias`: the correction of token 0, then come the biases of blocks

    // A column that the request lacks takes the row of its first one: any finite number will do.
    INLINE Biases(const Arguments& a, const Request& request, int head, const Lane& lane) {
        for_each<OWN>([&](auto c) {
            const int column = own_column(lane, c.value);
            rows[c.value] = (u32)request.row(head, request.has(column) ? column : 0) * a.bias_stride;
        });
    }
    INLINE float load(const Arguments& a, int c, u32 element) const {
        return a.query_bias[rows[c] + element];
    }
    INLINE static bool ends_block(int tile) { return TILES_A_BLOCK && (tile + 1) % DIVISOR == 0; }
    // The element of the bias of a tile of pages. Tiles behind the last block of means have that one's.
    INLINE static u32 element(const Arguments& a, int tile) {
        return TILES_A_BLOCK ? min((u32)tile / DIVISOR + 1, a.bias_stride - 1) : 1;
    }
    // Makes the maximum one for tile `to` that is one for tile `from`.
    INLINE void go_on(const Arguments& a, State& state, int from, int to) const {
        if constexpr (!HAS_BIAS || !TILES_A_BLOCK) return;
        const u32 old = element(a, from), now = element(a, to);
        if (old != now) for_each<OWN>([&](auto c) {
            state.maximum[c.value] += load(a, c.value, old) - load(a, c.value, now);
        });
    }
    // Makes the maximum one of whole scores that is one for `tile`.
    INLINE void make_whole(const Arguments& a, State& state, int tile) const {
        if constexpr (HAS_BIAS)
            for_each<OWN>([&](auto c) { state.maximum[c.value] += load(a, c.value, element(a, tile)); });
    }
    // Adds the correction of token 0 to its scores.
    INLINE void add_first(const Arguments& a, const Lane& lane, float over_unit, float (&scores)[SCORES]) const {
        if (lane.row == 0) for_each<OWN>([&](auto c) {
            scores[c.value / 2 * 4 + c.value % 2] += load(a, c.value, 0) / over_unit;
        });
    }
};

INLINE Queries load_queries(const Arguments& a, const Request& request, int head, const Lane& lane) {
    Queries queries;
    for_each<OCTETS>([&](auto o) {
        const int column = (8 * o.value + lane.row) % COLUMNS;
        const u32* q = (const u32*)a.query + request.row(head, column) * (HEAD_DIM / 2) + lane.column;
        const bool there = request.has(column);
        for_each<GROUPS>([&](auto g) {
            constexpr int group = g.value;
            const bool takes_part = there && (!TWICE || lane.row / 4 == group % 2);
            u32(&pairs)[4] = queries.pairs[o.value][group];
            for_each<4>([&](auto k) { pairs[k.value] = takes_part ? q[group * 16 + 4 * k.value] : 0; });
        });
    });
    return queries;
}
