// A tile of latents for all columns: see latent.cpp.
#pragma once
#include "numbers.h"
#include "softmax.h"

struct LatentArguments {  // `Arguments` of latent_decode.py, field by field, 8 bytes each
  // Pages: uint8 [blocks, block_size, slot_bytes]; strides in bytes.
  const uint8_t* cache;
  int64_t cache_block_stride, block_size;
  int64_t requests;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t *query_start, *seq_lens;
  // Queries [tokens, heads, RANK] and [tokens, heads, ROPE_DIM], of an ElementType; strides in elements.
  const void *query, *rope_query;
  int64_t query_type, query_stride, query_head_stride, rope_stride, rope_head_stride;
  void* output;  // [tokens, heads, RANK], heads contiguous
  int64_t output_type, output_stride;
  float* lse;  // [tokens, heads], or null
  int64_t heads;
  double scale;
  const float* constant;  // [RANK], added to outputs, or null
  // The ring, or null: uint8 [blocks, 1, ring_block_size, slot bytes]; strides in bytes, but the table's.
  const uint8_t* ring;
  int64_t ring_block_stride, ring_token_stride, ring_block_size;
  const int32_t* ring_table;
  int64_t ring_table_stride;
  const int32_t* ring_first;
  int64_t ring_window;
  int64_t threads;
  void* workspace;
};

constexpr int RANK = STORED_DIM, RING_DIM = RANK + ROPE_DIM;
constexpr int TILE = 128, TILE_BLOCKS = TILE / MICRO_BLOCK;  // levels of 512 channels take 128 KB, and stay in L2
constexpr int RING_TILE = 64;
constexpr int PART_TOKENS = 256, MOST_PARTS = 16;
INLINE int place_in_tile(int token) { return token / 16 * 16 + place_of_token(token % 16); }

// RoPE channels of a micro-block's tokens as fp32, [channel in the order of KEY_BYTES][place of the token].
static void read_rope(const uint8_t* micro_block, float (*to)[MICRO_BLOCK]) {
  alignas(64) float rows[MICRO_BLOCK][ROPE_DIM];
  for (int n = 0; n < MICRO_BLOCK; n++) {
    float* row = rows[place_of_token(n)];
    for (int i = 0; i < ROPE_DIM / 8; i++, row += 8) {
      const uint8_t* piece = micro_block + ROPE_AT[n * (ROPE_DIM / 8) + i];
      if (ROPE_BITS == 16) {
        read_8_halves(row, piece);
        continue;
      }
      alignas(16) float scale[VECTOR_FLOATS];
      int32_t bits = (int32_t)micro_block[ROPE_SCALES_AT[n * (ROPE_DIM / 32) + i / 4]] << 16;
      store_floats(scale, decode_scales(broadcast_word(bits), 1.f / 128));
      for (int c = 0; c < 8; c++) row[c] = (float)(piece[c] - 128) * scale[0];
    }
  }
  const long next = sizeof rows[0];
  for (int lane = 0; lane < MICRO_BLOCK; lane += VECTOR_FLOATS)
    for (int d = 0; d < ROPE_DIM; d += 4) {
      const uint8_t* at = (const uint8_t*)&rows[lane][d];
      Bytes a = load_lanes(at, 4 * next), b = load_lanes(at + next, 4 * next);
      Bytes c = load_lanes(at + 2 * next, 4 * next), e = load_lanes(at + 3 * next, 4 * next);
      Bytes low_ac = low_words(a, c), low_be = low_words(b, e), high_ac = high_words(a, c), high_be = high_words(b, e);
      store(to[d] + lane, low_words(low_ac, low_be)), store(to[d + 1] + lane, high_words(low_ac, low_be));
      store(to[d + 2] + lane, low_words(high_ac, high_be)), store(to[d + 3] + lane, high_words(high_ac, high_be));
    }
}

#ifdef HAS_AMX
#include "latent_amx.h"
#else
#include "latent_vectors.h"
#endif

// --- the ring, in fp32: its tokens are few ---
static void read_ring_slot(const uint8_t* slot, float* row) {
  for (int g = 0; g < RING_DIM / GROUP_SIZE; g++) {
    Floats scale = decode_scales(broadcast_word((int32_t)slot[RING_SCALES_AT[0] + g] << 16), 1.f / 128);
    for (int i = g * GROUP_SIZE; i < (g + 1) * GROUP_SIZE; i += VECTOR_FLOATS)
      store_floats(row + i, load_ring_codes(slot + RING_CODES_AT[0] + i) * scale);
  }
}
static float score_ring_row(const Columns& columns, int column, const float* row) {
  const float* query = columns.ring_queries + (long)column * RING_DIM;
  Floats sum = broadcast(0);
  for (int i = 0; i < RING_DIM; i += VECTOR_FLOATS)
    sum = multiply_add(load_floats(query + i), load_floats(row + i), sum);
  return horizontal_sum(sum);
}
static void add_ring_rows(const Columns& columns, int column, int count, float factor) {
  const float* weights = columns.scores + (long)column * TILE;
  for (int i = 0; i < RANK; i += VECTOR_FLOATS) {
    Floats sum = broadcast(0);
    for (int n = 0; n < count; n++)
      sum = multiply_add(broadcast(weights[n]), load_floats(columns.ring_rows + (long)n * RING_DIM + i), sum);
    float* to = columns.ring_sums + (long)column * RANK + i;
    store_floats(to, multiply_add(sum, broadcast(factor), load_floats(to)));
  }
}

// Sums over V, [column][RANK] in packing order. Sums of tokens in the ring are divided by V's gain, which the weights
// behind have for the codes.
static void collect_sums(const Columns& columns, float* to) {
  collect_pages(columns, to);
  for (long column = 0; columns.ring_sums && column < columns.count; column++)
    for (int i = 0; i < RANK; i++)
      to[column * RANK + i / 32 * 32 + KEY_BYTES[i % 32]] +=
          columns.ring_sums[column * RANK + i] / CODES[GROUP_TABLE[i / 32].code].gain;
}
