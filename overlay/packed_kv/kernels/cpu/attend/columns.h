// The state of a job's columns: a column is a query head of the KV head and a query token.
#pragma once
#include "../layout/codes.h"
#include "jobs.h"
#include "requests.h"

constexpr int BLOCK = 4;  // columns that registers hold at a time
constexpr int LARGEST_INT16 = 32767;
INLINE float larger(float a, float b) { return a > b ? a : b; }

// Calls body(Index<columns>, first column) for each block.
template <class Body> INLINE void for_blocks(int columns, Body&& body) {
  int first = 0;
  for (; first + BLOCK <= columns; first += BLOCK) body(Index<BLOCK>{}, first);
  int rest = columns - first;
  if (rest == 1) body(Index<1>{}, first);
  if (rest == 2) body(Index<2>{}, first);
  if (rest == 3) body(Index<3>{}, first);
}

// A tile's struct adds its memory and what it does with a tile of TOKENS tokens:
//
//   cut(from, columns) takes its memory
//   clear()                       makes the sums over V 0
//   put_query(a, column, query)   takes a query, rotated as K is and in the order of its bytes; columns ascend
//   score(micro_blocks, count, known, tokens)
//                                 scores of `count` micro-blocks, of which `tokens` are there, to `scores`. There are
//                                 `known` addresses, up to AHEAD more than `count`: they are read next
//   add(micro_blocks, count)      adds their V to the sums, times exponentials in `scores` and `tile_factors`
//   shrink(column, factor)        multiplies a column's sums
//   collect(to)                   writes the sums, [column][STORED_DIM] in packing order
//   part_tokens(tiles)            tokens of a part, a multiple of TOKENS, of requests with so many tiles
struct Columns {
  int count;
  int16_t* queries;     // block of columns: [group][t][e2][column][e1][e0]
  float* factors;       // scale of a query's integers, times the score's scale
  float* plain;         // [column][STORED_DIM], in packing order, times the score's scale; null: K has no means
  float* ring_queries;  // [column][ALL_CHANNELS], in the order of K's bytes in a ring, scaled alike, RoPE's last
  float* scores;        // [column][TOKENS], in the order of scores; then exponentials
  float* ring_sums;     // [column][STORED_DIM], in the order of V's bytes in a ring; null: there is no ring
  float* tile_factors;  // factor of an exponential of 1 in the sums; 0: the column sees nothing of the tile
  Softmax* softmax;
  Range* ranges;        // in the pages, by query token

  void cut(const Arguments& a, Cutter& from, long columns, int tile) {
    queries = from.take<int16_t>(columns * STORED_DIM);
    factors = from.take<float>(columns);
    plain = a.has_means() ? from.take<float>(columns * STORED_DIM) : nullptr;
    ring_queries = a.ring.data || IS_LATENT ? from.take<float>(columns * ALL_CHANNELS) : nullptr;
    scores = from.take<float>(columns * tile);
    ring_sums = a.ring.data ? from.take<float>(columns * STORED_DIM) : nullptr;
    tile_factors = from.take<float>(columns);
    softmax = from.take<Softmax>(columns);
    ranges = from.take<Range>(columns);
  }
  void put_query(const Arguments& a, int column, const float* query);
  // Columns of the block that begins at `first`.
  int width(int first) const { return count - first < BLOCK ? count - first : BLOCK; }
};

INLINE int place_in_tile(int token) { return token / 16 * 16 + place_of_token(token % 16); }
INLINE void prefetch(const uint8_t* micro_block) {
  for (int at = 0; at < MICRO_BLOCK_BYTES; at += 64) __builtin_prefetch(micro_block + at);
}
