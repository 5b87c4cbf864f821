// What calibration does to a vector before it is rotated.
#pragma once
#include "tables.h"
#include <string.h>

static const int32_t* order_of(const Layer& layer, int role, int head) {
  const int32_t* orders = layer.order[role];
  return orders && layer.order_heads[role] > 1 ? orders + head * layer.channels : orders;
}
static const float* table_of(const Layer& layer, int role, int head) {
  const float* tables = layer.table[role];
  return tables && layer.table_heads[role] > 1 ? tables + head * 4 * layer.channels : tables;
}
// What is taken off a vector at a position, in packing order.
static void mean_of(const Layer& layer, int role, int head, int64_t position, float* mean) {
  const int size = layer.channels;
  const int32_t* order = order_of(layer, role, head);
  const float* table = table_of(layer, role, head);
  if (position == 0) {
    memcpy(mean, table + 2 * size, 4 * size);
    return;
  }
  int64_t block = layer.block_tokens[role] ? position / layer.block_tokens[role] : 0;
  if (block >= layer.blocks[role]) block = layer.blocks[role] - 1;
  if (block < 0) block = 0;  // padding in front of a sequence
  const float* spectrum = layer.spectrum[role] + block * 2 * size;
  for (int i = 0; i < size; i++) {
    int c = order ? order[i] : i;
    mean[i] = table[i] * spectrum[c] + table[size + i] * spectrum[size + c];
  }
}
