// The rotations of codecs/rotations.py, of rows of vectors16.h. constants.h names one as ROTATION; a rotation without a
// struct here does not compile.
#pragma once
#include "places.h"
#include "../base/loops.h"

// x[i]: a channel of several vectors. `constants`: one for each channel. SIZE: channels that are rotated together.
namespace rotations {

struct hadamard {
  // Unrolled, as compilers keep an array in registers only where they know its indices.
  template <int R, int STRIDE> static INLINE_MEMBER void add_and_subtract(Floats* v) {
    if constexpr (STRIDE < R) {
      unrolled<R / 2>([&](auto pair) {
        constexpr int i = pair.value / STRIDE * 2 * STRIDE + pair.value % STRIDE;
        Floats low = v[i], high = v[i + STRIDE];
        v[i] = low + high, v[i + STRIDE] = low - high;
      });
      add_and_subtract<R, 2 * STRIDE>(v);
    }
  }
  // R rows, `stride` apart: butterflies over 1, 2, ... R / 2 times `stride`. Numbers are multiplied by `before`, from
  // the first row on, and by `after`; null: they are not.
  template <int R, class Row>
  static INLINE_MEMBER void butterflies(Row* x, int stride, int lane, const float* before, const float* after) {
    Floats v[R];
    for (int i = 0; i < R; i++) v[i] = load_floats(x[i * stride] + lane);
    if (before)
      for (int i = 0; i < R; i++) v[i] = v[i] * broadcast(before[i * stride]);
    add_and_subtract<R, 1>(v);
    if (after)
      for (int i = 0; i < R; i++) v[i] = v[i] * broadcast(after[0]);
    for (int i = 0; i < R; i++) store_floats(x[i * stride] + lane, v[i]);
  }
  // Blocks of powers of 2, the largest first; each in two passes, over strides below FIRST and strides from FIRST on.
  template <int SIZE, class Row> static void rotate(Row* x, const float* signs, int lane, bool inverse) {
    constexpr int BLOCK = 1 << (31 - __builtin_clz(SIZE)), FIRST = BLOCK < 128 ? 8 : 16, SECOND = BLOCK / FIRST;
    const float norm = (float)(1 / sqrt((double)BLOCK));
    for (int i = 0; i < BLOCK; i += FIRST) butterflies<FIRST>(x + i, 1, lane, inverse ? nullptr : signs + i, nullptr);
    for (int i = 0; i < FIRST; i++) butterflies<SECOND>(x + i, FIRST, lane, nullptr, &norm);
    for (int i = 0; inverse && i < BLOCK; i++)
      store_floats(x[i] + lane, load_floats(x[i] + lane) * broadcast(signs[i]));
    if constexpr (SIZE > BLOCK) rotate<SIZE - BLOCK>(x + BLOCK, signs + BLOCK, lane, inverse);
  }
};

struct givens {
  template <int SIZE, class Row> static void rotate(Row* x, const float* constants, int lane, bool inverse) {
    for (int i = 0; i < SIZE; i += 2) {
      Floats c = broadcast(constants[i]), s = broadcast(constants[i + 1]);
      Floats a = load_floats(x[i] + lane), b = load_floats(x[i + 1] + lane);
      store_floats(x[i] + lane, inverse ? c * a + s * b : c * a - s * b);
      store_floats(x[i + 1] + lane, inverse ? c * b - s * a : s * a + c * b);
    }
  }
};

struct quaternion {
  template <int SIZE, class Row> static void rotate(Row* x, const float* constants, int lane, bool inverse) {
    float sign = inverse ? -1.f : 1.f;
    for (int n = 0; n < SIZE; n += 4) {
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
};

}  // namespace rotations

template <int ROLE, class Row> static void rotate(Row* x, const float* constants, int count, bool inverse) {
  for (int lane = 0; lane < count; lane += VECTOR_FLOATS) {
    int first = 0;
    unrolled<SECTIONS>([&](auto section) {
      constexpr int SIZE = SECTION_DIMS[ROLE][section.value];
      if constexpr (SIZE > 0) rotations::ROTATION::rotate<SIZE>(x + first, constants + first, lane, inverse);
      first += SIZE;
    });
  }
}
// Rotates the first `count` vectors of STORED_DIM rows, a multiple of VECTOR_FLOATS; or back. All vectors have one
// role, unless both roles are alike.
template <class Row> static void rotate(Row* x, int role, const float* constants, int count, bool inverse) {
  if (ALIKE || role == 0) rotate<0>(x, constants, count, inverse);
  else rotate<ALIKE ? 0 : 1>(x, constants, count, inverse);
}
