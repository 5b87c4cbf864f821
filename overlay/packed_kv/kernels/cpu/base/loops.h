// Loops over a constant number of indices.
#pragma once
#include "simd.h"

template <int I> struct Index {
  static constexpr int value = I;
  constexpr operator int() const { return I; }
};
template <int I, int N, class Body> INLINE void unrolled_from(Body&& body) {
  if constexpr (I < N) {
    body(Index<I>{});
    unrolled_from<I + 1, N>(body);
  }
}
// Calls body(Index<0>) .. body(Index<N - 1>).
template <int N, class Body> INLINE void unrolled(Body&& body) { unrolled_from<0, N>(body); }
