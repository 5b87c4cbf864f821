// Attention over the recent tokens in a ring, in fp32: they are few.
#pragma once
#include "queries.h"

INLINE float ring_scale(uint8_t byte) {
  uint32_t bits = (uint32_t)byte << 20;
  float x;
  memcpy(&x, &bits, 4);
  return x * (SCALE_BIAS / 128);  // codes are 128ths
}

static inline const uint8_t* ring_slot(const Arguments& a, long r, long head, long token) {
  long block = a.ring_table[r * a.ring_table_stride + token / a.ring_block_size];
  return a.ring + block * a.ring_block_stride + head * a.ring_head_stride +
         token % a.ring_block_size * a.ring_token_stride;
}

// Scores of a token for C columns, to scores[column * TILE].
template <int C> INLINE void score_slot(const uint8_t* slot, const float* rotated, float* scores) {
  Floats sum[C];
  for (int c = 0; c < C; c++) sum[c] = broadcast(0);
  for (int group = 0; group < GROUPS; group++) {
    Floats scale = broadcast(ring_scale(slot[RING_SCALES_AT[0] + group]));
    for (int i = group * GROUP_SIZE; i < (group + 1) * GROUP_SIZE; i += VECTOR_FLOATS) {
      Floats key = load_ring_codes(slot + RING_CODES_AT[0] + i) * scale;
      for (int c = 0; c < C; c++) sum[c] = multiply_add(load_floats(rotated + c * STORED_DIM + i), key, sum[c]);
    }
  }
  for (int c = 0; c < C; c++) scores[c * TILE] = horizontal_sum(sum[c]);
}

// Adds V of `count` tokens, times their exponentials and a factor by column, for C columns.
template <int C>
static void add_slots(const uint8_t* const* slots, long count, const float* scores, const float* factors, float* sums) {
  for (int group = 0; group < GROUPS; group++)
    for (int i = group * GROUP_SIZE; i < (group + 1) * GROUP_SIZE; i += VECTOR_FLOATS) {
      Floats sum[C];
      for (int c = 0; c < C; c++) sum[c] = broadcast(0);
      for (long n = 0; n < count; n++) {
        float scale = ring_scale(slots[n][RING_SCALES_AT[1] + group]);
        Floats value = load_ring_codes(slots[n] + RING_CODES_AT[1] + i) * broadcast(scale);
        for (int c = 0; c < C; c++) sum[c] = multiply_add(broadcast(scores[c * TILE + n]), value, sum[c]);
      }
      for (int c = 0; c < C; c++) {
        float* to = sums + c * STORED_DIM + i;
        store_floats(to, multiply_add(sum[c], broadcast(factors[c]), load_floats(to)));
      }
    }
}
