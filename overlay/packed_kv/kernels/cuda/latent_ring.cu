// Attention over the ring of recent latents, merged with the partial results over pages that `latent_decode` has left.
// A latent of 512 channels is K and V at once; 64 more channels, RoPE's, belong to K alone; all have 8 bits
// (`codecs/ring.py`).
//
// The grid is (tiles of 16 rows, requests, SHARES of the channels of outputs); each block has all scores. A row is a
// query head of a query token. The raw bytes of a tile of 64 tokens come to shared memory. A warp computes the scores of
// 16 tokens over one half of the channels, the weights of two rows, the sums over V of some groups of 32 channels, and
// the outputs of two rows.
//
// Everything about the ring is computed before the previous kernel has ended; its partial results are read afterwards.
//
// Threads copy a tile themselves (`copy_8`), and no bulk copy is issued: between the last loads of a tile and the copies
// of the next is a barrier of the block, and a thread's loads and copies keep their order.
//
// The loops over pieces, tiles, groups and steps are not unrolled, so that the code stays short: 700 instructions
// instead of 2,200.
//
// `latent_ring_launch.py` defines:
//
//   RANK, ROPE_DIM              channels of a latent, and RoPE's
//   SLOT_BYTES, SCALES_AT       bytes of a token in the ring, codes first, and before its scales
//   HEADS, SHARES               query heads; shares of the channels, 1, 2, 4 or 8
//   RING_BLOCK                  tokens of a block of the ring
//   QUERY                       dtype of queries: 0 is fp16, 1 bf16
//   OUTPUT                      dtype of outputs: 0 is fp16, 1 bf16, 2 fp32
//   HAS_CONSTANT                whether a constant is added to outputs
//   LATENT_DIVISOR              what latents in parts are divided by
//
// This kernel does not use `codes.cuh` and `ring.cuh`: they depend on the widths of pages, and serve only K and V of
// heads. The ring is the same for all dtypes, and its kernel is compiled once.
#include "ptx.cuh"

struct Arguments {
    // differs from call to call
    void* output;              // OUTPUT [tokens, HEADS, 512]
    const void* query;         // QUERY [tokens, HEADS, 512]
    const void* rope_query;    // QUERY [tokens, HEADS, 64]
    unsigned output_token_stride, output_head_stride, query_token_stride, query_head_stride;
    unsigned rope_token_stride, rope_head_stride;
    // the same for all layers of a step
    const int* table;          // [requests, ring blocks]
    const int* query_start;    // [requests + 1], first query token of each request, and their number
    const int* seq_lens;       // [requests], tokens of each, query tokens included
    const int* page_lens;      // [requests], tokens that are read in pages
    const float* parts;        // [slots, part_rows, 512], sums over pages; see latent.cu
    const float* part_stats;   // [slots, part_rows, 2], their maxima and sums of weights
    const int* begins;         // [partitions + 1, 2]
    const int* spans;          // [requests, 2]
    unsigned table_stride, partitions, part_rows;
    float factor;              // of scores, exponents of 2
    // fixed for a layer
    const u8* ring;            // [blocks, 1, RING_BLOCK, 600]
    const float* inverse_gain; // [512], factors of sums of the ring's latents
    const float* constant;     // [512], added to the outputs
    unsigned block_stride;
};

constexpr int GROUPS = (RANK + ROPE_DIM) / 32, HALF = GROUPS / 2;
constexpr int TILE = 64, WARPS = 8, OWN_GROUPS = RANK / 32 / SHARES;
constexpr int TOKEN_BYTES = SLOT_BYTES + 8, SCORE_WORDS = TILE + 8;  // of rows in shared memory, without bank conflicts
constexpr int QUERY_BYTES = (RANK + ROPE_DIM) * 2 + 16, CHANNELS = RANK / SHARES;
constexpr int SUM_BYTES = (CHANNELS + 8) * 4;  // of a row
struct SharedMemory {
    union {
        u8 queries[16][QUERY_BYTES];
        u8 sums[16][SUM_BYTES];        // of the ring
    };
    u8 tokens[TILE][TOKEN_BYTES];
    float scores[2][16][SCORE_WORDS];  // of both halves of the channels
    u8 weights[TILE / 16][512];        // fp16, as left operands of 16 tokens
    float rows[16][4];                 // factor of the sums, maximum, total
};
static_assert(HALF * 2 == GROUPS && RANK == 512 && SLOT_BYTES % 8 == 0, "shape");
constexpr float MASKED = -1.0e30f;

// Two channels as fp16.
INLINE u32 query_halves(u32 word) {
    if (QUERY == 0) return word;
    return to_halves(__int_as_float(word << 16), __int_as_float(word & 0xFFFF0000u));
}
// Two bytes of codes as fp16, times a scale: below an upper byte 0x48, byte u is 8 + u / 128, and minus 9 that is code
// / 128.
INLINE u32 value_pair(u32 word, u32 selector, u32 scale) {
    return multiply_halves(add_halves(prmt(word, 0x48484848u, selector), 0xC880C880u), scale);
}
// The bytes of two scales as fp16.
INLINE u32 two_scales(u32 low, u32 high) { return prmt(low, high, 0x4101) >> 1; }
INLINE float load_shared_float(u32 address) { return __int_as_float(load_shared(address)); }
INLINE void store_four(const Arguments& a, u64 at, const float (&x)[4]) {
    if (OUTPUT == 2) {
        *(float4*)((float*)a.output + at) = {x[0], x[1], x[2], x[3]};
        return;
    }
    const u32 low = OUTPUT == 0 ? to_halves(x[0], x[1]) : to_bfloats(x[0], x[1]);
    const u32 high = OUTPUT == 0 ? to_halves(x[2], x[3]) : to_bfloats(x[2], x[3]);
    *(float2*)((u16*)a.output + at) = {__int_as_float(low), __int_as_float(high)};
}

// The merged results over pages for a warp's rows. A lane has four channels in turn, of two rows or of one row.
constexpr int FOURS = CHANNELS / 4, OWN_ROWS = FOURS < 32 ? 1 : 2, OWN_FOURS = FOURS < 32 ? 1 : FOURS / 32;
constexpr int BATCH = SHARES == 1 ? 1 : 16 / (OWN_ROWS * OWN_FOURS);  // parts that are loaded at a time
INLINE int own_row(int j) { return threadIdx.x / 32 * 2 + (FOURS < 32 ? threadIdx.x % 32 / FOURS : j); }
INLINE int own_channel(int k) { return (threadIdx.x % (FOURS < 32 ? FOURS : 32) + 32 * k) * 4; }

struct Merged {
    float top[OWN_ROWS], total[OWN_ROWS], sums[OWN_ROWS][OWN_FOURS][4];

    // `row`: the block's first; `rows`: of the request. The first part is in `first_slot`, the others from `next_slot`
    // on.
    INLINE void merge(const Arguments& a, int row, int rows, int parts, u32 first_slot, u32 next_slot) {
#pragma unroll
        for (int j = 0; j < OWN_ROWS; j++) {
            top[j] = MASKED, total[j] = 0;
#pragma unroll
            for (int k = 0; k < OWN_FOURS * 4; k++) sums[j][k / 4][k % 4] = 0;
        }
#pragma unroll 1
        for (int part = 0; part < parts; part += BATCH) {
            // Past the last part and the last row, these are loaded again with weight 0: conditions would make loads
            // wait for each other.
            float2 stats[OWN_ROWS][BATCH];
            float4 x[OWN_ROWS][BATCH][OWN_FOURS];
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int number = min(part + b, parts - 1);
                const u32 slot = number ? next_slot + 2 * (number - 1) : first_slot;
#pragma unroll
                for (int j = 0; j < OWN_ROWS; j++) {
                    const u32 at = slot * a.part_rows + min(row + own_row(j), rows - 1);
                    stats[j][b] = *(const float2*)(a.part_stats + 2 * (u64)at);
#pragma unroll
                    for (int k = 0; k < OWN_FOURS; k++)
                        x[j][b][k] = *(const float4*)(a.parts + (u64)at * RANK + blockIdx.z * CHANNELS + own_channel(k));
                }
            }
#pragma unroll
            for (int j = 0; j < OWN_ROWS; j++)
#pragma unroll
                for (int b = 1; b < BATCH; b++)
                    if (part + b >= parts) stats[j][b] = {MASKED, 0};
#pragma unroll
            for (int j = 0; j < OWN_ROWS; j++) {
                float now = top[j];
#pragma unroll
                for (int b = 0; b < BATCH; b++) now = maximum_of(now, stats[j][b].x);
                const float shrink = exp2_fast(top[j] - now);
                top[j] = now, total[j] *= shrink;
#pragma unroll
                for (int k = 0; k < OWN_FOURS * 4; k++) sums[j][k / 4][k % 4] *= shrink;
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    const float weight = exp2_fast(stats[j][b].x - now);
                    total[j] += weight * stats[j][b].y;
#pragma unroll
                    for (int k = 0; k < OWN_FOURS; k++) {
                        const float4 y = x[j][b][k];
                        sums[j][k][0] += weight * y.x, sums[j][k][1] += weight * y.y;
                        sums[j][k][2] += weight * y.z, sums[j][k][3] += weight * y.w;
                    }
                }
            }
        }
    }
};

BLOCK_OF(attend_latent_ring, 256, sizeof(SharedMemory));
extern "C" __global__ void __launch_bounds__(256, SHARES < 4 ? 2 : 1) attend_latent_ring(const __grid_constant__ Arguments a) {
    const u32 shared = shared_address(shared_memory());
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
    const int request = blockIdx.y, first_row = blockIdx.x * 16;
    const int start = load_int(a.query_start + request), queries = load_int(a.query_start + request + 1) - start;
    const int seq_len = load_int(a.seq_lens + request), page_len = load_int(a.page_lens + request);
    const int first_part = load_int(a.spans + 2 * request), parts = load_int(a.spans + 2 * request + 1);
    const int rows = queries * HEADS, first = max(page_len - queries + 1, 0);
    // Lengths and parts are never negative; testing their signs here puts all six loads under way at once.
    if ((first_row >= rows) | (min(min(seq_len, page_len), min(first_part, parts)) < 0)) return wait_for_kernel_before();

    // Four threads copy a token of the tile. A token whose block is 0, the null block, is not in the request: it
    // becomes zeros.
    auto token_of = [&](int base) { return max(min(base + (int)threadIdx.x / 4, seq_len - 1), 0); };
    auto block_of = [&](int token) {
        return load_int(a.table + (u64)request * a.table_stride + token / RING_BLOCK);
    };
    int block = block_of(token_of(first));
    // Queries, unchanged; rows that do not exist repeat the last one.
    constexpr int PIECES = (RANK + ROPE_DIM) / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < 16 * PIECES; i += 32 * WARPS) {
        const int row = min(first_row + i / PIECES, rows - 1), channel = i % PIECES * 8;
        const u64 token = start + row / HEADS, head = row % HEADS;
        const u16* query = channel < RANK
            ? (const u16*)a.query + token * a.query_token_stride + head * a.query_head_stride + channel
            : (const u16*)a.rope_query + token * a.rope_token_stride + head * a.rope_head_stride + (channel - RANK);
        copy_16(shared + i / PIECES * QUERY_BYTES + channel * 2, query);
    }

    const u32 cut = load_int(a.begins + 2 * first_part) != request;  // another request comes first in the partition
    const int window = seq_len - page_len;
    float maximum = MASKED, total = 0;  // of the row whose weights the lane computes
    float sums[2][4][4];
    for (int base = first;; base += TILE) {
        const bool is_last = base + TILE >= seq_len, there = (block > 0) & (base < seq_len);
        const u8* slot = a.ring + (there ? (u64)block * a.block_stride + token_of(base) % RING_BLOCK * SLOT_BYTES : 0);
        const u32 copied = shared + AT(tokens) + threadIdx.x / 4 * TOKEN_BYTES;
#pragma unroll 1
        for (int at = 8 * c; at < SLOT_BYTES; at += 32) copy_8(copied + at, slot + at, there);
        wait_for_copies();
        sync_block();
        {
            float scores[2][4] = {};
            const u32 own = shared + AT(tokens) + (warp % 4 * 16 + r) * TOKEN_BYTES;
            const int end = warp / 4 * HALF + HALF;
#pragma unroll 1
            for (int group = end - HALF; group < end; group++) {
                u32 q[2][4];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    q[i / 4][i % 4] = query_halves(
                        load_shared(shared + (r + i % 2 * 8) * QUERY_BYTES + group * 64 + i / 2 * 16 + 4 * c));
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    u32 codes[2];
                    load_shared_2(own + n * 8 * TOKEN_BYTES + group * 32 + 8 * c, codes);
                    const u32 byte = load_shared_byte(own + n * 8 * TOKEN_BYTES + SCALES_AT + group);
                    const u32 scale = two_scales(byte, byte);
#pragma unroll
                    for (int k = 0; k < 2; k++)
                        mma(scores[n], q[k][0], q[k][1], q[k][2], q[k][3], value_pair(codes[k], 0x4140, scale),
                            value_pair(codes[k], 0x4342, scale));
                }
            }
            const u32 target = shared + AT(scores) + ((warp / 4 * 16 + r) * SCORE_WORDS + warp % 4 * 16 + 2 * c) * 4;
#pragma unroll
            for (int i = 0; i < 8; i++)
                store_shared(target + (i / 2 % 2 * 8 * SCORE_WORDS + i / 4 * 8 + i % 2) * 4,
                             __float_as_int(scores[i / 4][i % 4]));
        }
        sync_block();
        {
            // A lane has tokens t, t + 4, t + 8 and t + 12 of a step of 16: they take the columns of the left operand
            // that lane c holds.
            const int row = warp * 2 + lane / 16, t = lane / 4 % 4 * 16 + c;
            const int limit = seq_len - queries + (first_row + row) / HEADS + 1;
            const u32 source = shared + AT(scores) + (row * SCORE_WORDS + t) * 4;
            float weights[4], top = maximum, sum = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float score = load_shared_float(source + i * 16)
                                    + load_shared_float(source + (16 * SCORE_WORDS + i * 4) * 4);
                const int position = base + t + i * 4;
                const bool visible = (position < limit) & (position >= limit - window);
                weights[i] = visible ? score * a.factor : minus_infinity();
                top = maximum_of(top, weights[i]);
            }
#pragma unroll
            for (int i = 1; i < 16; i *= 2) top = maximum_of(top, shuffle_xor(top, i));
#pragma unroll
            for (int i = 0; i < 4; i++) sum += weights[i] = exp2_fast(weights[i] - top);
#pragma unroll
            for (int i = 1; i < 16; i *= 2) sum += shuffle_xor(sum, i);
            const float shrink = exp2_fast(maximum - top);
            maximum = top, total = total * shrink + sum;
            const u32 target = shared + AT(weights) + (t / 16 * 32 + row % 8 * 4 + c) * 16 + row / 8 * 4;
            store_shared(target, to_halves(weights[0], weights[1]));
            store_shared(target + 8, to_halves(weights[2], weights[3]));
            store_shared_4(shared + AT(rows) + row * 16, {(u32)__float_as_int(shrink), (u32)__float_as_int(maximum),
                                                         (u32)__float_as_int(total), 0});
        }
        sync_block();
#pragma unroll 1
        for (int i = 0; i * WARPS + warp < OWN_GROUPS; i++) {
            const int group = blockIdx.z * OWN_GROUPS + i * WARPS + warp;
            float o[4][4] = {};  // channel 16 d4 + 8 d3 + 2 c + d0 is in o[2 d3 + d0][d4], row r + 8's in [2 + d4]
            if (base > first) {
#pragma unroll
                for (int k = 0; k < 16; k++) {
                    const float shrink = load_shared_float(shared + AT(rows) + (r + k / 2 % 2 * 8) * 16);
                    o[k / 4][k % 4] = sums[i][k / 4][k % 4] * shrink;
                }
            }
#pragma unroll 1
            for (int step = 0; step < TILE / 16; step++) {
                const u32 own = shared + AT(tokens) + (step * 16 + c) * TOKEN_BYTES;
                u32 w[4], b[2][4];
                load_shared_4(shared + AT(weights) + (step * 32 + lane) * 16, w);
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const u32 one = own + k * 8 * TOKEN_BYTES, other = one + 4 * TOKEN_BYTES;
                    const u32 first_word = load_shared(one + group * 32 + r * 4);
                    const u32 second_word = load_shared(other + group * 32 + r * 4);
                    const u32 scale = two_scales(load_shared_byte(one + SCALES_AT + group),
                                                 load_shared_byte(other + SCALES_AT + group));
                    const u32 low = prmt(first_word, second_word, 0x5140), high = prmt(first_word, second_word, 0x7362);
                    b[k][0] = value_pair(low, 0x4140, scale), b[k][1] = value_pair(low, 0x4342, scale);
                    b[k][2] = value_pair(high, 0x4140, scale), b[k][3] = value_pair(high, 0x4342, scale);
                }
#pragma unroll
                for (int k = 0; k < 4; k++) mma(o[k], w[0], w[1], w[2], w[3], b[0][k], b[1][k]);
            }
#pragma unroll
            for (int k = 0; k < 16; k++) sums[i][k / 4][k % 4] = o[k / 4][k % 4];
            if (is_last) {
                const u32 target = shared + r * SUM_BYTES + ((i * WARPS + warp) * 32 + 2 * c) * 4;
#pragma unroll
                for (int k = 0; k < 16; k++)  // d4, row, d3, d0
                    store_shared(target + k / 4 % 2 * 8 * SUM_BYTES + (k / 8 * 16 + k / 2 % 2 * 8 + k % 2) * 4,
                                 __float_as_int(o[k % 4][k / 8 + k / 4 % 2 * 2]));
            }
        }
        if (is_last) break;
        block = block_of(token_of(base + TILE));
        sync_block();  // this tile was read
    }

    float4 gain[OWN_FOURS], constant[OWN_FOURS];
#pragma unroll
    for (int k = 0; k < OWN_FOURS; k++) {
        const int channel = blockIdx.z * CHANNELS + own_channel(k);
        gain[k] = *(const float4*)(a.inverse_gain + channel);
        if (HAS_CONSTANT) constant[k] = *(const float4*)(a.constant + channel);
    }
    wait_for_kernel_before();
    Merged pages;
    const u32 first_slot = parts == 1 ? 2 * a.partitions + request : 2 * first_part + cut;
    pages.merge(a, first_row, rows, parts, first_slot, 2 * (first_part + 1));
    sync_block();  // sums of the ring are in shared memory
#pragma unroll
    for (int j = 0; j < OWN_ROWS; j++) {
        u32 stats[4];
        load_shared_4(shared + AT(rows) + own_row(j) * 16, stats);
        const float of_ring = __int_as_float(stats[1]), top = maximum_of(of_ring, pages.top[j]);
        float page_weight = exp2_fast(pages.top[j] - top), ring_weight = exp2_fast(of_ring - top);
        const float sum = page_weight * pages.total[j] + ring_weight * __int_as_float(stats[2]);
        const float norm = exp2_fast(-log2_fast(maximum_of(sum, 1.0e-30f)));
        page_weight *= norm * LATENT_DIVISOR, ring_weight *= norm;
        const int row = first_row + own_row(j);
        if (row >= rows) break;
        const u64 token = start + row / HEADS, head = row % HEADS;
        const u64 at = token * a.output_token_stride + head * a.output_head_stride + blockIdx.z * CHANNELS;
#pragma unroll
        for (int k = 0; k < OWN_FOURS; k++) {
            u32 y[4];
            load_shared_4(shared + own_row(j) * SUM_BYTES + own_channel(k) * 4, y);
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = pages.sums[j][k][i] * page_weight + __int_as_float(y[i]) * (&gain[k].x)[i] * ring_weight;
                if (HAS_CONSTANT) x[i] += (&constant[k].x)[i];
            }
            store_four(a, at + own_channel(k), x);
        }
    }
}
