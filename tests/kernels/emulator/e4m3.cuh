// The instructions of e4m3.cuh on a CPU.
#pragma once
#include "wgmma.cuh"

constexpr u32 ROWS_OF_128 = 0x40000040, ROWS_OF_64 = 0x80000020;
static float of_e4m3(u8 x) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    if ((x & 127) == 127) fail("a NaN in e4m3");
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return x & 128 ? -size : size;
}
static u8 one_e4m3(float x) {
    if (x != x) return 127;
    const float size = std::min(fabsf(x), 448.f);
    int best = 0;
    for (int i = 0; i < 127; i++) {
        const float error = fabsf(of_e4m3(i) - size), least = fabsf(of_e4m3(best) - size);
        if (error < least || (error == least && i % 2 == 0)) best = i;
    }
    return best | (std::signbit(x) ? 128 : 0);
}
INLINE u32 to_e4m3(float a, float b, float c, float d) {
    return one_e4m3(a) | one_e4m3(b) << 8 | one_e4m3(c) << 16 | (u32)one_e4m3(d) << 24;
}
static float e4m3_at(u32 descriptor, u32 high, int k, int n) {
    const u32 width = high == ROWS_OF_128 ? 128 : 64;
    const u32 at = ((descriptor & 0x3FFF) << 4) + n * width + k;
    return of_e4m3(*shared_at(at ^ ((at >> 7 & (width / 16 - 1)) << 4), 1));
}
template <int N, u32 HIGH> struct E4m3Product {
    static void add(float (&d)[N / 2], const u32* a, u32 b, int accumulate) {
        static std::map<int, std::pair<const u32*, float*>> operands;  // by thread
        operands[running] = {a, d};
        meet(warp(), 32, 300 + N, [=] {
            const int first = running / 32 * 32;
            static float right[32][N], left[16][32];
            for (int k = 0; k < 32; k++)
                for (int n = 0; n < N; n++) right[k][n] = e4m3_at(b, HIGH, k, n);
            for (int i = 0; i < 16; i++)
                for (int k = 0; k < 32; k++)
                    left[i][k] = of_e4m3(operands[first + i % 8 * 4 + k % 16 / 4].first[i / 8 + k / 16 * 2] >> k % 4 * 8);
            for (int i = 0; i < 16; i++)
                for (int n = 0; n < N; n++) {
                    float& target = operands[first + i % 8 * 4 + n % 8 / 2].second[n / 8 * 4 + i / 8 * 2 + n % 2];
                    float sum = accumulate ? target : 0;
                    for (int k = 0; k < 32; k++) sum += left[i][k] * right[k][n];
                    target = sum;
                }
        });
    }
};
INLINE void add_e4m3_shared(float (&d)[32], u32 a, u32 b, int accumulate) {
    const int row = running / 32 % 4 * 16 + lane() / 4;
    for (int i = 0; i < 32; i++) {
        const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
        float sum = accumulate ? d[i] : 0;
        for (int k = 0; k < 32; k++)
            sum += e4m3_at(a, ROWS_OF_128, k, row + i / 2 % 2 * 8) * e4m3_at(b, ROWS_OF_128, k, column);
        d[i] = sum;
    }
}
INLINE u32 maximum_of_halves(u32 a, u32 b) {
    return to_halves(fmaxf(low_float(a), low_float(b)), fmaxf(high_float(a), high_float(b)));
}
INLINE void store_transposed(u32 address, const u32* x) {
    warp().in[lane()][0] = address;
    memcpy(warp().in[lane()] + 1, x, 16);
    meet(warp(), 32, 400, [] {
        for (int i = 0; i < 4; i++)
            for (int r = 0; r < 8; r++)
                for (int column = 0; column < 8; column++) {
                    const u16 element = warp().in[r * 4 + column / 2][1 + i] >> column % 2 * 16;
                    memcpy(matrix_element(i, column, r), &element, 2);
                }
    });
}
INLINE void load_matrices(u32 address, u32* x) {
    warp().in[lane()][0] = address;
    meet(warp(), 32, 401, [] {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) memcpy(&warp().out[l][i], matrix_element(i, l / 4, l % 4 * 2), 4);
    });
    memcpy(x, warp().out[lane()], 16);
}
INLINE void store_shared_2(u32 address, u32 x, u32 y) {
    memcpy((void*)shared_at(address, 8), &x, 4), memcpy((void*)shared_at(address + 4, 4), &y, 4);
}
template <int COUNT> void sync_threads(int id) { meet(groups[id * 16 + 15], COUNT, GROUP, [] {}); }
