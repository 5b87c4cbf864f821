// A tile of tokens for the columns of a KV head: products with K, the online softmax, products with V. Columns are the
// KV head's query heads times query tokens.
#pragma once
#include "softmax.h"

constexpr int TILE = 256;  // tokens
constexpr int TILE_BLOCKS = TILE / MICRO_BLOCK;
constexpr int SUMS = GROUPS * PARTS * 4;  // vectors of fp32 sums over V that a column has

// What a job keeps of its columns. Arrays of `block` are by block of columns, with its columns innermost.
struct Columns {
  static constexpr int TOKENS = TILE;
  int count;
  const int16_t* queries;  // block: [group][t][e2][column][e1][e0]
  const float* factors;    // by column: of a query's integers, with the score's scale
  float* scores;           // [column][TILE], in the order of scores; then exponentials
  int16_t* weights;        // block: [group][micro-block][column][16 tokens]
  float* sums;             // block: [group][part][e2][e3][column][VECTOR_FLOATS]
  float* ring_sums;        // [column][STORED_DIM], in the order of V's bytes in a ring; null: there is no ring
  Softmax* softmax;        // by column
  float* weight_factors;   // [column][GROUPS]: what a weight of 1 is in this tile
};

// Levels of all codes, in registers.
struct Tables {
  Bytes low[sizeof CODES / sizeof CODES[0]], high[sizeof CODES / sizeof CODES[0]];
  static inline __attribute__((always_inline)) Tables read() {
    Tables tables;
    unrolled<sizeof CODES / sizeof CODES[0]>([&](auto code) {
      table_of<code.value>(&tables.low[code.value], &tables.high[code.value]);
    });
    return tables;
  }
};

// Scores of a part of a micro-block for C columns from `first` on. `scales`: of K, by group.
template <int C>
INLINE void score_keys(const Columns& columns, int first, const Tables& tables, const uint8_t* arranged,
                       const float* scales, int micro_block, int part) {
  const int16_t* queries = columns.queries + (long)first * STORED_DIM;
  Floats sum[C];
  for (int c = 0; c < C; c++) sum[c] = broadcast(0);
  unrolled<GROUPS>([&](auto group) {
    constexpr int G = group.value, code = GROUP_TABLE[G].code;
    Bytes low[C], high[C];  // of e3 = 0 and 1
    for (int c = 0; c < C; c++) low[c] = high[c] = zero();
    unrolled<4>([&](auto t) {
      Bytes levels[4];
      decode<G, t.value>(arranged, tables.low[code], tables.high[code], levels);
      const int16_t* q = queries + (G * 4 + t.value) * 8 * C;
      for (int c = 0; c < C; c++) {
        Bytes four = broadcast_64(q + 4 * c);
        low[c] = dot16(low[c], levels[0], four), high[c] = dot16(high[c], levels[1], four);
      }
      for (int c = 0; c < C; c++) {
        Bytes four = broadcast_64(q + 4 * (C + c));
        low[c] = dot16(low[c], levels[2], four), high[c] = dot16(high[c], levels[3], four);
      }
    });
    Floats scale = load_floats(scales + G * MICRO_BLOCK + part * VECTOR_FLOATS);
    for (int c = 0; c < C; c++) {
      Bytes products = add32(even_words(low[c], high[c]), odd_words(low[c], high[c]));
      sum[c] = multiply_add(to_floats(products), scale, sum[c]);
    }
  });
  for (int c = 0; c < C; c++) {
    float* to = columns.scores + (long)(first + c) * TILE + micro_block * MICRO_BLOCK + part * VECTOR_FLOATS;
    store_floats(to, sum[c] * broadcast(columns.factors[first + c]));
  }
}

constexpr int AHEAD = 6;  // micro-blocks that are prefetched: some 0.6 us

INLINE void prefetch(const uint8_t* micro_block) {
  for (int at = 0; at < MICRO_BLOCK_BYTES; at += 64) __builtin_prefetch(micro_block + at);
}

// Scores of `count` micro-blocks for all columns. `micro_blocks` has `known` of them, some of the next tile's behind,
// which are prefetched.
static void score_tile(const Columns& columns, const uint8_t* const* micro_blocks, int count, int known) {
  const Tables tables = Tables::read();
  alignas(64) uint8_t arranged[ARRANGED * VECTOR_BYTES];
  alignas(64) float scales[GROUPS * MICRO_BLOCK];
  for (int i = 0; i < count; i++) {
    if (i + AHEAD < known) prefetch(micro_blocks[i + AHEAD]);
    read_scales(micro_blocks[i], 0, scales);
    for (int part = 0; part < PARTS; part++) {
      arrange(micro_blocks[i], 0, part, arranged);
      for_blocks(columns.count, [&](auto block, int first) {
        score_keys<block.value>(columns, first, tables, arranged, scales, i, part);
      });
    }
  }
}

// Scales the sums of a column.
static void shrink_sums(const Columns& columns, int column, float factor) {
  int first = column / BLOCK * BLOCK, width = columns.count - first < BLOCK ? columns.count - first : BLOCK;
  float* sums = columns.sums + (long)first * 2 * STORED_DIM + (column - first) * VECTOR_FLOATS;
  for (int i = 0; i < SUMS; i++, sums += width * VECTOR_FLOATS)
    store_floats(sums, load_floats(sums) * broadcast(factor));
  if (!columns.ring_sums) return;
  float* ring = columns.ring_sums + (long)column * STORED_DIM;
  for (int i = 0; i < STORED_DIM; i += VECTOR_FLOATS) store_floats(ring + i, load_floats(ring + i) * broadcast(factor));
}

// Makes the sums of a column `old` times themselves plus `added` times those of `from`.
static void add_sums(const Columns& to, const Columns& from, int column, float old, float added) {
  int first = column / BLOCK * BLOCK, width = to.count - first < BLOCK ? to.count - first : BLOCK;
  long at = (long)first * 2 * STORED_DIM + (column - first) * VECTOR_FLOATS;
  for (int i = 0; i < SUMS; i++, at += width * VECTOR_FLOATS) {
    Floats sum = load_floats(to.sums + at) * broadcast(old);
    store_floats(to.sums + at, multiply_add(load_floats(from.sums + at), broadcast(added), sum));
  }
  if (!to.ring_sums) return;
  at = (long)column * STORED_DIM;
  for (int i = 0; i < STORED_DIM; i += VECTOR_FLOATS) {
    Floats sum = load_floats(to.ring_sums + at + i) * broadcast(old);
    store_floats(to.ring_sums + at + i, multiply_add(load_floats(from.ring_sums + at + i), broadcast(added), sum));
  }
}

// Makes 16-bit weights of C columns' exponentials times V's scales, the largest of a tile, group and column 32767.
template <int C>
static void weigh(const Columns& columns, int first, const float* scales, int count, const float* softmax_factors) {
  int16_t* weights = columns.weights + (long)first * GROUPS * TILE;
  for (int c = 0; c < C; c++) {
    const float* exponentials = columns.scores + (long)(first + c) * TILE;
    float* factors = columns.weight_factors + (long)(first + c) * GROUPS;
    if (softmax_factors[first + c] == 0) {  // the column sees none of these tokens
      for (int g = 0; g < GROUPS; g++) {
        factors[g] = 0;
        for (int i = 0; i < count; i++) memset(weights + ((long)(g * TILE_BLOCKS + i) * C + c) * 16, 0, 32);
      }
      continue;
    }
    Floats most[GROUPS], inverse[GROUPS];
    for (int g = 0; g < GROUPS; g++) most[g] = broadcast(0);
    for (int i = 0; i < count; i++)
      for (int part = 0; part < PARTS; part++) {
        Floats p = load_floats(exponentials + i * MICRO_BLOCK + part * VECTOR_FLOATS);
        for (int g = 0; g < GROUPS; g++) {
          const float* scale = scales + (i * GROUPS + g) * MICRO_BLOCK + part * VECTOR_FLOATS;
          most[g] = max_floats(most[g], p * load_floats(scale));
        }
      }
    for (int g = 0; g < GROUPS; g++) {
      float largest = horizontal_max(most[g]);
      factors[g] = largest * softmax_factors[first + c] / LARGEST_INT16;
      inverse[g] = broadcast(largest > 1e-30f ? LARGEST_INT16 / largest : 0);
    }
    for (int i = 0; i < count; i++)
      for (int part = 0; part < PARTS; part++) {
        Floats p = load_floats(exponentials + i * MICRO_BLOCK + part * VECTOR_FLOATS);
        for (int g = 0; g < GROUPS; g++) {
          const float* scale = scales + (i * GROUPS + g) * MICRO_BLOCK + part * VECTOR_FLOATS;
          int16_t* to = weights + ((long)(g * TILE_BLOCKS + i) * C + c) * 16 + part * VECTOR_FLOATS;
          store_int16(to, round_to_int32(p * load_floats(scale) * inverse[g]));
        }
      }
  }
}

// Adds a group's products with V for C columns. `arranged`: of V, [micro-block][part].
template <int C, int G>
static void add_values(const Columns& columns, int first, const Tables& tables, const uint8_t* arranged, int count) {
  constexpr int code = GROUP_TABLE[G].code;
  const int16_t* weights = columns.weights + (long)first * GROUPS * TILE + (long)G * TILE_BLOCKS * C * 16;
  for (int part = 0; part < PARTS; part++) {
    Bytes products[4][C];
    for (int k = 0; k < 4; k++)
      for (int c = 0; c < C; c++) products[k][c] = zero();
    for (int i = 0; i < count; i++) {
      const uint8_t* words = arranged + (long)(i * PARTS + part) * ARRANGED * VECTOR_BYTES;
      unrolled<4>([&](auto t) {
        Bytes levels[4];
        decode<G, t.value>(words, tables.low[code], tables.high[code], levels);
        for (int c = 0; c < C; c++) {
          Bytes four = broadcast_64(weights + (i * C + c) * 16 + 4 * t.value);
          for (int k = 0; k < 4; k++) products[k][c] = dot16(products[k][c], levels[k], four);
        }
      });
    }
    float* sums = columns.sums + (long)first * 2 * STORED_DIM + (long)(G * PARTS + part) * 4 * C * VECTOR_FLOATS;
    for (int k = 0; k < 4; k++)
      for (int c = 0; c < C; c++) {
        float* to = sums + (k * C + c) * VECTOR_FLOATS;
        Floats factor = broadcast(columns.weight_factors[(first + c) * GROUPS + G]);
        store_floats(to, multiply_add(to_floats(products[k][c]), factor, load_floats(to)));
      }
  }
}

// Weighs and adds V of `count` micro-blocks for all columns, whose scores are in `columns`. The last three: memory.
static void add_tile(const Columns& columns, const uint8_t* const* micro_blocks, int count, uint8_t* arranged,
                     float* scales, float* softmax_factors) {
  for (int column = 0; column < columns.count; column++)
    softmax_factors[column] = add_to_softmax(columns, column, MICRO_BLOCK * count);
  for (int i = 0; i < count; i++) {
    read_scales(micro_blocks[i], 1, scales + i * GROUPS * MICRO_BLOCK);
    for (int part = 0; part < PARTS; part++)
      arrange(micro_blocks[i], 1, part, arranged + (long)(i * PARTS + part) * ARRANGED * VECTOR_BYTES);
  }
  const Tables tables = Tables::read();
  for_blocks(columns.count, [&](auto block, int first) {
    weigh<block.value>(columns, first, scales, count, softmax_factors);
  });
  unrolled<GROUPS>([&](auto group) {
    for_blocks(columns.count, [&](auto block, int first) {
      add_values<block.value, group.value>(columns, first, tables, arranged, count);
    });
  });
}

// Adds a column's sums over V to to[STRIDE * channel], in packing order.
template <int STRIDE> static void collect_sums(const Columns& columns, int column, float* to) {
  int first = column / BLOCK * BLOCK, width = columns.count - first < BLOCK ? columns.count - first : BLOCK;
  const float* sums = columns.sums + (long)first * 2 * STORED_DIM + (column - first) * VECTOR_FLOATS;
  for (int i = 0; i < SUMS; i++, sums += width * VECTOR_FLOATS) {
    int group = i / (4 * PARTS), part = i / 4 % PARTS, d3 = i >> 1 & 1, d4 = i & 1;
    float* channels = to + STRIDE * (group * GROUP_SIZE + d4 * 16 + d3 * 8 + part * 2 * VECTOR_LANES);
    for (int row = 0; row < 2 * VECTOR_LANES; row++) channels[STRIDE * row] += sums[2 * row] + sums[2 * row + 1];
  }
}
