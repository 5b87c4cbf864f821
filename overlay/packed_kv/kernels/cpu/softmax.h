// The online softmax of the columns of a tile, which are query heads times query tokens.
#pragma once
#include "pages.h"

constexpr int BLOCK = 4;  // columns that are worked on in registers
// A new maximum is taken over only where it exceeds the old one by this much: sums in fp32 have room for e^20, and
// products need not be scaled again.
constexpr float SLACK = 20;
constexpr int LARGEST_INT16 = 32767;
INLINE float larger(float a, float b) { return a > b ? a : b; }

struct Softmax {
  float maximum, total;  // of scores, and of their exponentials
};

// Calls body(Index<columns>, first column) for each block.
template <class Body> INLINE void for_blocks(int columns, Body&& body) {
  int first = 0;
  for (; first + BLOCK <= columns; first += BLOCK) body(Index<BLOCK>{}, first);
  int rest = columns - first;
  if (rest == 1) body(Index<1>{}, first);
  if (rest == 2) body(Index<2>{}, first);
  if (rest == 3) body(Index<3>{}, first);
}

// Makes exponentials of a column's `count` scores, a multiple of 16, and brings its total and sums to the same maximum.
// Returns what an exponential of 1 is in the sums; 0: no score is finite. `Tile` has `scores`, TOKENS a column,
// `softmax` by column, and a function shrink_sums(columns, column, factor).
template <class Tile> static float add_to_softmax(const Tile& columns, int column, int count) {
  float* scores = columns.scores + (long)column * Tile::TOKENS;
  Floats most = broadcast(-INFINITY), total = broadcast(0);
  for (int i = 0; i < count; i += VECTOR_FLOATS) most = max_floats(most, load_floats(scores + i));
  float top = horizontal_max(most), old = columns.softmax[column].maximum;
  if (top == -INFINITY) return 0;
  for (int i = 0; i < count; i += VECTOR_FLOATS) {
    Floats weight = exp_of_negative(load_floats(scores + i) - broadcast(top));
    store_floats(scores + i, weight);
    total = total + weight;
  }
  float kept = top > old + SLACK ? top : old;
  if (kept != old && old != -INFINITY) {
    float shrink = expf(old - kept);
    columns.softmax[column].total *= shrink;
    shrink_sums(columns, column, shrink);
  }
  float factor = expf(top - kept);
  columns.softmax[column].maximum = kept;
  columns.softmax[column].total += factor * horizontal_sum(total);
  return factor;
}
