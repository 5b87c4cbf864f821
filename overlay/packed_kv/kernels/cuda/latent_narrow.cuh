// Attention for up to 32 rows, which are the narrow side of both products: S' = C Q' and O' = V' P'. A lane has columns
// 8 n + 2 c + {0, 1} of both: in S' for tokens r and r + 8 of a warp's 16, in O' for these channels of each 64.
//
// Two warpgroups take turns in the tiles of a run. Unpacked codes are the left operand of S' directly from registers,
// and go to shared memory for O', which the third warpgroup computes.
#pragma once
#include "latent_queries.cuh"

namespace narrow {

// Registers of a thread of each kind of warpgroup; 504 in all.
constexpr int SCORE_REGISTERS = ROWS == 16 ? 192 : ROWS == 24 ? 184 : 168, SUM_REGISTERS = 504 - 2 * SCORE_REGISTERS;
constexpr int WEIGHT_BYTES = ROWS == 16 ? 32 : 64;  // of a token; 24 rows take the place of 32
struct Stage {
    u8 values[BLOCKS][BLOCK_BYTES];
    u8 weights[TILE][WEIGHT_BYTES];  // fp16
    float maxima[ROWS];              // of the scores so far
    float totals[4][ROWS];           // sums of a group's weights, by warp
    float tops[4][ROWS];             // of the scores of this tile, by warp
};
constexpr int STAGE_BYTES = (sizeof(Stage) + 1023) / 1024 * 1024, QUERY_BLOCK_BYTES = ROWS * 128;
struct SharedMemory {
    u8 stages[2][STAGE_BYTES];
    u8 queries[BLOCKS + 1][QUERY_BLOCK_BYTES];  // fp16 [9, ROWS, 64 channels]
    u8 pages[8][RawPage::BYTES];                // a warp's raw bytes, which come a tile ahead
    u64 tile_full[2];                           // a stage: the tile's group fills, all groups read
    u64 tile_empty[2];                          // group 2 has added the tile, the next tile's group fills
    u64 page_full[8];                           // a raw page: a warp's copy fills, the warp reads
};
#define IN_STAGE(MEMBER) OFFSET_OF(Stage, MEMBER)
enum NamedBarrier {
    MAXIMA_BARRIER = 1,   // and 2: a scoring group, before its warps read each other's largest scores
    QUERIES_BARRIER = 3,  // both scoring groups: before a run's queries replace others, and before these are read
};
typedef float NarrowOutputs[BLOCKS][ROWS / 2];
typedef float Columns[ROWS / 4];  // of columns 8 n + 2 c + e: 2 n + e

INLINE u32 column_at(int k, int c) { return (k / 2 * 8 + 2 * c + k % 2) * 4; }
INLINE void store_float(u32 address, float x) { store_shared(address, __float_as_int(x)); }
INLINE void load_columns(u32 address, int c, Columns& x) {
    for_each<ROWS / 8>([&](auto n) {
        u32 two[2];
        load_shared_2(address + column_at(2 * n.value, c), two);
        x[2 * n.value] = __int_as_float(two[0]), x[2 * n.value + 1] = __int_as_float(two[1]);
    });
}
// A token's weights of 8 rows: 32 or 64 bytes a token, swizzled within these bytes.
INLINE u32 weight_at(int token, int eight) {
    return token * WEIGHT_BYTES + ((eight ^ (token >> (ROWS == 16 ? 2 : 1) & (WEIGHT_BYTES / 16 - 1))) << 4);
}

INLINE void init_shared(u32 base) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; i++) barrier_init<4>(base + AT(tile_full) + 8 * i);
        for (int w = 0; w < 8; w++) barrier_init<RawPage::ARRIVALS>(base + AT(page_full) + 8 * w);
        barrier_init_fence();
    }
}

// The weights of a warp's 16 tokens, computed for its tile after the other group's tile before.
struct Weights {
    Columns maximum;  // of the run's tiles so far
    Columns total;    // of this group's

    // Takes the maxima from the stage of the tile before.
    INLINE void start(u32 before, int tile, int c) {
        Columns now;
        if (tile == 0) for_each<ROWS / 4>([&](auto k) { now[k.value] = EMPTY_MAXIMUM; });
        else load_columns(before + IN_STAGE(maxima), c, now);
        for_each<ROWS / 4>([&](auto k) {
            total[k.value] = tile < 2 ? 0 : total[k.value] * exp2_fast(maximum[k.value] - now[k.value]);
            maximum[k.value] = now[k.value];
        });
    }
    // Moves the maxima where exponents of weights would exceed MOST_WEIGHT.
    INLINE void move(const float (&s)[ROWS / 2], float factor, u32 tile, int group, int warp, int r, int c) {
        float above = 0;
        for_each<ROWS / 2>([&](auto j) {
            above = maximum_of(above, s[j.value] * factor - maximum[j.value / 4 * 2 + j.value % 2]);
        });
        if (__builtin_expect(!any_of_group(MAXIMA_BARRIER + group, above > MOST_WEIGHT), 1)) return;
        for_each<ROWS / 4>([&](auto k) {
            constexpr int j = k.value / 2 * 4 + k.value % 2;
            float top = maximum_of(s[j], s[j + 2]);
#pragma unroll
            for (int l = 4; l < 32; l *= 2) top = maximum_of(top, shuffle_xor(top, l));
            if (r == 0) store_float(tile + IN_STAGE(tops) + warp * ROWS * 4 + column_at(k.value, c), top * factor);
        });
        sync_group(MAXIMA_BARRIER + group);
        Columns own;
        for_each<ROWS / 4>([&](auto k) { own[k.value] = maximum[k.value]; });
        for_each<4>([&](auto w) {
            Columns top;
            load_columns(tile + IN_STAGE(tops) + w.value * ROWS * 4, c, top);
            for_each<ROWS / 4>([&](auto k) { own[k.value] = maximum_of(own[k.value], top[k.value]); });
        });
        for_each<ROWS / 4>([&](auto k) {
            total[k.value] *= exp2_fast(maximum[k.value] - own[k.value]);
            maximum[k.value] = own[k.value];
        });
    }
    INLINE void store(const float (&s)[ROWS / 2], float factor, u32 tile, bool is_last, int warp, int r, int c) {
        for_each<ROWS / 8>([&](auto n) {
            float e[4];
            for_each<4>([&](auto j) {
                constexpr int k = 2 * decltype(n)::value + decltype(j)::value % 2;
                e[j.value] = exp2_fast(s[4 * n.value + j.value] * factor - maximum[k]);
                total[k] += e[j.value];
            });
            const u32 all = tile + IN_STAGE(weights) + c * 4;
            store_shared(all + weight_at(warp * 16 + r, n.value), to_halves(e[0], e[1]));
            store_shared(all + weight_at(warp * 16 + r + 8, n.value), to_halves(e[2], e[3]));
        });
        if (is_last) for_each<ROWS / 4>([&](auto k) {
            float sum = total[k.value];
#pragma unroll
            for (int l = 4; l < 32; l *= 2) sum += shuffle_xor(sum, l);
            if (r == 0) store_float(tile + IN_STAGE(totals) + warp * ROWS * 4 + column_at(k.value, c), sum);
        });
        if (warp == 0 && r == 0)
            for_each<ROWS / 4>([&](auto k) { store_float(tile + IN_STAGE(maxima) + column_at(k.value, c), maximum[k.value]); });
    }
};

// Tiles group, group + 2, .. of each run.
INLINE void unpack_and_score(const Arguments& a, u32 base, int group, int t) {
    const int lane = t % 32, warp = t / 32, r = lane / 4, c = lane % 4;
    const u32 queries = matrix_descriptor(base + AT(queries), 16);
    const Tables tables(hide_from_optimizer((u32)0));
    u32 offsets[4], runs = 0;
    own_offsets(lane, warp, offsets);
    Reader reader(a, warp, group, 2);
    const int owner = 4 * group + warp;
    RawPage page(base + AT(pages) + owner * RawPage::BYTES, base + AT(page_full) + 8 * owner);
    Raw<0, BLOCKS> raw;
    RawRope<ROPE_BITS> rope;
    Weights weights;
    // Brings the queries of runs to shared memory. Once both groups have arrived, no product reads the old queries.
    auto start_runs = [&]() {
#pragma unroll 1
        for (; runs < reader.runs; runs++) {
            sync_two_groups(QUERIES_BARRIER);
            if (group == 0) load_queries<QUERY_BLOCK_BYTES>(a, reader.run, base + AT(queries), t);
            fence_async();
            sync_two_groups(QUERIES_BARRIER);
        }
    };
    bool more = reader.next();
    if (more) page.copy(nothing_loaded(), reader);
#pragma unroll 1
    while (more) {
        start_runs();
        const u32 number = reader.base + reader.tile, stage = number % 2, tile = base + stage * STAGE_BYTES;
        const int own = reader.tile;
        const bool is_last = own + 2 >= reader.run.count;
        page.start(reader, r);
        page.wait();
        rope.load(page, lane), raw.load(page, lane);
        float s[ROWS / 2];
        auto add = [&](auto block, const u32 (&f)[16]) {
            constexpr int number = decltype(block)::value;
            wgmma_fence();
            for_each<4>([&](auto k) {
                constexpr int step = (number * QUERY_BLOCK_BYTES + decltype(k)::value * 32) / 16;
                Product<ROWS>::add(s, f + 4 * k.value, queries + step, number < BLOCKS || k.value);
            });
            wgmma_commit();
            wgmma_wait<1>();
        };
        u32 word[16];
        add(Index<BLOCKS>{}, rope.pairs(word));  // while the loads go on
        const LoadsDone done = LastLoad(page.address).wait();
        more = reader.next();
        if (more) page.copy(done, reader);
        barrier_wait(base + AT(tile_empty) + 8 * stage, (number / 2 + 1) % 2);
        raw.store(tables, tile, offsets, add);
        wgmma_wait<0>();
        if (__builtin_expect(page.hides_some(), 0)) page.mask(r, c, s);
        const u32 before = 1 - stage;
        if (number) barrier_wait(base + AT(tile_full) + 8 * before, (number - 1) / 2 % 2);
        weights.start(base + before * STAGE_BYTES, own, c);
        weights.move(s, a.factor, tile, group, warp, r, c);
        weights.store(s, a.factor, tile, is_last, warp, r, c);
        finish_stores(base + AT(tile_full) + 8 * stage, lane);
    }
    start_runs();
}

INLINE void add_values(NarrowOutputs& o, u32 tile, int adds) {
    const u32 values = matrix_descriptor(tile, BLOCK_BYTES), weights = matrix_descriptor(tile + IN_STAGE(weights), 16);
    wgmma_fence();
    for_each<4>([&](auto k) {
        for_each<BLOCKS>([&](auto b) {
            TransposedProduct<ROWS>::add(o[b.value], values + ((b.value * BLOCK_BYTES + k.value * 2048) >> 4),
                                         weights + k.value * WEIGHT_BYTES, k.value ? 1 : adds);
        });
    });
    wgmma_commit();
}
INLINE void store_outputs(const Arguments& a, const Run& run, const NarrowOutputs& o, const Columns& total, int t) {
    const int first = t / 32 * 16 + t % 32 / 4;
    for_each<ROWS / 4>([&](auto k) {
        const int row = k.value / 2 * 8 + t % 4 * 2 + k.value % 2;
        if (row >= run.rows) return;
        auto each = [&](auto&& use) {
            for_each<2 * BLOCKS>([&](auto i) {
                constexpr int channel = decltype(i)::value / 2 * 64 + decltype(i)::value % 2 * 8;
                use(channel, o[i.value / 2][k.value / 2 * 4 + i.value % 2 * 2 + k.value % 2]);
            });
        };
        if (!run.is_whole) {
            float* partial = a.partial_output + (u64)(run.slot + row) * RANK + first;
            each([&](int channel, float x) { partial[channel] = x; });
            return;
        }
        const float norm = total[k.value] > 0 ? LATENT_DIVISOR_F / total[k.value] : 0;
        const u64 at = (u64)run.token(row) * a.output_token_stride + run.head(row) * a.output_head_stride + first;
        const float* constant = hide_from_optimizer(a.constant + first);
        each([&](int channel, float x) {
            x *= norm;
            if constexpr (HAS_CONSTANT) x += constant[channel];
            if constexpr (OUTPUT == 0) ((u16*)a.output + at)[channel] = to_halves(x, x);
            else if constexpr (OUTPUT == 1) ((u16*)a.output + at)[channel] = to_bfloats(x, x);
            else ((float*)a.output + at)[channel] = x;
            keep_order();  // constants in as few registers as possible
        });
    });
}
INLINE void store_stats(const Arguments& a, const Run& run, const Columns& maximum, const Columns& total, int t) {
    if (t >= 4) return;
    for_each<ROWS / 4>([&](auto k) {
        const int row = k.value / 2 * 8 + 2 * t + k.value % 2;
        if (row >= run.rows) return;
        if (!run.is_whole)
            *(float2*)(a.partial_stats + 2 * (u64)(run.slot + row)) = make_float2(maximum[k.value], total[k.value]);
        else if (HAS_LSE)
            a.lse[(u64)run.token(row) * HEADS + run.head(row)] =
                (maximum[k.value] + log2_fast(total[k.value])) * 0.6931471805599453f;
    });
}

INLINE void add_tiles(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, c = lane % 4;
    u32 number = 0;
    Runs run(a);
#pragma unroll 1
    while (run.next(a)) {
        NarrowOutputs o;  // without a value: the first products set it
        Columns maximum, total;
        for_each<ROWS / 4>([&](auto k) { maximum[k.value] = EMPTY_MAXIMUM, total[k.value] = 0; });
        auto turn = [&](int i, auto is_end) {
            // The compiler knows it to be equal in all lanes, so descriptors stay in uniform registers: 4 fewer moves
            // per product.
            const u32 stage = number % 2, tile = shuffle_word(base + stage * STAGE_BYTES, 0);
            barrier_wait(base + AT(tile_full) + 8 * stage, number / 2 % 2);
            Columns now;
            load_columns(tile + IN_STAGE(maxima), c, now);
            bool moves = false;
            for_each<ROWS / 4>([&](auto k) { moves |= now[k.value] != maximum[k.value]; });
            if (__builtin_expect(any_lane(moves), 0)) {
                Columns factor;
                for_each<ROWS / 4>([&](auto k) {
                    factor[k.value] = exp2_fast(maximum[k.value] - now[k.value]);
                    maximum[k.value] = now[k.value], total[k.value] *= factor[k.value];
                });
                for_each<BLOCKS>([&](auto b) {
                    for_each<ROWS / 2>([&](auto j) { o[b.value][j.value] *= factor[j.value / 4 * 2 + j.value % 2]; });
                });
            }
            if constexpr (is_end.value) for_each<4>([&](auto w) {  // a group's last tile
                Columns sum;
                load_columns(tile + IN_STAGE(totals) + w.value * ROWS * 4, c, sum);
                for_each<ROWS / 4>([&](auto k) { total[k.value] += sum[k.value]; });
            });
            add_values(o, tile, i != 0);
            wgmma_wait<0>();
            if (lane == 0) arrive(base + AT(tile_empty) + 8 * stage);
            number++;
        };
        int i = 0;
#pragma unroll 1
        for (; i < run.count - 2; i++) turn(i, Index<0>{});
#pragma unroll 1
        for (; i < run.count; i++) turn(i, Index<1>{});
        store_outputs(a, run, o, total, t);
        store_stats(a, run, maximum, total, t);
    }
}

INLINE void attend_partition(const Arguments& a, u32 base, int group, int t) {
    if (group < 2) {
        set_registers<SCORE_REGISTERS>();
        unpack_and_score(a, base, group, t);
    } else {
        set_registers<SUM_REGISTERS>();
        add_tiles(a, base, t);
    }
}

}  // namespace narrow
