// Shared memory of a block of two warpgroups (`roles.cuh`), the unit of its contents, and the numbers of its tiles.
//
// Tiles of 64 tokens lie in two stages, K as [2 panels of 64 channels][token][channel] and V as [channel][token], in
// rows of 128 bytes that are swizzled as `matrix_descriptor` says.
#pragma once
#include "pages.cuh"

namespace roles {

constexpr int HALF_BYTES = 64 * 128, TEAM_TILE_BYTES = 2 * HALF_BYTES, TEAM_STAGES = 2;
static_assert(WARPS == 4 && UNPACKERS == 4 && TILE_BLOCKS == 1 && HEAD_DIM == 128, "two warpgroups");
constexpr int RAW_BYTES = STAGES * MICRO_BLOCK_BYTES;  // of a warp
static_assert(STAGES == 3 && (!RING_BLOCK || RING_TILE_BYTES <= 2 * MICRO_BLOCK_BYTES), "a ring's tile and a page's");

// `*_full`: barriers at which warps that fill arrive, and warps that read wait. `*_empty`: the other way round.
struct SharedMemory {
    Front front;  // its barriers are not used
    u64 raw_full[UNPACKERS][STAGES], ring_full[UNPACKERS];  // raw bytes: a warp's copy fills, the warp reads
    u64 keys_full[2], keys_empty[2];      // K of a stage: unpacking warps fill, attending warps read
    u64 values_full[2], values_empty[2];  // V of a stage, and `are_small`
    u8 are_small[2][UNPACKERS];           // whether V of a warp's 16 tokens is small
    alignas(512) u8 raw[UNPACKERS][RAW_BYTES];  // from here on, the block's results replace tiles
    alignas(1024) u8 queries[TEAM_TILE_BYTES];
    u8 keys[TEAM_STAGES][TEAM_TILE_BYTES], values[TEAM_STAGES][TEAM_TILE_BYTES];
};
static_assert(sizeof(SharedMemory) >= AT(raw) + sizeof(TeamResults), "the block's results");

// Registers of a thread of each warpgroup; both begin with 128.
constexpr int ATTEND_REGISTERS = 184, UNPACK_REGISTERS = 72;

constexpr u32 halves_of(float power) {  // a power of 2 as both halves of a pair
    int exponent = 15;
    while (power > 1) power /= 2, exponent++;
    while (power < 1) power *= 2, exponent--;
    return exponent * 0x04000400u;
}
constexpr float power_below(float x) {  // the largest power of 2 that is not above x, at least 1
    float power = 1;
    while (2 * power <= x) power *= 2;
    return power;
}
// Unpacked K and V are values times `TEAM_UNIT`. Codes are lifted first, so that products with scales fit fp16. If all
// scales are below 2, the scales are lifted instead, as they are fewer.
//
// V of 16 tokens is small if all their scales are below 2^-SMALL. In that unit fp16 would keep few bits of it, so it is
// lifted by 2^SMALL, and the tokens' weights are divided by 2^SMALL: HEADROOM leaves room for that.
struct RingLift { static constexpr u32 of(int) { return halves_of(TEAM_UNIT * RING_UNIT); } };
template <class Vector> struct PageLift {
    static constexpr u32 of(int group) { return halves_of(TEAM_UNIT * power_below(Vector::group(group).factor)); }
};
constexpr int SMALL = 7;
constexpr u32 NOT_SMALL = 0xC0C0C0C0;  // a scale of at least 2^-SMALL has one of these bits
constexpr float VALUE_GAIN = Value::group(0).factor / power_below(Value::group(0).factor);  // of pages

// The tiles of a block are numbered, the ring's first. Each has 16 tokens of each unpacking warp.
struct TeamTiles {
    int low, ring, all, split, splits, first_ring_tile;
    INLINE TeamTiles(const Request& request, const TileRange& range, int split, int splits)
        : low(range.low), ring(RING_BLOCK ? (range.ring + 3) / 4 : 0), all(ring + (range.count + 3) / 4), split(split),
          splits(splits), first_ring_tile(RING_BLOCK ? request.first_ring_tile() : 0) {}
    INLINE int ring_tile(int number, int warp) const { return split + (number * 4 + warp) * splits; }
    // 16 tokens of a sequence.
    INLINE int tile(int number, int warp) const {
        return number < ring ? first_ring_tile + ring_tile(number, warp) : low + 4 * (number - ring) + warp;
    }
};

}  // namespace roles
