// Codes of a micro-block, from shared memory to operands of the tensor core. `layout.py` draws the words. A lane's 16
// codes of a group become 8 fp16 pairs, pair e / 2 of codes e and e + 1, in the group's unit and before their scale.
//
// The pipe of shifts, LOP3 and PRMT is the busiest one, so instructions per code decide the speed (docs/kernels.md).
#pragma once
#include "copies.cuh"

template <int I> struct Index { static constexpr int value = I; };
template <int COUNT, int I = 0, class Function> INLINE void for_each(Function&& function) {
    if constexpr (I < COUNT) {
        function(Index<I>{});
        for_each<COUNT, I + 1>(function);
    }
}

// A group of 32 channels, as kernel_layout.py describes it: a lane's code words begin at `word`; with `sign_word`, its
// signs are there, as those of group `parity` of two (0: the signs are in the code words). Decoded codes times their
// scale are values times 1 / `factor`.
struct Group {
    int bits, word, sign_word, parity;
    float factor;
    constexpr int last_word() const { return word + (bits >= 4); }
    constexpr bool has_sign_word() const { return bits == 5 || bits == 3; }  // else signs lie among the codes
};
constexpr int GROUPS = HEAD_DIM / 32;

// How K and V are packed: their groups, and the widths of the chunks that a lane's words lie in, code words, then sign
// words; whether a half word of signs follows. A latent is both.
struct Key {
    static constexpr int WORDS = KEY_WORDS, HAS_HALF = KEY_HAS_HALF;
    static constexpr Group group(int number) {
        constexpr Group groups[] = {KEY_GROUPS};
        return groups[number];
    }
    static constexpr int chunk_width(int chunk) {
        constexpr int widths[] = {KEY_CHUNKS};
        return widths[chunk];
    }
};
struct Value {
    static constexpr int WORDS = VALUE_WORDS, HAS_HALF = VALUE_HAS_HALF;
    static constexpr Group group(int number) {
        constexpr Group groups[] = {VALUE_GROUPS};
        return groups[number];
    }
    static constexpr int chunk_width(int chunk) {
        constexpr int widths[] = {VALUE_CHUNKS};
        return widths[chunk];
    }
};

// The words of a lane for one vector: code words, sign words, and a half word of signs if there is one.
template <class Vector> struct Words { u32 word[Vector::WORDS + Vector::HAS_HALF]; };
template <int WIDTH> INLINE void load_chunk(u32* words, u32 address, int lane) {
    const u32 own = address + 4 * WIDTH * lane;
    if constexpr (WIDTH == 4) load_shared_4(own, words);
    else if constexpr (WIDTH == 2) load_shared_2(own, words);
    else *words = load_shared(own);
}
template <int CHUNK = 0, int START = 0, class Vector>
INLINE void load_chunks(Words<Vector>& words, u32 address, int lane) {
    if constexpr (START < Vector::WORDS) {
        constexpr int width = Vector::chunk_width(CHUNK);
        load_chunk<width>(words.word + START, address + 128 * START, lane);
        load_chunks<CHUNK + 1, START + width>(words, address, lane);
    }
}
// The signs of an odd last group, spread to the positions of parity 0 in a sign word.
INLINE u32 load_half_word(u32 half_words, int lane) {
    const u32 twice = prmt(load_shared_half(half_words + 2 * lane), 0, 0x1010);
    return select_bits(0x0000FFFF, twice, twice << 2);
}

// Loads a lane's words from the addresses of the words and half words of a vector.
template <class Vector> INLINE void load_words(Words<Vector>& words, u32 address, u32 half_words, int lane) {
    load_chunks(words, address, lane);
    if constexpr (Vector::HAS_HALF) words.word[Vector::WORDS] = load_half_word(half_words, lane);
}

// Loads the words of one group; the others of `words` may stay undefined.
template <int GROUP, int CHUNK = 0, int START = 0, class Vector>
INLINE void load_group_words(Words<Vector>& words, u32 address, u32 half_words, int lane) {
    constexpr Group group = Vector::group(GROUP);
    if constexpr (START < Vector::WORDS) {
        constexpr int width = Vector::chunk_width(CHUNK), end = START + width;
        constexpr bool has_codes = group.word < end && group.last_word() >= START;
        constexpr bool has_signs = group.has_sign_word() && group.sign_word >= START && group.sign_word < end;
        if constexpr (has_codes || has_signs) load_chunk<width>(words.word + START, address + 128 * START, lane);
        load_group_words<GROUP, CHUNK + 1, end>(words, address, half_words, lane);
    } else if constexpr (Vector::HAS_HALF && group.has_sign_word() && group.sign_word == Vector::WORDS) {
        words.word[Vector::WORDS] = load_half_word(half_words, lane);
    }
}

// Constants in registers. PRMT and LOP3 take one immediate, and some need two, which the compiler would move to a
// register before each instruction. `unknown` is 0, but the compiler does not know.
struct Tables {
    u32 low4, positive3, zeros3, base2;  // `zeros3` is also the bits that all 5-bit magnitudes share
    INLINE Tables(u32 unknown)
        : low4(TABLE_4_LOW + unknown), positive3(TABLE_3_POSITIVE + unknown), zeros3(ZEROS_3 + unknown),
          base2(BASE_2 + unknown) {}
};

// Pairs of fp16 from bytes of magnitudes, each below the same byte of signs.
INLINE void join_signs(u32 magnitudes, u32 signs, u32* pairs) {
    pairs[0] = prmt(magnitudes, signs, 0x5140);
    pairs[1] = prmt(magnitudes, signs, 0x7362);
}

INLINE void decode_4_bits(u32 word, u32* pairs, const Tables& tables) {
    u32 codes = word & 0x77777777;
    join_signs(prmt(tables.low4, TABLE_4_HIGH, codes), word & 0x80808080, pairs);
    join_signs(prmt(tables.low4, TABLE_4_HIGH, upper_half(codes)), (word << 4) & 0x80808080, pairs + 2);
}

static_assert(LOW_5 == ZEROS_3, "one register has both");
// A magnitude is a byte: an index in the upper half, and a lower half that is the same in all.
template <int PARITY> INLINE void decode_5_bits(const u32 (&words)[2], u32 signs, u32* pairs, const Tables& tables) {
    for_each<2>([&](auto half) {
        constexpr int left = 2 * PARITY + half.value;  // shifts the signs of odd nibbles to the tops of bytes
        const u32 word = words[half.value], even = ((word << 4) & 0xF0F0F0F0) | tables.zeros3;
        const u32 odd = (word & 0xF0F0F0F0) | tables.zeros3;
        u32 of_even[2], of_odd[2];
        join_signs(even, (signs << (left + 4)) & 0x80808080, of_even);
        join_signs(odd, (signs << left) & 0x80808080, of_odd);
        for_each<2>([&](auto i) {
            pairs[4 * half.value + 2 * i.value] = of_even[i.value];
            pairs[4 * half.value + 2 * i.value + 1] = of_odd[i.value];
        });
    });
}

// Two pairs from the codes in nibbles 1, 3, 5 and 7 of `codes`. A selector of 8 is the sign of the table's first byte,
// which is 0, so one PRMT gives two whole fp16.
INLINE void look_up_pairs(u32 codes, u32& low, u32& high, const Tables& tables) {
    const u32 selectors = (codes & 0x70707070) | tables.zeros3;
    low = prmt(tables.positive3, TABLE_3_NEGATIVE, selectors);
    high = prmt(tables.positive3, TABLE_3_NEGATIVE, upper_half(selectors));
}

template <int PARITY> INLINE void decode_3_bits(u32 word, u32 signs, u32* pairs, const Tables& tables) {
    for_each<2>([&](auto half) {
        constexpr int left = 2 * PARITY + half.value - 1;  // shifts the signs to bit 2 of their nibbles
        const u32 magnitudes = word >> (2 * half.value), own = left < 0 ? signs >> 1 : signs << (left < 0 ? 0 : left);
        const u32 codes = select_bits(0x33333333, magnitudes, own);
        u32* target = pairs + 4 * half.value;
        look_up_pairs(codes << 4, target[0], target[2], tables);
        look_up_pairs(codes, target[1], target[3], tables);
    });
}

INLINE void decode_2_bits(u32 word, u32* pairs, const Tables& tables) {
    for_each<8>([&](auto i) {
        constexpr int shift = i.value % 4 + i.value / 4 * 8;  // to the left: the multiplication pipe does that
        pairs[i.value] = ((word << shift) & MASK_2) | tables.base2;
    });
}

template <int GROUP, class Vector>
INLINE void decode_group(const Words<Vector>& words, u32* pairs, const Tables& tables) {
    constexpr Group group = Vector::group(GROUP);
    static_assert(group.bits >= 2 && group.bits <= 5, "there is a decoder for the width");
    if constexpr (group.bits == 5) {
        const u32 own[] = {words.word[group.word], words.word[group.word + 1]};
        decode_5_bits<group.parity>(own, words.word[group.sign_word], pairs, tables);
    } else if constexpr (group.bits == 4) {
        decode_4_bits(words.word[group.word], pairs, tables);
        decode_4_bits(words.word[group.word + 1], pairs + 4, tables);
    } else if constexpr (group.bits == 3) {
        decode_3_bits<group.parity>(words.word[group.word], words.word[group.sign_word], pairs, tables);
    } else {
        decode_2_bits(words.word[group.word], pairs, tables);
    }
}

constexpr float RING_UNIT = 1.f / 128;  // the value of the ring's code of 1

// Two bytes of `word`, each a code of the ring + 128, as fp16: 0x6400 | byte is 1024 + byte, and less 1152 it is the code.
INLINE u32 ring_pair(u32 word, u32 selector) { return add_halves(prmt(word, 0x64646464, selector), 0xE480E480); }

// Converts two bytes of a word, e5m3, to fp16.
INLINE u32 scale_pair(u32 word, u32 selector) { return prmt(word, 0, selector) << 7; }
