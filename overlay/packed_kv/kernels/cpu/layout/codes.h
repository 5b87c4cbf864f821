// Codes and scales of a micro-block as vectors. K and V are alike here: a lane of a warp (layout.py) is (row g, t) of 8
// rows and 4 t's, and has codes e of every group. With L = g >> 1 and parity = g & 1,
//
//   a vector of words:     128-bit lane L, 32-bit word (e3, parity): for K a token (n3, g), for V a channel (d4, g)
//   out[2 * e2 + e3]:      16-bit levels, lane L, [parity][e1][e0]
//
// A product with four 16-bit numbers in the order [e1][e0], the same in all lanes, sums over those bits: for K channels
// d3 d0 of a query, for V the weights of tokens n3 n0. The sums over t are sums of products.
#pragma once
#include "../base/loops.h"
#include "places.h"

// --- where a lane's word lies ---------------------------------------------------------------------------------------
constexpr int MICRO_WORD_BYTES = 4 * LANES;              // one word of all lanes
constexpr int ARRANGED = 2 * WORDS + HAS_HALF;           // vectors of a part of an arranged micro-block
constexpr int ARRANGED_BYTES = ARRANGED * PARTS * VECTOR_BYTES;

struct Place {
  int vector, half;  // vector of an arranged part; whether the word is in the upper halves of its lanes
};
constexpr Place place_of(int word, int t) {
  int start = 0;
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    int width = CHUNK_WORDS[chunk];
    if (word < start + width) {
      int in_row = t * width + word - start;
      return {2 * start + in_row / 2, in_row % 2};
    }
    start += width;
  }
  return {2 * WORDS, 0};
}

// Copies words, then half words, of one vector of a micro-block so that a pair of neighbouring words of a row is a
// vector: lane L, words [which of the pair][parity]. `part`: lanes L of it, VECTOR_LANES of 4.
INLINE void arrange(const uint8_t* micro_block, int vector, int part, uint8_t* to) {
  const uint8_t* words = micro_block + WORDS_AT[vector];
  unrolled<CHUNKS>([&](auto chunk) {
    constexpr int width = CHUNK_WORDS[chunk.value], row = 16 * width;
    const uint8_t* rows = words + part * VECTOR_LANES * 2 * row;
    unrolled<width>([&](auto piece) {
      const uint8_t* from = rows + 16 * piece.value;
      Bytes even = load_lanes(from, 2 * row), odd = load_lanes(from + row, 2 * row);
      store(to, low_words(even, odd));
      store(to + VECTOR_BYTES, high_words(even, odd));
      to += 2 * VECTOR_BYTES;
    });
    words += width * MICRO_WORD_BYTES;
  });
  if (HAS_HALF) store(to, load(micro_block + HALF_WORDS_AT[vector] + part * VECTOR_BYTES));
}

// --- codes to 16-bit levels -----------------------------------------------------------------------------------------
struct Control {
  alignas(64) uint8_t at[64];
};

// For byte i of a lane: the code e whose bits go there, and the offset of its word in the surrounding 64 bits.
constexpr int code_at(int i, int e2) { return (i >> 3 & 1) * 8 + e2 * 4 + (i & 3); }
constexpr int word_bit(int i) { return (i >> 2 & 1) * 32; }

// ByteLevels by index. With VBMI, an index has 6 bits, and bits beyond the code may be anything; else it has 4 bits,
// all of the code. `sign_bit`, `magnitude_mask`: the code's bits in the index.
struct ByteLevels {
  alignas(64) uint8_t low[64], high[64];
};
constexpr ByteLevels make_levels(const Code& code, int sign_bit, int magnitude_mask) {
  ByteLevels levels = {};
  for (int i = 0; i < 64; i++) {
    int level = code.levels[i & magnitude_mask];
    if (i >> sign_bit & 1) level = -level;
    levels.low[i] = (uint8_t)level, levels.high[i] = (uint8_t)(level >> 8);
  }
  return levels;
}

constexpr ByteLevels make_negative(const Code& code) {  // by magnitude alone
  ByteLevels levels = {};
  for (int i = 0; i < 64; i++) {
    int level = -code.levels[i & (code.magnitudes - 1)];
    levels.low[i] = (uint8_t)level, levels.high[i] = (uint8_t)(level >> 8);
  }
  return levels;
}

template <int C> struct CodeOf {
  static constexpr Code code = CODES[C];
  static constexpr int sign_bit = code.bits - 1, magnitude_mask = (1 << (code.bits - 1)) - 1;
  static_assert((1 << (code.bits - 1)) == code.magnitudes, "a level for each magnitude");
  // 2 bits: the sign is some bits above the magnitude in one byte.
  static constexpr int sign_distance = code.sign_shift[0] - code.magnitude_shift[0];
};

// 16-bit levels of bytes: of words 0 and 1 of each lane, then of words 2 and 3.
INLINE void look_up(Bytes low, Bytes high, Bytes index, Bytes* out) {
#ifdef HAS_VBMI
  Bytes l = _mm512_permutexvar_epi8(index, low), h = _mm512_permutexvar_epi8(index, high);
#else
  Bytes l = shuffle_bytes(low, index), h = shuffle_bytes(high, index);
#endif
  out[0] = low_bytes(l, h), out[1] = high_bytes(l, h);
}

#ifdef HAS_VBMI
// Positions of 8 of 64 bits, such that bit `shifted` is bit_of's.
constexpr Control make_positions(const Code& code, int e2, Source source, int parity, int shifted) {
  Control control = {};
  for (int i = 0; i < 64; i++)
    control.at[i] = (word_bit(i) + bit_of(code, code_at(i, e2), source, parity) - shifted) & 63;
  return control;
}
template <int C, int E2, Source S, int PARITY, int SHIFTED> INLINE Bytes take_bits(Bytes v) {
  static constexpr Control positions = make_positions(CODES[C], E2, S, PARITY, SHIFTED);
  return _mm512_multishift_epi64_epi8(load(positions.at), v);
}
template <int C> INLINE void table_of(Bytes* low, Bytes* high) {
  using K = CodeOf<C>;
  static constexpr ByteLevels levels = make_levels(K::code, K::code.bits == 2 ? K::sign_distance : K::sign_bit,
                                               K::magnitude_mask);
  *low = load(levels.low), *high = load(levels.high);
}
#else
// Bytes of a lane that have the code's bit, and masks of that bit.
struct BitTest {
  Control byte, bit;
};
constexpr BitTest make_test(const Code& code, int e2, Source source, int parity, int further) {
  BitTest test = {};
  for (int i = 0; i < 64; i++) {
    int at = word_bit(i) + bit_of(code, code_at(i, e2), source, parity) + further;
    test.byte.at[i] = (i & 8) + at / 8, test.bit.at[i] = 1 << at % 8;
  }
  return test;
}
// Byte `value` where bit_of + FURTHER is set.
template <int C, int E2, Source S, int PARITY, int FURTHER> INLINE Bytes take_bit(Bytes v, int value) {
  static constexpr BitTest test = make_test(CODES[C], E2, S, PARITY, FURTHER);
  return bit_and(test_bits(shuffle_bytes(v, load(test.byte.at)), load(test.bit.at)), broadcast_8(value));
}
template <int C> INLINE void table_of(Bytes* low, Bytes* high) {
  using K = CodeOf<C>;
  static constexpr ByteLevels levels = make_levels(K::code, K::sign_bit, K::magnitude_mask);
  *low = broadcast_lane(levels.low), *high = broadcast_lane(levels.high);
}
#endif

// Codes of 4 bits: nibble k of a word is magnitude k; a shift of the word puts signs below their magnitudes.
template <int C> INLINE void decode_nibbles(Bytes x, Bytes low, Bytes high, Bytes* out) {
  static_assert(CODES[C].magnitude_shift[1] == 4 && CODES[C].sign_shift[0] == 7 && CODES[C].sign_shift[4] == 3, "");
  Bytes sign = broadcast_8(8), shifted = SHIFT_RIGHT_32(x, 4);
#ifdef HAS_VBMI
  Bytes first = select(sign, shifted, take_bits<C, 0, MAGNITUDES, 0, 0>(x));
  Bytes second = select(sign, x, take_bits<C, 1, MAGNITUDES, 0, 0>(x));
#else
  Bytes even = bit_and(x, broadcast_8(7)), odd = bit_and(shifted, broadcast_8(7));
  Bytes a = low_bytes(even, odd), b = high_bytes(even, odd);
  Bytes first = bit_or(even_words(a, b), bit_and(shifted, sign));
  Bytes second = bit_or(odd_words(a, b), bit_and(x, sign));
#endif
  look_up(low, high, first, out), look_up(low, high, second, out + 2);
}

// Codes of 5 bits, nibble by nibble, with signs in `s`: a look-up by an index of 5 bits, or look-ups of both signs'
// levels and a choice.
template <int C, int E2, Source S, int PARITY> INLINE void decode_five(Bytes x, Bytes s, Bytes low, Bytes high, Bytes* out) {
#ifdef HAS_VBMI
  look_up(low, high, select(broadcast_8(16), take_bits<C, E2, S, PARITY, 4>(s), take_bits<C, E2, MAGNITUDES, 0, 0>(x)), out);
#else
  static constexpr ByteLevels negative = make_negative(CODES[C]);
  Bytes index = zero();
  unrolled<4>([&](auto bit) {
    index = bit_or(index, take_bit<C, E2, MAGNITUDES, 0, bit.value>(x, 1 << bit.value));
  });
  Bytes is_negative = take_bit<C, E2, S, PARITY, 0>(s, 255);
  Bytes l = select(is_negative, shuffle_bytes(broadcast_lane(negative.low), index), shuffle_bytes(low, index));
  Bytes h = select(is_negative, shuffle_bytes(broadcast_lane(negative.high), index), shuffle_bytes(high, index));
  out[0] = low_bytes(l, h), out[1] = high_bytes(l, h);
#endif
}

// Codes of 3 bits, with signs in `s`.
template <int C, int E2, Source S, int PARITY> INLINE Bytes index_of_three(Bytes x, Bytes s) {
#ifdef HAS_VBMI
  return select(broadcast_8(4), take_bits<C, E2, S, PARITY, 2>(s), take_bits<C, E2, MAGNITUDES, 0, 0>(x));
#else
  Bytes magnitude = bit_or(take_bit<C, E2, MAGNITUDES, 0, 0>(x, 1), take_bit<C, E2, MAGNITUDES, 0, 1>(x, 2));
  return bit_or(magnitude, take_bit<C, E2, S, PARITY, 0>(s, 4));
#endif
}

// Codes of 2 bits.
template <int C, int E2> INLINE Bytes index_of_two(Bytes x) {
#ifdef HAS_VBMI
  static_assert(CodeOf<C>::sign_distance > 0 && CodeOf<C>::sign_distance < 6, "both in an index of 6 bits");
  return take_bits<C, E2, MAGNITUDES, 0, 0>(x);
#else
  return bit_or(take_bit<C, E2, MAGNITUDES, 0, 0>(x, 1), take_bit<C, E2, SIGNS, 0, 0>(x, 2));
#endif
}

constexpr Control make_spread(int t) {  // half word t of rows 2 L and 2 L + 1 to the words of lane L
  Control control = {};
  for (int i = 0; i < 64; i++) control.at[i] = i & 2 ? 0x80 : (i >> 2 & 1) * 8 + 2 * t + (i & 1);
  return control;
}

template <int WORD, int T> INLINE Bytes word_of(const uint8_t* arranged) {
  constexpr Place place = place_of(WORD, T);
  Bytes pair = load(arranged + place.vector * VECTOR_BYTES);
  return place.half ? twice_high(pair) : twice_low(pair);
}

// The words with the signs of a group that has sign words.
template <int ROLE, int GROUP, int T> INLINE Bytes signs_in(const uint8_t* arranged) {
  constexpr Group group = GROUP_TABLE[ROLE][GROUP];
  if constexpr (signs_of(group) == SIGNS_OF_HALF) {
    static constexpr Control spread = make_spread(T);
    return shuffle_bytes(load(arranged + 2 * WORDS * VECTOR_BYTES), load(spread.at));
  } else {
    return word_of<group.sign_word, T>(arranged);
  }
}

// ByteLevels of a group and t of an arranged part. `low`, `high`: from table_of.
template <int ROLE, int GROUP, int T> INLINE void decode(const uint8_t* arranged, Bytes low, Bytes high, Bytes* out) {
  constexpr Group group = GROUP_TABLE[ROLE][GROUP];
  constexpr int C = group.code;
  if constexpr (CODES[C].bits >= 4) {
    constexpr Place place = place_of(group.word, T);
    static_assert(place.half == 0, "the two words of a group are a pair");
    Bytes x = load(arranged + place.vector * VECTOR_BYTES);
    if constexpr (CODES[C].bits == 4) {
      decode_nibbles<C>(x, low, high, out);
    } else {
      constexpr Source source = signs_of(group);
      Bytes s = signs_in<ROLE, GROUP, T>(arranged);
      decode_five<C, 0, source, group.parity>(x, s, low, high, out);
      decode_five<C, 1, source, group.parity>(x, s, low, high, out + 2);
    }
  } else if constexpr (CODES[C].bits == 3) {
    constexpr Source source = signs_of(group);
    Bytes x = word_of<group.word, T>(arranged), s = signs_in<ROLE, GROUP, T>(arranged);
    look_up(low, high, index_of_three<C, 0, source, group.parity>(x, s), out);
    look_up(low, high, index_of_three<C, 1, source, group.parity>(x, s), out + 2);
  } else {
    static_assert(CODES[C].bits == 2, "a decoder for the width");
    Bytes x = word_of<group.word, T>(arranged);
    look_up(low, high, index_of_two<C, 0>(x), out);
    look_up(low, high, index_of_two<C, 1>(x), out + 2);
  }
}

// --- scales ---------------------------------------------------------------------------------------------------------
// Scale bytes of 16 tokens lie by lane L = n2 n1, n0 and n3 as layout.py draws them; as floats they are needed in the
// order of scores, [n2 n1][n3][n0]. A lane has 4 * GROUPS bytes; a vector's lane reads 16 of them from `window` on.
constexpr int LANE_SCALES = 4 * GROUPS;
constexpr int scale_byte(int role, int group, int word) {  // word = 2 * n3 + n0
  return scale_at(role, group, (word >> 1) * 8 + (word & 1));
}
// A shorter lane is read with what lies before it, codes or K's scales: its load from a copy would wait for stores.
constexpr int window_of(int vector, int group, int n0) {
  int first = scale_byte(vector, group, n0), latest = LANE_SCALES - 16;
  return first < latest ? first : latest;
}
constexpr Control make_scale_control(int vector, int group, int n0, bool only) {
  Control control = {};
  for (int i = 0; i < 64; i++) {
    int word = i >> 2 & 3, byte = scale_byte(vector, group, word) - window_of(vector, group, n0);
    bool wanted = (i & 3) == 2 && (!only || (word & 1) == n0);
    control.at[i] = wanted ? byte : 0x80;
  }
  return control;
}

// Scales of a micro-block's vector, times the unit of their codes (and V's gain), as fp32 [group][16 tokens].
INLINE void read_scales(const uint8_t* micro_block, int role, float* to) {
  const uint8_t* plane = micro_block + SCALES_AT[role];
  auto read = [&](auto vector) {
    unrolled<GROUPS>([&](auto group) {
      constexpr int V = vector.value, G = group.value;
      // K of 8 groups: the bytes of n0 = 0 and 1 are further apart than a lane is long.
      constexpr bool apart = V == 0 && scale_byte(0, G, 3) - window_of(0, G, 0) > 15;
      static constexpr Control first = make_scale_control(V, G, 0, apart), second = make_scale_control(V, G, 1, true);
      constexpr Code code = CODES[GROUP_TABLE[V][G].code];
      constexpr float unit = code.unit * (V == 1 ? code.gain : 1);
      for (int part = 0; part < PARTS; part++) {
        const uint8_t* lanes = plane + part * VECTOR_LANES * LANE_SCALES;
        Bytes bytes = shuffle_bytes(load_lanes(lanes + window_of(V, G, 0), LANE_SCALES), load(first.at));
        if constexpr (apart) {
          Bytes rest = load_lanes(lanes + window_of(V, G, 1), LANE_SCALES);
          bytes = bit_or(bytes, shuffle_bytes(rest, load(second.at)));
        }
        store_floats(to + G * MICRO_BLOCK + part * VECTOR_FLOATS, decode_scales(bytes, unit));
      }
    });
  };
  if (role == 0) read(Index<0>{});
  else read(Index<1>{});
}

// Index of a micro-block's token in the order of scores: [n2 n1][n3][n0].
INLINE int place_of_token(int token) { return (token >> 1 & 3) * 4 + (token >> 3) * 2 + (token & 1); }
