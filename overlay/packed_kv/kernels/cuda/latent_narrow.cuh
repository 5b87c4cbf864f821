// Attention for up to 32 rows, which are the narrow side of both products: S' = C Q' and O' = V' P'. A lane has columns
// 8 n + 2 c + {0, 1} of both; of S' tokens r and r + 8 of a warp's 16, of O' these channels of each 64.
#pragma once
#include "latent_attend.cuh"

constexpr int TOTALS_AT = FACTORS_AT + 256, TOPS_AT = TOTALS_AT + 512;  // fp32 [ROWS], [4 warps, ROWS], [4 warps, ROWS]
typedef float NarrowOutputs[4][ROWS / 2];
typedef float Columns[ROWS / 4];  // of columns 8 n + 2 c + e: 2 n + e
enum { MOVES = 8 };

INLINE u32 column_at(int k, int c) { return (k / 2 * 8 + 2 * c + k % 2) * 4; }
INLINE void store_float(u32 address, float x) { store_shared(address, __float_as_int(x)); }
INLINE float load_float(u32 address) { return __int_as_float(load_shared(address)); }
// A token's weights of 8 rows: 32 or 64 bytes a token, swizzled as far as they reach.
INLINE u32 weight_at(int token, int eight) {
    return token * (2 * ROWS) + ((eight ^ (token >> (ROWS == 16 ? 2 : 1) & (ROWS / 8 - 1))) << 4);
}

INLINE void rescale(NarrowOutputs& o, const Columns& factor) {
    for_each<4>([&](auto b) {
        for_each<ROWS / 2>([&](auto j) { o[b.value][j.value] *= factor[j.value / 4 * 2 + j.value % 2]; });
    });
}
INLINE void add_values(NarrowOutputs& o, u32 base, u32 tile, int half, int adds) {
    const u32 values = matrix_descriptor(tile + half * 4 * BLOCK_BYTES, BLOCK_BYTES);
    const u32 weights = matrix_descriptor(base + WEIGHTS_AT, 16);
    wgmma_fence();
    for_each<4>([&](auto k) {
        for_each<4>([&](auto b) {
            TransposedProduct<ROWS>::add(o[b.value], values + ((b.value * BLOCK_BYTES + k.value * 2048) >> 4),
                                         weights + (k.value * 32 * ROWS >> 4), k.value ? 1 : adds);
        });
    });
    wgmma_commit();
}
INLINE void store_outputs(const Arguments& a, u32 base, const Run& run, const NarrowOutputs& o, const Columns& total,
                          int half, int t) {
    const int first = half * 256 + t / 32 * 16 + t % 32 / 4;
    for_each<ROWS / 4>([&](auto k) {
        const int row = k.value / 2 * 8 + t % 4 * 2 + k.value % 2;
        if (row >= run.rows) return;
        const float norm = total[k.value] > 0 ? LATENT_DIVISOR_F / total[k.value] : 0;
        const u64 at = (u64)run.token(row) * a.output_token_stride + run.head(row) * a.output_head_stride;
        float* partial = a.partial_output + (u64)(run.slot + row) * RANK;
        for_each<8>([&](auto i) {
            const int channel = first + i.value / 2 * 64 + i.value % 2 * 8;
            float x = o[i.value / 2][k.value / 2 * 4 + i.value % 2 * 2 + k.value % 2];
            if (!run.is_whole) {
                partial[channel] = x;
                return;
            }
            x *= norm;
            if constexpr (HAS_CONSTANT) x += a.constant[channel];
            if constexpr (OUTPUT == 0) ((u16*)a.output)[at + channel] = to_halves(x, x);
            else if constexpr (OUTPUT == 1) ((u16*)a.output)[at + channel] = to_bfloats(x, x);
            else ((float*)a.output)[at + channel] = x;
        });
    });
}
INLINE void load_totals(u32 base, int c, Columns& total) {
    for_each<ROWS / 4>([&](auto k) {
        total[k.value] = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) total[k.value] += load_float(base + TOTALS_AT + w * ROWS * 4 + column_at(k.value, c));
    });
}

// S' = C Q'.
INLINE void add_scores(float (&s)[ROWS / 2], u32 base, u32 tiles) {
    const u32 queries = matrix_descriptor(base + QUERIES_AT, 16);
    const u32 keys = matrix_descriptor(base + tiles % 2 * TILE_BYTES, 16);
    add_steps(base, tiles, [&](auto step) {
        SharedProduct<ROWS>::add(s, keys + step.value, queries + step.value, step.value != 0);
    });
}

INLINE void attend_narrow(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, warp = t / 32, r = lane / 4, c = lane % 4;
    u32 tiles = 0, runs = 0;
    Runs run(a);
#pragma unroll 1
    for (; run.next(a); runs++) {
        start_run(a, run, base, t);
        Columns maximum, total;
        for_each<ROWS / 4>([&](auto k) { maximum[k.value] = EMPTY_MAXIMUM, total[k.value] = 0; });
        NarrowOutputs o;
        float s[ROWS / 2];
        add_scores(s, base, tiles);
        auto turn = [&](int i, auto is_last) {
            wgmma_wait<0>();
            if (__builtin_expect((run.first + i + 1) * TILE > run.unmasked, 0)) {
                const int token = (run.first + i) * TILE + warp * 16 + r;
                for_each<ROWS / 2>([&](auto j) {
                    const int row = blockIdx.x * ROWS + j.value / 4 * 8 + 2 * c + j.value % 2;
                    if (token + j.value / 2 % 2 * 8 >= min(run.unmasked + row / HEADS, run.tokens))
                        s[j.value] = minus_infinity();
                });
            }
            float above = 0;
            for_each<ROWS / 2>([&](auto j) {
                above = maximum_of(above, s[j.value] * a.factor - maximum[j.value / 4 * 2 + j.value % 2]);
            });
            const bool moves = any_of_group(1, above > MOST_WEIGHT);
            barrier_wait(base + WEIGHTS_EMPTY, (tiles + 1) % 2);
            Columns factor;
            if (__builtin_expect(moves, 0)) {
                Columns top;
                for_each<ROWS / 4>([&](auto k) {
                    constexpr int j = k.value / 2 * 4 + k.value % 2;
                    top[k.value] = maximum_of(s[j], s[j + 2]);
#pragma unroll
                    for (int l = 4; l < 32; l *= 2) top[k.value] = maximum_of(top[k.value], shuffle_xor(top[k.value], l));
                    if (r == 0) store_float(base + TOPS_AT + warp * ROWS * 4 + column_at(k.value, c), top[k.value] * a.factor);
                });
                sync_group(1);
                for_each<ROWS / 4>([&](auto k) {
                    float own = maximum[k.value];
#pragma unroll
                    for (int w = 0; w < 4; w++) own = maximum_of(own, load_float(base + TOPS_AT + w * ROWS * 4 + column_at(k.value, c)));
                    factor[k.value] = exp2_fast(maximum[k.value] - own);
                    maximum[k.value] = own, total[k.value] *= factor[k.value];
                    if (warp == 0 && r == 0) store_float(base + FACTORS_AT + column_at(k.value, c), factor[k.value]);
                });
                rescale(o, factor);
            }
            for_each<ROWS / 8>([&](auto n) {
                float e[4];
                for_each<4>([&](auto j) {
                    constexpr int k = 2 * decltype(n)::value + decltype(j)::value % 2;
                    e[j.value] = exp2_fast(s[4 * n.value + j.value] * a.factor - maximum[k]);
                    total[k] += e[j.value];
                });
                const u32 at = base + WEIGHTS_AT + c * 4;
                store_shared(at + weight_at(warp * 16 + r, n.value), to_halves(e[0], e[1]));
                store_shared(at + weight_at(warp * 16 + r + 8, n.value), to_halves(e[2], e[3]));
            });
            if constexpr (is_last.value) for_each<ROWS / 4>([&](auto k) {
                float& own = total[k.value];
#pragma unroll
                for (int l = 4; l < 32; l *= 2) own += shuffle_xor(own, l);
                if (r == 0) store_float(base + TOTALS_AT + warp * ROWS * 4 + column_at(k.value, c), own);
            });
            if (t == 0) {
                store_shared(base + EVENT_AT, (i == 0 ? FIRST : 0) | (is_last.value ? LAST : 0) | (moves ? MOVES : 0));
                if (is_last.value) run.write(base + RUNS_AT + runs % 2 * 32);
            }
            fence_async();
            sync_warp();
            if (lane == 0) arrive(base + WEIGHTS_FULL);
            barrier_wait(base + WEIGHTS_FULL, tiles % 2);
            add_values(o, base, base + tiles % 2 * TILE_BYTES, 0, i != 0);
            if constexpr (!is_last.value) {
                add_scores(s, base, tiles + 1);
                wgmma_wait<2>();
            } else {
                load_totals(base, c, total);
                wgmma_wait<0>();
            }
            if (lane == 0) arrive(base + EMPTY + 8 * (tiles % 2));
            tiles++;
        };
#pragma unroll 1
        for (int i = 0; i < run.count - 1; i++) turn(i, Index<0>{});
        turn(run.count - 1, Index<1>{});
        store_outputs(a, base, run, o, total, 0, t);
        if (warp == 0 && r == 0) for_each<ROWS / 4>([&](auto k) {
            const int row = k.value / 2 * 8 + 2 * c + k.value % 2;
            if (row >= run.rows) return;
            if (!run.is_whole)
                *(float2*)(a.partial_stats + 2 * (u64)(run.slot + row)) = make_float2(maximum[k.value], total[k.value]);
            else if (HAS_LSE)
                a.lse[(u64)run.token(row) * HEADS + run.head(row)] =
                    (maximum[k.value] + log2_fast(total[k.value])) * 0.6931471805599453f;
        });
    }
    end_weights(base, tiles, t);
}

INLINE void attend_narrow_and_unpack(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, c = lane % 4;
    Share share(a, base, t);
    u32 runs = 0;
    NarrowOutputs o;
    for_each<4>([&](auto b) { for_each<ROWS / 2>([&](auto j) { o[b.value][j.value] = 0; }); });
#pragma unroll 1
    for (u32 tiles = 0;; tiles++) {
        const u32 stage = tiles % 2;
        barrier_wait(base + WEIGHTS_FULL, tiles % 2);
        const u32 event = load_shared(base + EVENT_AT);
        if (event & END) break;
        Columns total;
        if (event & LAST) load_totals(base, c, total);
        if (event & MOVES) {
            Columns factor;
            for_each<ROWS / 4>([&](auto k) { factor[k.value] = load_float(base + FACTORS_AT + column_at(k.value, c)); });
            rescale(o, factor);
        }
        barrier_wait(base + HIGH_FULL + 8 * stage, tiles / 2 % 2);
        add_values(o, base, base + stage * TILE_BYTES, 1, !(event & FIRST));
        wgmma_wait<0>();
        if (lane == 0) arrive(base + WEIGHTS_EMPTY);
        if (lane == 0) arrive(base + EMPTY + 8 * stage);
        share.unpack(tiles + 2);
        if (event & LAST) {
            Run run;
            run.read(base + RUNS_AT + runs++ % 2 * 32);
            store_outputs(a, base, run, o, total, 1, t);
        }
    }
}
