// Decode attention over packed latents (MLA) for sm_90a. A latent of 512 channels is K and V at once; 64 more channels,
// RoPE's, belong to K alone.
//
// The grid is (row blocks, partitions). A row is a query head of a query token; a block has up to ROWS rows of a
// request. A partition is a run of tiles of 64 tokens, from one request or from several in turn (`latent_schedule.py`).
// Up to 32 rows are the narrow side of both products (latent_narrow.cuh); more rows are the 64 rows of their left
// operand (latent_attend.cuh).
//
// A latent in the tile is value * 2^-7 in fp16.
//
// `latent_launch.py` defines, beside the names of `KernelLayout` (decode.cu):
//
//   ROWS, HEADS                         rows of a block: 16, 24, 32, 48 or 64; query heads
//   SCALES_AT, ROPE_AT, ROPE_SCALES_AT  of a micro-block: where scales and RoPE begin, and RoPE's scales
//   ROPE_BITS                           16, or 8 with scales
//   MICRO_BLOCK_BYTES, MICRO_BLOCKS     bytes of a micro-block; micro-blocks of a page, which say its tokens
//   ROW_BYTES                           with HAS_PICKS, of a row
//   MOST_SHARES                         of the parts of a row, which are combined side by side
//   QUERY, OUTPUT                       dtypes of queries and output: 0 is fp16, 1 bf16, 2 fp32
//   HAS_LSE, HAS_CONSTANT               whether log-sum-exps are written, and whether a constant is added to outputs
//   HAS_PICKS                           whether the cache has latent rows, of which each query token reads those that were
//                                       picked for it (latent_picks.cuh). Query tokens are requests then, with as many
//                                       tokens as picks, and HEAD_DIM and offsets are those of a row
//   LEAVES_PARTS                        whether all results stay partial: latent_ring.cu merges them, latent_merge is not
//                                       launched, and there is no output
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
    const int* seq_lens;       // [requests], tokens in the cache, query tokens included
    const int* begins;         // [partitions + 1, 2], the request and tile where each begins, and the end
    const int* spans;          // [requests, 2], the first partition with tiles of a request, and their number
    float* partial_output;     // [partitions, 2, row blocks, ROWS, 512]: of the first request, of the last one; behind
                               // these, with LEAVES_PARTS, [requests, row blocks, ROWS, 512], of those in one part
    float* partial_stats;      // [.., 2], maximum of the scores and sum of the weights, for each partial output
    float* lse;                // [tokens, HEADS]
    unsigned table_stride, max_rows;  // most rows of a request
    float factor;              // from scores to exponents of 2
    unsigned merge_shares;
#if HAS_PICKS
    const int* picks;     // [tokens, pick_stride], positions in requests; negative: none
    const int* requests;  // [tokens], of each, a row of the block table
    unsigned pick_stride, table_columns;
#endif
    // fixed for a layer
    const unsigned char* cache;  // [blocks, 16 MICRO_BLOCKS tokens, slot bytes]
    const float* constant;       // [512], added to the outputs
    unsigned block_stride;
};

#if ROWS <= 32
#include "latent_narrow.cuh"
namespace variant = narrow;
#else
#include "latent_attend.cuh"
namespace variant = wide;
#endif

BLOCK_OF(latent_decode, 384, sizeof(variant::SharedMemory));
extern "C" __global__ void __launch_bounds__(384, 1) latent_decode(const __grid_constant__ Arguments a) {
    const u32 base = shared_address(swizzled_memory());
    variant::init_shared(base);
    sync_block();
    wait_for_kernel_before();
    begin_next_kernel();
    variant::attend_partition(a, base, warpgroup(), threadIdx.x % 128);
}

// Combines the partial results of a row; `merge_shares` times two warps; each warp has 256 channels of a share of the
// parts. The grid is (rows of a request, requests). The block is sized for the most shares.
constexpr int SUM_BYTES = 64 * 8 * 4;  // of a share
BLOCK_OF(latent_merge, 64 * MOST_SHARES, SUM_BYTES * MOST_SHARES);
extern "C" __global__ void __launch_bounds__(64 * MOST_SHARES) latent_merge(const __grid_constant__ Arguments a) {
    const int row = blockIdx.x, request = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int query = a.query_start[request], next = a.query_start[request + 1];
    const int first = a.spans[2 * request], parts = a.spans[2 * request + 1], shares = a.merge_shares;
    if (row >= (next - query) * HEADS || parts == 1) return;  // 0: there is no token
    const int row_blocks = (a.max_rows + ROWS - 1) / ROWS, block = row / ROWS, own = row % ROWS;
    const int is_last = a.begins[2 * first] != request;  // the first part is a partition's last request
    auto slot = [&](int part) {
        return (((u64)(first + part) * 2 + (part == 0 && is_last)) * row_blocks + block) * ROWS + own;
    };
    float top = EMPTY_MAXIMUM, total = 0;
#pragma unroll 4
    for (int part = lane; part < parts; part += 32) top = maximum_of(top, a.partial_stats[2 * slot(part)]);
    for_each<5>([&](auto i) { top = maximum_of(top, shuffle_xor(top, 1 << i.value)); });
#pragma unroll 4
    for (int part = lane; part < parts; part += 32) {
        const float* stats = a.partial_stats + 2 * slot(part);
        total += exp2_fast(stats[0] - top) * stats[1];
    }
    for_each<5>([&](auto i) { total += shuffle_xor(total, 1 << i.value); });
    const int channel = warp % 2 * 256 + lane * 4;
    float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 8
    for (int part = warp / 2; part < parts; part += shares) {
        const u64 from = slot(part);
        const float weight = exp2_fast(a.partial_stats[2 * from] - top);
        const float* output = a.partial_output + from * RANK + channel;
        const float4 y = *(const float4*)output, z = *(const float4*)(output + 128);
        x[0] += weight * y.x, x[1] += weight * y.y, x[2] += weight * y.z, x[3] += weight * y.w;
        x[4] += weight * z.x, x[5] += weight * z.y, x[6] += weight * z.z, x[7] += weight * z.w;
    }
    if (shares > 1) {
        const u32 sums = shared_address(shared_memory()) + threadIdx.x * 32;
        auto bits = [&](int i) { return (u32)__float_as_int(x[i]); };
        store_shared_4(sums, {bits(0), bits(1), bits(2), bits(3)});
        store_shared_4(sums + 16, {bits(4), bits(5), bits(6), bits(7)});
        sync_block();
        if (warp >= 2) return;
        for (int share = 1; share < shares; share++) {
            u32 y[8];
            load_shared_4(sums + share * SUM_BYTES, y), load_shared_4(sums + share * SUM_BYTES + 16, y + 4);
            for_each<8>([&](auto i) { x[i.value] += __int_as_float(y[i.value]); });
        }
    }
    const float norm = total > 0 ? LATENT_DIVISOR_F / total : 0;
    const u64 token = query + row / HEADS, head = row % HEADS;
    const u64 at = token * a.output_token_stride + head * a.output_head_stride;
    for_each<4>([&](auto i) {
        const int own_channel = channel + i.value / 2 * 128 + i.value % 2 * 2;
        store_pair(a, at + own_channel, a.constant + own_channel, x[2 * i.value], x[2 * i.value + 1], norm);
    });
    if (HAS_LSE && threadIdx.x == 0) a.lse[token * HEADS + head] = (top + log2_fast(total)) * 0.6931471805599453f;
}
