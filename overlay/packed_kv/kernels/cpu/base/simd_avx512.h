// See simd.h. AVX-512 with BW, VL and DQ; VNNI and VBMI where the compiler has them enabled.
#pragma once
#include <immintrin.h>

#define VECTOR_LANES 4
typedef __m512i Bytes;
typedef __m512 Floats;
#ifdef __AVX512VBMI__
#define HAS_VBMI 1
#ifdef __AMX_BF16__
#define HAS_AMX 1
#endif
#endif

INLINE Bytes load(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
// Lane i from p + i * stride.
INLINE Bytes load_lanes(const uint8_t* p, long stride) {
  Bytes v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
  v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i*)(p + stride)), 1);
  v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i*)(p + 2 * stride)), 2);
  return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i*)(p + 3 * stride)), 3);
}
INLINE Bytes broadcast_lane(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
INLINE Bytes broadcast_64(const void* p) { return _mm512_set1_epi64(*(const long long*)p); }
INLINE Bytes broadcast_8(int byte) { return _mm512_set1_epi8((char)byte); }
INLINE Bytes zero() { return _mm512_setzero_si512(); }
INLINE Floats broadcast(float x) { return _mm512_set1_ps(x); }
INLINE Bytes bit_and(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
INLINE Bytes bit_or(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
// By bit: mask ? a : b.
INLINE Bytes select(Bytes mask, Bytes a, Bytes b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xCA); }
// 0xFF in bytes where v has a bit of `bits`, else 0.
INLINE Bytes test_bits(Bytes v, Bytes bits) { return _mm512_movm_epi8(_mm512_test_epi8_mask(v, bits)); }
#define SHIFT_RIGHT_32(v, n) _mm512_srli_epi32(v, n)
#define SHIFT_LEFT_32(v, n) _mm512_slli_epi32(v, n)
INLINE Bytes shuffle_bytes(Bytes v, Bytes index) { return _mm512_shuffle_epi8(v, index); }  // index 128 and on: 0
// 32-bit words 0 and 1 of each lane twice; words 2 and 3.
INLINE Bytes twice_low(Bytes v) { return _mm512_shuffle_epi32(v, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 1, 0)); }
INLINE Bytes twice_high(Bytes v) { return _mm512_shuffle_epi32(v, (_MM_PERM_ENUM)_MM_SHUFFLE(3, 2, 3, 2)); }
// Bytes, or words, of a and b in turn, from the lower or upper half of each lane.
INLINE Bytes low_bytes(Bytes a, Bytes b) { return _mm512_unpacklo_epi8(a, b); }
INLINE Bytes high_bytes(Bytes a, Bytes b) { return _mm512_unpackhi_epi8(a, b); }
INLINE Bytes low_16(Bytes a, Bytes b) { return _mm512_unpacklo_epi16(a, b); }
INLINE Bytes high_16(Bytes a, Bytes b) { return _mm512_unpackhi_epi16(a, b); }
INLINE Bytes broadcast_word(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Bytes low_words(Bytes a, Bytes b) { return _mm512_unpacklo_epi32(a, b); }
INLINE Bytes high_words(Bytes a, Bytes b) { return _mm512_unpackhi_epi32(a, b); }
// Words 0 and 2, or 1 and 3, of each lane of a, then of b.
INLINE Bytes even_words(Bytes a, Bytes b) {
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0x88));
}
INLINE Bytes odd_words(Bytes a, Bytes b) {
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0xDD));
}
INLINE Bytes add32(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
// sum + products of 16-bit integers, added in pairs to 32 bits.
INLINE Bytes dot16(Bytes sum, Bytes a, Bytes b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
INLINE Floats to_floats(Bytes int32) { return _mm512_cvtepi32_ps(int32); }
INLINE Bytes round_to_int32(Floats v) { return _mm512_cvtps_epi32(v); }
INLINE Floats bits_as_floats(Bytes v) { return _mm512_castsi512_ps(v); }
INLINE Bytes floats_as_bits(Floats v) { return _mm512_castps_si512(v); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats max_floats(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats zero_below(Floats v, Floats x, Floats bound) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ), v);
}
// 32-bit integers as 16-bit ones, in order: half a vector.
INLINE void store_int16(void* p, Bytes int32) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(int32)); }
// Bytes less 128, as fp32.
INLINE Floats load_ring_codes(const uint8_t* p) {
  Bytes codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(128)));
}
