// Codes to numbers, and back to a vector as the model made it.
#pragma once
#include "../base/numbers.h"
#include "layer.h"
#include "vectors16.h"

// Levels of sign-magnitude codes of a width; beyond the width's codes, levels repeat.
template <int C> class SignedLevels {
  struct Table {
    float at[16];  // of both signs, or of 16 magnitudes
    Table() {
      for (int code = 0; code < 16; code++) {
        float magnitude = CODES[C].levels[code % CODES[C].magnitudes] * CODES[C].unit;
        at[code] = code & CODES[C].magnitudes ? -magnitude : magnitude;
      }
    }
  };
  const Table table;
  const Levels level;

 public:
  SignedLevels() : level(table.at) {}
  INLINE_MEMBER Floats operator()(Bytes code) const {
    if constexpr (CODES[C].magnitudes < 16) return level(code);
    Bytes sign = shift_left(bit_and(code, broadcast_32(16)), broadcast_32(27));
    return bits_as_floats(bit_or(floats_as_bits(level(bit_and(code, broadcast_32(15)))), sign));
  }
};
constexpr float gain_of(int role, int group) { return role == 1 ? CODES[GROUP_TABLE[role][group].code].gain : 1; }

// A code of 1 in a ring's scale.
static inline float ring_step(uint8_t scale) {
  float step[VECTOR_FLOATS];
  store_floats(step, scale_of(broadcast_32(scale)) * broadcast(RING_UNIT));
  return step[0];
}

// A vector, or a sum of vectors, to elements of a type: divided by the scale, plus `mean` if there is one (both in
// packing order), then in the model's order. `plain`: scratch memory.
static void restore_sum(const Layer& layer, int role, int head, const float* mean, float* vector, void* to, int type,
                        float* plain) {
  const int32_t* order = layer.order_of(role, head);
  const float *scale = layer.scale_of(role, head), *result = vector;
  if (scale)
    for (int i = 0; i < STORED_DIM; i++) vector[i] /= scale[i];
  if (mean)
    for (int i = 0; i < STORED_DIM; i++) vector[i] += mean[i];
  if (order) {
    for (int i = 0; i < STORED_DIM; i++) plain[order[i]] = vector[i];
    result = plain;
  }
  write_elements(to, result, type, layer.dim[role]);
}

// As `Codec.restore`, without the rotation. `plain`, `mean`: scratch memory.
static void restore_vector(const Layer& layer, int role, int head, int64_t position, float* vector, void* to, int type,
                           float* plain, float* mean) {
  if (layer.centres[role]) layer.read_mean(role, head, layer.mean_number(role, position), mean);
  restore_sum(layer, role, head, layer.centres[role] ? mean : nullptr, vector, to, type, plain);
}
