// Partitions of latents: runs of tiles of requests.
#pragma once
#include "codes.cuh"
#include "wgmma.cuh"

constexpr int RANK = HEAD_DIM * (HAS_PICKS ? 2 : 1);  // a row's words have the layout of half as many groups
constexpr int TILE = TILE_TOKENS, BLOCKS = RANK / 64;   // a block is 64 channels of a tile
static_assert(RANK == 512 && TILE == 64 && ROWS % 8 == 0 && ROWS <= 64, "shape");

// A run of tiles of one request, for the groups that add values.
struct Run {
    int rows, query;  // rows of this block; the request's first query token
    bool is_whole;    // the request has no other parts, and its outputs are written
    u32 slot;         // of the first row in the partial results
    INLINE int token(int row) const { return query + (row + blockIdx.x * ROWS) / HEADS; }
    INLINE int head(int row) const { return (row + blockIdx.x * ROWS) % HEADS; }
    INLINE void write(u32 address) const { store_shared_4(address, {(u32)rows, (u32)query, is_whole, slot}); }
    INLINE void read(u32 address) {
        u32 x[4];
        load_shared_4(address, x);
        rows = x[0], query = x[1], is_whole = !LEAVES_PARTS && x[2], slot = x[3];
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
            is_whole = !LEAVES_PARTS && count == tiles;
            slot = blockIdx.y * 2 + (index != first_request);
            if (LEAVES_PARTS && count == tiles) slot = gridDim.y * 2 + index;
            slot = (slot * gridDim.x + blockIdx.x) * ROWS;
            if (count > 0 && rows > 0) return true;
        }
        return false;
    }
};
