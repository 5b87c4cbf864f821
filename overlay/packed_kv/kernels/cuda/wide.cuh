// Attention of a block for 48 and 64 columns (16 to 64 over heads of 256), which share one unpacking. Its warps are a
// team that shares the groups of 32 channels: one each, or several over heads of 256. Each warp computes the weights of
// its own tokens for all columns, and leaves them in shared memory; then it adds V of all the team's tokens for its own
// groups. So each code is unpacked by one warp, once, and a warp holds the outputs of its own groups only.
//
// The weights of two tiles lie in shared memory, so one barrier per tile is enough: past it, all warps have finished
// the tile before. The same barrier is the vote on the softmax's maximum. Where it must move, the tile is scored again.
#pragma once
#include "team_mma.cuh"

namespace wide {

// Stores the same results as `store_partial` or `combine_warps` for narrow blocks. `maxima` are of whole scores.
INLINE void store_team(const Arguments& a, const Request& request, int head, const WorkItem& item, int split,
                       int splits, int warp, const Lane& lane, TeamState& state, const float (&maxima)[OWN]) {
    const u32 totals = own_numbers(AT(results), 0, lane);
    float *weights = (float*)(shared_memory() + AT(results)), *combined = weights + COLUMNS * 32;  // `weights`: of parts
    for_each<OWN>([&](auto c) {
        for_each<3>([&](auto i) { state.total[c.value] += shuffle_xor(state.total[c.value], 4 << i.value); });
    });
    sync_block();  // all warps have finished with the tiles that were here
    for_each<OWN>([&](auto c) {
        if (lane.row == 0)
            store_shared(totals + 4 * COLUMNS * warp + c.value / 2 * 32 + c.value % 2 * 4,
                         __float_as_int(state.total[c.value]));
    });
    sync_block();
    const bool is_alone = IS_FINAL && item.parts == 1;
    for_each<OWN>([&](auto c) {
        const int column = own_column(lane, c.value);
        float total = 0;
        for_each<WARPS>([&](auto w) {
            total += __int_as_float(
                load_shared(totals + 4 * COLUMNS * w.value + c.value / 2 * 32 + c.value % 2 * 4));
        });
        const WeightedSum sum{maxima[c.value], total};
        const bool writes_statistics = warp == 0 && lane.row == 0 && request.has(column);
        const float factor = is_alone ? (total > 0 ? 1 / total : 0) : 1;
        float* target = combined + column * ROW;
        if (!is_alone) {
            const long long row =
                IS_FINAL ? part_row(item, item.part, head, column) : request.row(head, column) * splits + split;
            target = a.partial_output + row * HEAD_DIM;
            if (writes_statistics) a.partial_stats[2 * row] = sum.maximum, a.partial_stats[2 * row + 1] = total;
        } else if (HAS_LSE && writes_statistics) {
            a.lse[request.row(head, column)] = sum.lse();
        }
        if (HAS_VALUE_MEANS && is_alone && writes_statistics)
            target[HEAD_DIM] = sum.maximum, target[HEAD_DIM + 1] = total;
        if (is_alone || request.has(column)) for_each<4 * OWN_GROUPS>([&](auto i) {
            constexpr int own = i.value / 4, half = i.value / 2 % 2, eight = i.value % 2;
            target[32 * (OWN_GROUPS * warp + own) + 16 * half + 8 * eight + lane.row] =
                state.output[own][half][c.value / 2 * 4 + eight * 2 + c.value % 2] * factor;
        });
    });
    if (HAS_VALUE_MEANS && is_alone) {  // a thread a column: 16 times in each, the loop of tiles would keep its registers
        sync_block();
        const int column = threadIdx.x;
        float* target = combined + column * ROW;
        if (column < COLUMNS && request.has(column))
            put_weights(a, request, head, column, {target[HEAD_DIM], target[HEAD_DIM + 1]}, target);
    }
    if constexpr (IS_FINAL) end_block(a, request, head, item, is_alone, warp, lane, weights, combined);
}

// The tiles of a block are numbered, the ring's first. A tile of the team has a ring tile for each of RING_WARPS warps,
// or TILE_BLOCKS micro-blocks for each warp.
struct TeamTiles {
    const Request& request;
    const Ring& ring;
    const Pages& pages;
    const TileRange& range;
    int split, splits;

    INLINE int of_ring() const { return RING_BLOCK ? (range.ring + RING_WARPS - 1) / RING_WARPS : 0; }
    INLINE int count() const { return of_ring() + (range.count + WARPS - 1) / WARPS; }
    // A warp's tile of the ring, or of pages, in the team's tile `number`. It may be one past the last of them.
    INLINE int ring_tile(int number, int warp) const { return split + (number * RING_WARPS + warp) * splits; }
    INLINE bool has_ring_tile(int number, int warp) const {
        return (RING_WARPS == WARPS || warp < RING_WARPS) && number * RING_WARPS + warp < range.ring;
    }
    INLINE int page_tile(int number, int warp) const { return range.low + (number - of_ring()) * WARPS + warp; }
    // Each warp copies its own tile. The blocks that hold it are loaded early, because copies wait for them.
    INLINE void load_blocks(int number, int warp, u32 (&blocks)[TILE_BLOCKS]) const {
        pages.load_blocks(page_tile(max(number, of_ring()), warp), blocks);
    }
    INLINE void copy(LoadsDone done, int number, int warp, const u32 (&blocks)[TILE_BLOCKS], u32 target, u32 barrier,
                     const Lane& lane) const {
        if (number >= count()) return;
        if (number < of_ring()) {
            if (RING_WARPS == WARPS || warp < RING_WARPS)
                ring.copy(done, request, ring_tile(number, warp), target + warp * RING_TILE_BYTES, barrier, lane);
            else if (elect_lane()) expect_bytes(barrier, 0);
        } else pages.copy(done, page_tile(number, warp), blocks, target + warp * TILE_BYTES, barrier);
    }
};

// Converts the warp's maxima to scores of a tile of pages.
INLINE void rebase_maxima(const Arguments& a, TeamState& state, int warp, const Lane& lane, int tile) {
    if constexpr (!HAS_BIAS || !TILES_A_BLOCK) return;
    const u32 old = Biases::element(a, state.bias_tile), now = Biases::element(a, tile);
    state.bias_tile = tile;
    if (old == now) return;
    const Biases bias(a, Request(a, shared_work_item()), hide_from_optimizer(blockIdx.y), lane);
    const u32 maxima = own_numbers(AT(team.maxima), warp, lane);
    if (lane.row == 0) for_each<OWN>([&](auto c) {
        const u32 address = maxima + c.value / 2 * 32 + c.value % 2 * 4;
        const float change = bias.load(a, c.value, old) - bias.load(a, c.value, now);
        store_shared(address, __float_as_int(__int_as_float(load_shared(address)) + change));
    });
    sync_warp();
}

INLINE void attend(const Arguments& a) {
    const Lane lane;
    const int warp = threadIdx.x / 32, head = blockIdx.y;
    const Quad words = load_work_item(a);
    const WorkItem item(words);
    if (item.request < 0) return;
    if (lane.index == 0) store_shared_4(shared_work_item_address(), words);
    const Request request(a, item);
    if (request.count <= 0) return;
    const int index = request.index;
    const int split = IS_FINAL ? 0 : blockIdx.x, splits = IS_FINAL ? 1 : gridDim.x;
    const TileRange range(request, item, split, splits);
    const Pages pages{hide_from_optimizer(a.cache + (u64)head * a.head_stride),
                      hide_from_optimizer(a.block_table + (u64)index * a.table_stride), a.block_stride,
                      (request.seq_len - 1) / 16};
    const Ring ring(a, request, index, head);
    const TeamTiles tiles{request, ring, pages, range, split, splits};
    Stages stages(0);
    u32 first_blocks[STAGES][TILE_BLOCKS];
    for_each<STAGES>([&](auto s) { tiles.load_blocks(s.value, warp, first_blocks[s.value]); });
    if (warp == 0) stages.init_barriers(lane);
    sync_block();
    for_each<STAGES>([&](auto s) {
        tiles.copy(nothing_loaded(), s.value, warp, first_blocks[s.value], stages.stage + s.value * STAGE_BYTES,
                   stages.barrier + s.value * 8, lane);
    });
    TeamState state;
    const u32 shared = shared_address(shared_memory());
    share_queries(a, request, head, warp, lane);
    for (int column = lane.index; column < COLUMNS; column += 32) {
        store_shared(shared + AT(team.maxima) + 4 * (COLUMNS * warp + column), __float_as_int(-1e30f));
#if HAS_VALUE_MEANS
        if (warp < 2)
            store_shared(shared + AT(team.first) + 4 * (COLUMNS * warp + column), __float_as_int(minus_infinity()));
#endif
    }
    sync_block();
    u32 target = shared + AT(team.weights), other_target = target + WEIGHT_BYTES;
    bool moves = true;  // the maxima, before the next weights
    u32 last_stage = stages.stage, last_barrier = stages.barrier;  // of the tile before
    // Copies to the stage of the tile before. `done`: this warp's loads from it have ended; a barrier of the block
    // followed.
    auto refill = [&](LoadsDone done, int number, const u32 (&blocks)[TILE_BLOCKS]) {
        if (number > 0) tiles.copy(done, number - 1 + STAGES, warp, blocks, last_stage, last_barrier, lane);
        last_stage = stages.stage, last_barrier = stages.barrier;
        stages.next();
        const u32 swapped = target;
        target = other_target, other_target = swapped;
    };
    if (RING_BLOCK && range.ring) {
#pragma unroll 1
        for (int number = 0; number < tiles.of_ring(); number++) {
            const LoadsDone done = LastLoad(last_stage).wait();
            const u32 stage = stages.stage, weights = target;
            const u32 own = stage + (RING_WARPS == WARPS ? warp : min(warp, RING_WARPS - 1)) * RING_TILE_BYTES;
            u32 blocks[TILE_BLOCKS];
            tiles.load_blocks(number - 1 + STAGES, warp, blocks);
            const int tile = tiles.ring_tile(number, warp), first = 16 * (request.first_ring_tile() + tile);
            const bool exists = tiles.has_ring_tile(number, warp);
            if (exists) rebase_maxima(a, state, warp, lane, page_tile(request, tile));
            wait_for_copies_of(stages.barrier, stages.parity);
            bool again;
            do {
                float scores[1][SCORES];
                score_ring(lane, own, scores);
                mask_ring_scores(a, request, head, exists ? first : 1 << 30, lane, scores[0]);
#if HAS_VALUE_MEANS
                if (exists && first == 0) keep_first(lane, false, scores[0]);
#endif
                u32 scales[SETS], bits = 0;
                ring_value_scales(request, own, exists ? first : 1 << 30, lane, scales);
                for_each<SETS>([&](auto set) { bits |= scales[set.value]; });
                if (moves) move_maxima(a, state, warp, lane, RING_FACTOR, scores, bits);
                again = share_weights(state, warp, lane, RING_FACTOR, moves, scores, bits,
                                      weights_of_ring(weights, warp, lane));
                moves = again;
            } while (again);
            refill(done, number, blocks);
            add_ring(state, request, warp, lane, stage, 16 * (request.first_ring_tile() + tiles.ring_tile(number, 0)),
                     16 * splits, weights);
        }
        for_own_groups(warp, [&](auto group) { state.multiply<group.value>(ring_to_pages<group.value>()); });
    }
    queries_to_page_unit(warp, lane);
    sync_block();
    const int masked_from = request.page_limit(request.limit(0)), last = range.low + range.count;
    const Tables tables((u32)(request.seq_len >> 31));
    // Computes the weights of a tile. Meanwhile the previous tile's products with V end.
    auto weigh = [&](int number) {
        const LoadsDone done = LastLoad(last_stage).wait();
        const u32 own = stages.stage + warp * TILE_BYTES;
        u32 blocks[TILE_BLOCKS];
        tiles.load_blocks(number - 1 + STAGES, warp, blocks);
        const int tile = tiles.page_tile(number, warp), first = TILE_TOKENS * tile;
        if (tile < last) rebase_maxima(a, state, warp, lane, tile);
        wait_for_copies_of(stages.barrier, stages.parity);
        bool again;
        do {
            float scores[TILE_BLOCKS][SCORES];
            u32 scales[TILE_BLOCKS][SETS] = {}, bits = 0;
            score_team_tile(tables, lane, own, scores, scales);
            if (__builtin_expect(first + TILE_TOKENS > masked_from || tile >= last || (HAS_BIAS && first == 0), 0)) {
                mask(a, lane.in_rare_branch(), tile < last ? first : 1 << 30, scores, scales);
#if HAS_VALUE_MEANS
                if (tile < last && first == 0) keep_first(lane.in_rare_branch(), true, scores[0]);
#endif
                mask_shared_scales(lane.in_rare_branch(), own, request.seq_len - (tile < last ? first : 1 << 30));
            }
            for_each<TILE_BLOCKS * SETS>([&](auto i) { bits |= scales[i.value / SETS][i.value % SETS]; });
            if (__builtin_expect(moves, 0)) move_maxima(a, state, warp, lane, PAGE_FACTOR, scores, bits);
            again = share_weights(state, warp, lane, PAGE_FACTOR, moves, scores, bits,
                                  weights_of_pages(target, warp, lane));
            moves = again;
        } while (__builtin_expect(again, 0));
        refill(done, number, blocks);
    };
    int number = tiles.of_ring();
#pragma unroll 1
    for (; number < tiles.count(); number++) {
        const u32 stage = stages.stage, weights = target;
        weigh(number);
        for_each<WARPS>([&](auto w) {
            if (warp == w.value)
                add_groups_of_tile<w.value * OWN_GROUPS>(state, tables, lane, stage, weights + 16 * lane.index);
        });
    }
    for_own_groups(warp, [&](auto group) { state.multiply<group.value>(output_factor<group.value>()); });
#if HAS_VALUE_MEANS
    store_first(a, request, head);
#endif
    float maxima[OWN];
    const u32 own = own_numbers(AT(team.maxima), warp, lane);
    for_each<OWN>([&](auto c) {
        maxima[c.value] = __int_as_float(load_shared(own + c.value / 2 * 32 + c.value % 2 * 4));
    });
    const WorkItem again = shared_work_item();
    if constexpr (HAS_BIAS) {
        const Biases bias(a, Request(a, again), hide_from_optimizer(blockIdx.y), lane);
        for_each<OWN>([&](auto c) { maxima[c.value] += bias.load(a, c.value, Biases::element(a, state.bias_tile)); });
    }
    store_team(a, request, head, again, split, splits, warp, lane, state, maxima);
}

}  // namespace wide
