// Codes of a micro-block, from shared memory to operands of the tensor core. `layout.py` draws the words; a lane's 16
// codes of a group become 8 fp16 pairs, pair e / 2 of codes e and e + 1, times unit_of(bits) and before their scale.
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

constexpr int CODE_WORDS = first_word(GROUPS);
constexpr int SIGN_WORDS = threes_before(GROUPS) / 2;
constexpr int WORDS = CODE_WORDS + SIGN_WORDS;
constexpr bool HAS_HALF = threes_before(GROUPS) % 2;
constexpr int VALUE_CODES = 32 * (4 * WORDS + 2 * HAS_HALF);
constexpr int KEY_SCALES = 2 * VALUE_CODES, VALUE_SCALES = KEY_SCALES + 16 * GROUPS;
constexpr int MICRO_BLOCK_BYTES = VALUE_SCALES + 16 * GROUPS;

// What a value of 1 becomes, before its scale; `units.py` says why, and what makes up the difference in scores.
constexpr float unit_of(int bits) { return bits == 4 ? UNIT_4 : bits == 3 ? UNIT_3 : UNIT_2; }

struct Words { u32 word[WORDS], half; };

INLINE void load_words(Words& words, u32 address, int lane) {
    for_each<WORDS / 4>([&](auto i) { load_shared_4(address + 512 * i.value + 16 * lane, words.word + 4 * i.value); });
    constexpr int fours = WORDS / 4 * 4;
    if constexpr (WORDS % 4 >= 2) load_shared_2(address + 128 * fours + 8 * lane, words.word + fours);
    if constexpr (WORDS % 2) words.word[WORDS - 1] = load_shared(address + 128 * (WORDS - 1) + 4 * lane);
    if constexpr (HAS_HALF) {
        // The signs of an odd last group as they lie in a sign word of parity 0.
        u32 twice = prmt(load_shared_half(address + 128 * WORDS + 2 * lane), 0, 0x1010);
        words.half = select_bits(0x0000FFFF, twice, twice << 2);
    }
}

// Constants in registers: `unknown` is 0, which the compiler must not know. It would move them there anew for each
// instruction, as PRMT and LOP3 take one constant only, and they need two.
struct Tables {
    u32 low4, positive3, zeros3, base2;
    INLINE Tables(u32 unknown)
        : low4(TABLE_4_LOW + unknown), positive3(TABLE_3_POSITIVE + unknown), zeros3(ZEROS_3 + unknown),
          base2(BASE_2 + unknown) {}
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

// Two pairs, whose codes are nibbles 1, 3, 5 and 7 of `codes`. A selector of 8 asks for the sign of the table's first
// byte, which is 0: so each look-up gives two whole fp16.
INLINE void look_up_pairs(u32 codes, u32& low, u32& high, const Tables& tables) {
    const u32 selectors = (codes & 0x70707070) | tables.zeros3;
    low = prmt(tables.positive3, TABLE_3_NEGATIVE, selectors);
    high = prmt(tables.positive3, TABLE_3_NEGATIVE, upper_half(selectors));
}

template <int PARITY> INLINE void decode_3_bits(u32 word, u32 signs, u32* pairs, const Tables& tables) {
    for_each<2>([&](auto half) {
        constexpr int left = 2 * PARITY + half.value - 1;  // that brings signs to bit 2 of their nibbles
        const u32 magnitudes = word >> (2 * half.value), own = left < 0 ? signs >> 1 : signs << (left < 0 ? 0 : left);
        const u32 codes = select_bits(0x33333333, magnitudes, own);
        u32* target = pairs + 4 * half.value;
        look_up_pairs(codes << 4, target[0], target[2], tables);
        look_up_pairs(codes, target[1], target[3], tables);
    });
}

INLINE void decode_2_bits(u32 word, u32* pairs, const Tables& tables) {
    for_each<8>([&](auto i) {
        constexpr int shift = i.value % 4 + i.value / 4 * 8;  // to the left, which the pipe of multiplications does
        pairs[i.value] = ((word << shift) & MASK_2) | tables.base2;
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
