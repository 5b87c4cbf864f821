// The instructions of warpgroups on a CPU: stands in for kernels/cuda/wgmma.cuh, in g++.
//
// Products are done where they are issued, or at their wait (LATE_PRODUCTS).
#pragma once
#include "ptx.cuh"

INLINE float2 make_float2(float x, float y) { return {x, y}; }

// ---- barriers

static std::map<int, Meeting> groups;  // by barrier and warpgroup
enum { GROUP = 100, GROUP_ANY, STORE_MATRICES, PRODUCT };

INLINE void arrive(u32 address) {
    Barrier& barrier = barriers.at(address);
    if (++barrier.arrived == barrier.arrivals) barrier = Barrier{barrier.arrivals, barrier.completed + 1};
}
static Meeting& group(int id) { return groups[id * 16 + running / 128]; }
INLINE void sync_group(int id) { meet(group(id), 128, GROUP, [] {}); }
INLINE void sync_two_groups(int id) { meet(groups[id * 16 + 15], 256, GROUP, [] {}); }
INLINE bool any_of_group(int id, bool x) {
    Meeting& own = group(id);
    if (own.arrived == 0) own.in[0][0] = 0;
    own.in[0][0] |= x;
    meet(own, 128, GROUP_ANY, [&] { own.out[0][0] = own.in[0][0]; });
    return own.out[0][0];
}

// ---- registers

template <int COUNT, int START = 168> void set_registers() {}
INLINE int warpgroup() { return running / 128; }
INLINE u32 shuffle_word(u32 x, int source) { return __float_as_int(shuffle(__int_as_float(x), source)); }
INLINE u32 finite_halves(u32 pair) { return to_halves(fminf(low_float(pair), 65504), fminf(high_float(pair), 65504)); }

// ---- memory

INLINE u8* swizzled_memory() { return block_memory.data(); }
template <int WIDTH> void load_page(const u8* p, u32* x) {
    if ((u64)p % (4 * WIDTH)) fail("a load is misaligned");
    memcpy(x, p, 4 * WIDTH);
}
template <int BYTES> void prefetch_bulk(const u8* p) {
    if ((u64)p % 16 || BYTES % 16) fail("a prefetch is misaligned");
}
INLINE void keep_order() {}

// Lane 8 i + j has the address of row j of matrix i.
static u16* matrix_element(int matrix, int row, int column) {
    return (u16*)(shared_at(warp().in[8 * matrix + row][0], 16) + 2 * column);
}
INLINE void store_matrices(u32 address, const u32* x) {
    warp().in[lane()][0] = address;
    memcpy(warp().in[lane()] + 1, x, 16);
    meet(warp(), 32, STORE_MATRICES, [] {
        for (int i = 0; i < 128; i++) {
            const int matrix = i / 32, row = i % 32 / 4, pair = i % 4;
            memcpy(matrix_element(matrix, row, 2 * pair), &warp().in[i % 32][1 + matrix], 4);
        }
    });
}

// ---- products

#ifndef LATE_PRODUCTS
#define LATE_PRODUCTS 0
#endif
// Products of a thread: `open` before their commit, then in groups. They end at their wait, as late as they may, with
// LATE_PRODUCTS; else where they are issued.
struct Products {
    std::vector<std::function<void()>> open;
    std::vector<std::vector<std::function<void()>>> groups;
};
static std::map<int, Products> products;  // by thread
static void issue(std::function<void()> product) {
    if (LATE_PRODUCTS) products[running].open.push_back(std::move(product));
    else product();
}
INLINE void wgmma_fence() {}
INLINE void wgmma_commit() {
    Products& own = products[running];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
}
template <int PENDING> void wgmma_wait() {
    auto& groups = products[running].groups;
    for (; groups.size() > PENDING; groups.erase(groups.begin()))
        for (auto& product : groups[0]) product();
}
INLINE u32 matrix_descriptor(u32 address, u32 lead) { return address >> 4 | lead >> 4 << 16; }
static u16 element_of(u32 descriptor, int transposed, int k, int n) {
    const u32 start = (descriptor & 0x3FFF) << 4, lead = descriptor >> 16 << 4, stride = 1024;
    const u32 at = transposed ? start + n / 64 * lead + k / 8 * stride + k % 8 * 128 + n % 64 * 2
                              : start + n / 8 * stride + n % 8 * 128 + k * 2;
    return *(const u16*)shared_at(at ^ (at >> 7 & 7) << 4, 2);
}
// D += A B of a thread, with rows r and r + 8 of A, and elements of B.
template <int N, class Left, class Right>
void add_own(float* d, const Left& left, const Right& right, int accumulate) {
    for (int i = 0; i < N / 2; i++) {
        const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
        float sum = accumulate ? d[i] : 0;
        for (int k = 0; k < 16; k++) sum += left(i / 2 % 2, k) * to_float(right(k, column));
        d[i] = sum;
    }
}
// A's registers are taken where the product is issued: ptxas keeps them until its wait.
template <int N> void add_products(float* d, const u32* a, u32 b, int accumulate) {
    memcpy(warp().in[lane()], a, 16);
    struct Rows { float x[2][16]; } rows;
    static std::map<int, std::vector<std::vector<u32>>> taken;  // by warp
    meet(warp(), 32, PRODUCT, [] {
        auto& own = taken[running / 32];
        own.clear();
        for (int i = 0; i < 32; i++) own.emplace_back(warp().in[i], warp().in[i] + 4);
    });
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++) {
            const u32 pair = taken[running / 32][lane() / 4 * 4 + k % 8 / 2][i + k / 8 * 2];
            rows.x[i][k] = k % 2 ? high_float(pair) : low_float(pair);
        }
    sync_warp();
    issue([=] {
        add_own<N>(d, [&](int i, int k) { return rows.x[i][k]; },
                   [&](int k, int n) { return element_of(b, 0, k, n); }, accumulate);
    });
}
template <int N> struct Product {
    static void add(float (&d)[N / 2], const u32* a, u32 b, int accumulate) { add_products<N>(d, a, b, accumulate); }
};
static int own_row() { return running / 32 % 4 * 16 + lane() / 4; }
template <int N> struct SharedProduct {
    static void add(float (&own)[N / 2], u32 a, u32 b, int accumulate) {
        float* d = own;
        issue([=] {
            add_own<N>(d, [&](int i, int k) { return to_float(element_of(a, 0, k, own_row() + 8 * i)); },
                       [&](int k, int n) { return element_of(b, 0, k, n); }, accumulate);
        });
    }
};
template <int N> struct TransposedProduct {
    static void add(float (&own)[N / 2], u32 a, u32 b, int accumulate) {
        constexpr int width = N == 16 ? 16 : N == 24 || N == 32 ? 32 : 64;  // of B's rows
        float* d = own;
        issue([=] {
            add_own<N>(d, [&](int i, int k) { return to_float(element_of(a, 1, k, own_row() + 8 * i)); },
                       [&](int k, int n) {
                           if (width == 64) return element_of(b, 1, k, n);
                           const u32 at = ((b & 0x3FFF) << 4) + k * 2 * width + n * 2;
                           return *(const u16*)shared_at(at ^ (at >> 7 & (width / 8 - 1)) << 4, 2);
                       }, accumulate);
        });
    }
};
