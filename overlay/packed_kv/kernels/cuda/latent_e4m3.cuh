// A TRIAL (issue 50, form A): attention for 64 rows with products in e4m3, 4-bit codes and RoPE of 16 bits alone.
//
// SCORERS (1 or 2) warpgroups unpack every SCORERS-th tile of a run each: codes become e4m3 by a table of the scale's byte,
// are the left operand of S' = C Q' from registers, and go to shared memory with tokens contiguous, as V of O = P V. Two more
// warpgroups have half of the channels of O each, and P in registers, which are loaded from shared memory.
//
// SUMS_SOFTMAX: scores go to shared memory in fp16, and both groups of sums make all weights from them, each tile and row with
// its own maximum. Else those that score make the weights, behind lazily moved maxima.
// PROMOTE: 0: sums of e4m3 products stay in the tensor core's accumulators (about 14 bits); 32 or 64: partial sums of so many
// channels are added to fp32 sums a tile, times a factor of the tile and row.
#pragma once
#include "e4m3_parts.cuh"

#ifndef SCORERS
#define SCORERS 2
#endif
#ifndef SUMS_SOFTMAX
#define SUMS_SOFTMAX 0
#endif
#ifndef BUFFERS
#define BUFFERS 1  // of partial sums
#endif
#ifndef PAGES
#define PAGES 2  // raw ones of a warp
#endif
// For what a tile waits: parts that are left out, whose results are then wrong. 1: sums' products, 2: scores' products in
// e4m3, 4: decoding, 8: the softmax of the groups of sums.
#ifndef LEAVE_OUT
#define LEAVE_OUT 0
#endif
INLINE void keep_word(u32 x) { asm volatile("" :: "r"(x)); }
#ifndef STAGES
#define STAGES 2
#endif
#ifndef PROMOTE
#define PROMOTE 32
#endif
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 88
#endif
#ifndef SUM_REGISTERS
#define SUM_REGISTERS 168
#endif
#define BLOCK_THREADS (128 * (SCORERS + 2))
static_assert(ROWS == 64 && ROPE_BITS == 16 && group_layout(0).bits == 4, "a trial");
constexpr int START_REGISTERS = SCORERS == 1 ? 168 : 128;
static_assert(SCORERS * SCORE_REGISTERS + 2 * SUM_REGISTERS <= (SCORERS + 2) * START_REGISTERS, "registers");
constexpr float HEADROOM = 3, MOST_BITS = 8;                          // weights are below 2^8

typedef float Columns[16];                // 8 n + 2 c + e: 2 n + e
typedef float ColumnsOfWarp[4][20];       // by c; apart, so that lanes load from banks of their own
struct Info { int number, runs, unmasked, tokens, is_first, rows, query, none; };
struct SharedMemory {
    u8 values[STAGES][RANK][TILE];        // e4m3, swizzled rows of 64 tokens: 16 w + 2 r + {0, 1} is token 16 w + r + {0, 8}
    u8 weights[STAGES][ROWS][SUMS_SOFTMAX ? 2 * TILE : TILE];  // likewise; or scores: fp16, swizzled, tokens in order
    u8 queries[4][ROWS][128];             // e4m3, swizzled; channels of 32 in the order of the left operand's bytes
    u8 rope_queries[ROWS][128];           // fp16, swizzled
    u8 ones[8][64];                       // e4m3
    u8 pages[4 * SCORERS][PAGES][MICRO_BLOCK_BYTES];
    u32 table[256][COPIES][2];            // by scale byte: e4m3 of the 8 magnitudes
    ColumnsOfWarp maxima[SUMS_SOFTMAX ? 1 : STAGES];
    ColumnsOfWarp tops[SUMS_SOFTMAX ? 1 : SCORERS][SUMS_SOFTMAX ? 1 : 4];
    Info infos[4 * SCORERS][PAGES];           // of raw pages
    u64 tile_full[STAGES], tile_empty[STAGES];
    u64 page_full[4 * SCORERS][PAGES];
};
#define AT(MEMBER) OFFSET_OF(SharedMemory, MEMBER)
static_assert(sizeof(SharedMemory) <= 227 * 1024, "shared memory");
enum NamedBarrier { MAXIMA_BARRIER = 1, QUERIES_BARRIER = 3 };

INLINE void init_shared(u32 base) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++)
            barrier_init<4>(base + AT(tile_full) + 8 * s), barrier_init<8>(base + AT(tile_empty) + 8 * s);
        for (int w = 0; w < 4 * PAGES * SCORERS; w++) barrier_init<1>(base + AT(page_full) + 8 * w);
        barrier_init_fence();
    }
    init_table(base + AT(table));
    for (int i = threadIdx.x; i < (int)sizeof(SharedMemory::ones) / 4; i += BLOCK_THREADS)
        store_shared(base + AT(ones) + i * 4, 0x38383838);
    for (int i = threadIdx.x; i < (int)sizeof(SharedMemory::maxima) / 4; i += BLOCK_THREADS)
        store_shared(base + AT(maxima) + i * 4, 0);
    fence_async();
}

// ---- scores and weights

INLINE void load_columns(u32 address, int c, Columns& x) {
    for_each<4>([&](auto i) {
        u32 four[4];
        load_shared_4(address + c * 80 + i.value * 16, four);
        for_each<4>([&](auto j) { x[4 * i.value + j.value] = __int_as_float(four[j.value]); });
    });
}
INLINE void store_columns(u32 address, int c, const Columns& x) {
    auto bits = [&](int i) { return (u32)__float_as_int(x[i]); };
    for_each<4>([&](auto i) {
        constexpr int j = 4 * decltype(i)::value;
        store_shared_4(address + c * 80 + j * 4, {bits(j), bits(j + 1), bits(j + 2), bits(j + 3)});
    });
}
INLINE void mask(int unmasked, int tokens, int c, float (&s)[32]) {
    const int first = hide_from_optimizer(blockIdx.x * ROWS + 2 * c);
    for_each<32>([&](auto j) {
        const int row = first + j.value / 4 * 8 + j.value % 2;
        if (j.value / 2 % 2 * 8 >= min(unmasked + row / HEADS, tokens)) s[j.value] = minus_infinity();
    });
}
// Moves the maxima where weights would be above 2^MOST_BITS.
INLINE void move_maxima(const float (&s)[32], float factor, u32 base, int group, int warp, int r, int c, Columns& maximum) {
    float above = 0;
    for_each<16>([&](auto k) {
        constexpr int j = decltype(k)::value / 2 * 4 + decltype(k)::value % 2;
        above = maximum_of(above, maximum_of(s[j], s[j + 2]) * factor - maximum[k.value]);
    });
    if (__builtin_expect(!any_of_group(MAXIMA_BARRIER + group, above > MOST_BITS), 1)) return;
    const u32 tops = base + AT(tops) + group * 4 * sizeof(ColumnsOfWarp);
    Columns top;
    for_each<16>([&](auto k) {
        constexpr int j = decltype(k)::value / 2 * 4 + decltype(k)::value % 2;
        float own = maximum_of(s[j], s[j + 2]);
#pragma unroll
        for (int l = 4; l < 32; l *= 2) own = maximum_of(own, shuffle_xor(own, l));
        top[k.value] = own * factor - HEADROOM;
    });
    if (r == 0) store_columns(tops + warp * sizeof(ColumnsOfWarp), c, top);
    sync_group(MAXIMA_BARRIER + group);
#pragma unroll 1
    for (int w = 0; w < 4; w++) {
        load_columns(tops + w * sizeof(ColumnsOfWarp), c, top);
        for_each<16>([&](auto k) { maximum[k.value] = maximum_of(maximum[k.value], top[k.value]); });
    }
}

struct FromShared {
    u32 address;
    template <int WIDTH> INLINE void load(u32 offset, u32* x) const { load_shared_4(address + offset, x); }
};
INLINE void unpack_and_score(const Arguments& a, u32 base, int group, int t) {
    const int lane = t % 32, warp = t / 32, r = lane / 4, c = lane % 4, own_warp = 4 * group + warp;
    const u32 table_of_lane = base + AT(table) + r % COPIES * 8;
    const u32 own_row = lane * 64 + ((warp ^ (lane >> 1 & 3)) << 4);  // of transposed matrices: row `lane` of 32
    u32 runs = 0, next_slot = 0;
    Reader reader(a, warp, group, SCORERS);
    // Begins the copy of the next tile's page, and says which tile that is.
    auto fetch = [&](LoadsDone done) {
        const bool more = reader.next();
        const u32 slot = next_slot, info = base + AT(infos) + (own_warp * PAGES + slot) * sizeof(Info);
        const u32 to = base + AT(pages) + (own_warp * PAGES + slot) * MICRO_BLOCK_BYTES;
        if (elect_lane()) {
            const int token = (reader.run.first + reader.tile) * TILE + warp * 16;
            store_shared_4(info, {more ? reader.base + reader.tile : ~0u, reader.runs, (u32)(reader.run.unmasked - token),
                                  (u32)(reader.run.tokens - token)});
            store_shared_4(info + 16, {(u32)(reader.tile == 0), (u32)reader.run.rows, (u32)reader.run.query, 0});
            if (more) {
                const u32 barrier = base + AT(page_full) + (own_warp * PAGES + slot) * 8;
                expect_bytes(barrier, MICRO_BLOCK_BYTES);
                copy_bulk<MICRO_BLOCK_BYTES>(done, to, barrier, reader.page);
            }
        }
        sync_warp();
        next_slot = slot + 1 == PAGES ? 0 : slot + 1;
        return more;
    };
    auto start_runs = [&](u32 until, int rows, int query) {
#pragma unroll 1
        for (; runs < until; runs++) {
            sync_threads<128 * SCORERS>(QUERIES_BARRIER);
            if (group == 0) {
                Run run;
                run.rows = rows, run.query = query;
                load_e4m3_queries(a, run, base + AT(queries), base + AT(rope_queries), t);
            }
            fence_async();
            sync_threads<128 * SCORERS>(QUERIES_BARRIER);
        }
    };
    bool more = true;
    for (int i = 0; i < PAGES; i++) if (more) more = fetch(nothing_loaded());
    u32 slot = 0, parity = 0;
#pragma unroll 1
    for (;;) {
        u32 info[8];
        load_shared_4(base + AT(infos) + (own_warp * PAGES + slot) * sizeof(Info), info);
        load_shared_4(base + AT(infos) + (own_warp * PAGES + slot) * sizeof(Info) + 16, info + 4);
        const u32 number = info[0];
        if (number == ~0u) break;
        start_runs(info[1], info[5], info[6]);
        const int unmasked = info[2], tokens = info[3];
        const u32 stage = shuffle_word(number % STAGES, 0);
        const u32 page = base + AT(pages) + (own_warp * PAGES + slot) * MICRO_BLOCK_BYTES;
        const u32 kept = (r < tokens ? 0x00FF00FF : 0) | (r + 8 < tokens ? 0xFF00FF00 : 0);
        wait_for_copies_of(base + AT(page_full) + (own_warp * PAGES + slot) * 8, parity);
        float s[32];
        {
            RawRope<16> rope;
            rope.load(FromShared{page}, lane);
            const u32 queries = matrix_descriptor(base + AT(rope_queries), 16);
            wgmma_fence();
            for_each<4>([&](auto k) { Product<64>::add(s, rope.word + 4 * k.value, queries + k.value * 2, k.value != 0); });
            wgmma_commit();
        }
        u32 word[2][4], entry[2][8], scales[2];
        auto load_words = [&](int block) { load_shared_4(page + 512 * block + 16 * lane, word[block % 2]); };
        auto load_scales = [&](int block) { scales[block % 2] = load_shared(page + SCALES_AT + r * 32 + 4 * block) & kept; };
        auto load_entries = [&](int block) {
            if (!(LEAVE_OUT & 4)) for_each<4>([&](auto k) {
                load_shared_2(table_of_lane + prmt(scales[block % 2], 0, 0x4440 + k.value) * (8 * COPIES), entry[block % 2] + 2 * k.value);
            });
        };
        load_scales(0), load_words(0), load_scales(1);
        load_entries(0);
        barrier_wait(base + AT(tile_empty) + 8 * stage, (number / STAGES + 1) % 2);
        const u32 values = base + AT(values) + stage * (RANK * TILE) + own_row;
        const u32 queries = matrix_descriptor(base + AT(queries), 16);
        for_each<BLOCKS>([&](auto b) {
            constexpr int block = decltype(b)::value;
            if constexpr (block + 1 < BLOCKS) load_words(block + 1), load_entries(block + 1);
            if constexpr (block + 2 < BLOCKS) load_scales(block + 2);
            u32 f[8], x[8];
            if constexpr (LEAVE_OUT & 4) for_each<8>([&](auto k) { f[k.value] = word[block % 2][k.value % 4] + k.value; });
            else decode_e4m3(word[block % 2], entry[block % 2], f);
            if constexpr (block == 0) wgmma_wait<0>();  // for products of another shape
            wgmma_fence();
            if constexpr (!(LEAVE_OUT & 2)) for_each<2>([&](auto i) {
                constexpr int step = 2 * block + decltype(i)::value;
                E4m3Product<64, ROWS_OF_128>::add(s, f + 4 * i.value, queries + (step / 4 * ROWS * 128 + step % 4 * 32) / 16, 1);
            });
            wgmma_commit();
            pair_tokens(f, x);
            store_transposed(values + 2 * block * 32 * TILE, x), store_transposed(values + (2 * block + 1) * 32 * TILE, x + 4);
            if constexpr (block + 1 < BLOCKS) wgmma_wait<1>();
        });
        fetch(LastLoad(page).wait());
        if (++slot == PAGES) slot = 0, parity ^= 1;
        wgmma_wait<0>();
        if constexpr (SUMS_SOFTMAX) {
            const float factor = a.factor * FACTOR;
            const u32 scores = base + AT(weights) + stage * (ROWS * TILE * 2) + (lane / 16 * 8 + lane % 8) * 128 +
                               ((2 * warp + lane / 8 % 2 ^ lane % 8) << 4);
            for_each<4>([&](auto q) {
                u32 x[4];
                for_each<4>([&](auto i) {
                    constexpr int at = 4 * (2 * decltype(q)::value + decltype(i)::value / 2) + 2 * (decltype(i)::value % 2);
                    x[i.value] = to_halves(s[at] * factor, s[at + 1] * factor);
                });
                store_transposed(scores + q.value * 16 * 128, x);
            });
            finish_stores(base + AT(tile_full) + 8 * stage, lane);
            continue;
        }
        if (__builtin_expect(unmasked < 16, 0)) mask(unmasked - r, tokens - r, c, s);
        const u32 before = (stage + STAGES - 1) % STAGES;
        if (number) barrier_wait(base + AT(tile_full) + 8 * before, (number - 1) / STAGES % 2);
        Columns top;
        if (info[4]) for_each<16>([&](auto k) { top[k.value] = EMPTY_MAXIMUM; });
        else load_columns(base + AT(maxima) + before * sizeof(ColumnsOfWarp), c, top);
        const float factor = a.factor * FACTOR;
        move_maxima(s, factor, base, group, warp, r, c, top);
        if (warp == 0 && r == 0) store_columns(base + AT(maxima) + stage * sizeof(ColumnsOfWarp), c, top);
        const u32 weights = base + AT(weights) + stage * (ROWS * TILE) + own_row;
        for_each<2>([&](auto i) {
            u32 p[4];
            for_each<4>([&](auto j) {
                constexpr int n = 4 * decltype(i)::value + decltype(j)::value;
                float e[4];
                for_each<4>([&](auto k) {
                    e[k.value] = exp2_fast(s[4 * n + k.value] * factor - top[2 * n + k.value % 2]);
                });
                p[j.value] = to_e4m3(e[0], e[2], e[1], e[3]);
            });
            store_transposed(weights + i.value * 32 * TILE, p);
        });
        finish_stores(base + AT(tile_full) + 8 * stage, lane);
    }
    start_runs(reader.runs, 0, 0);
}

// ---- sums

typedef float Outputs[4][32];  // of 64 channels; of rows r and r + 8; channels 8 i + 2 column + {0, 1}
struct Pair {
    float of[2];
};
INLINE void store_outputs(const Arguments& a, const Run& run, const Outputs& o, Pair total, int half, int t) {
    for_each<2>([&](auto r) {
        const int row = t / 32 * 16 + t % 32 / 4 + r.value * 8, channel = half * 256 + t % 4 * 2;
        if (row >= run.rows) return;
        if (run.is_whole) {
            const u64 token = run.token(row), head = run.head(row);
            const float norm = total.of[r.value] > 0 ? 1 / (GAIN * total.of[r.value]) : 0;
            const u64 at = token * a.output_token_stride + head * a.output_head_stride + channel;
            const float* constant = hide_from_optimizer(a.constant + channel);
#pragma unroll
            for (int j = 0; j < 32; j++)
                store_pair(a, at + j * 8, constant + j * 8, o[j / 8][j % 8 * 4 + 2 * r.value], o[j / 8][j % 8 * 4 + 2 * r.value + 1], norm);
        } else {
            float* target = a.partial_output + (u64)(run.slot + row) * RANK + channel;
#pragma unroll
            for (int j = 0; j < 32; j++)
                *(float2*)(target + j * 8) = make_float2(o[j / 8][j % 8 * 4 + 2 * r.value] * OUTPUT_UNIT, o[j / 8][j % 8 * 4 + 2 * r.value + 1] * OUTPUT_UNIT);
        }
    });
}
INLINE void store_stats(const Arguments& a, const Run& run, Pair maximum, Pair total, int t) {
    if (t % 4) return;
    for_each<2>([&](auto r) {
        const int row = t / 32 * 16 + t % 32 / 4 + r.value * 8;
        if (row >= run.rows) return;
        if (!run.is_whole)
            *(float2*)(a.partial_stats + 2 * (u64)(run.slot + row)) = make_float2(maximum.of[r.value], total.of[r.value]);
        else if (HAS_LSE)
            a.lse[(u64)run.token(row) * HEADS + run.head(row)] =
                (maximum.of[r.value] + log2_fast(total.of[r.value])) * 0.6931471805599453f;
    });
}

// Left operands of weights from a tile's scores. Returns by what exponents they are less.
INLINE Pair make_weights(const Arguments& a, const Runs& run, u32 scores, int tile, int t, u32 (&p)[8]) {
    const int lane = t % 32, c = lane % 4;
    u32 y[16];  // of 16 tokens: rows r and r + 8 of 2 c and 2 c + 1, then of 8 tokens on
    for_each<4>([&](auto m) { load_matrices(scores + ((2 * m.value + lane / 16 ^ lane % 8) << 4), y + 4 * m.value); });
    if (__builtin_expect((tile + 1) * TILE > run.unmasked, 0)) {
        const int token = tile * TILE + 2 * c, first = blockIdx.x * ROWS + t / 32 * 16 + lane / 4;
        const int limits[2] = {min(run.unmasked + first / HEADS, run.tokens), min(run.unmasked + (first + 8) / HEADS, run.tokens)};
        for_each<16>([&](auto k) {
            const int own = token + k.value / 4 * 16 + k.value % 4 / 2 * 8, left = limits[k.value % 2] - own;
            if (left < 1) y[k.value] = 0xFC00FC00;
            else if (left < 2) y[k.value] = (y[k.value] & 0xFFFF) | 0xFC000000;
        });
    }
    if constexpr (LEAVE_OUT & 8) {
        for_each<8>([&](auto k) { p[k.value] = (y[k.value] ^ y[k.value + 8]) & 0x3F3F3F3F; });
        return {0, 0};
    }
    Pair now;
    for_each<2>([&](auto r) {
        u32 top = y[r.value];
        for_each<7>([&](auto k) { top = maximum_of_halves(top, y[2 * (decltype(k)::value + 1) + decltype(r)::value]); });
        float own = maximum_of(low_float(top), high_float(top));
        own = maximum_of(own, shuffle_xor(own, 1));
        own = maximum_of(own, shuffle_xor(own, 2));
        now.of[r.value] = maximum_of(own, EMPTY_MAXIMUM) - 7;
    });
    for_each<8>([&](auto k) {
        constexpr int at = decltype(k)::value / 2 * 4 + decltype(k)::value % 2;
        const float less = now.of[k.value % 2];
        p[k.value] = to_e4m3(exp2_fast(low_float(y[at]) - less), exp2_fast(low_float(y[at + 2]) - less),
                             exp2_fast(high_float(y[at]) - less), exp2_fast(high_float(y[at + 2]) - less));
    });
    return now;
}

INLINE void add_tiles(const Arguments& a, u32 base, int half, int t) {
    const int lane = t % 32, warp = t / 32, row = warp * 16 + lane / 4;
    const u32 own_maxima = base + AT(maxima) + row % 8 / 2 * 80 + (row / 8 * 2 + row % 2) * 4;  // of row + 8: 8 bytes on
    const u32 weight_row = warp * 16 + lane % 16;  // of the matrices of a step: chunks lane / 16 and 2 on
    const u32 own_weights = base + AT(weights) + weight_row * TILE, swizzle = weight_row >> 1 & 3;
    const u32 ones = matrix_descriptor(base + AT(ones), 16);
    u32 number = 0;
    Runs run(a);
#pragma unroll 1
    while (run.next(a)) {
        Outputs o;
        float totals[4];  // of rows r and r + 8: 0 and 2
        for_each<128>([&](auto j) { o[j.value / 32][j.value % 32] = 0; });
        for_each<4>([&](auto j) { totals[j.value] = 0; });
        Pair maximum{EMPTY_MAXIMUM, EMPTY_MAXIMUM};
#pragma unroll 1
        for (int i = 0; i < run.count; i++, number++) {
            const u32 stage = number % STAGES;
            barrier_wait(base + AT(tile_full) + 8 * stage, number / STAGES % 2);
            Pair now;
            u32 p[8];
            if constexpr (SUMS_SOFTMAX) {
                now = make_weights(a, run, base + AT(weights) + stage * (ROWS * TILE * 2) + weight_row * 128, run.first + i, t, p);
            } else {
                const u32 from = own_maxima + stage * sizeof(ColumnsOfWarp);
                now = {__int_as_float(load_shared_again(from)), __int_as_float(load_shared_again(from + 8))};
                for_each<2>([&](auto k) {
                    load_matrices(own_weights + stage * (ROWS * TILE) + ((2 * k.value + lane / 16 ^ swizzle) << 4), p + 4 * k.value);
                });
            }
            const u32 values = matrix_descriptor(base + AT(values) + (stage * RANK + half * 256) * TILE, 16);
            constexpr float LAZY = PROMOTE ? 10 : 0;  // the factor of a tile's weights is at most 2 to this
            if (__builtin_expect(any_lane(now.of[0] > maximum.of[0] + LAZY || now.of[1] > maximum.of[1] + LAZY), 0)) {
                const Pair factor{exp2_fast(maximum.of[0] - now.of[0]), exp2_fast(maximum.of[1] - now.of[1])};
                for_each<128>([&](auto j) { o[j.value / 32][j.value % 32] *= factor.of[j.value / 2 % 2]; });
                for_each<4>([&](auto j) { totals[j.value] *= factor.of[j.value / 2]; });
                maximum = now;
            }
            if constexpr (LEAVE_OUT & 1) {
                for_each<8>([&](auto k) { keep_word(p[k.value]); });
            } else if constexpr (PROMOTE == 0) {
                wgmma_fence();
                for_each<2>([&](auto k) {
                    if constexpr (START_REGISTERS < 158) {  // where ptxas compiles no product of 256 columns
                        for_each<4>([&](auto n) {
                            E4m3Product<64, ROWS_OF_64>::add(o[n.value], p + 4 * k.value,
                                                             values + (n.value * 64 * TILE + k.value * 32) / 16, 1);
                        });
                    } else {
                        E4m3Product<256, ROWS_OF_64>::add((float(&)[128])o, p + 4 * k.value, values + k.value * 2, 1);
                    }
                    E4m3Product<8, ROWS_OF_64>::add(totals, p + 4 * k.value, ones, 1);
                });
                wgmma_commit();
                wgmma_wait<0>();
            } else {
                constexpr int N = PROMOTE ? PROMOTE : 32;
                const Pair factor{exp2_fast(now.of[0] - maximum.of[0]), exp2_fast(now.of[1] - maximum.of[1])};
                constexpr int PARTS_OF_HALF = 256 / N;
                float part[BUFFERS][N / 2], own[4];
                auto issue = [&](auto n) {
                    constexpr int chunk = decltype(n)::value;
                    wgmma_fence();
                    for_each<2>([&](auto k) {
                        E4m3Product<N, ROWS_OF_64>::add(part[chunk % BUFFERS], p + 4 * k.value,
                                                        values + (chunk * N * TILE + k.value * 32) / 16, k.value);
                        if constexpr (chunk == 0) E4m3Product<8, ROWS_OF_64>::add(own, p + 4 * k.value, ones, k.value);
                    });
                    wgmma_commit();
                };
                for_each<BUFFERS - 1>(issue);
                for_each<PARTS_OF_HALF>([&](auto n) {
                    constexpr int chunk = decltype(n)::value;
                    if constexpr (chunk + BUFFERS - 1 < PARTS_OF_HALF) {
                        issue(Index<chunk + BUFFERS - 1>{});
                        wgmma_wait<BUFFERS - 1>();
                    } else {
                        wgmma_wait<PARTS_OF_HALF - 1 - chunk>();
                    }
                    for_each<N / 2>([&](auto j) {
                        float& sum = o[chunk * N / 64][chunk * N % 64 / 2 + j.value];
                        sum = __fmaf_rn(part[chunk % BUFFERS][j.value], factor.of[j.value / 2 % 2], sum);
                    });
                    if constexpr (chunk == 0) for_each<4>([&](auto j) {
                        totals[j.value] = __fmaf_rn(own[j.value], factor.of[j.value / 2], totals[j.value]);
                    });
                });
            }
            sync_warp();
            if (lane == 0) arrive(base + AT(tile_empty) + 8 * stage);
        }
        const Pair total{totals[0], totals[2]};
        store_outputs(a, run, o, total, half, t);
        if (half == 0) store_stats(a, run, maximum, total, t);
    }
}

INLINE void attend_partition(const Arguments& a, u32 base, int group, int t) {
    if (group < SCORERS) {
        set_registers<SCORE_REGISTERS, START_REGISTERS>();
        unpack_and_score(a, base, group, t);
    } else {
        set_registers<SUM_REGISTERS, START_REGISTERS>();
        add_tiles(a, base, group - SCORERS, t);
    }
}
