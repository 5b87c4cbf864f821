// A tile of latents for all columns with AMX: tiles of 16 rows of 64 bytes, products in bf16, sums in fp32.
//
//   values   a level times its scale has 8 significant bits, so bf16 has it exactly. They are decoded once, for K and V:
//            [micro-block][group][row: a pair of channels, t e2 e1][16 tokens][e0]
//   K        [16 columns][pairs of channels] x values -> scores [16 columns][16 tokens]
//   V        values x [16 tokens][16 columns] -> sums [pairs of channels][16 columns], for e0 = 0 with weights in the
//            lower halves of words and zeros in the upper ones, for e0 = 1 the reverse
//
// What bf16 does not hold exactly (weights, RoPE keys, queries in fp16 and fp32) is the sum of two numbers that it does.
// Tokens are in the order of scores. Columns are padded to a multiple of 16: those that are not there are 0.
#pragma once
#include <immintrin.h>

constexpr int SIDE = 16, TILE_BYTES = 1024;  // of an AMX tile: rows; bytes
constexpr int ROPE_TILES = ROPE_DIM / GROUP_SIZE, QUERY_TILES = GROUPS + ROPE_TILES;
constexpr int AT_ONCE = 4;  // sums that no product waits for
static_assert(ROPE_DIM % GROUP_SIZE == 0 && TILE_BLOCKS % AT_ONCE == 0 && PARTS == 1, "");

static inline int padded(int columns) { return (columns + SIDE - 1) / SIDE * SIDE; }

struct Columns {
  static constexpr int TOKENS = TILE;
  int count;
  uint8_t* queries;     // [16 columns][high, low][QUERY_TILES], a tile each, not scaled
  bool has_low;         // whether a query has a low part
  float scale;          // of scores
  float* ring_queries;  // [column][RING_DIM], in the order of KEY_BYTES, scaled
  float* scores;        // [column][TILE], in the order of scores; then exponentials
  float* sums;          // [16 columns][group][e0][row][column]
  float* ring_sums;     // [column][RANK], in the order of KEY_BYTES
  Softmax* softmax;
  float* tile_factors;  // what an exponential of 1 is in the sums; 0: the column sees nothing of the tile
  long* hidden_from;
  uint8_t* values;      // [micro-block][group], a tile each
  uint8_t* rope;        // [micro-block][high, low][ROPE_TILES], a tile each
  uint8_t* weights;     // [micro-block][high, low][e0], a tile each
  float* ring_rows;     // [RING_TILE][RING_DIM]
};

static Columns cut_columns(const LatentArguments& a, Cutter& from, long count) {
  Columns c = {};
  long all = padded((int)count);
  c.queries = from.take<uint8_t>(all / SIDE * 2 * QUERY_TILES * TILE_BYTES);
  if (a.ring) c.ring_queries = from.take<float>(count * RING_DIM), c.ring_sums = from.take<float>(count * RANK);
  c.scores = from.take<float>(all * TILE);
  c.sums = from.take<float>(all * RANK);
  c.softmax = from.take<Softmax>(count);
  c.tile_factors = from.take<float>(all);
  c.hidden_from = from.take<long>(count);
  c.values = from.take<uint8_t>((long)TILE_BLOCKS * GROUPS * TILE_BYTES);
  c.rope = from.take<uint8_t>((long)TILE_BLOCKS * 2 * ROPE_TILES * TILE_BYTES);
  c.weights = from.take<uint8_t>((long)TILE_BLOCKS * 4 * TILE_BYTES);
  c.ring_rows = a.ring ? from.take<float>((long)RING_TILE * RING_DIM) : nullptr;
  return c;
}

static void clear_sums(const Columns& columns) {
  memset(columns.sums, 0, sizeof(float) * padded(columns.count) * RANK);
}

// Configures this thread's tiles, and leaves them as they were: PyTorch's kernels have a configuration of their own.
class Tiles {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } before;

 public:
  Tiles() {
    Config own = {};
    own.palette = 1;
    for (int i = 0; i < 8; i++) own.row_bytes[i] = 64, own.rows[i] = SIDE;
    _tile_storeconfig(&before);
    _tile_loadconfig(&own);
  }
  ~Tiles() {
    if (before.palette) _tile_loadconfig(&before);
    else _tile_release();
  }
};
// GCC's intrinsics of tiles do not say that they read and write memory.
#define MEMORY_IS_READ() asm volatile("" ::: "memory")

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
  static constexpr Levels levels = [] {
    using K = CodeOf<C>;
    const int sign_bit = K::code.bits == 2 ? K::sign_distance : K::sign_bit;
    Levels made = {};
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
  for (int n = 0; n < SIDE; n += 4) {
    const uint8_t* at = (const uint8_t*)(from + n);
    Bytes a = load_lanes(at, 4 * next), b = load_lanes(at + next, 4 * next);
    Bytes c = load_lanes(at + 2 * next, 4 * next), e = load_lanes(at + 3 * next, 4 * next);
    Bytes low_ac = low_words(a, c), low_be = low_words(b, e), high_ac = high_words(a, c), high_be = high_words(b, e);
    put(n, low_words(low_ac, low_be)), put(n + 1, high_words(low_ac, low_be));
    put(n + 2, low_words(high_ac, high_be)), put(n + 3, high_words(high_ac, high_be));
  }
}

// Rows of a tile of values are pairs of channels, in the order of KEY_BYTES: t t e2 e1.
static constexpr struct PairOrder {
  alignas(64) int32_t first[SIDE], second[SIDE];  // channels of a pair
  alignas(64) int32_t from[2 * SIDE];             // of a channel: row + 16 * e0
  constexpr PairOrder() : first{}, second{}, from{} {
    for (int row = 0; row < SIDE; row++) {
      first[row] = KEY_BYTES[2 * row], second[row] = KEY_BYTES[2 * row + 1];
      from[first[row]] = row, from[second[row]] = SIDE + row;
    }
  }
} PAIRS;
static_assert(KEY_BYTES[2] == 8 && KEY_BYTES[4] == 16 && KEY_BYTES[8] == 2 && KEY_BYTES[16] == 4, "t t e2 e1 e0");

// --- queries ---
static void read_queries(const LatentArguments& a, long query, long tokens, Columns& to) {
  alignas(64) float row[RANK + ROPE_DIM];
  constexpr long OF_SIDE = 2l * QUERY_TILES * TILE_BYTES;
  if (to.count % SIDE) memset(to.queries + (long)to.count / SIDE * OF_SIDE, 0, OF_SIDE);
  const Bytes first_of_pair = load(PAIRS.first), second_of_pair = load(PAIRS.second);
  Bytes any_low = zero();
  to.scale = (float)a.scale;
  for (int column = 0; column < to.count; column++) {
    long token = query + column / a.heads, head = column % a.heads;
    const int bytes = element_bytes(a.query_type);
    long latent = token * a.query_stride + head * a.query_head_stride;
    long rope = token * a.rope_stride + head * a.rope_head_stride;
    read_elements(row, (const char*)a.query + bytes * latent, a.query_type, RANK);
    read_elements(row + RANK, (const char*)a.rope_query + bytes * rope, a.query_type, ROPE_DIM);
    uint8_t* tiles = to.queries + (long)column / SIDE * 2 * QUERY_TILES * TILE_BYTES + column % SIDE * 64;
    for (int tile = 0; tile < QUERY_TILES; tile++, tiles += TILE_BYTES) {
      Floats low = load_floats(row + tile * GROUP_SIZE), high = load_floats(row + tile * GROUP_SIZE + VECTOR_FLOATS);
      HighLow even = split(_mm512_permutex2var_ps(low, first_of_pair, high));
      HighLow odd = split(_mm512_permutex2var_ps(low, second_of_pair, high));
      store(tiles, pair_of(even.high, odd.high));
      Bytes rest = pair_of(even.low, odd.low);
      store(tiles + QUERY_TILES * TILE_BYTES, rest);
      any_low = bit_or(any_low, SHIFT_LEFT_32(rest, 1));  // without the upper sign; the lower one does no harm
    }
    for (int i = 0; a.ring && i < RING_DIM; i++)
      to.ring_queries[(long)column * RING_DIM + i] = row[i / 32 * 32 + KEY_BYTES[i % 32]] * (float)a.scale;
    to.hidden_from[column] = column / a.heads - (tokens - 1);  // less the tokens that a query does not see
  }
  to.has_low = _mm512_test_epi32_mask(any_low, any_low) != 0;
}

// --- values ---
static void decode_values(const uint8_t* micro_block, const float* scales, uint8_t* to) {
  alignas(64) uint8_t arranged[ARRANGED * VECTOR_BYTES];
  constexpr int WIDTHS = sizeof CODES / sizeof CODES[0];
  Bytes low[WIDTHS], high[WIDTHS];
  unrolled<WIDTHS>([&](auto code) { bfloat16_table<code.value>(&low[code.value], &high[code.value]); });
  arrange(micro_block, 0, 0, arranged);
  unrolled<GROUPS>([&](auto group) {
    Floats scale = load_floats(scales + group.value * MICRO_BLOCK);
    unrolled<4>([&](auto t) {
      Bytes levels[4];
      constexpr int code = GROUP_TABLE[group.value].code;
      decode<group.value, t.value>(arranged, low[code], high[code], levels);
      for (int e = 0; e < 4; e++, to += 64) {  // e2 e1
        Bytes of_e3[] = {levels[e & 2], levels[(e & 2) + 1]};
        Bytes pair = e & 1 ? odd_words(of_e3[0], of_e3[1]) : even_words(of_e3[0], of_e3[1]);
        Floats first = bits_as_floats(SHIFT_LEFT_32(pair, 16)) * scale, second = bits_as_floats(upper_half(pair)) * scale;
        store(to, pair_of(floats_as_bits(first), floats_as_bits(second)));
      }
    });
  });
}

// Decodes a micro-block, of which `tokens` are there.
static void score_micro_block(const Columns& columns, const uint8_t* micro_block, int number, int tokens) {
  alignas(64) float rope[ROPE_DIM][MICRO_BLOCK], scales[GROUPS * MICRO_BLOCK];
  read_scales(micro_block, 0, scales);
  for (int n = tokens; n < MICRO_BLOCK; n++)  // those of tokens that are not there may be any
    for (int g = 0; g < GROUPS; g++) scales[g * MICRO_BLOCK + place_of_token(n)] = 0;
  decode_values(micro_block, scales, columns.values + (long)number * GROUPS * TILE_BYTES);
  read_rope(micro_block, rope);
  uint8_t* to = columns.rope + (long)number * 2 * ROPE_TILES * TILE_BYTES;
  for (int d = 0; d < ROPE_DIM; d += 2, to += 64) {
    HighLow first = split(load_floats(rope[d])), second = split(load_floats(rope[d + 1]));
    store(to, pair_of(first.high, second.high)), store(to + ROPE_TILES * TILE_BYTES, pair_of(first.low, second.low));
  }
}

// Products of a tile of queries with AT_ONCE micro-blocks' tiles, `next` apart: to tiles 0 to 3.
INLINE void multiply_queries(const uint8_t* query, const uint8_t* keys, long next) {
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

// Scores of a tile's micro-blocks for all columns. What is behind the last micro-block is scored, too, and not read.
static void score_tile(const Columns& columns, int blocks) {
  constexpr long LOW = (long)QUERY_TILES * TILE_BYTES, ROPE_LOW = (long)ROPE_TILES * TILE_BYTES;
  MEMORY_IS_READ();
  for (int first = 0; first < columns.count; first += SIDE) {
    const uint8_t* queries = columns.queries + (long)first / SIDE * 2 * LOW;
    for (int block = 0; block < blocks; block += AT_ONCE) {
      const uint8_t* values = columns.values + (long)block * GROUPS * TILE_BYTES;
      const uint8_t* rope = columns.rope + (long)block * 2 * ROPE_LOW;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int part = 0; part <= columns.has_low; part++) {
        const uint8_t* query = queries + part * LOW;
        for (int g = 0; g < GROUPS; g++)
          multiply_queries(query + g * TILE_BYTES, values + g * TILE_BYTES, (long)GROUPS * TILE_BYTES);
        for (int g = 0; g < ROPE_TILES; g++) {
          multiply_queries(query + (GROUPS + g) * TILE_BYTES, rope + g * TILE_BYTES, 2 * ROPE_LOW);
          if (part == 0) multiply_queries(query + (GROUPS + g) * TILE_BYTES, rope + ROPE_LOW + g * TILE_BYTES, 2 * ROPE_LOW);
        }
      }
      float* scores = columns.scores + (long)first * TILE + block * MICRO_BLOCK;
      _tile_stored(0, scores, sizeof(float) * TILE);
      _tile_stored(1, scores + MICRO_BLOCK, sizeof(float) * TILE);
      _tile_stored(2, scores + 2 * MICRO_BLOCK, sizeof(float) * TILE);
      _tile_stored(3, scores + 3 * MICRO_BLOCK, sizeof(float) * TILE);
    }
  }
  MEMORY_IS_READ();
  Floats scale = broadcast(columns.scale);
  for (int column = 0; column < columns.count; column++) {
    float* scores = columns.scores + (long)column * TILE;
    for (int i = 0; i < blocks * MICRO_BLOCK; i += VECTOR_FLOATS)
      store_floats(scores + i, load_floats(scores + i) * scale);
  }
}

static void shrink_sums(const Columns& columns, int column, float factor) {
  float* sums = columns.sums + (long)column / SIDE * SIDE * RANK + column % SIDE;
  for (int i = 0; i < RANK; i++) sums[i * SIDE] *= factor;
  for (int i = 0; columns.ring_sums && i < RANK; i++) columns.ring_sums[(long)column * RANK + i] *= factor;
}

// Weights of 16 columns from `first` on.
static void weigh(const Columns& columns, int first, int blocks) {
  for (int block = 0; block < blocks; block++) {
    uint8_t* to = columns.weights + (long)block * 4 * TILE_BYTES;
    auto put = [&](int token, Bytes x) {
      HighLow weight = split(bits_as_floats(x));
      uint8_t* row = to + token * 64;
      store(row, SHIFT_RIGHT_32(weight.high, 16)), store(row + TILE_BYTES, weight.high);
      store(row + 2 * TILE_BYTES, SHIFT_RIGHT_32(weight.low, 16)), store(row + 3 * TILE_BYTES, weight.low);
    };
    transpose(columns.scores + (long)first * TILE + block * MICRO_BLOCK, sizeof(float) * TILE, put);
  }
}

// Adds products with V of two groups for 16 columns.
static void add_values(const Columns& columns, int first, int group, int blocks) {
  alignas(64) float products[4 * SIDE * SIDE];
  bool is_pair = group + 1 < GROUPS;
  const uint8_t* values = columns.values + (long)group * TILE_BYTES;
  const uint8_t* weights = columns.weights;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < blocks; i++, values += GROUPS * TILE_BYTES, weights += 4 * TILE_BYTES) {
    _tile_loadd(4, values, 64);
    _tile_loadd(5, values + is_pair * TILE_BYTES, 64);
    _tile_loadd(6, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, weights + TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(6, weights + 2 * TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, weights + 3 * TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, products, 64);
  _tile_stored(1, products + SIDE * SIDE, 64);
  _tile_stored(2, products + 2 * SIDE * SIDE, 64);
  _tile_stored(3, products + 3 * SIDE * SIDE, 64);
  MEMORY_IS_READ();
  Floats factor = load_floats(columns.tile_factors + first);
  float* sums = columns.sums + (long)first * RANK + (long)group * GROUP_SIZE * SIDE;
  for (int i = 0; i < (is_pair ? 4 : 2) * SIDE * SIDE; i += SIDE)
    store_floats(sums + i, multiply_add(load_floats(products + i), factor, load_floats(sums + i)));
}

// Softmax and V of a tile's micro-blocks, scored, for all columns.
static void add_tile(const Columns& columns, int blocks) {
  for (int column = 0; column < padded(columns.count); column++) {
    bool is_there = column < columns.count;
    columns.tile_factors[column] = is_there ? add_to_softmax(columns, column, MICRO_BLOCK * blocks) : 0;
    if (columns.tile_factors[column] == 0) memset(columns.scores + (long)column * TILE, 0, sizeof(float) * TILE);
  }
  for (int first = 0; first < columns.count; first += SIDE) {
    weigh(columns, first, blocks);
    MEMORY_IS_READ();
    for (int g = 0; g < GROUPS; g += 2) add_values(columns, first, g, blocks);
  }
}

// Makes the columns' sums over V, [column][RANK] in packing order.
static void collect_pages(const Columns& columns, float* to) {
  alignas(64) float by_column[2][SIDE][SIDE];
  for (int first = 0; first < columns.count; first += SIDE)
    for (int g = 0; g < GROUPS; g++) {
      const float* sums = columns.sums + (long)first * RANK + (long)g * GROUP_SIZE * SIDE;
      for (int e0 = 0; e0 < 2; e0++)
        transpose(sums + e0 * SIDE * SIDE, 64, [&](int column, Bytes rows) { store(by_column[e0][column], rows); });
      for (int c = 0; c < SIDE && first + c < columns.count; c++)
        for (int half = 0; half < GROUP_SIZE; half += VECTOR_FLOATS) {
          Floats even = load_floats(by_column[0][c]), odd = load_floats(by_column[1][c]);
          Floats channels = _mm512_permutex2var_ps(even, load(PAIRS.from + half), odd);
          store_floats(to + (long)(first + c) * RANK + g * GROUP_SIZE + half, channels);
        }
    }
}
