// A tile of latents for processors with AMX, whose tiles are 16 rows of 64 bytes: products in bf16, sums in fp32.
//
//   values   a level times its scale has 8 significant bits, so bf16 has it exactly. They are decoded once, for K and V:
//            [micro-block][group][row: a pair of channels, t e2 e1][16 tokens][e0]
//   K        [16 columns][pairs of channels] x values -> scores [16 columns][16 tokens]
//   V        values x [16 tokens][16 columns] -> sums [pairs of channels][16 columns], for e0 = 0 with weights in the
//            lower halves of words and zeros in the upper ones, for e0 = 1 the reverse
//
// Numbers that bf16 does not hold exactly (weights, RoPE keys, queries in fp16 and fp32) are sums of two bf16 numbers.
// Tokens are in the order of scores. Columns are padded to a multiple of 16 with zeros.
#pragma once
#include "latent_tile.h"

#ifdef HAS_AMX

// GCC's intrinsics of tiles do not say that they read and write memory.
#define TILES_USE_MEMORY() asm volatile("" ::: "memory")

// Configures this thread's tiles, and restores them at the end: PyTorch's kernels have a configuration of their own.
class AmxTiles {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } before;

 public:
  AmxTiles() {
    Config own = {};
    own.palette = 1;
    for (int i = 0; i < 8; i++) own.row_bytes[i] = 64, own.rows[i] = 16;
    _tile_storeconfig(&before);
    _tile_loadconfig(&own);
  }
  ~AmxTiles() {
    if (before.palette) _tile_loadconfig(&before);
    else _tile_release();
  }
};
// --- numbers as bf16 ---
INLINE Bytes upper_half(Bytes x) { return bit_and(x, broadcast_word((int32_t)0xffff0000)); }
INLINE Bytes pair_of(Bytes first, Bytes second) { return bit_or(SHIFT_RIGHT_32(first, 16), upper_half(second)); }
struct HighLow {
  Bytes high, low;  // fp32: their upper halves are bf16 numbers, whose sum has 16 significant bits
};
INLINE HighLow split(Floats x) {
  Bytes high = upper_half(floats_as_bits(x));
  return {high, upper_half(floats_as_bits(x - bits_as_floats(high)))};
}

constexpr int bfloat16_of(int level) {  // 0 .. 255
  if (level == 0) return 0;
  int exponent = 7;
  while (!(level >> exponent)) exponent--;
  return (127 + exponent) << 7 | (level << (7 - exponent) & 0x7f);
}
template <int C> INLINE void bfloat16_table(Bytes* low, Bytes* high) {
  static constexpr ByteLevels levels = [] {
    using K = CodeOf<C>;
    const int sign_bit = K::code.bits == 2 ? K::sign_distance : K::sign_bit;
    ByteLevels made = {};
    for (int i = 0; i < 64; i++) {
      int bits = bfloat16_of(K::code.levels[i & K::magnitude_mask]);
      if (bits && i >> sign_bit & 1) bits |= 0x8000;
      made.low[i] = (uint8_t)bits, made.high[i] = (uint8_t)(bits >> 8);
    }
    return made;
  }();
  *low = load(levels.low), *high = load(levels.high);
}

// Transposes 16 x 16 floats, whose rows are `next` bytes apart: put(column, its rows).
template <class Put> INLINE void transpose(const float* from, long next, Put put) {
  for (int n = 0; n < 16; n += 4) {
    const uint8_t* at = (const uint8_t*)(from + n);
    Bytes a = load_lanes(at, 4 * next), b = load_lanes(at + next, 4 * next);
    Bytes c = load_lanes(at + 2 * next, 4 * next), e = load_lanes(at + 3 * next, 4 * next);
    Bytes low_ac = low_words(a, c), low_be = low_words(b, e), high_ac = high_words(a, c), high_be = high_words(b, e);
    put(n, low_words(low_ac, low_be)), put(n + 1, high_words(low_ac, low_be));
    put(n + 2, low_words(high_ac, high_be)), put(n + 3, high_words(high_ac, high_be));
  }
}

// Rows of a tile of values are pairs of channels, in the order of a ring: t t e2 e1.
static constexpr struct PairOrder {
  alignas(64) int32_t first[16], second[16];  // numbers of a pair, in the order of a ring
  alignas(64) int32_t from[32];               // of a channel: row + 16 * e0
  constexpr PairOrder() : first{}, second{}, from{} {
    for (int row = 0; row < 16; row++) {
      first[row] = 2 * row, second[row] = 2 * row + 1;
      from[ring_channel(0, 2 * row)] = row, from[ring_channel(0, 2 * row + 1)] = 16 + row;
    }
  }
} PAIRS;
static_assert(ring_channel(0, 2) == 8 && ring_channel(0, 4) == 16 && ring_channel(0, 8) == 2, "t t e2 e1 e0");

struct LatentAmxTile : Columns {
  static constexpr int TOKENS = LatentTile::TOKENS, BLOCKS = LatentTile::BLOCKS, AHEAD = LatentTile::AHEAD;
  static constexpr int SIDE = 16, TILE_BYTES = 1024;  // an AMX tile: rows; bytes
  static constexpr int ROPE_TILES = ROPE_DIM / GROUP_SIZE, QUERY_TILES = GROUPS + ROPE_TILES;
  static constexpr int AT_ONCE = 4;  // sums: no product waits for the one before it
  static constexpr long LOW = (long)QUERY_TILES * TILE_BYTES, ROPE_LOW = (long)ROPE_TILES * TILE_BYTES;
  static_assert(ROPE_DIM % GROUP_SIZE == 0 && BLOCKS % AT_ONCE == 0 && PARTS == 1, "");
  uint8_t* query_tiles;  // [16 columns][high, low][QUERY_TILES], not scaled
  bool has_low;          // whether a query has a low part
  float scale;           // of scores
  float* sums;           // [16 columns][group][e0][row][column]
  uint8_t* values;       // [micro-block][group], a tile each
  uint8_t* rope;         // [micro-block][high, low][ROPE_TILES], a tile each
  uint8_t* weights;      // [micro-block][high, low][e0], a tile each

  static long part_tokens(long tiles) { return LatentTile::part_tokens(tiles); }
  static long padded(long columns) { return (columns + SIDE - 1) / SIDE * SIDE; }

  void cut(const Arguments& a, Cutter& from, long columns) {
    Columns::cut(a, from, padded(columns), TOKENS);
    query_tiles = from.take<uint8_t>(padded(columns) / SIDE * 2 * LOW);
    sums = from.take<float>(padded(columns) * STORED_DIM);
    values = from.take<uint8_t>((long)BLOCKS * GROUPS * TILE_BYTES);
    rope = from.take<uint8_t>((long)BLOCKS * 2 * ROPE_LOW);
    weights = from.take<uint8_t>((long)BLOCKS * 4 * TILE_BYTES);
  }
  void clear() const {
    memset(sums, 0, sizeof(float) * padded(count) * STORED_DIM);
    for (long column = count; column < padded(count); column++) tile_factors[column] = 0;
  }

  // --- queries ---
  void put_query(const Arguments& a, int column, const float* query) {
    uint8_t* of_side = query_tiles + (long)column / SIDE * 2 * LOW;
    if (column == 0) has_low = false, scale = (float)a.scale;
    if (column % SIDE == 0 && count - column < SIDE) memset(of_side, 0, 2 * LOW);
    const Bytes first_of_pair = load(PAIRS.first), second_of_pair = load(PAIRS.second);
    Bytes any_low = zero();
    uint8_t* to = of_side + column % SIDE * 64;
    for (int i = 0; i < ALL_CHANNELS; i += GROUP_SIZE, to += TILE_BYTES) {
      Floats low = load_floats(query + i), high = load_floats(query + i + VECTOR_FLOATS);
      HighLow even = split(_mm512_permutex2var_ps(low, first_of_pair, high));
      HighLow odd = split(_mm512_permutex2var_ps(low, second_of_pair, high));
      Bytes rest = pair_of(even.low, odd.low);
      store(to, pair_of(even.high, odd.high)), store(to + LOW, rest);
      any_low = bit_or(any_low, rest);
    }
    has_low |= _mm512_test_epi32_mask(any_low, any_low) != 0;
    for (int i = 0; ring_sums && i < ALL_CHANNELS; i += VECTOR_FLOATS)
      store_floats(ring_queries + (long)column * ALL_CHANNELS + i, load_floats(query + i) * broadcast(scale));
  }

  // --- K ---
  static void decode_values(const uint8_t* micro_block, const float* scales, uint8_t* to) {
    alignas(64) uint8_t arranged[ARRANGED * VECTOR_BYTES];
    Tables tables;
    unrolled<WIDTHS>([&](auto code) { bfloat16_table<code.value>(&tables.low[code.value], &tables.high[code.value]); });
    arrange(micro_block, 0, 0, arranged);
    unrolled<GROUPS>([&](auto group) {
      Floats of_group = load_floats(scales + group.value * MICRO_BLOCK);
      unrolled<4>([&](auto t) {
        Bytes levels[4];
        tables.decode(Index<0>{}, group, t, arranged, levels);
        for (int e = 0; e < 4; e++, to += 64) {  // e2 e1
          Bytes n3_0 = levels[e & 2], n3_1 = levels[(e & 2) + 1];
          Bytes pair = e & 1 ? odd_words(n3_0, n3_1) : even_words(n3_0, n3_1);
          Floats first = bits_as_floats(SHIFT_LEFT_32(pair, 16)) * of_group;
          Floats second = bits_as_floats(upper_half(pair)) * of_group;
          store(to, pair_of(floats_as_bits(first), floats_as_bits(second)));
        }
      });
    });
  }
  // Decodes a micro-block that has `tokens` tokens.
  void decode_micro_block(const uint8_t* micro_block, int number, int tokens) const {
    alignas(64) float scales[GROUPS * MICRO_BLOCK];
    alignas(64) Row rows[ROPE_DIM];
    read_scales(micro_block, 0, scales);
    for (int n = (int)most(0, tokens); n < MICRO_BLOCK; n++)  // bytes of missing tokens may be anything
      for (int g = 0; g < GROUPS; g++) scales[g * MICRO_BLOCK + place_of_token(n)] = 0;
    decode_values(micro_block, scales, values + (long)number * GROUPS * TILE_BYTES);
    LatentTile::read_rope(micro_block, rows);
    uint8_t* to = rope + (long)number * 2 * ROPE_LOW;
    for (int d = 0; d < ROPE_DIM; d += 2, to += 64) {
      HighLow first = split(load_floats(rows[d])), second = split(load_floats(rows[d + 1]));
      store(to, pair_of(first.high, second.high)), store(to + ROPE_LOW, pair_of(first.low, second.low));
    }
  }

  // Products of a tile of queries with AT_ONCE micro-blocks' tiles, `next` apart: to tiles 0 to 3.
  static INLINE_MEMBER void multiply_queries(const uint8_t* query, const uint8_t* keys, long next) {
    _tile_loadd(4, query, 64);
    _tile_loadd(5, keys, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, keys + next, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, keys + 2 * next, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, keys + 3 * next, 64);
    _tile_dpbf16ps(3, 4, 5);
  }

  // Scores behind the last micro-block are computed, too, and never read.
  void score(const uint8_t* const* micro_blocks, int blocks, int known, int tokens) const {
    for (int i = 0; i < blocks; i++) {
      if (i + AHEAD < known) prefetch(micro_blocks[i + AHEAD]);
      decode_micro_block(micro_blocks[i], i, tokens - i * MICRO_BLOCK);
    }
    const AmxTiles configured;
    TILES_USE_MEMORY();
    for (int first = 0; first < count; first += SIDE)
      for (int block = 0; block < blocks; block += AT_ONCE) score_side(first, block);
    TILES_USE_MEMORY();
    for (int column = 0; column < count; column++) {
      float* of_column = scores + (long)column * TOKENS;
      for (int i = 0; i < blocks * MICRO_BLOCK; i += VECTOR_FLOATS)
        store_floats(of_column + i, load_floats(of_column + i) * broadcast(scale));
    }
  }
  // Scores AT_ONCE micro-blocks for 16 columns.
  void score_side(int first, int block) const {
    const uint8_t* queries_of_side = query_tiles + (long)first / SIDE * 2 * LOW;
    const uint8_t* of_block = values + (long)block * GROUPS * TILE_BYTES;
    const uint8_t* rope_of_block = rope + (long)block * 2 * ROPE_LOW;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int part = 0; part <= has_low; part++) {
      const uint8_t* query = queries_of_side + part * LOW;
      for (int g = 0; g < GROUPS; g++)
        multiply_queries(query + g * TILE_BYTES, of_block + g * TILE_BYTES, (long)GROUPS * TILE_BYTES);
      for (int g = 0; g < ROPE_TILES; g++) {
        const uint8_t* of_rope = query + (GROUPS + g) * TILE_BYTES;
        multiply_queries(of_rope, rope_of_block + g * TILE_BYTES, 2 * ROPE_LOW);
        if (part == 0) multiply_queries(of_rope, rope_of_block + ROPE_LOW + g * TILE_BYTES, 2 * ROPE_LOW);
      }
    }
    float* to = scores + (long)first * TOKENS + block * MICRO_BLOCK;
    _tile_stored(0, to, sizeof(float) * TOKENS);
    _tile_stored(1, to + MICRO_BLOCK, sizeof(float) * TOKENS);
    _tile_stored(2, to + 2 * MICRO_BLOCK, sizeof(float) * TOKENS);
    _tile_stored(3, to + 3 * MICRO_BLOCK, sizeof(float) * TOKENS);
  }

  // --- V ---
  // Weights of 16 columns from `first` on.
  void weigh(int first, int blocks) const {
    for (int block = 0; block < blocks; block++) {
      uint8_t* to = weights + (long)block * 4 * TILE_BYTES;
      auto put = [&](int token, Bytes x) {
        HighLow weight = split(bits_as_floats(x));
        uint8_t* row = to + token * 64;
        store(row, SHIFT_RIGHT_32(weight.high, 16)), store(row + TILE_BYTES, weight.high);
        store(row + 2 * TILE_BYTES, SHIFT_RIGHT_32(weight.low, 16)), store(row + 3 * TILE_BYTES, weight.low);
      };
      transpose(scores + (long)first * TOKENS + block * MICRO_BLOCK, sizeof(float) * TOKENS, put);
    }
  }

  // Adds products with V of two groups for 16 columns.
  void add_values(int first, int group, int blocks) const {
    alignas(64) float products[4 * SIDE * SIDE];
    bool is_pair = group + 1 < GROUPS;
    const uint8_t* of_group = values + (long)group * TILE_BYTES;
    const uint8_t* of_block = weights;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < blocks; i++, of_group += GROUPS * TILE_BYTES, of_block += 4 * TILE_BYTES) {
      _tile_loadd(4, of_group, 64);
      _tile_loadd(5, of_group + is_pair * TILE_BYTES, 64);
      _tile_loadd(6, of_block, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, of_block + TILE_BYTES, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(6, of_block + 2 * TILE_BYTES, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, of_block + 3 * TILE_BYTES, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, products, 64);
    _tile_stored(1, products + SIDE * SIDE, 64);
    _tile_stored(2, products + 2 * SIDE * SIDE, 64);
    _tile_stored(3, products + 3 * SIDE * SIDE, 64);
    TILES_USE_MEMORY();
    Floats factor = load_floats(tile_factors + first);
    float* to = sums + (long)first * STORED_DIM + (long)group * GROUP_SIZE * SIDE;
    for (int i = 0; i < (is_pair ? 4 : 2) * SIDE * SIDE; i += SIDE)
      store_floats(to + i, multiply_add(load_floats(products + i), factor, load_floats(to + i)));
  }

  void add(const uint8_t* const*, int blocks) const {
    const AmxTiles configured;
    for (int first = 0; first < count; first += SIDE) {
      weigh(first, blocks);
      TILES_USE_MEMORY();
      for (int g = 0; g < GROUPS; g += 2) add_values(first, g, blocks);
    }
  }

  void shrink(int column, float factor) const {
    float* at = sums + (long)column / SIDE * SIDE * STORED_DIM + column % SIDE;
    for (int i = 0; i < STORED_DIM; i++) at[i * SIDE] *= factor;
  }
  void collect(float* to) const {
    alignas(64) float by_column[2][SIDE][SIDE];
    for (int first = 0; first < count; first += SIDE)
      for (int g = 0; g < GROUPS; g++) {
        const float* of_group = sums + (long)first * STORED_DIM + (long)g * GROUP_SIZE * SIDE;
        for (int e0 = 0; e0 < 2; e0++)
          transpose(of_group + e0 * SIDE * SIDE, 64,
                    [&](int column, Bytes rows) { ::store(by_column[e0][column], rows); });
        for (int c = 0; c < SIDE && first + c < count; c++)
          for (int half = 0; half < GROUP_SIZE; half += VECTOR_FLOATS) {
            Floats even = load_floats(by_column[0][c]), odd = load_floats(by_column[1][c]);
            Floats channels = _mm512_permutex2var_ps(even, load(PAIRS.from + half), odd);
            store_floats(to + (long)(first + c) * STORED_DIM + g * GROUP_SIZE + half, channels);
          }
      }
  }
};
#endif
