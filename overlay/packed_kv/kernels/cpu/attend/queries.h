// Queries of a KV head as a job reads them: in the order and rotation of K's bytes, as 16-bit integers.
#pragma once
#include "../base/numbers.h"
#include "../layout/vectors16.h"
#include "columns.h"

// The channel, in packing order, of a query's element i in the order of K's bytes.
INLINE int channel_of(int i) { return i / GROUP_SIZE * GROUP_SIZE + ring_channel(0, i % GROUP_SIZE); }

// One query, rotated as K is and in the order of its bytes.
inline void Columns::put_query(const Arguments& a, int column, const float* query) {
  alignas(64) int16_t integers[STORED_DIM];
  Floats largest = broadcast(0), scale = broadcast((float)a.scale);
  for (int i = 0; i < STORED_DIM; i += VECTOR_FLOATS) {
    Floats x = load_floats(query + i);
    largest = max_floats(largest, max_floats(x, broadcast(0) - x));
  }
  float top = horizontal_max(largest);
  factors[column] = top / LARGEST_INT16 * (float)a.scale;
  Floats inverse = broadcast(top > 1e-30f ? LARGEST_INT16 / top : 0);
  for (int i = 0; i < STORED_DIM; i += VECTOR_FLOATS)
    store_int16(integers + i, round_to_int32(load_floats(query + i) * inverse));
  int first = column / BLOCK * BLOCK, columns = width(first);
  int16_t* block = queries + (long)first * STORED_DIM + 4 * (column - first);
  for (int i = 0; i < STORED_DIM; i += 4) memcpy(block + i * columns, integers + i, 8);
  for (int i = 0; ring_queries && i < ALL_CHANNELS; i += VECTOR_FLOATS)
    store_floats(ring_queries + (long)column * ALL_CHANNELS + i, load_floats(query + i) * scale);
}

// Reads the queries of a KV head: column = query token * group + head.
template <class Tile> static void read_queries(const Arguments& a, const Request& request, int head, Tile& to) {
  alignas(64) Vector vectors[WIDE], given;
  alignas(64) Row x[STORED_DIM];
  const int bytes = element_bytes(a.query_type), dim = a.layer->dim[0];
  const int32_t* order = a.layer->order_of(0, head);
  const float* key_scale = a.layer->scale_of(0, head);
  for (int first = 0; first < to.count; first += WIDE) {
    int width = (int)least(WIDE, to.count - first);
    if (!IS_LATENT) memset(x, 0, sizeof x);
    for (int c = 0; c < width; c++) {
      long column = first + c, token = request.query + column / a.group, query_head = head * a.group + column % a.group;
      const char* from = (const char*)a.query + bytes * (token * a.query_stride + query_head * a.query_head_stride);
      if constexpr (IS_LATENT) {
        long rope = token * a.rope_stride + query_head * a.rope_head_stride;
        read_elements(given, from, a.query_type, STORED_DIM);
        read_elements(given + STORED_DIM, (const char*)a.rope_query + bytes * rope, a.query_type, ROPE_DIM);
        for (int i = 0; i < ALL_CHANNELS; i++) vectors[c][i] = given[channel_of(i)];
        continue;
      }
      read_elements(given, from, a.query_type, dim);
      for (int i = dim; i < STORED_DIM; i++) given[i] = 0;
      if (!order)
        for (int i = 0; i < STORED_DIM; i++) x[i][c] = given[i];
      else
        for (int i = 0; i < STORED_DIM; i++) x[i][c] = given[order[i]];
      for (int i = 0; to.plain && i < STORED_DIM; i++) to.plain[column * STORED_DIM + i] = x[i][c] * (float)a.scale;
      for (int i = 0; key_scale && i < STORED_DIM; i++) x[i][c] /= key_scale[i];
    }
    if constexpr (!IS_LATENT) {
      rotate(x, 0, a.layer->rotation, whole(width), false);
      to_vectors(x, vectors[0], ALL_CHANNELS, STORED_DIM, width, channel_of);
    }
    for (int c = 0; c < width; c++) to.put_query(a, first + c, vectors[c]);
  }
}

// Adds `bias` to the scores of tokens `from` to `end` of a tile. `place`: index of a score, in its token's micro-block.
template <class Place> static void add_bias(float* scores, float bias, int from, int end, Place place) {
  int i = from;
  for (; i < end && i % MICRO_BLOCK; i++) scores[place(i)] += bias;
  for (; i + MICRO_BLOCK <= end; i += MICRO_BLOCK)
    for (int k = i; k < i + MICRO_BLOCK; k += VECTOR_FLOATS)
      store_floats(scores + k, load_floats(scores + k) + broadcast(bias));
  for (; i < end; i++) scores[place(i)] += bias;
}

// Adds to the scores of `count` tokens from `first` on the query's products with K's means. `place`: index of a score.
template <class Place>
static void add_means(const Arguments& a, const Columns& columns, int head, long first, int count, int tile,
                      Place place) {
  alignas(64) float mean[STORED_DIM];
  for (int i = 0, end; i < count; i = end) {
    end = (int)least(count, a.layer->end_of_mean(0, first + i) - first);
    a.layer->read_mean(0, head, a.layer->mean_number(0, first + i), mean);
    for (int column = 0; column < columns.count; column++) {
      const float* plain = columns.plain + (long)column * STORED_DIM;
      Floats sum = broadcast(0);
      for (int d = 0; d < STORED_DIM; d += VECTOR_FLOATS)
        sum = multiply_add(load_floats(plain + d), load_floats(mean + d), sum);
      add_bias(columns.scores + (long)column * tile, horizontal_sum(sum), i, end, place);
    }
  }
}
