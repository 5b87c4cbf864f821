// The kernel's instructions on a CPU, one lane after the other: stands in for kernels/cuda/ptx.cuh, in g++.
//
// Each thread of a block is a fiber. An operation of a whole warp or block waits until all its lanes have come, and
// fails if they came to different ones. Bulk copies arrive as late as they may, at the wait for their barrier, and others
// at the thread's own wait; until then their target is poison, as is shared memory that nothing wrote. That of barriers
// must stay so.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>  // <algorithm> and <functional> take longer to compile than a kernel
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE inline
#define OFFSET_OF __builtin_offsetof
#define AT(MEMBER) OFFSET_OF(SharedMemory, MEMBER)
#define BLOCK_OF(KERNEL, THREADS, BYTES) static const u32 KERNEL##_block[] = {THREADS, BYTES}
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
using std::max;
using std::min;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Dim3 { u32 x, y, z; };
static Dim3 threadIdx, blockIdx, gridDim;

// ---- fibers

struct Meeting {  // of a warp, or of a block
    int arrived = 0, generation = 0, operation = 0;
    u32 in[32][8], out[32][4];
};
struct Copy {  // to an address of shared memory; of zeros where there is no source
    u32 target;
    const void* source;
    u32 bytes;
    void run() const;
};
struct Fiber {
    ucontext_t begin;
    jmp_buf left;
    bool begun, done, waited;  // waited: for the kernel before
    std::vector<Copy> copies;
};
struct Barrier {
    int arrivals, completed = 0, arrived = 0;
    u32 expected = 0, started = 0;
    std::vector<Copy> copies;
};

static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting whole_block;
static std::vector<u8> block_memory;
constexpr u8 POISON = 0xEE;
static std::map<u32, Barrier> barriers;
static jmp_buf scheduler;
static int running;

static void fail(const char* what) {
    fprintf(stderr, "emulator: %s (thread %d of block %u %u %u)\n", what, running, blockIdx.x, blockIdx.y, blockIdx.z);
    abort();
}
// Fibers change places by setjmp and longjmp: swapcontext would ask the kernel for the signal mask each time.
static void yield() {
    if (!_setjmp(fibers[running].left)) _longjmp(scheduler, 1);
}
static void end_fiber() {
    fibers[running].done = true;
    _longjmp(scheduler, 1);
}
static void resume(int thread) {
    running = thread, threadIdx = {(u32)thread, 0, 0};
    if (_setjmp(scheduler)) return;
    Fiber& fiber = fibers[running];
    if (fiber.begun) _longjmp(fiber.left, 1);
    fiber.begun = true;
    setcontext(&fiber.begin);
}
template <class Finish> void meet(Meeting& meeting, int members, int operation, const Finish& finish) {
    if (meeting.arrived == 0) meeting.operation = operation;
    if (meeting.operation != operation) fail("lanes meet in different operations");
    int generation = meeting.generation;
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        finish();
        meeting.generation++;
    }
    while (meeting.generation == generation) yield();
}
static int lane() { return running % 32; }
static Meeting& warp() { return warps[running / 32]; }
enum { MMA = 1, MMA_TF32, TRANSPOSE, SHUFFLE, ANY, WARP, BLOCK, ELECT, ANY_THREAD };

// ---- fp16

static float to_float(u16 bits) { _Float16 x; memcpy(&x, &bits, 2); return x; }
static u16 to_half(float x) { _Float16 h = x; u16 bits; memcpy(&bits, &h, 2); return bits; }
INLINE float __int_as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
INLINE u32 __float_as_int(float f) { u32 x; memcpy(&x, &f, 4); return x; }
INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
INLINE float low_float(u32 pair) { return to_float(pair & 0xFFFF); }
INLINE float high_float(u32 pair) { return to_float(pair >> 16); }
INLINE u32 to_halves(float low, float high) { return to_half(low) | (u32)to_half(high) << 16; }
INLINE u32 to_bfloats(float low, float high) {
    auto round = [](float x) { u32 bits = __float_as_int(x); return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; };
    return round(low) | round(high) << 16;
}
INLINE u32 multiply_halves(u32 a, u32 b) {
    return to_halves(low_float(a) * low_float(b), high_float(a) * high_float(b));
}
INLINE u32 multiply_by_lower(u32 a, u32 b) { return multiply_halves(a, (b & 0xFFFF) * 0x10001u); }
INLINE u32 multiply_by_upper(u32 a, u32 b) { return multiply_halves(a, (b >> 16) * 0x10001u); }
INLINE u32 add_halves(u32 a, u32 b) { return to_halves(low_float(a) + low_float(b), high_float(a) + high_float(b)); }
INLINE u32 upper_half(u32 pair) { return (pair >> 16) * 0x10001u; }
INLINE float exp2_fast(float x) { return exp2f(x); }
INLINE float log2_fast(float x) { return log2f(x); }
INLINE float maximum_of(float a, float b) { return fmaxf(a, b); }
INLINE float minus_infinity() { return -INFINITY; }
INLINE u32 to_tf32(float x) { return (__float_as_int(x) + 0x1000u) & 0xFFFFE000u; }
INLINE u32 prmt(u32 low, u32 high, u32 selector) {
    u64 bytes = (u64)high << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 select = selector >> (4 * i) & 15, byte = bytes >> (8 * (select & 7)) & 0xFF;
        if (select & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << (8 * i);
    }
    return result;
}
INLINE u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

// ---- the warp

static void mma_of(Meeting& w, bool tf32) {
    const int depth = tf32 ? 8 : 16;
    double a[16][16], b[8][16];
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < depth; k++) {
            const u32 word = w.in[row % 8 * 4 + (tf32 ? k % 4 : k % 8 / 2)][row / 8 + (tf32 ? k / 4 : k / 8) * 2];
            a[row][k] = tf32 ? __int_as_float(word & 0xFFFFE000u) : to_float(word >> (k % 2 * 16));
        }
    for (int column = 0; column < 8; column++)
        for (int k = 0; k < depth; k++) {
            const u32 word = w.in[column * 4 + (tf32 ? k % 4 : k % 8 / 2)][4 + (tf32 ? k / 4 : k / 8)];
            b[column][k] = tf32 ? __int_as_float(word & 0xFFFFE000u) : to_float(word >> (k % 2 * 16));
        }
    for (int target = 0; target < 32; target++)
        for (int r = 0; r < 4; r++) {
            const double *left = a[target / 4 + r / 2 * 8], *right = b[target % 4 * 2 + r % 2];
            double sum = 0;
            for (int k = 0; k < depth; k++) sum += left[k] * right[k];
            w.out[target][r] = __float_as_int((float)sum);
        }
}
static void run_mma(float (&d)[4], const u32 (&in)[6], float c0, float c1, float c2, float c3, bool tf32) {
    memcpy(warp().in[lane()], in, sizeof in);
    meet(warp(), 32, tf32 ? MMA_TF32 : MMA, [=] { mma_of(warp(), tf32); });
    const u32* out = warp().out[lane()];
    d[0] = __int_as_float(out[0]) + c0, d[1] = __int_as_float(out[1]) + c1;
    d[2] = __int_as_float(out[2]) + c2, d[3] = __int_as_float(out[3]) + c3;
}
INLINE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
    run_mma(d, {a0, a1, a2, a3, b0, b1}, c0, c1, c2, c3, false);
}
INLINE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    run_mma(d, {a0, a1, a2, a3, b0, b1}, d[0], d[1], d[2], d[3], false);
}
INLINE void mma_tf32(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    run_mma(d, {a0, a1, a2, a3, b0, b1}, d[0], d[1], d[2], d[3], true);
}
template <class Result> u32 exchange(int operation, u32 x, u32 detail, const Result& result) {
    warp().in[lane()][0] = x, warp().in[lane()][1] = detail;
    meet(warp(), 32, operation, [&] {
        Meeting& w = warp();
        for (int i = 0; i < 32; i++) w.out[i][0] = result(w, i);
    });
    return warp().out[lane()][0];
}
INLINE u32 transpose_matrix(u32 pair) {
    return exchange(TRANSPOSE, pair, 0, [](Meeting& w, int i) {
        auto element = [&](int row, int column) { return w.in[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xFFFF; };
        return element(i % 4 * 2, i / 4) | element(i % 4 * 2 + 1, i / 4) << 16;
    });
}
INLINE float shuffle(float x, int source) {
    return __int_as_float(exchange(SHUFFLE, __float_as_int(x), source, [](Meeting& w, int i) {
        return w.in[w.in[i][1] & 31][0];
    }));
}
INLINE float shuffle_xor(float x, int mask) { return shuffle(x, lane() ^ mask); }
INLINE bool any_lane(bool predicate) {
    return exchange(ANY, predicate, 0, [](Meeting& w, int) {
        u32 any = 0;
        for (auto& in : w.in) any |= in[0];
        return any;
    });
}
INLINE u32 lanes_where(bool predicate) {
    return exchange(ANY, predicate, 0, [](Meeting& w, int) {
        u32 all = 0;
        for (int i = 0; i < 32; i++) all |= w.in[i][0] << i;
        return all;
    });
}
INLINE void sync_warp() { meet(warp(), 32, WARP, [] {}); }
INLINE void sync_block() { meet(whole_block, fibers.size(), BLOCK, [] {}); }
INLINE bool any_thread(bool predicate) {
    static bool any = false, result = false;
    any |= predicate;
    meet(whole_block, fibers.size(), ANY_THREAD, [] { result = any, any = false; });
    return result;
}

// ---- kernels that follow each other: they run one after the other

INLINE void begin_next_kernel() {
    if (!fibers[running].waited) fail("lets the next kernel begin before it has waited");
}
INLINE void wait_for_kernel_before() { fibers[running].waited = true; }
static void check_waited() {
    if (!fibers[running].waited) fail("ends without having waited for the kernel before");
}

// ---- memory

INLINE u8* shared_memory() { return block_memory.data(); }
INLINE u32 shared_address(const void* pointer) { return (const u8*)pointer - block_memory.data(); }
static const u8* shared_at(u32 address, u32 size) {
    if (address % size || address + size > block_memory.size()) fail("shared memory read out of bounds or misaligned");
    return &block_memory[address];
}
void Copy::run() const {
    void* place = (void*)shared_at(target, 1);
    if (source) memcpy(place, source, bytes);
    else memset(place, 0, bytes);
}
INLINE u32 load_shared(u32 address) { u32 word; memcpy(&word, shared_at(address, 4), 4); return word; }
INLINE u32 load_shared_again(u32 address) { return load_shared(address); }
INLINE u32 load_shared_half(u32 address) { u16 half; memcpy(&half, shared_at(address, 2), 2); return half; }
INLINE u32 load_shared_byte(u32 address) { return *shared_at(address, 1); }
INLINE void load_shared_2(u32 address, u32* words) { memcpy(words, shared_at(address, 8), 8); }
INLINE void load_shared_4(u32 address, u32* words) { memcpy(words, shared_at(address, 16), 16); }
INLINE void store_shared(u32 address, u32 word) { memcpy((void*)shared_at(address, 4), &word, 4); }
struct alignas(16) Quad { u32 x, y, z, w; };
INLINE void store_shared_4(u32 address, const Quad& q) { memcpy((void*)shared_at(address, 16), &q, 16); }
INLINE u32 load_int(const int* p) { return *p; }
INLINE float load_constant(const float* pointer) { return *pointer; }
INLINE Quad load_constant_16(const void* pointer) { return *(const Quad*)pointer; }
INLINE void copy_8(u32 target, const u8* source, bool exists) {
    if ((u64)source % 8 && exists) fail("a copy is misaligned");
    memset((void*)shared_at(target, 8), POISON, 8);
    fibers[running].copies.push_back({target, exists ? source : nullptr, 8});
}
INLINE void copy_16(u32 target, const void* source) {
    if ((u64)source % 16) fail("a copy is misaligned");
    memset((void*)shared_at(target, 16), POISON, 16);
    fibers[running].copies.push_back({target, source, 16});
}
INLINE void wait_for_copies() {
    for (const Copy& copy : fibers[running].copies) copy.run();
    fibers[running].copies.clear();
}
struct alignas(8) Floats { float x, y; };
struct alignas(16) Numbers { float x, y, z, w; };
INLINE float load_from_l2(const float* pointer) { return *pointer; }
INLINE Floats load_2_from_l2(const float* pointer) { return *(const Floats*)pointer; }
INLINE Numbers load_4_from_l2(const float* pointer) { return *(const Numbers*)pointer; }
INLINE int atomic_add(int* pointer, int x) { int before = *pointer; *pointer += x; return before; }
INLINE void memory_fence() {}
INLINE u32 hide_from_optimizer(u32 x) { return x; }
template <class T> T* hide_from_optimizer(T* pointer) { return pointer; }

// ---- bulk copies

template <int ARRIVALS> void barrier_init(u32 barrier) { barriers[barrier] = Barrier{ARRIVALS}; }
INLINE void barrier_init_fence() {}
INLINE void barrier_wait(u32 address, u32 parity) {
    Barrier& barrier = barriers.at(address);
    for (int i = 0; barrier.completed % 2 == (int)parity; i++) {
        if (i > 1000) fail("waits for a copy that nothing starts");
        if (barrier.arrived < barrier.arrivals || barrier.started < barrier.expected) {
            yield();  // another lane has yet to announce or start it
            continue;
        }
        for (const Copy& copy : barrier.copies) copy.run();
        barrier = Barrier{barrier.arrivals, barrier.completed + 1};
    }
}
INLINE void expect_bytes(u32 barrier, u32 bytes) {
    Barrier& found = barriers.at(barrier);
    if (found.arrived++ == found.arrivals) fail("a stage is filled again before it was waited for");
    found.expected += bytes;
}
INLINE bool elect_lane() {
    meet(warp(), 32, ELECT, [] {});
    return lane() == 0;
}
INLINE void fence_async() {}
template <int BYTES> void issue_bulk_copy(u32 target, u32 barrier, const u8* source) {
    if ((u64)source % 16 || target % 16 || BYTES % 16) fail("a copy is misaligned");
    memset((void*)shared_at(target, 1), POISON, BYTES);
    barriers.at(barrier).started += BYTES;
    barriers.at(barrier).copies.push_back({target, source, BYTES});
}

// ---- the launch

static void run_block(int threads, int shared_bytes, void (*body)()) {
    constexpr int STACK = 1 << 18;
    static std::vector<char*> stacks;  // of all blocks, one after the other
    while ((int)stacks.size() < threads) stacks.push_back(new char[STACK]);
    fibers.clear(), fibers.resize(threads);
    warps.assign(threads / 32, Meeting{});
    whole_block = Meeting{};
    block_memory.assign(shared_bytes, POISON);
    barriers.clear();
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.begun = fiber.done = fiber.waited = false;
        getcontext(&fiber.begin);
        fiber.begin.uc_stack.ss_sp = stacks[i], fiber.begin.uc_stack.ss_size = STACK;
        fiber.begin.uc_link = nullptr;
        makecontext(&fiber.begin, body, 0);
    }
    for (int left = threads; left;) {
        left = 0;
        for (int i = 0; i < threads; i++)
            if (!fibers[i].done) left++, resume(i);
    }
    for (const auto& [address, barrier] : barriers)
        for (int i = 0; i < 8; i++)
            if (*(const u8*)shared_at(address + i, 1) != POISON) fail("a store hit a barrier");
}
