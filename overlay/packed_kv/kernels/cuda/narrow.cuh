// Attention of a block for up to 32 columns: each warp attends to tiles of its own.
#pragma once
#include "finish.cuh"
#include "pages.cuh"

namespace narrow {

static_assert(PASSES == 1, "a work item's request is the batch's: `Request` divides by PASSES, `attend` does not");

INLINE void ring_scores(u32 tile, const Queries& queries, const Lane& lane, float (&scores)[SCORES]) {
    score(
        queries, [&](auto group, u32* pairs) { ring_key_pairs(tile, lane, group.value, pairs); },
        [&](auto set, float& low, float& high) {
            ring_key_scales(tile, lane, group_of(set.value, lane.column / 2), low, high);
        },
        scores);
}

INLINE void add_ring_values(State& state, u32 tile, const u32 (&scales)[SETS], const u32 (&operands)[OWN],
                            const Lane& lane) {
    add_values(
        state, [&](auto group, u32* pairs) { ring_value_pairs(tile, lane, group.value, pairs); }, scales, operands);
}

// Adds a tile to the state, whose outputs are in units of RING_UNIT until `to_page_unit`.
INLINE void attend_ring_tile(const Arguments& a, const Request& request, int head, int number, u32 tile,
                             const Queries& queries, const Lane& lane, State& state) {
    const int first = 16 * (request.first_ring_tile() + number);
    float scores[1][SCORES];
    ring_scores(tile, queries, lane, scores[0]);
    mask_ring_scores(a, request, head, first, lane, scores[0]);
    u32 scales[1][SETS], operands[1][OWN];
    ring_value_scales(request, tile, first, lane, scales[0]);
    online_softmax_update(state, scores, RING_UNIT, scales, operands);
    add_ring_values(state, tile, scales[0], operands[0], lane);
}

// Converts the ring's outputs to the units of the pages' outputs.
INLINE void to_page_unit(State& state) {
    for_each<OCTETS * GROUPS * 8>([&](auto i) {
        constexpr int group = i.value / 8 % GROUPS;
        constexpr float factor = RING_UNIT / Value::group(group).factor;
        state.output[i.value / 8 / GROUPS][group][i.value / 4 % 2][i.value % 4] *= factor;
    });
}

// Computes a tile's scores, and loads its V scales.
INLINE void score_tile(const Queries& queries, const Tables& tables, const Lane& lane, u32 tile,
                       float (&scores)[TILE_BLOCKS][SCORES], u32 (&scales)[TILE_BLOCKS][SETS]) {
    const u32 key_selector = lane.column / 2 ? 0x4342 : 0x4140;
    for_each<TILE_BLOCKS>([&](auto b) {
        const u32 micro_block = tile + b.value * MICRO_BLOCK_BYTES;
        Words<Key> words;
        load_words(words, micro_block + KEY_WORDS_AT, micro_block + KEY_HALF_WORDS_AT, lane.index);
        u32 key_scales[GROUPS / 2];
        load_scales(micro_block, lane, key_scales, scales[b.value]);
        score(
            queries, [&](auto group, u32* pairs) { decode_group<group.value>(words, pairs, tables); },
            [&](auto set, float& low, float& high) {
                constexpr int word = set.value * GROUPS_PER_SET / 2;
                const u32 pair = scale_pair(key_scales[word], TWICE ? key_selector : set.value % 2 ? 0x4342 : 0x4140);
                low = low_float(pair), high = high_float(pair);
            },
            scores[b.value]);
    });
}

// Turns a tile's scores into weights; `operands` are as `online_softmax_update` returns them.
INLINE void update_softmax(const Arguments& a, State& state, const Lane& lane, int first_token, int masked_from,
                           float (&scores)[TILE_BLOCKS][SCORES], u32 (&scales)[TILE_BLOCKS][SETS],
                           u32 (&operands)[TILE_BLOCKS][OWN]) {
    if (__builtin_expect(first_token + TILE_TOKENS > masked_from || (HAS_BIAS && first_token == 0), 0))
        mask(a, lane.in_rare_branch(), first_token, scores, scales);
    online_softmax_update(state, scores, 1 / SCORE_UNIT, scales, operands);
}

// Adds a tile's V, multiplied by its weights, to the output.
INLINE LastLoad add_tile(State& state, const Tables& tables, const Lane& lane, u32 tile,
                         const u32 (&scales)[TILE_BLOCKS][SETS], const u32 (&operands)[TILE_BLOCKS][OWN]) {
    Words<Value> words;
    auto load = [&](int block) {
        const u32 micro_block = tile + block * MICRO_BLOCK_BYTES;
        load_words(words, micro_block + VALUE_WORDS_AT, micro_block + VALUE_HALF_WORDS_AT, lane.index);
    };
    auto add = [&](int block) {
        add_values(
            state, [&](auto group, u32* pairs) { decode_group<group.value>(words, pairs, tables); }, scales[block],
            operands[block]);
    };
    for_each<TILE_BLOCKS - 1>([&](auto b) { load(b.value), add(b.value); });
    load(TILE_BLOCKS - 1);
    const LastLoad last_load(tile);
    add(TILE_BLOCKS - 1);
    return last_load;
}

INLINE void attend(const Arguments& a) {
    const Lane lane;
    const int warp = threadIdx.x / 32, head = blockIdx.y;
    const Quad words = load_work_item(a);
    const WorkItem item(words);
    if (item.request < 0) return;
    const int index = item.request;
    if (lane.index == 0) store_shared_4(shared_work_item_address(), words);
    Stages stages(warp);
    stages.init_barriers(lane);
    const Request request(a, item);
    if (request.count <= 0) return;
    const int last_micro_block = (request.seq_len - 1) / 16;
    const int split = IS_FINAL ? warp : blockIdx.x * WARPS + warp, splits = IS_FINAL ? WARPS : gridDim.x * WARPS;
    const TileRange range(request, item, split, splits);
    const Pages pages{hide_from_optimizer(a.cache + (u64)head * a.head_stride),
                      hide_from_optimizer(a.block_table + (u64)index * a.table_stride), a.block_stride,
                      last_micro_block};
    const Ring ring(a, request, index, head);
    // The range's tiles are numbered, the ring's first. Block numbers are loaded early, because copies wait for them.
    auto load_blocks = [&](int number, u32 (&blocks)[TILE_BLOCKS]) {
        pages.load_blocks(range.low + max(number - range.ring, 0), blocks);
    };
    auto copy = [&](LoadsDone done, int number, const u32 (&blocks)[TILE_BLOCKS], u32 stage, u32 barrier) {
        if (RING_BLOCK && number < range.ring) {
            ring.copy(done, request, split + number * splits, stage, barrier, lane);
        } else if (number < range.ring + range.count) {
            pages.copy(done, range.low + number - range.ring, blocks, stage, barrier);
        }
    };
    u32 first_blocks[STAGES][TILE_BLOCKS];
    for_each<STAGES>([&](auto s) { load_blocks(s.value, first_blocks[s.value]); });
    for_each<STAGES>([&](auto s) {
        copy(nothing_loaded(), s.value, first_blocks[s.value], stages.stage + s.value * STAGE_BYTES,
             stages.barrier + s.value * 8);
    });

    State state;
    Queries queries = load_queries(a, request, head, warp, lane);
    if (RING_BLOCK && range.ring) {
#pragma unroll 1
        for (int number = 0; number < range.ring; number++) {
            u32 next[TILE_BLOCKS];
            load_blocks(number + STAGES, next);
            const int tile = split + number * splits;
            if (number)
                Biases(a, request, head, lane).rebase_maxima(a, state.maximum, page_tile(request, tile - splits),
                                                     page_tile(request, tile));
            wait_for_copies_of(stages.barrier, stages.parity);
            attend_ring_tile(a, request, head, tile, stages.stage, queries, lane, state);
            copy(LastLoad(stages.stage).wait(), number + STAGES, next, stages.stage, stages.barrier);
            stages.next();
        }
        to_page_unit(state);
        const int ring_tile = page_tile(request, split + (range.ring - 1) * splits);
        const Biases bias(a, request, head, lane);
        if (range.count) bias.rebase_maxima(a, state.maximum, ring_tile, range.low);
        else bias.restore_maxima(a, state.maximum, ring_tile);
    }
    queries.to_page_unit();
    const int masked_from = request.page_limit(request.seq_len - request.count + 1), last = range.low + range.count;
    const Tables tables((u32)(request.seq_len >> 31));
#pragma unroll 1
    for (int tile = range.low; tile < last; tile++) {
        u32 next[TILE_BLOCKS];
        pages.load_blocks(tile + STAGES, next);
        float scores[TILE_BLOCKS][SCORES];
        u32 scales[TILE_BLOCKS][SETS], operands[TILE_BLOCKS][OWN];
        wait_for_copies_of(stages.barrier, stages.parity);
        score_tile(queries, tables, lane, stages.stage, scores, scales);
        update_softmax(a, state, lane, TILE_TOKENS * tile, masked_from, scores, scales, operands);
        const LastLoad last_load = add_tile(state, tables, lane, stages.stage, scales, operands);
        const LoadsDone done = last_load.wait();
        if (tile + STAGES < last) pages.copy(done, tile + STAGES, next, stages.stage, stages.barrier);
        stages.next();
        if (Biases::ends_block(tile) && tile + 1 < last) {
            const Request again(a, shared_work_item());
            Biases(a, again, hide_from_optimizer(blockIdx.y), lane.in_rare_branch()).rebase_maxima(a, state.maximum, tile, tile + 1);
        }
    }
    if (HAS_BIAS && range.count) {
        const Request again(a, shared_work_item());
        Biases(a, again, hide_from_optimizer(blockIdx.y), lane.in_rare_branch()).restore_maxima(a, state.maximum, last - 1);
    }
    finish(state);
    if constexpr (IS_FINAL) combine_warps(a, request, head, shared_work_item(), warp, lane, state);
    else store_partial(a, request, head, split, splits, lane, state);
}

}  // namespace narrow
