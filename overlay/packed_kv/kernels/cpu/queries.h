// Queries of a KV head as a job reads them: rotated as K is, as 16-bit integers, with the products with K's means.
#pragma once
#include "ranges.h"
#include "rotation.h"

// Byte i of a group in a ring is this channel of K, and of V (layout.py).
constexpr int ring_key_channel(int i) { return (i >> 2 & 1) * 16 + (i >> 1 & 1) * 8 + (i >> 3) * 2 + (i & 1); }
constexpr int ring_value_channel(int i) { return (i >> 1 & 1) * 16 + (i & 1) * 8 + (i >> 2); }

typedef int32_t FourInts __attribute__((vector_size(16)));
constexpr float ROUNDING = 12582912;  // 1.5 * 2^23: the lower bits of a small number plus this are its nearest integer

struct Queries {
  float* plain;      // [column][STORED_DIM], in the model's order, times the score's scale; null: K has no means
  float* rotated;    // [column][STORED_DIM], in the order of K's bytes in a ring, so scaled; null: there is no ring
  int16_t* integers; // see Columns.queries
  float* factors;
};

// Reads the queries of a KV head: column = query token * group + head. Four are rotated at once.
static void read_queries(const Arguments& a, const Request& request, long head, const Queries& to) {
  const int32_t* channels = a.key_channels + head * a.key_channels_stride;
  const float* key_scale = a.key_scale ? a.key_scale + head * a.key_scale_stride : nullptr;
  long columns = request.tokens * a.group;
  alignas(64) float row[STORED_DIM];
  alignas(64) Four ordered[STORED_DIM];
  static_assert(BLOCK == 4, "a block is rotated at once");
  memset(row, 0, sizeof row);
  for (long first = 0; first < columns; first += BLOCK) {
    long width = least(BLOCK, columns - first);
    memset(ordered, 0, sizeof ordered);
    for (long c = 0; c < width; c++) {
      long column = first + c, token = request.query + column / a.group, query_head = head * a.group + column % a.group;
      long at = token * a.query_stride + query_head * a.query_head_stride;
      read_elements(row, (const char*)a.query + at * element_bytes(a.query_type), a.query_type, a.head_dim);
      if (to.plain)
        for (int d = 0; d < STORED_DIM; d++) to.plain[column * STORED_DIM + d] = row[d] * (float)a.scale;
      if (key_scale)
        for (int d = 0; d < STORED_DIM; d++) row[d] /= key_scale[d];
      for (int d = 0; d < STORED_DIM; d++) ((float*)ordered)[4 * d + c] = row[channels[d]];
    }
    rotate(ordered, a.rotation_constants);
    Four largest = {}, inverse;
    for (int d = 0; d < STORED_DIM; d++) {
      Four size = ordered[d] < 0 ? -ordered[d] : ordered[d];
      largest = size > largest ? size : largest;
    }
    for (int c = 0; c < BLOCK; c++) inverse[c] = largest[c] > 1e-30f ? LARGEST_INT16 / largest[c] : 0;
    for (long c = 0; c < width; c++) to.factors[first + c] = largest[c] / LARGEST_INT16 * (float)a.scale;
    int16_t* integers = to.integers + first * STORED_DIM;
    for (int i = 0; i < STORED_DIM; i++) {
      Four x = ordered[i / GROUP_SIZE * GROUP_SIZE + ring_key_channel(i % GROUP_SIZE)], scaled = x * inverse;
      FourInts rounded = (FourInts)(scaled + ROUNDING);
      for (long c = 0; c < width; c++) integers[i / 4 * 4 * width + 4 * c + i % 4] = (int16_t)rounded[c];
      if (to.rotated)
        for (long c = 0; c < width; c++) to.rotated[(first + c) * STORED_DIM + i] = x[c] * (float)a.scale;
    }
  }
}

// The product of a query with the mean of K at a position: what its scores lack.
static float product_with_mean(const Arguments& a, long head, const float* plain, long position) {
  const float* means = a.means + head * a.means_stride;
  Floats sum = broadcast(0);
  if (position == 0) {
    for (int d = 0; d < STORED_DIM; d += VECTOR_FLOATS)
      sum = multiply_add(load_floats(plain + d), load_floats(means + 2 * STORED_DIM + d), sum);
    return horizontal_sum(sum);
  }
  long block = a.mean_block_tokens ? least(position / a.mean_block_tokens, a.mean_blocks - 1) : 0;
  const float* real = a.spectrum + block * 2 * STORED_DIM;
  for (int d = 0; d < STORED_DIM; d += VECTOR_FLOATS) {
    Floats mean = load_floats(means + d) * load_floats(real + d);
    mean = multiply_add(load_floats(means + STORED_DIM + d), load_floats(real + STORED_DIM + d), mean);
    sum = multiply_add(load_floats(plain + d), mean, sum);
  }
  return horizontal_sum(sum);
}

static inline long mean_block_of(const Arguments& a, long position) {
  if (position == 0) return -1;
  return a.mean_block_tokens ? least(position / a.mean_block_tokens, a.mean_blocks - 1) : 0;
}
