// Partitions of latents: runs of tiles of requests, and where the pages of a tile lie.
#pragma once
#include "codes.cuh"
#include "wgmma.cuh"

constexpr int RANK = HEAD_DIM, TILE = TILE_TOKENS, BLOCKS = RANK / 64;  // a block is 64 channels of a tile
static_assert(RANK == 512 && GROUPS == 16 && TILE == 64 && ROWS % 8 == 0 && ROWS <= 64, "shape");

// A run of tiles of one request, as the value groups see it.
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

// The pages of a partition's tiles in turn; a warp has a micro-block of each. `step` of them share the tiles of a run:
// each has every `step`th, from `first` on.
struct Reader {
    const Arguments& a;
    Runs run;
    int tile;  // its number in the run
    int warp, own_first, step;
    bool alternates;     // own tiles are every `step`th of the partition, not of each run
    u32 base, runs;      // tiles of the runs before this one; runs so far, this one included
    u32 ahead;           // block of the next tile
    const u8* page;      // the warp's micro-block

    INLINE Reader(const Arguments& a, int warp, int first = 0, int step = 1, bool alternates = false)
        : a(a), run(a), tile(0), warp(warp), own_first(first), step(step), alternates(alternates), base(0), runs(0), ahead(0), page(nullptr) {
        run.count = 0;
    }
    INLINE int first_of_run() const { return alternates ? (own_first + base) % step : own_first; }
    INLINE int micro_block(int i) const {
        return min((run.first + min(i, run.count - 1)) * 4 + warp, (run.tokens - 1) / 16);
    }
    INLINE u32 block_of(int i) const {
        return load_int(a.block_table + (u64)run.index * a.table_stride + micro_block(i) / MICRO_BLOCKS);
    }
    INLINE const u8* source(int i, u32 block) const {
        return a.cache + (u64)block * a.block_stride + micro_block(i) % MICRO_BLOCKS * MICRO_BLOCK_BYTES;
    }
    INLINE bool next() {
        u32 block = ahead;
        tile += step;
        if (tile >= run.count) {
            do {
                base += run.count;
                if (!run.next(a)) return false;
                runs++;
            } while (first_of_run() >= run.count);
            tile = first_of_run();
            block = block_of(tile);
        }
        page = source(tile, block);
        ahead = block_of(tile + step);
        return true;
    }
    // Words of the page at `offset`.
    template <int WIDTH> INLINE void load(u32 offset, u32* x) const { load_page<WIDTH>(page + offset, x); }
    // Ones for the scales of tokens that are stored; bytes of others may be anything.
    INLINE u32 stored_bytes(int row) const {
        const int token = (run.first + tile) * TILE + warp * 16 + row;
        return (token < run.tokens ? 0x00FF00FF : 0) | (token + 8 < run.tokens ? 0xFF00FF00 : 0);
    }
};
