// Runs work on PyTorch's own OpenMP threads, whichever OpenMP library that is: a second pool would spin against the
// first, and leave the cores to which vLLM has bound it. libgomp, libomp and libiomp5 all have GOMP_parallel.
#pragma once
#include <dlfcn.h>

typedef void (*Work)(void*);

// Calls work(data) on `threads` threads of the pool, each once; on the calling one where there is no pool. Threads take
// work by an atomic counter, so any number of threads does all of it.
static inline void run_on_threads(Work work, void* data, int threads) {
  typedef void (*Parallel)(Work, void*, unsigned, unsigned);
  static Parallel known;  // it is looked for in all libraries, which a small model's step would notice in each call
  if (threads > 1) {
    Parallel parallel = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!parallel) {
      parallel = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
      __atomic_store_n(&known, parallel, __ATOMIC_RELAXED);
    }
    if (parallel) return parallel(work, data, (unsigned)threads, 0);
  }
  work(data);
}

// The next piece of work, from 0 on.
static inline int next_of(int* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// Calls body(next) on up to `threads` threads; next() is a number of 0 .. count - 1 that no other call got, then -1.
template <class Body> static void hand_out(int count, int threads, Body body) {
  struct Handed {
    Body& body;
    int count, number;
    static void run(void* self) {
      Handed& work = *(Handed*)self;
      work.body([&] {
        int i = next_of(&work.number);
        return i < work.count ? i : -1;
      });
    }
  } work{body, count, 0};
  run_on_threads(Handed::run, &work, count < threads ? count : threads);
}
