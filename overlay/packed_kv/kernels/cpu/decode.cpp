// Decode attention over packed pages: decode.py.
//
// A job is (request, part of its tokens, KV head). It takes tiles of TILE tokens for all columns of the KV head at once:
//   K        codes -> 16-bit levels by look-ups in registers, 16-bit products with the queries, 32-bit sums of a group's
//            32 channels, times the group's scales in fp32
//   softmax  online, in fp32; exponentials times V's scales -> 16-bit weights, one factor a tile, group and column
//   V        codes -> 16-bit levels, 16-bit products with the weights, 32-bit sums over the tile, added in fp32
// Integer products are exact, and twice as many an instruction as in fp32; what is rounded is the query and the weights,
// to 1/32767 of the largest. The job that ends last of a request and KV head merges the parts, in their order.
#include "ring.h"
#include "threads.h"

struct Partial {
  float maximum, total;
};

// Memory of a thread, cut from its part of the workspace.
struct Scratch {
  Columns columns;
  Queries queries;
  uint8_t* arranged;
  float *scales, *softmax_factors, *biases;
};

struct Run {
  const Arguments* a;
  Request* requests;
  int *first_job, *left;  // of each request; jobs of each (request, KV head) that are not done
  Partial* partials;      // [part of all requests][KV head][column]
  float* results;         // the same, [STORED_DIM] each
  long* first_partial;    // of each request
  uint8_t* scratch;
  long scratch_bytes, columns;
  int jobs, next_job, next_thread;
};

// Cuts memory into aligned pieces; with a null start, only counts.
struct Cutter {
  uint8_t* start;
  long used;
  template <class T> T* take(long count) {
    T* piece = start ? (T*)(start + used) : nullptr;
    used += (count * (long)sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

static Scratch cut_scratch(Cutter& from, long columns) {
  Scratch s;
  s.columns.count = (int)columns;
  s.queries.plain = from.take<float>(columns * STORED_DIM);
  s.queries.rotated = from.take<float>(columns * STORED_DIM);
  s.columns.queries = s.queries.integers = from.take<int16_t>(columns * STORED_DIM);
  s.columns.factors = s.queries.factors = from.take<float>(columns);
  s.columns.scores = from.take<float>(columns * TILE);
  s.columns.weights = from.take<int16_t>(columns * GROUPS * TILE);
  s.columns.sums = from.take<float>(columns * 2 * STORED_DIM);
  s.columns.ring_sums = from.take<float>(columns * STORED_DIM);
  s.columns.maxima = from.take<float>(columns);
  s.columns.totals = from.take<float>(columns);
  s.columns.weight_factors = from.take<float>(columns * GROUPS);
  s.arranged = from.take<uint8_t>((long)TILE_BLOCKS * ARRANGED_BYTES);
  s.scales = from.take<float>((long)TILE_BLOCKS * GROUPS * MICRO_BLOCK);
  s.softmax_factors = from.take<float>(columns);
  s.biases = from.take<float>(columns);
  return s;
}

static void cut_run(Run& run, Cutter& from) {
  const Arguments& a = *run.a;
  run.requests = from.take<Request>(a.requests);
  run.first_job = from.take<int>(a.requests + 1);
  run.first_partial = from.take<long>(a.requests + 1);
  run.left = from.take<int>(a.requests * a.kv_heads);
  long parts = 0, partials = 0;
  run.columns = 0;
  for (long r = 0; r < a.requests; r++) {
    Request request = request_of(a, r);
    long columns = request.tokens * a.group;
    if (from.start) {
      run.requests[r] = request, run.first_job[r] = (int)(parts * a.kv_heads), run.first_partial[r] = partials;
      for (long head = 0; head < a.kv_heads; head++) run.left[r * a.kv_heads + head] = (int)request.parts;
    }
    if (columns) parts += request.parts, partials += request.parts * a.kv_heads * columns;
    run.columns = most(run.columns, columns);
  }
  if (from.start) run.first_job[a.requests] = (int)(parts * a.kv_heads);
  run.jobs = (int)(parts * a.kv_heads);
  run.partials = from.take<Partial>(partials);
  run.results = from.take<float>(partials * STORED_DIM);
  Cutter one = {nullptr, 0};
  cut_scratch(one, run.columns);
  run.scratch_bytes = one.used;
  run.scratch = from.take<uint8_t>(one.used * a.threads);
}

// --- scores of a tile -----------------------------------------------------------------------------------------------
static inline int place_in_tile(int token) { return token / 16 * 16 + place_of_token(token % 16); }

// Adds to a column's scores its products with K's means. `position`: of tokens by index; `place`: where a score is.
template <class Position, class Place>
static void add_means(const Arguments& a, const Scratch& s, long head, int count, Position position, Place place) {
  for (int column = 0; column < s.columns.count; column++) {
    float* scores = s.columns.scores + (long)column * TILE;
    const float* plain = s.queries.plain + (long)column * STORED_DIM;
    long block = -2;
    float bias = 0;
    for (int i = 0; i < count; i++) {
      long at = position(i), of_token = mean_block_of(a, at);
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

// Tokens first .. first + count - 1 of the pages, of which a column sees range(column).
static void attend_tile(const Arguments& a, const Request& request, long r, long head, const Scratch& s, long first,
                        const uint8_t* const* micro_blocks, int blocks) {
  score_tile(s.columns, micro_blocks, blocks);
  int count = blocks * MICRO_BLOCK;
  if (a.means) {
    auto position = [&](int i) { return shard_position(a, first + i); };
    add_means(a, s, head, count, position, place_in_tile);
  }
  if (a.soft_cap != 0) cap_scores(s.columns, count, (float)a.soft_cap);
  for (int column = 0; column < s.columns.count; column++) {
    Range range = in_pages(a, r, request.position + column / a.group);
    float* scores = s.columns.scores + (long)column * TILE;
    for (int i = 0; i < least(count, range.first - first); i++) scores[place_in_tile(i)] = -INFINITY;
    for (int i = (int)most(0, range.end - first); i < count; i++) scores[place_in_tile(i)] = -INFINITY;
  }
  add_tile(s.columns, micro_blocks, blocks, s.arranged, s.scales, s.softmax_factors);
}

static void attend_pages(const Arguments& a, const Request& request, long r, long head, const Scratch& s, Range part) {
  const uint8_t* micro_blocks[2 * TILE_BLOCKS];
  const int32_t* table = a.block_table + r * a.block_table_stride;
  const uint8_t* pages = a.cache + head * a.cache_head_stride;
  for (long tile = part.first / TILE * TILE; tile < part.end; tile += TILE) {
    long first = most(tile, part.first / MICRO_BLOCK * MICRO_BLOCK), end = least(tile + TILE, part.end);
    int blocks = (int)((end - first + MICRO_BLOCK - 1) / MICRO_BLOCK);
    long later = least(part.end, tile + 2 * TILE);
    int ahead = (int)((later - first + MICRO_BLOCK - 1) / MICRO_BLOCK);
    for (int i = 0; i < ahead; i++) {
      long token = first + (long)i * MICRO_BLOCK;
      micro_blocks[i] = pages + table[token / a.block_size] * a.cache_block_stride +
                        token % a.block_size / MICRO_BLOCK * MICRO_BLOCK_BYTES;
    }
    for (int i = blocks; i < ahead; i++)
      for (int at = 0; at < MICRO_BLOCK_BYTES; at += 64) __builtin_prefetch(micro_blocks[i] + at, 0, 2);
    attend_tile(a, request, r, head, s, first, micro_blocks, blocks);
  }
}

static void attend_ring(const Arguments& a, const Request& request, long r, long head, const Scratch& s) {
  if (!a.ring) return;
  Range all = in_ring(a, r, request.position);  // the first query token sees the oldest one
  all.end = request.position + request.tokens;
  const uint8_t* slots[TILE];
  for (long first = all.first; first < all.end; first += TILE) {
    int count = (int)least(TILE, all.end - first), padded = (count + 15) / 16 * 16;
    for (int i = 0; i < count; i++) slots[i] = ring_slot(a, r, head, first + i);
    for_blocks(s.columns.count, [&](auto block, int column) {
      float* scores = s.columns.scores + (long)column * TILE;
      for (int i = 0; i < count; i++)
        score_slot<block.value>(slots[i], s.queries.rotated + (long)column * STORED_DIM, scores + i);
    });
    auto as_it_is = [](int i) { return i; };
    if (a.means) add_means(a, s, head, count, [&](int i) { return first + i; }, as_it_is);
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
static long partial_of(const Run& run, long r, long part, long head) {
  const Request& request = run.requests[r];
  return run.first_partial[r] + (part * run.a->kv_heads + head) * request.tokens * run.a->group;
}

static void attend_part(const Run& run, Scratch s, long r, long part, long head) {
  const Arguments& a = *run.a;
  const Request& request = run.requests[r];
  long columns = request.tokens * a.group;
  s.columns.count = (int)columns;
  read_queries(a, request, head, s.queries);
  memset(s.columns.sums, 0, sizeof(float) * columns * 2 * STORED_DIM);
  memset(s.columns.ring_sums, 0, sizeof(float) * columns * STORED_DIM);
  for (long c = 0; c < columns; c++) s.columns.maxima[c] = -INFINITY, s.columns.totals[c] = 0;
  long start = request.pages.first / TILE * TILE + part * request.part_tokens;
  Range tokens = {most(start, request.pages.first), least(start + request.part_tokens, request.pages.end)};
  attend_pages(a, request, r, head, s, tokens);
  if (part == request.parts - 1) attend_ring(a, request, r, head, s);
  long partial = partial_of(run, r, part, head);
  for (long c = 0; c < columns; c++) {
    float* result = run.results + (partial + c) * STORED_DIM;
    for (int i = 0; i < STORED_DIM; i++)
      result[i / GROUP_SIZE * GROUP_SIZE + ring_value_channel(i % GROUP_SIZE)] =
          s.columns.ring_sums[c * STORED_DIM + i];
    collect_sums(s.columns, (int)c, result);
    run.partials[partial + c] = {s.columns.maxima[c], s.columns.totals[c]};
  }
}

static void merge_parts(const Run& run, long r, long head) {
  const Arguments& a = *run.a;
  const Request& request = run.requests[r];
  const int32_t* channels = a.value_channels + head * a.value_channels_stride;
  const float* value_scale = a.value_scale ? a.value_scale + head * a.value_scale_stride : nullptr;
  alignas(64) float out[STORED_DIM], ordered[STORED_DIM];
  for (long c = 0; c < request.tokens * a.group; c++) {
    long token = request.query + c / a.group, query_head = head * a.group + c % a.group;
    float maximum = a.sinks ? a.sinks[query_head] : -INFINITY, total = 0;
    for (long part = 0; part < request.parts; part++)
      maximum = fmaxf(maximum, run.partials[partial_of(run, r, part, head) + c].maximum);
    memset(out, 0, sizeof out);
    if (a.sinks && maximum != -INFINITY) total = expf(a.sinks[query_head] - maximum);
    for (long part = 0; part < request.parts && maximum != -INFINITY; part++) {
      long partial = partial_of(run, r, part, head) + c;
      const float* result = run.results + partial * STORED_DIM;
      float weight = expf(run.partials[partial].maximum - maximum);
      total += weight * run.partials[partial].total;
      for (int d = 0; d < STORED_DIM; d++) out[d] += weight * result[d];
    }
    float inverse = total > 0 ? 1 / total : 0;
    for (int d = 0; d < STORED_DIM; d++) out[d] *= inverse;
    unrotate(out, a.rotation_constants);
    for (int d = 0; d < STORED_DIM; d++) ordered[channels[d]] = out[d];
    if (value_scale)
      for (int d = 0; d < a.value_dim; d++) ordered[d] /= value_scale[d];
    long at = token * a.output_stride + query_head * a.output_head_stride;
    write_elements((char*)a.output + at * element_bytes(a.output_type), ordered, a.output_type, a.value_dim);
    if (a.lse) a.lse[token * a.kv_heads * a.group + query_head] = maximum + logf(total);
  }
}

static void work(void* data) {
  Run& run = *(Run*)data;
  const Arguments& a = *run.a;
  Cutter memory = {run.scratch + next_of(&run.next_thread) * run.scratch_bytes, 0};
  Scratch scratch = cut_scratch(memory, run.columns);
  long r = 0;
  for (int job; (job = next_of(&run.next_job)) < run.jobs;) {
    while (job >= run.first_job[r + 1]) r++;
    long part = (job - run.first_job[r]) / a.kv_heads, head = (job - run.first_job[r]) % a.kv_heads;
    attend_part(run, scratch, r, part, head);
    if (__atomic_sub_fetch(&run.left[r * a.kv_heads + head], 1, __ATOMIC_ACQ_REL) == 0) merge_parts(run, r, head);
  }
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Bytes of workspace that a call needs; its address must be a multiple of 64.
EXPORTED int64_t decode_workspace_bytes(const Arguments* arguments) {
  Run run = {};
  run.a = arguments;
  Cutter counted = {nullptr, 0};
  cut_run(run, counted);
  return counted.used;
}

EXPORTED void decode(const Arguments* arguments) {
  Run run = {};
  run.a = arguments;
  Cutter memory = {(uint8_t*)arguments->workspace, 0};
  cut_run(run, memory);
  if (run.jobs == 0) return;
  run_on_threads(work, &run, (int)least(arguments->threads, run.jobs));
}
