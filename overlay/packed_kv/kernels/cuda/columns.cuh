// The columns of a request: a column is a query head of a query token. The tensor core takes 8 of them at a time, an
// octet.
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

constexpr float TEAM_UNIT = 0.25f;  // unit of K and V as `roles_unpack.cuh` unpacks them

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

// Weights are 2^(score - maximum), where `maximum` is any number that keeps them within fp16. It changes only when the
// sum of a lane's weights of a tile reaches `ceiling`, which costs one vote per tile. The largest weight then becomes
// 2^HEADROOM: small enough for weights to grow, large enough for products with V's small scales to keep their bits.
// Scales of 2 and more leave no headroom: from the first one on, no weight exceeds 1.
constexpr float HEADROOM = 10;
constexpr u32 LARGE_SCALES = 0x80808080;

// A request's query tokens, and which of its keys are read from pages and which from the ring. With PASSES > 1, it
// describes one pass over the keys: PASS_TOKENS query tokens, and the keys up to the last of these. With
// HAS_PASS_TABLE, it describes a pass over a prefix: its query tokens follow the keys, and see all of them.
struct Request {
    int index, start, count, seq_len, recent;  // the ring has the tokens from `recent`

    INLINE Request(const Arguments& a, const WorkItem& item) {
        if constexpr (HAS_PASS_TABLE) {
            const Quad pass = load_constant_16(a.query_start + 4 * item.request);
            index = pass.x, start = pass.y, count = pass.z;
        } else {
            index = item.request / PASSES;
            start = a.query_start[index], count = a.query_start[index + 1] - start;
        }
        seq_len = item.tokens;
        if constexpr (PASSES > 1) {
            const int first = item.request % PASSES * PASS_TOKENS, later = max(count - first - PASS_TOKENS, 0);
            start += first, count -= first + later, seq_len -= later;
        }
        recent = RING_BLOCK ? max(a.ring_first[index], 0) : seq_len;
    }
    // The first token that a query that sees the tokens below `limit` reads from the ring. All query tokens of a chunk
    // have the window of its first one, which follows the prefix, so its own key is not below `limit`.
    INLINE int first_recent(int limit) const { return max(limit - (HAS_PASS_TABLE ? RECENT - 1 : RECENT), recent); }
    // A query that sees the tokens below `limit` reads the tokens below the result from pages.
    INLINE int page_limit(int limit) const { return RING_BLOCK ? min(limit, first_recent(limit)) : limit; }
    // Tiles of the ring have 16 tokens and begin at multiples of 16.
    INLINE int first_ring_tile() const { return recent / 16; }
    INLINE int ring_tiles() const { return recent < seq_len ? (seq_len + 15) / 16 - recent / 16 : 0; }
    INLINE int limit(int column) const {
        return HAS_PASS_TABLE ? seq_len : seq_len - count + column / QUERY_GROUP + 1;
    }
    INLINE bool has(int column) const { return column < COLUMNS && column < count * QUERY_GROUP; }
    INLINE long long row(int head, int column) const {
        return ((long long)(start + column / QUERY_GROUP) * KV_HEADS + head) * QUERY_GROUP + column % QUERY_GROUP;
    }
};

// The request's column of this lane's accumulator column c < OWN.
INLINE int own_column(const Lane& lane, int c) { return (c / 2 * 8 + 2 * lane.column + c % 2) % COLUMNS; }

// The element of `query_bias` that holds a column's score of token 0.
INLINE u32 first_score_at(const Arguments& a, const Request& request, int head, int column) {
    return (u32)request.row(head, column) * a.bias_stride + a.bias_stride - 1;
}

// The biases of this lane's columns, which the scores of centred keys lack: one number for all keys of a block of
// means, and a correction of token 0, whose key has a mean of its own.
//
// Tiles are attended without the bias of their block; instead, the maxima of scores are less by it. So the maxima
// change where a warp goes on to another block, and at the end are those of whole scores again. The loop holds no bias,
// and no rows.
struct Biases {
    static constexpr u32 DIVISOR = TILES_A_BLOCK ? TILES_A_BLOCK : 1;  // a divisor must not be 0
    u32 rows[OWN];  // first elements in `query_bias`: the correction of token 0, then come the biases of blocks and, with
                    // HAS_VALUE_MEANS, the score of token 0, -inf where it is not seen

    // A column beyond the request's takes the row of its first column: any finite number is fine.
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
    // The element of the bias of a tile of pages. Tiles behind the last block of means take that block's.
    INLINE static u32 element(const Arguments& a, int tile) {
        return TILES_A_BLOCK ? min((u32)tile / DIVISOR + 1, a.bias_stride - 1 - HAS_VALUE_MEANS) : 1;
    }
    // Converts the maximum from tile `from` to tile `to`.
    INLINE void rebase_maxima(const Arguments& a, float (&maxima)[OWN], int from, int to) const {
        if constexpr (!HAS_BIAS || !TILES_A_BLOCK) return;
        const u32 old = element(a, from), now = element(a, to);
        if (old != now) for_each<OWN>([&](auto c) {
            maxima[c.value] += load(a, c.value, old) - load(a, c.value, now);
        });
    }
    // Converts the maximum from `tile` to whole scores.
    INLINE void restore_maxima(const Arguments& a, float (&maxima)[OWN], int tile) const {
        if constexpr (HAS_BIAS)
            for_each<OWN>([&](auto c) { maxima[c.value] += load(a, c.value, element(a, tile)); });
    }
    // Adds the correction of token 0 to its scores.
    INLINE void add_first(const Arguments& a, const Lane& lane, float score_factor, float (&scores)[SCORES]) const {
        if (lane.row == 0) for_each<OWN>([&](auto c) {
            scores[c.value / 2 * 4 + c.value % 2] += load(a, c.value, 0) / score_factor;
        });
    }
    // Keeps the whole scores of token 0, unless masked.
    INLINE void keep_first(const Arguments& a, const Request& request, const Lane& lane, float score_factor,
                           const float (&scores)[SCORES]) const {
        if (lane.row == 0) for_each<OWN>([&](auto c) {
            const float score = scores[c.value / 2 * 4 + c.value % 2];
            if (score > minus_infinity() && request.has(own_column(lane, c.value)))
                a.query_bias[rows[c.value] + a.bias_stride - 1] = score * score_factor + load(a, c.value, 1);
        });
    }
};
