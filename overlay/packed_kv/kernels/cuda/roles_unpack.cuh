// The warpgroup that unpacks (`roles.cuh`): each warp copies its 16 tokens of a tile, unpacks them, and leaves K and V in
// shared memory as fp16.
#pragma once
#include "roles_tiles.cuh"

namespace roles {

template <u32 BY, bool IS_LIFTED> INLINE u32 lifted(u32 pair) { return IS_LIFTED ? multiply_halves(pair, BY) : pair; }
// Unpacks K of 16 tokens. `decode(g, pairs)` decodes a group, `scale(g)` returns the scales of its two tokens, and
// `Lift::of(g)` is the group's lift factor.
template <class Lift, bool LIFTS_CODES, class Decode, class Scale>
INLINE void unpack_keys(u32 even, u32 odd, Decode&& decode, Scale&& scale) {
    for_each<GROUPS>([&](auto g) {
        constexpr int group = g.value;
        constexpr u32 BY = Lift::of(group);
        u32 p[8];
        decode(g, p);
        const u32 scales = lifted<BY, !LIFTS_CODES>(scale(g));
        for_each<8>([&](auto i) {
            const u32 pair = lifted<BY, LIFTS_CODES>(p[i.value]);
            p[i.value] = i.value < 4 ? multiply_by_lower(pair, scales) : multiply_by_upper(pair, scales);
        });
        const u32 target = (group % 2 ? odd : even) + group / 2 * HALF_BYTES;
        store_matrices(target, p), store_matrices(target + 8 * 128, p + 4);
    });
}
INLINE bool are_small(u32 value_scales) { return !any_lane(value_scales & NOT_SMALL); }
// Unpacks V of 16 tokens, whose scales of a group are the bytes n3 n0 of a word. With `is_small`, LIFTS_CODES
// must be set.
template <class Lift, bool LIFTS_CODES, class Decode>
INLINE void unpack_values(u32 target, Decode&& decode, const u32 (&scales)[4], bool is_small) {
    constexpr u32 BY = Lift::of(0);  // all groups of V are alike
    const u32 factor = LIFTS_CODES ? (is_small ? halves_of(1 << SMALL) : halves_of(1)) : BY;
    for_each<GROUPS>([&](auto g) {
        constexpr int group = g.value;
        u32 p[8];
        decode(g, p);
        const u32 low = multiply_halves(scale_pair(scales[group], 0x4140), factor);
        const u32 high = multiply_halves(scale_pair(scales[group], 0x4342), factor);
        for_each<8>([&](auto i) {
            p[i.value] = multiply_halves(lifted<BY, LIFTS_CODES>(p[i.value]), i.value % 2 ? high : low);
        });
        store_matrices(target + 32 * group * 128, p), store_matrices(target + (32 * group + 16) * 128, p + 4);
    });
}
// Completes a warp's stores before the products of other warps read them.
INLINE void finish_stores(u32 barrier, const Lane& lane) {
    fence_async();
    sync_warp();
    if (lane.index == 0) arrive(barrier);
}

INLINE void unpack_tiles(const Arguments& a, const Request& request, const Pages& pages, const TeamTiles& tiles,
                         int head, int warp, const Lane& lane) {
    const u32 shared = shared_address(shared_memory());
    const u32 first_raw = hide_from_optimizer(shared + AT(raw) + warp * RAW_BYTES);
    const u32 first_barrier = hide_from_optimizer(shared + AT(raw_full) + 8 * STAGES * warp);
    const Tables tables((u32)(request.seq_len >> 31));
    const int count = tiles.all - tiles.ring, first_stage = tiles.ring ? 2 : 0;
    u32 next[1];
    auto copy = [&](LoadsDone done, int number, int stage) {  // of pages
        const int tile = tiles.low + 4 * number + warp;
        pages.load_blocks(tile, next);
        if (number < count)
            pages.copy(done, tile, next, first_raw + stage * MICRO_BLOCK_BYTES, first_barrier + 8 * stage);
    };
    copy(nothing_loaded(), 0, first_stage);
    if (!tiles.ring) copy(nothing_loaded(), 1, 1), copy(nothing_loaded(), 2, 2);
    // Row j of matrix i, whose address this lane gives, is a token of K, or a channel of V.
    const int i = lane.index / 8, j = lane.index % 8;
    const u32 keys = shared + AT(keys) + 2048 * warp + 128 * j + ((i ^ j) << 4);
    const u32 values = shared + AT(values) + 128 * (i / 2 * 8 + j) + (((2 * warp + i % 2) ^ j) << 4);
    // `refill` copies to the raw bytes, which are in registers.
    auto fill = [&](int number, bool is_small, auto&& unpack_k, auto&& refill, auto&& unpack_v) {
        const u32 stage = number % 2, parity = (number / 2 + 1) % 2;
        const u32 even = keys + stage * TEAM_TILE_BYTES;
        barrier_wait(shared + AT(keys_empty) + 8 * stage, parity);
        unpack_k(even, even ^ 64);
        if (lane.index == 0) shared_memory()[AT(are_small) + 4 * stage + warp] = is_small;
        finish_stores(shared + AT(keys_full) + 8 * stage, lane);
        refill();
        barrier_wait(shared + AT(values_empty) + 8 * stage, parity);
        unpack_v(values + stage * TEAM_TILE_BYTES);
        finish_stores(shared + AT(values_full) + 8 * stage, lane);
    };
    if (RING_BLOCK && tiles.ring) {
        const Ring ring(a, request, request.index, head);
        const u32 barrier = shared + AT(ring_full) + 8 * warp;
#pragma unroll 1
        for (int number = 0; number < tiles.ring; number++) {
            ring.copy(LastLoad(first_raw).wait(), request, tiles.ring_tile(number, warp), first_raw, barrier, lane);
            wait_for_copies_of(barrier, number % 2);
            const u32 own = first_raw + lane.row * RING_SLOT_BYTES + RING_KEY_SCALES_AT;
            u32 key_scales[2] = {load_shared(own), load_shared(own + 8 * RING_SLOT_BYTES)}, value_scales[4];
            ring_value_scales(request, first_raw, 16 * tiles.tile(number, warp), lane, value_scales);
            const bool is_small = are_small(value_scales[0] | value_scales[1] | value_scales[2] | value_scales[3]);
            fill(
                number, is_small,
                [&](u32 even, u32 odd) {
                    unpack_keys<RingLift, true>(
                        even, odd, [&](auto g, u32(&pairs)[8]) { ring_key_pairs(first_raw, lane, g.value, pairs); },
                        [&](auto g) {
                            return scale_pair(key_scales[0], 0x4440 + g.value) |
                                   scale_pair(key_scales[1], 0x4044 + 0x0100 * g.value);
                        });
                },
                [] {},
                [&](u32 target) {
                    unpack_values<RingLift, true>(
                        target, [&](auto g, u32(&pairs)[8]) { ring_value_pairs(first_raw, lane, g.value, pairs); },
                        value_scales, is_small);
                });
        }
        const LoadsDone done = LastLoad(first_raw).wait();
        copy(done, 1, 0), copy(done, 2, 1);
    }
    pages.load_blocks(tiles.low + 4 * STAGES + warp, next);
    u32 raw = first_raw + first_stage * MICRO_BLOCK_BYTES, barrier = first_barrier + 8 * first_stage, raw_parity = 0;
#pragma unroll 1
    for (int number = 0; number < count; number++) {
        const int tile = tiles.low + 4 * number + warp;
        wait_for_copies_of(barrier, raw_parity);
        Words<Key> k;
        Words<Value> v;
        u32 key_scales[2], value_scales[4];
        load_words(k, raw + KEY_WORDS_AT, raw + KEY_HALF_WORDS_AT, lane.index);
        load_key_scales(raw, lane, key_scales);
        load_words(v, raw + VALUE_WORDS_AT, raw + VALUE_HALF_WORDS_AT, lane.index);
        load_shared_4(raw + VALUE_SCALES_AT + lane.column * (4 * GROUPS), value_scales);
        const LastLoad last_load(raw);
        if (__builtin_expect(16 * tile + 16 > request.seq_len, 0)) {
            const u32 stored = stored_bytes(lane.in_rare_branch(), request.seq_len - 16 * tile);
            for_each<4>([&](auto g) { value_scales[g.value] &= stored; });
        }
        const u32 of_values = value_scales[0] | value_scales[1] | value_scales[2] | value_scales[3];
        const bool is_large = any_lane((key_scales[0] | key_scales[1] | of_values) & LARGE_SCALES);
        const bool is_small = are_small(of_values);
        auto key_scale = [&](auto g) { return scale_pair(key_scales[g.value / 2], g.value % 2 ? 0x4342 : 0x4140); };
        auto decode_key = [&](auto g, u32(&pairs)[8]) { decode_group<g.value>(k, pairs, tables); };
        auto decode_value = [&](auto g, u32(&pairs)[8]) { decode_group<g.value>(v, pairs, tables); };
        fill(
            tiles.ring + number, is_small,
            [&](u32 even, u32 odd) {
                if (__builtin_expect(is_large, 0)) unpack_keys<PageLift<Key>, true>(even, odd, decode_key, key_scale);
                else unpack_keys<PageLift<Key>, false>(even, odd, decode_key, key_scale);
            },
            [&] {
                const LoadsDone done = last_load.wait();
                if (number + STAGES < count) pages.copy(done, tile + 4 * STAGES, next, raw, barrier);
                pages.load_blocks(tile + 4 * (STAGES + 1), next);
                raw += MICRO_BLOCK_BYTES, barrier += 8;
                if (barrier == first_barrier + 8 * STAGES) raw = first_raw, barrier = first_barrier;
                if (barrier == first_barrier + 8 * first_stage) raw_parity ^= 1;
            },
            [&](u32 target) {
                if (__builtin_expect(is_large || is_small, 0))
                    unpack_values<PageLift<Value>, true>(target, decode_value, value_scales, is_small);
                else unpack_values<PageLift<Value>, false>(target, decode_value, value_scales, false);
            });
    }
}

}  // namespace roles
