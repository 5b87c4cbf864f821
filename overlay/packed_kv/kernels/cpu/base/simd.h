// A thin layer of SIMD: vectors of VECTOR_LANES lanes of 128 bits. Byte operations work within lanes, so that one
// source serves AVX-512 (4 lanes), AVX2 (2) and NEON (1). `Bytes`: integers of any width; `Floats`: fp32.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

#if defined(__AVX512BW__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "AVX-512BW, AVX2 or NEON is needed"
#endif

constexpr int VECTOR_BYTES = 16 * VECTOR_LANES;
constexpr int VECTOR_FLOATS = 4 * VECTOR_LANES;
// Vectors that hold 4 lanes, and so 16 tokens of fp32.
constexpr int PARTS = 4 / VECTOR_LANES;

#if VECTOR_LANES == 4
INLINE float horizontal_max(Floats v) { return _mm512_reduce_max_ps(v); }
INLINE float horizontal_sum(Floats v) { return _mm512_reduce_add_ps(v); }
#else
INLINE float horizontal_max(Floats v) {
  float x[VECTOR_FLOATS], most = -INFINITY;
  store_floats(x, v);
  for (int i = 0; i < VECTOR_FLOATS; i++) most = x[i] > most ? x[i] : most;
  return most;
}

INLINE float horizontal_sum(Floats v) {
  float x[VECTOR_FLOATS], sum = 0;
  store_floats(x, v);
  for (int i = 0; i < VECTOR_FLOATS; i++) sum += x[i];
  return sum;
}
#endif

// e^x for x <= 0, with a relative error of about 1e-7; 0 below -87, and so for -infinity.
INLINE Floats exp_of_negative(Floats x) {
  Floats bounded = max_floats(x, broadcast(-87.f));
  Floats n = to_floats(round_to_int32(bounded * broadcast(1.44269504f)));
  Floats r = multiply_add(n, broadcast(-0.693359375f), bounded);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + broadcast(1.f);
  Floats power = bits_as_floats(add32(floats_as_bits(p), SHIFT_LEFT_32(round_to_int32(n), 23)));
  return zero_below(power, x, broadcast(-87.f));
}

// fp32 of bytes that are unsigned e5m3 and lie in bits 16 to 23 of 32-bit words, times `factor`. Every byte gives a
// finite number, even one that is NaN in fp16: masked values never spoil a sum.
constexpr float SCALE_BIAS = 5.192296858534828e33f;  // 2^112: fp32's exponent bias less fp16's
INLINE Floats decode_scales(Bytes bytes, float factor) {
  return bits_as_floats(SHIFT_LEFT_32(bytes, 4)) * broadcast(SCALE_BIAS * factor);
}
