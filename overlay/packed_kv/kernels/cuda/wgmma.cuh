// The instructions that warpgroups need besides those of ptx.cuh: sm_90a.
#pragma once
#include "ptx.cuh"

// ---- barriers

INLINE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory"); }
// Named barriers, by a `NamedBarrier` of the kernel: 0 is the block's (`sync_block`). The first function waits for the
// 128 threads of a warpgroup, the second for the 256 threads of two.
INLINE void sync_group(int id) { asm volatile("barrier.cta.sync %0, 128;" :: "r"(id) : "memory"); }
INLINE void sync_two_groups(int id) { asm volatile("barrier.cta.sync %0, 256;" :: "r"(id) : "memory"); }
INLINE bool any_of_group(int id, bool x) {
    u32 r;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %2, 128, p;"
                 " selp.u32 %0, 1, 0, q; }" : "=r"(r) : "r"((u32)x), "r"(id) : "memory");
    return r;
}

// ---- registers

// Gives a thread COUNT registers. It starts with START: 168 with three warpgroups.
template <int COUNT, int START = 168> INLINE void set_registers() {
    if constexpr (COUNT < START) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
    if constexpr (COUNT > START) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
// Makes a number uniform in all threads of a warpgroup, as products need it.
INLINE int warpgroup() { return __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0); }
INLINE u32 shuffle_word(u32 x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
// Infinite ones become the largest finite ones.
INLINE u32 finite_halves(u32 pair) {
    u32 result;
    asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0x7BFF7BFFu));
    return result;
}

// ---- memory

// Shared memory whose rows of 128 bytes may be swizzled.
INLINE u8* swizzled_memory() {
    extern __shared__ __align__(1024) u8 swizzled[];
    return swizzled;
}

// WIDTH words, past the L1.
template <int WIDTH> INLINE void load_page(const u8* p, u32* x) {
    if constexpr (WIDTH == 4)
        asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p) : "memory");
    else if constexpr (WIDTH == 2)
        asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p) : "memory");
    else
        asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(x[0]) : "l"(p) : "memory");
}

// The compiler moves no load or store across it.
INLINE void keep_order() { asm volatile("" ::: "memory"); }

// ---- products

// D += A B with A of 64 x 16 in registers, as in m16n8k16 (a warp has 16 of the rows), B in shared memory, fp16 with
// fp32 sums. Lane 4 r + c: D[4 i + ..] are columns 8 i + 2 c, rows r and r + 8.

INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> INLINE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}
// Describes a matrix in shared memory in rows of 128 bytes, whose 16-byte pieces are swizzled by the row's number
// modulo 8. Groups of 8 rows follow each other by 1024 bytes; blocks of 64 columns, of a transposed one, by `lead`.
INLINE u32 matrix_descriptor(u32 address, u32 lead) { return (address & 0x3FFFF) >> 4 | lead >> 4 << 16; }
#define DESCRIPTOR(NAME, LOW, HIGH) " .reg .b64 " NAME "; mov.b64 " NAME ", {" LOW ", " HIGH "};"

// Names of registers and operands of D, by columns.
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_24 NAMES_16 ", %8, %9, %10, %11"
#define NAMES_32 NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_64 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_128 NAMES_64 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_256 NAMES_128 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_24(i) SUMS_16(i), SUMS_4(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 8)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 16)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 32)
#define SUMS_256(i) SUMS_128(i), SUMS_128(i + 64)

// For 256 columns. B is column-major: each column is contiguous.
INLINE void add_product(float (&d)[128], const u32* a, u32 b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0;" DESCRIPTOR("b", "%132", "0x40000040")
        " wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" NAMES_256 "}, {%128, %129, %130, %131}, b, p, 1, 1, 1; }"
        : SUMS_256(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
}

// B's rows are contiguous.
template <int COLUMNS_OF_B> struct Product;
#define PRODUCT(N, A0, A1, A2, A3, B, ACCUMULATE)                                                                     \
    template <> struct Product<N> {                                                                                   \
        INLINE static void add(float (&d)[N / 2], const u32* a, u32 b, int accumulate) {                              \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0;" DESCRIPTOR("b", B, "0x40000040")         \
                " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES_##N "}, {" A0 ", " A1 ", " A2 ", "  \
                A3 "}, b, p, 1, 1, 0; }"                                                                              \
                : SUMS_##N(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));                 \
        }                                                                                                             \
    };
PRODUCT(16, "%8", "%9", "%10", "%11", "%12", "%13")
PRODUCT(24, "%12", "%13", "%14", "%15", "%16", "%17")
PRODUCT(32, "%16", "%17", "%18", "%19", "%20", "%21")
PRODUCT(128, "%64", "%65", "%66", "%67", "%68", "%69")

// A in shared memory, too. SharedProduct: both have contiguous rows. TransposedProduct: both have contiguous columns, and
// B's rows of 32 or 64 bytes are swizzled as far as they reach; HIGH is the upper half of its descriptor.
template <int COLUMNS_OF_B> struct SharedProduct;
template <int COLUMNS_OF_B> struct TransposedProduct;
#define SHARED_PRODUCT(KIND, N, A, B, ACCUMULATE, HIGH, TRANSPOSED)                                                   \
    template <> struct KIND<N> {                                                                                      \
        INLINE static void add(float (&d)[N / 2], u32 a, u32 b, int accumulate) {                                     \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0;"                                          \
                DESCRIPTOR("a", A, "0x40000040") DESCRIPTOR("b", B, HIGH)                                             \
                " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES_##N "}, a, b, p, 1, 1, "            \
                #TRANSPOSED ", " #TRANSPOSED "; }"                                                                    \
                : SUMS_##N(0) : "r"(a), "r"(b), "r"(accumulate));                                                     \
        }                                                                                                             \
    };
SHARED_PRODUCT(SharedProduct, 64, "%32", "%33", "%34", "0x40000040", 0)
SHARED_PRODUCT(TransposedProduct, 16, "%8", "%9", "%10", "0xC0000010", 1)
SHARED_PRODUCT(TransposedProduct, 24, "%12", "%13", "%14", "0x80000020", 1)
SHARED_PRODUCT(TransposedProduct, 32, "%16", "%17", "%18", "0x80000020", 1)

// Four 8 x 8 matrices of fp16; lane 8 i + j has the address of row j of matrix i.
INLINE void store_matrices(u32 address, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
