// Decode attention over packed pages of a layout, with the tile for pairs or latents: see pairs.cpp, latents.cpp and
// decode.py.
//
// A job is (request, part of its tokens, KV head). It takes a tile of tokens at a time for all columns of the KV head:
//   K        codes -> 16-bit levels by look-ups in registers, 16-bit products with the queries, 32-bit sums of the 32
//            channels of a group, times the group's scales in fp32
//   softmax  online, in fp32; exponentials times V's scales -> 16-bit weights
//   V        codes -> 16-bit levels, 16-bit products with the weights, 32-bit sums over the tile, added in fp32
// Integer products are exact, and an instruction does twice as many as in fp32. Queries and weights are rounded to
// 1/32767 of the largest. The ring's few tokens are attended to in fp32.
#pragma once
#include "../layout/restore.h"
#include "queries.h"
#include "ring.h"

// Notes a column's score of token 0, the first of a tile's.
template <class Tile> static void note_first(const Arguments& a, const Tile& tile, int column, long first) {
  if (first != 0 || !a.has_value_means()) return;
  float& known = tile.softmax[column].first;
  known = larger(known, tile.scores[(long)column * Tile::TOKENS]);
}

template <class Tile> static void attend_pages(const Arguments& a, long r, int head, const Tile& tile, Range part) {
  const uint8_t* micro_blocks[Tile::BLOCKS + Tile::AHEAD];
  const int32_t* table = a.block_table + r * a.block_table_stride;
  const int size = a.pages.block_size;
  for (long at = part.first / Tile::TOKENS * Tile::TOKENS; at < part.end; at += Tile::TOKENS) {
    long first = most(at, part.first / MICRO_BLOCK * MICRO_BLOCK), end = least(at + Tile::TOKENS, part.end);
    int blocks = (int)((end - first + MICRO_BLOCK - 1) / MICRO_BLOCK), count = blocks * MICRO_BLOCK;
    long later = least(part.end, at + Tile::TOKENS + Tile::AHEAD * MICRO_BLOCK);
    int known = (int)((later - first + MICRO_BLOCK - 1) / MICRO_BLOCK);
    long block = first / size, in_block = first % size;
    for (int i = 0; i < known; i++, in_block += MICRO_BLOCK) {
      if (in_block == size) block++, in_block = 0;
      micro_blocks[i] = a.pages.data + table[block] * a.pages.block_stride + head * a.pages.head_stride +
                        in_block / MICRO_BLOCK * MICRO_BLOCK_BYTES;
    }
    if (at <= part.first)
      for (int i = 0; i < Tile::AHEAD && i < known; i++) prefetch(micro_blocks[i]);
    tile.score(micro_blocks, blocks, known, (int)(end - first));
    if (a.has_means()) add_means(a, tile, head, first, count, Tile::TOKENS, place_in_tile);
    if (a.soft_cap != 0) cap_scores(tile, count, (float)a.soft_cap);
    for (int column = 0; column < tile.count; column++) {
      mask(tile.scores + (long)column * Tile::TOKENS, tile.ranges[column / a.group], first, count, place_in_tile);
      note_first(a, tile, column, first);
      tile.tile_factors[column] = add_to_softmax(tile, column, count);
    }
    tile.add(micro_blocks, blocks);
  }
}

// Addresses of `count` tokens in the ring, of request r from `first` on.
static void find_slots(const Arguments& a, long r, int head, long first, int count, const uint8_t** slots) {
  const int32_t* table = a.ring_table + r * a.ring_table_stride;
  const long size = a.ring.block_size;
  long block = first / size, in_block = first % size;
  for (int i = 0; i < count; i++, in_block++) {
    if (in_block == size) block++, in_block = 0;
    slots[i] = a.ring.slot((int64_t)table[block] * size + in_block, head);
  }
}

// Prefetches the ring's first tokens, which the part reads after its pages.
template <class Tile> static void prefetch_ring(const Arguments& a, const Request& request, long r, int head) {
  const uint8_t* slots[Tile::TOKENS];
  long first = in_ring(a, request, r, 0).first;
  int count = (int)least(Tile::TOKENS, request.position + request.tokens - first);
  find_slots(a, r, head, first, count, slots);
  for (int i = 0; i < count; i++)
    for (int at = 0; at < a.ring.slot_bytes; at += 64) __builtin_prefetch(slots[i] + at, 0, 2);
}

template <class Tile>
static void attend_ring(const Arguments& a, const Request& request, long r, int head, const Tile& tile) {
  const uint8_t* slots[Tile::TOKENS];
  const long end = request.position + request.tokens;
  auto as_it_is = [](int i) { return i; };
  for (long first = in_ring(a, request, r, 0).first; first < end; first += Tile::TOKENS) {
    int count = (int)least(Tile::TOKENS, end - first), padded = (count + 15) / 16 * 16;
    find_slots(a, r, head, first, count, slots);
    for_blocks(tile.count, [&](auto block, int column) {
      float* scores = tile.scores + (long)column * Tile::TOKENS;
      for (int i = 0; i < count; i++)
        score_slot<block.value>(slots[i], tile.ring_queries + (long)column * ALL_CHANNELS, scores + i, Tile::TOKENS);
    });
    for (int column = 0; column < tile.count; column++)
      for (int i = count; i < padded; i++) tile.scores[(long)column * Tile::TOKENS + i] = 0;
    if (a.has_means()) add_means(a, tile, head, first, count, Tile::TOKENS, as_it_is);
    if (a.soft_cap != 0) cap_scores(tile, padded, (float)a.soft_cap);
    for (int column = 0; column < tile.count; column++) {
      Range range = in_ring(a, request, r, column / a.group);
      mask(tile.scores + (long)column * Tile::TOKENS, range, first, padded, as_it_is);
      note_first(a, tile, column, first);
      tile.tile_factors[column] = add_to_softmax(tile, column, padded);
    }
    for_blocks(tile.count, [&](auto block, int column) {
      add_slots<block.value>(slots, count, tile.scores + (long)column * Tile::TOKENS, Tile::TOKENS,
                             tile.tile_factors + column, tile.ring_sums + (long)column * STORED_DIM);
    });
  }
}

// --- jobs -----------------------------------------------------------------------------------------------------------
template <class Tile> static void attend_part(const Run<Tile>& run, Tile& tile, long r, long part, int head) {
  const Arguments& a = *run.a;
  const Request& request = run.requests[r];
  tile.count = (int)run.columns_of(r);
  if (a.ring.data && part == request.parts - 1) prefetch_ring<Tile>(a, request, r, head);
  read_queries(a, request, head, tile);
  for (long i = 0; i < request.tokens; i++) tile.ranges[i] = in_pages(a, request, r, i);
  tile.clear();
  if (tile.ring_sums) memset(tile.ring_sums, 0, sizeof(float) * tile.count * STORED_DIM);
  for (int c = 0; c < tile.count; c++) tile.softmax[c] = {-INFINITY, 0, -INFINITY};
  long start = request.pages.first / Tile::TOKENS * Tile::TOKENS + part * request.part_tokens;
  attend_pages(a, r, head, tile,
               {most(start, request.pages.first), least(start + request.part_tokens, request.pages.end)});
  if (a.ring.data && part == request.parts - 1) attend_ring(a, request, r, head, tile);
  long partial = run.partial_of(r, part, head);
  tile.collect(run.results + partial * STORED_DIM);
  for (int c = 0; c < tile.count; c++) {
    float* to = run.results + (partial + c) * STORED_DIM;
    run.partials[partial + c] = tile.softmax[c];
    for (int i = 0; tile.ring_sums && i < STORED_DIM; i++) {
      // The result for latents is later multiplied by V's gain, which numbers in the ring do not need.
      float gain = IS_LATENT ? CODES[GROUP_TABLE[VALUE][i / GROUP_SIZE].code].gain : 1;
      to[i / GROUP_SIZE * GROUP_SIZE + ring_channel(VALUE, i % GROUP_SIZE)] +=
          tile.ring_sums[(long)c * STORED_DIM + i] / gain;
    }
  }
}

// A column's result over all parts: its log-sum-exp, the sum of all tokens' weights (less than 1 beside a sink), and
// the weight of token 0.
struct Merged {
  float lse, all, first;
};

// Writes a column's sums over all parts, divided by its total. Columns that see nothing become 0.
template <class Tile> static Merged merge_column(const Run<Tile>& run, long r, int head, long column, float* row) {
  const Arguments& a = *run.a;
  const long parts = run.requests[r].parts;
  const float sink = a.sinks ? a.sinks[head * a.group + column % a.group] : -INFINITY;
  float maximum = sink, total = 0, first = -INFINITY;
  for (long part = 0; part < parts; part++)
    maximum = larger(maximum, run.partials[run.partial_of(r, part, head) + column].maximum);
  for (long part = 0; part < parts; part++)
    first = larger(first, run.partials[run.partial_of(r, part, head) + column].first);
  memset(row, 0, sizeof(float) * STORED_DIM);
  if (maximum == -INFINITY) return {-INFINITY, 0, 0};
  const float of_sink = expf(sink - maximum);
  total = of_sink;
  for (long part = 0; part < parts; part++) {
    long at = run.partial_of(r, part, head) + column;
    const float* from = run.results + at * STORED_DIM;
    float weight = expf(run.partials[at].maximum - maximum);
    if (weight == 0) continue;
    total += weight * run.partials[at].total;
    for (int d = 0; d < STORED_DIM; d++) row[d] += weight * from[d];
  }
  for (int d = 0; d < STORED_DIM; d++) row[d] /= total;
  return {maximum + logf(total), 1 - of_sink / total, expf(first - maximum) / total};
}

template <class Tile> static void merge_parts(const Run<Tile>& run, long r, int head) {
  const Arguments& a = *run.a;
  alignas(64) Vector rows[WIDE], given, mean, first_mean, lacking;
  alignas(64) Row x[STORED_DIM];
  Merged merged[WIDE];
  const bool lacks = a.has_value_means();
  if (lacks) a.layer->read_mean(VALUE, head, 0, mean), a.layer->read_mean(VALUE, head, -1, first_mean);
  const long columns = run.columns_of(r);
  for (long first = 0; first < columns; first += WIDE) {
    int width = (int)least(WIDE, columns - first);
    memset(rows, 0, sizeof rows);
    for (int c = 0; c < width; c++) {
      long column = first + c, token = run.requests[r].query + column / a.group;
      merged[c] = merge_column(run, r, head, column, rows[c]);
      if (a.lse) a.lse[(token * a.kv_heads + head) * a.group + column % a.group] = merged[c].lse;
    }
    if constexpr (!IS_LATENT) {
      to_rows(rows, x, STORED_DIM, whole(width));
      rotate(x, VALUE, a.layer->rotation, whole(width), true);
      to_vectors(x, rows[0], ALL_CHANNELS, STORED_DIM, width);
    }
    for (int c = 0; c < width; c++) {
      long column = first + c, token = run.requests[r].query + column / a.group;
      long at = token * a.output_stride + (head * a.group + column % a.group) * a.output_head_stride;
      void* to = (char*)a.output + at * element_bytes(a.output_type);
      if (!IS_LATENT) {
        for (int i = 0; lacks && i < STORED_DIM; i++)
          lacking[i] = merged[c].all * mean[i] + merged[c].first * (first_mean[i] - mean[i]);
        restore_sum(*a.layer, VALUE, head, lacks ? lacking : nullptr, rows[c], to, a.output_type, given);
        continue;
      }
      for (int d = 0; a.constant && d < STORED_DIM; d++) rows[c][d] += a.constant[d];
      write_elements(to, rows[c], a.output_type, STORED_DIM);
    }
  }
}

// A parallel region costs some 5 us where cores are free, more where they are busy. Each thread gets at least this much
// work.
constexpr long THREAD_NS = 12000;
template <class Tile> static long estimated_ns(const Run<Tile>& run) {  // with AVX-512, 16 ns a token of 128 channels
  long ns = 0;                                                           // and 4 columns
  for (long r = 0; r < run.a->requests; r++) {
    const Request& request = run.requests[r];
    long blocks = (run.columns_of(r) + BLOCK - 1) / BLOCK;
    ns += (request.pages.end - request.pages.first) * run.a->kv_heads * blocks * STORED_DIM / 8;
  }
  return ns;
}

template <class Tile> static void decode_requests(const Arguments& arguments) {
  in_halves<Tile>(arguments, [](const Arguments& a, const Counts& counts) {
    Run<Tile> run = make_run<Tile>(a, counts);
    if (run.jobs == 0) return;
    long threads = most(1, least(least(a.threads, run.jobs), estimated_ns(run) / THREAD_NS));
    run_on_threads(work<Tile>, &run, (int)threads);
  });
}

// What decode.py calls.
#define EXPORT_DECODE(Tile)                                                                                            \
  EXPORT long decode_bytes() { return sizeof(Layer) + sizeof(Arguments); }                                             \
  /* Bytes of workspace that a call needs; its address must be a multiple of 64. */                                    \
  EXPORT int64_t decode_workspace_bytes(const Arguments* a) { return bytes_of_call<Tile>(*a); }                        \
  /* Bytes that suffice for every call with up to this many requests, query tokens per request and tokens per request.
  */ \
  EXPORT int64_t decode_largest_workspace_bytes(const Arguments* a, int64_t query, int64_t longest) {                  \
    return bytes_of_largest<Tile>(*a, query, longest);                                                                 \
  }                                                                                                                    \
  EXPORT void decode(const Arguments* a) { decode_requests<Tile>(*a); }
