// 16 vectors side by side: a row of 16 floats for each channel, so that rotations, sums and searches go down the rows
// without a shuffle, in the reference's order of operations. For the store and the gather.
//
// Both give the reference's bits: -ffp-contract=off, so that each operation is rounded on its own.
#pragma once
#include "simd_columns.h"
#include "tables.h"
#include <math.h>

enum { COLUMNS = 16 };
typedef float Row[COLUMNS];

INLINE Floats select_floats(Bytes mask, Floats a, Floats b) {
  return bits_as_floats(select(mask, floats_as_bits(a), floats_as_bits(b)));
}
// The columns of `count` vectors, in whole vectors of SIMD.
static inline int whole(int count) { return (count + VECTOR_FLOATS - 1) / VECTOR_FLOATS * VECTOR_FLOATS; }

// e5m3 bytes, one a lane, as fp32; without subnormal fp32, which a program may have turned off.
INLINE Floats scale_of(Bytes byte) {
  Floats normal = bits_as_floats(add32(SHIFT_LEFT_32(byte, 20), broadcast_32(112 << 23)));
  return select_floats(where_above(broadcast_32(8), byte), to_floats(byte) * broadcast(0x1p-17f), normal);
}
// Bits of the fp16 that numbers of 0 and more round to; those beyond are infinite.
INLINE Bytes half_bits(Floats x) {
  Bytes bits = floats_as_bits(min_floats(x, broadcast(65536.f)));
  Bytes odd = bit_and(SHIFT_RIGHT_32(bits, 13), broadcast_32(1));
  Bytes normal = SHIFT_RIGHT_32(add32(add32(bits, broadcast_32(0xfff - (112 << 23))), odd), 13);
  Bytes subnormal = add32(floats_as_bits(x + broadcast(0.5f)), broadcast_32(-(126 << 23)));
  return select(where_less(x, broadcast(0x1p-14f)), subnormal, normal);
}

// --- rotations ---
// R rows, `stride` apart: butterflies over 1, 2, ... R / 2 times that. `before`, of the first row on, and `after` are
// what numbers are multiplied by; null: nothing.
template <int R> INLINE void butterflies(Row* x, int stride, int lane, const float* before, const float* after) {
  Floats v[R];
  for (int i = 0; i < R; i++) v[i] = load_floats(x[i * stride] + lane);
  if (before)
    for (int i = 0; i < R; i++) v[i] = v[i] * broadcast(before[i * stride]);
  for (int s = 1; s < R; s *= 2)
    for (int i = 0; i < R; i += 2 * s)
      for (int j = i; j < i + s; j++) {
        Floats low = v[j], high = v[j + s];
        v[j] = low + high, v[j + s] = low - high;
      }
  if (after)
    for (int i = 0; i < R; i++) v[i] = v[i] * broadcast(after[0]);
  for (int i = 0; i < R; i++) store_floats(x[i * stride] + lane, v[i]);
}
// Two passes of butterflies, over strides below FIRST and from there on.
template <int FIRST, int SECOND> static void hadamard_block(Row* x, const float* signs, int lane, bool inverse) {
  constexpr int SIZE = FIRST * SECOND;
  const float norm = (float)(1 / sqrt((double)SIZE));
  for (int i = 0; i < SIZE; i += FIRST) butterflies<FIRST>(x + i, 1, lane, inverse ? nullptr : signs + i, nullptr);
  for (int i = 0; i < FIRST; i++) butterflies<SECOND>(x + i, FIRST, lane, nullptr, &norm);
  for (int i = 0; inverse && i < SIZE; i++) store_floats(x[i] + lane, load_floats(x[i] + lane) * broadcast(signs[i]));
}
static void hadamard(Row* x, const float* signs, int size, int lane, bool inverse) {
  for (int n = MOST_CHANNELS; n >= 32; n /= 2)
    if (size & n) {
      if constexpr (VECTOR_CHANNELS >= 512)
        if (n == 512) hadamard_block<16, 32>(x, signs, lane, inverse);
      if (n == 256) hadamard_block<16, 16>(x, signs, lane, inverse);
      if (n == 128) hadamard_block<16, 8>(x, signs, lane, inverse);
      if (n == 64) hadamard_block<8, 8>(x, signs, lane, inverse);
      if (n == 32) hadamard_block<8, 4>(x, signs, lane, inverse);
      x += n, signs += n;
    }
}
static void givens(Row* x, const float* constants, int size, int lane, bool inverse) {
  for (int i = 0; i < size; i += 2) {
    Floats c = broadcast(constants[i]), s = broadcast(constants[i + 1]);
    Floats a = load_floats(x[i] + lane), b = load_floats(x[i + 1] + lane);
    store_floats(x[i] + lane, inverse ? c * a + s * b : c * a - s * b);
    store_floats(x[i + 1] + lane, inverse ? c * b - s * a : s * a + c * b);
  }
}
static void quaternion(Row* x, const float* constants, int size, int lane, bool inverse) {
  float sign = inverse ? -1.f : 1.f;
  for (int n = 0; n < size; n += 4) {
    Floats a = broadcast(constants[n]), b = broadcast(sign * constants[n + 1]);
    Floats c = broadcast(sign * constants[n + 2]), d = broadcast(sign * constants[n + 3]);
    Floats w = load_floats(x[n] + lane), i = load_floats(x[n + 1] + lane);
    Floats j = load_floats(x[n + 2] + lane), k = load_floats(x[n + 3] + lane);
    store_floats(x[n] + lane, a * w - b * i - c * j - d * k);
    store_floats(x[n + 1] + lane, a * i + b * w + c * k - d * j);
    store_floats(x[n + 2] + lane, a * j - b * k + c * w + d * i);
    store_floats(x[n + 3] + lane, a * k + b * j - c * i + d * w);
  }
}
// The first `count` columns, a multiple of VECTOR_FLOATS.
static void rotate(const Layer& layer, Row* x, int count, bool inverse) {
  for (int lane = 0; lane < count; lane += VECTOR_FLOATS) {
    Row* at = x;
    const float* constants = layer.constants;
    for (int i = 0; i < layer.sections; i++) {
      int size = layer.section[i];
      if (layer.rotation == HADAMARD) hadamard(at, constants, size, lane, inverse);
      if (layer.rotation == GIVENS) givens(at, constants, size, lane, inverse);
      if (layer.rotation == QUATERNION) quaternion(at, constants, size, lane, inverse);
      at += size, constants += size;
    }
  }
}

// --- between vectors and columns ---
// VECTOR_CHANNELS is a flag of the compiler: 256 for K and V, 640 for latents with their RoPE channels.
typedef float Vector[VECTOR_CHANNELS];

// 4 x 4 numbers in each 128-bit lane.
INLINE void transpose(Bytes a, Bytes b, Bytes c, Bytes d, Bytes* out) {
  Bytes low_ac = low_words(a, c), low_bd = low_words(b, d), high_ac = high_words(a, c), high_bd = high_words(b, d);
  out[0] = low_words(low_ac, low_bd), out[1] = high_words(low_ac, low_bd);
  out[2] = low_words(high_ac, high_bd), out[3] = high_words(high_ac, high_bd);
}
// Lane l of a vector of 4 channels is of vector 4 l and on.
static inline void to_columns(const Vector* vectors, Row* x, int channels, int count) {
  const long next = sizeof(Vector);
  for (int lane = 0; lane < count; lane += VECTOR_FLOATS)
    for (int d = 0; d < channels; d += 4) {
      Bytes out[4];
      const uint8_t* at = (const uint8_t*)&vectors[lane][d];
      Bytes a = load_lanes(at, 4 * next), b = load_lanes(at + next, 4 * next);
      Bytes c = load_lanes(at + 2 * next, 4 * next), e = load_lanes(at + 3 * next, 4 * next);
      transpose(a, b, c, e, out);
      for (int i = 0; i < 4; i++) store(x[d + i] + lane, out[i]);
    }
}
// Vector n goes to `vectors` + n * stride.
static inline void to_vectors(const Row* x, float* vectors, long stride, int channels, int count) {
  for (int lane = 0; lane < count; lane += VECTOR_FLOATS)
    for (int d = 0; d < channels; d += 4) {
      Bytes out[4];
      transpose(load(x[d] + lane), load(x[d + 1] + lane), load(x[d + 2] + lane), load(x[d + 3] + lane), out);
      for (int i = 0; i < 4; i++) {
        uint8_t lanes_of_4[VECTOR_BYTES];
        store(lanes_of_4, out[i]);
        for (int l = 0; l < VECTOR_LANES; l++)
          memcpy(vectors + (lane + 4 * l + i) * stride + d, lanes_of_4 + 16 * l, 16);
      }
    }
}
