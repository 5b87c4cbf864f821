// The warpgroup that attends to unpacked tiles (`roles.cuh`). Columns are the 64 rows of its products, so its softmax is
// over rows in registers.
#pragma once
#include "roles_tiles.cuh"

namespace roles {

struct RowState {
    float output[64];  // of channels 8 i + 2 column + {0, 1}, rows r and r + 8
    float maximum[2], total[2];
    u32 element;  // the maxima are of scores without this bias, see `Biases`
};
// The element of a row's biases; columns that the request lacks take one that it has.
INLINE float load_bias(const Arguments& a, const Request& request, int row, u32 element) {
    return a.query_bias[request.row(blockIdx.y, request.has(row) ? row : 0) * a.bias_stride + element];
}

// Masks scores of a tile, and adds biases (`Biases`): the correction of token 0, and the difference between the biases
// of a token's block and of the tile's first block. The maxima become maxima of scores without the bias of the tile's
// first block.
INLINE void prepare_scores(const Arguments& a, const Request& request, const TeamTiles& tiles, int number, int end,
                           int row, const Lane& lane, RowState& state, float (&scores)[32]) {
    const bool is_ring = RING_BLOCK && number < tiles.ring;
    const u32 element = HAS_BIAS ? Biases::element(a, tiles.tile(number, 0)) : 0;
    for_each<2>([&](auto r) {
        const int own_row = row + 8 * r.value, limit = request.limit(own_row);
        const int last = is_ring ? limit : min(request.page_limit(limit), end);
        const int first = is_ring ? request.first_recent(limit) : 0;
        float bias = 0;
        if constexpr (HAS_BIAS) {
            bias = load_bias(a, request, own_row, element);
            if (element != state.element) state.maximum[r.value] += load_bias(a, request, own_row, state.element) - bias;
        }
        for_each<4>([&](auto block) {
            const int tile = tiles.tile(number, block.value), token = 16 * tile + 2 * lane.column;
            float change = 0;
            if constexpr (HAS_BIAS) {
                const u32 own = Biases::element(a, tile);
                if (own != element) change = (load_bias(a, request, own_row, own) - bias) / PAGE_FACTOR;
                if (block.value == 0 && token == 0)
                    scores[2 * r.value] += load_bias(a, request, own_row, 0) / PAGE_FACTOR;
            }
            for_each<4>([&](auto i) {
                float& score = scores[8 * block.value + i.value / 2 * 4 + 2 * r.value + i.value % 2];
                const int own = token + i.value / 2 * 8 + i.value % 2;
                score = own >= first && own < last ? score + change : minus_infinity();
            });
            if constexpr (HAS_VALUE_MEANS) {
                const float score = scores[2 * r.value];
                if (block.value == 0 && token == 0 && score > minus_infinity() && request.has(own_row))
                    a.query_bias[first_score_at(a, request, blockIdx.y, own_row)] = score * PAGE_FACTOR + bias;
            }
        });
    });
    state.element = element;
}

// A lane's weights of a tile and row add up to less than this, so each fits fp16. If all scores are equal, its 16
// weights are 2^HEADROOM; this must not count as a maximum that has to move (32 x 8192, 64 columns: 220 us instead of
// 180).
constexpr float CEILING = 32768;
static_assert(HEADROOM == 10, "16 weights of 2^HEADROOM are below the ceiling");

// Computes the weights of a tile in `p`, and returns whether a lane's sum of weights exceeds `ceiling`.
INLINE bool weigh(const float (&scores)[32], const float (&maximum)[2], float ceiling, u32 (&p)[16], float (&sums)[2]) {
    sums[0] = sums[1] = 0;
    for_each<16>([&](auto k) {
        constexpr int r = k.value % 2;
        const float x = exp2_fast(__fmaf_rn(scores[2 * k.value], PAGE_FACTOR, -maximum[r]));
        const float y = exp2_fast(__fmaf_rn(scores[2 * k.value + 1], PAGE_FACTOR, -maximum[r]));
        sums[r] += x + y;
        p[k.value] = to_halves(x, y);
    });
    return any_lane(!(maximum_of(sums[0], sums[1]) < ceiling));
}

INLINE void add_scores(float (&scores)[32], u32 queries, u32 keys) {
    wgmma_fence();
    for_each<8>([&](auto k) {
        constexpr u32 step = (k.value / 4 * HALF_BYTES + k.value % 4 * 32) / 16;
        SharedProduct<64>::add(scores, queries + step, keys + step, k.value > 0);
    });
    wgmma_commit();
}

INLINE void attend_tiles(const Arguments& a, const Request& request, const TeamTiles& tiles, int end_tile, int warp,
                         const Lane& lane, RowState& state) {
    const u32 shared = shared_address(shared_memory());
    const u32 queries = matrix_descriptor(shared + AT(queries), 16), keys = matrix_descriptor(shared + AT(keys), 16);
    const u32 values = matrix_descriptor(shared + AT(values), 16);
    const int end = 16 * end_tile;
    int change = HAS_BIAS ? 0 : 1 << 30;  // first token of the next block of means; 0: token 0 may follow
    const int unmasked = min(request.page_limit(request.limit(0)), end);
    float(&o)[64] = state.output;
    for_each<64>([&](auto i) { o[i.value] = 0; });
    for_each<2>([&](auto r) { state.maximum[r.value] = -1e30f, state.total[r.value] = 0; });
    state.element = HAS_BIAS ? Biases::element(a, tiles.tile(0, 0)) : 0;
    if (tiles.all <= 0) return;
    float ceiling = 0, first_scores[32], second_scores[32];
    barrier_wait(shared + AT(keys_full), 0);
    add_scores(first_scores, queries, keys);
    // The scores of the next tile are computed while this one's become weights.
    auto turn = [&](int number, auto odd, auto is_last, float (&scores)[32], float (&next)[32]) {
        constexpr u32 stage = odd.value;
        const u32 parity = number / 2 % 2;
        if constexpr (!is_last.value) {
            barrier_wait(shared + AT(keys_full) + 8 * (stage ^ 1), (number + 1) / 2 % 2);
            add_scores(next, queries, keys + (stage ^ 1) * (TEAM_TILE_BYTES / 16));
        }
        const u32 small = load_shared(shared + AT(are_small) + 4 * stage);  // a byte for each 16 tokens
        wgmma_wait<!is_last.value>();
        sync_warp();
        if (lane.index == 0) arrive(shared + AT(keys_empty) + 8 * stage);
        // A tile of the ring, a tile with tokens of the next block of means, or a tile with tokens that a query does
        // not see.
        if (__builtin_expect((RING_BLOCK && number <= tiles.ring) || 16 * tiles.tile(number, 4) > min(unmasked, change), 0)) {
            if (RING_BLOCK && number == tiles.ring)
                for_each<64>([&](auto i) { o[i.value] *= 1 / VALUE_GAIN; });
            prepare_scores(a, request, tiles, number, end, 16 * warp + lane.row, lane, state, scores);
            if constexpr (HAS_BIAS && TILES_A_BLOCK)
                change = 16 * (tiles.tile(number, 0) / Biases::DIVISOR + 1) * Biases::DIVISOR;
            else change = 1 << 30;
        }
        u32 p[16];
        float sums[2], factors[2] = {1, 1};
        const bool moves = weigh(scores, state.maximum, ceiling, p, sums);
        if (__builtin_expect(moves, 0)) {
            ceiling = CEILING;
            for_each<2>([&](auto r) {
                float top = -1e30f / PAGE_FACTOR;
                for_each<16>([&](auto i) {
                    top = maximum_of(top, scores[i.value / 2 * 4 + 2 * r.value + i.value % 2]);
                });
                top = maximum_of(top, shuffle_xor(top, 1)), top = maximum_of(top, shuffle_xor(top, 2));
                const float old = state.maximum[r.value], maximum = maximum_of(old, top * PAGE_FACTOR - HEADROOM);
                factors[r.value] = exp2_fast(old - maximum);
                state.total[r.value] *= factors[r.value], state.maximum[r.value] = maximum;
            });
            weigh(scores, state.maximum, ceiling, p, sums);
            for_each<64>([&](auto i) { o[i.value] *= factors[i.value / 2 % 2]; });
        }
        for_each<2>([&](auto r) { state.total[r.value] += sums[r.value]; });
        if (__builtin_expect(small, 0)) for_each<4>([&](auto k) {
            const u32 factor = small >> 8 * k.value & 1 ? halves_of(1.f / (1 << SMALL)) : halves_of(1);
            for_each<4>([&](auto i) { p[4 * k.value + i.value] = multiply_halves(p[4 * k.value + i.value], factor); });
        });
        barrier_wait(shared + AT(values_full) + 8 * stage, parity);
        const u32 own = values + stage * (TEAM_TILE_BYTES / 16);
        wgmma_fence();
        for_each<4>([&](auto k) { Product<128>::add(o, p + 4 * k.value, own + 2 * k.value, 1); });
        wgmma_commit();
        wgmma_wait<0>();  // ptxas serialises all products otherwise
        if (lane.index == 0) arrive(shared + AT(values_empty) + 8 * stage);
    };
    int number = 0;
#pragma unroll 1
    for (; number + 2 < tiles.all; number += 2) {
        turn(number, Index<0>{}, Index<0>{}, first_scores, second_scores);
        turn(number + 1, Index<1>{}, Index<0>{}, second_scores, first_scores);
    }
    if (number + 2 == tiles.all) {
        turn(number, Index<0>{}, Index<0>{}, first_scores, second_scores);
        turn(number + 1, Index<1>{}, Index<1>{}, second_scores, first_scores);
    } else {
        turn(number, Index<0>{}, Index<1>{}, first_scores, second_scores);
    }
}

}  // namespace roles
