// The instructions of sm_90 that C++ cannot express. No headers are included, so NVRTC needs none on the machine.
// An fp16 pair is a u32 with the element of the lower index in the lower half. Shared memory addresses are in bytes, as
// in PTX.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__
// The offset of a member of a struct, as of offsetof.
#define OFFSET_OF(TYPE, MEMBER) (u32)__INTADDR__(&((TYPE*)0)->MEMBER)
// The offset of a member of the kernel's `SharedMemory`.
#define AT(MEMBER) OFFSET_OF(SharedMemory, MEMBER)
// Tells the host (kernel.py) how many threads and bytes of shared memory a block of a kernel has.
#define BLOCK_OF(KERNEL, THREADS, BYTES) extern "C" __device__ const u32 KERNEL##_block[] = {THREADS, BYTES}

INLINE u32 prmt(u32 low, u32 high, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}
// Takes the bits of `a` where the mask has ones, and those of `b` elsewhere.
INLINE u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
    return result;
}

// ---- fp16 and fp32

INLINE u32 multiply_halves(u32 a, u32 b) {
    u32 result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
// Multiplies both halves by the lower half of `scales`, or its upper one.
INLINE u32 multiply_by_lower(u32 pair, u32 scales) {
    u32 result;
    asm("{ .reg .b16 l, u; .reg .b32 x; mov.b32 {l, u}, %2; mov.b32 x, {l, l}; mul.rn.f16x2 %0, %1, x; }"
        : "=r"(result) : "r"(pair), "r"(scales));
    return result;
}
INLINE u32 multiply_by_upper(u32 pair, u32 scales) {
    u32 result;
    asm("{ .reg .b16 l, u; .reg .b32 x; mov.b32 {l, u}, %2; mov.b32 x, {u, u}; mul.rn.f16x2 %0, %1, x; }"
        : "=r"(result) : "r"(pair), "r"(scales));
    return result;
}
INLINE u32 add_halves(u32 a, u32 b) {
    u32 result;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
// Copies the upper half into both. Adding -0 does so outside of the pipe of shifts and PRMT, which is the busy one.
INLINE u32 upper_half(u32 pair) {
    u32 result;
    asm("{ .reg .b16 l, u; .reg .b32 x, z; mov.b32 {l, u}, %1; mov.b32 x, {u, u}; mov.b32 z, 0x80008000;"
        " add.rn.f16x2 %0, x, z; }" : "=r"(result) : "r"(pair));
    return result;
}
INLINE float low_float(u32 pair) {
    float result;
    asm("{ .reg .b16 l, u; mov.b32 {l, u}, %1; cvt.f32.f16 %0, l; }" : "=f"(result) : "r"(pair));
    return result;
}
INLINE float high_float(u32 pair) {
    float result;
    asm("{ .reg .b16 l, u; mov.b32 {l, u}, %1; cvt.f32.f16 %0, u; }" : "=f"(result) : "r"(pair));
    return result;
}
INLINE u32 to_halves(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
INLINE u32 to_bfloats(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
INLINE float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
INLINE float log2_fast(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
INLINE float maximum_of(float a, float b) {
    float result;
    asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
INLINE float minus_infinity() { return __int_as_float(0xFF800000); }
// Rounds to the nearest tf32; the tensor core would truncate.
INLINE u32 to_tf32(float x) { return (__float_as_int(x) + 0x1000u) & 0xFFFFE000u; }

// ---- the warp

// D = A B + C of m16n8k16, fp16 with fp32 sums. Lane 4 r + c: A rows r (a0, a2) and r + 8 (a1, a3), columns 2 c and
// 2 c + 1 (a0, a1) and 8 more (a2, a3); B rows as A's columns, column r; C and D as A's rows, columns 2 c and 2 c + 1.
INLINE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
INLINE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma(d, a0, a1, a2, a3, b0, b1, d[0], d[1], d[2], d[3]);
}
// m16n8k8 in tf32: columns of A are c (a0, a1) and c + 4 (a2, a3).
INLINE void mma_tf32(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// An 8 x 8 matrix of fp16, lane 4 r + c holding row r, columns 2 c and 2 c + 1.
INLINE u32 transpose_matrix(u32 pair) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}
INLINE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
INLINE bool any_lane(bool predicate) { return __any_sync(0xFFFFFFFFu, predicate); }
// A bit for each lane, 1 where the predicate holds.
INLINE u32 lanes_where(bool predicate) { return __ballot_sync(0xFFFFFFFFu, predicate); }
INLINE void sync_warp() { __syncwarp(); }
INLINE void sync_block() { __syncthreads(); }
// Waits for all threads of the block, and returns whether the predicate holds for one.
INLINE bool any_thread(bool predicate) { return __syncthreads_or(predicate); }

// ---- kernels that follow each other; see early_launch.py

// Lets the next kernel of the stream begin, once all blocks have come here or ended.
INLINE void begin_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the previous kernel has ended and its writes are visible.
INLINE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- memory

INLINE u8* shared_memory() {
    extern __shared__ __align__(128) u8 shared[];
    return shared;
}
INLINE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
INLINE u32 load_shared(u32 address) {
    u32 word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}
// Loads from memory even if a register may hold the word.
INLINE u32 load_shared_again(u32 address) {
    u32 word;
    asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
INLINE u32 load_shared_half(u32 address) {
    u16 half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address));
    return half;
}
INLINE u32 load_shared_byte(u32 address) {
    u32 byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address));
    return byte;
}
INLINE void load_shared_2(u32 address, u32* words) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}
INLINE void load_shared_4(u32 address, u32* words) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address));
}
INLINE void store_shared(u32 address, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(word));
}
struct __align__(16) Quad { u32 x, y, z, w; };
INLINE void store_shared_4(u32 address, const Quad& q) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w));
}
INLINE u32 load_int(const int* p) {  // not to a uniform register, which would be waited for at once
    u32 x;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
INLINE float load_constant(const float* pointer) {
    float result;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(result) : "l"(pointer));
    return result;
}
INLINE Quad load_constant_16(const void* pointer) {
    Quad q;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(pointer));
    return q;
}
// Copies 8 bytes to shared memory, or zeros; they are there after `wait_for_copies`.
INLINE void copy_8(u32 target, const u8* source, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"(target), "l"(source), "r"(exists ? 8 : 0) : "memory");
}
INLINE void copy_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target), "l"(source) : "memory");
}
INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Loads past the L1 cache, which does not see what other SMs wrote. The address is a multiple of the bytes loaded.
struct __align__(8) Floats { float x, y; };
struct __align__(16) Numbers { float x, y, z, w; };
INLINE float load_from_l2(const float* pointer) {
    float result;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(result) : "l"(pointer) : "memory");
    return result;
}
INLINE Floats load_2_from_l2(const float* pointer) {
    Floats result;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(result.x), "=f"(result.y) : "l"(pointer) : "memory");
    return result;
}
INLINE Numbers load_4_from_l2(const float* pointer) {
    Numbers result;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w) : "l"(pointer) : "memory");
    return result;
}
INLINE int atomic_add(int* pointer, int x) { return atomicAdd(pointer, x); }
INLINE void memory_fence() { __threadfence(); }

// Returns x as a value that the compiler knows nothing about. Dependent values are then computed where they are needed,
// not early and held in registers.
INLINE u32 hide_from_optimizer(u32 x) {
    u32 result;
    asm volatile("mov.b32 %0, %1;" : "=r"(result) : "r"(x));
    return result;
}
template <class T> INLINE T* hide_from_optimizer(T* pointer) {
    T* result;
    asm volatile("mov.b64 %0, %1;" : "=l"(result) : "l"(pointer));
    return result;
}

// ---- bulk copies into shared memory, and mbarriers that count their bytes

template <int ARRIVALS> INLINE void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "n"(ARRIVALS) : "memory");
}
INLINE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred done; retry: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
                 " @!done bra retry; }" :: "r"(barrier), "r"(parity) : "memory");
}
INLINE bool elect_lane() {
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}
// Announces the bytes of a warp's copies of a barrier's phase, and arrives; called by one lane of each warp that copies.
INLINE void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Makes this thread's stores to shared memory visible to products and bulk copies.
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// On sm_120 a copy to `.shared::cluster` adds a call for another block's memory; sm_90 has one instruction for both,
// and PTX before 8.6 has no other name for it.
#if __CUDA_ARCH__ > 900
#define TARGET_SPACE "shared::cta"
#else
#define TARGET_SPACE "shared::cluster"
#endif
// Called by `copy_bulk` of copies.cuh alone.
template <int BYTES> INLINE void issue_bulk_copy(u32 target, u32 barrier, const u8* source) {
    asm volatile("cp.async.bulk." TARGET_SPACE ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(target), "l"(source), "n"(BYTES), "r"(barrier) : "memory");
}
