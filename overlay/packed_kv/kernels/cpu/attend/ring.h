// Attention over the recent tokens in a ring, in fp32: they are few.
#pragma once
#include "softmax.h"

INLINE float ring_scale(uint8_t byte) {
  uint32_t bits = (uint32_t)byte << 20;
  float x;
  memcpy(&x, &bits, 4);
  return x * (SCALE_BIAS * RING_UNIT);
}

// Scores of a token for C columns, to scores[column * tile].
template <int C> INLINE void score_slot(const uint8_t* slot, const float* queries, float* scores, int tile) {
  Floats sum[C];
  for (int c = 0; c < C; c++) sum[c] = broadcast(0);
  for (int group = 0; group < ALL_GROUPS; group++) {
    Floats scale = broadcast(ring_scale(slot[RING_SCALES_AT[0] + group]));
    for (int i = group * GROUP_SIZE; i < (group + 1) * GROUP_SIZE; i += VECTOR_FLOATS) {
      Floats key = load_ring_codes(slot + RING_CODES_AT[0] + i) * scale;
      for (int c = 0; c < C; c++) sum[c] = multiply_add(load_floats(queries + c * ALL_CHANNELS + i), key, sum[c]);
    }
  }
  for (int c = 0; c < C; c++) scores[c * tile] = horizontal_sum(sum[c]);
}

// Adds V of `count` tokens, times their exponentials and a factor by column, for C columns.
template <int C>
static void add_slots(const uint8_t* const* slots, long count, const float* scores, int tile, const float* factors,
                      float* sums) {
  constexpr int AT_ONCE = 2;  // vectors: enough sums that none waits for its last addition
  for (int group = 0; group < GROUPS; group++)
    for (int i = group * GROUP_SIZE; i < (group + 1) * GROUP_SIZE; i += AT_ONCE * VECTOR_FLOATS) {
      Floats sum[AT_ONCE][C];
      for (int k = 0; k < AT_ONCE * C; k++) sum[k / C][k % C] = broadcast(0);
      for (long n = 0; n < count; n++) {
        Floats scale = broadcast(ring_scale(slots[n][RING_SCALES_AT[VALUE] + group])), value[AT_ONCE];
        for (int k = 0; k < AT_ONCE; k++)
          value[k] = load_ring_codes(slots[n] + RING_CODES_AT[VALUE] + i + k * VECTOR_FLOATS) * scale;
        for (int c = 0; c < C; c++) {
          Floats weight = broadcast(scores[c * tile + n]);
          for (int k = 0; k < AT_ONCE; k++) sum[k][c] = multiply_add(weight, value[k], sum[k][c]);
        }
      }
      for (int k = 0; k < AT_ONCE * C; k++) {
        float* to = sums + k % C * STORED_DIM + i + k / C * VECTOR_FLOATS;
        store_floats(to, multiply_add(sum[k / C][k % C], broadcast(factors[k % C]), load_floats(to)));
      }
    }
}
