// A vector made ready for its codes, and the scales and codes of groups: for the store and for packed vectors.
#pragma once
#include "../base/numbers.h"
#include "layer.h"
#include "vectors16.h"

static inline bool is_finite(float x) {  // whatever the compiler takes for granted
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7fffffff) < 0x7f800000;
}
static inline float limited(float x) {
  x = x > INPUT_LIMIT ? INPUT_LIMIT : x;
  return x < -INPUT_LIMIT ? -INPUT_LIMIT : x;
}

// As `Codec.prepare`, but for the rotation: a vector of elements of a type. `given`, `mean`: memory.
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
// Squared errors of a scale, added as a tree: channels 16 apart first, then 8, 4, 2, 1.
template <int C, int CHANNEL, int STRIDE> struct Errors {
  static INLINE_MEMBER Floats sum(const Row* x, int lane, const Floats* levels) {
    Floats low = Errors<C, CHANNEL, 2 * STRIDE>::sum(x, lane, levels);
    return low + Errors<C, CHANNEL + STRIDE, 2 * STRIDE>::sum(x, lane, levels);
  }
};
template <int C, int CHANNEL> struct Errors<C, CHANNEL, 32> {
  static INLINE_MEMBER Floats sum(const Row* x, int lane, const Floats* levels) {
    Floats magnitude = absolute(load_floats(x[CHANNEL] + lane)), least = absolute(magnitude - levels[0]);
    for (int m = 1; m < CODES[C].magnitudes; m++) least = nearer(least, magnitude, levels[m]);
    return least * least;
  }
};
INLINE Floats absmax(const Row* x, int lane) {
  Floats most = absolute(load_floats(x[0] + lane));
  for (int i = 1; i < 32; i++) most = max_floats(most, absolute(load_floats(x[i] + lane)));
  return most;
}
template <int C> static void quantize(const Row* x, int lane, uint8_t (*codes)[WIDE], uint8_t* scales) {
  constexpr Code K = CODES[C];
  constexpr int LEVELS = K.magnitudes;
  Bytes ratio = half_bits(absmax(x, lane) * broadcast(K.over_largest));
  Bytes start = min_32(SHIFT_RIGHT_32(ratio, 7), broadcast_32(MAX_SCALE_BYTE)), best = start;
  Floats least = broadcast(INFINITY);
  for (int offset = K.search_above; offset >= -K.search_below; offset--) {
    Bytes byte = max_32(min_32(add32(start, broadcast_32(offset)), broadcast_32(MAX_SCALE_BYTE)), zero());
    Floats scale = scale_of(byte), levels[LEVELS];
    for (int m = 0; m < LEVELS; m++) levels[m] = scale * broadcast(K.levels[m] * K.unit);
    Floats error = Errors<C, 0, 1>::sum(x, lane, levels);
    Bytes better = offset == K.search_above ? broadcast_32(-1) : where_less(error, least);
    best = select(better, byte, best), least = select_floats(better, error, least);
  }
  store_bytes(scales + lane, best);
  Floats scale = scale_of(best), thresholds[LEVELS];
  for (int m = 0; m + 1 < LEVELS; m++) thresholds[m] = scale * broadcast(K.thresholds[m]);
  for (int i = 0; i < 32; i++) {
    Floats value = load_floats(x[i] + lane), magnitude = absolute(value);
    Bytes code = bit_and(where_less(value, broadcast(0.f)), broadcast_32(LEVELS));
    for (int m = 0; m + 1 < LEVELS; m++) code = count_above(code, magnitude, thresholds[m]);
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
