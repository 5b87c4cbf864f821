// The end of a block of up to 32 columns: store partial results of each warp, or combine the warps.
#pragma once
#include "attend.cuh"

namespace narrow {

// Converts outputs to values of unit 1, and sums the totals over the warp's lanes.
INLINE void finish(State& state) {
    for_each<OCTETS * GROUPS * 8>([&](auto i) {
        constexpr int group = i.value / 8 % GROUPS;
        constexpr float factor = Value::group(group).factor;
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

// Combines the warps of a block, and the blocks of a pair, and writes the output.
INLINE void combine_warps(const Arguments& a, const Request& request, int head, const WorkItem& item, int warp,
                          const Lane& lane, const State& state) {
    WarpResults& results = *(WarpResults*)(shared_memory() + AT(rest));
    float *statistics = results.statistics[0][0], *outputs = results.outputs[0][0];
    float* combined = results.combined.outputs[0];
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
    for (int i = threadIdx.x; i < COLUMNS * PIECES; i += WARPS * 32) {
        const int column = i / PIECES, channel = i % PIECES * 4;
        WeightedSum sum{-1e30f, 0};
        Numbers mean{0, 0, 0, 0};
        const float* own = statistics + 2 * column;
        for_each<WARPS>([&](auto w) { sum.maximum = maximum_of(sum.maximum, own[w.value * 2 * COLUMNS]); });
        for_each<WARPS>([&](auto w) {
            const float weight = exp2_fast(own[w.value * 2 * COLUMNS] - sum.maximum);
            sum.total += weight * own[w.value * 2 * COLUMNS + 1];
            add_to(mean, weight, *(const Numbers*)(outputs + (w.value * COLUMNS + column) * ROW + channel));
        });
        if (is_alone) {
            *(Numbers*)(combined + column * ROW + channel) = scaled(mean, sum.total > 0 ? 1 / sum.total : 0);
            if (HAS_LSE && channel == 0 && request.has(column)) a.lse[request.row(head, column)] = sum.lse();
            if (HAS_VALUE_MEANS && channel == 0 && request.has(column))
                put_weights(a, request, head, column, sum, combined + column * ROW);
        } else if (request.has(column)) {
            const long long row = part_row(item, item.part, head, column);
            *(Numbers*)(a.partial_output + row * HEAD_DIM + channel) = mean;
            if (channel == 0) a.partial_stats[2 * row] = sum.maximum, a.partial_stats[2 * row + 1] = sum.total;
        }
    }
    if (!is_alone && !combine_blocks(a, request, head, item, outputs, combined)) return;
    sync_block();
    rotate_back(a, request, head, warp, lane, matrix, combined);
}

}  // namespace narrow
