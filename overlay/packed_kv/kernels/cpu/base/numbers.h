// Numbers of tensors' element types.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

enum ElementType { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // also in layer.py

static inline float bfloat16_to_float(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;  // NaN
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#ifdef __F16C__
static inline float float16_to_float(uint16_t x) { return _cvtsh_ss(x); }
static inline uint16_t float_to_float16(float x) { return _cvtss_sh(x, 0); }
#else
static inline float float16_to_float(uint16_t x) {
  __fp16 half;
  memcpy(&half, &x, 2);
  return half;
}
static inline uint16_t float_to_float16(float x) {
  __fp16 half = (__fp16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
#endif

// 8 fp16 numbers.
static inline void read_8_halves(float* to, const void* from) {
#ifdef __F16C__
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)));
#else
  for (int i = 0; i < 8; i++) to[i] = float16_to_float(((const uint16_t*)from)[i]);
#endif
}

static inline int element_bytes(int type) { return type == FLOAT32 ? 4 : 2; }

static void read_elements(float* to, const void* from, int type, int count) {
  const uint16_t* halves = (const uint16_t*)from;
  if (type == FLOAT32) memcpy(to, from, 4 * (size_t)count);
  else if (type == BFLOAT16)
    for (int i = 0; i < count; i++) to[i] = bfloat16_to_float(halves[i]);
  else
    for (int i = 0; i < count; i++) to[i] = float16_to_float(halves[i]);
}

static void write_elements(void* to, const float* from, int type, int count) {
  uint16_t* halves = (uint16_t*)to;
  if (type == FLOAT32) memcpy(to, from, 4 * (size_t)count);
  else if (type == BFLOAT16)
    for (int i = 0; i < count; i++) halves[i] = float_to_bfloat16(from[i]);
  else
    for (int i = 0; i < count; i++) halves[i] = float_to_float16(from[i]);
}
