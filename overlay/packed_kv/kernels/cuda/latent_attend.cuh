// Attention for 48 and 64 rows, which are rows of the left operand, as S and P hold them in registers. Three
// warpgroups:
//   0      scores, weights, and half of the channels of O
//   1      the other half of O; it unpacks SHARE of a tile's 8 blocks of 64 channels besides
//   2      unpacks the rest of a tile: raw bytes come into registers while the other half is unpacked, and fp16 goes to
//          shared memory, where the tile is keys and values at once
//
// No bulk copy is issued. Threads store tiles, and products read them. A store waits for EMPTY; the warps that add
// values arrive there once their products have ended (`wgmma_wait`).
#pragma once
#include "latent_queries.cuh"

namespace wide {

constexpr int SHARE = 2;  // by measurement
// Registers of a thread of each warpgroup; 504 in all.
constexpr int ATTEND_REGISTERS = 208, SECOND_REGISTERS = 200, UNPACK_REGISTERS = 96;

constexpr int TILE_BYTES = (BLOCKS + 1) * BLOCK_BYTES;  // the last block is RoPE's
// `*_full`: barriers at which the warps that fill a stage arrive, once each, and the readers wait. `*_empty`: the other
// way round.
struct SharedMemory {
    u8 tiles[2][TILE_BYTES];
    u8 queries[TILE_BYTES];     // fp16 [9, 64 rows, 64 channels]
    u8 weights[4][2048];        // of a tile, 16 channels a step of group 1
    float factors[128][4];      // of a thread of group 0: factors of its sums, and totals, for two rows each
    u8 runs[2][32];             // from group 0 to group 1
    u32 event[4];               // of a tile, the first word
    u64 low_full[2];            // the first 4 blocks of a tile: group 2 fills, group 0 reads
    u64 high_full[2];           // the blocks that follow, and RoPE's: group 2 fills, groups 0 and 1 read
    u64 share_full[2];          // the last SHARE blocks: group 1 fills, group 0 reads
    u64 empty[2];               // a tile: groups 0 and 1 have read, groups 1 and 2 fill
    u64 weights_full;           // weights, factors, event and run: group 0 fills, group 1 reads
    u64 weights_empty;
#if HAS_PICKS
    u32 picked[2][4];           // of a tile, a bit for each of a warp's 16 rows: group 2 fills, group 0 reads
#endif
};

enum NamedBarrier {
    QUERIES_BARRIER = 1,  // group 0: before a run's queries replace others, and before products read them
};

INLINE void store_rope(const RawRope<ROPE_BITS>& rope, u32 tile, const u32 (&offsets)[4]) {
    u32 own[16];
    const u32(&pairs)[16] = rope.pairs(own);
#pragma unroll
    for (int k = 0; k < 4; k++) store_matrices(tile + BLOCKS * BLOCK_BYTES + offsets[k], pairs + 4 * k);
}

// The blocks of tiles that the second attending group unpacks, two tiles ahead of its values.
struct Share {
    const Tables tables;
    u32 base, offsets[4];
    int lane;
    Reader reader;
    Raw<BLOCKS - SHARE, BLOCKS> raw;
    bool more;

    INLINE Share(const Arguments& a, u32 base, int t)
        : tables(hide_from_optimizer((u32)0)), base(base), lane(t % 32), reader(a, t / 32) {
        own_offsets(lane, t / 32, offsets);
        more = reader.next();
        if (!more) return;
        raw.load(reader, lane);
#pragma unroll 1
        for (u32 k = 0; k < 2; k++) unpack(k);
    }
    // Unpacks its blocks of tile number `tiles`, counted from the start.
    INLINE void unpack(u32 tiles) {
        if (!more) return;
        const u32 stage = tiles % 2;
        barrier_wait(base + AT(empty) + 8 * stage, (tiles / 2 + 1) % 2);
        raw.store(tables, base + stage * TILE_BYTES, offsets);
        finish_stores(base + AT(share_full) + 8 * stage, lane);
        more = reader.next();
        if (more) raw.load(reader, lane);
        sync_warp();
    }
};

// The fence that stores need waits for loads, too. So loads follow the last fence. Only loads of a tile's first half
// are under way while its second half is unpacked.
INLINE void unpack_tiles(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, warp = t / 32;
    const Tables tables(hide_from_optimizer((u32)0));
    u32 offsets[4];
    own_offsets(lane, warp, offsets);
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
#if HAS_PICKS
        const u32 picked = lanes_where(reader.row != NO_ROW) & 0xFFFF;
        if (lane == 0) store_shared(base + AT(picked) + 16 * stage + 4 * warp, picked);
#endif
        low.store(tables, tile, offsets);
        finish_stores(base + AT(low_full) + 8 * stage, lane);
        load_low();
        high.store(tables, tile, offsets);
        store_rope(rope, tile, offsets);
        finish_stores(base + AT(high_full) + 8 * stage, lane);
        if (more) high.load(reader, lane), rope.load(reader, lane);
        sync_warp();
    }
}

// The data of a tile that the second group needs.
enum { FIRST = 1, LAST = 2, END = 4 };
typedef float Outputs[128];  // of rows r and r + 8; channels 8 i + 2 column + {0, 1}
// Numbers of the rows r and r + 8 of a lane.
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

INLINE void rescale(Outputs& o, Pair factor) {
    if (any_lane(factor.of[0] != 1 || factor.of[1] != 1))
        for_each<128>([&](auto j) { o[j.value] *= factor.of[j.value / 2 % 2]; });
}
// O += P V of a tile, for half of the channels; O = P V if it is the first.
INLINE void add_values(Outputs& o, const u32 (&p)[16], u32 tile, int half, int adds) {
    const u32 values = matrix_descriptor(tile + half * 4 * BLOCK_BYTES, BLOCK_BYTES);
    wgmma_fence();
    for_each<4>([&](auto k) { add_product(o, p + 4 * k.value, values + (k.value * 2048 >> 4), k.value ? 1 : adds); });
    wgmma_commit();
}

// Moves the maxima of a lane's rows where exponents of weights would exceed MOST_WEIGHT, and notes the factors of the
// sums.
INLINE void move_maxima(Pair top, float scale, Pair& maximum, Pair& factor) {
    for_each<2>([&](auto r) {
        float own = maximum_of(top.of[r.value], shuffle_xor(top.of[r.value], 1));
        own = maximum_of(own, shuffle_xor(own, 2)) * scale;
        if (own > maximum.of[r.value] + MOST_WEIGHT) {
            factor.of[r.value] = exp2_fast(maximum.of[r.value] - own);
            maximum.of[r.value] = own;
        }
    });
}

// Ends the second group's loop after `tiles` tiles.
INLINE void end_weights(u32 base, u32 tiles, int t) {
    barrier_wait(base + AT(weights_empty), (tiles + 1) % 2);
    if (t == 0) store_shared(base + AT(event), END);
    sync_warp();
    if (t % 32 == 0) arrive(base + AT(weights_full));
}
// Brings a run's queries to shared memory. Once all threads have arrived, no product reads the old queries.
INLINE void start_run(const Arguments& a, const Run& run, u32 base, int t) {
    sync_group(QUERIES_BARRIER);
    load_queries<BLOCK_BYTES>(a, run, base + AT(queries), t);
    fence_async();
    sync_group(QUERIES_BARRIER);
}

// Adds 16-channel steps, given as distances in descriptors, to the scores of tile number `tiles`, counted from the
// start, as its blocks arrive.
template <class Add> INLINE void add_steps(u32 base, u32 tiles, Add&& add) {
    const u32 stage = tiles % 2, parity = tiles / 2 % 2;
    auto add_block = [&](auto block) {
        for_each<4>([&](auto k) { add(Index<(decltype(block)::value * BLOCK_BYTES + decltype(k)::value * 32) / 16>{}); });
    };
    barrier_wait(base + AT(low_full) + 8 * stage, parity);
    wgmma_fence();
    for_each<4>([&](auto b) { add_block(b); });
    wgmma_commit();
    barrier_wait(base + AT(high_full) + 8 * stage, parity);
    wgmma_fence();
    for_each<4 - SHARE>([&](auto b) { add_block(Index<4 + decltype(b)::value>{}); });
    add_block(Index<BLOCKS>{});
    barrier_wait(base + AT(share_full) + 8 * stage, parity);
    wgmma_fence();
    for_each<SHARE>([&](auto b) { add_block(Index<BLOCKS - SHARE + decltype(b)::value>{}); });
    wgmma_commit();
}
// S = Q C'.
INLINE void add_scores(float (&s)[32], u32 base, u32 tiles) {
    const u32 queries = matrix_descriptor(base + AT(queries), 16);
    const u32 keys = matrix_descriptor(base + tiles % 2 * TILE_BYTES, 16);
    add_steps(base, tiles, [&](auto step) {
        SharedProduct<64>::add(s, queries + step.value, keys + step.value, step.value != 0);
    });
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
    // Rows that the block lacks stay 0.
    for (int i = threadIdx.x; i < TILE_BYTES / 16; i += 384) store_shared_4(base + AT(queries) + i * 16, {0, 0, 0, 0});
}

#if HAS_PICKS
// Masks the scores of tokens that were not picked, in a lane's rows.
INLINE void mask(u32 picked_at, int column, float (&s)[32]) {
    u32 picked[4];
    load_shared_4(picked_at, picked);
    if (__builtin_expect(!any_lane((picked[0] & picked[1] & picked[2] & picked[3]) != 0xFFFF), 1)) return;
    for_each<32>([&](auto j) {
        constexpr int bit = j.value / 4 % 2 * 8 + j.value % 2;
        if (!(picked[j.value / 8] >> (column + bit) & 1)) s[j.value] = minus_infinity();
    });
}
#endif

INLINE void attend(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, row = t / 32 * 16 + lane / 4, column = lane % 4 * 2;
    const u32 weights = base + AT(weights) + t * 16, factors = base + AT(factors) + t * 16;
    u32 tiles = 0, runs = 0;  // from the start: they decide stage and parity
    Runs run(a);
#pragma unroll 1
    for (; run.next(a); runs++) {
        start_run(a, run, base, t);
        Pair maximum{EMPTY_MAXIMUM, EMPTY_MAXIMUM}, total{0, 0};
        Outputs o;  // without a value: the first products set it
        float s[32];
        add_scores(s, base, tiles);
        auto turn = [&](int i, auto is_last) {
            wgmma_wait<0>();
#if HAS_PICKS
            mask(base + AT(picked) + tiles % 2 * 16, column, s);
#else
            if (__builtin_expect((run.first + i + 1) * TILE > run.unmasked, 0)) {
                const int token = (run.first + i) * TILE + column, first = blockIdx.x * ROWS + row;
                const int limits[2] = {min(run.unmasked + first / HEADS, run.tokens),
                                       min(run.unmasked + (first + 8) / HEADS, run.tokens)};
                for_each<32>([&](auto j) {
                    if (token + j.value / 4 * 8 + j.value % 2 >= limits[j.value / 2 % 2]) s[j.value] = minus_infinity();
                });
            }
#endif
            Pair top{s[0], s[2]}, factor{1, 1};
            for_each<32>([&](auto j) {
                float& own = top.of[j.value / 2 % 2];
                own = maximum_of(own, s[j.value]);
            });
            auto exceeds = [&](int r) { return top.of[r] * a.factor > maximum.of[r] + MOST_WEIGHT; };
            const bool moves = any_lane(exceeds(0) || exceeds(1));
            if (__builtin_expect(moves, 0)) move_maxima(top, a.factor, maximum, factor);
            for_each<2>([&](auto r) { total.of[r.value] *= factor.of[r.value]; });
            u32 p[16];
            for_each<16>([&](auto k) {
                constexpr int r = k.value % 2;
                const float x = exp2_fast(s[2 * k.value] * a.factor - maximum.of[r]);
                const float y = exp2_fast(s[2 * k.value + 1] * a.factor - maximum.of[r]);
                total.of[r] += x + y;
                p[k.value] = to_halves(x, y);
            });
            if (moves) for_each<128>([&](auto j) { o[j.value] *= factor.of[j.value / 2 % 2]; });
            add_values(o, p, base + tiles % 2 * TILE_BYTES, 0, i != 0);
            if constexpr (is_last.value) for_each<2>([&](auto r) {
                total.of[r.value] += shuffle_xor(total.of[r.value], 1);
                total.of[r.value] += shuffle_xor(total.of[r.value], 2);
            });
            barrier_wait(base + AT(weights_empty), (tiles + 1) % 2);
            for_each<4>([&](auto k) {
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
            if constexpr (!is_last.value) {
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
        u32 p[16], x[4];
        for_each<4>([&](auto k) { load_shared_4(weights + k.value * 2048, p + 4 * k.value); });
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

}  // namespace wide
