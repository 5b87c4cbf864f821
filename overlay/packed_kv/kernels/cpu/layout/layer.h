// The differences between layers of one layout: rotation and calibration. `Layer` and `Cache` of layer.py.
#pragma once
#include "places.h"
#include <stdint.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Arrays of two have K's and V's. Latents have only K's.
struct Layer {
  const float* rotation;          // constants of the rotation, [STORED_DIM]
  int32_t dim[2];                 // channels of a head (zeros are stored behind them), or of latents and RoPE
  const int32_t* order[2];        // channels in packing order, [heads or 1][STORED_DIM]; null: as they come
  int32_t order_heads[2];
  const float* table[2];          // mean, its partner, first mean, scale, [heads or 1][4][STORED_DIM], in packing order
  int32_t table_heads[2];
  int32_t centres[2], scales[2];  // whether vectors have a mean taken off, and are multiplied by a scale
  const float* spectrum[2];       // factors of mean and partner, [blocks][2][STORED_DIM], in the model's order
  int32_t blocks[2], block_tokens[2];

  const int32_t* order_of(int role, int head) const {
    return order[role] && order_heads[role] > 1 ? order[role] + head * STORED_DIM : order[role];
  }
  const float* table_of(int role, int head) const {
    return table[role] && table_heads[role] > 1 ? table[role] + head * 4 * STORED_DIM : table[role];
  }
  const float* scale_of(int role, int head) const {
    return scales[role] ? table_of(role, head) + 3 * STORED_DIM : nullptr;
  }
  // Index of the mean that is subtracted at a position; -1: the first mean.
  int64_t mean_number(int role, int64_t position) const {
    if (position == 0) return -1;
    int64_t block = block_tokens[role] ? position / block_tokens[role] : 0;
    if (block >= blocks[role]) block = blocks[role] - 1;
    return block < 0 ? 0 : block;  // padding in front of a sequence
  }
  // The first position behind `position` that has another mean.
  int64_t end_of_mean(int role, int64_t position) const {
    if (position <= 0) return position < 0 ? 0 : 1;
    int64_t number = mean_number(role, position);
    return number < blocks[role] - 1 ? (number + 1) * block_tokens[role] : INT64_MAX;
  }
  // Mean `number` of `mean_number`, in packing order.
  void read_mean(int role, int head, int64_t number, float* mean) const {
    const int32_t* order = order_of(role, head);
    const float *table = table_of(role, head), *factors = spectrum[role] + number * 2 * STORED_DIM;
    if (number < 0) {
      memcpy(mean, table + 2 * STORED_DIM, sizeof(float) * STORED_DIM);
      return;
    }
    for (int i = 0; i < STORED_DIM; i++) {
      int c = order ? order[i] : i;
      mean[i] = table[i] * factors[c] + table[STORED_DIM + i] * factors[STORED_DIM + c];
    }
  }
};

// Pages, or a ring: [blocks, KV heads, block_size, slot_bytes]; strides in bytes.
struct Cache {
  uint8_t* data;
  int64_t block_stride, head_stride;
  int32_t block_size, slot_bytes;

  uint8_t* micro_block(int64_t number, int head) const {
    int64_t a_block = block_size / MICRO_BLOCK;
    return data + number / a_block * block_stride + head * head_stride + number % a_block * MICRO_BLOCK_BYTES;
  }
  uint8_t* slot(int64_t number, int head) const {
    return data + number / block_size * block_stride + head * head_stride + number % block_size * slot_bytes;
  }
};
