// The tokens that a query sees, and the parts that a request's tokens are cut into.
#pragma once
#include "arguments.h"

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }

struct Range {
  long first, end;
};

// A request's query tokens, and the tokens in the pages that any of them sees, cut into parts at multiples of a tile.
// The cuts depend on the request alone: outputs have the same bits, whatever the rest of the batch and the number of
// threads.
struct Request {
  long query, tokens, position;  // first query token: its row, and its position; how many
  Range pages;
  long part_tokens, parts;  // at least 1 part
};

// The first token that query token `number` of a request reads in the ring; it reads earlier tokens in the pages. As in
// `attend` of reference/attention.py, or for latents `page_lens` of reference/latent_attention.py.
static inline long ring_begin(const Arguments& a, const Request& request, long r, long number) {
  long end = request.position + number + 1, first = a.ring_first[r];
  if (IS_LATENT && first > 0) first += number;
  return least(end, most(first, end - a.ring_window));
}
static inline long window_begin(const Arguments& a, long end) {
  return a.sliding_window ? most(0, end - a.sliding_window) : 0;
}
static inline Range in_pages(const Arguments& a, const Request& request, long r, long number) {
  long end = request.position + number + 1, first = window_begin(a, end);
  return {first, most(first, a.ring.data ? ring_begin(a, request, r, number) : end)};
}
static inline Range in_ring(const Arguments& a, const Request& request, long r, long number) {
  long end = request.position + number + 1;
  return {least(end, most(window_begin(a, end), ring_begin(a, request, r, number))), end};
}

template <class Tile> static inline Request request_of(const Arguments& a, long r) {
  Request request = {};
  request.query = a.query_start[r], request.tokens = a.query_start[r + 1] - request.query;
  request.position = a.seq_lens[r] - request.tokens;
  for (long i = 0; i < request.tokens; i++) {
    Range range = in_pages(a, request, r, i), &pages = request.pages;
    if (range.first == range.end) continue;
    bool is_only = pages.first == pages.end;
    pages.first = is_only ? range.first : least(pages.first, range.first);
    pages.end = is_only ? range.end : most(pages.end, range.end);
  }
  long first = request.pages.first / Tile::TOKENS, end = (request.pages.end + Tile::TOKENS - 1) / Tile::TOKENS;
  request.part_tokens = Tile::part_tokens(end - first);
  request.parts = most(1, ((end - first) * Tile::TOKENS + request.part_tokens - 1) / request.part_tokens);
  return request;
}
