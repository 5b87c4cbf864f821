// Latents in pages of micro-blocks: where a tile's latents lie, and their raw bytes.
#pragma once
#include "latent_tile.cuh"

// The pages of a partition's tiles in turn; a warp has a micro-block of each tile. `step` readers share the tiles of a
// run: each reads every `step`th tile, from `first` on.
struct Reader {
    const Arguments& a;
    Runs run;
    int tile;  // its number in the run
    int warp, own_first, step;
    u32 base, runs;      // tiles of the runs before this one; runs so far, this one included
    u32 ahead;           // block of the next tile
    const u8* page;      // the warp's micro-block

    INLINE Reader(const Arguments& a, int warp, int first = 0, int step = 1)
        : a(a), run(a), tile(0), warp(warp), own_first(first), step(step), base(0), runs(0), ahead(0), page(nullptr) {
        run.count = 0;
    }
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
            } while (own_first >= run.count);
            tile = own_first;
            block = block_of(tile);
        }
        page = source(tile, block);
        ahead = block_of(tile + step);
        return true;
    }
    // Words of the page at `offset`.
    template <int WIDTH> INLINE void load(u32 offset, u32* x) const { load_page<WIDTH>(page + offset, x); }
    // Ones for the scales of stored tokens; bytes of other tokens may be anything.
    INLINE u32 stored_bytes(int row) const {
        const int token = (run.first + tile) * TILE + warp * 16 + row;
        return (token < run.tokens ? 0x00FF00FF : 0) | (token + 8 < run.tokens ? 0xFF00FF00 : 0);
    }
};

// A lane's raw bytes of blocks FIRST to LAST - 1, for its tokens r and r + 8 of 16. A source is a `Reader`, or has the
// same `load` and `stored_bytes`.
template <int FIRST, int LAST> struct PageBytes {
    Words<Key> words;
    u32 scales[8], kept;

    template <class Source> INLINE void load(const Source& source, int lane) {
        load_source_words<2 * FIRST, 2 * LAST, 32>(words, source, lane);
        const u32 own = SCALES_AT + lane / 4 * 32;
        if constexpr (FIRST < 4) source.template load<4>(own, scales);
        if constexpr (LAST > 4) source.template load<4>(own + 16, scales + 4);
        kept = source.stored_bytes(lane / 4);
    }
    // 64 channels of the lane's two tokens: the left operands of four products.
    template <int BLOCK> INLINE void decode(const Tables& tables, u32 (&f)[16]) const {
        const u32 word = scales[BLOCK] & kept;
        for_each<2>([&](auto i) {
            constexpr int group = 2 * BLOCK + i.value;
            constexpr float factor = Key::group(group).factor / LATENT_DIVISOR_F;
            u32 pairs[8];
            decode_group<group>(words, pairs, tables);
            const u32 gain = to_halves(factor, factor);
            const u32 first = finite_halves(multiply_halves(scale_pair(word, 0x4040 + 0x202 * i.value), gain));
            const u32 second = finite_halves(multiply_halves(scale_pair(word, 0x4141 + 0x202 * i.value), gain));
            scale_group(pairs, pairs + 4, first, second, f + 8 * i.value);
        });
    }
};
template <int FIRST, int LAST> using Raw = Unpacker<FIRST, LAST, PageBytes<FIRST, LAST>>;

// A lane's RoPE channels of 16 tokens: fp16, or codes of 8 bits (codecs/ring.py) and scales.
template <int BITS> struct RawRope;
template <> struct RawRope<16> {
    u32 word[16];
    template <class Source> INLINE void load(const Source& source, int lane) {
        for_each<4>([&](auto i) {
            u32 q[4];
            source.template load<4>(ROPE_AT + i.value * 512 + lane * 16, q);
            u32* target = word + i.value / 2 * 8 + i.value % 2;  // [group][half][k][n3]
            target[0] = q[0], target[2] = q[1], target[4] = q[2], target[6] = q[3];
        });
    }
    INLINE const u32 (&pairs(u32 (&)[16]) const)[16] { return word; }
};
template <> struct RawRope<8> {
    u32 code[8], scales[1];  // four codes of a group, d4 = i % 2 of token n3 = i / 2 % 2
    template <class Source> INLINE void load(const Source& source, int lane) {
        for_each<2>([&](auto g) { source.template load<4>(ROPE_AT + g.value * 512 + lane * 16, code + 4 * g.value); });
        source.template load<1>(ROPE_SCALES_AT + lane / 4 * 4, scales);
    }
    INLINE const u32 (&pairs(u32 (&word)[16]) const)[16] {
        decode_rope(code, scales[0], word);
        return word;
    }
};

// A warp's micro-block in shared memory, brought there a tile ahead, and which of its tokens are stored.
struct RawPage {
    static constexpr int BYTES = MICRO_BLOCK_BYTES, ARRIVALS = 1;
    u32 address, barrier, parity;
    int unmasked, tokens;  // tokens from the micro-block's first on: that the run's first query sees; that are stored

    INLINE RawPage(u32 address, u32 barrier) : address(address), barrier(barrier), parity(1) {}
    INLINE void copy(LoadsDone done, const Reader& reader) {
        if (elect_lane()) {
            expect_bytes(barrier, MICRO_BLOCK_BYTES);
            copy_bulk<MICRO_BLOCK_BYTES>(done, address, barrier, reader.page);
        }
        sync_warp();
    }
    // The micro-block belongs to the reader's tile.
    INLINE void start(const Reader& reader, int) {
        const int token = (reader.run.first + reader.tile) * TILE + reader.warp * 16;
        unmasked = reader.run.unmasked - token, tokens = reader.run.tokens - token;
    }
    INLINE bool hides_some() const { return unmasked < 16; }
    // Masks the scores of a lane's two tokens, in columns 8 n + 2 c + {0, 1}.
    INLINE void mask(int r, int c, float (&s)[ROWS / 2]) const {
        const int unmasked = this->unmasked - r, tokens = this->tokens - r;
        for_each<ROWS / 2>([&](auto j) {
            const int row = blockIdx.x * ROWS + j.value / 4 * 8 + 2 * c + j.value % 2;
            if (j.value / 2 % 2 * 8 >= min(unmasked + row / HEADS, tokens)) s[j.value] = minus_infinity();
        });
    }
    INLINE void wait() { wait_for_copies_of(barrier, parity ^= 1); }
    template <int WIDTH> INLINE void load(u32 offset, u32* x) const {
        if constexpr (WIDTH == 4) load_shared_4(address + offset, x);
        else if constexpr (WIDTH == 2) load_shared_2(address + offset, x);
        else *x = load_shared(address + offset);
    }
    INLINE u32 stored_bytes(int row) const {
        return (row < tokens ? 0x00FF00FF : 0) | (row + 8 < tokens ? 0xFF00FF00 : 0);
    }
};
