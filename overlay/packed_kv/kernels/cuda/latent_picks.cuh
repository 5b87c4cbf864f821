// Latent rows that were picked for query tokens: where a tile's rows lie, and their raw bytes.
//
// What latent.cu calls a request is a query token here, and its tokens are its picks: positions in its request, in any
// order. A pick that is negative or past the block table counts as no pick, in any place. A lane has words of two rows,
// r and r + 8 of a warp's 16, and a row's two neighbouring groups stand where a micro-block has two tokens (layout.py).
// So decoders, operands and products are the same as for pages.
#pragma once
#include "latent_tile.cuh"

constexpr u32 BLOCK_TOKENS = MICRO_BLOCKS * 16, NO_ROW = ~0u;
static_assert(GROUPS == BLOCKS && ROW_BYTES % 16 == 0 && ROPE_AT % 16 == 0 && SCALES_AT % 16 == 0, "whole 16 bytes");

// The picks of a partition's tiles in turn; a warp has 16 picks of each tile, a lane the pick of its number modulo 16.
// Otherwise as `Reader` of latent_pages.cuh. A row's address takes two dependent loads: picks are loaded two tiles
// ahead, and blocks of the table one tile ahead. Which request the query token belongs to is loaded once a run. Lanes
// choose what they load and do not
// branch: behind a divergent branch the compiler would keep a run's uniform values in one register per lane, and spill
// them.
struct Reader {
    const Arguments& a;
    Runs run;
    int tile;  // its number in the run
    int warp, own_first, step;
    u32 request;
    u32 base, runs;  // tiles of the runs before this one; runs so far, this one included
    u32 row;         // the lane's, in units of 16 bytes from the start of the cache; or NO_ROW
    int pick_ahead, pick_after;  // the same for the next tile, and for the one after it
    u32 block_ahead;             // of the next tile's pick

    INLINE Reader(const Arguments& a, int warp, int first = 0, int step = 1)
        : a(a), run(a), tile(0), warp(warp), own_first(first), step(step), request(0), base(0), runs(0), row(NO_ROW),
          pick_ahead(-1), pick_after(-1), block_ahead(0) {
        run.count = 0;
    }
    INLINE int pick_of(int i) const {
        const int number = (run.first + i) * TILE + warp * 16 + threadIdx.x % 16;
        const bool is_there = i < run.count && number < run.tokens;
        const int found = load_int(a.picks + (u64)run.index * a.pick_stride + (is_there ? number : 0));
        return is_there ? found : -1;
    }
    INLINE bool is_pick(int pick) const { return (u32)pick < a.table_columns * BLOCK_TOKENS; }
    INLINE u32 block_of(int pick) const {
        const u32 column = is_pick(pick) ? (u32)pick / BLOCK_TOKENS : 0;
        return load_int(a.block_table + (u64)request * a.table_stride + column);
    }
    INLINE bool next() {
        int pick = pick_ahead;
        u32 block = block_ahead;
        tile += step;
        if (tile >= run.count) {
            do {
                base += run.count;
                if (!run.next(a)) return false;
                runs++;
            } while (own_first >= run.count);
            tile = own_first;
            request = load_int(a.requests + run.index);
            pick = pick_of(tile), pick_after = pick_of(tile + step);
            block = block_of(pick);
        }
        const u32 found = block * (a.block_stride / 16) + (u32)pick % BLOCK_TOKENS * (ROW_BYTES / 16);
        row = is_pick(pick) ? found : NO_ROW;
        pick_ahead = pick_after, block_ahead = block_of(pick_ahead);
        pick_after = pick_of(tile + 2 * step);
        return true;
    }
    INLINE const u8* source() const { return a.cache + (u64)row * 16; }
    // A row of global memory.
    struct Row {
        const u8* source;
        bool is_picked;
        template <int WIDTH> INLINE void load(u32 offset, u32* x) const { load_page<WIDTH>(source + offset, x); }
    };
    // Row r + 8 n3. Where there is no pick, it is the cache's first row, whose bytes are not used.
    INLINE Row row_of(int r, int n3) const {
        const u32 own = shuffle_word(row, r + 8 * n3);
        return {a.cache + (u64)(own == NO_ROW ? 0 : own) * 16, own != NO_ROW};
    }
};

// A lane's raw bytes of blocks FIRST to LAST - 1 of its rows r and r + 8.
template <int FIRST, int LAST> struct RowBytes {
    Words<Key> words[2];
    u32 scales[2][4], kept[2];

    template <class Source> INLINE void load(const Source& source, int lane) {
        for_each<2>([&](auto n3) {
            const auto row = source.row_of(lane / 4, n3.value);
            load_source_words<FIRST, LAST, 4>(words[n3.value], row, lane % 4);
            constexpr int from = FIRST < 4 ? 0 : 2, count = LAST <= 4 || FIRST >= 4 ? 2 : 4;  // words of two blocks each
            row.template load<count>(SCALES_AT + 4 * from, scales[n3.value] + from);
            kept[n3.value] = row.is_picked ? ~0u : 0;
        });
    }
    // 64 channels of the lane's two tokens: the left operands of four products.
    template <int BLOCK> INLINE void decode(const Tables& tables, u32 (&f)[16]) const {
        constexpr float factor = Key::group(BLOCK).factor / LATENT_DIVISOR_F;
        const u32 gain = to_halves(factor, factor);
        u32 pairs[2][8], word[2];
        for_each<2>([&](auto n3) {
            decode_group<BLOCK>(words[n3.value], pairs[n3.value], tables);
            word[n3.value] = scales[n3.value][BLOCK / 2] & kept[n3.value];
        });
        for_each<2>([&](auto i) {
            constexpr u32 selector = 0x4040 + 0x101 * (BLOCK % 2 * 2 + i.value);
            const u32 first = finite_halves(multiply_halves(scale_pair(word[0], selector), gain));
            const u32 second = finite_halves(multiply_halves(scale_pair(word[1], selector), gain));
            scale_group(pairs[0] + 4 * i.value, pairs[1] + 4 * i.value, first, second, f + 8 * i.value);
        });
    }
};
template <int FIRST, int LAST> using Raw = Unpacker<FIRST, LAST, RowBytes<FIRST, LAST>>;

// A lane's RoPE channels of two rows; see latent_pages.cuh.
template <int BITS> struct RawRope;
template <> struct RawRope<16> {
    u32 word[16];
    template <class Source> INLINE void load(const Source& source, int lane) {
        for_each<2>([&](auto n3) {
            const auto row = source.row_of(lane / 4, n3.value);
            for_each<2>([&](auto group) {
                u32 q[4];
                row.template load<4>(ROPE_AT + group.value * 64 + lane % 4 * 16, q);
                u32* target = word + group.value * 8 + n3.value;  // [group][half][k][n3]
                target[0] = q[0], target[2] = q[1], target[4] = q[2], target[6] = q[3];
            });
        });
    }
    INLINE const u32 (&pairs(u32 (&)[16]) const)[16] { return word; }
};
template <> struct RawRope<8> {
    u32 code[8], scales[2];
    template <class Source> INLINE void load(const Source& source, int lane) {
        for_each<2>([&](auto n3) {
            const auto row = source.row_of(lane / 4, n3.value);
            u32 q[4];
            row.template load<4>(ROPE_AT + lane % 4 * 16, q);  // [group][half]
            u32* target = code + 2 * n3.value;
            target[0] = q[0], target[1] = q[1], target[4] = q[2], target[5] = q[3];
            row.template load<1>(ROPE_SCALES_AT, scales + n3.value);
        });
    }
    INLINE const u32 (&pairs(u32 (&word)[16]) const)[16] {
        decode_rope(code, prmt(scales[0], scales[1], 0x5140), word);
        return word;
    }
};

// A warp's 16 rows in shared memory, each copied there a tile ahead, and which of the lane's two rows are picked. Odd
// rows lie behind the even ones and a gap of 64 bytes: so the two tokens that a phase of 16-byte loads reads, 64 bytes
// of each, share no bank. (A stride of 400 bytes is 4 banks modulo 32; a conflict-free stride, 448, leaves no room for
// 32 rows.)
struct RawPage {
    static constexpr int ODD_AT = 8 * ROW_BYTES + 64, BYTES = 16 * ROW_BYTES + 64, ARRIVALS = 16;
    u32 address, barrier, parity;
    bool is_picked[2];

    INLINE RawPage(u32 address, u32 barrier) : address(address), barrier(barrier), parity(1) {}
    INLINE static u32 place(int row) { return row % 2 * ODD_AT + row / 2 * ROW_BYTES; }
    INLINE void copy(LoadsDone done, const Reader& reader) {
        const int row = threadIdx.x % 32;
        const bool is_there = reader.row != NO_ROW;
        if (row < ARRIVALS) {
            expect_bytes(barrier, is_there ? ROW_BYTES : 0);
            if (is_there) copy_bulk<ROW_BYTES>(done, address + place(row), barrier, reader.source());
        }
        sync_warp();
    }
    // The rows belong to the reader's tile.
    INLINE void start(const Reader& reader, int r) {
        for_each<2>([&](auto n3) { is_picked[n3.value] = shuffle_word(reader.row, r + 8 * n3.value) != NO_ROW; });
    }
    INLINE bool hides_some() const { return any_lane(!is_picked[0] || !is_picked[1]); }
    // Masks the scores of a lane's two rows.
    INLINE void mask(int, int, float (&s)[ROWS / 2]) const {
        for_each<ROWS / 2>([&](auto j) {
            if (!is_picked[j.value / 2 % 2]) s[j.value] = minus_infinity();
        });
    }
    INLINE void wait() { wait_for_copies_of(barrier, parity ^= 1); }
    struct Row {
        u32 address;
        bool is_picked;
        template <int WIDTH> INLINE void load(u32 offset, u32* x) const {
            if constexpr (WIDTH == 4) load_shared_4(address + offset, x);
            else if constexpr (WIDTH == 2) load_shared_2(address + offset, x);
            else *x = load_shared(address + offset);
        }
    };
    INLINE Row row_of(int r, int n3) const { return {address + place(r + 8 * n3), is_picked[n3]}; }
};
