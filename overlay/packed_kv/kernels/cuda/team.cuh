// A team of warps, which shares the unpacking for its columns: its state and its softmax. `wide.cuh` explains it, and
// alone issues bulk copies. Weights have room for two tiles: the barrier of `share_weights` is between the loads of old
// weights and the store that overwrites them, as past it all warps have added the tile before.
#pragma once
#include "pages.cuh"

namespace wide {

constexpr int TEAM_BLOCKS = WARPS * TILE_BLOCKS;  // micro-blocks of a team's tile
constexpr int OPERAND = 32 * 16;  // bytes that a warp loads at once, 16 a lane
constexpr int OCTET_PAIRS = (OCTETS + 1) / 2;  // the weights of two octets lie together
constexpr int octets_of_pair(int pair) { return pair == OCTETS / 2 ? 1 : 2; }
constexpr int WEIGHT_BYTES = TEAM_BLOCKS * OCTET_PAIRS * OPERAND;  // of a tile
struct TeamMemory {
    u8 stages[STAGES][STAGE_BYTES];
    u8 queries[2 * HEAD_DIM * COLUMNS];
    u8 weights[2][WEIGHT_BYTES];
    float maxima[WARPS][COLUMNS], tops[WARPS][COLUMNS];  // tops: the largest scores of a tile
#if HAS_VALUE_MEANS
    float first[2][COLUMNS];  // scores of token 0, from the ring and from pages; -inf where it is not seen
#endif
};
struct SharedMemory {
    Front front;
    union {
        TeamMemory team;
        TeamResults results;
    };
};
static_assert(AT(team.stages) == STAGES_AT, "where `Stages` has them");
static_assert(GROUPS % WARPS == 0 && OCTETS > 1, "warps have as many groups");
constexpr int OWN_GROUPS = GROUPS / WARPS;  // groups of channels whose outputs a warp has

// The headroom of weights, see `HEADROOM`. A lane sums the weights of all its columns, and compares the sum with the
// ceiling.
constexpr float WIDE_HEADROOM = HEADROOM - 3;

// What a warp carries from tile to tile; its outputs are its own groups of channels.
struct TeamState {
    float output[OWN_GROUPS][2][SCORES];  // [..][channels 0-15, 16-31][octet, row of channels, column]
    float total[OWN];         // of the lane's tokens
    float ceiling;
    u32 scale_guard;
    int bias_tile;  // the warp's maxima are of scores of this tile of pages, see `Biases`

    INLINE TeamState() : ceiling(0), scale_guard(LARGE_SCALES), bias_tile(0) {
        for_each<OWN_GROUPS * 2 * SCORES>([&](auto i) {
            output[i.value / SCORES / 2][i.value / SCORES % 2][i.value % SCORES] = 0;
        });
        for_each<OWN>([&](auto c) { total[c.value] = 0; });
    }
    // Multiplies the outputs of a group.
    template <int GROUP> INLINE void multiply(float factor) {
        for_each<2 * SCORES>([&](auto i) {
            output[GROUP % OWN_GROUPS][i.value / SCORES][i.value % SCORES] *= factor;
        });
    }
};

// Calls `function` with each group of the warp.
template <class Function> INLINE void for_own_groups(int warp, Function&& function) {
    for_each<GROUPS>([&](auto group) {
        if (warp == group.value / OWN_GROUPS) function(group);
    });
}

// The address of this lane's first two columns in a row of columns; each further octet is 32 bytes on.
INLINE u32 own_numbers(int at, int warp, const Lane& lane) {
    return shared_address(shared_memory()) + at + 4 * COLUMNS * warp + 8 * lane.column;
}

#if HAS_VALUE_MEANS
// Keeps the scores of token 0, of the ring or of pages. `store_first` does the rest after the loop of tiles, which
// lacks registers for it (turboquant25, 32 x 8192, 64 columns: 487 us instead of 390).
INLINE void keep_first(const Lane& lane, bool is_page, const float (&scores)[SCORES]) {
    const u32 first = own_numbers(AT(team.first), is_page, lane);
    if (lane.row == 0) for_each<OWN>([&](auto c) {
        store_shared(first + c.value / 2 * 32 + c.value % 2 * 4, __float_as_int(scores[c.value / 2 * 4 + c.value % 2]));
    });
}
// Stores the whole scores of token 0 that a warp has kept, after the loop's last barrier; one thread per column.
INLINE void store_first(const Arguments& a, const Request& request, int head) {
    const int column = threadIdx.x;
    if (column >= COLUMNS || !request.has(column)) return;
    const u32 at = first_score_at(a, request, head, column), address = shared_address(shared_memory()) + AT(team.first);
    for_each<2>([&](auto is_page) {
        const float score = __int_as_float(load_shared(address + 4 * (is_page.value * COLUMNS + column)));
        if (score > minus_infinity())
            a.query_bias[at] = score * (is_page.value ? PAGE_FACTOR : RING_FACTOR) + a.query_bias[at - (a.bias_stride - 2)];
    });
}
#endif

// Masks the V scales of a warp's tile in shared memory, where the other warps read them: only the first `count` tokens
// are stored. No copy follows to the stage of a tile at the end of a sequence.
INLINE void mask_shared_scales(const Lane& lane, u32 tile, int count) {
    if (count >= TILE_TOKENS || lane.row >= GROUPS) return;
    for_each<TILE_BLOCKS>([&](auto b) {
        const u32 scales = tile + b.value * MICRO_BLOCK_BYTES + VALUE_SCALES_AT;
        const u32 address = scales + lane.column * (4 * GROUPS) + 4 * lane.row;
        store_shared(address, load_shared(address) & stored_bytes(lane, count - 16 * b.value));
    });
}

// Raises the maxima of all warps to the maxima of a tile's scores, whose V has `scale_bits`. All warps of the block
// call it.
template <int TILES>
INLINE void move_maxima(const Arguments& a, TeamState& state, int warp, const Lane& lane, float score_factor,
                        const float (&scores)[TILES][SCORES], u32 scale_bits) {
    float biases[OWN];
    for_each<OWN>([&](auto c) { biases[c.value] = 0; });
    if constexpr (HAS_BIAS) {
        const Biases bias(a, Request(a, shared_work_item()), hide_from_optimizer(blockIdx.y), lane);
        for_each<OWN>([&](auto c) {
            biases[c.value] = bias.load(a, c.value, Biases::element(a, state.bias_tile));
        });
    }
    const u32 tops = own_numbers(AT(team.tops), 0, lane), maxima = own_numbers(AT(team.maxima), warp, lane);
    for_each<OWN>([&](auto c) {
        constexpr int r = c.value / 2 * 4 + c.value % 2;
        float top = -1e30f / score_factor;
        for_each<TILES>([&](auto t) {
            top = maximum_of(top, maximum_of(scores[t.value][r], scores[t.value][2 + r]));
        });
        for_each<3>([&](auto i) { top = maximum_of(top, shuffle_xor(top, 4 << i.value)); });
        if (lane.row == 0)
            store_shared(tops + 4 * COLUMNS * warp + c.value / 2 * 32 + c.value % 2 * 4,
                         __float_as_int(top * score_factor + biases[c.value]));
    });
    if (any_thread(scale_bits & LARGE_SCALES)) state.scale_guard = 0;
    const float headroom = state.scale_guard ? WIDE_HEADROOM : WIDE_HEADROOM - HEADROOM - 2;
    state.ceiling = state.scale_guard ? 16384 : 1;
    for_each<OWN>([&](auto c) {
        constexpr int column = c.value / 2 * 32 + c.value % 2 * 4;
        float top = -1e30f;
        for_each<WARPS>([&](auto w) {
            top = maximum_of(top, __int_as_float(load_shared(tops + 4 * COLUMNS * w.value + column)));
        });
        const float old = __int_as_float(load_shared(maxima + column)) + biases[c.value];
        const float maximum = maximum_of(old, top - headroom), factor = exp2_fast(old - maximum);
        state.total[c.value] *= factor;
        for_each<4 * OWN_GROUPS>([&](auto i) {
            state.output[i.value / 4][i.value / 2 % 2][c.value / 2 * 4 + i.value % 2 * 2 + c.value % 2] *= factor;
        });
        sync_warp();
        if (lane.row == 0) store_shared(maxima + column, __float_as_int(maximum - biases[c.value]));
    });
    sync_warp();
}

// Computes the weights of TILES micro-blocks; `put` puts the weights of two octets into shared memory. Returns whether
// the maxima must move first; then the tile is to be scored again. All warps call it.
template <int TILES, class Put>
INLINE bool share_weights(TeamState& state, int warp, const Lane& lane, float score_factor, bool moved,
                          const float (&scores)[TILES][SCORES], u32 scale_bits, Put&& put) {
    const u32 maxima = own_numbers(AT(team.maxima), warp, lane);
    float sums[OWN], sum = 0;
    for_each<OCTET_PAIRS>([&](auto pair) {
        constexpr int first_octet = 2 * pair.value, octets = octets_of_pair(pair.value);
        float top[4];
        for_each<octets>([&](auto o) { load_shared_2(maxima + 32 * (first_octet + o.value), (u32*)top + 2 * o.value); });
        for_each<TILES>([&](auto t) {
            constexpr bool is_first = t.value == 0;
            u32 operands[4] = {};
            for_each<octets>([&](auto o) {
                constexpr int octet = first_octet + o.value, own = 2 * octet;
                float weights[4];
                for_each<4>([&](auto r) {
                    weights[r.value] = exp2_fast(__fmaf_rn(scores[t.value][4 * octet + r.value], score_factor,
                                                           -top[2 * o.value + r.value % 2]));
                });
                for_each<2>([&](auto c) {
                    const float both = weights[c.value] + weights[2 + c.value];
                    sums[own + c.value] = is_first ? both : sums[own + c.value] + both;
                    operands[2 * o.value + c.value] =
                        put.operand(to_halves(weights[2 * c.value], weights[2 * c.value + 1]));
                });
            });
            put(t, pair, operands);
        });
        for_each<2 * octets>([&](auto c) { sum += sums[4 * pair.value + c.value]; });
    });
    put.finish();
    if (any_thread(!moved && ((scale_bits & state.scale_guard) != 0 || !(sum < state.ceiling)))) return true;
    for_each<OWN>([&](auto c) { state.total[c.value] += sums[c.value]; });
    return false;
}

}  // namespace wide
