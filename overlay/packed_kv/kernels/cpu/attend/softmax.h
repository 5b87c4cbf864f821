// Scores to exponentials: soft cap, masks and the online softmax.
#pragma once
#include "columns.h"

// A new maximum replaces the old one only where it exceeds it by this much: fp32 sums have room for e^20, and earlier
// products need no rescaling.
constexpr float SLACK = 20;

template <class Tile> static void cap_scores(const Tile& tile, int count, float cap) {
  for (int column = 0; column < tile.count; column++) {
    float* scores = tile.scores + (long)column * Tile::TOKENS;
    for (int i = 0; i < count; i += VECTOR_FLOATS) {
      Floats x = load_floats(scores + i) * broadcast(1 / cap);
      Floats size = max_floats(x, broadcast(0) - x), e = exp_of_negative(size * broadcast(-2));
      Floats tanh = (broadcast(1) - e) / (broadcast(1) + e);
      // tanh has the sign of x: x / |x| is 1 or -1 but for 0, where tanh is 0, too.
      Floats sign = x / max_floats(size, broadcast(1e-30f));
      store_floats(scores + i, tanh * sign * broadcast(cap));
    }
  }
}

// Masks scores of tokens outside `range`; `first`: the first of the `count` scored tokens. `place`: index of a score.
template <class Place> static void mask(float* scores, Range range, long first, int count, Place place) {
  for (int i = 0; i < least(count, range.first - first); i++) scores[place(i)] = -INFINITY;
  for (int i = (int)most(0, range.end - first); i < count; i++) scores[place(i)] = -INFINITY;
}

// Turns a column's `count` scores (a multiple of 16) into exponentials, and brings its total and sums to the same
// maximum. Returns the factor of an exponential of 1 in the sums; 0: no score is finite, and exponentials are 0.
template <class Tile> static float add_to_softmax(const Tile& tile, int column, int count) {
  float* scores = tile.scores + (long)column * Tile::TOKENS;
  Softmax& softmax = tile.softmax[column];
  Floats most = broadcast(-INFINITY), total = broadcast(0);
  for (int i = 0; i < count; i += VECTOR_FLOATS) most = max_floats(most, load_floats(scores + i));
  float top = horizontal_max(most), old = softmax.maximum;
  if (top == -INFINITY) {
    memset(scores, 0, sizeof(float) * count);
    return 0;
  }
  for (int i = 0; i < count; i += VECTOR_FLOATS) {
    Floats weight = exp_of_negative(load_floats(scores + i) - broadcast(top));
    store_floats(scores + i, weight);
    total = total + weight;
  }
  float kept = top > old + SLACK ? top : old;
  if (kept != old && old != -INFINITY) {
    float shrink = expf(old - kept), *ring_sums = tile.ring_sums + (long)column * STORED_DIM;
    softmax.total *= shrink;
    tile.shrink(column, shrink);
    for (int i = 0; tile.ring_sums && i < STORED_DIM; i++) ring_sums[i] *= shrink;
  }
  float factor = expf(top - kept);
  softmax.maximum = kept;
  softmax.total += factor * horizontal_sum(total);
  return factor;
}
