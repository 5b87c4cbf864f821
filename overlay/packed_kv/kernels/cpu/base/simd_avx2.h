// See simd.h. AVX2 with FMA and F16C; AVX-VNNI where the compiler has it enabled.
#pragma once
#include <immintrin.h>

#define VECTOR_LANES 2
typedef __m256i Bytes;
typedef __m256 Floats;

INLINE Bytes load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void store(void* p, Bytes v) { _mm256_storeu_si256((__m256i*)p, v); }
INLINE Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store_floats(float* p, Floats v) { _mm256_storeu_ps(p, v); }
INLINE Bytes load_lanes(const uint8_t* p, long stride) {
  Bytes low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i*)(p + stride)), 1);
}
INLINE Bytes broadcast_lane(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
}
INLINE Bytes broadcast_64(const void* p) { return _mm256_set1_epi64x(*(const long long*)p); }
INLINE Bytes broadcast_8(int byte) { return _mm256_set1_epi8((char)byte); }
INLINE Bytes zero() { return _mm256_setzero_si256(); }
INLINE Floats broadcast(float x) { return _mm256_set1_ps(x); }
INLINE Bytes bit_and(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
INLINE Bytes bit_or(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
INLINE Bytes select(Bytes mask, Bytes a, Bytes b) {
  return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}
INLINE Bytes test_bits(Bytes v, Bytes bits) { return _mm256_cmpeq_epi8(_mm256_and_si256(v, bits), bits); }
#define SHIFT_RIGHT_32(v, n) _mm256_srli_epi32(v, n)
#define SHIFT_LEFT_32(v, n) _mm256_slli_epi32(v, n)
INLINE Bytes shuffle_bytes(Bytes v, Bytes index) { return _mm256_shuffle_epi8(v, index); }
INLINE Bytes twice_low(Bytes v) { return _mm256_shuffle_epi32(v, _MM_SHUFFLE(1, 0, 1, 0)); }
INLINE Bytes twice_high(Bytes v) { return _mm256_shuffle_epi32(v, _MM_SHUFFLE(3, 2, 3, 2)); }
INLINE Bytes low_bytes(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
INLINE Bytes high_bytes(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
INLINE Bytes low_16(Bytes a, Bytes b) { return _mm256_unpacklo_epi16(a, b); }
INLINE Bytes high_16(Bytes a, Bytes b) { return _mm256_unpackhi_epi16(a, b); }
INLINE Bytes broadcast_word(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Bytes low_words(Bytes a, Bytes b) { return _mm256_unpacklo_epi32(a, b); }
INLINE Bytes high_words(Bytes a, Bytes b) { return _mm256_unpackhi_epi32(a, b); }
INLINE Bytes even_words(Bytes a, Bytes b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88));
}
INLINE Bytes odd_words(Bytes a, Bytes b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0xDD));
}
INLINE Bytes add32(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
INLINE Bytes dot16(Bytes sum, Bytes a, Bytes b) {
#ifdef __AVXVNNI__
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
INLINE Floats to_floats(Bytes int32) { return _mm256_cvtepi32_ps(int32); }
INLINE Bytes round_to_int32(Floats v) { return _mm256_cvtps_epi32(v); }
INLINE Floats bits_as_floats(Bytes v) { return _mm256_castsi256_ps(v); }
INLINE Bytes floats_as_bits(Floats v) { return _mm256_castps_si256(v); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats max_floats(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats zero_below(Floats v, Floats x, Floats bound) {
  return _mm256_and_ps(v, _mm256_cmp_ps(x, bound, _CMP_GE_OQ));
}
INLINE void store_int16(void* p, Bytes int32) {
  __m128i low = _mm256_castsi256_si128(int32), high = _mm256_extracti128_si256(int32, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(low, high));
}
INLINE Floats load_ring_codes(const uint8_t* p) {
  Bytes codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(128)));
}
