// Arguments of a decode call: `Arguments` of decode.py, field by field.
#pragma once
#include "../layout/layer.h"

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
  const Layer* layer;
  Cache pages, ring;  // ring without data: there is no ring
  // Queries and outputs, of an ElementType; strides in elements. Of latents, queries of RoPE channels are apart.
  const void *query, *rope_query;
  int64_t query_type, query_stride, query_head_stride, rope_stride, rope_head_stride;
  void* output;
  int64_t output_type, output_stride, output_head_stride;
  float* lse;  // [tokens, query heads], or null
  // Attention. Latents are one KV head.
  int64_t kv_heads, group;
  double scale, soft_cap;  // soft_cap 0: none
  int64_t sliding_window;  // tokens; 0: none
  const float* sinks;      // [query heads], or null
  const float* constant;   // [STORED_DIM], added to outputs of latents, or null
  int64_t ring_window;
  void* workspace;

  // Whether scores lack products with means of K. Latents have one mean, `constant`.
  bool has_means() const { return !IS_LATENT && layer->centres[0]; }
  // Whether outputs lack means of V.
  bool has_value_means() const { return !IS_LATENT && layer->centres[1]; }
};
