// Store of new tokens: rotate, search the scales, code, pack into pages; and at 8 bits into the ring of recent tokens.
// The bytes equal those of the references: `PagedCodec.write`, `LatentCodec.write` and `codecs/ring.py`.
//
// Up to 16 vectors are processed side by side (vectors16.h): a micro-block of K or V of one head or, as in a step of
// decodes, K and V vectors of several micro-blocks and heads.
#pragma once
#include "../base/threads.h"
#include "../layout/quantize.h"
#include "../layout/words.h"
#include <stdlib.h>

struct Store {
  const Layer* layer;
  Cache pages, ring;          // without data: not written
  const int64_t* slots;       // by token; negative: in no page
  const int32_t* ring_slots;  // for the first `ring_tokens` tokens; negative: not in the ring
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
// Moves a part of codes [32][16 tokens] to its bits in words, by slot and token.
static void collect(const Part& part, const uint8_t (*codes)[WIDE], uint32_t (*words)[WIDE]) {
  Bytes mask = broadcast_32(part.mask), from = broadcast_32(part.from);
  for (int c = 0; c < 32; c++)
    for (int lane = 0; lane < 16; lane += VECTOR_FLOATS) {
      Bytes bits = bit_and(shift_right(load_bytes(codes[c] + lane), from), mask);
      uint32_t* word = words[part.slot[c]] + lane;
      store(word, bit_or(load(word), shift_left(bits, load_bytes(part.shift[c] + lane))));
    }
}
// Puts words of all tokens into the words that they share. `whole`: the bits to replace, for the first of those tokens;
// null: all bits.
static void put_whole(uint8_t* to, const Plane& plane, const uint32_t (*whole)[MICRO_BLOCK], uint32_t (*words)[WIDE]) {
  const Part& part = *plane.part;
  for (int s = 0; s < part.slots; s++) {
    if (part.joins_halves)
      for (int n = 0; n < 8; n++) words[s][n] |= words[s][n + 8];
    if (part.joins_pairs)
      for (int n = 0; n < 16; n += 2) words[s][n] |= words[s][n + 1];
    for (int n = 0, end = part.joins_halves ? 8 : 16; n < end; n += part.joins_pairs ? 2 : 1)
      if (whole) replace_bits(to, plane, s, n, whole[s][n], words[s][n]);
      else memcpy(to + plane.at[s][n], &words[s][n], 4);
  }
}
// Puts codes [32][16 tokens] of the `count` tokens `present` into a group's words; other tokens' bits stay. `is_one`:
// magnitudes and signs are in the same words.
static void pack(uint8_t* to, const Plane* planes, bool is_one, const uint8_t (*codes)[WIDE], const uint8_t* present,
                 int count) {
  alignas(64) uint32_t words[MOST_SLOTS][WIDE];
  for (int p = 0; p < 2; p++) {
    const Part& part = *planes[p].part;
    const bool joins = is_one && count == 16;
    if (p == 0 || !joins) memset(words, 0, sizeof words[0] * part.slots);
    collect(part, codes, words);
    if (joins && p == 0) continue;
    if (count == 16) put_whole(to, planes[p], joins ? nullptr : part.whole, words);
    else
      for (int s = 0; s < part.slots; s++)
        for (int i = 0, n; i < count; i++)
          n = present[i], replace_bits(to, planes[p], s, n, part.bits[s][n], words[s][n]);
  }
}

// As `pack`, of one token, as a step of decodes stores them: codes of channel c are at codes[c][row].
static void pack_one(uint8_t* to, const Plane* planes, bool is_one, const uint8_t (*codes)[WIDE], int row, int token) {
  uint32_t words[MOST_SLOTS] = {};
  for (int p = 0; p < 2; p++) {
    const Part& part = *planes[p].part;
    for (int c = 0; c < 32; c++)
      words[part.slot[c]] |= (codes[c][row] >> part.from & (uint32_t)part.mask) << part.shift[c][token];
    if (is_one && p == 0) continue;
    for (int s = 0; s < part.slots; s++) {
      uint32_t bits = part.bits[s][token] | (is_one ? planes[0].part->bits[s][token] : 0);
      replace_bits(to, planes[p], s, token, bits, words[s]), words[s] = 0;
    }
  }
}

// --- up to 16 vectors ---
// The vectors of one head, K or V, of the kept tokens `first` .. `end` - 1, which share a micro-block.
struct Item {
  int32_t first, end, head, role;
};
struct Batch {
  const Store& call;
  const Layer& layer;
  const int32_t* kept;  // numbers of tokens
  alignas(64) Vector vectors[WIDE];
  alignas(64) Row x[ALL_CHANNELS];
  alignas(64) uint8_t codes[ALL_CHANNELS][WIDE], scales[ALL_GROUPS][WIDE];
  alignas(64) uint8_t ring_codes[ALL_CHANNELS][WIDE], ring_scales[ALL_GROUPS][WIDE];
  alignas(64) Vector given, mean;

  void prepare(float* to, int role, int head, int token) {
    int64_t at = token * call.token_stride[role] + head * call.head_stride[role];
    const void* from = (const uint8_t*)call.vectors[role] + at * element_bytes(call.dtype);
    prepare_vector(layer, role, head, call.positions ? call.positions[token] : 0, from, call.dtype, to, given, mean);
    if constexpr (ROPE_DIM > 0) prepare_rope(to + STORED_DIM, token);
  }
  // As `halves_of` of codecs/latent.py.
  void prepare_rope(float* to, int token) {
    const uint8_t* from = (const uint8_t*)call.vectors[1] + token * call.token_stride[1] * element_bytes(call.dtype);
    read_elements(to, from, call.dtype, ROPE_DIM);
    for (int i = 0; i < ROPE_DIM; i++)
      to[i] = float16_to_float(float_to_float16(is_finite(to[i]) ? limited(to[i]) : 0.f));
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
    to_rows(vectors, x, ALL_CHANNELS, all);
    const int role = items->role;  // of all that are not alike
    rotate(x, role, layer.rotation, all, false);
    for (int g = 0; g < ALL_GROUPS; g++)
      for (int lane = 0; lane < all; lane += VECTOR_FLOATS) {
        const Row* group = x + 32 * g;
        if (any_page && g < GROUPS)
          unrolled<WIDTHS>([&](auto code) {
            if (GROUP_TABLE[role][g].code == code) quantize<code.value>(group, lane, codes + 32 * g, scales[g]);
          });
        // RoPE channels have the same form in the page and in the ring.
        if (any_ring || g >= GROUPS) quantize_for_ring(group, lane, ring_codes + 32 * g, ring_scales[g]);
      }
    for (int row = 0; count; row += items->end - items->first, items++, count--) {
      if (call.in_page(kept[items->first])) into_page(*items, row);
      if (any_ring) into_ring(*items, row);
    }
  }

  void into_page(const Item& item, int row) {
    const int count = item.end - item.first, role = item.role;
    uint8_t* to = call.pages.micro_block(call.slots[kept[item.first]] / 16, item.head);
    uint8_t present[16], apart[32][WIDE];
    if (count == 1) {
      const int token = call.slots[kept[item.first]] % 16;
      for (int g = 0; g < GROUPS; g++) {
        pack_one(to, WORD_PLACES.planes[role][g], !GROUP_TABLE[role][g].has_sign_words, codes + 32 * g, row, token);
        to[SCALES_AT[role] + scale_at(role, g, token)] = scales[g][row];
      }
      if (ROPE_DIM) rope_into_page(to, token, row);
      return;
    }
    bool in_place = row == 0 && count == 16;
    for (int i = 0; i < count; i++) {
      present[i] = call.slots[kept[item.first + i]] % 16;
      in_place &= present[i] == i;
    }
    for (int g = 0; g < GROUPS; g++) {
      const uint8_t(*of_group)[WIDE] = codes + 32 * g;
      if (!in_place) {
        memset(apart, 0, sizeof apart);
        for (int i = 0; i < count; i++)
          for (int c = 0; c < 32; c++) apart[c][present[i]] = codes[32 * g + c][row + i];
        of_group = apart;
      }
      pack(to, WORD_PLACES.planes[role][g], !GROUP_TABLE[role][g].has_sign_words, of_group, present, count);
      for (int i = 0; i < count; i++) to[SCALES_AT[role] + scale_at(role, g, present[i])] = scales[g][row + i];
    }
    for (int i = 0; ROPE_DIM && i < count; i++) rope_into_page(to, present[i], row + i);
  }
  void rope_into_page(uint8_t* to, int token, int row) {
    for (int c = 0; c < ROPE_DIM; c++) {
      uint8_t* at = to + rope_at(c, token);
      uint16_t half = float_to_float16(x[STORED_DIM + c][row]);
      if (ROPE_BITS == 16) memcpy(at, &half, 2);
      else *at = ring_codes[STORED_DIM + c][row];
    }
    for (int g = 0; ROPE_BITS == 8 && g < ROPE_DIM / 32; g++) to[rope_scale_at(g, token)] = ring_scales[GROUPS + g][row];
  }

  void into_ring(const Item& item, int row) {
    for (int i = item.first; i < item.end; i++, row++) {
      if (!call.in_ring(kept[i])) continue;
      uint8_t* to = call.ring.slot(call.ring_slots[kept[i]], item.head);
      for (int g = 0; g < ALL_GROUPS; g++) {
        to[RING_SCALES_AT[item.role] + g] = ring_scales[g][row];
        uint8_t* of_group = to + RING_CODES_AT[item.role] + 32 * g;
        for (int i = 0; i < 32; i++) of_group[i] = ring_codes[32 * g + ring_channel(item.role, i)][row];
      }
    }
  }
};

// --- the call ---
// Splits the tokens into items, and the items into batches.
struct StorePlan {
  const Store& call;
  int32_t* kept;
  Item* items;
  int32_t* batches;  // first item of each, and the end

  bool shares_micro_block(int a, int b) const {
    return call.in_page(a) && call.in_page(b) && call.slots[a] / 16 == call.slots[b] / 16;
  }
  // Returns the number of batches. Tokens of the ring alone come last: between tokens of a micro-block they would part
  // them into items, and threads would write the same words.
  int make() {
    int tokens = 0, number = 0, count = 0;
    for (int i = 0; i < call.tokens; i++)
      if (call.in_page(i)) kept[tokens++] = i;
    for (int i = 0; i < call.tokens; i++)
      if (!call.in_page(i) && call.in_ring(i)) kept[tokens++] = i;
    constexpr int together = ALIKE ? ROLES : 1;  // roles whose vectors share batches
    for (int from = 0; from < ROLES; from += together)
      for (int first = 0, end, rows = WIDE; first < tokens; first = end) {
        for (end = first + 1; end < tokens && shares_micro_block(kept[first], kept[end]);) end++;
        for (int head = 0; head < call.kv_heads; head++)
          for (int role = from; role < from + together; role++) {
            if (rows + end - first > WIDE) batches[count++] = number, rows = 0;
            items[number++] = Item{first, end, head, role}, rows += end - first;
          }
      }
    batches[count] = number;
    return count;
  }
};

// Tokens of one micro-block follow one another, apart from tokens that go to no page. Returns 0, or 1: out of memory.
EXPORT int pk_store(const Store* call) {
  const size_t most = 2 * (size_t)call->tokens * call->kv_heads;
  int32_t* memory = (int32_t*)malloc(most * sizeof(Item) + 4 * (call->tokens + most + 1));
  if (!memory) return 1;
  int32_t* kept = memory + most * sizeof(Item) / 4;
  StorePlan plan{*call, kept, (Item*)memory, kept + call->tokens};
  hand_out(plan.make(), call->threads, [&](auto next) {
    Batch batch{*call, *call->layer, kept};
    for (int i; (i = next()) >= 0;)
      batch.run(plan.items + plan.batches[i], plan.batches[i + 1] - plan.batches[i]);
  });
  free(memory);
  return 0;
}
