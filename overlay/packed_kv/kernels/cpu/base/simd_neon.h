// See simd.h. NEON of 64-bit ARM.
#pragma once
#include <arm_neon.h>

#define VECTOR_LANES 1
typedef uint8x16_t Bytes;
typedef float32x4_t Floats;
#define AS_U32(v) vreinterpretq_u32_u8(v)
#define AS_S16(v) vreinterpretq_s16_u8(v)
#define AS_S32(v) vreinterpretq_s32_u8(v)
#define AS_U64(v) vreinterpretq_u64_u8(v)
#define FROM_U32(v) vreinterpretq_u8_u32(v)

INLINE Bytes load(const void* p) { return vld1q_u8((const uint8_t*)p); }
INLINE void store(void* p, Bytes v) { vst1q_u8((uint8_t*)p, v); }
INLINE Floats load_floats(const float* p) { return vld1q_f32(p); }
INLINE void store_floats(float* p, Floats v) { vst1q_f32(p, v); }
INLINE Bytes load_lanes(const uint8_t* p, long) { return vld1q_u8(p); }
INLINE Bytes broadcast_lane(const void* p) { return vld1q_u8((const uint8_t*)p); }
INLINE Bytes broadcast_64(const void* p) { return vreinterpretq_u8_u64(vld1q_dup_u64((const uint64_t*)p)); }
INLINE Bytes broadcast_8(int byte) { return vdupq_n_u8((uint8_t)byte); }
INLINE Bytes zero() { return vdupq_n_u8(0); }
INLINE Floats broadcast(float x) { return vdupq_n_f32(x); }
INLINE Bytes bit_and(Bytes a, Bytes b) { return vandq_u8(a, b); }
INLINE Bytes bit_or(Bytes a, Bytes b) { return vorrq_u8(a, b); }
INLINE Bytes select(Bytes mask, Bytes a, Bytes b) { return vbslq_u8(mask, a, b); }
INLINE Bytes test_bits(Bytes v, Bytes bits) { return vtstq_u8(v, bits); }
#define SHIFT_RIGHT_32(v, n) FROM_U32(vshrq_n_u32(AS_U32(v), n))
#define SHIFT_LEFT_32(v, n) FROM_U32(vshlq_n_u32(AS_U32(v), n))
INLINE Bytes shuffle_bytes(Bytes v, Bytes index) { return vqtbl1q_u8(v, index); }  // index 16 and on: 0
INLINE Bytes twice_low(Bytes v) { return vreinterpretq_u8_u64(vdupq_laneq_u64(AS_U64(v), 0)); }
INLINE Bytes twice_high(Bytes v) { return vreinterpretq_u8_u64(vdupq_laneq_u64(AS_U64(v), 1)); }
INLINE Bytes low_bytes(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
INLINE Bytes high_bytes(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
INLINE Bytes low_16(Bytes a, Bytes b) { return vreinterpretq_u8_s16(vzip1q_s16(AS_S16(a), AS_S16(b))); }
INLINE Bytes high_16(Bytes a, Bytes b) { return vreinterpretq_u8_s16(vzip2q_s16(AS_S16(a), AS_S16(b))); }
INLINE Bytes broadcast_word(int32_t x) { return FROM_U32(vdupq_n_u32((uint32_t)x)); }
INLINE Bytes low_words(Bytes a, Bytes b) { return FROM_U32(vzip1q_u32(AS_U32(a), AS_U32(b))); }
INLINE Bytes high_words(Bytes a, Bytes b) { return FROM_U32(vzip2q_u32(AS_U32(a), AS_U32(b))); }
INLINE Bytes even_words(Bytes a, Bytes b) { return FROM_U32(vuzp1q_u32(AS_U32(a), AS_U32(b))); }
INLINE Bytes odd_words(Bytes a, Bytes b) { return FROM_U32(vuzp2q_u32(AS_U32(a), AS_U32(b))); }
INLINE Bytes add32(Bytes a, Bytes b) { return FROM_U32(vaddq_u32(AS_U32(a), AS_U32(b))); }
INLINE Bytes dot16(Bytes sum, Bytes a, Bytes b) {
  int32x4_t low = vmull_s16(vget_low_s16(AS_S16(a)), vget_low_s16(AS_S16(b)));
  int32x4_t high = vmull_high_s16(AS_S16(a), AS_S16(b));
  return vreinterpretq_u8_s32(vaddq_s32(AS_S32(sum), vpaddq_s32(low, high)));
}
INLINE Floats to_floats(Bytes int32) { return vcvtq_f32_s32(AS_S32(int32)); }
INLINE Bytes round_to_int32(Floats v) { return vreinterpretq_u8_s32(vcvtnq_s32_f32(v)); }
INLINE Floats bits_as_floats(Bytes v) { return vreinterpretq_f32_u8(v); }
INLINE Bytes floats_as_bits(Floats v) { return vreinterpretq_u8_f32(v); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
INLINE Floats max_floats(Floats a, Floats b) { return vmaxq_f32(a, b); }
INLINE Floats zero_below(Floats v, Floats x, Floats bound) {
  return bits_as_floats(bit_and(floats_as_bits(v), FROM_U32(vcgeq_f32(x, bound))));
}
INLINE void store_int16(void* p, Bytes int32) { vst1_s16((int16_t*)p, vqmovn_s32(AS_S32(int32))); }
INLINE Floats load_ring_codes(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  uint16x4_t codes = vget_low_u16(vmovl_u8(vcreate_u8(four)));
  return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(vmovl_u16(codes)), vdupq_n_s32(128)));
}
