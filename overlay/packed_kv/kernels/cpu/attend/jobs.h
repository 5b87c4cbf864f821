// The jobs of a decode call, and the memory that they work in. A job is (request, part of its tokens, KV head). Threads
// take the next job; the last job of a (request, KV head) pair to end merges the parts, in their order.
//
// A thread works in a tile's struct (columns.h); decode.h has attend_part and merge_parts.
#pragma once
#include "../base/threads.h"
#include "requests.h"

// Cuts memory into aligned pieces; with a null start, only counts bytes.
struct Cutter {
  uint8_t* start;
  long used;
  template <class T> T* take(long count) {
    T* piece = start ? (T*)(start + used) : nullptr;
    used += (count * (long)sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

struct Softmax {
  float maximum, total;  // of scores, and of their exponentials
  float first;           // score of token 0, whose V has a mean of its own; -inf: not seen, or V has no means
};

template <class Tile> struct Run {
  const Arguments* a;
  Request* requests;
  int *first_job, *left;  // of each request; jobs of each (request, KV head) that are not done
  Softmax* partials;      // of parts, [part of all requests][KV head][column]
  float* results;         // the same, STORED_DIM floats a column
  long* first_partial;    // of each request
  uint8_t* scratch;
  long scratch_bytes, columns;  // of a thread; most of a job
  int jobs, next_job, next_thread;

  long columns_of(long r) const { return requests[r].tokens * a->group; }
  // The first column of a job among all.
  long partial_of(long r, long part, long head) const {
    return first_partial[r] + (part * a->kv_heads + head) * columns_of(r);
  }
};

// The sizes that decide how much memory a run needs. `partials`: columns of all jobs; `columns`: the most of a job.
struct Counts {
  long requests, heads, jobs, partials, columns;
};

template <class Tile> static Counts count_jobs(const Arguments& a) {
  Counts counts = {a.requests, a.kv_heads, 0, 0, 0};
  for (long r = 0; r < a.requests; r++) {
    auto request = request_of<Tile>(a, r);
    long columns = request.tokens * a.group, jobs = columns ? request.parts * counts.heads : 0;
    counts.jobs += jobs, counts.partials += jobs * columns, counts.columns = most(counts.columns, columns);
  }
  return counts;
}

template <class Tile> static void cut_run(Run<Tile>& run, const Counts& counts, Cutter& from) {
  run.requests = from.take<Request>(counts.requests);
  run.first_job = from.take<int>(counts.requests + 1);
  run.first_partial = from.take<long>(counts.requests + 1);
  run.left = from.take<int>(counts.requests * counts.heads);
  run.partials = from.take<Softmax>(counts.partials);
  run.results = from.take<float>(counts.partials * STORED_DIM);
  Cutter one = {nullptr, 0};
  Tile().cut(*run.a, one, counts.columns);
  run.scratch_bytes = one.used;
  run.scratch = from.take<uint8_t>(one.used * run.a->threads);
  run.columns = counts.columns, run.jobs = (int)counts.jobs;
}

template <class Tile> static void work(void* data) {
  auto& run = *(Run<Tile>*)data;
  Cutter memory = {run.scratch + next_of(&run.next_thread) * run.scratch_bytes, 0};
  Tile tile;
  tile.cut(*run.a, memory, run.columns);
  long heads = run.a->kv_heads, r = 0;
  for (int job; (job = next_of(&run.next_job)) < run.jobs;) {
    while (job >= run.first_job[r + 1]) r++;
    long part = (job - run.first_job[r]) / heads, head = (job - run.first_job[r]) % heads;
    attend_part(run, tile, r, part, head);
    if (__atomic_sub_fetch(&run.left[r * heads + head], 1, __ATOMIC_ACQ_REL) == 0) merge_parts(run, r, head);
  }
}

// A call's run, in its workspace.
template <class Tile> static Run<Tile> make_run(const Arguments& a, const Counts& counts) {
  Run<Tile> run = {};
  run.a = &a;
  Cutter memory = {(uint8_t*)a.workspace, 0};
  cut_run(run, counts, memory);
  long jobs = 0, partials = 0;
  for (long r = 0; r < a.requests; r++) {
    auto request = request_of<Tile>(a, r);
    run.requests[r] = request, run.first_job[r] = (int)jobs, run.first_partial[r] = partials;
    for (long head = 0; head < counts.heads; head++) run.left[r * counts.heads + head] = (int)request.parts;
    long columns = run.columns_of(r), of_request = columns ? request.parts * counts.heads : 0;
    jobs += of_request, partials += of_request * columns;
  }
  run.first_job[a.requests] = (int)jobs;
  return run;
}

template <class Tile> static int64_t bytes_of_run(const Arguments& a, const Counts& counts) {
  Run<Tile> run = {};
  run.a = &a;
  Cutter memory = {nullptr, 0};
  cut_run(run, counts, memory);
  return memory.used;
}

// Limit in bytes of partial results kept at a time. A call of several requests that exceeds it is served in halves,
// each with enough parts for hundreds of threads. Outputs have the same bits, as they depend on the request alone.
constexpr long RESULTS_BYTES = 64l << 20;
constexpr long MOST_PARTIALS = RESULTS_BYTES / (long)(sizeof(Softmax) + sizeof(float) * STORED_DIM);

static Arguments requests_of(Arguments a, long first, long count) {
  a.requests = count, a.query_start += first, a.seq_lens += first, a.block_table += first * a.block_table_stride;
  if (a.ring.data) a.ring_first += first, a.ring_table += first * a.ring_table_stride;
  return a;
}

// Calls serve(arguments, counts) for all requests of a call, in order, with as many at a time as the limit allows.
template <class Tile, class Serve> static void in_halves(const Arguments& a, Serve serve) {
  Counts counts = count_jobs<Tile>(a);
  if (a.requests <= 1 || counts.partials <= MOST_PARTIALS) return serve(a, counts);
  long half = a.requests / 2;
  in_halves<Tile>(requests_of(a, 0, half), serve);
  in_halves<Tile>(requests_of(a, half, a.requests - half), serve);
}

template <class Tile> static int64_t bytes_of_call(const Arguments& a) {
  int64_t bytes = 0;
  in_halves<Tile>(a, [&](const Arguments& some, const Counts& counts) {
    bytes = most(bytes, bytes_of_run<Tile>(some, counts));
  });
  return bytes;
}

// Bytes that suffice for every call of up to `a.requests` requests of up to `query` query tokens and `longest` tokens
// in all. Of `a`, tables of requests are not read.
template <class Tile>
static int64_t bytes_of_largest(const Arguments& a, long query, long longest) {
  int32_t query_start[] = {0, (int32_t)query}, seq_len = 0;
  Arguments one = a;
  one.requests = 1, one.query_start = query_start, one.seq_lens = &seq_len;
  one.ring.data = nullptr;  // tokens in a ring are not read in the pages
  long parts = 1, heads = a.kv_heads, columns = query * a.group;
  for (long tokens = 1; tokens <= longest; tokens += Tile::TOKENS) {
    seq_len = (int32_t)tokens;
    parts = most(parts, request_of<Tile>(one, 0).parts);
  }
  long of_one = parts * heads * columns, partials = most(of_one, least(of_one * a.requests, MOST_PARTIALS));
  return bytes_of_run<Tile>(a, {a.requests, heads, 0, partials, columns});
}
