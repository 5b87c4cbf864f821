// Attention over the ring of recent tokens, 16 at a time: `codecs/ring.py` says what its bytes are, `layout.py` where.
//
// A warp does its tiles of the ring first, while the copies of its first pages are under way.
#pragma once
#include "attend.cuh"

constexpr int RING_SLOT = (2 * HEAD_DIM + 2 * GROUPS + 7) / 8 * 8;
constexpr float RING_UNIT = 1.f / 128;

// Two codes of `word`, bytes of code + 128, as fp16: under 0x64 a byte is 1024 + it, and 1152 off that is the code.
INLINE u32 ring_pair(u32 word, u32 selector) { return add_halves(prmt(word, 0x64646464, selector), 0xE480E480); }

struct RingTile {
    const u8 *keys[2], *values[4];  // slots of this lane's tokens: row and row + 8; 2 column, 1 more, and 8 more

    INLINE RingTile(const Arguments& a, const Request& request, int index, int head, int first, const Lane& lane) {
        const u8* ring = a.ring + (u64)head * a.ring_head_stride;
        const int* table = a.ring_table + (u64)index * a.ring_table_stride;
        auto slot = [&](int token) {
            token = min(token, request.seq_len - 1);
            constexpr int block = RING_BLOCK ? RING_BLOCK : 1;
            return ring + (u64)(u32)table[token / block] * a.ring_block_stride + token % block * RING_SLOT;
        };
        for (int i = 0; i < 2; i++) keys[i] = slot(first + lane.row + 8 * i);
        for (int i = 0; i < 4; i++) values[i] = slot(first + 2 * lane.column + i % 2 + i / 2 * 8);
    }
};

INLINE u32 load_word(const u8* pointer) { return *(const u32*)pointer; }

// The scales of a lane's tokens are those of a column's group: an even one in columns 0 to 3, if TWICE.
INLINE int scale_of(int set, int upper_columns) { return set * GROUPS_A_SET + (TWICE ? upper_columns : 0); }

INLINE void ring_scores(const RingTile& tile, const Queries& queries, const Lane& lane, float (&scores)[4]) {
    u32 scales[2];
    for (int i = 0; i < 2; i++) scales[i] = load_word(tile.keys[i] + 2 * HEAD_DIM);
    auto decode = [&](auto group, u32* pairs) {
        for_each<2>([&](auto n3) {
            const u8* codes = tile.keys[n3.value] + group.value * 32 + lane.column * 8;
            for_each<2>([&](auto d4) {
                u32 word = load_word(codes + 4 * d4.value);
                pairs[4 * n3.value + 2 * d4.value] = ring_pair(word, 0x4140);
                pairs[4 * n3.value + 2 * d4.value + 1] = ring_pair(word, 0x4342);
            });
        });
    };
    auto scale = [&](auto set, float& low, float& high) {
        const int byte = scale_of(set.value, lane.column / 2);
        low = low_float(scale_pair(scales[0], 0x4440 + byte));
        high = low_float(scale_pair(scales[1], 0x4440 + byte));
    };
    score(queries, false, decode, scale, scores);
}

INLINE void add_ring_values(State& state, const RingTile& tile, const u32 (&scales)[SETS], const u32 (&operands)[2],
                            const Lane& lane) {
    auto decode = [&](auto group, u32* pairs) {
        for_each<2>([&](auto n3) {
            const int offset = HEAD_DIM + group.value * 32 + lane.row * 4;
            u32 first = load_word(tile.values[2 * n3.value] + offset);
            u32 second = load_word(tile.values[2 * n3.value + 1] + offset);
            u32 low = prmt(first, second, 0x5140), high = prmt(first, second, 0x7362);
            pairs[n3.value] = ring_pair(low, 0x4140), pairs[2 + n3.value] = ring_pair(low, 0x4342);
            pairs[4 + n3.value] = ring_pair(high, 0x4140), pairs[6 + n3.value] = ring_pair(high, 0x4342);
        });
    };
    add_values(state, false, decode, scales, operands);
}

INLINE void ring_value_scales(const RingTile& tile, const Lane& lane, u32 (&scales)[SETS]) {
    u32 words[4];
    for (int i = 0; i < 4; i++) words[i] = load_word(tile.values[i] + 2 * HEAD_DIM + (GROUPS == 4 ? 4 : 0));
    for_each<SETS>([&](auto set) {
        u32 byte = scale_of(set.value, lane.row / 4) + (GROUPS == 4 ? 0 : GROUPS), selector = byte | (byte + 4) << 4;
        scales[set.value] = prmt(prmt(words[0], words[1], selector), prmt(words[2], words[3], selector), 0x5410);
    });
}

// Tiles split, split + splits, ... of the ring. `state` is that before any page; after it, outputs are in UNIT.
INLINE void attend_ring(const Arguments& a, const Request& request, int index, int head, int split, int splits,
                        const Queries& queries, const Lane& lane, State& state) {
    const int tiles = (request.seq_len - request.recent + 15) / 16;
    if (split >= tiles) return;
#pragma unroll 1
    for (int number = split; number < tiles; number += splits) {
        const int first = request.recent + 16 * number;
        RingTile tile(a, request, index, head, first, lane);
        float scores[1][4];
        ring_scores(tile, queries, lane, scores[0]);
        if (HAS_BIAS && first == 0) add_first_bias(a, request, head, lane, RING_UNIT, scores[0]);
        for (int r = 0; r < 4; r++) {
            const int token = first + lane.row + r / 2 * 8, limit = request.limit(own_column(lane, r % 2));
            if (token >= limit || token < limit - RECENT) scores[0][r] = minus_infinity();
        }
        u32 scales[1][SETS], operands[1][2];
        ring_value_scales(tile, lane, scales[0]);
        soften(state, scores, RING_UNIT, scales, operands);
        add_ring_values(state, tile, scales[0], operands[0], lane);
    }
    for_each<GROUPS * 8>([&](auto i) { state.output[i.value / 8][i.value / 4 % 2][i.value % 4] *= UNIT * RING_UNIT; });
}
