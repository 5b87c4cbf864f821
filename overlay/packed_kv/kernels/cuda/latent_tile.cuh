// Tiles of latents: raw bytes of pages to fp16 in shared memory, as keys and as values.
#pragma once
#include "latent_runs.cuh"

constexpr float LATENT_DIVISOR_F = LATENT_DIVISOR;
constexpr int BLOCK_BYTES = TILE * 128;

// 64 channels of the lane's two tokens: the left operands of four products.
template <int BLOCK>
INLINE void decode_block(const Words& words, u32 word, const Tables& tables, u32 (&f)[16]) {
    for_each<2>([&](auto i) {
        constexpr int group = 2 * BLOCK + i.value;
        constexpr float factor = group_layout(group).key_factor / LATENT_DIVISOR_F;
        u32 pairs[8];
        decode_group<group>(words, pairs, tables);
        const u32 gain = to_halves(factor, factor);
        const u32 first = finite_halves(multiply_halves(scale_pair(word, 0x4040 + 0x202 * i.value), gain));
        const u32 second = finite_halves(multiply_halves(scale_pair(word, 0x4141 + 0x202 * i.value), gain));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32* target = f + 8 * i.value + 4 * half;
            target[0] = multiply_halves(pairs[2 * half], first);
            target[1] = multiply_halves(pairs[4 + 2 * half], second);
            target[2] = multiply_halves(pairs[2 * half + 1], first);
            target[3] = multiply_halves(pairs[5 + 2 * half], second);
        }
    });
}

// Returns whether a chunk of words has codes or signs of blocks FIRST to LAST - 1.
constexpr bool has_words(int start, int end, int first, int last) {
    for (int g = 2 * first; g < 2 * last; g++) {
        const Group group = group_layout(g);
        if (group.word < end && group.word + (group.bits == 4) >= start) return true;
        if (group.bits == 3 && group.sign_word >= start && group.sign_word < end) return true;
    }
    return false;
}
template <int FIRST, int LAST, int CHUNK = 0, int START = 0, class Source>
INLINE void load_source_words(Words& words, const Source& source, int lane) {
    if constexpr (START < WORDS) {
        constexpr int width = chunk_width(CHUNK);
        if constexpr (has_words(START, START + width, FIRST, LAST))
            source.template load<width>(128 * START + 4 * width * lane, words.word + START);
        load_source_words<FIRST, LAST, CHUNK + 1, START + width>(words, source, lane);
    }
}

// A lane's raw bytes of blocks FIRST to LAST - 1 of 16 tokens, its row of which are r and r + 8. A source is a `Reader`, or
// has the like of its `load` and `stored_bytes`.
template <int FIRST, int LAST> struct Raw {
    Words words;
    u32 scales[8], kept;

    template <class Source> INLINE void load(const Source& source, int lane) {
        load_source_words<FIRST, LAST>(words, source, lane);
        const u32 own = SCALES_AT + lane / 4 * 32;
        if constexpr (FIRST < 4) source.template load<4>(own, scales);
        if constexpr (LAST > 4) source.template load<4>(own + 16, scales + 4);
        kept = source.stored_bytes(lane / 4);
    }
    // `offsets`: of this lane's row of a step's four matrices in a block. `use` gets each block, as an operand.
    template <class Use> INLINE void store(const Tables& tables, u32 tile, const u32 (&offsets)[4], Use&& use) {
        for_each<LAST - FIRST>([&](auto i) {
            constexpr int block = FIRST + i.value;
            u32 f[16];
            decode_block<block>(words, scales[block] & kept, tables, f);
#pragma unroll
            for (int k = 0; k < 4; k++) store_matrices(tile + block * BLOCK_BYTES + offsets[k], f + 4 * k);
            use(Index<block>{}, f);
        });
    }
    INLINE void store(const Tables& tables, u32 tile, const u32 (&offsets)[4]) {
        store(tables, tile, offsets, [](auto, const u32 (&)[16]) {});
    }
};
// A lane's RoPE channels of 16 tokens: fp16, or codes of 8 bits (codecs/ring.py) and scales.
template <int BITS> struct RawRope;
template <> struct RawRope<16> {
    u32 word[16];
    template <class Source> INLINE void load(const Source& source, int lane) {
        for_each<4>([&](auto i) {
            u32 q[4];
            source.template load<4>(ROPE_AT + i.value * 512 + lane * 16, q);
            u32* target = word + i.value / 2 * 8 + i.value % 2;  // [group][half][k][n3]
            target[0] = q[0], target[2] = q[1], target[4] = q[2], target[6] = q[3];
        });
    }
    INLINE const u32 (&pairs(u32 (&)[16]) const)[16] { return word; }
};
template <> struct RawRope<8> {
    u32 code[8], scales[1];  // four codes of a group, d4 = i % 2 of token n3 = i / 2 % 2
    template <class Source> INLINE void load(const Source& source, int lane) {
        for_each<2>([&](auto g) { source.template load<4>(ROPE_AT + g.value * 512 + lane * 16, code + 4 * g.value); });
        source.template load<1>(ROPE_SCALES_AT + lane / 4 * 4, scales);
    }
    INLINE const u32 (&pairs(u32 (&word)[16]) const)[16] {
        const u32 unit = to_halves(RING_UNIT, RING_UNIT);
        for_each<8>([&](auto i) {
            constexpr int group = i.value / 4, n3 = i.value / 2 % 2;
            const u32 step = multiply_halves(scale_pair(scales[0], 0x4040 + 0x101 * (2 * group + n3)), unit);
            u32* target = word + 8 * group + 4 * (i.value % 2) + n3;
            target[0] = multiply_halves(ring_pair(code[i.value], 0x4140), step);
            target[2] = multiply_halves(ring_pair(code[i.value], 0x4342), step);
        });
        return word;
    }
};

INLINE void own_offsets(int lane, int warp, u32 (&offsets)[4]) {
    for_each<4>([&](auto k) {
        offsets[k.value] = (warp * 16 + lane % 16) * 128 + (((2 * k.value + lane / 16) ^ (lane & 7)) << 4);
    });
}
// Ends a warp's stores, which the products of other warps read.
INLINE void finish_stores(u32 barrier, int lane) {
    fence_async();
    sync_warp();
    if (lane == 0) arrive(barrier);
}
