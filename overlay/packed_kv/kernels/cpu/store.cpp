// Store of new tokens: rotate, search the scales, code, pack into pages; and at 8 bits into the ring of recent tokens.
// The bytes equal those of the references: `PagedCodec.write`, `LatentCodec.write` and `codecs/ring.py`.
//
// Up to 16 vectors are worked on side by side (columns.h): a micro-block of K or V of one head, or vectors of several
// micro-blocks and heads, of K and V, as in a step of decodes.
#include "quantize.h"
#include "threads.h"
#include <stdlib.h>

struct Store {
  const Layer* layer;
  Cache pages, ring;          // without data: not written
  const int64_t* slots;       // by token; negative: in no page
  const int32_t* ring_slots;  // of the first `ring_tokens` tokens; negative: not in the ring
  const int64_t* positions;   // by token; null where no mean depends on them
  const void* vectors[2];     // K and V, or latents and RoPE channels
  int64_t token_stride[2], head_stride[2];  // in numbers
  int32_t tokens, ring_tokens, kv_heads, dtype, threads;

  bool in_page(int token) const { return pages.data && slots[token] >= 0; }
  bool in_ring(int token) const { return ring.data && token < ring_tokens && ring_slots[token] >= 0; }
};

// --- words of a micro-block ---
template <class Word> INLINE void replace(uint8_t* at, Word bits, Word by) {
  Word word;
  memcpy(&word, at, sizeof word);
  word = (word & ~bits) | by;
  memcpy(at, &word, sizeof word);
}
INLINE void replace_bits(uint8_t* micro_block, const Plane& plane, int slot, int token, uint32_t bits, uint32_t by) {
  if (plane.is_half) replace<uint16_t>(micro_block + plane.at[slot][token], bits, by);
  else replace<uint32_t>(micro_block + plane.at[slot][token], bits, by);
}
// Put codes [32][16 tokens] of the `count` tokens `present` into a group's words; the bits of others stay.
static void pack(uint8_t* to, const Plane& plane, const uint8_t (*codes)[COLUMNS], const uint8_t* present, int count) {
  const Part& part = *plane.part;
  alignas(64) uint32_t words[MOST_SLOTS][16];
  memset(words, 0, sizeof words[0] * part.slots);
  Bytes mask = broadcast_32(part.mask), from = broadcast_32(part.from);
  for (int c = 0; c < 32; c++)
    for (int lane = 0; lane < 16; lane += VECTOR_FLOATS) {
      Bytes bits = bit_and(shift_right(load_bytes(codes[c] + lane), from), mask);
      uint32_t* word = words[part.slot[c]] + lane;
      store(word, bit_or(load(word), shift_left(bits, load_bytes(part.shift[c] + lane))));
    }
  for (int s = 0; s < part.slots; s++) {
    if (count < 16) {
      for (int i = 0; i < count; i++) {
        int n = present[i];
        replace_bits(to, plane, s, n, part.bits[s][n], words[s][n]);
      }
      continue;
    }
    if (part.joins_halves)
      for (int n = 0; n < 8; n++) words[s][n] |= words[s][n + 8];
    if (part.joins_pairs)
      for (int n = 0; n < 16; n += 2) words[s][n] |= words[s][n + 1];
    for (int n = 0, end = part.joins_halves ? 8 : 16; n < end; n += part.joins_pairs ? 2 : 1)
      replace_bits(to, plane, s, n, part.whole[s][n], words[s][n]);
  }
}

// --- up to 16 vectors ---
// Those of one head, of K or V, of the kept tokens `first` .. `end` - 1, which share a micro-block.
struct Item {
  int32_t first, end, head, role;
};
struct Batch {
  const Store& call;
  const Layer& layer;
  const int32_t* kept;  // numbers of tokens
  alignas(64) Vector vectors[COLUMNS];
  alignas(64) Row x[VECTOR_CHANNELS];
  alignas(64) uint8_t codes[VECTOR_CHANNELS][COLUMNS], scales[VECTOR_CHANNELS / 32][COLUMNS];
  alignas(64) uint8_t ring_codes[VECTOR_CHANNELS][COLUMNS], ring_scales[VECTOR_CHANNELS / 32][COLUMNS];
  alignas(64) Vector given, mean;

  void prepare(float* to, int role, int head, int token) {
    int64_t at = token * call.token_stride[role] + head * call.head_stride[role];
    const void* from = (const uint8_t*)call.vectors[role] + at * element_bytes(call.dtype);
    prepare_vector(layer, role, head, call.positions ? call.positions[token] : 0, from, call.dtype, to, given, mean);
    if (layer.rope) prepare_rope(to + layer.channels, token);
  }
  // As `halves_of` of codecs/latent.py.
  void prepare_rope(float* to, int token) {
    const uint8_t* from = (const uint8_t*)call.vectors[1] + token * call.token_stride[1] * element_bytes(call.dtype);
    read_elements(to, from, call.dtype, layer.rope);
    for (int i = 0; i < layer.rope; i++) {
      float x = is_finite(to[i]) ? to[i] : 0.f;
      x = x > INPUT_LIMIT ? INPUT_LIMIT : x;
      to[i] = float16_to_float(float_to_float16(x < -INPUT_LIMIT ? -INPUT_LIMIT : x));
    }
  }

  void run(const Item* items, int count) {
    int rows = 0;
    bool any_page = false, any_ring = false;
    for (const Item* item = items; item < items + count; item++)
      for (int i = item->first; i < item->end; i++) {
        any_page |= call.in_page(kept[i]), any_ring |= call.in_ring(kept[i]);
        prepare(vectors[rows++], item->role, item->head, kept[i]);
      }
    const int all = whole(rows);
    memset(vectors[rows], 0, sizeof(Vector) * (all - rows));
    to_columns(vectors, x, layer.all_channels(), all);
    rotate(layer, x, all, false);
    for (int g = 0; g < layer.groups; g++)
      for (int lane = 0; lane < all; lane += VECTOR_FLOATS) {
        const Row* group = x + 32 * g;
        if (any_page && layer.bits[g] == 4) quantize<Code<4>>(group, lane, codes + 32 * g, scales[g]);
        if (any_page && layer.bits[g] == 3) quantize<Code<3>>(group, lane, codes + 32 * g, scales[g]);
        if (any_page && layer.bits[g] == 2) quantize<Code<2>>(group, lane, codes + 32 * g, scales[g]);
        if (any_ring) quantize_for_ring(group, lane, ring_codes + 32 * g, ring_scales[g]);
      }
    for (int g = layer.groups; g < layer.all_groups(); g++)  // of RoPE channels, in the page as in the ring
      for (int lane = 0; lane < all; lane += VECTOR_FLOATS)
        quantize_for_ring(x + 32 * g, lane, ring_codes + 32 * g, ring_scales[g]);
    for (int row = 0; count; row += items->end - items->first, items++, count--) {
      if (call.in_page(kept[items->first])) into_page(*items, row);
      if (any_ring) into_ring(*items, row);
    }
  }

  void into_page(const Item& item, int row) {
    const int count = item.end - item.first, role = item.role;
    uint8_t* to = call.pages.micro_block(call.slots[kept[item.first]] / 16, item.head, layer.micro_block_bytes);
    uint8_t present[16], apart[32][COLUMNS];
    bool in_place = row == 0 && count == 16;
    for (int i = 0; i < count; i++) {
      present[i] = call.slots[kept[item.first + i]] % 16;
      in_place &= present[i] == i;
    }
    for (int g = 0; g < layer.groups; g++) {
      const uint8_t(*of_group)[COLUMNS] = codes + 32 * g;
      if (!in_place) {
        memset(apart, 0, sizeof apart);
        for (int i = 0; i < count; i++)
          for (int c = 0; c < 32; c++) apart[c][present[i]] = codes[32 * g + c][row + i];
        of_group = apart;
      }
      for (const Plane& plane : layer.plane[role][g]) pack(to, plane, of_group, present, count);
      for (int i = 0; i < count; i++) to[layer.scale_at[role][g][present[i]]] = scales[g][row + i];
    }
    for (int i = 0; layer.rope && i < count; i++) rope_into_page(to, present[i], row + i);
  }
  void rope_into_page(uint8_t* to, int token, int row) {
    for (int c = 0; c < layer.rope; c++) {
      uint8_t* at = to + layer.rope_at[c][token];
      uint16_t half = float_to_float16(x[layer.channels + c][row]);
      if (layer.rope_bits == 16) memcpy(at, &half, 2);
      else *at = ring_codes[layer.channels + c][row];
    }
    for (int g = 0; layer.rope_bits == 8 && g < layer.rope / 32; g++)
      to[layer.rope_scale_at[g][token]] = ring_scales[layer.groups + g][row];
  }

  void into_ring(const Item& item, int row) {
    for (int i = item.first; i < item.end; i++, row++) {
      if (!call.in_ring(kept[i])) continue;
      uint8_t* to = call.ring.slot(call.ring_slots[kept[i]], item.head);
      for (int g = 0; g < layer.all_groups(); g++) {
        to[layer.ring_scales[item.role] + g] = ring_scales[g][row];
        uint8_t* of_group = to + layer.ring_codes[item.role] + 32 * g;
        for (int c = 0; c < 32; c++) of_group[layer.ring_byte[item.role][c]] = ring_codes[32 * g + c][row];
      }
    }
  }
};

// --- the call ---
struct Tasks {
  const Store& call;
  int32_t* kept;
  Item* items;
  int32_t* batches;  // first item of each, and the end
  int count, next;

  bool shares_micro_block(int a, int b) const {
    return call.in_page(a) && call.in_page(b) && call.slots[a] / 16 == call.slots[b] / 16;
  }
  // Split the tokens into items and these into batches.
  void plan() {
    int tokens = 0, number = 0, rows = COLUMNS;
    for (int i = 0; i < call.tokens; i++)
      if (call.in_page(i) || call.in_ring(i)) kept[tokens++] = i;
    count = 0;
    for (int first = 0, end; first < tokens; first = end) {
      for (end = first + 1; end < tokens && shares_micro_block(kept[first], kept[end]);) end++;
      for (int head = 0; head < call.kv_heads; head++)
        for (int role = 0; role < call.layer->roles; role++) {
          if (rows + end - first > COLUMNS) batches[count++] = number, rows = 0;
          items[number++] = Item{first, end, head, role}, rows += end - first;
        }
    }
    batches[count] = number;
  }
  static void body(void* self) {
    Tasks& tasks = *(Tasks*)self;
    Batch batch{tasks.call, *tasks.call.layer, tasks.kept};
    for (int i; (i = next_of(&tasks.next)) < tasks.count;)
      batch.run(tasks.items + tasks.batches[i], tasks.batches[i + 1] - tasks.batches[i]);
  }
};

EXPORT long pk_store_bytes() { return sizeof(Layer) + sizeof(Store); }

// Tokens of one micro-block follow one another, those in no page aside. Returns 0, or 1: there is no memory.
EXPORT int pk_store(const Store* call) {
  const size_t most = 2 * (size_t)call->tokens * call->kv_heads;
  int32_t* memory = (int32_t*)malloc(most * sizeof(Item) + 4 * (call->tokens + most + 1));
  if (!memory) return 1;
  int32_t* kept = memory + most * sizeof(Item) / 4;
  Tasks tasks{*call, kept, (Item*)memory, kept + call->tokens, 0, 0};
  tasks.plan();
  run_on_threads(Tasks::body, &tasks, tasks.count < call->threads ? tasks.count : call->threads);
  free(memory);
  return 0;
}
