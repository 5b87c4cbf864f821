// What decode.cpp is called with: `Arguments` of decode.py, field by field, 8 bytes each.
#pragma once
#include <stdint.h>

struct Requests {  // the same for all layers of a step: int32 tables, strides in elements
  int64_t requests;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t *query_start, *seq_lens;
  const int32_t* ring_table;
  int64_t ring_table_stride;
  const int32_t* ring_first;
  int64_t threads;
};

struct Arguments : Requests {
  // Pages: uint8 [blocks, KV heads, block_size, slot_bytes]; strides in bytes.
  const uint8_t* cache;
  int64_t cache_block_stride, cache_head_stride, block_size;
  // Queries and outputs, of an ElementType; strides in elements.
  const void* query;
  int64_t query_type, query_stride, query_head_stride;
  void* output;
  int64_t output_type, output_stride, output_head_stride;
  // The layer.
  int64_t kv_heads, group, head_dim, value_dim;
  double scale, soft_cap;   // soft_cap 0: none
  int64_t sliding_window;   // tokens; 0: none
  const float* sinks;       // [query heads], or null
  // The codecs' tables, fp32 or int32 [heads or 1, STORED_DIM] with strides in elements, 0 for 1; scales null: 1.
  const float* rotation_constants;
  const int32_t *key_channels, *value_channels;
  int64_t key_channels_stride, value_channels_stride;
  const float *key_scale, *value_scale;
  int64_t key_scale_stride, value_scale_stride;
  // Means of K: fp32 [heads or 1, 3, STORED_DIM] of mean, partner, first token's, in the model's order, or null; by
  // blocks of mean_block_tokens positions (0: one block) fp32 [mean_blocks, 2, STORED_DIM].
  const float* means;
  int64_t means_stride;
  const float* spectrum;
  int64_t mean_blocks, mean_block_tokens;
  // The ring, or null: uint8 [blocks, KV heads, ring_block_size, slot bytes]; strides in bytes.
  const uint8_t* ring;
  int64_t ring_block_stride, ring_head_stride, ring_token_stride, ring_block_size, ring_window;
  void* workspace;
};
