// Decode attention over packed latents (MLA) for sm_90a. A latent of 512 channels is K and V at once; 64 more channels,
// RoPE's, belong to K alone.
//
// The grid is (row blocks, partitions). A row is a query head of a query token; a block has up to ROWS of a request's.
// A partition is a run of tiles of 64 tokens, of one request or of several in turn (`latent_schedule.py`). Three
// warpgroups:
//   0      decodes a tile: in registers it is the left operand of S' = C Q' (tokens x rows) as it lies there, and goes
//          to shared memory besides; then the softmax, and P' to shared memory
//   1, 2   O[:, half of the channels] += P V, with the tile as V
// Raw bytes reach shared memory by bulk copies, a micro-block a warp, and registers a tile ahead, so nothing waits for
// memory. A latent in registers and in the tile is value * 2^-7 in fp16.
//
// `latent_launch.py` defines, beside the names of `KernelLayout` (decode.cu):
//
//   ROWS, HEADS                         rows of a block: 16, 32, 48 or 64; query heads
//   RAW_BYTES, SCALES_AT, ROPE_AT       of a micro-block: bytes of words and scales; where scales and RoPE begin
//   MICRO_BLOCK_BYTES, MICRO_BLOCKS     bytes of a micro-block; micro-blocks of a page
//   QUERY, OUTPUT                       dtypes of queries and output: 0 is fp16, 1 bf16, 2 fp32
//   HAS_LSE, HAS_CONSTANT               whether log-sum-exps are written, and whether a constant is added to outputs
struct Arguments {
    // differs from call to call
    void* output;              // OUTPUT [tokens, HEADS, 512]
    const void* query;         // QUERY [tokens, HEADS, 512]
    const void* rope_query;    // QUERY [tokens, HEADS, 64]
    unsigned output_token_stride, output_head_stride, query_token_stride, query_head_stride;
    unsigned rope_token_stride, rope_head_stride;
    // the same for all layers of a step
    const int* block_table;    // [requests, blocks]
    const int* query_start;    // [requests + 1], first query token of each request, and their number
    const int* seq_lens;       // [requests], tokens in the cache, those of the query included
    const int* begins;         // [partitions + 1, 2], the request and tile where each begins, and the end
    const int* spans;          // [requests, 2], the first partition that has tiles of a request, and how many have
    float* partial_output;     // [partitions, 2, row blocks, ROWS, 512]: of the first request, of the last one
    float* partial_stats;      // [.., 2], the maximum of the scores and the sum of the weights of each partial output
    float* lse;                // [tokens, HEADS]
    unsigned table_stride, max_rows;  // most rows of a request
    float factor;              // from scores to exponents of 2
    // fixed for a layer
    const unsigned char* cache;  // [blocks, 16 MICRO_BLOCKS tokens, slot bytes]
    const float* constant;       // [512], added to the outputs
    unsigned block_stride;
};

#include "codes.cuh"
#include "wgmma.cuh"

// Of a thread of each warpgroup; 504 in all. With fewer for O's, the compiler runs products one by one.
constexpr int DECODER_REGISTERS = 152, VALUE_REGISTERS = 176;
constexpr int RANK = HEAD_DIM, TILE = TILE_TOKENS;
constexpr int BLOCK_BYTES = TILE * 128, TILE_BYTES = RANK / 64 * BLOCK_BYTES;  // a block is 64 channels of a tile
constexpr int QUERIES_AT = 2 * TILE_BYTES, QUERY_BLOCK = ROWS * 128;
constexpr int WEIGHTS_AT = QUERIES_AT + 9 * QUERY_BLOCK;
constexpr int RAW_AT = WEIGHTS_AT + TILE * 128;
constexpr int FACTORS_AT = RAW_AT + 4 * RAW_BYTES;         // fp32 [ROWS]: what outputs are multiplied by if maxima move
constexpr int MAXIMA_AT = FACTORS_AT + 4 * ROWS;            // fp32 [2, ROWS], of even and odd runs
constexpr int RUNS_AT = MAXIMA_AT + 8 * ROWS;               // [2], 32 bytes of a run
constexpr int EVENT_AT = RUNS_AT + 64, BARRIERS_AT = EVENT_AT + 16;
constexpr int FULL = BARRIERS_AT, EMPTY = FULL + 16, WEIGHTS_EMPTY = EMPTY + 16, RAW = WEIGHTS_EMPTY + 8;
constexpr int TOPS_AT = RAW + 40;                            // fp32 [4 warps, ROWS]
constexpr int USED_BYTES = TOPS_AT + 16 * ROWS;
static_assert(USED_BYTES <= SHARED_BYTES, "shared memory");
static_assert(RANK == 512 && GROUPS == 16 && TILE == 64 && ROWS % 16 == 0 && ROWS <= 64, "shape");
constexpr float QUERY_FACTOR_F = QUERY_FACTOR, LATENT_DIVISOR_F = LATENT_DIVISOR, EMPTY_MAXIMUM = -1e30f;
// What the value groups have to know of a tile.
enum { MOVES = 1, FIRST = 2, LAST = 4, END = 8 };

INLINE void store_float(u32 address, float x) { store_shared(address, __float_as_int(x)); }
INLINE float load_float(u32 address) { return __int_as_float(load_shared(address)); }

// A run of tiles of one request, as the value groups see it.
struct Run {
    int rows, query;  // rows of this block; the request's first query token
    bool is_whole;    // the request has no other parts
    u32 slot;         // of the first row in the partial results
    INLINE int token(int row) const { return query + (row + blockIdx.x * ROWS) / HEADS; }
    INLINE int head(int row) const { return (row + blockIdx.x * ROWS) % HEADS; }
    INLINE void write(u32 address) const { store_shared_4(address, {(u32)rows, (u32)query, is_whole, slot}); }
    INLINE void read(u32 address) {
        u32 x[4];
        load_shared_4(address, x);
        rows = x[0], query = x[1], is_whole = x[2], slot = x[3];
    }
};
// The runs of a partition.
struct Runs : Run {
    int request, begin, last_request, last_tile, first_request;  // where the next run begins; the end
    int index, first, count, tokens, unmasked;  // request, tiles, seq_len; tokens that the first query sees

    INLINE Runs(const Arguments& a) {
        const int* p = a.begins + 2 * blockIdx.y;
        request = load_int(p), begin = load_int(p + 1), last_request = load_int(p + 2), last_tile = load_int(p + 3);
        first_request = request;
    }
    INLINE bool next(const Arguments& a) {
        while (request < last_request || (request == last_request && begin < last_tile)) {
            index = request++, first = begin, begin = 0;
            tokens = load_int(a.seq_lens + index);
            query = load_int(a.query_start + index);
            const int queries = load_int(a.query_start + index + 1) - query;
            const int tiles = (tokens + TILE - 1) / TILE;
            count = (index == last_request ? last_tile : tiles) - first;
            rows = min(queries * HEADS - (int)blockIdx.x * ROWS, ROWS);
            unmasked = tokens - queries + 1;
            is_whole = count == tiles;
            slot = ((blockIdx.y * 2 + (index != first_request)) * gridDim.x + blockIdx.x) * ROWS;
            if (count > 0 && rows > 0) return true;
        }
        return false;
    }
};

// Two numbers of a query, QUERY, as fp16 with the gain.
INLINE u32 query_pair(u32 pair) {
    const float low = QUERY == 0 ? low_float(pair) : __int_as_float(pair << 16);
    const float high = QUERY == 0 ? high_float(pair) : __int_as_float(pair & 0xFFFF0000);
    return to_halves(low * QUERY_FACTOR_F, high * QUERY_FACTOR_F);
}
INLINE void load_queries(const Arguments& a, const Runs& run, u32 target, int t) {
    constexpr int PIECES = ROWS * 72, BATCH = 12;  // of 16 bytes
#pragma unroll 1
    for (int base = 0; base < PIECES; base += 128 * BATCH) {
        Quad x[BATCH];
        for_each<BATCH>([&](auto k) {
            const int i = base + k.value * 128 + t, row = i / 72, piece = i % 72;
            x[k.value] = {0, 0, 0, 0};
            if (i < PIECES && row < run.rows) {
                const u64 token = run.token(row), head = run.head(row);
                const u16* latent = (const u16*)a.query + token * a.query_token_stride + head * a.query_head_stride;
                const u16* rope = (const u16*)a.rope_query + token * a.rope_token_stride + head * a.rope_head_stride;
                x[k.value] = load_constant_16(piece < 64 ? latent + piece * 8 : rope + (piece - 64) * 8);
            }
        });
        for_each<BATCH>([&](auto k) {
            const int i = base + k.value * 128 + t, row = i / 72, piece = i % 72;
            if (i >= PIECES) return;
            Quad& q = x[k.value];
            if (piece < 64) {
                q = {query_pair(q.x), query_pair(q.y), query_pair(q.z), query_pair(q.w)};
            } else {  // keys of RoPE are values, not in units of 2^-7
                const u32 unit = to_halves(1 / LATENT_DIVISOR_F, 1 / LATENT_DIVISOR_F);
                q = {multiply_halves(query_pair(q.x), unit), multiply_halves(query_pair(q.y), unit),
                     multiply_halves(query_pair(q.z), unit), multiply_halves(query_pair(q.w), unit)};
            }
            store_shared_4(target + piece / 8 * QUERY_BLOCK + row * 128 + ((piece % 8 ^ row % 8) << 4), q);
        });
    }
}

// 64 channels of the lane's two tokens: the left operands of four products.
template <int BLOCK>
INLINE void decode_block(const Words& words, const u32 (&scales)[8], const Tables& tables, u32 (&f)[16]) {
    for_each<2>([&](auto i) {
        constexpr int group = 2 * BLOCK + i.value;
        constexpr float factor = group_layout(group).key_factor / LATENT_DIVISOR_F;
        u32 pairs[8];
        decode_group<group>(words, pairs, tables);
        const u32 gain = to_halves(factor, factor), word = scales[BLOCK];
        const u32 first = finite_halves(multiply_halves(scale_pair(word, 0x4040 + 0x202 * i.value), gain));
        const u32 second = finite_halves(multiply_halves(scale_pair(word, 0x4141 + 0x202 * i.value), gain));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32* target = f + 8 * i.value + 4 * half;
            target[0] = multiply_halves(pairs[2 * half], first);
            target[1] = multiply_halves(pairs[4 + 2 * half], second);
            target[2] = multiply_halves(pairs[2 * half + 1], first);
            target[3] = multiply_halves(pairs[5 + 2 * half], second);
        }
    });
}

INLINE void decode_tiles(const Arguments& a, u32 base, int t) {
    const int lane = t % 32, warp = t / 32, row = lane / 4, column = lane % 4;
    const u32 raw = base + RAW_AT + warp * RAW_BYTES, raw_barrier = base + RAW + 8 * warp;
    const Tables tables(hide_from_optimizer((u32)0));
    u32 offsets[4];  // of this lane's row of a step's four matrices in a block
    for_each<4>([&](auto k) {
        offsets[k.value] = (warp * 16 + lane % 16) * 128 + (((2 * k.value + lane / 16) ^ (lane & 7)) << 4);
    });
    const u64 queries = matrix_descriptor(base + QUERIES_AT, 16, 1024);
    u32 tiles = 0, copies = 0, runs = 0;  // since the start: they say which stage and which parity
    Runs run(a);
    for (; run.next(a); runs++) {
        const int* table = a.block_table + (u64)run.index * a.table_stride;
        const int last_micro_block = (run.tokens - 1) / 16;
        auto micro_block = [&](int i) { return min((run.first + i) * 4 + warp, last_micro_block); };
        auto block_of = [&](int i) { return load_int(table + micro_block(i) / MICRO_BLOCKS); };
        auto source = [&](int i, u32 block) {
            return a.cache + (u64)block * a.block_stride + micro_block(i) % MICRO_BLOCKS * MICRO_BLOCK_BYTES;
        };
        auto copy = [&](const u8* from) {
            if (!elect_lane()) return;
            expect_bytes(raw_barrier, RAW_BYTES);
            copy_bulk<RAW_BYTES>(raw, raw_barrier, from);
        };
        auto prefetch = [&](const u8* from) { if (elect_lane()) prefetch_bulk<MICRO_BLOCK_BYTES>(from); };
        Words words;
        u32 scales[8], rope[16];
        auto load_raw = [&]() {
            barrier_wait(raw_barrier, copies++ % 2);
            load_words(words, raw, 0, lane);
            load_shared_4(raw + SCALES_AT + row * 32, scales);
            load_shared_4(raw + SCALES_AT + row * 32 + 16, scales + 4);
        };
        auto load_rope = [&](const u8* from) {
            for_each<4>([&](auto i) {
                const Quad q = load_page_16(from + ROPE_AT + i.value * 512 + lane * 16);
                u32* target = rope + i.value / 2 * 8 + i.value % 2;  // [group][half][k][n3]
                target[0] = q.x, target[2] = q.y, target[4] = q.z, target[6] = q.w;
            });
        };
        const u8* page = source(0, block_of(0));
        copy(page);
        u32 next = block_of(min(1, run.count - 1)), after = block_of(min(2, run.count - 1));
        load_queries(a, run, base + QUERIES_AT, t);
        fence_async();
        sync_group(1);
        load_raw();
        load_rope(page);
        sync_warp();
        const u8* ahead = page;
        if (run.count > 1) {
            page = source(1, next);
            copy(page);
        }
        if (run.count > 2) {
            ahead = source(2, after);
            prefetch(ahead);
            next = block_of(min(3, run.count - 1));
        }
        const u32 maxima = base + MAXIMA_AT + runs % 2 * (4 * ROWS) + column * 8;  // of rows 8 n + 2 column + e
#pragma unroll 1
        for (int i = 0; i < run.count; i++, tiles++) {
            const u32 stage = tiles % 2, tile = base + stage * TILE_BYTES;
            const int token = (run.first + i) * TILE + warp * 16 + row;
            if (__builtin_expect((run.first + i + 1) * TILE > run.tokens, 0)) {  // bytes of others may be anything
                const u32 kept = (token < run.tokens ? 0x00FF00FF : 0) | (token + 8 < run.tokens ? 0xFF00FF00 : 0);
                for_each<8>([&](auto k) { scales[k.value] &= kept; });
            }
            float s[ROWS / 2];
            u32 operand[2][16];
            wgmma_fence();
            for_each<4>([&](auto k) {
                u32 f[4] = {rope[4 * k.value], rope[4 * k.value + 1], rope[4 * k.value + 2], rope[4 * k.value + 3]};
                Product<ROWS, 0>::add(s, f, queries + ((8 * QUERY_BLOCK + k.value * 32) >> 4), k.value != 0);
            });
            wgmma_commit();
            barrier_wait(base + EMPTY + 8 * stage, (tiles / 2 + 1) % 2);
            for_each<8>([&](auto b) {
                u32 (&f)[16] = operand[b.value % 2];
                wgmma_wait<1>();
                decode_block<b.value>(words, scales, tables, f);
#pragma unroll
                for (int k = 0; k < 4; k++) store_matrices(tile + b.value * BLOCK_BYTES + offsets[k], f + 4 * k);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    Product<ROWS, 0>::add(s, f + 4 * k, queries + ((b.value * QUERY_BLOCK + k * 32) >> 4), 1);
                wgmma_commit();
            });
            fence_async();
            const bool more = i + 1 < run.count;
            if (more) {
                load_rope(page);
                load_raw();
            }
            wgmma_wait<0>();
            for_each<ROWS / 2>([&](auto j) { s[j.value] *= a.factor; });
            if (__builtin_expect((run.first + i + 1) * TILE > run.unmasked, 0)) {
                for_each<ROWS / 2>([&](auto j) {
                    const int r = blockIdx.x * ROWS + j.value / 4 * 8 + 2 * column + j.value % 2;
                    const int limit = min(run.unmasked + r / HEADS, run.tokens);
                    if (token + j.value / 2 % 2 * 8 >= limit) s[j.value] = minus_infinity();
                });
            }
            float maximum[ROWS / 4];
            for_each<ROWS / 8>([&](auto n) {
                u32 two[2] = {0, 0};
                if (i) load_shared_2(maxima + n.value * 32, two);
                maximum[2 * n.value] = __int_as_float(two[0]), maximum[2 * n.value + 1] = __int_as_float(two[1]);
            });
            for_each<ROWS / 2>([&](auto j) { s[j.value] -= maximum[j.value / 4 * 2 + j.value % 2]; });
            float top[4] = {s[0], s[1], s[2], s[3]};
            for_each<ROWS / 2 - 4>([&](auto j) { top[j.value % 4] = maximum_of(top[j.value % 4], s[j.value + 4]); });
            const bool above = maximum_of(maximum_of(top[0], top[1]), maximum_of(top[2], top[3])) > 10;
            barrier_wait(base + WEIGHTS_EMPTY, (tiles + 1) % 2);
            const bool moves = any_of_group(1, above || i == 0);
            if (more) {
                sync_warp();
                if (i + 2 < run.count) {
                    page = ahead;
                    copy(page);
                }
                if (i + 3 < run.count) {
                    ahead = source(i + 3, next);
                    prefetch(ahead);
                    next = block_of(min(i + 4, run.count - 1));
                }
            }
            if (__builtin_expect(moves, 0)) {  // seldom: maxima move
                float change[ROWS / 4];
                for_each<ROWS / 4>([&](auto k) {
                    constexpr int j = k.value / 2 * 4 + k.value % 2;
                    float x = maximum_of(maximum_of(s[j], s[j + 2]), i ? 0 : EMPTY_MAXIMUM);
#pragma unroll
                    for (int l = 4; l < 32; l *= 2) x = maximum_of(x, shuffle_xor(x, l));
                    change[k.value] = x;
                });
                const u32 tops = base + TOPS_AT + 8 * column;
                if (row == 0) for_each<ROWS / 4>([&](auto k) {
                    store_float(tops + warp * ROWS * 4 + k.value / 2 * 32 + k.value % 2 * 4, change[k.value]);
                });
                sync_group(1);
                for_each<ROWS / 4>([&](auto k) {
                    const u32 at = tops + k.value / 2 * 32 + k.value % 2 * 4;
#pragma unroll
                    for (int w = 0; w < 4; w++)
                        change[k.value] = maximum_of(change[k.value], load_float(at + w * ROWS * 4));
                    maximum[k.value] += change[k.value];
                });
                if (warp == 0 && row == 0) for_each<ROWS / 4>([&](auto k) {
                    const u32 at = k.value / 2 * 32 + k.value % 2 * 4;
                    store_float(base + FACTORS_AT + column * 8 + at, exp2_fast(-change[k.value]));
                    store_float(maxima + at, maximum[k.value]);
                });
                for_each<ROWS / 2>([&](auto j) { s[j.value] -= change[j.value / 4 * 2 + j.value % 2]; });
            }
            if (t == 0) {
                store_shared(base + EVENT_AT, (moves ? MOVES : 0) | (i == 0 ? FIRST : 0) | (more ? 0 : LAST));
                if (i == 0) run.write(base + RUNS_AT + runs % 2 * 32);
            }
            for_each<ROWS / 16>([&](auto k) {
                u32 p[4];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const int j = 8 * k.value + q / 2 * 4 + q % 2 * 2;
                    p[q] = to_halves(exp2_fast(s[j]), exp2_fast(s[j + 1]));
                }
                store_matrices(base + WEIGHTS_AT + offsets[k.value], p);
            });
            sync_warp();
            if (lane == 0) arrive(base + FULL + 8 * stage);
        }
    }
    barrier_wait(base + WEIGHTS_EMPTY, (tiles + 1) % 2);
    if (t == 0) store_shared(base + EVENT_AT, END);
    sync_warp();
    if (lane == 0) arrive(base + FULL + 8 * (tiles % 2));
}

// Stores outputs of two channels.
INLINE void store_pair(const Arguments& a, u64 offset, const float* constant, float x, float y, float norm) {
    x *= norm, y *= norm;
    if constexpr (HAS_CONSTANT) x += constant[0], y += constant[1];
    if constexpr (OUTPUT == 0) *(u32*)((u16*)a.output + offset) = to_halves(x, y);
    else if constexpr (OUTPUT == 1) *(u32*)((u16*)a.output + offset) = to_bfloats(x, y);
    else ((float*)a.output)[offset] = x, ((float*)a.output)[offset + 1] = y;
    keep_order();  // constants in as few registers as can be
}

typedef float Outputs[128];  // of rows r and r + 8; channels 8 i + 2 column + {0, 1}

INLINE void store_run(
    const Arguments& a, u32 base, u32 odd, Outputs& o, float (&total)[2], int half, int warp, int lane) {
    Run run;
    run.read(base + RUNS_AT + odd * 32);
    for_each<2>([&](auto r) {
        total[r.value] += shuffle_xor(total[r.value], 1);
        total[r.value] += shuffle_xor(total[r.value], 2);
        const int row = warp * 16 + lane / 4 + r.value * 8, channel = half * 256 + lane % 4 * 2;
        if (row >= run.rows) return;
        const float maximum = load_float(base + MAXIMA_AT + (odd * ROWS + row) * 4);
        if (run.is_whole) {
            const u64 token = run.token(row), head = run.head(row);
            const float norm = total[r.value] > 0 ? LATENT_DIVISOR_F / total[r.value] : 0;
            const u64 at = token * a.output_token_stride + head * a.output_head_stride + channel;
            const float* constant = hide_from_optimizer(a.constant + channel);
#pragma unroll
            for (int j = 0; j < 32; j++)
                store_pair(a, at + j * 8, constant + j * 8, o[4 * j + 2 * r.value], o[4 * j + 2 * r.value + 1], norm);
            if (HAS_LSE && half == 0 && lane % 4 == 0)
                a.lse[token * HEADS + head] = (maximum + log2_fast(total[r.value])) * 0.6931471805599453f;
        } else {
            float* target = a.partial_output + (u64)(run.slot + row) * RANK + channel;
#pragma unroll
            for (int j = 0; j < 32; j++)
                *(float2*)(target + j * 8) = make_float2(o[4 * j + 2 * r.value], o[4 * j + 2 * r.value + 1]);
            if (half == 0 && lane % 4 == 0)
                *(float2*)(a.partial_stats + 2 * (u64)(run.slot + row)) = make_float2(maximum, total[r.value]);
        }
    });
}

INLINE void add_values(const Arguments& a, u32 base, int half, int t) {
    const int lane = t % 32, warp = t / 32;
    // lane i: row i % 8 of matrix i / 8; matrices are [tokens 0-7, 8-15][rows 0-7, 8-15]
    const u32 piece = (2 * warp + lane / 8 % 2) ^ (lane % 8);
    const u32 weights = base + WEIGHTS_AT + (lane / 16 * 8 + lane % 8) * 128 + (piece << 4);
    Outputs o;
    float total[2] = {0, 0};
    u32 odd = 0;
    for_each<128>([&](auto j) { o[j.value] = 0; });
#pragma unroll 1
    for (u32 tiles = 0;; tiles++) {
        const u32 stage = tiles % 2;
        barrier_wait(base + FULL + 8 * stage, tiles / 2 % 2);
        const u32 event = load_shared(base + EVENT_AT);
        if (event & END) break;
        u32 p[16];
        for_each<4>([&](auto k) { load_transposed_matrices(weights + k.value * 2048, p + 4 * k.value); });
        if (event & MOVES) {
            float factor[2] = {0, 0};
            if (!(event & FIRST)) {
                const u32 at = base + FACTORS_AT + (warp * 16 + lane / 4) * 4;
                factor[0] = load_float(at), factor[1] = load_float(at + 32);
            }
            for_each<128>([&](auto j) { o[j.value] *= factor[j.value / 2 % 2]; });
            total[0] *= factor[0], total[1] *= factor[1];
        }
        sync_warp();
        if (lane == 0) arrive(base + WEIGHTS_EMPTY);
        const u64 values = matrix_descriptor(base + stage * TILE_BYTES + half * 4 * BLOCK_BYTES, BLOCK_BYTES, 1024);
        wgmma_fence();
        for_each<4>([&](auto k) { Product<256, 1>::add(o, p + 4 * k.value, values + (k.value * 2048 >> 4), 1); });
        wgmma_commit();
        for_each<4>([&](auto k) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 x = p[4 * k.value + r], y = p[4 * k.value + 2 + r];
                total[r] += (low_float(x) + high_float(x)) + (low_float(y) + high_float(y));
            }
        });
        wgmma_wait<0>();
        if (lane == 0) arrive(base + EMPTY + 8 * stage);
        if (event & LAST) store_run(a, base, odd, o, total, half, warp, lane), odd ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) latent_decode(const __grid_constant__ Arguments a) {
    const u32 base = shared_address(swizzled_memory());
    const int group = warpgroup(), t = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) barrier_init<4>(base + FULL + 8 * s), barrier_init<8>(base + EMPTY + 8 * s);
        barrier_init<8>(base + WEIGHTS_EMPTY);
        for (int w = 0; w < 4; w++) barrier_init<1>(base + RAW + 8 * w);
        barrier_init_fence();
    }
    // Weights of rows that the block lacks stay 0.
    for (int i = threadIdx.x; i < TILE * 8; i += 384) store_shared_4(base + WEIGHTS_AT + i * 16, {0, 0, 0, 0});
    sync_block();
    if (group == 0) {
        set_registers<DECODER_REGISTERS>();
        decode_tiles(a, base, t);
    } else {
        set_registers<VALUE_REGISTERS>();
        add_values(a, base, group - 1, t);
    }
}

// Combines the partial results of rows; one warp for 128 channels of a row. The grid is (rows of a request, requests).
extern "C" __global__ void __launch_bounds__(128) latent_merge(const __grid_constant__ Arguments a) {
    const int row = blockIdx.x, request = blockIdx.y, lane = threadIdx.x % 32, quarter = threadIdx.x / 32;
    const int query = a.query_start[request], rows = (a.query_start[request + 1] - query) * HEADS;
    const int first = a.spans[2 * request], parts = a.spans[2 * request + 1];
    if (row >= rows || parts == 1) return;  // 0: there is no token
    const int row_blocks = (a.max_rows + ROWS - 1) / ROWS, block = row / ROWS, own = row % ROWS;
    auto slot = [&](int part) {
        const int partition = first + part;
        return (((u64)partition * 2 + (a.begins[2 * partition] != request)) * row_blocks + block) * ROWS + own;
    };
    float top = EMPTY_MAXIMUM;
    for (int part = lane; part < parts; part += 32) top = maximum_of(top, a.partial_stats[2 * slot(part)]);
    for_each<5>([&](auto i) { top = maximum_of(top, shuffle_xor(top, 1 << i.value)); });
    float total = 0, x[4] = {0, 0, 0, 0};
    for (int start = 0; start < parts; start += 32) {
        const int part = start + lane;
        u64 own_slot = 0;
        float weight = 0;
        if (part < parts) {
            own_slot = slot(part);
            weight = exp2_fast(a.partial_stats[2 * own_slot] - top);
            total += weight * a.partial_stats[2 * own_slot + 1];
        }
        const int count = min(32, parts - start);
#pragma unroll 8
        for (int i = 0; i < count; i++) {
            const float w = shuffle(weight, i);
            const u32 s = shuffle_word((u32)own_slot, i);
            const float4 y = *(const float4*)(a.partial_output + (u64)s * RANK + quarter * 128 + lane * 4);
            x[0] += w * y.x, x[1] += w * y.y, x[2] += w * y.z, x[3] += w * y.w;
        }
    }
    for_each<5>([&](auto i) { total += shuffle_xor(total, 1 << i.value); });
    const float norm = total > 0 ? LATENT_DIVISOR_F / total : 0;
    const u64 token = query + row / HEADS, head = row % HEADS;
    const u64 at = token * a.output_token_stride + head * a.output_head_stride;
    const int channel = quarter * 128 + lane * 4;
    store_pair(a, at + channel, a.constant + channel, x[0], x[1], norm);
    store_pair(a, at + channel + 2, a.constant + channel + 2, x[2], x[3], norm);
    if (HAS_LSE && threadIdx.x == 0) a.lse[token * HEADS + head] = (top + log2_fast(total)) * 0.6931471805599453f;
}
