// Queries of a block's rows, and their outputs.
#pragma once
#if HAS_PICKS
#include "latent_picks.cuh"
#else
#include "latent_pages.cuh"
#endif

constexpr float QUERY_FACTOR_F = QUERY_FACTOR, EMPTY_MAXIMUM = -1e30f;
constexpr float MOST_WEIGHT = 10;  // a weight is at most 2^MOST_WEIGHT, or the row's maximum moves

// Two numbers of a query, QUERY, as fp16 with the gain.
INLINE u32 query_pair(u32 pair) {
    const float low = QUERY == 0 ? low_float(pair) : __int_as_float(pair << 16);
    const float high = QUERY == 0 ? high_float(pair) : __int_as_float(pair & 0xFFFF0000);
    return to_halves(low * QUERY_FACTOR_F, high * QUERY_FACTOR_F);
}
// Blocks of 64 channels follow each other by STRIDE bytes. A warp has every fourth row. A lane loads 16 bytes of each
// half of a latent; 8 lanes load a row's RoPE channels.
template <int STRIDE> INLINE void load_queries(const Arguments& a, const Run& run, u32 target, int t) {
    constexpr int BATCH = ROWS == 24 ? 6 : ROWS % 32 ? 4 : 8;  // rows of a warp at a time
    constexpr int ROPES = (BATCH + 3) / 4;
    const int lane = t % 32, warp = t / 32;
    auto store = [&](Quad q, int row, int piece, bool is_rope) {
        q = {query_pair(q.x), query_pair(q.y), query_pair(q.z), query_pair(q.w)};
        if (is_rope) {  // keys of RoPE are values, not in units of 2^-7
            const u32 unit = to_halves(1 / LATENT_DIVISOR_F, 1 / LATENT_DIVISOR_F);
            q = {multiply_halves(q.x, unit), multiply_halves(q.y, unit), multiply_halves(q.z, unit),
                 multiply_halves(q.w, unit)};
        }
        store_shared_4(target + piece / 8 * STRIDE + row * 128 + ((piece % 8 ^ row % 8) << 4), q);
    };
#pragma unroll 1
    for (int base = 0; base < ROWS; base += 4 * BATCH) {
        Quad latent[BATCH][2], rope[ROPES];
        for_each<BATCH>([&](auto k) {
            const int row = base + 4 * k.value + warp;
            const u64 at = (u64)run.token(row) * a.query_token_stride + run.head(row) * a.query_head_stride + lane * 8;
            const u16* from = (const u16*)a.query + at;
            latent[k.value][0] = latent[k.value][1] = {0, 0, 0, 0};
            if (row < run.rows)
                latent[k.value][0] = load_constant_16(from), latent[k.value][1] = load_constant_16(from + 256);
        });
        for_each<ROPES>([&](auto k) {
            const int row = base + 4 * (4 * k.value + lane / 8) + warp;
            const u64 at = (u64)run.token(row) * a.rope_token_stride + run.head(row) * a.rope_head_stride + lane % 8 * 8;
            rope[k.value] = {0, 0, 0, 0};
            if (row < run.rows) rope[k.value] = load_constant_16((const u16*)a.rope_query + at);
        });
        for_each<BATCH>([&](auto k) {
            const int row = base + 4 * k.value + warp;
            store(latent[k.value][0], row, lane, false), store(latent[k.value][1], row, lane + 32, false);
        });
        for_each<ROPES>([&](auto k) {
            const int row = base + 4 * (4 * k.value + lane / 8) + warp;
            if (ROWS % 16 == 0 || row < ROWS) store(rope[k.value], row, 64 + lane % 8, true);
        });
    }
}

// Stores outputs of two channels.
INLINE void store_pair(const Arguments& a, u64 offset, const float* constant, float x, float y, float norm) {
    x *= norm, y *= norm;
    if constexpr (HAS_CONSTANT) x += constant[0], y += constant[1];
    if constexpr (OUTPUT == 0) *(u32*)((u16*)a.output + offset) = to_halves(x, y);
    else if constexpr (OUTPUT == 1) *(u32*)((u16*)a.output + offset) = to_bfloats(x, y);
    else ((float*)a.output)[offset] = x, ((float*)a.output)[offset + 1] = y;
    keep_order();  // constants in as few registers as possible
}
