// What products in e4m3 need besides wgmma.cuh. A trial: see latent_e4m3.cuh.
#pragma once
#include "wgmma.cuh"

#define NAMES_8 "%0, %1, %2, %3"
#define SUMS_8(i) SUMS_4(i)
PRODUCT(64, "%32", "%33", "%34", "%35", "%36", "%37")

// Upper halves of descriptors: rows of 128 and of 64 bytes, swizzled as far as they reach.
constexpr u32 ROWS_OF_128 = 0x40000040, ROWS_OF_64 = 0x80000020;

// D += A B of m64nNk32: A in registers (lane 4 r + c: rows r, r + 8 of bytes 4 c.., then of bytes 16 + 4 c..), B's rows of
// contiguous K in shared memory.
template <int COLUMNS_OF_B, u32 HIGH> struct E4m3Product;
#define E4M3_PRODUCT(N, A0, A1, A2, A3, B, ACCUMULATE, UPPER)                                                         \
    template <u32 HIGH> struct E4m3Product<N, HIGH> {                                                                 \
        INLINE static void add(float (&d)[N / 2], const u32* a, u32 b, int accumulate) {                              \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0;" DESCRIPTOR("b", B, UPPER)                \
                " wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES_##N "}, {" A0 ", " A1 ", " A2 ", "\
                A3 "}, b, p, 1, 1; }"                                                                                 \
                : SUMS_##N(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(HIGH));      \
        }                                                                                                             \
    };
E4M3_PRODUCT(8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
E4M3_PRODUCT(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
E4M3_PRODUCT(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
E4M3_PRODUCT(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
E4M3_PRODUCT(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
E4M3_PRODUCT(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// Both in shared memory, in rows of 128 bytes of contiguous K.
INLINE void add_e4m3_shared(float (&d)[32], u32 a, u32 b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;" DESCRIPTOR("a", "%32", "0x40000040")
        DESCRIPTOR("b", "%33", "0x40000040")
        " wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NAMES_64 "}, a, b, p, 1, 1; }"
        : SUMS_64(0) : "r"(a), "r"(b), "r"(accumulate));
}

// Four numbers, saturated.
INLINE u32 to_e4m3(float a, float b, float c, float d) {
    u32 result;
    asm("{ .reg .b16 l, u; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 u, %4, %3;"
        " mov.b32 %0, {l, u}; }" : "=r"(result) : "f"(a), "f"(b), "f"(c), "f"(d));
    return result;
}
INLINE u32 maximum_of_halves(u32 a, u32 b) {
    u32 result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
// As store_matrices (wgmma.cuh), transposed: lane 4 r + c of a matrix has elements of column r, rows 2 c and 2 c + 1.
INLINE void store_transposed(u32 address, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
INLINE void load_matrices(u32 address, u32* x) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
INLINE void store_shared_2(u32 address, u32 x, u32 y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(address), "r"(x), "r"(y));
}
// Barriers of `COUNT` threads.
template <int COUNT> INLINE void sync_threads(int id) {
    asm volatile("barrier.cta.sync %0, %1;" :: "r"(id), "n"(COUNT) : "memory");
}
