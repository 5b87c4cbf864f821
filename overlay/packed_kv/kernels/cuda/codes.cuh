// Codes of a micro-block, from shared memory to operands of the tensor core. `layout.py` draws the words; a lane's 16
// codes of a group become 8 fp16 pairs, pair e / 2 of codes e and e + 1, times UNIT and before their scale.
//
// What a code costs decides: the pipe of shifts, LOP3 and PRMT is the busiest one (docs/kernels.md).
#pragma once
#include "ptx.cuh"

template <int I> struct Index { static constexpr int value = I; };
template <int COUNT, int I = 0, class Function> INLINE void for_each(Function&& function) {
    if constexpr (I < COUNT) {
        function(Index<I>{});
        for_each<COUNT, I + 1>(function);
    }
}

constexpr int GROUPS = HEAD_DIM / 32;

constexpr int group_bits(int group) {
    constexpr int bits[] = {GROUP_BITS};
    return bits[group];
}
constexpr int threes_before(int group) {
    return group == 0 ? 0 : threes_before(group - 1) + (group_bits(group - 1) == 3);
}
constexpr int first_word(int group) {
    return group == 0 ? 0 : first_word(group - 1) + (group_bits(group - 1) == 4 ? 2 : 1);
}
constexpr int has_bits(int bits) {
    for (int g = 0; g < GROUPS; g++)
        if (group_bits(g) == bits) return true;
    return false;
}

constexpr int CODE_WORDS = first_word(GROUPS);
constexpr int SIGN_WORDS = threes_before(GROUPS) / 2;
constexpr int WORDS = CODE_WORDS + SIGN_WORDS;
constexpr bool HAS_HALF = threes_before(GROUPS) % 2;
constexpr int VALUE_CODES = 32 * (4 * WORDS + 2 * HAS_HALF);
constexpr int KEY_SCALES = 2 * VALUE_CODES, VALUE_SCALES = KEY_SCALES + 16 * GROUPS;
constexpr int MICRO_BLOCK_BYTES = VALUE_SCALES + 16 * GROUPS;

// A byte with a zero above it is, read as fp16, a subnormal number: its 2^-24 times. Magnitudes times 128 are bytes; of
// 3 bits, and of 2, those times 32 are too. 2-bit values have an offset of 1 besides, so that one look-up gives the
// sign as well: (value + 1) * UNIT. The score starts from what that adds, and the weights' sum is taken off the output.
constexpr bool HAS_OFFSET = has_bits(2);
static_assert(!(has_bits(2) && has_bits(4)), "no unit for 4-bit and 2-bit groups");
constexpr float UNIT = HAS_OFFSET ? 1.f / (1 << 19) : 1.f / (1 << 17);

struct Words { u32 word[WORDS], half; };

INLINE void load_words(Words& words, u32 address, int lane) {
    for_each<WORDS / 4>([&](auto i) { load_shared_4(address + 512 * i.value + 16 * lane, words.word + 4 * i.value); });
    constexpr int fours = WORDS / 4 * 4;
    if constexpr (WORDS % 4 >= 2) load_shared_2(address + 128 * fours + 8 * lane, words.word + fours);
    if constexpr (WORDS % 2) words.word[WORDS - 1] = load_shared(address + 128 * (WORDS - 1) + 4 * lane);
    if constexpr (HAS_HALF) {
        // The signs of an odd last group as they lie in a sign word of parity 0: bytes (b0, b0 << 4, b1, b1 << 4).
        u32 twice = prmt(load_shared_half(address + 128 * WORDS + 2 * lane), 0, 0x1100);
        words.half = (twice & 0x00FF00FF) | ((twice << 4) & 0xFF00FF00);
    }
}

// The first operand of the look-up, in registers: `unknown` is 0, which the compiler must not know. It would move the
// constant there anew for each look-up, as PRMT takes one constant only.
struct Tables {
    u32 low4, table3, table2;
    INLINE Tables(u32 unknown) : low4(TABLE_4_LOW + unknown), table3(TABLE_3 + unknown), table2(TABLE_2 + unknown) {}
};

// A byte of magnitudes and, above it, the same byte of signs.
INLINE void join_signs(u32 magnitudes, u32 signs, u32* pairs) {
    pairs[0] = prmt(magnitudes, signs, 0x5140);
    pairs[1] = prmt(magnitudes, signs, 0x7362);
}

INLINE void decode_4_bits(u32 word, u32* pairs, const Tables& tables) {
    u32 codes = word & 0x77777777;
    join_signs(prmt(tables.low4, TABLE_4_HIGH, codes), word & 0x80808080, pairs);
    join_signs(prmt(tables.low4, TABLE_4_HIGH, upper_half(codes)), (word << 4) & 0x80808080, pairs + 2);
}

template <int PARITY> INLINE void decode_3_bits(u32 word, u32 signs, u32* pairs, const Tables& tables) {
    for_each<2>([&](auto half) {
        constexpr int shift = 4 * PARITY + 2 * half.value;
        u32 codes = (word >> (2 * half.value)) & 0x33333333;
        u32* target = pairs + 4 * half.value;
        join_signs(prmt(tables.table3, 0, codes), (signs << shift) & 0x80808080, target);
        join_signs(prmt(tables.table3, 0, upper_half(codes)), (signs << (shift + 1)) & 0x80808080, target + 2);
    });
}

// Sign and magnitude are one index. Bytes 0 and 2 of a look-up are of one quarter of the codes, 1 and 3 of another.
INLINE void decode_2_bits(u32 word, u32* pairs, const Tables& tables) {
    for_each<2>([&](auto half) {
        u32 codes = (word >> (2 * half.value)) & 0x33333333;
        u32 first = prmt(tables.table2, 0, codes), second = prmt(tables.table2, 0, upper_half(codes));
        u32 *odd = pairs + 2 * (1 - half.value), *even = pairs + 2 * (3 - half.value);
        even[0] = first & 0x00FF00FF, even[1] = second & 0x00FF00FF;
        odd[0] = prmt(first, 0, 0x4341), odd[1] = prmt(second, 0, 0x4341);
    });
}

template <int GROUP> INLINE void decode_group(const Words& words, u32* pairs, const Tables& tables) {
    constexpr int bits = group_bits(GROUP), first = first_word(GROUP), three = threes_before(GROUP);
    if constexpr (bits == 4) {
        decode_4_bits(words.word[first], pairs, tables);
        decode_4_bits(words.word[first + 1], pairs + 4, tables);
    } else if constexpr (bits == 2) {
        decode_2_bits(words.word[first], pairs, tables);
    } else if constexpr (HAS_HALF && three / 2 == SIGN_WORDS) {
        decode_3_bits<0>(words.word[first], words.half, pairs, tables);
    } else {
        decode_3_bits<three % 2>(words.word[first], words.word[CODE_WORDS + three / 2], pairs, tables);
    }
}

// Bytes of a word, e5m3, as fp16.
INLINE u32 scale_pair(u32 word, u32 selector) { return prmt(word, 0, selector) << 7; }
