// A tile of latents: codes become levels once, 2 bytes a channel and token, for K and V of all columns.
//
// Levels lie in K's order. For V, the two tokens that differ in n3 are put side by side, and pairs of products are
// summed over tokens; the rest of the sum, over lanes, is done once per part. RoPE channels are in fp32, apart from the
// levels.
// Arithmetic bounds it: 16 heads take 17,408 products a token, of which AVX-512 does 32 an instruction, while 400 bytes
// of a token (tq4) are read. On one core (Zen 4) a token of 16 heads takes 0.26 us, in vLLM's bf16 op 0.58 us.
#pragma once
#include "../base/numbers.h"
#include "../layout/vectors16.h"
#include "scores.h"
#include "softmax.h"

struct LatentTile : Columns {
  static constexpr int TOKENS = 128, BLOCKS = TOKENS / MICRO_BLOCK;  // levels of 512 channels take 128 KB: they stay in L2
  static constexpr int AHEAD = 1;
  static constexpr int PART_TOKENS = 256, MOST_PARTS = 16;
  static constexpr int LEVEL_VECTORS = GROUPS * 4 * 4;  // of a part of a micro-block: [group][t][e2][e3]
  static constexpr int LEVELS_BYTES = PARTS * LEVEL_VECTORS * VECTOR_BYTES;
  static constexpr int SUMS = GROUPS * 4 * 2;           // vectors of fp32 sums over V: [group][t][e2]
  static constexpr int TS = VECTOR_LANES == 4 ? 2 : 1;  // t's at a time: as many sums as registers hold
  float* sums;       // [column][SUMS][VECTOR_FLOATS]
  uint8_t* levels;   // [micro-block][part][LEVEL_VECTORS]
  float* scales;     // [micro-block][group][16 tokens], 0 of tokens that are not there
  uint8_t* weights;  // of a group: [micro-block][part][column][parity]

  static long part_tokens(long tiles) { return most(PART_TOKENS, tiles / MOST_PARTS * TOKENS); }

  void cut(const Arguments& a, Cutter& from, long columns) {
    Columns::cut(a, from, columns, TOKENS);
    sums = from.take<float>(columns * SUMS * VECTOR_FLOATS);
    levels = from.take<uint8_t>((long)BLOCKS * LEVELS_BYTES);
    scales = from.take<float>((long)BLOCKS * GROUPS * MICRO_BLOCK);
    weights = from.take<uint8_t>((long)BLOCK * BLOCKS * PARTS * 2 * VECTOR_BYTES);
  }
  void clear() const { memset(sums, 0, sizeof(float) * count * SUMS * VECTOR_FLOATS); }

  // --- K ---
  static void decode_levels(const uint8_t* micro_block, uint8_t* to) {
    alignas(64) uint8_t arranged[ARRANGED * VECTOR_BYTES];
    const Tables tables = Tables::read();
    for (int part = 0; part < PARTS; part++, to += LEVEL_VECTORS * VECTOR_BYTES) {
      arrange(micro_block, 0, part, arranged);
      unrolled<GROUPS>([&](auto group) {
        unrolled<4>([&](auto t) {
          Bytes of_t[4];
          tables.decode(Index<0>{}, group, t, arranged, of_t);
          for (int i = 0; i < 4; i++) store(to + ((group * 4 + t) * 4 + i) * VECTOR_BYTES, of_t[i]);
        });
      });
    }
  }
  struct Kept {
    const uint8_t* levels;
    template <class Body> INLINE_MEMBER void each_group(Body&& body) const {
      for (int group = 0; group < GROUPS; group++) body(group);
    }
    INLINE_MEMBER void read(int group, int t, Bytes* out) const {
      for (int i = 0; i < 4; i++) out[i] = load(levels + ((group * 4 + t) * 4 + i) * VECTOR_BYTES);
    }
  };

  // RoPE channels of a micro-block's tokens as fp32, [channel in the order of a ring][place of the token].
  static void read_rope(const uint8_t* micro_block, Row* to) {
    alignas(64) Vector rows[MICRO_BLOCK];
    for (int n = 0; n < MICRO_BLOCK; n++)
      for (int i = 0; i < ROPE_DIM; i += 8) {  // 8 channels in the order of a ring lie side by side
        float* row = rows[place_of_token(n)] + i;
        const uint8_t* piece = micro_block + rope_at(i / 32 * 32 + ring_channel(0, i % 32), n);
        if (ROPE_BITS == 16) {
          read_8_halves(row, piece);
          continue;
        }
        alignas(16) float scale[VECTOR_FLOATS];
        int32_t bits = (int32_t)micro_block[rope_scale_at(i / 32, n)] << 16;
        store_floats(scale, decode_scales(broadcast_word(bits), RING_UNIT));
        for (int c = 0; c < 8; c++) row[c] = (float)(piece[c] - 128) * scale[0];
      }
    to_rows(rows, to, ROPE_DIM, MICRO_BLOCK);
  }

  void score(const uint8_t* const* micro_blocks, int blocks, int known, int tokens) const {
    alignas(64) Row rope[ROPE_DIM];
    for (int i = 0; i < blocks; i++) {
      if (i + AHEAD < known) prefetch(micro_blocks[i + AHEAD]);
      float* of_keys = scales + i * GROUPS * MICRO_BLOCK;
      decode_levels(micro_blocks[i], levels + (long)i * LEVELS_BYTES);
      read_scales(micro_blocks[i], 0, of_keys);
      for (int n = (int)most(0, tokens - i * MICRO_BLOCK); n < MICRO_BLOCK; n++)  // bytes of missing ones may be any
        for (int g = 0; g < GROUPS; g++) of_keys[g * MICRO_BLOCK + place_of_token(n)] = 0;
      read_rope(micro_blocks[i], rope);
      for (int part = 0; part < PARTS; part++) {
        const Kept source = {levels + (long)i * LEVELS_BYTES + part * LEVEL_VECTORS * VECTOR_BYTES};
        for_blocks(count, [&](auto block, int first) {
          constexpr int C = block.value;
          const float* query = ring_queries + (long)first * ALL_CHANNELS + STORED_DIM;
          float* to = scores + (long)first * TOKENS + i * MICRO_BLOCK + part * VECTOR_FLOATS;
          score_part<C>(*this, first, source, of_keys + part * VECTOR_FLOATS, to, TOKENS, [&](Floats* sum) {
            for (int d = 0; d < ROPE_DIM; d++) {
              Floats x = load_floats(rope[d] + part * VECTOR_FLOATS);
              for (int c = 0; c < C; c++) sum[c] = multiply_add(x, broadcast(query[c * ALL_CHANNELS + d]), sum[c]);
            }
          });
        });
      }
    }
  }

  // --- V ---
  // 16-bit weights of a group for C columns: an exponential times a scale, in units of `unit`. Each 32-bit word of a
  // lane holds a pair of tokens that differ in n3; one vector has the tokens with n0 = 0, one those with n0 = 1.
  template <int C> void weigh(int first, int group, int blocks, float inverse_unit) const {
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
    uint8_t* to = weights;
    for (int i = 0; i < blocks; i++)
      for (int part = 0; part < PARTS; part++) {
        int at = i * MICRO_BLOCK + part * VECTOR_FLOATS;
        Floats scale = load_floats(scales + (i * GROUPS + group) * MICRO_BLOCK + part * VECTOR_FLOATS) * inverse;
        for (int c = 0; c < C; c++, to += 2 * VECTOR_BYTES) {
          Bytes weight = round_to_int32(load_floats(scores + (long)(first + c) * TOKENS + at) * scale);
          store(to, shuffle_bytes(weight, even)), store(to + VECTOR_BYTES, shuffle_bytes(weight, odd));
        }
      }
  }

  // Adds products with V of a group for C columns 
  template <int C> void add_values(int first, int group, int blocks, float unit) const {
    for (int t = 0; t < 4; t += TS) {
      Bytes products[TS][2][C];
      for (int i = 0; i < TS * 2 * C; i++) products[i / (2 * C)][i / C % 2][i % C] = zero();
      const uint8_t* of_tokens = weights;
      for (int i = 0; i < blocks * PARTS; i++, of_tokens += C * 2 * VECTOR_BYTES) {
        const uint8_t* of_group = levels + ((long)i * LEVEL_VECTORS + (group * 4 + t) * 4) * VECTOR_BYTES;
        Bytes even[TS][2], odd[TS][2];
        for (int k = 0; k < TS; k++)
          for (int e2 = 0; e2 < 2; e2++, of_group += 2 * VECTOR_BYTES) {
            Bytes n3_0 = load(of_group), n3_1 = load(of_group + VECTOR_BYTES);
            even[k][e2] = low_16(n3_0, n3_1), odd[k][e2] = high_16(n3_0, n3_1);
          }
        for (int c = 0; c < C; c++) {
          Bytes w_even = load(of_tokens + 2 * c * VECTOR_BYTES), w_odd = load(of_tokens + (2 * c + 1) * VECTOR_BYTES);
          for (int k = 0; k < TS; k++)
            for (int e2 = 0; e2 < 2; e2++) {
              products[k][e2][c] = dot16(products[k][e2][c], even[k][e2], w_even);
              products[k][e2][c] = dot16(products[k][e2][c], odd[k][e2], w_odd);
            }
        }
      }
      for (int c = 0; c < C; c++) {
        Floats factor = broadcast(unit * tile_factors[first + c]);
        float* to = sums + ((long)(first + c) * SUMS + (group * 4 + t) * 2) * VECTOR_FLOATS;
        for (int k = 0; k < TS; k++)
          for (int e2 = 0; e2 < 2; e2++, to += VECTOR_FLOATS)
            store_floats(to, multiply_add(to_floats(products[k][e2][c]), factor, load_floats(to)));
      }
    }
  }

  void add(const uint8_t* const*, int blocks) const {
    float units[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
      Floats largest = broadcast(0);
      for (int i = 0; i < blocks; i++)
        for (int part = 0; part < PARTS; part++)
          largest = max_floats(largest, load_floats(scales + (i * GROUPS + g) * MICRO_BLOCK + part * VECTOR_FLOATS));
      units[g] = horizontal_max(largest) / LARGEST_INT16;
    }
    for_blocks(count, [&](auto block, int first) {
      for (int g = 0; g < GROUPS; g++) {
        if (units[g] < 1e-35f) continue;  // zeros
        weigh<block.value>(first, g, blocks, 1 / units[g]);
        add_values<block.value>(first, g, blocks, units[g]);
      }
    });
  }

  void shrink(int column, float factor) const {
    float* at = sums + (long)column * SUMS * VECTOR_FLOATS;
    for (int i = 0; i < SUMS * VECTOR_FLOATS; i += VECTOR_FLOATS)
      store_floats(at + i, load_floats(at + i) * broadcast(factor));
  }
  void collect(float* to) const {
    for (int column = 0; column < count; column++, to += STORED_DIM) collect_column(column, to);
  }
  void collect_column(int column, float* to) const {
    const float* at = sums + (long)column * SUMS * VECTOR_FLOATS;
    for (int i = 0; i < SUMS; i++, at += VECTOR_FLOATS) {
      int group = i / 8, t = i / 2 % 4, e2 = i % 2;
      for (int word = 0; word < 4; word++) {  // e1 e0 = d3 d0
        float sum = 0;
        for (int lane = 0; lane < VECTOR_LANES; lane++) sum += at[4 * lane + word];
        to[group * GROUP_SIZE + e2 * 16 + (word >> 1) * 8 + t * 2 + (word & 1)] = sum;
      }
    }
  }
};
