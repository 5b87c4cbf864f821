// Up to 16 vectors side by side: a row of 16 floats for each channel, so that rotations, sums and searches go down the
// rows without a shuffle, in the reference's order of operations. Code that must give the reference's bits is compiled
// with -ffp-contract=off, so that each operation is rounded on its own.
#pragma once
#include "../base/simd_store.h"
#include "rotation.h"

constexpr int WIDE = 16;
typedef float Row[WIDE];
typedef float Vector[ALL_CHANNELS];

INLINE Floats select_floats(Bytes mask, Floats a, Floats b) {
  return bits_as_floats(select(mask, floats_as_bits(a), floats_as_bits(b)));
}
// `count` vectors, rounded up to whole vectors of SIMD.
static inline int whole(int count) { return (count + VECTOR_FLOATS - 1) / VECTOR_FLOATS * VECTOR_FLOATS; }

// e5m3 bytes, one a lane, as fp32; without subnormal fp32, which a program may have turned off.
INLINE Floats scale_of(Bytes byte) {
  Floats normal = bits_as_floats(add32(SHIFT_LEFT_32(byte, 20), broadcast_32(112 << 23)));
  return select_floats(where_above(broadcast_32(8), byte), to_floats(byte) * broadcast(0x1p-17f), normal);
}
// fp16 bits of rounded numbers that are not negative; numbers beyond fp16's range become infinite.
INLINE Bytes half_bits(Floats x) {
  Bytes bits = floats_as_bits(min_floats(x, broadcast(65536.f)));
  Bytes odd = bit_and(SHIFT_RIGHT_32(bits, 13), broadcast_32(1));
  Bytes normal = SHIFT_RIGHT_32(add32(add32(bits, broadcast_32(0xfff - (112 << 23))), odd), 13);
  Bytes subnormal = add32(floats_as_bits(x + broadcast(0.5f)), broadcast_32(-(126 << 23)));
  return select(where_less(x, broadcast(0x1p-14f)), subnormal, normal);
}

// --- between vectors and rows ---
// 4 x 4 numbers in each 128-bit lane.
INLINE void transpose(Bytes a, Bytes b, Bytes c, Bytes d, Bytes* out) {
  Bytes low_ac = low_words(a, c), low_bd = low_words(b, d), high_ac = high_words(a, c), high_bd = high_words(b, d);
  out[0] = low_words(low_ac, low_bd), out[1] = high_words(low_ac, low_bd);
  out[2] = low_words(high_ac, high_bd), out[3] = high_words(high_ac, high_bd);
}
// Of 4 channels at a time, 128-bit lane l has those of vectors 4 l and on.
static inline void to_rows(const Vector* vectors, Row* x, int channels, int count) {
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
// Vector n goes to `vectors` + n * stride, `count` of them, rounded up to fours; number d of it is row_of(d).
template <class Order>
static inline void to_vectors(const Row* x, float* vectors, long stride, int channels, int count, Order row_of) {
  for (int lane = 0; lane < count; lane += VECTOR_FLOATS) {
    const int lanes = count - lane < VECTOR_FLOATS ? (count - lane + 3) / 4 : VECTOR_LANES;
    for (int d = 0; d < channels; d += 4) {
      Bytes out[4];
      transpose(load(x[row_of(d)] + lane), load(x[row_of(d + 1)] + lane), load(x[row_of(d + 2)] + lane),
                load(x[row_of(d + 3)] + lane), out);
      for (int i = 0; i < 4; i++) {
        uint8_t lanes_of_4[VECTOR_BYTES];
        store(lanes_of_4, out[i]);
        for (int l = 0; l < lanes; l++) memcpy(vectors + (lane + 4 * l + i) * stride + d, lanes_of_4 + 16 * l, 16);
      }
    }
  }
}
static inline void to_vectors(const Row* x, float* vectors, long stride, int channels, int count) {
  to_vectors(x, vectors, stride, channels, count, [](int d) { return d; });
}
