// The jobs of a decode call, and the memory that they work in. A job is (request, part of its tokens, KV head). Threads
// take the next one; the job that ends last of a request and KV head merges the parts, in their order.
//
// A kernel is a struct of types and static functions:
//   Arguments, Request, Scratch   Request has `tokens` (of the query) and `parts`. Both depend on the request alone, so
//                                 outputs have the same bits whatever else is served, by however many threads
//   Softmax                       a part's maximum and total, a column
//   RESULT                        floats of a part's results, a column
//   TILE                          tokens: more parts than before are first reached one token behind a multiple of it
//   heads(a), group(a)            KV heads; columns of a query token and KV head
//   request_of(a, r), cut_scratch(a, cutter, columns)
//   attend_part(run, scratch, r, part, head), merge_parts(run, r, head)
#pragma once
#include <stdint.h>

#include "threads.h"

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }

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

template <class Kernel> struct Run {
  const typename Kernel::Arguments* a;
  typename Kernel::Request* requests;
  int *first_job, *left;               // of each request; jobs of each (request, KV head) that are not done
  typename Kernel::Softmax* partials;  // [part of all requests][KV head][column]
  float* results;                      // the same, RESULT floats a column
  long* first_partial;                 // of each request
  uint8_t* scratch;
  long scratch_bytes, columns;  // of a thread; most of a job
  int jobs, next_job, next_thread;

  long columns_of(long r) const { return requests[r].tokens * Kernel::group(*a); }
  // The first column of a job among all.
  long partial_of(long r, long part, long head) const {
    return first_partial[r] + (part * Kernel::heads(*a) + head) * columns_of(r);
  }
};

// What decides how much memory a run needs. `partials`: columns of all jobs; `columns`: most of a job.
struct Counts {
  long requests, heads, jobs, partials, columns;
};

template <class Kernel> static Counts count_jobs(const typename Kernel::Arguments& a) {
  Counts counts = {a.requests, Kernel::heads(a), 0, 0, 0};
  for (long r = 0; r < a.requests; r++) {
    auto request = Kernel::request_of(a, r);
    long columns = request.tokens * Kernel::group(a), jobs = columns ? request.parts * counts.heads : 0;
    counts.jobs += jobs, counts.partials += jobs * columns, counts.columns = most(counts.columns, columns);
  }
  return counts;
}

template <class Kernel> static void cut_run(Run<Kernel>& run, const Counts& counts, Cutter& from) {
  run.requests = from.take<typename Kernel::Request>(counts.requests);
  run.first_job = from.take<int>(counts.requests + 1);
  run.first_partial = from.take<long>(counts.requests + 1);
  run.left = from.take<int>(counts.requests * counts.heads);
  run.partials = from.take<typename Kernel::Softmax>(counts.partials);
  run.results = from.take<float>(counts.partials * Kernel::RESULT);
  Cutter one = {nullptr, 0};
  Kernel::cut_scratch(*run.a, one, counts.columns);
  run.scratch_bytes = one.used;
  run.scratch = from.take<uint8_t>(one.used * run.a->threads);
  run.columns = counts.columns, run.jobs = (int)counts.jobs;
}

template <class Kernel> static void work(void* data) {
  auto& run = *(Run<Kernel>*)data;
  Cutter memory = {run.scratch + next_of(&run.next_thread) * run.scratch_bytes, 0};
  auto scratch = Kernel::cut_scratch(*run.a, memory, run.columns);
  long heads = Kernel::heads(*run.a), r = 0;
  for (int job; (job = next_of(&run.next_job)) < run.jobs;) {
    while (job >= run.first_job[r + 1]) r++;
    long part = (job - run.first_job[r]) / heads, head = (job - run.first_job[r]) % heads;
    Kernel::attend_part(run, scratch, r, part, head);
    if (__atomic_sub_fetch(&run.left[r * heads + head], 1, __ATOMIC_ACQ_REL) == 0) Kernel::merge_parts(run, r, head);
  }
}

// A call's run, in its workspace.
template <class Kernel> static Run<Kernel> make_run(const typename Kernel::Arguments& a, const Counts& counts) {
  Run<Kernel> run = {};
  run.a = &a;
  Cutter memory = {(uint8_t*)a.workspace, 0};
  cut_run(run, counts, memory);
  long jobs = 0, partials = 0;
  for (long r = 0; r < a.requests; r++) {
    auto request = Kernel::request_of(a, r);
    run.requests[r] = request, run.first_job[r] = (int)jobs, run.first_partial[r] = partials;
    for (long head = 0; head < counts.heads; head++) run.left[r * counts.heads + head] = (int)request.parts;
    long columns = run.columns_of(r), of_request = columns ? request.parts * counts.heads : 0;
    jobs += of_request, partials += of_request * columns;
  }
  run.first_job[a.requests] = (int)jobs;
  return run;
}

template <class Kernel> static int64_t bytes_of_run(const typename Kernel::Arguments& a, const Counts& counts) {
  Run<Kernel> run = {};
  run.a = &a;
  Cutter memory = {nullptr, 0};
  cut_run(run, counts, memory);
  return memory.used;
}

// Results of parts that are kept at a time, in bytes. A call that has more, of several requests, is served in halves,
// each with results enough for hundreds of threads. Outputs have the same bits, as they depend on the request alone.
constexpr long RESULTS_BYTES = 64l << 20;
template <class Kernel> static constexpr long most_partials() {
  return RESULTS_BYTES / (long)(sizeof(typename Kernel::Softmax) + sizeof(float) * Kernel::RESULT);
}

template <class Arguments> static Arguments requests_of(Arguments a, long first, long count) {
  a.requests = count, a.query_start += first, a.seq_lens += first, a.block_table += first * a.block_table_stride;
  if (a.ring) a.ring_first += first, a.ring_table += first * a.ring_table_stride;
  return a;
}

// Calls serve(arguments, counts) with all requests of a call, in their order, as many at a time as is allowed.
template <class Kernel, class Serve> static void in_halves(const typename Kernel::Arguments& a, Serve serve) {
  Counts counts = count_jobs<Kernel>(a);
  if (a.requests <= 1 || counts.partials <= most_partials<Kernel>()) return serve(a, counts);
  long half = a.requests / 2;
  in_halves<Kernel>(requests_of(a, 0, half), serve);
  in_halves<Kernel>(requests_of(a, half, a.requests - half), serve);
}

template <class Kernel> static int64_t bytes_of_call(const typename Kernel::Arguments& a) {
  int64_t bytes = 0;
  in_halves<Kernel>(a, [&](const auto& some, const Counts& counts) {
    bytes = most(bytes, bytes_of_run<Kernel>(some, counts));
  });
  return bytes;
}

// Bytes that suffice for every call of up to `a.requests` requests of up to `query` query tokens and `longest` tokens
// in all. Of `a`, tables of requests are not read.
template <class Kernel>
static int64_t bytes_of_largest(const typename Kernel::Arguments& a, long query, long longest) {
  int32_t query_start[] = {0, (int32_t)query}, seq_len = 0;
  auto one = a;
  one.requests = 1, one.query_start = query_start, one.seq_lens = &seq_len;
  one.ring = nullptr;  // what lies in a ring is not in the pages
  long parts = 1, heads = Kernel::heads(a), columns = query * Kernel::group(a);
  for (long tokens = 1; tokens <= longest; tokens += Kernel::TILE) {
    seq_len = (int32_t)tokens;
    parts = most(parts, Kernel::request_of(one, 0).parts);
  }
  long of_one = parts * heads * columns, partials = most(of_one, least(of_one * a.requests, most_partials<Kernel>()));
  return bytes_of_run<Kernel>(a, {a.requests, heads, 0, partials, columns});
}

#define EXPORTED extern "C" __attribute__((visibility("default")))
