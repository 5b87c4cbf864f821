// Attention of a block for 64 columns by two warpgroups, for head_dim 128 and V of 4 bits. One unpacks: its
// warps copy and unpack a micro-block of each tile, and leave K and V as fp16 in shared memory (`roles_unpack.cuh`). The
// other attends, as kernels over fp16 caches do (`roles_attend.cuh`).
//
// Tiles of the ring come before tiles of pages. A ring tile's raw bytes take the room of two page tiles. There are few,
// so none is copied while another is unpacked.
#pragma once
#include "roles_attend.cuh"
#include "roles_unpack.cuh"

namespace roles {

INLINE void share_queries(const Arguments& a, const Request& request, int head) {
    const u32 target = shared_address(shared_memory()) + AT(queries);
#pragma unroll 1
    for (int i = threadIdx.x; i < 64 * 16; i += (WARPS + UNPACKERS) * 32) {
        const int row = i / 16, piece = i % 16;
        Quad q{0, 0, 0, 0};
        if (request.has(row)) q = ((const Quad*)a.query)[request.row(head, row) * 16 + piece];
        store_shared_4(target + piece / 8 * HALF_BYTES + 128 * row + ((piece % 8 ^ row % 8) << 4), q);
    }
    fence_async();
}

// `gain`: factor of outputs.
INLINE void store_rows(const Arguments& a, const Request& request, int head, const WorkItem& item, int split,
                       int splits, int warp, const Lane& lane, const RowState& state, float gain) {
    float *weights = (float*)(shared_memory() + AT(raw)), *combined = weights + COLUMNS * 32;  // `weights`: of parts
    const bool is_alone = IS_FINAL && item.parts == 1;
    sync_columns();  // all warps have finished with the tiles that were here
    for_each<2>([&](auto r) {
        float total = state.total[r.value];
        total += shuffle_xor(total, 1), total += shuffle_xor(total, 2);
        const int column = 16 * warp + lane.row + 8 * r.value;
        WeightedSum sum{state.maximum[r.value], total};
        if constexpr (HAS_BIAS) sum.maximum += load_bias(a, request, column, state.element);
        const bool writes_statistics = lane.column == 0 && request.has(column);
        float factor = gain;
        float* target = combined + column * ROW;
        if (is_alone) {
            factor = total > 0 ? factor / total : 0;
            if (HAS_LSE && writes_statistics) a.lse[request.row(head, column)] = sum.lse();
            if (HAS_VALUE_MEANS && writes_statistics) put_weights(a, request, head, column, sum, target);
        } else {
            const long long row =
                IS_FINAL ? part_row(item, item.part, head, column) : request.row(head, column) * splits + split;
            target = a.partial_output + row * HEAD_DIM;
            if (writes_statistics) a.partial_stats[2 * row] = sum.maximum, a.partial_stats[2 * row + 1] = total;
        }
        if (is_alone || request.has(column)) for_each<16>([&](auto i) {
            const float* own = state.output + 4 * i.value + 2 * r.value;
            *(Floats*)(target + 8 * i.value + 2 * lane.column) = {own[0] * factor, own[1] * factor};
        });
    });
    if constexpr (IS_FINAL) end_block(a, request, head, item, is_alone, warp, lane, weights, combined);
}

INLINE void attend(const Arguments& a) {
    const Lane lane;
    const int group = warpgroup(), warp = threadIdx.x / 32 % 4, head = blockIdx.y;
    const WorkItem item(load_work_item(a));
    if (item.request < 0) return;
    const Request request(a, item);
    if (request.count <= 0) return;
    const int split = IS_FINAL ? 0 : blockIdx.x, splits = IS_FINAL ? 1 : gridDim.x;
    const TileRange range(request, item, split, splits);
    const TeamTiles tiles(request, range, split, splits);
    const u32 shared = shared_address(shared_memory());
    if (threadIdx.x == 0) {
        for (int i = 0; i < UNPACKERS * (STAGES + 1); i++) barrier_init<1>(shared + AT(raw_full) + 8 * i);
        for (int i = 0; i < 8; i++) barrier_init<4>(shared + AT(keys_full) + 8 * i);
        barrier_init_fence();
    }
    share_queries(a, request, head);
    sync_block();
    if (group == 0) {
        set_registers<ATTEND_REGISTERS, 128>();
        RowState state;
        attend_tiles(a, request, tiles, range.low + range.count, warp, lane, state);
        const float gain = (tiles.all > tiles.ring ? VALUE_GAIN : 1) / TEAM_UNIT;
        store_rows(a, request, head, item, split, splits, warp, lane, state, gain);
    } else {
        set_registers<UNPACK_REGISTERS, 128>();
        const Pages pages{a.cache + (u64)head * a.head_stride, a.block_table + (u64)request.index * a.table_stride,
                          a.block_stride, (request.seq_len - 1) / 16};
        unpack_tiles(a, request, pages, tiles, head, warp, lane);
    }
}

}  // namespace roles
