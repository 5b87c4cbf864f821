// Tiles of latents: raw bytes of pages or rows to fp16 in shared memory, as keys and as values.
#pragma once
#include "latent_runs.cuh"

constexpr float LATENT_DIVISOR_F = LATENT_DIVISOR;
constexpr int BLOCK_BYTES = TILE * 128;

// 32 channels of the lane's two tokens, of decoded codes and scales, as left operands of two products.
INLINE void scale_group(const u32* first, const u32* second, u32 first_scale, u32 second_scale, u32* f) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32* target = f + 4 * half;
        target[0] = multiply_halves(first[2 * half], first_scale);
        target[1] = multiply_halves(second[2 * half], second_scale);
        target[2] = multiply_halves(first[2 * half + 1], first_scale);
        target[3] = multiply_halves(second[2 * half + 1], second_scale);
    }
}

// Returns whether a chunk of words has codes or signs of groups FIRST to LAST - 1.
constexpr bool has_words(int start, int end, int first, int last) {
    for (int g = first; g < last; g++) {
        const Group group = Key::group(g);
        if (group.word < end && group.word + (group.bits == 4) >= start) return true;
        if (group.bits == 3 && group.sign_word >= start && group.sign_word < end) return true;
    }
    return false;
}
// Loads the chunks of a lane's words that groups FIRST to LAST - 1 need. A chunk has words of LANES lanes.
template <int FIRST, int LAST, int LANES, int CHUNK = 0, int START = 0, class Source>
INLINE void load_source_words(Words<Key>& words, const Source& source, int lane) {
    if constexpr (START < Key::WORDS) {
        constexpr int width = Key::chunk_width(CHUNK);
        if constexpr (has_words(START, START + width, FIRST, LAST))
            source.template load<width>(4 * LANES * START + 4 * width * lane, words.word + START);
        load_source_words<FIRST, LAST, LANES, CHUNK + 1, START + width>(words, source, lane);
    }
}

// A lane's raw bytes of blocks FIRST to LAST - 1, for its tokens r and r + 8 of 16; `Bytes` defines their layout.
template <int FIRST, int LAST, class Bytes> struct Unpacker : Bytes {
    // `offsets`: offsets in a block of this lane's row, for a step's four matrices. `use` gets each block as an
    // operand.
    template <class Use> INLINE void store(const Tables& tables, u32 tile, const u32 (&offsets)[4], Use&& use) {
        for_each<LAST - FIRST>([&](auto i) {
            constexpr int block = FIRST + i.value;
            u32 f[16];
            this->template decode<block>(tables, f);
#pragma unroll
            for (int k = 0; k < 4; k++) store_matrices(tile + block * BLOCK_BYTES + offsets[k], f + 4 * k);
            use(Index<block>{}, f);
        });
    }
    INLINE void store(const Tables& tables, u32 tile, const u32 (&offsets)[4]) {
        store(tables, tile, offsets, [](auto, const u32 (&)[16]) {});
    }
};

// RoPE channels of 8 bits (codecs/ring.py) to fp16. `code`: four codes of a group, d4 = i % 2 of token n3 = i / 2 % 2;
// `scales`: a byte for each group and n3.
INLINE void decode_rope(const u32 (&code)[8], u32 scales, u32 (&word)[16]) {
    const u32 unit = to_halves(RING_UNIT, RING_UNIT);
    for_each<8>([&](auto i) {
        constexpr int group = i.value / 4, n3 = i.value / 2 % 2;
        const u32 step = multiply_halves(scale_pair(scales, 0x4040 + 0x101 * (2 * group + n3)), unit);
        u32* target = word + 8 * group + 4 * (i.value % 2) + n3;
        target[0] = multiply_halves(ring_pair(code[i.value], 0x4140), step);
        target[2] = multiply_halves(ring_pair(code[i.value], 0x4342), step);
    });
}

INLINE void own_offsets(int lane, int warp, u32 (&offsets)[4]) {
    for_each<4>([&](auto k) {
        offsets[k.value] = (warp * 16 + lane % 16) * 128 + (((2 * k.value + lane / 16) ^ (lane & 7)) << 4);
    });
}
// Completes a warp's stores before the products of other warps read them.
INLINE void finish_stores(u32 barrier, int lane) {
    fence_async();
    sync_warp();
    if (lane == 0) arrive(barrier);
}
