// Decode attention over pages of latents: latent_decode.py. A latent is K and V at once, for all query heads.
//
// A job is (request, part of its tokens). It takes TILE tokens at a time, and decodes each once for all columns, which
// are the query heads times query tokens:
//   decode   codes -> 16-bit levels by look-ups in registers (pages.h), kept for the tile: 2 bytes a channel and token
//   K        as in tile.h; RoPE channels in fp32 beside it
//   softmax  online, in fp32
//   V        exponentials times the tokens' scales -> 16-bit weights, one factor a tile and group. Levels lie in K's
//            order, tokens beside each other in other lanes, but for n3: with the two tokens of n3 brought together,
//            pairs of products add up over tokens; what is left of the sum, over lanes, is done once a part
// Arithmetic bounds it: 16 heads take 17,408 products a token, of which AVX-512 does 32 an instruction, while 400 bytes
// of a token (tq4) are read. On one core (Zen 4) a token of 16 heads takes 0.26 us, in vLLM's bf16 op 0.58 us.
#include "jobs.h"
#include "latent_tile.h"

struct Request {
  long query, tokens;           // first row of its queries, and how many tokens these are
  long end, pages, ring_first;  // tokens in all and in the pages, and the first that is read in the ring
  long part_tokens, parts;
};

// As `attend` of reference/latent_attention.py and `page_lens` there.
static Request request_of(const LatentArguments& a, long r) {
  Request q = {};
  q.query = a.query_start[r], q.tokens = a.query_start[r + 1] - q.query, q.end = a.seq_lens[r];
  q.pages = q.ring_first = q.end;
  if (a.ring) {
    long first = a.ring_first[r], known = first > 0 ? first + q.tokens - 1 : 0;
    q.pages = most(0, least(most(known, q.end - a.ring_window), q.end));
    q.ring_first = least(most(q.pages - q.tokens + 1, first), q.end);
  }
  q.part_tokens = most(PART_TOKENS, (q.pages / MOST_PARTS + TILE - 1) / TILE * TILE);
  q.parts = most(1, (q.pages + q.part_tokens - 1) / q.part_tokens);
  return q;
}

static const uint8_t* micro_block_of(const LatentArguments& a, long r, long token) {
  long block = a.block_table[r * a.block_table_stride + token / a.block_size];
  return a.cache + block * a.cache_block_stride + token % a.block_size / MICRO_BLOCK * MICRO_BLOCK_BYTES;
}

static void attend_pages(const LatentArguments& a, const Request& request, long r, Columns& columns, long first,
                         long end) {
  for (long tile = first; tile < end; tile += TILE) {
    int tokens = (int)least(TILE, end - tile), blocks = (tokens + MICRO_BLOCK - 1) / MICRO_BLOCK;
    for (int i = 0; i < blocks; i++) {
      if (tile + (i + 1) * MICRO_BLOCK < end) {
        const uint8_t* next = micro_block_of(a, r, tile + (i + 1) * MICRO_BLOCK);
        for (int at = 0; at < MICRO_BLOCK_BYTES; at += 64) __builtin_prefetch(next + at);
      }
      score_micro_block(columns, micro_block_of(a, r, tile + (long)i * MICRO_BLOCK), i, tokens - i * MICRO_BLOCK);
    }
    score_tile(columns, blocks);
    for (int column = 0; column < columns.count; column++) {  // what this query token does not see
      float* scores = columns.scores + (long)column * TILE;
      long seen = most(0, least(tokens, request.pages + columns.hidden_from[column] - tile));
      for (int i = (int)seen; i < blocks * MICRO_BLOCK; i++) scores[place_in_tile(i)] = -INFINITY;
    }
    add_tile(columns, blocks);
  }
}

static void attend_ring(const LatentArguments& a, const Request& request, long r, Columns& columns) {
  for (long first = request.ring_first; first < request.end; first += RING_TILE) {
    int count = (int)least(RING_TILE, request.end - first), padded = (count + 15) / 16 * 16;
    for (int i = 0; i < count; i++) {
      long token = first + i, block = a.ring_table[r * a.ring_table_stride + token / a.ring_block_size];
      const uint8_t* slot = a.ring + block * a.ring_block_stride + token % a.ring_block_size * a.ring_token_stride;
      read_ring_slot(slot, columns.ring_rows + (long)i * RING_DIM);
    }
    for (int column = 0; column < columns.count; column++) {
      float* scores = columns.scores + (long)column * TILE;
      long own = request.end - request.tokens + column / a.heads, before = own - (request.end - request.pages);
      for (int i = 0; i < padded; i++) {
        bool seen = i < count && first + i <= own && first + i > before;
        scores[i] = seen ? score_ring_row(columns, column, columns.ring_rows + (long)i * RING_DIM) : -INFINITY;
      }
      float factor = columns.tile_factors[column] = add_to_softmax(columns, column, padded);
      if (factor != 0) add_ring_rows(columns, column, count, factor);
    }
  }
}

struct LatentDecode {
  using Arguments = LatentArguments;
  using Request = ::Request;
  using Scratch = Columns;
  using Softmax = ::Softmax;
  static constexpr int RESULT = RANK, TILE = ::TILE;
  static long heads(const LatentArguments&) { return 1; }  // of K and V
  static long group(const LatentArguments& a) { return a.heads; }
  static Request request_of(const LatentArguments& a, long r) { return ::request_of(a, r); }
  static Columns cut_scratch(const LatentArguments& a, Cutter& from, long count) { return cut_columns(a, from, count); }
  static void attend_part(const Run<LatentDecode>& run, Columns columns, long r, long part, long head);
  static void merge_parts(const Run<LatentDecode>& run, long r, long head);
};

void LatentDecode::attend_part(const Run<LatentDecode>& run, Columns columns, long r, long part, long head) {
  const LatentArguments& a = *run.a;
  const Request& request = run.requests[r];
  long partial = run.partial_of(r, part, head);
  columns.count = (int)run.columns_of(r);
  [[maybe_unused]] Tiles tiles;
  read_queries(a, request.query, request.tokens, columns);
  clear_sums(columns);
  for (int c = 0; c < columns.count; c++) columns.softmax[c] = {-INFINITY, 0};
  if (a.ring) memset(columns.ring_sums, 0, sizeof(float) * columns.count * RANK);
  attend_pages(a, request, r, columns, part * request.part_tokens,
               least((part + 1) * request.part_tokens, request.pages));
  if (a.ring && part == request.parts - 1) attend_ring(a, request, r, columns);
  for (int c = 0; c < columns.count; c++) run.partials[partial + c] = columns.softmax[c];
  collect_sums(columns, run.results + partial * RANK);
}

void LatentDecode::merge_parts(const Run<LatentDecode>& run, long r, long) {
  const LatentArguments& a = *run.a;
  const Request& request = run.requests[r];
  long columns = run.columns_of(r);
  alignas(64) float row[RANK];
  for (long c = 0; c < columns; c++) {
    long first = run.first_partial[r] + c, token = request.query + c / a.heads, head = c % a.heads;
    float maximum = -INFINITY, total = 0;
    for (long part = 0; part < request.parts; part++)
      maximum = larger(maximum, run.partials[first + part * columns].maximum);
    memset(row, 0, sizeof row);
    for (long part = 0; part < request.parts && maximum != -INFINITY; part++) {
      Softmax softmax = run.partials[first + part * columns];
      if (softmax.maximum == -INFINITY) continue;
      float weight = expf(softmax.maximum - maximum);
      total += weight * softmax.total;
      const float* from = run.results + (first + part * columns) * RANK;
      for (int d = 0; d < RANK; d++) row[d] += weight * from[d];
    }
    float inverse = total > 0 ? 1 / total : 0;
    for (int d = 0; d < RANK; d++) row[d] = row[d] * inverse + (a.constant ? a.constant[d] : 0);
    if (a.lse) a.lse[token * a.heads + head] = maximum + logf(total);
    long at = token * a.output_stride + head * RANK;
    write_elements((char*)a.output + at * element_bytes(a.output_type), row, a.output_type, RANK);
  }
}

// Bytes of workspace that a call needs; its address must be a multiple of 64.
EXPORTED int64_t latent_decode_workspace_bytes(const LatentArguments* arguments) {
  return bytes_of_call<LatentDecode>(*arguments);
}

// Bytes that suffice for every call of up to as many requests, and of each so many query tokens and tokens in all.
EXPORTED int64_t latent_decode_largest_workspace_bytes(const LatentArguments* arguments, int64_t query, int64_t longest) {
  return bytes_of_largest<LatentDecode>(*arguments, query, longest);
}

EXPORTED void latent_decode(const LatentArguments* arguments) {
  in_halves<LatentDecode>(*arguments, [](const LatentArguments& a, const Counts& counts) {
    auto run = make_run<LatentDecode>(a, counts);
    if (run.jobs) run_on_threads(work<LatentDecode>, &run, (int)least(a.threads, run.jobs));
  });
}
