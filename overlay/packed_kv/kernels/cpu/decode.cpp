// Decode attention over packed pages: decode.py.
//
// A job is (request, part of its tokens, KV head). It takes TILE tokens at a time for all columns of the KV head:
//   K        codes -> 16-bit levels by look-ups in registers, 16-bit products with the queries, 32-bit sums of the 32
//            channels of a group, times the group's scales in fp32
//   softmax  online, in fp32; exponentials times V's scales -> 16-bit weights, one factor a tile, group and column
//   V        codes -> 16-bit levels, 16-bit products with the weights, 32-bit sums over the tile, added in fp32
// Integer products are exact, and twice as many an instruction as in fp32; queries and weights are rounded, to 1/32767
// of the largest.
#include "ring.h"

// Memory of a thread, cut from its part of the workspace.
struct Scratch {
  Columns columns;
  Queries queries;
  uint8_t* arranged;
  float *scales, *softmax_factors;
  Range* ranges;  // in the pages, by query token
};

struct Decode;
using DecodeRun = Run<Decode>;

static Scratch cut_scratch(const Arguments& a, Cutter& from, long columns) {
  Scratch s = {};
  if (a.means) s.queries.plain = from.take<float>(columns * STORED_DIM);
  if (a.ring) s.queries.rotated = from.take<float>(columns * STORED_DIM);
  s.columns.queries = s.queries.integers = from.take<int16_t>(columns * STORED_DIM);
  s.columns.factors = s.queries.factors = from.take<float>(columns);
  s.columns.scores = from.take<float>(columns * TILE);
  s.columns.weights = from.take<int16_t>(columns * GROUPS * TILE);
  s.columns.weight_factors = from.take<float>(columns * GROUPS);
  s.arranged = from.take<uint8_t>((long)TILE_BLOCKS * ARRANGED_BYTES);
  s.scales = from.take<float>((long)TILE_BLOCKS * GROUPS * MICRO_BLOCK);
  s.softmax_factors = from.take<float>(columns);
  s.ranges = from.take<Range>(columns);
  return s;
}

// --- scores of a tile -----------------------------------------------------------------------------------------------
static inline int place_in_tile(int token) { return token / 16 * 16 + place_of_token(token % 16); }

// Adds to a column's scores its products with K's means, of `count` tokens from `first` on. `place`: where a score is.
template <class Place>
static void add_means(const Arguments& a, const Scratch& s, long head, long first, int count, Place place) {
  for (int column = 0; column < s.columns.count; column++) {
    float* scores = s.columns.scores + (long)column * TILE;
    const float* plain = s.queries.plain + (long)column * STORED_DIM;
    long block = -2;
    float bias = 0;
    for (int i = 0; i < count; i++) {
      long at = first + i, of_token = mean_block_of(a, at);
      if (of_token != block) bias = product_with_mean(a, head, plain, at), block = of_token;
      scores[place(i)] += bias;
    }
  }
}

static void cap_scores(const Columns& columns, int count, float cap) {
  for (int column = 0; column < columns.count; column++) {
    float* scores = columns.scores + (long)column * TILE;
    for (int i = 0; i < count; i += VECTOR_FLOATS) {
      Floats x = load_floats(scores + i) * broadcast(1 / cap);
      Floats size = max_floats(x, broadcast(0) - x), e = exp_of_negative(size * broadcast(-2));
      Floats tanh = (broadcast(1) - e) / (broadcast(1) + e);
      // tanh has the sign of x: x / |x| is 1 or -1 but for 0, where tanh is 0, too.
      Floats sign = x / max_floats(size, broadcast(1e-30f));
      store_floats(scores + i, tanh * sign * broadcast(cap));
    }
  }
}

// Attends to `blocks` micro-blocks of the pages from token `first` on.
static void attend_tile(const Arguments& a, long head, const Scratch& s, long first, const uint8_t* const* micro_blocks,
                        int blocks, int known) {
  score_tile(s.columns, micro_blocks, blocks, known);
  int count = blocks * MICRO_BLOCK;
  if (a.means) add_means(a, s, head, first, count, place_in_tile);
  if (a.soft_cap != 0) cap_scores(s.columns, count, (float)a.soft_cap);
  for (int column = 0; column < s.columns.count; column++) {
    Range range = s.ranges[column / a.group];
    float* scores = s.columns.scores + (long)column * TILE;
    for (int i = 0; i < least(count, range.first - first); i++) scores[place_in_tile(i)] = -INFINITY;
    for (int i = (int)most(0, range.end - first); i < count; i++) scores[place_in_tile(i)] = -INFINITY;
  }
  add_tile(s.columns, micro_blocks, blocks, s.arranged, s.scales, s.softmax_factors);
}

static void attend_pages(const Arguments& a, long r, long head, const Scratch& s, Range part) {
  const uint8_t* micro_blocks[TILE_BLOCKS + AHEAD];
  const int32_t* table = a.block_table + r * a.block_table_stride;
  const uint8_t* pages = a.cache + head * a.cache_head_stride;
  for (long tile = part.first / TILE * TILE; tile < part.end; tile += TILE) {
    long first = most(tile, part.first / MICRO_BLOCK * MICRO_BLOCK), end = least(tile + TILE, part.end);
    int blocks = (int)((end - first + MICRO_BLOCK - 1) / MICRO_BLOCK);
    long later = least(part.end, tile + TILE + AHEAD * MICRO_BLOCK);
    int known = (int)((later - first + MICRO_BLOCK - 1) / MICRO_BLOCK);
    long block = first / a.block_size, in_block = first % a.block_size;
    for (int i = 0; i < known; i++, in_block += MICRO_BLOCK) {
      if (in_block == a.block_size) block++, in_block = 0;
      micro_blocks[i] = pages + table[block] * a.cache_block_stride + in_block / MICRO_BLOCK * MICRO_BLOCK_BYTES;
    }
    if (tile <= part.first)
      for (int i = 0; i < AHEAD && i < known; i++) prefetch(micro_blocks[i]);
    attend_tile(a, head, s, first, micro_blocks, blocks, known);
  }
}

// Asks for the ring's first tokens, which the part reads behind its pages.
static void prefetch_ring(const Arguments& a, const Request& request, long r, long head) {
  const uint8_t* slots[TILE];
  Range all = in_ring(a, r, request.position);
  int count = (int)least(TILE, request.position + request.tokens - all.first);
  ring_slots(a, r, head, all.first, count, slots);
  for (int i = 0; i < count; i++)
    for (int at = 0; at < RING_SLOT_BYTES; at += 64) __builtin_prefetch(slots[i] + at, 0, 2);
}

static void attend_ring(const Arguments& a, const Request& request, long r, long head, const Scratch& s) {
  if (!a.ring) return;
  Range all = in_ring(a, r, request.position);  // the first query token sees the oldest one
  all.end = request.position + request.tokens;
  const uint8_t* slots[TILE];
  for (long first = all.first; first < all.end; first += TILE) {
    int count = (int)least(TILE, all.end - first), padded = (count + 15) / 16 * 16;
    ring_slots(a, r, head, first, count, slots);
    for_blocks(s.columns.count, [&](auto block, int column) {
      float* scores = s.columns.scores + (long)column * TILE;
      for (int i = 0; i < count; i++)
        score_slot<block.value>(slots[i], s.queries.rotated + (long)column * STORED_DIM, scores + i);
    });
    auto as_it_is = [](int i) { return i; };
    if (a.means) add_means(a, s, head, first, count, as_it_is);
    for (int column = 0; column < s.columns.count; column++)
      for (int i = count; i < padded; i++) s.columns.scores[(long)column * TILE + i] = 0;
    if (a.soft_cap != 0) cap_scores(s.columns, padded, (float)a.soft_cap);
    for (int column = 0; column < s.columns.count; column++) {
      Range range = in_ring(a, r, request.position + column / a.group);
      float* scores = s.columns.scores + (long)column * TILE;
      for (int i = 0; i < padded; i++)
        if (first + i < range.first || first + i >= range.end) scores[i] = -INFINITY;
      s.softmax_factors[column] = add_to_softmax(s.columns, column, padded);
      if (s.softmax_factors[column] == 0)
        for (int i = 0; i < padded; i++) scores[i] = 0;
    }
    for_blocks(s.columns.count, [&](auto block, int column) {
      const float* scores = s.columns.scores + (long)column * TILE;
      add_slots<block.value>(slots, count, scores, s.softmax_factors + column,
                             s.columns.ring_sums + (long)column * STORED_DIM);
    });
  }
}

// --- jobs -----------------------------------------------------------------------------------------------------------
struct Decode {
  using Arguments = ::Arguments;
  using Request = ::Request;
  using Scratch = ::Scratch;
  using Softmax = ::Softmax;
  static constexpr int RESULT = 3 * STORED_DIM;  // its sums, then its sums of the ring
  static constexpr int TILE = ::TILE;
  static long heads(const Arguments& a) { return a.kv_heads; }
  static long group(const Arguments& a) { return a.group; }
  static Request request_of(const Arguments& a, long r) { return ::request_of(a, r); }
  static Scratch cut_scratch(const Arguments& a, Cutter& from, long columns) { return ::cut_scratch(a, from, columns); }
  static void attend_part(const DecodeRun& run, Scratch s, long r, long part, long head);
  static void merge_parts(const DecodeRun& run, long r, long head);
};

// Where a part's results are: its maxima, totals and sums are made in place.
static void place_results(const DecodeRun& run, Columns& columns, long r, long part, long head) {
  long first = run.partial_of(r, part, head), count = run.columns_of(r);
  columns.count = (int)count;
  columns.softmax = run.partials + first;
  columns.sums = run.results + first * Decode::RESULT;
  columns.ring_sums = run.a->ring ? columns.sums + count * 2 * STORED_DIM : nullptr;
}

void Decode::attend_part(const DecodeRun& run, Scratch s, long r, long part, long head) {
  const Arguments& a = *run.a;
  const Request& request = run.requests[r];
  place_results(run, s.columns, r, part, head);
  if (a.ring && part == request.parts - 1) prefetch_ring(a, request, r, head);
  read_queries(a, request, head, s.queries);
  for (long i = 0; i < request.tokens; i++) s.ranges[i] = in_pages(a, r, request.position + i);
  memset(s.columns.sums, 0, sizeof(float) * s.columns.count * (a.ring ? RESULT : 2 * STORED_DIM));
  for (int c = 0; c < s.columns.count; c++) s.columns.softmax[c] = {-INFINITY, 0};
  long start = request.pages.first / TILE * TILE + part * request.part_tokens;
  Range tokens = {most(start, request.pages.first), least(start + request.part_tokens, request.pages.end)};
  attend_pages(a, r, head, s, tokens);
  if (part == request.parts - 1) attend_ring(a, request, r, head, s);
}

// Adds part 1 and on to part 0, in its place. Columns that see nothing keep a maximum of -infinity and a total of 0.
static void add_parts(const DecodeRun& run, Columns& to, long r, long head) {
  for (long part = 1; part < run.requests[r].parts; part++) {
    Columns from = to;
    place_results(run, from, r, part, head);
    for (int c = 0; c < to.count; c++) {
      Softmax &into = to.softmax[c], &part_softmax = from.softmax[c];
      float maximum = larger(into.maximum, part_softmax.maximum);
      if (maximum == -INFINITY) continue;
      float old = expf(into.maximum - maximum), added = expf(part_softmax.maximum - maximum);
      into = {maximum, old * into.total + added * part_softmax.total};
      add_sums(to, from, c, old, added);
    }
  }
}

// Turns the sums of a request and KV head into outputs, four columns at once.
static void write_outputs(const DecodeRun& run, Columns& columns, long r, long head) {
  const Arguments& a = *run.a;
  const int32_t* channels = a.value_channels + head * a.value_channels_stride;
  const float* value_scale = a.value_scale ? a.value_scale + head * a.value_scale_stride : nullptr;
  alignas(64) Four sums[STORED_DIM];
  alignas(64) float row[STORED_DIM];
  for (int first = 0; first < columns.count; first += BLOCK) {
    int width = (int)least(BLOCK, columns.count - first);
    memset(sums, 0, sizeof sums);
    Four inverse = {};
    for (int c = 0; c < width; c++) {
      long column = first + c, query_head = head * a.group + column % a.group;
      Softmax softmax = columns.softmax[column];
      float maximum = larger(softmax.maximum, a.sinks ? a.sinks[query_head] : -INFINITY), total = 0;
      if (softmax.maximum != -INFINITY) {
        float shrink = expf(softmax.maximum - maximum);
        total = shrink * softmax.total;
        inverse[c] = shrink;
      }
      if (a.sinks && maximum != -INFINITY) total += expf(a.sinks[query_head] - maximum);
      inverse[c] = total > 0 ? inverse[c] / total : 0;
      collect_sums<BLOCK>(columns, (int)column, (float*)sums + c);
      for (int i = 0; columns.ring_sums && i < STORED_DIM; i++) {
        int channel = i / GROUP_SIZE * GROUP_SIZE + ring_value_channel(i % GROUP_SIZE);
        ((float*)sums)[BLOCK * channel + c] += columns.ring_sums[column * STORED_DIM + i];
      }
    }
    for (int d = 0; d < STORED_DIM; d++) sums[d] *= inverse;
    unrotate(sums, a.rotation_constants);
    for (int c = 0; c < width; c++) {
      long column = first + c, token = run.requests[r].query + column / a.group;
      for (int d = 0; d < STORED_DIM; d++) row[channels[d]] = sums[d][c];
      if (value_scale)
        for (int d = 0; d < a.value_dim; d++) row[d] /= value_scale[d];
      long at = token * a.output_stride + (head * a.group + column % a.group) * a.output_head_stride;
      write_elements((char*)a.output + at * element_bytes(a.output_type), row, a.output_type, a.value_dim);
    }
  }
}

void Decode::merge_parts(const DecodeRun& run, long r, long head) {
  Columns columns = {};
  place_results(run, columns, r, 0, head);
  add_parts(run, columns, r, head);
  write_outputs(run, columns, r, head);
}

// A region of several threads costs some 5 us where cores are free, more where they are not. No thread gets less work.
constexpr long THREAD_NS = 12000;
static long estimated_ns(const DecodeRun& run) {  // with AVX-512, 16 ns a token of 128 channels and 4 columns
  long ns = 0;
  for (long r = 0; r < run.a->requests; r++) {
    const Request& request = run.requests[r];
    long blocks = (request.tokens * run.a->group + BLOCK - 1) / BLOCK;
    ns += (request.pages.end - request.pages.first) * run.a->kv_heads * blocks * STORED_DIM / 8;
  }
  return ns;
}

// Bytes of workspace that a call needs; its address must be a multiple of 64.
EXPORTED int64_t decode_workspace_bytes(const Arguments* arguments) { return bytes_of_call<Decode>(*arguments); }

// Bytes that suffice for every call of up to as many requests, and of each so many query tokens and tokens in all.
EXPORTED int64_t decode_largest_workspace_bytes(const Arguments* arguments, int64_t query, int64_t longest) {
  return bytes_of_largest<Decode>(*arguments, query, longest);
}

EXPORTED void decode(const Arguments* arguments) {
  in_halves<Decode>(*arguments, [](const Arguments& a, const Counts& counts) {
    DecodeRun run = make_run<Decode>(a, counts);
    if (run.jobs == 0) return;
    long threads = most(1, least(least(a.threads, run.jobs), estimated_ns(run) / THREAD_NS));
    run_on_threads(work<Decode>, &run, (int)threads);
  });
}
