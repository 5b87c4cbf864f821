// A tile of K and V: levels of K are in registers only while a block of columns is scored, and levels of V while they
// are added.
#pragma once
#include "scores.h"
#include "softmax.h"

struct PairTile : Columns {
  static constexpr int TOKENS = 256, BLOCKS = TOKENS / MICRO_BLOCK;
  static constexpr int AHEAD = 6;  // micro-blocks: some 0.6 us
  static constexpr int FEW_PARTS = 4, LONGEST_PART = 2048;
  static constexpr int LEAST_TILES = 2;  // in a part: a job's fixed cost is half a tile
  static constexpr int SUMS = GROUPS * PARTS * 4;  // vectors of fp32 sums over V that a column has
  float* sums;            // block: [group][part][e2][e3][column][VECTOR_FLOATS]
  int16_t* weights;       // block: [group][micro-block][column][16 tokens]
  float* weight_factors;  // [column][GROUPS]: factor of a weight of 1 in this tile
  uint8_t* arranged;      // of V, [micro-block][part]
  float* scales;          // of V, [micro-block][group][16 tokens]

  static long part_tokens(long tiles) {
    long parts = least((tiles + LEAST_TILES - 1) / LEAST_TILES, most(FEW_PARTS, tiles * TOKENS / LONGEST_PART));
    return TOKENS * (parts ? (tiles + parts - 1) / parts : 1);
  }

  void cut(const Arguments& a, Cutter& from, long columns) {
    Columns::cut(a, from, columns, TOKENS);
    sums = from.take<float>(columns * SUMS * VECTOR_FLOATS);
    weights = from.take<int16_t>(columns * GROUPS * TOKENS);
    weight_factors = from.take<float>(columns * GROUPS);
    arranged = from.take<uint8_t>((long)BLOCKS * ARRANGED_BYTES);
    scales = from.take<float>((long)BLOCKS * GROUPS * MICRO_BLOCK);
  }
  void clear() const { memset(sums, 0, sizeof(float) * count * SUMS * VECTOR_FLOATS); }

  // --- K ---
  struct Decoded {
    Tables tables;
    const uint8_t* arranged;
    template <class Body> INLINE_MEMBER void each_group(Body&& body) const { unrolled<GROUPS>(body); }
    template <class G, class T> INLINE_MEMBER void read(G group, T t, Bytes* levels) const {
      tables.decode(Index<0>{}, group, t, arranged, levels);
    }
  };

  void score(const uint8_t* const* micro_blocks, int blocks, int known, int) const {
    alignas(64) uint8_t words[ARRANGED * VECTOR_BYTES];
    alignas(64) float of_keys[GROUPS * MICRO_BLOCK];
    const Decoded source = {Tables::read(), words};
    for (int i = 0; i < blocks; i++) {
      if (i + AHEAD < known) prefetch(micro_blocks[i + AHEAD]);
      read_scales(micro_blocks[i], 0, of_keys);
      for (int part = 0; part < PARTS; part++) {
        arrange(micro_blocks[i], 0, part, words);
        for_blocks(count, [&](auto block, int first) {
          float* to = scores + (long)first * TOKENS + i * MICRO_BLOCK + part * VECTOR_FLOATS;
          score_part<block.value>(*this, first, source, of_keys + part * VECTOR_FLOATS, to, TOKENS, [](Floats*) {});
        });
      }
    }
  }

  // --- V ---
  // Makes 16-bit weights: C columns' exponentials times V's scales, with 32767 for the largest of a tile, group and
  // column.
  template <int C> void weigh(int first, int blocks) const {
    int16_t* of_block = weights + (long)first * GROUPS * TOKENS;
    for (int c = 0; c < C; c++) {
      const float* exponentials = scores + (long)(first + c) * TOKENS;
      float* factors = weight_factors + (long)(first + c) * GROUPS;
      Floats most[GROUPS], inverse[GROUPS];
      for (int g = 0; g < GROUPS; g++) most[g] = broadcast(0);
      for (int i = 0; i < blocks; i++)
        for (int part = 0; part < PARTS; part++) {
          Floats p = load_floats(exponentials + i * MICRO_BLOCK + part * VECTOR_FLOATS);
          for (int g = 0; g < GROUPS; g++) {
            const float* scale = scales + (i * GROUPS + g) * MICRO_BLOCK + part * VECTOR_FLOATS;
            most[g] = max_floats(most[g], p * load_floats(scale));
          }
        }
      for (int g = 0; g < GROUPS; g++) {
        float largest = horizontal_max(most[g]);
        factors[g] = largest * tile_factors[first + c] / LARGEST_INT16;
        inverse[g] = broadcast(largest > 1e-30f ? LARGEST_INT16 / largest : 0);
      }
      for (int i = 0; i < blocks; i++)
        for (int part = 0; part < PARTS; part++) {
          Floats p = load_floats(exponentials + i * MICRO_BLOCK + part * VECTOR_FLOATS);
          for (int g = 0; g < GROUPS; g++) {
            const float* scale = scales + (i * GROUPS + g) * MICRO_BLOCK + part * VECTOR_FLOATS;
            int16_t* to = of_block + ((long)(g * BLOCKS + i) * C + c) * 16 + part * VECTOR_FLOATS;
            store_int16(to, round_to_int32(p * load_floats(scale) * inverse[g]));
          }
        }
    }
  }

  // Adds a group's products with V for C columns.
  template <int C, int G> void add_values(int first, const Tables& tables, int blocks) const {
    const int16_t* of_group = weights + (long)first * GROUPS * TOKENS + (long)G * BLOCKS * C * 16;
    for (int part = 0; part < PARTS; part++) {
      Bytes products[4][C];
      for (int k = 0; k < 4; k++)
        for (int c = 0; c < C; c++) products[k][c] = zero();
      for (int i = 0; i < blocks; i++) {
        const uint8_t* words = arranged + (long)(i * PARTS + part) * ARRANGED * VECTOR_BYTES;
        unrolled<4>([&](auto t) {
          Bytes levels[4];
          tables.decode(Index<1>{}, Index<G>{}, t, words, levels);
          for (int c = 0; c < C; c++) {
            Bytes four = broadcast_64(of_group + (i * C + c) * 16 + 4 * t.value);
            for (int k = 0; k < 4; k++) products[k][c] = dot16(products[k][c], levels[k], four);
          }
        });
      }
      float* to = sums + (long)first * SUMS * VECTOR_FLOATS + (long)(G * PARTS + part) * 4 * C * VECTOR_FLOATS;
      for (int k = 0; k < 4; k++)
        for (int c = 0; c < C; c++, to += VECTOR_FLOATS) {
          Floats factor = broadcast(weight_factors[(first + c) * GROUPS + G]);
          store_floats(to, multiply_add(to_floats(products[k][c]), factor, load_floats(to)));
        }
    }
  }

  void add(const uint8_t* const* micro_blocks, int blocks) const {
    for (int i = 0; i < blocks; i++) {
      read_scales(micro_blocks[i], 1, scales + i * GROUPS * MICRO_BLOCK);
      for (int part = 0; part < PARTS; part++)
        arrange(micro_blocks[i], 1, part, arranged + (long)(i * PARTS + part) * ARRANGED * VECTOR_BYTES);
    }
    const Tables tables = Tables::read();
    for_blocks(count, [&](auto block, int first) { weigh<block.value>(first, blocks); });
    unrolled<GROUPS>([&](auto group) {
      for_blocks(count, [&](auto block, int first) { add_values<block.value, group.value>(first, tables, blocks); });
    });
  }

  // A column's vectors of sums: body(which, vector).
  template <class Body> INLINE_MEMBER void each_sum(int column, Body&& body) const {
    int first = column / BLOCK * BLOCK, next = width(first) * VECTOR_FLOATS;
    float* at = sums + (long)first * SUMS * VECTOR_FLOATS + (column - first) * VECTOR_FLOATS;
    for (int i = 0; i < SUMS; i++, at += next) body(i, at);
  }
  void shrink(int column, float factor) const {
    each_sum(column, [&](int, float* sum) { store_floats(sum, load_floats(sum) * broadcast(factor)); });
  }
  void collect(float* to) const {
    for (int column = 0; column < count; column++, to += STORED_DIM) collect_column(column, to);
  }
  void collect_column(int column, float* to) const {  // e3 = d4 and e2 = d3; a row d2 d1 d0 has a word and the next
    Floats pair[2];
    each_sum(column, [&](int i, const float* sum) {
      pair[i & 1] = load_floats(sum);
      if (!(i & 1)) return;
      alignas(64) float rows[VECTOR_FLOATS];  // lane: two rows of d4 = 0, two of d4 = 1
      Bytes low = floats_as_bits(pair[0]), high = floats_as_bits(pair[1]);
      store_floats(rows, bits_as_floats(even_words(low, high)) + bits_as_floats(odd_words(low, high)));
      int group = i / (4 * PARTS), part = i / 4 % PARTS, d3 = i >> 1 & 1;
      float* channels = to + group * GROUP_SIZE + d3 * 8 + part * 2 * VECTOR_LANES;
      for (int lane = 0; lane < VECTOR_LANES; lane++) {
        memcpy(channels + 2 * lane, rows + 4 * lane, 8);
        memcpy(channels + 2 * lane + 16, rows + 4 * lane + 2, 8);
      }
    });
  }
};
