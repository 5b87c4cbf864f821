// A tile of latents for all columns: see latent.cpp.
#pragma once
#include "numbers.h"
#include "softmax.h"

struct LatentArguments {  // `Arguments` of latent_decode.py, field by field, 8 bytes each
  // Pages: uint8 [blocks, block_size, slot_bytes]; strides in bytes.
  const uint8_t* cache;
  int64_t cache_block_stride, block_size;
  int64_t requests;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t *query_start, *seq_lens;
  // Queries [tokens, heads, RANK] and [tokens, heads, ROPE_DIM], of an ElementType; strides in elements.
  const void *query, *rope_query;
  int64_t query_type, query_stride, query_head_stride, rope_stride, rope_head_stride;
  void* output;  // [tokens, heads, RANK], heads contiguous
  int64_t output_type, output_stride;
  float* lse;  // [tokens, heads], or null
  int64_t heads;
  double scale;
  const float* constant;  // [RANK], added to outputs, or null
  // The ring, or null: uint8 [blocks, 1, ring_block_size, slot bytes]; strides in bytes, but the table's.
  const uint8_t* ring;
  int64_t ring_block_stride, ring_token_stride, ring_block_size;
  const int32_t* ring_table;
  int64_t ring_table_stride;
  const int32_t* ring_first;
  int64_t ring_window;
  int64_t threads;
  void* workspace;
};

constexpr int RANK = STORED_DIM, RING_DIM = RANK + ROPE_DIM;
constexpr int TILE = 128, TILE_BLOCKS = TILE / MICRO_BLOCK;  // levels of 512 channels take 128 KB, and stay in L2
constexpr int RING_TILE = 64;
constexpr int PART_TOKENS = 256, MOST_PARTS = 16;
constexpr int LEVEL_VECTORS = GROUPS * 4 * 4;                 // of a part of a micro-block: [group][t][e2][e3]
constexpr int LEVELS_BYTES = PARTS * LEVEL_VECTORS * VECTOR_BYTES;
constexpr int SUMS = GROUPS * 4 * 2;                          // vectors of fp32 sums over V: [group][t][e2]
constexpr int TS = VECTOR_LANES == 4 ? 2 : 1;                 // t's at once: as many sums as registers hold

INLINE int place_in_tile(int token) { return token / 16 * 16 + place_of_token(token % 16); }

struct Columns {
  static constexpr int TOKENS = TILE;
  int count;
  int16_t* queries;     // block of columns: [group][t][e2][column][e1][e0]
  float* factors;       // of a query's integers
  float* rope;          // [column][ROPE_DIM], in the order of KEY_BYTES
  float* ring_queries;  // [column][RING_DIM], the same
  float* scores;        // [column][TILE], in the order of scores; then exponentials
  float* sums;          // [column][SUMS][VECTOR_FLOATS]
  float* ring_sums;     // [column][RANK], in the order of KEY_BYTES
  Softmax* softmax;
  float* tile_factors;  // what an exponential of 1 is in the sums; 0: the column sees nothing of the tile
  long* hidden_from;
  uint8_t* levels;      // of the tile: [micro-block][part][LEVEL_VECTORS]
  float* scales;        // [micro-block][group][16 tokens], 0 of tokens that are not there
  uint8_t* weights;     // of a group: [micro-block][part][column][parity]
  float* ring_rows;     // [RING_TILE][RING_DIM]
};

static void decode_levels(const uint8_t* micro_block, uint8_t* to) {
  alignas(64) uint8_t arranged[ARRANGED * VECTOR_BYTES];
  constexpr int WIDTHS = sizeof CODES / sizeof CODES[0];
  Bytes low[WIDTHS], high[WIDTHS];
  unrolled<WIDTHS>([&](auto code) { table_of<code.value>(&low[code.value], &high[code.value]); });
  for (int part = 0; part < PARTS; part++, to += LEVEL_VECTORS * VECTOR_BYTES) {
    arrange(micro_block, 0, part, arranged);
    unrolled<GROUPS>([&](auto group) {
      unrolled<4>([&](auto t) {
        Bytes levels[4];
        constexpr int code = GROUP_TABLE[group.value].code;
        decode<group.value, t.value>(arranged, low[code], high[code], levels);
        for (int i = 0; i < 4; i++) store(to + ((group.value * 4 + t.value) * 4 + i) * VECTOR_BYTES, levels[i]);
      });
    });
  }
}

// RoPE channels of a micro-block's tokens as fp32, [channel in the order of KEY_BYTES][place of the token].
static void read_rope(const uint8_t* micro_block, float (*to)[MICRO_BLOCK]) {
  alignas(64) float rows[MICRO_BLOCK][ROPE_DIM];
  for (int n = 0; n < MICRO_BLOCK; n++) {
    float* row = rows[place_of_token(n)];
    for (int i = 0; i < ROPE_DIM / 8; i++, row += 8) {
      const uint8_t* piece = micro_block + ROPE_AT[n * (ROPE_DIM / 8) + i];
      if (ROPE_BITS == 16) {
        read_8_halves(row, piece);
        continue;
      }
      alignas(16) float scale[VECTOR_FLOATS];
      int32_t bits = (int32_t)micro_block[ROPE_SCALES_AT[n * (ROPE_DIM / 32) + i / 4]] << 16;
      store_floats(scale, decode_scales(broadcast_word(bits), 1.f / 128));
      for (int c = 0; c < 8; c++) row[c] = (float)(piece[c] - 128) * scale[0];
    }
  }
  const long next = sizeof rows[0];
  for (int lane = 0; lane < MICRO_BLOCK; lane += VECTOR_FLOATS)
    for (int d = 0; d < ROPE_DIM; d += 4) {
      const uint8_t* at = (const uint8_t*)&rows[lane][d];
      Bytes a = load_lanes(at, 4 * next), b = load_lanes(at + next, 4 * next);
      Bytes c = load_lanes(at + 2 * next, 4 * next), e = load_lanes(at + 3 * next, 4 * next);
      Bytes low_ac = low_words(a, c), low_be = low_words(b, e), high_ac = high_words(a, c), high_be = high_words(b, e);
      store(to[d] + lane, low_words(low_ac, low_be)), store(to[d + 1] + lane, high_words(low_ac, low_be));
      store(to[d + 2] + lane, low_words(high_ac, high_be)), store(to[d + 3] + lane, high_words(high_ac, high_be));
    }
}

// Scores of a part of a micro-block for C columns from `first` on.
template <int C>
static void score_part(const Columns& columns, int first, int micro_block, int part, const float (*rope)[MICRO_BLOCK]) {
  const int16_t* q = columns.queries + (long)first * RANK;
  const uint8_t* levels = columns.levels + (long)micro_block * LEVELS_BYTES + part * LEVEL_VECTORS * VECTOR_BYTES;
  const float* scales = columns.scales + micro_block * GROUPS * MICRO_BLOCK + part * VECTOR_FLOATS;
  Floats sum[C];
  for (int c = 0; c < C; c++) sum[c] = broadcast(0);
  for (int group = 0; group < GROUPS; group++) {
    Bytes low[C], high[C];  // of n3 = 0 and 1
    for (int c = 0; c < C; c++) low[c] = high[c] = zero();
    for (int i = 0; i < 8; i++, levels += 2 * VECTOR_BYTES, q += 4 * C) {  // t, e2
      Bytes first_of_pair = load(levels), second = load(levels + VECTOR_BYTES);
      for (int c = 0; c < C; c++) {
        Bytes four = broadcast_64(q + 4 * c);
        low[c] = dot16(low[c], first_of_pair, four), high[c] = dot16(high[c], second, four);
      }
    }
    Floats scale = load_floats(scales + group * MICRO_BLOCK);
    for (int c = 0; c < C; c++) {
      Bytes products = add32(even_words(low[c], high[c]), odd_words(low[c], high[c]));
      sum[c] = multiply_add(to_floats(products), scale, sum[c]);
    }
  }
  for (int c = 0; c < C; c++) sum[c] = sum[c] * broadcast(columns.factors[first + c]);
  const float* rope_query = columns.rope + (long)first * ROPE_DIM;
  for (int d = 0; d < ROPE_DIM; d++) {
    Floats x = load_floats(rope[d] + part * VECTOR_FLOATS);
    for (int c = 0; c < C; c++) sum[c] = multiply_add(x, broadcast(rope_query[c * ROPE_DIM + d]), sum[c]);
  }
  for (int c = 0; c < C; c++)
    store_floats(columns.scores + (long)(first + c) * TILE + micro_block * MICRO_BLOCK + part * VECTOR_FLOATS, sum[c]);
}

// Decodes a micro-block, of which `tokens` are there, and scores it for all columns.
static void score_micro_block(const Columns& columns, const uint8_t* micro_block, int number, int tokens) {
  alignas(64) float rope[ROPE_DIM][MICRO_BLOCK];
  float* scales = columns.scales + number * GROUPS * MICRO_BLOCK;
  decode_levels(micro_block, columns.levels + (long)number * LEVELS_BYTES);
  read_scales(micro_block, 0, scales);
  for (int n = tokens; n < MICRO_BLOCK; n++)  // those of tokens that are not there may be any
    for (int g = 0; g < GROUPS; g++) scales[g * MICRO_BLOCK + place_of_token(n)] = 0;
  read_rope(micro_block, rope);
  for (int part = 0; part < PARTS; part++)
    for_blocks(columns.count, [&](auto block, int first) {
      score_part<block.value>(columns, first, number, part, rope);
    });
}

static void shrink_sums(const Columns& columns, int column, float factor) {
  float* sums = columns.sums + (long)column * SUMS * VECTOR_FLOATS;
  for (int i = 0; i < SUMS * VECTOR_FLOATS; i += VECTOR_FLOATS)
    store_floats(sums + i, load_floats(sums + i) * broadcast(factor));
  for (int i = 0; columns.ring_sums && i < RANK; i++) columns.ring_sums[(long)column * RANK + i] *= factor;
}

// 16-bit weights of a group for C columns: an exponential times a scale, in units of `unit`. The pair of tokens that
// differ in n3 lies in each 32-bit word of their lane; one vector of those with n0 = 0, one with n0 = 1.
template <int C>
static void weigh(const Columns& columns, int first, int group, int blocks, float inverse_unit) {
  static constexpr struct Controls {
    alignas(64) uint8_t even[64], odd[64];
    constexpr Controls() : even{}, odd{} {
      for (int i = 0; i < 64; i++) {
        int in_word = i & 3;
        even[i] = (in_word >> 1) * 8 + (in_word & 1), odd[i] = even[i] + 4;
      }
    }
  } controls;
  Bytes even = load(controls.even), odd = load(controls.odd);
  Floats inverse = broadcast(inverse_unit);
  uint8_t* to = columns.weights;
  for (int i = 0; i < blocks; i++)
    for (int part = 0; part < PARTS; part++) {
      int at = i * MICRO_BLOCK + part * VECTOR_FLOATS;
      Floats scale = load_floats(columns.scales + (i * GROUPS + group) * MICRO_BLOCK + part * VECTOR_FLOATS) * inverse;
      for (int c = 0; c < C; c++, to += 2 * VECTOR_BYTES) {
        Bytes weight = round_to_int32(load_floats(columns.scores + (long)(first + c) * TILE + at) * scale);
        store(to, shuffle_bytes(weight, even)), store(to + VECTOR_BYTES, shuffle_bytes(weight, odd));
      }
    }
}

// Adds products with V of a group for C columns.
template <int C> static void add_values(const Columns& columns, int first, int group, int blocks, float unit) {
  for (int t = 0; t < 4; t += TS) {
    Bytes products[TS][2][C];
    for (int i = 0; i < TS * 2 * C; i++) products[i / (2 * C)][i / C % 2][i % C] = zero();
    const uint8_t* weights = columns.weights;
    for (int i = 0; i < blocks * PARTS; i++, weights += C * 2 * VECTOR_BYTES) {
      const uint8_t* levels = columns.levels + ((long)i * LEVEL_VECTORS + (group * 4 + t) * 4) * VECTOR_BYTES;
      Bytes even[TS][2], odd[TS][2];
      for (int k = 0; k < TS; k++)
        for (int e2 = 0; e2 < 2; e2++, levels += 2 * VECTOR_BYTES) {
          Bytes n3_0 = load(levels), n3_1 = load(levels + VECTOR_BYTES);
          even[k][e2] = low_16(n3_0, n3_1), odd[k][e2] = high_16(n3_0, n3_1);
        }
      for (int c = 0; c < C; c++) {
        Bytes w_even = load(weights + 2 * c * VECTOR_BYTES), w_odd = load(weights + (2 * c + 1) * VECTOR_BYTES);
        for (int k = 0; k < TS; k++)
          for (int e2 = 0; e2 < 2; e2++) {
            products[k][e2][c] = dot16(products[k][e2][c], even[k][e2], w_even);
            products[k][e2][c] = dot16(products[k][e2][c], odd[k][e2], w_odd);
          }
      }
    }
    for (int c = 0; c < C; c++) {
      Floats factor = broadcast(unit * columns.tile_factors[first + c]);
      float* sums = columns.sums + ((long)(first + c) * SUMS + (group * 4 + t) * 2) * VECTOR_FLOATS;
      for (int k = 0; k < TS; k++)
        for (int e2 = 0; e2 < 2; e2++, sums += VECTOR_FLOATS)
          store_floats(sums, multiply_add(to_floats(products[k][e2][c]), factor, load_floats(sums)));
    }
  }
}

// Softmax and V of a tile's micro-blocks, scored, for all columns.
static void add_tile(const Columns& columns, int blocks) {
  float units[GROUPS];
  for (int g = 0; g < GROUPS; g++) {
    Floats largest = broadcast(0);
    for (int i = 0; i < blocks; i++)
      for (int part = 0; part < PARTS; part++) {
        const float* scales = columns.scales + (i * GROUPS + g) * MICRO_BLOCK + part * VECTOR_FLOATS;
        largest = max_floats(largest, load_floats(scales));
      }
    units[g] = horizontal_max(largest) / LARGEST_INT16;
  }
  for (int column = 0; column < columns.count; column++) {
    columns.tile_factors[column] = add_to_softmax(columns, column, MICRO_BLOCK * blocks);
    if (columns.tile_factors[column] == 0) memset(columns.scores + (long)column * TILE, 0, sizeof(float) * TILE);
  }
  for_blocks(columns.count, [&](auto block, int first) {
    for (int g = 0; g < GROUPS; g++) {
      if (units[g] < 1e-35f) continue;  // zeros
      weigh<block.value>(columns, first, g, blocks, 1 / units[g]);
      add_values<block.value>(columns, first, g, blocks, units[g]);
    }
  });
}

// --- the ring, in fp32: its tokens are few ---
static void read_ring_slot(const uint8_t* slot, float* row) {
  for (int g = 0; g < RING_DIM / GROUP_SIZE; g++) {
    Floats scale = decode_scales(broadcast_word((int32_t)slot[RING_SCALES_AT[0] + g] << 16), 1.f / 128);
    for (int i = g * GROUP_SIZE; i < (g + 1) * GROUP_SIZE; i += VECTOR_FLOATS)
      store_floats(row + i, load_ring_codes(slot + RING_CODES_AT[0] + i) * scale);
  }
}
static float score_ring_row(const Columns& columns, int column, const float* row) {
  const float* query = columns.ring_queries + (long)column * RING_DIM;
  Floats sum = broadcast(0);
  for (int i = 0; i < RING_DIM; i += VECTOR_FLOATS)
    sum = multiply_add(load_floats(query + i), load_floats(row + i), sum);
  return horizontal_sum(sum);
}
static void add_ring_rows(const Columns& columns, int column, int count, float factor) {
  const float* weights = columns.scores + (long)column * TILE;
  for (int i = 0; i < RANK; i += VECTOR_FLOATS) {
    Floats sum = broadcast(0);
    for (int n = 0; n < count; n++)
      sum = multiply_add(broadcast(weights[n]), load_floats(columns.ring_rows + (long)n * RING_DIM + i), sum);
    float* to = columns.ring_sums + (long)column * RANK + i;
    store_floats(to, multiply_add(sum, broadcast(factor), load_floats(to)));
  }
}

// A column's sums over V, in packing order. Sums of tokens in the ring are divided by V's gain, which the weights
// behind have for the codes.
static void collect_sums(const Columns& columns, int column, float* to) {
  const float* sums = columns.sums + (long)column * SUMS * VECTOR_FLOATS;
  for (int i = 0; i < SUMS; i++, sums += VECTOR_FLOATS) {
    int group = i / 8, t = i / 2 % 4, e2 = i % 2;
    for (int word = 0; word < 4; word++) {  // e1 e0 = d3 d0
      float sum = 0;
      for (int lane = 0; lane < VECTOR_LANES; lane++) sum += sums[4 * lane + word];
      to[group * GROUP_SIZE + e2 * 16 + (word >> 1) * 8 + t * 2 + (word & 1)] = sum;
    }
  }
  for (int i = 0; columns.ring_sums && i < RANK; i++)
    to[i / 32 * 32 + KEY_BYTES[i % 32]] +=
        columns.ring_sums[(long)column * RANK + i] / CODES[GROUP_TABLE[i / 32].code].gain;
}
