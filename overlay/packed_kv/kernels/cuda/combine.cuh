// The end of the kernel: store partial results, or combine those of a (request, KV head) pair and undo V's rotation.
#pragma once
#include "attend.cuh"

constexpr int ROW = HEAD_DIM + 4;  // floats of a column in shared memory; 4 of padding avoid bank conflicts
constexpr int COMBINED = WARPS * COLUMNS * (ROW + 2);
static_assert(!IS_FINAL || WARPS * ROW >= 32, "the weights of 32 parts replace the outputs of the warps");
constexpr int COMBINE_BYTES = 4 * (COMBINED + COLUMNS * ROW + 4);

// Converts outputs to values of unit 1, and sums the totals over the warp's lanes.
INLINE void finish(State& state) {
    for_each<OCTETS * GROUPS * 8>([&](auto i) {
        constexpr int group = i.value / 8 % GROUPS;
        constexpr float factor = group_layout(group).over_value_unit;
        state.output[i.value / 8 / GROUPS][group][i.value / 4 % 2][i.value % 4] *= factor;
    });
    for_each<OWN>([&](auto c) {
        for_each<3>([&](auto i) { state.total[c.value] += shuffle_xor(state.total[c.value], 4 << i.value); });
    });
}

// Calls `store(column, channel, value)` for this lane's outputs, and `statistics(column, maximum, total)`.
template <class Store, class Statistics>
INLINE void for_outputs(const State& state, const Lane& lane, Store&& store, Statistics&& statistics) {
    for_each<OWN>([&](auto c) {
        const int column = own_column(lane, c.value);
        for_each<GROUPS * 4>([&](auto i) {
            constexpr int group = i.value / 4, half = i.value / 2 % 2, eight = i.value % 2;
            if (!TWICE || lane.column / 2 == group % 2)
                store(column, group * 32 + half * 16 + eight * 8 + lane.row,
                      state.output[c.value / 2][group][half][2 * eight + c.value % 2]);
        });
        if (lane.row == 0 && (!TWICE || lane.column < 2))
            statistics(column, state.maximum[c.value], state.total[c.value]);
    });
}

INLINE void store_partial(const Arguments& a, const Request& request, int head, int split, int splits, const Lane& lane,
                          const State& state) {
    auto row = [&](int column) { return request.row(head, column) * splits + split; };
    for_outputs(
        state, lane,
        [&](int column, int channel, float x) {
            if (request.has(column)) a.partial_output[row(column) * HEAD_DIM + channel] = x;
        },
        [&](int column, float maximum, float total) {
            if (!request.has(column)) return;
            a.partial_stats[2 * row(column)] = maximum;
            a.partial_stats[2 * row(column) + 1] = total;
        });
}

// A sum of values weighted by 2^(score - maximum); `total` is the sum of the weights.
struct WeightedSum {
    float maximum, total, output;
    INLINE float mean() const { return total > 0 ? output / total : 0; }
    // The natural log-sum-exp of the scores; -inf if there are none.
    INLINE float lse() const { return (maximum + log2_fast(total)) * 0.6931471805599453f; }
};
// Combines `count` partial results as `merge.py` does.
template <class Statistics, class Output>
INLINE WeightedSum combine(int count, Statistics&& statistics, Output&& output) {
    WeightedSum sum{-1e30f, 0, 0};
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

// A tile of the rotation has 16 output channels; `pack_matrix` of launch.py puts the fragments of two products side by
// side.
constexpr int TILES_PER_WARP = (HEAD_DIM / 16 + WARPS - 1) / WARPS, FRAGMENTS = HEAD_DIM / 16;
struct Matrix {
    Quad fragments[TILES_PER_WARP][FRAGMENTS];

    INLINE void load(const Arguments& a, int head, int warp, const Lane& lane) {
        const Quad* source = (const Quad*)a.matrix + (u64)head * a.matrix_head_stride + lane.index;
        for_each<TILES_PER_WARP>([&](auto i) {
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

// Stores matrix^T x, with x rounded to tf32, which has fp32's range, and sums in fp32.
INLINE void rotate_back(const Arguments& a, const Request& request, int head, int warp, const Lane& lane,
                        const Matrix& matrix, const float* combined) {
    for_each<TILES_PER_WARP>([&](auto i) {
        const int tile = warp + i.value * WARPS;
        if (tile >= HEAD_DIM / 16) return;
        for_each<OCTETS>([&](auto o) {
            const float* x = combined + (8 * o.value + lane.row) % COLUMNS * ROW + lane.column;
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
                const int column = 8 * o.value + 2 * lane.column + r.value % 2;
                const int channel = 16 * tile + lane.row + r.value / 2 * 8;
                if (!request.has(column)) return;
                const int token = request.start + column / QUERY_GROUP, member = column % QUERY_GROUP;
                store_output(a, (long long)token * a.output_token_stride +
                                    (long long)(head * QUERY_GROUP + member) * a.output_head_stride + channel,
                             sums[r.value]);
            });
        });
    });
}

// The row of the partial results of a part, for one column.
INLINE long long part_row(const WorkItem& item, int part, int head, int column) {
    return ((long long)(item.first_slot + part) * KV_HEADS + head) * COLUMNS + column;
}

// The last block of a pair to arrive combines the parts of all, 32 at most, and returns true; the others return false.
// `weights` is [COLUMNS][32] in shared memory.
INLINE bool combine_blocks(const Arguments& a, const Request& request, int head, const WorkItem& item, float* weights,
                           float* combined) {
    int* last = (int*)(combined + COLUMNS * ROW);
    memory_fence();
    sync_block();
    if (threadIdx.x == 0) {
        int* counter = a.counters + item.first_slot * KV_HEADS + head;
        *last = atomic_add(counter, 1) == item.parts - 1;
        if (*last) *counter = 0;  // for the next launch
    }
    sync_block();
    if (!*last) return false;
    memory_fence();
    // A load takes about 700 cycles, so each thread issues all of its loads at once: a lane those of the statistics of
    // one part, then a thread those of two channels of AT_ONCE parts.
    constexpr int AT_ONCE = 8, PAIRS = HEAD_DIM / 2;
    const int lane = threadIdx.x % 32;
    for (int column = threadIdx.x / 32; column < COLUMNS; column += WARPS) {
        const float* statistics = a.partial_stats + 2 * part_row(item, lane, head, column);
        const bool exists = request.has(column) && lane < item.parts;
        const Floats found = exists ? load_2_from_l2(statistics) : Floats{-1e30f, 0};
        WeightedSum sum{found.x, 0, 0};
        for_each<5>([&](auto i) { sum.maximum = maximum_of(sum.maximum, shuffle_xor(sum.maximum, 1 << i.value)); });
        const float weight = exp2_fast(found.x - sum.maximum);
        sum.total = weight * found.y;
        for_each<5>([&](auto i) { sum.total += shuffle_xor(sum.total, 1 << i.value); });
        weights[column * 32 + lane] = sum.total > 0 ? weight / sum.total : 0;
        if (HAS_LSE && lane == 0 && request.has(column)) a.lse[request.row(head, column)] = sum.lse();
    }
    sync_block();
    for (int i = threadIdx.x; i < COLUMNS * PAIRS; i += WARPS * 32) {
        const int column = i / PAIRS, channel = i % PAIRS * 2;
        if (!request.has(column)) continue;
        const float* output = a.partial_output + part_row(item, 0, head, column) * HEAD_DIM + channel;
        Floats mean{0, 0};
        for (int first = 0; first < item.parts; first += AT_ONCE) {
            Floats found[AT_ONCE];
            for_each<AT_ONCE>([&](auto i) {
                const int part = first + i.value;
                found[i.value] = part < item.parts ? load_2_from_l2(output + part * (KV_HEADS * COLUMNS * HEAD_DIM))
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

// Combines the warps of a block, and the blocks of a pair, and writes the output.
INLINE void combine_warps(const Arguments& a, const Request& request, int head, const WorkItem& item, int warp,
                          const Lane& lane, const State& state) {
    float* statistics = (float*)shared_memory();
    float *outputs = statistics + 2 * WARPS * COLUMNS, *combined = outputs + WARPS * COLUMNS * ROW;
    const bool is_alone = item.parts == 1;
    sync_block();  // all warps have read the tiles that were here
    for_outputs(
        state, lane,
        [&](int column, int channel, float x) { outputs[(warp * COLUMNS + column) * ROW + channel] = x; },
        [&](int column, float maximum, float total) {
            statistics[(warp * COLUMNS + column) * 2] = maximum;
            statistics[(warp * COLUMNS + column) * 2 + 1] = total;
        });
    Matrix matrix;
    matrix.load(a, head, warp, lane);  // in flight while the warps are combined
    sync_block();
    for (int i = threadIdx.x; i < COLUMNS * HEAD_DIM; i += WARPS * 32) {
        const int column = i / HEAD_DIM, channel = i % HEAD_DIM;
        const WeightedSum sum = combine(
            WARPS, [&](int w, int what) { return statistics[(w * COLUMNS + column) * 2 + what]; },
            [&](int w) { return outputs[(w * COLUMNS + column) * ROW + channel]; });
        if (is_alone) {
            combined[column * ROW + channel] = sum.mean();
            if (HAS_LSE && channel == 0 && request.has(column)) a.lse[request.row(head, column)] = sum.lse();
        } else if (request.has(column)) {
            const long long row = part_row(item, item.part, head, column);
            a.partial_output[row * HEAD_DIM + channel] = sum.output;
            if (channel == 0) a.partial_stats[2 * row] = sum.maximum, a.partial_stats[2 * row + 1] = sum.total;
        }
    }
    if (!is_alone && !combine_blocks(a, request, head, item, outputs, combined)) return;
    sync_block();
    rotate_back(a, request, head, warp, lane, matrix, combined);
}
