// Codes to numbers, and a vector as the model made it: for the gather and for packed vectors.
#pragma once
#include "calibration.h"
#include "columns.h"
#include "constants.h"
#include "numbers.h"

// Levels of sign-magnitude codes of a width; those of codes that it has not repeat.
template <class C> struct SignedLevels {
  float at[16];
  SignedLevels() {
    for (int code = 0; code < 16; code++) {
      float magnitude = C::MAGNITUDES[code % C::LEVELS];
      at[code] = code & C::LEVELS ? -magnitude : magnitude;
    }
  }
};

// As `Codec.restore`, but for the rotation: a vector to elements of a type. `plain`, `mean`: memory.
static void restore_vector(const Layer& layer, int role, int head, int64_t position, float* vector, void* to, int type,
                           float* plain, float* mean) {
  const int size = layer.channels;
  const int32_t* order = order_of(layer, role, head);
  const float *table = table_of(layer, role, head), *result = vector;
  if (layer.scales[role])
    for (int i = 0; i < size; i++) vector[i] /= table[3 * size + i];
  if (layer.centres[role]) {
    mean_of(layer, role, head, position, mean);
    for (int i = 0; i < size; i++) vector[i] += mean[i];
  }
  if (order) {
    for (int i = 0; i < size; i++) plain[order[i]] = vector[i];
    result = plain;
  }
  write_elements(to, result, type, layer.dim[role]);
}
