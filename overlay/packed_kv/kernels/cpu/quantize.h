// A vector made ready for its codes, and the scales and codes of groups: for the store and for packed vectors.
#pragma once
#include "calibration.h"
#include "columns.h"
#include "constants.h"
#include "numbers.h"

static inline bool is_finite(float x) {  // whatever the compiler takes for granted
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7fffffff) < 0x7f800000;
}

// As `Codec.prepare`, but for the rotation: a vector of elements of a type. `given`, `mean`: memory.
static void prepare_vector(const Layer& layer, int role, int head, int64_t position, const void* from, int type,
                           float* to, float* given, float* mean) {
  const int size = layer.channels, dim = layer.dim[role];
  const int32_t* order = order_of(layer, role, head);
  const float* table = table_of(layer, role, head);
  float* plain = order ? given : to;
  read_elements(plain, from, type, dim);
  for (int i = 0; i < dim; i++) plain[i] = is_finite(plain[i]) ? plain[i] : 0.f;
  for (int i = dim; i < size; i++) plain[i] = 0;
  if (order)
    for (int i = 0; i < size; i++) to[i] = given[order[i]];
  if (layer.centres[role]) {
    mean_of(layer, role, head, position, mean);
    for (int i = 0; i < size; i++) to[i] -= mean[i];
  }
  if (layer.scales[role])
    for (int i = 0; i < size; i++) to[i] *= table[3 * size + i];
  for (int i = 0; i < size; i++) to[i] = to[i] > INPUT_LIMIT ? INPUT_LIMIT : to[i];
  for (int i = 0; i < size; i++) to[i] = to[i] < -INPUT_LIMIT ? -INPUT_LIMIT : to[i];
}

// --- a group of 32 channels ---
// Squared errors of a scale, added as a tree: channels 16 apart first, then 8, 4, 2, 1.
template <class C, int CHANNEL, int STRIDE> struct Errors {
  static inline __attribute__((always_inline)) Floats sum(const Row* x, int lane, const Floats* levels) {
    Floats low = Errors<C, CHANNEL, 2 * STRIDE>::sum(x, lane, levels);
    return low + Errors<C, CHANNEL + STRIDE, 2 * STRIDE>::sum(x, lane, levels);
  }
};
template <class C, int CHANNEL> struct Errors<C, CHANNEL, 32> {
  static inline __attribute__((always_inline)) Floats sum(const Row* x, int lane, const Floats* levels) {
    Floats magnitude = absolute(load_floats(x[CHANNEL] + lane)), least = absolute(magnitude - levels[0]);
    for (int m = 1; m < C::LEVELS; m++) least = nearer(least, magnitude, levels[m]);
    return least * least;
  }
};
INLINE Floats absmax(const Row* x, int lane) {
  Floats most = absolute(load_floats(x[0] + lane));
  for (int i = 1; i < 32; i++) most = max_floats(most, absolute(load_floats(x[i] + lane)));
  return most;
}
template <class C> static void quantize(const Row* x, int lane, uint8_t (*codes)[COLUMNS], uint8_t* scales) {
  Bytes ratio = half_bits(absmax(x, lane) * broadcast(C::OVER_LARGEST));
  Bytes start = min_32(SHIFT_RIGHT_32(ratio, 7), broadcast_32(MAX_SCALE_BYTE)), best = start;
  Floats least = broadcast(INFINITY);
  for (int offset = C::ABOVE; offset >= -C::BELOW; offset--) {
    Bytes byte = max_32(min_32(add32(start, broadcast_32(offset)), broadcast_32(MAX_SCALE_BYTE)), zero());
    Floats scale = scale_of(byte), levels[C::LEVELS];
    for (int m = 0; m < C::LEVELS; m++) levels[m] = scale * broadcast(C::MAGNITUDES[m]);
    Floats error = Errors<C, 0, 1>::sum(x, lane, levels);
    Bytes better = offset == C::ABOVE ? broadcast_32(-1) : where_less(error, least);
    best = select(better, byte, best), least = select_floats(better, error, least);
  }
  store_bytes(scales + lane, best);
  Floats scale = scale_of(best), thresholds[C::LEVELS];
  for (int m = 0; m + 1 < C::LEVELS; m++) thresholds[m] = scale * broadcast(C::THRESHOLDS[m]);
  for (int i = 0; i < 32; i++) {
    Floats value = load_floats(x[i] + lane), magnitude = absolute(value);
    Bytes code = bit_and(where_less(value, broadcast(0.f)), broadcast_32(C::LEVELS));
    for (int m = 0; m + 1 < C::LEVELS; m++) code = count_above(code, magnitude, thresholds[m]);
    store_bytes(codes[i] + lane, code);
  }
}
static void quantize_for_ring(const Row* x, int lane, uint8_t (*codes)[COLUMNS], uint8_t* scales) {
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
