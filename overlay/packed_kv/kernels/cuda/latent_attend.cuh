// Attention for 48 and 64 rows. Rows are the narrow side of S' = C Q', as up to 32 are, and the 64 of O = P V.
//
// Two warpgroups have every second tile each, and half of the channels of all sums. A group unpacks its tile: what is in
// registers is the left operand of S' at once, and goes to shared memory as values. It makes the weights, whose maxima come
// from the group that had the tile before. Both add the tile's values: its own group as soon as weights are there, the
// other one while it unpacks the next tile.
//
// No bulk copy into shared memory is issued. Threads store tiles, which products read: behind `tile_empty`, at which all
// warps arrive once their products have ended (`wgmma_wait`).
#pragma once
#include "latent_rows.cuh"

constexpr int THREADS = 256;
#ifndef SUMS_BEHIND
#define SUMS_BEHIND 8
#endif
#ifndef SUMS_A_GROUP
#define SUMS_A_GROUP 1
#endif
#ifndef PENDING_SCORES
#define PENDING_SCORES 2
#endif
// While a tile is unpacked, products of the one before are made: from this group of 32 channels on, so many of the four
// with each.
constexpr int FIRST_SUM = SUMS_BEHIND, SUMS_AT_ONCE = SUMS_A_GROUP;
static_assert(4 % SUMS_AT_ONCE == 0);
#ifndef LOADS_EARLY
#define LOADS_EARLY 0
#endif
#ifndef PART_1_AT
#define PART_1_AT 0
#endif
#ifndef EARLY_GROUPS
#define EARLY_GROUPS 2
#endif
constexpr int EARLY = EARLY_GROUPS;  // below 4
constexpr int PENDING = PENDING_SCORES;  // groups whose scores are being made while one is unpacked

constexpr int COLUMNS_OF_LANE = ROWS / 4;  // 8 n + 2 c + e: 2 n + e
typedef float Columns[COLUMNS_OF_LANE];
typedef float ColumnsOfWarp[4][20];  // by c; apart, so that lanes load from banks of their own
struct Stage {
    u8 values[BLOCKS][BLOCK_BYTES];
    u8 weights[TILE][128];  // fp16, swizzled
};
struct SharedMemory {
    Stage stages[2];                     // by group
    u8 queries[BLOCKS + 1][ROWS * 128];  // fp16 [9, ROWS, 64 channels]
    u16 ones[16][64];                    // fp16: the right operand of totals
    ColumnsOfWarp maxima[2];             // of a stage: of the scores so far
    ColumnsOfWarp tops[2][4];            // of a group, by warp: of the scores of its tile
    float totals[2][64];                 // of a run: of the weights of a group's tiles
    u8 runs[2][2][16];                   // of a stage that has the last tile of a run, in turn
    u64 tile_full[2];                    // a stage: its group fills, both groups read
    u64 tile_empty[2];                   // both groups have added the tile, its group fills
};
#define AT(MEMBER) OFFSET_OF(SharedMemory, MEMBER)
static_assert(sizeof(Stage) % 1024 == 0 && ROWS % 16 == 0, "tiles are swizzled");
enum NamedBarrier {
    MAXIMA_BARRIER = 1,   // and 2: a group, before its warps take each other's largest scores
    QUERIES_BARRIER = 3,  // both groups: before queries of a run replace others, and before products read them
    TOTALS_BARRIER = 4,   // both groups: before they read each other's totals of a run
};

INLINE void load_columns(u32 address, int c, Columns& x) {
    for_each<COLUMNS_OF_LANE / 4>([&](auto i) {
        u32 four[4];
        load_shared_4(address + c * 80 + i.value * 16, four);
        for_each<4>([&](auto j) { x[4 * i.value + j.value] = __int_as_float(four[j.value]); });
    });
}
INLINE void store_columns(u32 address, int c, const Columns& x) {
    auto bits = [&](int i) { return (u32)__float_as_int(x[i]); };
    for_each<COLUMNS_OF_LANE / 4>([&](auto i) {
        constexpr int j = 4 * decltype(i)::value;
        store_shared_4(address + c * 80 + j * 4, {bits(j), bits(j + 1), bits(j + 2), bits(j + 3)});
    });
}

INLINE void init_shared(u32 base) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            barrier_init<4>(base + AT(tile_full) + 8 * s), barrier_init<8>(base + AT(tile_empty) + 8 * s);
        }
        barrier_init_fence();
    }
    for (int i = threadIdx.x; i < (int)sizeof(SharedMemory::ones) / 4; i += THREADS)
        store_shared(base + AT(ones) + i * 4, 0x3C003C00);
    for (int i = threadIdx.x; i < (int)sizeof(SharedMemory::maxima) / 4; i += THREADS)
        store_shared(base + AT(maxima) + i * 4, 0);  // rows that a block lacks
    fence_async();
}

// A warp's micro-block in global memory.
struct Page {
    const u8* bytes;
    int tokens;  // that are stored, of its 16
    template <int WIDTH> INLINE void load(u32 offset, u32* x) const { load_page<WIDTH>(bytes + offset, x); }
    INLINE u32 stored_bytes(int row) const {
        return (row < tokens ? 0x00FF00FF : 0) | (row + 8 < tokens ? 0xFF00FF00 : 0);
    }
};

// Masks the scores of tokens that queries do not see: the first one sees `unmasked` of them from the lane's first one on,
// and `tokens` are stored.
INLINE void mask(int unmasked, int tokens, int c, float (&s)[ROWS / 2]) {
    const int first = hide_from_optimizer(blockIdx.x * ROWS + 2 * c);  // its rows are computed here, not held
    for_each<ROWS / 2>([&](auto j) {
        const int row = first + j.value / 4 * 8 + j.value % 2;
        if (j.value / 2 % 2 * 8 >= min(unmasked + row / HEADS, tokens)) s[j.value] = minus_infinity();
    });
}
// Moves the maxima where exponents of weights would exceed MOST_WEIGHT.
INLINE void move_maxima(const float (&s)[ROWS / 2], float factor, u32 base, int group, int warp, int r, int c, Columns& maximum) {
    float above = 0;
    for_each<COLUMNS_OF_LANE>([&](auto k) {
        constexpr int j = decltype(k)::value / 2 * 4 + decltype(k)::value % 2;
        above = maximum_of(above, maximum_of(s[j], s[j + 2]) * factor - maximum[k.value]);
    });
    if (__builtin_expect(!any_of_group(MAXIMA_BARRIER + group, above > MOST_WEIGHT), 1)) return;
    const u32 tops = base + AT(tops) + group * 4 * sizeof(ColumnsOfWarp);
    Columns top;
    for_each<COLUMNS_OF_LANE>([&](auto k) {
        constexpr int j = decltype(k)::value / 2 * 4 + decltype(k)::value % 2;
        float own = maximum_of(s[j], s[j + 2]);
#pragma unroll
        for (int l = 4; l < 32; l *= 2) own = maximum_of(own, shuffle_xor(own, l));
        top[k.value] = own * factor;
    });
    if (r == 0) store_columns(tops + warp * sizeof(ColumnsOfWarp), c, top);
    sync_group(MAXIMA_BARRIER + group);
#pragma unroll 1
    for (int w = 0; w < 4; w++) {
        load_columns(tops + w * sizeof(ColumnsOfWarp), c, top);
        for_each<COLUMNS_OF_LANE>([&](auto k) { maximum[k.value] = maximum_of(maximum[k.value], top[k.value]); });
    }
    // No warp stores largest scores of its next tile before all have come to the vote there.
}

typedef float Outputs[128];  // of rows r and r + 8; channels 8 i + 2 column + {0, 1}
// Of the rows r and r + 8 of a lane.
struct Pair {
    float of[2];
};

INLINE void store_outputs(const Arguments& a, const Run& run, const Outputs& o, Pair total, int half, int t) {
    for_each<2>([&](auto r) {
        const int row = t / 32 * 16 + t % 32 / 4 + r.value * 8, channel = half * 256 + t % 4 * 2;
        if (row >= run.rows) return;
        if (run.is_whole) {
            const u64 token = run.token(row), head = run.head(row);
            const float norm = total.of[r.value] > 0 ? LATENT_DIVISOR_F / total.of[r.value] : 0;
            const u64 at = token * a.output_token_stride + head * a.output_head_stride + channel;
            const float* constant = hide_from_optimizer(a.constant + channel);
#pragma unroll
            for (int j = 0; j < 32; j++)
                store_pair(a, at + j * 8, constant + j * 8, o[4 * j + 2 * r.value], o[4 * j + 2 * r.value + 1], norm);
        } else {
            float* target = a.partial_output + (u64)(run.slot + row) * RANK + channel;
#pragma unroll
            for (int j = 0; j < 32; j++)
                *(float2*)(target + j * 8) = make_float2(o[4 * j + 2 * r.value], o[4 * j + 2 * r.value + 1]);
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

// Tiles of which every second one is this group's.
INLINE void attend_partition(const Arguments& a, u32 base, int group, int t) {
    const int lane = t % 32, warp = t / 32, r = lane / 4, c = lane % 4;
    const int other = 1 - group;
    const u32 queries = matrix_descriptor(base + AT(queries), 16);
    const Tables tables(hide_from_optimizer((u32)0));
    const u32 tile = base + group * sizeof(Stage), own_row = own_offset(lane, warp);
    const int row = warp * 16 + r;  // of sums, and row + 8
    const u32 own_maxima = base + AT(maxima) + row % 8 / 2 * 80 + (row / 8 * 2 + row % 2) * 4;  // of row + 8: 8 bytes on
    Reader reader(a, warp, group, 2, true);
    Raw raw;
    RawRope<ROPE_BITS> rope;
    Outputs o;
    float totals[4];  // of rows r and r + 8: 0 and 2
    for_each<128>([&](auto j) { o[j.value] = 0; });
    for_each<4>([&](auto j) { totals[j.value] = 0; });
    Pair maximum{0, 0};
    int adds = 0, own_adds = 0;  // whether a tile of the run, or an own one, has been added

    auto page_of = [&]() { return Page{reader.page, reader.run.tokens - (reader.run.first + reader.tile) * TILE - warp * 16}; };
    auto load_first = [&](const Page& page) { rope.load(page, lane), raw.template load_part<0>(page, lane); };
    // Takes the maxima of a tile that is to be added.
    auto take_maxima = [&](int stage) {
        const u32 from = own_maxima + stage * sizeof(ColumnsOfWarp);
        const Pair now{__int_as_float(load_shared_again(from)), __int_as_float(load_shared_again(from + 8))};
        if (__builtin_expect(any_lane(now.of[0] != maximum.of[0] || now.of[1] != maximum.of[1]), 0)) {
            const Pair factor{exp2_fast(maximum.of[0] - now.of[0]), exp2_fast(maximum.of[1] - now.of[1])};
            for_each<128>([&](auto j) { o[j.value] *= factor.of[j.value / 2 % 2]; });
            for_each<4>([&](auto j) { totals[j.value] *= factor.of[j.value / 2]; });
            maximum = now;
        }
    };
    // 16 tokens.
    auto add_values = [&](int stage, auto k, auto is_own) {
        const u32 values = matrix_descriptor(base + stage * sizeof(Stage) + group * 4 * BLOCK_BYTES, BLOCK_BYTES);
        const u32 weights = matrix_descriptor(base + stage * sizeof(Stage) + OFFSET_OF(Stage, weights), 16);
        TransposedProduct<256>::add(o, weights + k.value * 128, values + k.value * 128, k.value ? 1 : adds);
        if constexpr (is_own.value)
            TransposedProduct<8>::add(totals, weights + k.value * 128, matrix_descriptor(base + AT(ones), 16), k.value ? 1 : own_adds);
    };
    auto add_tile = [&](int stage, auto is_own) {
        take_maxima(stage);
        wgmma_fence();
        for_each<4>([&](auto k) { add_values(stage, k, is_own); });
        wgmma_commit();
        adds = 1;
        if (is_own.value) own_adds = 1;
    };
    auto free_tile = [&](int stage) {
        sync_warp();
        if (lane == 0) arrive(base + AT(tile_empty) + 8 * stage);
    };
    // Behind the last tile of a run.
    auto end_run = [&](int stage, u32 number) {
        Run run;
        run.read(base + AT(runs) + 32 * stage + number / 2 % 2 * 16);
        const u32 shared = base + AT(totals) + row * 4;
        const Pair own{own_adds ? totals[0] : 0, own_adds ? totals[2] : 0};
        if (c == 0) {
            store_shared(shared + group * 256, __float_as_int(own.of[0]));
            store_shared(shared + group * 256 + 32, __float_as_int(own.of[1]));
        }
        sync_two_groups(TOTALS_BARRIER);
        const Pair total{own.of[0] + __int_as_float(load_shared_again(shared + other * 256)),
                         own.of[1] + __int_as_float(load_shared_again(shared + other * 256 + 32))};
        store_outputs(a, run, o, total, group, t);
        if (group == 0) store_stats(a, run, maximum, total, t);
    };
    bool more = reader.next();
    if (more) load_first(page_of());
#pragma unroll 1
    for (u32 number = group;; number += 2) {
        const bool is_first = more && reader.tile == 0;
        // Between this group's tile before and this one, a run may have ended, or two.
        if (const int changes = reader.runs + !more) {
            wgmma_wait<0>();
            const bool ends_before = more ? is_first : reader.base == number;  // the last of them, with tile `number` - 1
#pragma unroll 1
            for (int left = changes; left > 0; left--) {
                const bool is_others = left == 1 && ends_before && number > 0;
                if (is_others) {
                    barrier_wait(base + AT(tile_full) + 8 * other, (number - 1) / 2 % 2);
                    add_tile(other, Index<0>{});
                    wgmma_wait<0>();
                }
                if (number != group || left != changes) end_run(is_others ? other : group, is_others ? number - 1 : number - 2);
                if (is_others) free_tile(other);
                if (left == 1 && !more) return;
                sync_two_groups(QUERIES_BARRIER);
                if (left == 1 && is_first) load_queries<ROWS * 128>(a, reader.run, base + AT(queries), t);
                fence_async();
                sync_two_groups(QUERIES_BARRIER);
                adds = own_adds = 0;
            }
            reader.runs = 0;
        }
        const Page page = page_of();
        const int unmasked = reader.run.unmasked - reader.run.tokens + page.tokens;
        float s[ROWS / 2];
        // Two steps of 16 channels.
        auto add_scores = [&](auto step, const u32* f) {
            constexpr int first = decltype(step)::value;
            for_each<2>([&](auto k) {
                constexpr int own = first + decltype(k)::value;
                Product<ROWS>::add(s, f + 4 * k.value, queries + (own / 4 * ROWS * 128 + own % 4 * 32) / 16, own != 4 * BLOCKS);
            });
        };
        u32 word[16];
        const u32(&pairs)[16] = rope.pairs(word);
        wgmma_fence();
        add_scores(Index<4 * BLOCKS>{}, pairs), add_scores(Index<4 * BLOCKS + 2>{}, pairs + 8);
        wgmma_commit();
        if (t == 0 && reader.tile + 1 == reader.run.count) reader.run.write(base + AT(runs) + 32 * group + number / 2 % 2 * 16);
        more = reader.next();
        if (PREFETCHES && more && lane == 0) prefetch_bulk<MICRO_BLOCK_BYTES>(reader.page);
        sync_warp();
        auto store = [&](auto group_of_32, const u32 (&f)[8]) {
            constexpr int g = decltype(group_of_32)::value;
            const u32 to = tile + own_row + g / 2 * BLOCK_BYTES;
            store_matrices(to ^ (g % 2 * 64), f), store_matrices(to ^ (g % 2 * 64 + 32), f + 4);
        };
        u32 early[EARLY + 1][8];  // of groups that are unpacked before the tile may be stored
        for_each<GROUPS>([&](auto i) {
            constexpr int g = decltype(i)::value, k = (g - FIRST_SUM) * SUMS_AT_ONCE;
            if constexpr (g == PART_1_AT || g == 4 || g == 8) raw.template load_part<g / 4 + 1>(page, lane);
            u32 own[8];
            u32(&f)[8] = g < EARLY ? early[g < EARLY ? g : 0] : own;
            raw.template decode<g>(tables, f);
            if constexpr (g == EARLY) {
                wgmma_wait<0>();  // for sums of the tile before
                if (number > 1) free_tile(group);
                barrier_wait(base + AT(tile_empty) + 8 * group, (number / 2 + 1) % 2);
                for_each<EARLY>([&](auto j) { store(j, early[j.value]); });
            }

            if constexpr (k == 0) if (!is_first) {
                barrier_wait(base + AT(tile_full) + 8 * other, (number - 1) / 2 % 2);
                take_maxima(other);
            }
            wgmma_fence();
            // A run's first tile adds what nothing reads: the next sums replace it.
            if constexpr (k >= 0 && k < 4)
                for_each<SUMS_AT_ONCE>([&](auto j) { add_values(other, Index<k + decltype(j)::value>{}, Index<0>{}); });
            add_scores(Index<2 * g>{}, f);
            wgmma_commit();
            if constexpr (g >= EARLY) {
                store(i, f);
                wgmma_wait<PENDING>();
            }
            if constexpr (g == FIRST_SUM + 4 / SUMS_AT_ONCE - 1 + PENDING) if (!is_first) free_tile(other), adds = 1;
        });
        wgmma_wait<0>();
        if (__builtin_expect(unmasked < 16, 0)) mask(unmasked - r, page.tokens - r, c, s);
        if (LOADS_EARLY && more) load_first(page_of());
        Columns top;
        if (is_first) for_each<COLUMNS_OF_LANE>([&](auto k) { top[k.value] = EMPTY_MAXIMUM; });
        else load_columns(base + AT(maxima) + other * sizeof(ColumnsOfWarp), c, top);
        move_maxima(s, a.factor, base, group, warp, r, c, top);
        if (warp == 0 && r == 0) store_columns(base + AT(maxima) + group * sizeof(ColumnsOfWarp), c, top);
        const u32 weights = tile + OFFSET_OF(Stage, weights) + own_row;
        for_each<ROWS / 16>([&](auto i) {
            u32 pairs[4];
            for_each<4>([&](auto j) {
                constexpr int first = 8 * decltype(i)::value + 2 * decltype(j)::value;
                constexpr int k = 4 * decltype(i)::value + decltype(j)::value / 2 * 2;
                const float x = exp2_fast(s[first] * a.factor - top[k]);
                const float y = exp2_fast(s[first + 1] * a.factor - top[k + 1]);
                pairs[j.value] = to_halves(x, y);
            });
            store_matrices(weights ^ (i.value * 32), pairs);
        });
        finish_stores(base + AT(tile_full) + 8 * group, lane);
        if (!LOADS_EARLY && more) load_first(page_of());
        barrier_wait(base + AT(tile_full) + 8 * group, number / 2 % 2);
        add_tile(group, Index<1>{});
    }
}
