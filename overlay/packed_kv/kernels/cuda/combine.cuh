// The end of the kernel: store partial results, or combine the results of a (request, KV head) pair and undo V's
// rotation.
#pragma once
#include "columns.cuh"

#if UNPACKERS
#include "wgmma.cuh"
enum NamedBarrier {
    COLUMNS_BARRIER = 1,  // at the end only the group that attends: the group that unpacks may still run, or have ended
};
INLINE void sync_columns() { sync_group(COLUMNS_BARRIER); }
#else
INLINE void sync_columns() { sync_block(); }
#endif

constexpr int ROW = HEAD_DIM + 4;  // floats of a column in shared memory; 4 of padding avoid bank conflicts
constexpr int PIECES = HEAD_DIM / 4;  // of a column
// Outputs of a block, and whether it is the last one of its pair to arrive.
struct Combined {
    float outputs[COLUMNS][ROW];
    int is_last[4];
};
// Shared memory at the end, in place of the stages of warps that share columns.
struct TeamResults {
    float weights[COLUMNS][32];  // of parts
    Combined combined;
};
INLINE void add_to(Numbers& sum, float weight, const Numbers& x) {
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}
INLINE Numbers scaled(const Numbers& x, float factor) {
    return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}
// Weights 2^(score - maximum), whose sum is `total`.
struct WeightedSum {
    float maximum, total;
    // The natural log-sum-exp of the scores; -inf if there are none.
    INLINE float lse() const { return (maximum + log2_fast(total)) * 0.6931471805599453f; }
};
// A tile of the rotation has 16 output channels; `pack_matrix` of launch.py puts the fragments of two products side by
// side. For heads of 256 a lane holds one tile at a time.
constexpr int TILES_PER_WARP = (HEAD_DIM / 16 + WARPS - 1) / WARPS, FRAGMENTS = HEAD_DIM / 16;
constexpr int TILES_AT_ONCE = HEAD_DIM > 128 ? 1 : TILES_PER_WARP, TURNS = TILES_PER_WARP / TILES_AT_ONCE;
// With HAS_VALUE_MEANS, behind it are the mean of each output channel, and token 0's mean less that mean.
struct Matrix {
    Quad fragments[TILES_AT_ONCE][FRAGMENTS];
#if HAS_VALUE_MEANS
    Floats means[TILES_AT_ONCE][2];  // of channels `lane.row` and 8 further
#endif

    // The warp's tiles of a turn, `first` and every WARPS-th after it.
    INLINE void load(const Arguments& a, int head, int first, const Lane& lane) {
        const Quad* source = (const Quad*)a.matrix + (u64)head * a.matrix_head_stride + lane.index;
        for_each<TILES_AT_ONCE>([&](auto i) {
            const int tile = first + i.value * WARPS;
            if (tile < HEAD_DIM / 16) for_each<FRAGMENTS>([&](auto f) {
                fragments[i.value][f.value] = load_constant_16(source + (tile * FRAGMENTS + f.value) * 32);
            });
#if HAS_VALUE_MEANS
            if (tile < HEAD_DIM / 16) for_each<2>([&](auto half) {
                const float* pair = (const float*)(source - lane.index + FRAGMENTS * FRAGMENTS * 32) +
                                    2 * (16 * tile + 8 * half.value + lane.row);
                means[i.value][half.value] = {load_constant(pair), load_constant(pair + 1)};
            });
#endif
        });
    }
};

INLINE void store_output(const Arguments& a, long long offset, float x) {
    if constexpr (OUTPUT == 0) ((u16*)a.output)[offset] = to_halves(x, 0);
    else if constexpr (OUTPUT == 1) ((u16*)a.output)[offset] = to_bfloats(x, 0);
    else ((float*)a.output)[offset] = x;
}

// Puts the weights of V's means behind a column's outputs, `combined`: the weight of all tokens, 0 or 1, and of token
// 0.
INLINE void put_weights(const Arguments& a, const Request& request, int head, int column, const WeightedSum& sum,
                        float* combined) {
    const float first = load_from_l2(a.query_bias + first_score_at(a, request, head, column));
    combined[HEAD_DIM] = sum.total > 0;
    combined[HEAD_DIM + 1] = sum.total > 0 ? exp2_fast(first - sum.maximum) / sum.total : 0;
}

// Stores the channels of a turn's tiles, from tile `first` on, of matrix^T x plus the means. x is rounded to tf32,
// which has fp32's range; sums are in fp32.
INLINE void rotate_tiles_back(const Arguments& a, const Request& request, int head, int first, const Lane& lane,
                              const Matrix& matrix, const float* combined) {
#pragma unroll(UNPACKERS ? 2 : TURNS > 1 ? 1 : OCTETS)
    for (int octet = 0; octet < OCTETS; octet++) {
        const float* x = combined + (8 * octet + lane.row) % COLUMNS * ROW + lane.column;
        float sums[TILES_AT_ONCE][4] = {};
        for_each<2 * FRAGMENTS>([&](auto k) {
            const u32 low = to_tf32(x[8 * k.value]), high = to_tf32(x[8 * k.value + 4]);
            for_each<TILES_AT_ONCE>([&](auto i) {
                const Quad& m = matrix.fragments[i.value][k.value / 2];
                const u32 first = k.value % 2 ? m.z : m.x, second = k.value % 2 ? m.w : m.y;
                auto tf32 = [](float x) { return __float_as_int(x); };
                mma_tf32(sums[i.value], tf32(low_float(first)), tf32(high_float(first)), tf32(low_float(second)),
                         tf32(high_float(second)), low, high);
            });
        });
        for_each<4 * TILES_AT_ONCE>([&](auto r) {
            const int column = 8 * octet + 2 * lane.column + r.value % 2;
            const int channel = 16 * (first + r.value / 4 * WARPS) + lane.row + r.value / 2 % 2 * 8;
            if (!request.has(column)) return;
#if HAS_VALUE_MEANS
            const Floats& mean = matrix.means[r.value / 4][r.value / 2 % 2];
            const float* weights = combined + column * ROW + HEAD_DIM;  // of `put_weights`
            sums[r.value / 4][r.value % 4] += weights[0] * mean.x + weights[1] * mean.y;
#endif
            const int token = request.start + column / QUERY_GROUP, member = column % QUERY_GROUP;
            store_output(a, (long long)token * a.output_token_stride +
                                (long long)(head * QUERY_GROUP + member) * a.output_head_stride + channel,
                         sums[r.value / 4][r.value % 4]);
        });
    }
}
// Stores matrix^T x; `matrix` has the tiles of the first turn.
INLINE void rotate_back(const Arguments& a, const Request& request, int head, int warp, const Lane& lane,
                        Matrix& matrix, const float* combined) {
    static_assert(TILES_PER_WARP == 1 || TILES_PER_WARP * WARPS == HEAD_DIM / 16, "all warps have as many tiles, or one");
    if (warp >= HEAD_DIM / 16) return;
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
        if (turn) matrix.load(a, head, warp + turn * WARPS, lane);
        rotate_tiles_back(a, request, head, warp + turn * WARPS, lane, matrix, combined);
    }
}

// The row of a part's partial results for one column.
INLINE long long part_row(const WorkItem& item, int part, int head, int column) {
    return ((long long)(item.first_slot + part) * KV_HEADS + head) * COLUMNS + column;
}

// The last block of a pair to arrive combines all parts, 32 at most, and returns true; the others return false.
// `weights` is [COLUMNS][32] in shared memory; `combined`, the outputs of a `Combined` there.
INLINE bool combine_blocks(const Arguments& a, const Request& request, int head, const WorkItem& item, float* weights,
                           float* combined) {
    int* last = (int*)(combined + COLUMNS * ROW);
    memory_fence();
    sync_columns();
    if (threadIdx.x == 0) {
        int* counter = a.counters + item.first_slot * KV_HEADS + head;
        *last = atomic_add(counter, 1) == item.parts - 1;
        if (*last) *counter = 0;  // for the next launch
    }
    sync_columns();
    if (!*last) return false;
    memory_fence();
    // A load takes about 700 cycles, so each thread issues many at once. First a lane loads the statistics of one part
    // and all columns of its warp; then a thread loads four channels of TOGETHER columns and AT_ONCE parts.
    constexpr int ALL = COLUMNS * PIECES, THREADS = WARPS * 32;
    constexpr int EACH = (COLUMNS + WARPS - 1) / WARPS, ROUNDS = (ALL + THREADS - 1) / THREADS;
    constexpr int MOST = COLUMNS % 3 == 0 ? 3 : COLUMNS > 8 ? 4 : 2;  // as registers allow; a divisor of ROUNDS
    constexpr int TOGETHER = ROUNDS < MOST ? ROUNDS : MOST, AT_ONCE = TOGETHER == 1 ? 8 : 4;
    static_assert(ROUNDS == 1 || ALL % (TOGETHER * THREADS) == 0, "no column past the last");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS;
    Floats statistics[EACH];
    for_each<EACH>([&](auto k) {
        const int column = warp + k.value * WARPS;
        const bool exists = request.has(column) && lane < item.parts;
        statistics[k.value] = exists ? load_2_from_l2(a.partial_stats + 2 * part_row(item, lane, head, column))
                                     : Floats{-1e30f, 0};
    });
    for_each<EACH>([&](auto k) {
        const int column = warp + k.value * WARPS;
        const Floats own = statistics[k.value];
        WeightedSum sum{own.x, 0};
        for_each<5>([&](auto i) { sum.maximum = maximum_of(sum.maximum, shuffle_xor(sum.maximum, 1 << i.value)); });
        const float weight = exp2_fast(own.x - sum.maximum);
        sum.total = weight * own.y;
        for_each<5>([&](auto i) { sum.total += shuffle_xor(sum.total, 1 << i.value); });
        if (column >= COLUMNS) return;
        weights[column * 32 + lane] = sum.total > 0 ? weight / sum.total : 0;
        if (HAS_LSE && lane == 0 && request.has(column)) a.lse[request.row(head, column)] = sum.lse();
        if (HAS_VALUE_MEANS && lane == 0 && request.has(column))
            put_weights(a, request, head, column, sum, combined + column * ROW);
    });
    sync_columns();
#pragma unroll 1
    for (int start = threadIdx.x; start < ALL; start += TOGETHER * THREADS) {
        Numbers means[TOGETHER] = {};
#pragma unroll 1
        for (int first = 0; first < item.parts; first += AT_ONCE) {
            Numbers found[TOGETHER][AT_ONCE];
            for_each<TOGETHER>([&](auto k) {
                const int own = start + k.value * THREADS, column = own / PIECES;
                const float* output = a.partial_output + part_row(item, first, head, column) * HEAD_DIM + own % PIECES * 4;
                for_each<AT_ONCE>([&](auto i) {
                    const bool exists = request.has(column) && first + i.value < item.parts;
                    found[k.value][i.value] =
                        exists ? load_4_from_l2(output + i.value * (KV_HEADS * COLUMNS * HEAD_DIM)) : Numbers{0, 0, 0, 0};
                });
            });
            for_each<TOGETHER>([&](auto k) {
                const int column = (start + k.value * THREADS) / PIECES;
                for_each<AT_ONCE>([&](auto i) {
                    const float weight = weights[column * 32 + first + i.value];
                    add_to(means[k.value], weight, found[k.value][i.value]);
                });
            });
        }
        for_each<TOGETHER>([&](auto k) {
            const int own = start + k.value * THREADS;
            *(Numbers*)(combined + own / PIECES * ROW + own % PIECES * 4) = means[k.value];
        });
    }
    return true;
}

// The end of a block whose warps share columns: `combined` has its outputs if it is alone.
INLINE void end_block(const Arguments& a, const Request& request, int head, const WorkItem& item, bool is_alone, int warp,
                      const Lane& lane, float* weights, float* combined) {
    Matrix matrix;
    matrix.load(a, head, warp, lane);
    if (!is_alone && !combine_blocks(a, request, head, item, weights, combined)) return;
    sync_columns();
    rotate_back(a, request, head, warp, lane, matrix, combined);
}
