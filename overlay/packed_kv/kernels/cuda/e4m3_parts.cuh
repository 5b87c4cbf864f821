// What both kernels of the trial of e4m3 products share.
#pragma once
#include "e4m3.cuh"
#include "latent_rows.cuh"

#ifndef PROMOTE
#define PROMOTE 32
#endif
#ifndef COPIES
#define COPIES 4
#endif
static_assert(ROWS == 64 && ROPE_BITS == 16 && group_layout(0).bits == 4, "a trial");
constexpr float GAIN = 16;                                            // of latents in e4m3
constexpr float FACTOR = 1 / (LATENT_DIVISOR_F * GAIN);               // from the fp16 kernel's units of scores
constexpr float OUTPUT_UNIT = 1 / (LATENT_DIVISOR_F * GAIN);          // to its units of partial outputs

// The entries of scale bytes: e4m3 of the 8 magnitudes, COPIES times, by r % COPIES.
INLINE void init_table(u32 table) {
    if (threadIdx.x < 256) {
        const u32 byte = threadIdx.x;
        const float scale = byte < 0xF8 ? low_float(byte << 7) : 65504;
        const float gain = scale * (group_layout(0).key_factor * GAIN / 16777216.f);
        auto magnitude = [&](u32 bytes, int i) { return (float)(bytes >> 8 * i & 255) * gain; };
        auto entry = [&](u32 x) { return to_e4m3(magnitude(x, 0), magnitude(x, 1), magnitude(x, 2), magnitude(x, 3)); };
        const u32 low = entry(TABLE_4_LOW), high = entry(TABLE_4_HIGH);
        for (int i = 0; i < COPIES; i += 2) store_shared_4(table + byte * (8 * COPIES) + 8 * i, {low, high, low, high});
    }
}
INLINE void load_entries_of(u32 table_of_lane, u32 scales, u32 (&entry)[8]) {
    for_each<4>([&](auto k) { load_shared_2(table_of_lane + prmt(scales, 0, 0x4440 + k.value) * (8 * COPIES), entry + 2 * k.value); });
}
// 64 channels: words and entries of groups of 32, and of each of tokens r and r + 8, to two left operands.
INLINE void decode_e4m3(const u32* word, const u32* entry, u32 (&f)[8]) {
    for_each<4>([&](auto k) {
        constexpr int at = decltype(k)::value / 2 * 4 + decltype(k)::value % 2;
        const u32 own = word[k.value], codes = own & 0x77777777;
        const u32 low = entry[2 * k.value], high = entry[2 * k.value + 1];
        f[at] = prmt(low, high, codes) | (own & 0x80808080);
        f[at + 2] = prmt(low, high, upper_half(codes)) | (own << 4 & 0x80808080);
    });
}
// To elements of two tokens, for store_transposed.
INLINE void pair_tokens(const u32 (&f)[8], u32 (&x)[8]) {
    for_each<4>([&](auto k) {
        x[2 * k.value] = prmt(f[2 * k.value], f[2 * k.value + 1], 0x5140);
        x[2 * k.value + 1] = prmt(f[2 * k.value], f[2 * k.value + 1], 0x7362);
    });
}
INLINE u32 transposed_row(int lane, int warp) { return lane * 64 + ((warp ^ (lane >> 1 & 3)) << 4); }

// ---- queries of a run

INLINE void load_e4m3_queries(const Arguments& a, const Run& run, u32 latents, u32 ropes, int t) {
    constexpr int BATCH = 4;
    const int lane = t % 32, warp = t / 32;
    auto quads = [&](const Quad& q) {  // 8 channels, in two words
        auto low = [&](u32 x) { return (QUERY == 0 ? low_float(x) : __int_as_float(x << 16)) * QUERY_FACTOR_F; };
        auto high = [&](u32 x) { return (QUERY == 0 ? high_float(x) : __int_as_float(x & 0xFFFF0000)) * QUERY_FACTOR_F; };
        const u32 first = to_e4m3(low(q.x), high(q.x), low(q.y), high(q.y));
        const u32 second = to_e4m3(low(q.z), high(q.z), low(q.w), high(q.w));
        const bool odd = lane % 2;
        const u32 other = shuffle_word(odd ? first : second, lane ^ 1);
        const u32 even_channels = odd ? other : first, odd_channels = odd ? second : other;
        return make_float2(__int_as_float(prmt(even_channels, odd_channels, 0x5410)),
                           __int_as_float(prmt(even_channels, odd_channels, 0x7632)));
    };
#pragma unroll 1
    for (int first = 0; first < ROWS; first += 4 * BATCH) {
        Quad latent[BATCH][2], rope{0, 0, 0, 0};
        for_each<BATCH>([&](auto k) {
            const int row = first + 4 * k.value + warp;
            const u64 at = (u64)run.token(row) * a.query_token_stride + run.head(row) * a.query_head_stride + lane * 8;
            const u16* from = (const u16*)a.query + at;
            latent[k.value][0] = latent[k.value][1] = {0, 0, 0, 0};
            if (row < run.rows)
                latent[k.value][0] = load_constant_16(from), latent[k.value][1] = load_constant_16(from + 256);
        });
        const int rope_row = first + 4 * (lane / 8) + warp;
        if (rope_row < run.rows)
            rope = load_constant_16((const u16*)a.rope_query + (u64)run.token(rope_row) * a.rope_token_stride +
                                    run.head(rope_row) * a.rope_head_stride + lane % 8 * 8);
        for_each<BATCH>([&](auto k) {
            const int row = first + 4 * k.value + warp;
            for_each<2>([&](auto half) {
                const float2 two = quads(latent[k.value][half.value]);
                const int piece = half.value * 16 + lane / 2;
                store_shared_2(latents + piece / 8 * (ROWS * 128) + row * 128 + ((piece % 8 ^ row % 8) << 4) + lane % 2 * 8,
                               __float_as_int(two.x), __float_as_int(two.y));
            });
        });
        const u32 gain = to_halves(GAIN, GAIN);
        store_shared_4(ropes + rope_row * 128 + ((lane % 8 ^ rope_row % 8) << 4),
                       {multiply_halves(query_pair(rope.x), gain), multiply_halves(query_pair(rope.y), gain),
                        multiply_halves(query_pair(rope.z), gain), multiply_halves(query_pair(rope.w), gain)});
    }
}

