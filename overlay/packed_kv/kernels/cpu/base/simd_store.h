// Operations for the store and the gather, on 32-bit words:
//
//   smaller_magnitude(a, b)   the smaller of |a| and |b|, with either sign
//   nearer(least, x, level)   the smaller of |x - level| and |least|, with either sign
//   count_above(n, a, b)      n + (a > b)
//   where_less, where_above   all bits of the words where a < b, a > b
//   load_bytes, store_bytes   a byte of memory for each word, unsigned
//   Levels(levels)(code)      levels[code] of a code from 0 to 15; with HAS_FAST_LEVELS higher bits are ignored
#pragma once
#include "simd.h"

constexpr bool HAS_FAST_LEVELS = VECTOR_LANES > 1;

#if VECTOR_LANES == 4
INLINE Floats min_floats(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats absolute(Floats a) { return bits_as_floats(bit_and(floats_as_bits(a), _mm512_set1_epi32(0x7fffffff))); }
INLINE Floats smaller_magnitude(Floats a, Floats b) { return _mm512_range_ps(a, b, 2); }
INLINE Floats nearer(Floats least, Floats x, Floats level) { return smaller_magnitude(x - level, least); }
INLINE Bytes count_above(Bytes n, Floats a, Floats b) {
  return _mm512_mask_add_epi32(n, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), n, _mm512_set1_epi32(1));
}
INLINE Bytes where_less(Floats a, Floats b) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)); }
INLINE Bytes where_above(Bytes a, Bytes b) { return _mm512_movm_epi32(_mm512_cmpgt_epi32_mask(a, b)); }
INLINE Bytes broadcast_32(int x) { return _mm512_set1_epi32(x); }
INLINE Bytes min_32(Bytes a, Bytes b) { return _mm512_min_epi32(a, b); }
INLINE Bytes max_32(Bytes a, Bytes b) { return _mm512_max_epi32(a, b); }
INLINE Bytes shift_left(Bytes v, Bytes n) { return _mm512_sllv_epi32(v, n); }
INLINE Bytes shift_right(Bytes v, Bytes n) { return _mm512_srlv_epi32(v, n); }
INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store_bytes(uint8_t* p, Bytes v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
struct Levels {
  Floats all;
  explicit Levels(const float* levels) { all = load_floats(levels); }
  Floats operator()(Bytes code) const { return _mm512_permutexvar_ps(code, all); }
};
#elif VECTOR_LANES == 2
INLINE Floats min_floats(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats absolute(Floats a) { return bits_as_floats(bit_and(floats_as_bits(a), _mm256_set1_epi32(0x7fffffff))); }
INLINE Floats smaller_magnitude(Floats a, Floats b) { return min_floats(absolute(a), absolute(b)); }
INLINE Floats nearer(Floats least, Floats x, Floats level) { return min_floats(least, absolute(x - level)); }
INLINE Bytes count_above(Bytes n, Floats a, Floats b) {
  return _mm256_sub_epi32(n, floats_as_bits(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
INLINE Bytes where_less(Floats a, Floats b) { return floats_as_bits(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE Bytes where_above(Bytes a, Bytes b) { return _mm256_cmpgt_epi32(a, b); }
INLINE Bytes broadcast_32(int x) { return _mm256_set1_epi32(x); }
INLINE Bytes min_32(Bytes a, Bytes b) { return _mm256_min_epi32(a, b); }
INLINE Bytes max_32(Bytes a, Bytes b) { return _mm256_max_epi32(a, b); }
INLINE Bytes shift_left(Bytes v, Bytes n) { return _mm256_sllv_epi32(v, n); }
INLINE Bytes shift_right(Bytes v, Bytes n) { return _mm256_srlv_epi32(v, n); }
INLINE Bytes load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE void store_bytes(uint8_t* p, Bytes v) {
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(words, words));
}
struct Levels {
  Floats low, high;
  explicit Levels(const float* levels) { low = load_floats(levels), high = load_floats(levels + 8); }
  Floats operator()(Bytes code) const {
    Floats below_8 = _mm256_permutevar8x32_ps(low, code), from_8 = _mm256_permutevar8x32_ps(high, code);
    return _mm256_blendv_ps(below_8, from_8, bits_as_floats(SHIFT_LEFT_32(code, 28)));
  }
};
#else
INLINE Floats min_floats(Floats a, Floats b) { return vminq_f32(a, b); }
INLINE Floats absolute(Floats a) { return vabsq_f32(a); }
INLINE Floats smaller_magnitude(Floats a, Floats b) { return vminq_f32(vabsq_f32(a), vabsq_f32(b)); }
INLINE Floats nearer(Floats least, Floats x, Floats level) { return vminq_f32(least, vabdq_f32(x, level)); }
INLINE Bytes count_above(Bytes n, Floats a, Floats b) { return FROM_U32(vsubq_u32(AS_U32(n), vcgtq_f32(a, b))); }
INLINE Bytes where_less(Floats a, Floats b) { return FROM_U32(vcltq_f32(a, b)); }
INLINE Bytes where_above(Bytes a, Bytes b) { return FROM_U32(vcgtq_s32(AS_S32(a), AS_S32(b))); }
INLINE Bytes broadcast_32(int x) { return FROM_U32(vdupq_n_u32((uint32_t)x)); }
INLINE Bytes min_32(Bytes a, Bytes b) { return vreinterpretq_u8_s32(vminq_s32(AS_S32(a), AS_S32(b))); }
INLINE Bytes max_32(Bytes a, Bytes b) { return vreinterpretq_u8_s32(vmaxq_s32(AS_S32(a), AS_S32(b))); }
INLINE Bytes shift_left(Bytes v, Bytes n) { return FROM_U32(vshlq_u32(AS_U32(v), AS_S32(n))); }
INLINE Bytes shift_right(Bytes v, Bytes n) { return FROM_U32(vshlq_u32(AS_U32(v), vnegq_s32(AS_S32(n)))); }
INLINE Bytes load_bytes(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return FROM_U32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
INLINE void store_bytes(uint8_t* p, Bytes v) {
  uint8x8_t bytes = vmovn_u16(vcombine_u16(vmovn_u32(AS_U32(v)), vdup_n_u16(0)));
  vst1_lane_u32((uint32_t*)p, vreinterpret_u32_u8(bytes), 0);
}
struct Levels {
  const float* levels;
  explicit Levels(const float* given) { levels = given; }
  Floats operator()(Bytes code) const {
    uint32_t code_of[4];
    float picked[4];
    store(code_of, code);
    for (int i = 0; i < 4; i++) picked[i] = levels[code_of[i]];
    return load_floats(picked);
  }
};
#endif
