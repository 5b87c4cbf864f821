// A TRIAL (issue 50, form W): latent_attend.cuh with products in e4m3; codes are unpacked to keys (channels contiguous) and
// to values (tokens contiguous), both in shared memory.
#pragma once
#include "e4m3_parts.cuh"

constexpr int SHARE = 2;
#ifndef REGISTERS_0
#define REGISTERS_0 208
#define REGISTERS_1 200
#define REGISTERS_2 96
#endif
constexpr int ATTEND_REGISTERS = REGISTERS_0, SECOND_REGISTERS = REGISTERS_1, UNPACK_REGISTERS = REGISTERS_2;
constexpr float MOST_BITS = 8, HEADROOM = 3;

struct Tile {
    u8 keys[4][TILE][128];   // e4m3, swizzled
    u8 rope[TILE][128];      // fp16, swizzled
    u8 values[RANK][TILE];   // e4m3, swizzled rows of 64 tokens
};
constexpr int TILE_BYTES = sizeof(Tile);
#define IN_TILE(MEMBER) OFFSET_OF(Tile, MEMBER)
struct SharedMemory {
    Tile tiles[2];
    u8 queries[4][ROWS][128];
    u8 rope_queries[ROWS][128];
    u8 weights[2][2048];
    float factors[128][4];
    u32 table[256][COPIES][2];
    u8 runs[2][32];
    u32 event[4];
    u64 low_full[2];
    u64 high_full[2];
    u64 share_full[2];
    u64 empty[2];
    u64 weights_full;
    u64 weights_empty;
};
#define AT(MEMBER) OFFSET_OF(SharedMemory, MEMBER)
static_assert(sizeof(SharedMemory) <= 227 * 1024, "shared memory");

struct Places {
    u32 table, keys[4], values;  // of a lane
    INLINE Places(u32 base, int lane, int warp) : table(base + AT(table) + lane / 4 % COPIES * 8) {
        own_offsets(lane, warp, keys);
        values = transposed_row(lane, warp);
    }
};
template <int FIRST, int LAST> INLINE void store_e4m3(const Raw<FIRST, LAST>& raw, const Places& places, u32 tile) {
    u32 entry[2][8];
    load_entries_of(places.table, raw.scales[FIRST] & raw.kept, entry[0]);
    for_each<LAST - FIRST>([&](auto i) {
        constexpr int own = decltype(i)::value, block = FIRST + own;
        if constexpr (block + 1 < LAST) load_entries_of(places.table, raw.scales[block + 1] & raw.kept, entry[(own + 1) % 2]);
        u32 f[8], x[8];
        decode_e4m3(raw.words.word + 4 * block, entry[own % 2], f);
        pair_tokens(f, x);
        for_each<2>([&](auto k) {
            constexpr int step = 2 * block + decltype(k)::value;
            store_matrices(tile + IN_TILE(keys) + step / 4 * (TILE * 128) + places.keys[step % 4], f + 4 * k.value);
            store_transposed(tile + IN_TILE(values) + step * 32 * TILE + places.values, x + 4 * k.value);
        });
    });
}

enum NamedBarrier {
    QUERIES_BARRIER = 1,  // group 0: before queries of a run replace others, and before products read them
};

INLINE void store_rope(const RawRope<ROPE_BITS>& rope, u32 tile, const u32 (&offsets)[4]) {
    u32 own[16];
    const u32(&pairs)[16] = rope.pairs(own);
#pragma unroll
    for (int k = 0; k < 4; k++) store_matrices(tile + IN_TILE(rope) + offsets[k], pairs + 4 * k);
}

// The blocks of tiles that the second attending group unpacks, two tiles ahead of its values.
struct Share {
    Places places;
    u32 base;
    int lane;
    Reader reader;
    Raw<BLOCKS - SHARE, BLOCKS> raw;
    bool more;

    INLINE Share(const Arguments& a, u32 base, int t)
        : places(base, t % 32, t / 32), base(base), lane(t % 32), reader(a, t / 32) {
        more = reader.next();
        if (!more) return;
        raw.load(reader, lane);
#pragma unroll 1
        for (u32 k = 0; k < 2; k++) unpack(k);
    }
    // Of the tile that is number `tiles` since the start.
    INLINE void unpack(u32 tiles) {
        if (!more) return;
        const u32 stage = tiles % 2;
        barrier_wait(base + AT(empty) + 8 * stage, (tiles / 2 + 1) % 2);
        store_e4m3(raw, places, base + stage * TILE_BYTES);
        finish_stores(base + AT(share_full) + 8 * stage, lane);
        more = reader.next();
        if (more) raw.load(reader, lane);
        sync_warp();
    }
};

// The fence that stores need waits for loads, too. So loads follow the last fence, but those of the first half of a tile
// are under way while the second is unpacked.
INLINE void unpack_tiles(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, warp = t / 32;
    const Places places(base, lane, warp);
    Reader reader(a, warp);
    if (!reader.next()) return;
    Raw<0, 4> low;
    Raw<4, BLOCKS - SHARE> high;
    RawRope<ROPE_BITS> rope;
    low.load(reader, lane), high.load(reader, lane), rope.load(reader, lane);
    bool more = true;
    auto load_low = [&]() {
        more = reader.next();
        if (more) low.load(reader, lane);
        sync_warp();
    };
#pragma unroll 1
    for (u32 tiles = 0; more; tiles++) {
        const u32 stage = tiles % 2, tile = base + stage * TILE_BYTES;
        barrier_wait(base + AT(empty) + 8 * stage, (tiles / 2 + 1) % 2);
        store_e4m3(low, places, tile);
        finish_stores(base + AT(low_full) + 8 * stage, lane);
        load_low();
        store_e4m3(high, places, tile);
        store_rope(rope, tile, places.keys);
        finish_stores(base + AT(high_full) + 8 * stage, lane);
        if (more) high.load(reader, lane), rope.load(reader, lane);
        sync_warp();
    }
}

// What the second group has to know of a tile.
enum { FIRST = 1, LAST = 2, END = 4 };
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
            const float norm = total.of[r.value] > 0 ? 1 / (GAIN * total.of[r.value]) : 0;
            const u64 at = token * a.output_token_stride + head * a.output_head_stride + channel;
            const float* constant = hide_from_optimizer(a.constant + channel);
#pragma unroll
            for (int j = 0; j < 32; j++)
                store_pair(a, at + j * 8, constant + j * 8, o[4 * j + 2 * r.value], o[4 * j + 2 * r.value + 1], norm);
        } else {
            float* target = a.partial_output + (u64)(run.slot + row) * RANK + channel;
#pragma unroll
            for (int j = 0; j < 32; j++)
                *(float2*)(target + j * 8) = make_float2(o[4 * j + 2 * r.value] * OUTPUT_UNIT, o[4 * j + 2 * r.value + 1] * OUTPUT_UNIT);
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

INLINE void rescale(Outputs& o, Pair factor) {
    if (any_lane(factor.of[0] != 1 || factor.of[1] != 1))
        for_each<128>([&](auto j) { o[j.value] *= factor.of[j.value / 2 % 2]; });
}
// O += P V of a tile, for half of the channels.
INLINE void add_values(Outputs& o, const u32 (&p)[8], u32 tile, int half, int adds) {
    const u32 values = matrix_descriptor(tile + IN_TILE(values) + half * 256 * TILE, 16);
    if constexpr (PROMOTE == 0) {
        wgmma_fence();
        for_each<2>([&](auto k) { E4m3Product<256, ROWS_OF_64>::add(o, p + 4 * k.value, values + k.value * 2, k.value ? 1 : adds); });
        wgmma_commit();
    } else {
        constexpr int N = PROMOTE ? PROMOTE : 32;
        const float keeps = adds ? 1 : 0;
        for_each<256 / N>([&](auto n) {
            float part[N / 2];
            wgmma_fence();
            for_each<2>([&](auto k) {
                E4m3Product<N, ROWS_OF_64>::add(part, p + 4 * k.value, values + (n.value * N * TILE + k.value * 32) / 16, k.value);
            });
            wgmma_commit();
            wgmma_wait<0>();
            for_each<N / 2>([&](auto j) {
                float& sum = o[n.value * (N / 2) + j.value];
                sum = __fmaf_rn(sum, keeps, part[j.value]);  // in place of a factor of the tile
            });
        });
    }
}

// Moves the maxima of a lane's rows where exponents of weights would exceed MOST_WEIGHT, and notes by what sums shrink.
INLINE void move_maxima(Pair top, float scale, Pair& maximum, Pair& factor) {
    for_each<2>([&](auto r) {
        float own = maximum_of(top.of[r.value], shuffle_xor(top.of[r.value], 1));
        own = maximum_of(own, shuffle_xor(own, 2)) * scale;
        own -= HEADROOM;
        if (own > maximum.of[r.value] + (MOST_BITS - HEADROOM)) {
            factor.of[r.value] = exp2_fast(maximum.of[r.value] - own);
            maximum.of[r.value] = own;
        }
    });
}

// Ends the second group's loop, behind `tiles` tiles.
INLINE void end_weights(u32 base, u32 tiles, int t) {
    barrier_wait(base + AT(weights_empty), (tiles + 1) % 2);
    if (t == 0) store_shared(base + AT(event), END);
    sync_warp();
    if (t % 32 == 0) arrive(base + AT(weights_full));
}
// Brings a run's queries to shared memory, which no product reads any more when all threads have come.
INLINE void start_run(const Arguments& a, const Run& run, u32 base, int t) {
    sync_group(QUERIES_BARRIER);
    load_e4m3_queries(a, run, base + AT(queries), base + AT(rope_queries), t);
    fence_async();
    sync_group(QUERIES_BARRIER);
}

// S = Q C' of the tile that is number `tiles` since the start, as its blocks come.
INLINE void add_scores(float (&s)[32], u32 base, u32 tiles) {
    const u32 stage = tiles % 2, parity = tiles / 2 % 2, tile = base + stage * TILE_BYTES;
    const u32 queries = matrix_descriptor(base + AT(queries), 16), keys = matrix_descriptor(tile + IN_TILE(keys), 16);
    const u32 rope_queries = matrix_descriptor(base + AT(rope_queries), 16), rope = matrix_descriptor(tile + IN_TILE(rope), 16);
    auto add_block = [&](auto block) {
        for_each<2>([&](auto k) {
            constexpr int step = 2 * decltype(block)::value + decltype(k)::value, at = (step / 4 * (TILE * 128) + step % 4 * 32) / 16;
            add_e4m3_shared(s, queries + at, keys + at, step != 0);
        });
    };
    barrier_wait(base + AT(low_full) + 8 * stage, parity);
    wgmma_fence();
    for_each<4>([&](auto b) { add_block(b); });
    wgmma_commit();
    barrier_wait(base + AT(high_full) + 8 * stage, parity);
    wgmma_fence();
    for_each<4 - SHARE>([&](auto b) { add_block(Index<4 + decltype(b)::value>{}); });
    barrier_wait(base + AT(share_full) + 8 * stage, parity);
    wgmma_fence();
    for_each<SHARE>([&](auto b) { add_block(Index<BLOCKS - SHARE + decltype(b)::value>{}); });
    wgmma_fence();
    for_each<4>([&](auto k) { SharedProduct<64>::add(s, rope_queries + k.value * 2, rope + k.value * 2, 1); });
    wgmma_commit();
}

INLINE void init_shared(u32 base) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            barrier_init<4>(base + AT(low_full) + 8 * s), barrier_init<4>(base + AT(high_full) + 8 * s);
            barrier_init<4>(base + AT(share_full) + 8 * s), barrier_init<8>(base + AT(empty) + 8 * s);
        }
        barrier_init<4>(base + AT(weights_full)), barrier_init<4>(base + AT(weights_empty));
        barrier_init_fence();
    }
    init_table(base + AT(table));
}

INLINE void attend(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, row = t / 32 * 16 + lane / 4, column = lane % 4 * 2;
    const u32 weights = base + AT(weights) + t * 16, factors = base + AT(factors) + t * 16;
    const float factor_of_scores = a.factor * FACTOR;
    u32 tiles = 0, runs = 0;  // since the start: they say which stage and which parity
    Runs run(a);
#pragma unroll 1
    for (; run.next(a); runs++) {
        start_run(a, run, base, t);
        Pair maximum{EMPTY_MAXIMUM, EMPTY_MAXIMUM}, total{0, 0};
        Outputs o;
        if (PROMOTE) for_each<128>([&](auto j) { o[j.value] = 0; });
        float s[32];
        add_scores(s, base, tiles);
        auto turn = [&](int i, auto is_last) {
            wgmma_wait<0>();
            if (__builtin_expect((run.first + i + 1) * TILE > run.unmasked, 0)) {
                const int token = (run.first + i) * TILE + column, first = blockIdx.x * ROWS + row;
                const int limits[2] = {min(run.unmasked + first / HEADS, run.tokens),
                                       min(run.unmasked + (first + 8) / HEADS, run.tokens)};
                for_each<32>([&](auto j) {
                    if (token + j.value / 4 * 8 + j.value % 2 >= limits[j.value / 2 % 2]) s[j.value] = minus_infinity();
                });
            }
            Pair top{s[0], s[2]}, factor{1, 1};
            for_each<32>([&](auto j) {
                float& own = top.of[j.value / 2 % 2];
                own = maximum_of(own, s[j.value]);
            });
            auto exceeds = [&](int r) { return top.of[r] * factor_of_scores > maximum.of[r] + MOST_BITS; };
            const bool moves = any_lane(exceeds(0) || exceeds(1));
            if (__builtin_expect(moves, 0)) move_maxima(top, factor_of_scores, maximum, factor);
            for_each<2>([&](auto r) { total.of[r.value] *= factor.of[r.value]; });
            u32 p[8];
            for_each<8>([&](auto k) {  // of 16 tokens, rows r and r + 8: bytes 4 c.. are of tokens 2 c, 2 c + 8, 2 c + 1, 2 c + 9
                constexpr int r = decltype(k)::value % 2, first = decltype(k)::value / 2 * 8 + 2 * r;
                float e[4];
                for_each<4>([&](auto j) {
                    constexpr int at = first + decltype(j)::value % 2 * 4 + decltype(j)::value / 2;
                    e[j.value] = exp2_fast(s[at] * factor_of_scores - maximum.of[r]);
                });
                total.of[r] += (e[0] + e[1]) + (e[2] + e[3]);
                p[k.value] = to_e4m3(e[0], e[1], e[2], e[3]);
            });
            if (moves) for_each<128>([&](auto j) { o[j.value] *= factor.of[j.value / 2 % 2]; });
            if constexpr (PROMOTE == 0) add_values(o, p, base + tiles % 2 * TILE_BYTES, 0, i != 0);
            if constexpr (is_last.value) for_each<2>([&](auto r) {
                total.of[r.value] += shuffle_xor(total.of[r.value], 1);
                total.of[r.value] += shuffle_xor(total.of[r.value], 2);
            });
            barrier_wait(base + AT(weights_empty), (tiles + 1) % 2);
            for_each<2>([&](auto k) {
                store_shared_4(weights + k.value * 2048, {p[4 * k.value], p[4 * k.value + 1], p[4 * k.value + 2], p[4 * k.value + 3]});
            });
            store_shared_4(factors, {(u32)__float_as_int(factor.of[0]), (u32)__float_as_int(factor.of[1]),
                                     (u32)__float_as_int(total.of[0]), (u32)__float_as_int(total.of[1])});
            if (t == 0) {
                store_shared(base + AT(event), (i == 0 ? FIRST : 0) | (is_last.value ? LAST : 0));
                if (is_last.value) run.write(base + AT(runs) + runs % 2 * 32);
            }
            sync_warp();
            if (lane == 0) arrive(base + AT(weights_full));
            if constexpr (PROMOTE != 0) {
                if constexpr (!is_last.value) add_scores(s, base, tiles + 1);
                add_values(o, p, base + tiles % 2 * TILE_BYTES, 0, i != 0);
            } else if constexpr (!is_last.value) {
                add_scores(s, base, tiles + 1);
                wgmma_wait<2>();
            } else {
                wgmma_wait<0>();
            }
            if (lane == 0) arrive(base + AT(empty) + 8 * (tiles % 2));
            tiles++;
        };
#pragma unroll 1
        for (int i = 0; i < run.count - 1; i++) turn(i, Index<0>{});
        turn(run.count - 1, Index<1>{});
        store_outputs(a, run, o, total, 0, t);
        store_stats(a, run, maximum, total, t);
    }
    end_weights(base, tiles, t);
}

INLINE void attend_and_unpack(const Arguments& a, u32 base, int t) {
    const int lane = t % 32;
    const u32 weights = base + AT(weights) + t * 16, factors = base + AT(factors) + t * 16;
    Share share(a, base, t);
    u32 runs = 0;
    Outputs o;
    for_each<128>([&](auto j) { o[j.value] = 0; });
#pragma unroll 1
    for (u32 tiles = 0;; tiles++) {
        const u32 stage = tiles % 2;
        barrier_wait(base + AT(weights_full), tiles % 2);
        const u32 event = load_shared(base + AT(event));
        if (event & END) break;
        u32 p[8], x[4];
        for_each<2>([&](auto k) { load_shared_4(weights + k.value * 2048, p + 4 * k.value); });
        load_shared_4(factors, x);
        const Pair total{__int_as_float(x[2]), __int_as_float(x[3])};
        sync_warp();
        if (lane == 0) arrive(base + AT(weights_empty));
        rescale(o, {__int_as_float(x[0]), __int_as_float(x[1])});
        barrier_wait(base + AT(high_full) + 8 * stage, tiles / 2 % 2);
        add_values(o, p, base + stage * TILE_BYTES, 1, !(event & FIRST));
        wgmma_wait<0>();
        if (lane == 0) arrive(base + AT(empty) + 8 * stage);
        share.unpack(tiles + 2);
        if (event & LAST) {
            Run run;
            run.read(base + AT(runs) + runs++ % 2 * 32);
            store_outputs(a, run, o, total, 1, t);
        }
    }
}

INLINE void attend_partition(const Arguments& a, u32 base, int group, int t) {
    if (group == 0) {
        set_registers<ATTEND_REGISTERS>();
        attend(a, base, t);
    } else if (group == 1) {
        set_registers<SECOND_REGISTERS>();
        attend_and_unpack(a, base, t);
    } else {
        set_registers<UNPACK_REGISTERS>();
        unpack_tiles(a, base, t);
    }
}
