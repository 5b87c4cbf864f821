// Which tokens a query sees, and how a request's are cut into parts.
#pragma once
#include "arguments.h"
#include "jobs.h"
#include "tile.h"

struct Range {
  long first, end;
};

// Of a query token at `position` of request r: tokens in the pages, and those in the ring.
static inline Range in_pages(const Arguments& a, long r, long position) {
  long first = a.sliding_window ? most(0, position + 1 - a.sliding_window) : 0, end = position + 1;
  if (a.ring) end = least(end, most(a.ring_first[r], position + 1 - a.ring_window));
  return {first, most(first, end)};
}
static inline Range in_ring(const Arguments& a, long r, long position) {
  if (!a.ring) return {0, 0};
  long first = most(a.ring_first[r], position + 1 - a.ring_window);
  if (a.sliding_window) first = most(first, position + 1 - a.sliding_window);
  return {least(first, position + 1), position + 1};
}

// A request's query tokens, and the tokens in the pages that any of them sees, cut at multiples of TILE into parts. The
// cuts depend on the request alone: outputs have the same bits whatever else is served, by however many threads.
struct Request {
  long query, tokens, position;  // first query token: its row, and its position; how many
  Range pages;
  long part_tokens, parts;  // at least 1 part
};
constexpr int LEAST_TILES = 2;       // of a part: what a job costs beside its tiles is half a tile
constexpr int FEW_PARTS = 4;         // of a request, where it has tiles enough
constexpr int LONGEST_PART = 2048;   // tokens, beyond FEW_PARTS
static inline Request request_of(const Arguments& a, long r) {
  Request request;
  request.query = a.query_start[r], request.tokens = a.query_start[r + 1] - request.query;
  request.position = a.seq_lens[r] - request.tokens;
  request.pages = {0, 0};
  for (long i = 0; i < request.tokens; i++) {
    Range range = in_pages(a, r, request.position + i);
    if (range.first == range.end) continue;
    bool is_only = request.pages.first == request.pages.end;
    request.pages.first = is_only ? range.first : least(request.pages.first, range.first);
    request.pages.end = is_only ? range.end : most(request.pages.end, range.end);
  }
  long tiles = (request.pages.end + TILE - 1) / TILE - request.pages.first / TILE;
  long parts = least((tiles + LEAST_TILES - 1) / LEAST_TILES, most(FEW_PARTS, tiles * TILE / LONGEST_PART));
  long part_tiles = parts ? (tiles + parts - 1) / parts : 1;
  request.part_tokens = part_tiles * TILE;
  request.parts = most(1, (tiles + part_tiles - 1) / part_tiles);
  return request;
}
