// The jobs of a decode call, and the memory that they work in. A job is (request, part of its tokens, KV head). Threads
// take the next one; the job that ends last of a request and KV head merges the parts, in their order.
//
// A kernel is a struct of types and static functions:
//   Arguments, Request, Scratch   Request has `tokens` (of the query) and `parts`. Both depend on the request alone, so
//                                 outputs have the same bits whatever else is served, by however many threads
//   Softmax                       a part's maximum and total, a column
//   RESULT                        floats of a part's results, a column
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

template <class Kernel> static void cut_run(Run<Kernel>& run, Cutter& from) {
  const auto& a = *run.a;
  long heads = Kernel::heads(a), jobs = 0, partials = 0;
  run.requests = from.take<typename Kernel::Request>(a.requests);
  run.first_job = from.take<int>(a.requests + 1);
  run.first_partial = from.take<long>(a.requests + 1);
  run.left = from.take<int>(a.requests * heads);
  run.columns = 0;
  for (long r = 0; r < a.requests; r++) {
    auto request = Kernel::request_of(a, r);
    long columns = request.tokens * Kernel::group(a);
    if (from.start) {
      run.requests[r] = request, run.first_job[r] = (int)jobs, run.first_partial[r] = partials;
      for (long head = 0; head < heads; head++) run.left[r * heads + head] = (int)request.parts;
    }
    if (columns) jobs += request.parts * heads, partials += request.parts * heads * columns;
    run.columns = most(run.columns, columns);
  }
  if (from.start) run.first_job[a.requests] = (int)jobs;
  run.jobs = (int)jobs;
  run.partials = from.take<typename Kernel::Softmax>(partials);
  run.results = from.take<float>(partials * Kernel::RESULT);
  Cutter one = {nullptr, 0};
  Kernel::cut_scratch(a, one, run.columns);
  run.scratch_bytes = one.used;
  run.scratch = from.take<uint8_t>(one.used * a.threads);
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

// A call's run, in a workspace whose address is a multiple of 64; with a null workspace, `used` counts its bytes.
template <class Kernel>
static Run<Kernel> make_run(const typename Kernel::Arguments& a, void* workspace, long* used = nullptr) {
  Run<Kernel> run = {};
  run.a = &a;
  Cutter memory = {(uint8_t*)workspace, 0};
  cut_run(run, memory);
  if (used) *used = memory.used;
  return run;
}

template <class Kernel> static int64_t bytes_of_run(const typename Kernel::Arguments& a) {
  long used;
  make_run<Kernel>(a, nullptr, &used);
  return used;
}

#define EXPORTED extern "C" __attribute__((visibility("default")))
