// Split-KV decode attention over packed pages for sm_90, the second implementation of `kernels/triton/decode.py`.
//
// With IS_FINAL, blocks write the output: the grid is (1, KV heads, work items), and `schedule.py` assigns the items.
// Without, they write partial results for `merge.py`: the grid is (blocks per pair, KV heads, requests), where a pair
// is a request and a KV head. Query tokens of more than 64 columns take several passes over their request's keys; each
// pass counts as a request in the grid and in work items. A block has WARPS warps, and with UNPACKERS as many that only
// unpack: then these alone copy (`roles.cuh`). A warp that copies has STAGES stages of its own in shared memory. One lane
// issues bulk copies STAGES tiles ahead, so bytes in flight occupy no registers and take hardly any instructions. Tiles
// of the ring buffer, which holds the recent window, come before those of pages.
//
// `launch.py` defines:
//
//   HEAD_DIM, {KEY,VALUE}_{GROUPS,WORDS,CHUNKS,HAS_HALF}, MICRO_BLOCK_BYTES, *_AT, RING_SLOT_BYTES, SCORE_UNIT
//                                       the fields of `KernelLayout`; *_AT are offsets in a micro-block or ring slot
//   TABLE_*, *_3, *_2                   values of `units.py`
//   KV_HEADS, QUERY_GROUP               KV heads, and query heads per KV head
//   COLUMNS                             at least QUERY_GROUP times the query tokens of a pass: 4, 8, 16, 24, 32, 48 or
//                                       64
//   PASSES, PASS_TOKENS                 passes over the keys of a request, and the query tokens of each
//   HAS_PASS_TABLE                      whether requests are passes over prefixes that a table lists
//   MICRO_BLOCKS, TILE_BLOCKS           micro-blocks per page, and per tile
//   CUT_TILES, SLOT_SHIFT, PART_SHIFT   the encoding of work items (`schedule.py`)
//   RING_BLOCK, RECENT                  tokens of a ring block (0: no ring), and of the recent window
//   HAS_BIAS, HAS_LSE                   whether keys are centred, and whether blocks write log-sum-exps
//   HAS_VALUE_MEANS                     whether values are centred; then keys are, too
//   TILES_A_BLOCK                       tiles of pages that a block of means serves (0: one block serves all)
//   OUTPUT                              dtype of the output: 0 is fp16, 1 bf16, 2 fp32
//   WARPS, STAGES, BLOCKS               warps per block, stages per warp, blocks per SM
//   IS_WIDE                             whether the warps of a block share columns (`wide.cuh`, `roles.cuh`)
//   UNPACKERS                           warps of a block beside these that only unpack: 4 or 0 (`roles.cuh`)
//
// With HAS_PASS_TABLE, a request of the schedule is a pass: the next query tokens of a chunk over its whole prefix,
// before all of them. The chunk's own tokens are not read, though they may lie in the prefix's last micro-block. A pass
// without keys writes zeros and -inf; a pass without query tokens writes nothing.
//
// Tensors without a stride are contiguous; strides count elements.
struct Arguments {
    // differs from call to call
    void* output;  // OUTPUT [tokens, KV heads, QUERY_GROUP, HEAD_DIM], unit stride over channels
    // the same for all layers of a step
    const void* query;         // fp16 [tokens, KV heads, QUERY_GROUP, HEAD_DIM], rotated and scaled
    const int* block_table;    // [requests, blocks]
    const int* query_start;    // [requests + 1], first query token of each request, and their number; HAS_PASS_TABLE:
                               // [passes, 4], a request, its first query token of the pass, their number, and keys
    const int* seq_lens;       // [requests], tokens in the cache, query tokens included
    float* query_bias;         // [tokens, query heads, bias_stride]; see `Biases`
    const int* ring_table;     // [requests, ring blocks]
    const int* ring_first;     // [requests], the first token that is in the ring
    const int* schedule;       // [items, 4], the words of `WorkItem`
    float* partial_output;     // [tokens, query heads, splits, HEAD_DIM]; IS_FINAL: [items, KV heads, COLUMNS, ..]
    float* partial_stats;      // [.., 2], maximum of the scores and sum of the weights, for each partial output
    float* lse;                // [tokens, query heads]
    unsigned table_stride, ring_table_stride, bias_stride;
    // fixed for a layer
    const unsigned char* cache;  // [blocks, KV heads, 16 MICRO_BLOCKS tokens, slot bytes]
    const unsigned char* ring;   // [blocks, KV heads, RING_BLOCK, RING_SLOT_BYTES]
    const void* matrix;          // fp16 [1 or KV heads, HEAD_DIM / 16, HEAD_DIM / 16, 32, 8]; with HAS_VALUE_MEANS,
                                 // each head's is followed by fp32 [HEAD_DIM, 2], see `Matrix`
    int* counters;               // [items, KV heads], 0 before and after each launch
    unsigned block_stride, head_stride, ring_block_stride, ring_head_stride;
    unsigned matrix_head_stride, output_token_stride, output_head_stride;  // of the matrix in 16 bytes
};

#include "ptx.cuh"

static_assert(!HAS_PASS_TABLE || (IS_WIDE && IS_FINAL && PASSES == 1), "passes of 64 columns, whose schedule has keys");
constexpr int STAGE_OWNERS = IS_WIDE ? 1 : WARPS;
constexpr int TILE_TOKENS = 16 * TILE_BLOCKS, TILE_BYTES = TILE_BLOCKS * MICRO_BLOCK_BYTES;
constexpr int RING_TILE_BYTES = 16 * RING_SLOT_BYTES;
constexpr int most_of(int a, int b) { return a > b ? a : b; }
// Where warps share a stage: warps that have a ring tile each. With 256 channels a ring tile takes the room of two
// micro-blocks.
constexpr int RING_WARPS = HEAD_DIM > 128 && TILE_BLOCKS == 1 ? WARPS / 2 : WARPS;
// Bytes of a stage: the tiles of all warps that share it.
constexpr int STAGE_BYTES =
    most_of(TILE_BYTES * (IS_WIDE ? WARPS : 1), RING_BLOCK ? RING_TILE_BYTES * (IS_WIDE ? RING_WARPS : 1) : 0);

// Shared memory begins with this. At the end of the kernel, other data replace what follows, but never the barriers:
// PTX forbids other use of a barrier's memory, and under compute-sanitizer results there became NaN.
struct Front {
    u64 stage_full[STAGE_OWNERS][STAGES];  // a copy fills, the warps that own the stage read
    Quad work_items[WARPS];
};
constexpr int STAGES_AT = sizeof(Front);

// The work of a block: part `part` of `parts` of a request of `tokens` tokens, with the tiles of pages from `begin` to
// `end`. The last part has all tiles from `begin` on, and the ring's tiles. Partial results of the request's parts lie
// in slots `first_slot` and following. Request -1: an unused item.
struct WorkItem {
    int request, first_slot, tokens, begin, part, end, parts;
    INLINE explicit WorkItem(const Quad& x)
        : request((int)x.x < 0 ? -1 : x.x & ((1u << SLOT_SHIFT) - 1)), first_slot(x.x >> SLOT_SHIFT), tokens(x.y),
          begin((x.z & ((1u << PART_SHIFT) - 1)) * CUT_TILES), part(x.z >> PART_SHIFT),
          end((x.w & ((1u << PART_SHIFT) - 1)) * CUT_TILES), parts(x.w >> PART_SHIFT) {}
    INLINE bool is_last() const { return part == parts - 1; }
};
// Work items are read from global memory once, and from shared memory thereafter: an item would take registers.
INLINE Quad load_work_item(const Arguments& a) {
    if constexpr (IS_FINAL) return load_constant_16(a.schedule + 4 * blockIdx.z);
    return {blockIdx.z, (u32)a.seq_lens[blockIdx.z / PASSES], 0, 1 << PART_SHIFT};
}
INLINE u32 shared_work_item_address() {
    return shared_address(shared_memory()) + OFFSET_OF(Front, work_items) + threadIdx.x / 32 * 16;
}
INLINE WorkItem shared_work_item() {
    u32 words[4];
    load_shared_4(shared_work_item_address(), words);
    return WorkItem({words[0], words[1], words[2], words[3]});
}

// The code that serves a variant (`constants` of launch.py), in a namespace of its own. roles.cuh serves the codes and
// head sizes of `has_unpackers`.
#if UNPACKERS  // 64 columns with V of 4 bits and head_dim 128: two warpgroups, wgmma
#include "roles.cuh"
namespace variant = roles;
#elif IS_WIDE  // other codes and head sizes, and mixed codes: a team of warps, mma
#include "wide.cuh"
namespace variant = wide;
#else  // up to 32 columns of all codes: each warp by itself, mma
#include "narrow.cuh"
namespace variant = narrow;
#endif

BLOCK_OF(decode, (WARPS + UNPACKERS) * 32, sizeof(variant::SharedMemory));
extern "C" __global__ void __launch_bounds__((WARPS + UNPACKERS) * 32, BLOCKS)
    decode(const __grid_constant__ Arguments a) {
    variant::attend(a);
}
