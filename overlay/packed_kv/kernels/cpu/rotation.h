// The rotations of codecs/rotations.py, in place, in fp32. `constants`: the codec's rotation_constants, by channel. T:
// float, or Four: of four vectors at once, [channel][vector].
#pragma once
#include "constants.h"
#include "numbers.h"

typedef float Four __attribute__((vector_size(16)));

enum { HADAMARD = 0, GIVENS = 1, QUATERNION = 2 };  // ROTATION

template <class T> static inline void butterflies(T* x, int size) {
  for (int stride = 1; stride < size; stride *= 2)
    for (int i = 0; i < size; i += 2 * stride)
      for (int j = i; j < i + stride; j++) {
        T low = x[j], high = x[j + stride];
        x[j] = low + high, x[j + stride] = low - high;
      }
  float factor = (float)(1 / sqrt((double)size));
  for (int i = 0; i < size; i++) x[i] *= factor;
}

// Blocks of powers of 2, the largest first.
template <class T> static inline void hadamard(T* x, int size) {
  for (int bit = 30; bit >= 0; bit--)
    if (size >> bit & 1) butterflies(x, 1 << bit), x += 1 << bit;
}

template <class T> static inline void givens(T* x, const float* constants, int size, float direction) {
  for (int i = 0; i < size; i += 2) {
    float cosine = constants[i], sine = direction * constants[i + 1];
    T x0 = x[i], x1 = x[i + 1];
    x[i] = cosine * x0 - sine * x1, x[i + 1] = sine * x0 + cosine * x1;
  }
}

template <class T> static inline void quaternion(T* x, const float* constants, int size, float direction) {
  for (int n = 0; n < size; n += 4) {
    const float* q = constants + n;
    float a = q[0], b = direction * q[1], c = direction * q[2], d = direction * q[3];
    T w = x[n], i = x[n + 1], j = x[n + 2], k = x[n + 3];
    x[n] = a * w - b * i - c * j - d * k;
    x[n + 1] = a * i + b * w + c * k - d * j;
    x[n + 2] = a * j - b * k + c * w + d * i;
    x[n + 3] = a * k + b * j - c * i + d * w;
  }
}

// Rotates a vector of STORED_DIM channels in packing order.
template <class T> static inline void rotate(T* x, const float* constants) {
  for (int section = 0; section < SECTIONS; section++) {
    int size = SECTION_DIMS[section];
    if (ROTATION == HADAMARD) {
      for (int i = 0; i < size; i++) x[i] *= constants[i];
      hadamard(x, size);
    } else if (ROTATION == GIVENS) {
      givens(x, constants, size, 1);
    } else {
      quaternion(x, constants, size, 1);
    }
    x += size, constants += size;
  }
}

// Undoes `rotate`.
template <class T> static inline void unrotate(T* x, const float* constants) {
  for (int section = 0; section < SECTIONS; section++) {
    int size = SECTION_DIMS[section];
    if (ROTATION == HADAMARD) {
      hadamard(x, size);
      for (int i = 0; i < size; i++) x[i] *= constants[i];
    } else if (ROTATION == GIVENS) {
      givens(x, constants, size, -1);
    } else {
      quaternion(x, constants, size, -1);
    }
    x += size, constants += size;
  }
}
