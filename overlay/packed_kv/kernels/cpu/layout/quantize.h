// Preparation of a vector for coding, and scales and codes of groups: for the store and for packed vectors.
#pragma once
#include "../base/numbers.h"
#include "layer.h"
#include "vectors16.h"
#include <type_traits>

static inline bool is_finite(float x) {  // also where the compiler assumes finite numbers
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7fffffff) < 0x7f800000;
}
static inline float limited(float x) {
  x = x > INPUT_LIMIT ? INPUT_LIMIT : x;
  return x < -INPUT_LIMIT ? -INPUT_LIMIT : x;
}

// As `Codec.prepare`, without the rotation, for a vector of elements of a type. `given`, `mean`: scratch memory.
static void prepare_vector(const Layer& layer, int role, int head, int64_t position, const void* from, int type,
                           float* to, float* given, float* mean) {
  const int dim = layer.dim[role];
  const int32_t* order = layer.order_of(role, head);
  const float* scale = layer.scale_of(role, head);
  float* plain = order ? given : to;
  read_elements(plain, from, type, dim);
  for (int i = 0; i < dim; i++) plain[i] = is_finite(plain[i]) ? plain[i] : 0.f;
  for (int i = dim; i < STORED_DIM; i++) plain[i] = 0;
  if (order)
    for (int i = 0; i < STORED_DIM; i++) to[i] = given[order[i]];
  if (layer.centres[role]) {
    layer.read_mean(role, head, layer.mean_number(role, position), mean);
    for (int i = 0; i < STORED_DIM; i++) to[i] -= mean[i];
  }
  if (scale)
    for (int i = 0; i < STORED_DIM; i++) to[i] *= scale[i];
  for (int i = 0; i < STORED_DIM; i++) to[i] = limited(to[i]);
}

// --- a group of 32 channels ---
// Difference of a magnitude to the nearest of a code's levels times a scale.
template <int C> struct AllLevels {
  Floats levels[CODES[C].magnitudes];

  explicit INLINE_MEMBER AllLevels(Floats scale) {
    for (int m = 0; m < CODES[C].magnitudes; m++) levels[m] = scale * broadcast(CODES[C].levels[m] * CODES[C].unit);
  }
  INLINE_MEMBER Floats error(Floats x) const {
    Floats least = absolute(x - levels[0]);
    for (int m = 1; m < CODES[C].magnitudes; m++) least = nearer(least, x, levels[m]);
    return least;
  }
};

// The two levels that a magnitude can be nearest to, by cell: magnitudes are in the cell of the nearest multiple of
// `width`, larger ones in the last cell.
template <int C> struct Cells {
  static constexpr int COUNT = 16, LAST_LEVEL = CODES[C].magnitudes - 1;
  static constexpr float level(int m) { return CODES[C].levels[m] * CODES[C].unit; }
  static constexpr float width = level(LAST_LEVEL) / (COUNT - 1);
  float below[COUNT], above[COUNT];
  bool serves;  // no cell has more than two

  static constexpr int nearest(float magnitude) {
    int m = 0;
    while (m < LAST_LEVEL && 2 * magnitude > level(m) + level(m + 1)) m++;
    return m;
  }
  constexpr Cells() : below{}, above{}, serves(true) {
    for (int i = 0; i < COUNT; i++) {
      int first = nearest((i - 0.51f) * width), last = nearest((i + 0.51f) * width);  // with room for rounding
      below[i] = level(first), above[i] = level(last), serves &= last - first < 2;
    }
  }
};
// Like AllLevels, but looks up two levels. A level times a scale has 12 significant bits: products are exact, and a
// difference is rounded once.
template <int C> struct TwoLevels {
  static constexpr Cells<C> cells{};
  static_assert(cells.serves, "cells are too wide");
  const Levels below, above;
  const Floats negative, in_cells, integers, last;

  explicit INLINE_MEMBER TwoLevels(Floats scale)
      : below(cells.below), above(cells.above), negative(broadcast(0) - scale),
        in_cells(broadcast(1 / cells.width) / scale), integers(broadcast(0x1p23f)),
        last(broadcast(0x1p23f + (cells.COUNT - 1))) {}
  INLINE_MEMBER Floats error(Floats x) const {
    Bytes cell = floats_as_bits(min_floats(multiply_add(x, in_cells, integers), last));  // any, with a scale of 0
    return smaller_magnitude(multiply_add(below(cell), negative, x), multiply_add(above(cell), negative, x));
  }
};

// Sum of squared errors of 32 magnitudes with a scale, as a tree: channels 16 apart first, then 8, 4, 2, 1.
template <int C> INLINE Floats squared_error(const Floats* magnitudes, Floats scale) {
  constexpr bool looks_up = HAS_FAST_LEVELS && CODES[C].magnitudes > 4;
  const std::conditional_t<looks_up, TwoLevels<C>, AllLevels<C>> nearest(scale);
  Floats sums[16];
  unrolled<16>([&](auto i) {
    Floats low = nearest.error(magnitudes[i]), high = nearest.error(magnitudes[i + 16]);
    sums[i] = low * low + high * high;
  });
  for (int stride = 8; stride; stride /= 2)
    for (int i = 0; i < stride; i++) sums[i] = sums[i] + sums[i + stride];
  return sums[0];
}
INLINE Floats absmax(const Row* x, int lane) {
  Floats most = absolute(load_floats(x[0] + lane));
  for (int i = 1; i < 32; i++) most = max_floats(most, absolute(load_floats(x[i] + lane)));
  return most;
}
template <int C> static void quantize(const Row* x, int lane, uint8_t (*codes)[WIDE], uint8_t* scales) {
  constexpr Code K = CODES[C];
  constexpr int LEVELS = K.magnitudes;
  Floats magnitudes[32];
  for (int i = 0; i < 32; i++) magnitudes[i] = absolute(load_floats(x[i] + lane));
  Bytes ratio = half_bits(absmax(x, lane) * broadcast(K.over_largest));
  Bytes start = min_32(SHIFT_RIGHT_32(ratio, 7), broadcast_32(MAX_SCALE_BYTE)), best = start;
  Floats least = broadcast(INFINITY);
  for (int offset = K.search_above; offset >= -K.search_below; offset--) {
    Bytes byte = max_32(min_32(add32(start, broadcast_32(offset)), broadcast_32(MAX_SCALE_BYTE)), zero());
    Floats error = squared_error<C>(magnitudes, scale_of(byte));
    Bytes better = offset == K.search_above ? broadcast_32(-1) : where_less(error, least);
    best = select(better, byte, best), least = select_floats(better, error, least);
  }
  store_bytes(scales + lane, best);
  Floats scale = scale_of(best), thresholds[LEVELS];
  for (int m = 0; m + 1 < LEVELS; m++) thresholds[m] = scale * broadcast(K.thresholds[m]);
  for (int i = 0; i < 32; i++) {
    Bytes code = bit_and(where_less(load_floats(x[i] + lane), broadcast(0.f)), broadcast_32(LEVELS));
    for (int m = 0; m + 1 < LEVELS; m++) code = count_above(code, magnitudes[i], thresholds[m]);
    store_bytes(codes[i] + lane, code);
  }
}
static void quantize_for_ring(const Row* x, int lane, uint8_t (*codes)[WIDE], uint8_t* scales) {
  Bytes bits = half_bits(min_floats(absmax(x, lane) * broadcast(RING_OVER_LARGEST), broadcast(65504.f)));
  Bytes byte = min_32(SHIFT_RIGHT_32(add32(bits, broadcast_32(127)), 7), broadcast_32(MAX_SCALE_BYTE));
  Floats step = scale_of(byte) * broadcast(RING_UNIT);
  Floats inverse = bits_as_floats(bit_and(where_less(broadcast(0.f), step), floats_as_bits(broadcast(1.f) / step)));
  store_bytes(scales + lane, byte);
  for (int i = 0; i < 32; i++) {
    Bytes code = round_to_int32(load_floats(x[i] + lane) * inverse);
    code = max_32(min_32(code, broadcast_32(RING_LARGEST)), broadcast_32(-RING_LARGEST));
    store_bytes(codes[i] + lane, add32(code, broadcast_32(128)));
  }
}
