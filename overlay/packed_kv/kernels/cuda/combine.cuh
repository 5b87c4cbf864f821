// What follows a warp's tiles: partial results, or those of a (request, KV head) pair combined and V's rotation undone.
#pragma once
#include "attend.cuh"

constexpr int ROW = HEAD_DIM + 4;  // floats of a column in shared memory; 4 more keep lanes in different banks
constexpr int COMBINED = WARPS * COLUMNS * (ROW + 2);
static_assert(!IS_FINAL || WARPS * COLUMNS * ROW >= 32 * COLUMNS, "weights of 32 blocks, where the warps' outputs lay");
constexpr int COMBINE_BYTES = 4 * (COMBINED + COLUMNS * ROW + 4);

// Values of 1 and sums over all of the warp's lanes, instead of what the loop worked with.
INLINE void finish(State& state) {
    for_each<GROUPS * 8>([&](auto i) {
        constexpr int group = i.value / 8;
        state.output[group][i.value / 4 % 2][i.value % 4] *= 1 / unit_of(group_bits(group));
    });
    for_each<2>([&](auto c) {
        for_each<3>([&](auto i) { state.total[c.value] += shuffle_xor(state.total[c.value], 4 << i.value); });
    });
}

// Calls `store(column, channel, value)` for the outputs that this lane holds, and `statistics(column, maximum, total)`.
template <class Store, class Statistics>
INLINE void for_outputs(const State& state, const Lane& lane, Store&& store, Statistics&& statistics) {
    for_each<2>([&](auto c) {
        const int column = own_column(lane, c.value);
        for_each<GROUPS * 4>([&](auto i) {
            constexpr int group = i.value / 4, half = i.value / 2 % 2, eight = i.value % 2;
            if (!TWICE || lane.column / 2 == group % 2)
                store(column, group * 32 + half * 16 + eight * 8 + lane.row,
                      state.output[group][half][2 * eight + c.value]);
        });
        if (lane.row == 0 && (!TWICE || lane.column < 2))
            statistics(column, state.maximum[c.value], state.total[c.value]);
    });
}

INLINE void store_partial(const Arguments& a, const Request& request, int head, int split, int splits, const Lane& lane,
                          const State& state) {
    auto slot = [&](int column) { return request.row(head, column) * splits + split; };
    for_outputs(
        state, lane,
        [&](int column, int channel, float x) {
            if (request.has(column)) a.partial_output[slot(column) * HEAD_DIM + channel] = x;
        },
        [&](int column, float maximum, float total) {
            if (!request.has(column)) return;
            a.partial_stats[2 * slot(column)] = maximum;
            a.partial_stats[2 * slot(column) + 1] = total;
        });
}

// Sums of `count` parts, output(i) and statistics(i) of part i, as `merge.py` makes them.
struct Sum {
    float maximum, total, output;
    INLINE float mean() const { return total > 0 ? output / total : 0; }
    // The natural logarithm of all weights' sum, minus infinity of none.
    INLINE float logarithm() const { return (maximum + log2_fast(total)) * 0.6931471805599453f; }
};
template <class Statistics, class Output>
INLINE Sum combine(int count, Statistics&& statistics, Output&& output) {
    Sum sum{-1e30f, 0, 0};
#pragma unroll 8
    for (int i = 0; i < count; i++) sum.maximum = maximum_of(sum.maximum, statistics(i, 0));
#pragma unroll 8
    for (int i = 0; i < count; i++) {
        const float weight = exp2_fast(statistics(i, 0) - sum.maximum);
        sum.total += weight * statistics(i, 1);
        sum.output += weight * output(i);
    }
    return sum;
}

// A warp has 16 output channels a tile; `pack_matrix` of launch.py puts fragments of two products side by side.
constexpr int TILES_A_WARP = (HEAD_DIM / 16 + WARPS - 1) / WARPS, FRAGMENTS = HEAD_DIM / 16;
struct Matrix {
    Quad fragments[TILES_A_WARP][FRAGMENTS];

    INLINE void load(const Arguments& a, int head, int warp, const Lane& lane) {
        const Quad* source = (const Quad*)a.matrix + (u64)head * a.matrix_head_stride + lane.index;
        for_each<TILES_A_WARP>([&](auto i) {
            const int tile = warp + i.value * WARPS;
            if (tile < HEAD_DIM / 16) for_each<FRAGMENTS>([&](auto f) {
                fragments[i.value][f.value] = load_constant_16(source + (tile * FRAGMENTS + f.value) * 32);
            });
        });
    }
};

INLINE void store_output(const Arguments& a, long long offset, float x) {
    if constexpr (OUTPUT == 0) ((u16*)a.output)[offset] = to_halves(x, 0);
    else if constexpr (OUTPUT == 1) ((u16*)a.output)[offset] = to_bfloats(x, 0);
    else ((float*)a.output)[offset] = x;
}

// Output = matrix^T x, rounded to tf32, which keeps V of any size; with fp32 sums.
INLINE void rotate_back(const Arguments& a, const Request& request, int head, int warp, const Lane& lane,
                        const Matrix& matrix, const float* combined) {
    for_each<TILES_A_WARP>([&](auto i) {
        const int tile = warp + i.value * WARPS;
        if (tile >= HEAD_DIM / 16) return;
        const float* x = combined + lane.row % COLUMNS * ROW + lane.column;
        float sums[4] = {0, 0, 0, 0};
        for_each<FRAGMENTS>([&](auto f) {
            const Quad& m = matrix.fragments[i.value][f.value];
            auto tf32 = [&](u32 pair, bool upper) {
                return __float_as_int(upper ? high_float(pair) : low_float(pair));
            };
            for_each<2>([&](auto k) {
                const u32 first = k.value ? m.z : m.x, second = k.value ? m.w : m.y;
                const float* b = x + 16 * f.value + 8 * k.value;
                mma_tf32(sums, tf32(first, false), tf32(first, true), tf32(second, false), tf32(second, true),
                         to_tf32(b[0]), to_tf32(b[4]));
            });
        });
        for_each<4>([&](auto r) {
            const int column = 2 * lane.column + r.value % 2, channel = 16 * tile + lane.row + r.value / 2 * 8;
            if (!request.has(column)) return;
            const int token = request.start + column / QUERY_GROUP, member = column % QUERY_GROUP;
            store_output(a, (long long)token * a.output_token_stride +
                                (long long)(head * QUERY_GROUP + member) * a.output_head_stride + channel,
                         sums[r.value]);
        });
    });
}

// Where the results of a part of a request are, of one of its columns.
INLINE long long part_slot(const Job& job, int part, int head, int column) {
    return ((long long)(job.first + part) * KV_HEADS + head) * COLUMNS + column;
}

// The last block of a pair combines what all, 32 at most, have written; weights: [COLUMNS][32] in shared memory. Returns
// whether this is the last one.
INLINE bool combine_blocks(const Arguments& a, const Request& request, int head, const Job& job, float* weights,
                           float* combined) {
    int* last = (int*)(combined + COLUMNS * ROW);
    memory_fence();
    sync_block();
    if (threadIdx.x == 0) {
        int* counter = a.counters + job.first * KV_HEADS + head;
        *last = atomic_add(counter, 1) == job.parts - 1;
        if (*last) *counter = 0;  // for the next launch
    }
    sync_block();
    if (!*last) return false;
    memory_fence();
    // Every wait is one of some 700 cycles, so a thread asks for all that it needs at once: a lane for the statistics of
    // a part, then a thread for two channels of AT_ONCE parts.
    constexpr int AT_ONCE = 8, PAIRS = HEAD_DIM / 2;
    const int lane = threadIdx.x % 32;
    for (int column = threadIdx.x / 32; column < COLUMNS; column += WARPS) {
        const float* statistics = a.partial_stats + 2 * part_slot(job, lane, head, column);
        const bool there = request.has(column) && lane < job.parts;
        const Floats found = there ? load_2_from_l2(statistics) : Floats{-1e30f, 0};
        Sum sum{found.x, 0, 0};
        for_each<5>([&](auto i) { sum.maximum = maximum_of(sum.maximum, shuffle_xor(sum.maximum, 1 << i.value)); });
        const float weight = exp2_fast(found.x - sum.maximum);
        sum.total = weight * found.y;
        for_each<5>([&](auto i) { sum.total += shuffle_xor(sum.total, 1 << i.value); });
        weights[column * 32 + lane] = sum.total > 0 ? weight / sum.total : 0;
        if (HAS_SUMS && lane == 0 && request.has(column)) a.sums[request.row(head, column)] = sum.logarithm();
    }
    sync_block();
    for (int i = threadIdx.x; i < COLUMNS * PAIRS; i += WARPS * 32) {
        const int column = i / PAIRS, channel = i % PAIRS * 2;
        if (!request.has(column)) continue;
        const float* output = a.partial_output + part_slot(job, 0, head, column) * HEAD_DIM + channel;
        Floats mean{0, 0};
        for (int first = 0; first < job.parts; first += AT_ONCE) {
            Floats found[AT_ONCE];
            for_each<AT_ONCE>([&](auto i) {
                const int part = first + i.value;
                found[i.value] = part < job.parts ? load_2_from_l2(output + part * (KV_HEADS * COLUMNS * HEAD_DIM))
                                                  : Floats{0, 0};
            });
            for_each<AT_ONCE>([&](auto i) {
                const float weight = weights[column * 32 + first + i.value];
                mean.x += weight * found[i.value].x, mean.y += weight * found[i.value].y;
            });
        }
        combined[column * ROW + channel] = mean.x, combined[column * ROW + channel + 1] = mean.y;
    }
    return true;
}

// What follows a warp's tiles, in blocks of several.
INLINE void combine_warps(const Arguments& a, const Request& request, int head, const Job& job, int warp,
                          const Lane& lane, const State& state) {
    float* statistics = (float*)shared_memory();
    float *outputs = statistics + 2 * WARPS * COLUMNS, *combined = outputs + WARPS * COLUMNS * ROW;
    const bool is_alone = job.parts == 1;
    sync_block();  // the tiles that lay here are used
    for_outputs(
        state, lane,
        [&](int column, int channel, float x) { outputs[(warp * COLUMNS + column) * ROW + channel] = x; },
        [&](int column, float maximum, float total) {
            statistics[(warp * COLUMNS + column) * 2] = maximum;
            statistics[(warp * COLUMNS + column) * 2 + 1] = total;
        });
    Matrix matrix;
    matrix.load(a, head, warp, lane);  // under way while the warps are combined
    sync_block();
    for (int i = threadIdx.x; i < COLUMNS * HEAD_DIM; i += WARPS * 32) {
        const int column = i / HEAD_DIM, channel = i % HEAD_DIM;
        const Sum sum = combine(
            WARPS, [&](int w, int what) { return statistics[(w * COLUMNS + column) * 2 + what]; },
            [&](int w) { return outputs[(w * COLUMNS + column) * ROW + channel]; });
        if (is_alone) {
            combined[column * ROW + channel] = sum.mean();
            if (HAS_SUMS && channel == 0 && request.has(column)) a.sums[request.row(head, column)] = sum.logarithm();
        } else if (request.has(column)) {
            const long long slot = part_slot(job, job.part, head, column);
            a.partial_output[slot * HEAD_DIM + channel] = sum.output;
            if (channel == 0) a.partial_stats[2 * slot] = sum.maximum, a.partial_stats[2 * slot + 1] = sum.total;
        }
    }
    if (!is_alone && !combine_blocks(a, request, head, job, outputs, combined)) return;
    sync_block();
    rotate_back(a, request, head, warp, lane, matrix, combined);
}
