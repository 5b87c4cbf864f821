// Attention over the ring buffer of recent tokens, 16 at a time. `codecs/ring.py` describes its codes, `layout.py` its
// bytes.
#pragma once
#include "columns.cuh"

// Factors of scores of pages and of the ring.
constexpr float PAGE_FACTOR = UNPACKERS ? 1 / TEAM_UNIT : 1 / SCORE_UNIT;
constexpr float RING_FACTOR = UNPACKERS ? 1 / TEAM_UNIT : RING_UNIT;

constexpr int greatest_divisor(int a, int b) { return b == 0 ? a : greatest_divisor(b, a % b); }
constexpr int RING_PIECE = greatest_divisor(16, RING_BLOCK);  // consecutive tokens of a tile in one block
constexpr int RING_DIVISOR = RING_BLOCK ? RING_BLOCK : 16;  // a divisor must not be 0, ring or not
constexpr int RING_VALUE_SCALE = RING_VALUE_SCALES_AT % 4;  // byte of V's first scale in its word
constexpr int RING_SCALE_WORDS = GROUPS > 4 ? GROUPS / 4 : 1;  // of a vector's scales
static_assert(RING_KEY_SCALES_AT % 4 == 0 && RING_VALUE_SCALE + GROUPS <= 4 * RING_SCALE_WORDS,
              "the scales of a vector are in as few words as can be");

// The ring of one (request, KV head) pair. In shared memory, the slots of a tile's tokens are contiguous.
struct Ring {
    const u8* cache;
    const int* table;
    u32 block_stride;

    INLINE Ring(const Arguments& a, const Request& request, int index, int head)
        : cache(a.ring + (u64)head * a.ring_head_stride), table(a.ring_table + (u64)index * a.ring_table_stride),
          block_stride(a.ring_block_stride) {}

    // Each of the first lanes copies a piece. Pieces outside the ring have no block: the nearest piece inside is copied
    // instead, and its scores are masked.
    INLINE void copy(LoadsDone done, const Request& request, int tile, u32 target, u32 barrier,
                     const Lane& lane) const {
        constexpr int piece_bytes = RING_PIECE * RING_SLOT_BYTES;
        if (lane.index == 0) expect_bytes(barrier, RING_TILE_BYTES);
        sync_warp();
        if (lane.index >= 16 / RING_PIECE) return;
        int token = 16 * (request.first_ring_tile() + tile) + lane.index * RING_PIECE;
        token = max(min(token, request.seq_len - 1), request.recent) / RING_PIECE * RING_PIECE;
        const u32 block = table[token / RING_DIVISOR];
        copy_bulk<piece_bytes>(done, target + lane.index * piece_bytes, barrier,
                               cache + (u64)block * block_stride + token % RING_DIVISOR * RING_SLOT_BYTES);
    }
};

// The group whose scale belongs to a lane's columns: with TWICE, an even one for columns 0 to 3, else an odd one.
INLINE int group_of(int set, int upper_columns) { return set * GROUPS_PER_SET + (TWICE ? upper_columns : 0); }

// Decodes a group of K of a tile.
INLINE void ring_key_pairs(u32 tile, const Lane& lane, int group, u32* pairs) {
    const u32 keys = tile + lane.row * RING_SLOT_BYTES + RING_KEYS_AT + lane.column * 8 + group * 32;
    for_each<2>([&](auto n3) {
        u32 words[2];
        load_shared_2(keys + n3.value * 8 * RING_SLOT_BYTES, words);
        for_each<2>([&](auto d4) {
            pairs[4 * n3.value + 2 * d4.value] = ring_pair(words[d4.value], 0x4140);
            pairs[4 * n3.value + 2 * d4.value + 1] = ring_pair(words[d4.value], 0x4342);
        });
    });
}
// The scales of K of this lane's two tokens, for a group.
INLINE void ring_key_scales(u32 tile, const Lane& lane, int group, float& low, float& high) {
    const int word = RING_SCALE_WORDS > 1 ? group / 4 : 0;
    const u32 scales = tile + lane.row * RING_SLOT_BYTES + RING_KEY_SCALES_AT + 4 * word;
    const u32 selector = 0x4440 + group - 4 * word;
    low = low_float(scale_pair(load_shared(scales), selector));
    high = low_float(scale_pair(load_shared(scales + 8 * RING_SLOT_BYTES), selector));
}

// The lane's token i = n3 n0 of the tile.
INLINE int value_token(const Lane& lane, int i) { return 2 * lane.column + i % 2 + i / 2 * 8; }

// Decodes a group of V of a tile.
INLINE void ring_value_pairs(u32 tile, const Lane& lane, int group, u32* pairs) {
    const u32 values = tile + RING_VALUES_AT + group * 32 + lane.row * 4;
    for_each<2>([&](auto n3) {
        const u32 first = load_shared(values + value_token(lane, 2 * n3.value) * RING_SLOT_BYTES);
        const u32 second = load_shared(values + value_token(lane, 2 * n3.value + 1) * RING_SLOT_BYTES);
        const u32 low = prmt(first, second, 0x5140), high = prmt(first, second, 0x7362);
        pairs[n3.value] = ring_pair(low, 0x4140), pairs[2 + n3.value] = ring_pair(low, 0x4342);
        pairs[4 + n3.value] = ring_pair(high, 0x4140), pairs[6 + n3.value] = ring_pair(high, 0x4342);
    });
}

// Loads V's scales in the pages' order, one byte per token. Tokens outside the ring get 0, as their bytes may be
// anything.
INLINE void ring_value_scales(const Request& request, u32 tile, int first, const Lane& lane, u32 (&scales)[SETS]) {
    const u32 word = tile + RING_VALUE_SCALES_AT - RING_VALUE_SCALE;
    for_each<RING_SCALE_WORDS>([&](auto w) {
        constexpr int sets = SETS / RING_SCALE_WORDS, first_set = w.value * sets;
        u32 words[4];
        for_each<4>([&](auto i) {
            const int token = value_token(lane, i.value);
            const bool stored = first + token >= request.recent && first + token < request.seq_len;
            words[i.value] = stored ? load_shared(word + token * RING_SLOT_BYTES + 4 * w.value) : 0;
        });
        for_each<sets>([&](auto set) {
            const u32 byte = group_of(set.value, lane.row / 4) + RING_VALUE_SCALE;
            const u32 selector = byte | (byte + 4) << 4;
            scales[first_set + set.value] =
                prmt(prmt(words[0], words[1], selector), prmt(words[2], words[3], selector), 0x5410);
        });
    });
}

// The tile of pages with the same tokens as a request's ring tile `number`.
INLINE int page_tile(const Request& request, int number) { return (request.first_ring_tile() + number) / TILE_BLOCKS; }

// Corrects the scores of token 0, and masks scores of tokens that a query does not see or reads from pages. `first` is
// the tile's first token.
INLINE void mask_ring_scores(const Arguments& a, const Request& request, int head, int first, const Lane& lane,
                             float (&scores)[SCORES]) {
    if (HAS_BIAS && first == 0) Biases(a, request, head, lane).add_first(a, lane, RING_FACTOR, scores);
    for_each<SCORES>([&](auto r) {
        const int token = first + lane.row + r.value / 2 % 2 * 8;
        const int limit = request.limit(own_column(lane, own_of_score(r.value)));
        if (token >= limit || token < request.first_recent(limit)) scores[r.value] = minus_infinity();
    });
    if (HAS_VALUE_MEANS && !IS_WIDE && first == 0)
        Biases(a, request, head, lane).keep_first(a, request, lane, RING_FACTOR, scores);
}
