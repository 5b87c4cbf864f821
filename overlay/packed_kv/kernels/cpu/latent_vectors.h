// A tile of latents for all columns with vectors of SIMD: see latent.cpp.
#pragma once

constexpr int LEVEL_VECTORS = GROUPS * 4 * 4;                 // of a part of a micro-block: [group][t][e2][e3]
constexpr int LEVELS_BYTES = PARTS * LEVEL_VECTORS * VECTOR_BYTES;
constexpr int SUMS = GROUPS * 4 * 2;                          // vectors of fp32 sums over V: [group][t][e2]
constexpr int TS = VECTOR_LANES == 4 ? 2 : 1;                 // t's at once: as many sums as registers hold

struct Columns {
  static constexpr int TOKENS = TILE;
  int count;
  int16_t* queries;     // block of columns: [group][t][e2][column][e1][e0]
  float* factors;       // of a query's integers
  float* rope;          // [column][ROPE_DIM], in the order of KEY_BYTES
  float* ring_queries;  // [column][RING_DIM], the same
  float* scores;        // [column][TILE], in the order of scores; then exponentials
  float* sums;          // [column][SUMS][VECTOR_FLOATS]
  float* ring_sums;     // [column][RANK], in the order of KEY_BYTES
  Softmax* softmax;
  float* tile_factors;  // what an exponential of 1 is in the sums; 0: the column sees nothing of the tile
  long* hidden_from;
  uint8_t* levels;      // of the tile: [micro-block][part][LEVEL_VECTORS]
  float* scales;        // [micro-block][group][16 tokens], 0 of tokens that are not there
  uint8_t* weights;     // of a group: [micro-block][part][column][parity]
  float* ring_rows;     // [RING_TILE][RING_DIM]
};

static Columns cut_columns(const LatentArguments& a, Cutter& from, long count) {
  Columns c = {};
  c.queries = from.take<int16_t>(count * RANK);
  c.factors = from.take<float>(count);
  c.rope = from.take<float>(count * ROPE_DIM);
  if (a.ring) c.ring_queries = from.take<float>(count * RING_DIM), c.ring_sums = from.take<float>(count * RANK);
  c.scores = from.take<float>(count * TILE);
  c.sums = from.take<float>(count * SUMS * VECTOR_FLOATS);
  c.softmax = from.take<Softmax>(count);
  c.tile_factors = from.take<float>(count);
  c.hidden_from = from.take<long>(count);
  c.levels = from.take<uint8_t>((long)TILE_BLOCKS * LEVELS_BYTES);
  c.scales = from.take<float>((long)TILE_BLOCKS * GROUPS * MICRO_BLOCK);
  c.weights = from.take<uint8_t>((long)BLOCK * TILE_BLOCKS * PARTS * 2 * VECTOR_BYTES);
  c.ring_rows = a.ring ? from.take<float>((long)RING_TILE * RING_DIM) : nullptr;
  return c;
}

static void clear_sums(const Columns& columns) {
  memset(columns.sums, 0, sizeof(float) * columns.count * SUMS * VECTOR_FLOATS);
}

struct Tiles {};  // none have to be configured

static void read_queries(const LatentArguments& a, long query, long tokens, Columns& to) {
  alignas(64) float row[RANK + ROPE_DIM];
  for (int column = 0; column < to.count; column++) {
    long token = query + column / a.heads, head = column % a.heads;
    const int bytes = element_bytes(a.query_type);
    long latent = token * a.query_stride + head * a.query_head_stride;
    long rope = token * a.rope_stride + head * a.rope_head_stride;
    read_elements(row, (const char*)a.query + bytes * latent, a.query_type, RANK);
    read_elements(row + RANK, (const char*)a.rope_query + bytes * rope, a.query_type, ROPE_DIM);
    for (int d = 0; d < RANK + ROPE_DIM; d++) row[d] *= (float)a.scale;
    float largest = 0;
    for (int d = 0; d < RANK; d++) largest = larger(largest, fabsf(row[d]));
    float inverse = largest > 1e-30f ? LARGEST_INT16 / largest : 0;
    to.factors[column] = largest / LARGEST_INT16;
    int first = column / BLOCK * BLOCK, width = (int)least(BLOCK, to.count - first), c = column - first;
    int16_t* integers = to.queries + (long)first * RANK;
    for (int g = 0; g < GROUPS; g++)
      for (int d = 0; d < GROUP_SIZE; d++) {  // d4 d3 d2 d1 d0 -> [t = d2 d1][e2 = d4][column][e1 = d3][e0 = d0]
        int at = ((g * 4 + (d >> 1 & 3)) * 2 + (d >> 4)) * 4 * width + 4 * c + (d >> 3 & 1) * 2 + (d & 1);
        integers[at] = (int16_t)lrintf(row[g * GROUP_SIZE + d] * inverse);
      }
    for (int i = 0; i < ROPE_DIM; i++)
      to.rope[(long)column * ROPE_DIM + i] = row[RANK + i / 32 * 32 + KEY_BYTES[i % 32]];
    for (int i = 0; a.ring && i < RING_DIM; i++)
      to.ring_queries[(long)column * RING_DIM + i] = row[i / 32 * 32 + KEY_BYTES[i % 32]];
    to.hidden_from[column] = column / a.heads - (tokens - 1);  // less the tokens that a query does not see
  }
}

static void decode_levels(const uint8_t* micro_block, uint8_t* to) {
  alignas(64) uint8_t arranged[ARRANGED * VECTOR_BYTES];
  constexpr int WIDTHS = sizeof CODES / sizeof CODES[0];
  Bytes low[WIDTHS], high[WIDTHS];
  unrolled<WIDTHS>([&](auto code) { table_of<code.value>(&low[code.value], &high[code.value]); });
  for (int part = 0; part < PARTS; part++, to += LEVEL_VECTORS * VECTOR_BYTES) {
    arrange(micro_block, 0, part, arranged);
    unrolled<GROUPS>([&](auto group) {
      unrolled<4>([&](auto t) {
        Bytes levels[4];
        constexpr int code = GROUP_TABLE[group.value].code;
        decode<group.value, t.value>(arranged, low[code], high[code], levels);
        for (int i = 0; i < 4; i++) store(to + ((group.value * 4 + t.value) * 4 + i) * VECTOR_BYTES, levels[i]);
      });
    });
  }
}

// Scores of a part of a micro-block for C columns from `first` on.
template <int C>
static void score_part(const Columns& columns, int first, int micro_block, int part, const float (*rope)[MICRO_BLOCK]) {
  const int16_t* q = columns.queries + (long)first * RANK;
  const uint8_t* levels = columns.levels + (long)micro_block * LEVELS_BYTES + part * LEVEL_VECTORS * VECTOR_BYTES;
  const float* scales = columns.scales + micro_block * GROUPS * MICRO_BLOCK + part * VECTOR_FLOATS;
  Floats sum[C];
  for (int c = 0; c < C; c++) sum[c] = broadcast(0);
  for (int group = 0; group < GROUPS; group++) {
    Bytes low[C], high[C];  // of n3 = 0 and 1
    for (int c = 0; c < C; c++) low[c] = high[c] = zero();
    for (int i = 0; i < 8; i++, levels += 2 * VECTOR_BYTES, q += 4 * C) {  // t, e2
      Bytes first_of_pair = load(levels), second = load(levels + VECTOR_BYTES);
      for (int c = 0; c < C; c++) {
        Bytes four = broadcast_64(q + 4 * c);
        low[c] = dot16(low[c], first_of_pair, four), high[c] = dot16(high[c], second, four);
      }
    }
    Floats scale = load_floats(scales + group * MICRO_BLOCK);
    for (int c = 0; c < C; c++) {
      Bytes products = add32(even_words(low[c], high[c]), odd_words(low[c], high[c]));
      sum[c] = multiply_add(to_floats(products), scale, sum[c]);
    }
  }
  for (int c = 0; c < C; c++) sum[c] = sum[c] * broadcast(columns.factors[first + c]);
  const float* rope_query = columns.rope + (long)first * ROPE_DIM;
  for (int d = 0; d < ROPE_DIM; d++) {
    Floats x = load_floats(rope[d] + part * VECTOR_FLOATS);
    for (int c = 0; c < C; c++) sum[c] = multiply_add(x, broadcast(rope_query[c * ROPE_DIM + d]), sum[c]);
  }
  for (int c = 0; c < C; c++)
    store_floats(columns.scores + (long)(first + c) * TILE + micro_block * MICRO_BLOCK + part * VECTOR_FLOATS, sum[c]);
}

// Decodes a micro-block, of which `tokens` are there, and scores it for all columns.
static void score_micro_block(const Columns& columns, const uint8_t* micro_block, int number, int tokens) {
  alignas(64) float rope[ROPE_DIM][MICRO_BLOCK];
  float* scales = columns.scales + number * GROUPS * MICRO_BLOCK;
  decode_levels(micro_block, columns.levels + (long)number * LEVELS_BYTES);
  read_scales(micro_block, 0, scales);
  for (int n = tokens; n < MICRO_BLOCK; n++)  // those of tokens that are not there may be any
    for (int g = 0; g < GROUPS; g++) scales[g * MICRO_BLOCK + place_of_token(n)] = 0;
  read_rope(micro_block, rope);
  for (int part = 0; part < PARTS; part++)
    for_blocks(columns.count, [&](auto block, int first) {
      score_part<block.value>(columns, first, number, part, rope);
    });
}

static void score_tile(const Columns&, int) {}  // its micro-blocks have been scored

static void shrink_sums(const Columns& columns, int column, float factor) {
  float* sums = columns.sums + (long)column * SUMS * VECTOR_FLOATS;
  for (int i = 0; i < SUMS * VECTOR_FLOATS; i += VECTOR_FLOATS)
    store_floats(sums + i, load_floats(sums + i) * broadcast(factor));
  for (int i = 0; columns.ring_sums && i < RANK; i++) columns.ring_sums[(long)column * RANK + i] *= factor;
}

// 16-bit weights of a group for C columns: an exponential times a scale, in units of `unit`. The pair of tokens that
// differ in n3 lies in each 32-bit word of their lane; one vector of those with n0 = 0, one with n0 = 1.
template <int C>
static void weigh(const Columns& columns, int first, int group, int blocks, float inverse_unit) {
  static constexpr struct Controls {
    alignas(64) uint8_t even[64], odd[64];
    constexpr Controls() : even{}, odd{} {
      for (int i = 0; i < 64; i++) {
        int in_word = i & 3;
        even[i] = (in_word >> 1) * 8 + (in_word & 1), odd[i] = even[i] + 4;
      }
    }
  } controls;
  Bytes even = load(controls.even), odd = load(controls.odd);
  Floats inverse = broadcast(inverse_unit);
  uint8_t* to = columns.weights;
  for (int i = 0; i < blocks; i++)
    for (int part = 0; part < PARTS; part++) {
      int at = i * MICRO_BLOCK + part * VECTOR_FLOATS;
      Floats scale = load_floats(columns.scales + (i * GROUPS + group) * MICRO_BLOCK + part * VECTOR_FLOATS) * inverse;
      for (int c = 0; c < C; c++, to += 2 * VECTOR_BYTES) {
        Bytes weight = round_to_int32(load_floats(columns.scores + (long)(first + c) * TILE + at) * scale);
        store(to, shuffle_bytes(weight, even)), store(to + VECTOR_BYTES, shuffle_bytes(weight, odd));
      }
    }
}

// Adds products with V of a group for C columns.
template <int C> static void add_values(const Columns& columns, int first, int group, int blocks, float unit) {
  for (int t = 0; t < 4; t += TS) {
    Bytes products[TS][2][C];
    for (int i = 0; i < TS * 2 * C; i++) products[i / (2 * C)][i / C % 2][i % C] = zero();
    const uint8_t* weights = columns.weights;
    for (int i = 0; i < blocks * PARTS; i++, weights += C * 2 * VECTOR_BYTES) {
      const uint8_t* levels = columns.levels + ((long)i * LEVEL_VECTORS + (group * 4 + t) * 4) * VECTOR_BYTES;
      Bytes even[TS][2], odd[TS][2];
      for (int k = 0; k < TS; k++)
        for (int e2 = 0; e2 < 2; e2++, levels += 2 * VECTOR_BYTES) {
          Bytes n3_0 = load(levels), n3_1 = load(levels + VECTOR_BYTES);
          even[k][e2] = low_16(n3_0, n3_1), odd[k][e2] = high_16(n3_0, n3_1);
        }
      for (int c = 0; c < C; c++) {
        Bytes w_even = load(weights + 2 * c * VECTOR_BYTES), w_odd = load(weights + (2 * c + 1) * VECTOR_BYTES);
        for (int k = 0; k < TS; k++)
          for (int e2 = 0; e2 < 2; e2++) {
            products[k][e2][c] = dot16(products[k][e2][c], even[k][e2], w_even);
            products[k][e2][c] = dot16(products[k][e2][c], odd[k][e2], w_odd);
          }
      }
    }
    for (int c = 0; c < C; c++) {
      Floats factor = broadcast(unit * columns.tile_factors[first + c]);
      float* sums = columns.sums + ((long)(first + c) * SUMS + (group * 4 + t) * 2) * VECTOR_FLOATS;
      for (int k = 0; k < TS; k++)
        for (int e2 = 0; e2 < 2; e2++, sums += VECTOR_FLOATS)
          store_floats(sums, multiply_add(to_floats(products[k][e2][c]), factor, load_floats(sums)));
    }
  }
}

// Softmax and V of a tile's micro-blocks, scored, for all columns.
static void add_tile(const Columns& columns, int blocks) {
  float units[GROUPS];
  for (int g = 0; g < GROUPS; g++) {
    Floats largest = broadcast(0);
    for (int i = 0; i < blocks; i++)
      for (int part = 0; part < PARTS; part++) {
        const float* scales = columns.scales + (i * GROUPS + g) * MICRO_BLOCK + part * VECTOR_FLOATS;
        largest = max_floats(largest, load_floats(scales));
      }
    units[g] = horizontal_max(largest) / LARGEST_INT16;
  }
  for (int column = 0; column < columns.count; column++) {
    columns.tile_factors[column] = add_to_softmax(columns, column, MICRO_BLOCK * blocks);
    if (columns.tile_factors[column] == 0) memset(columns.scores + (long)column * TILE, 0, sizeof(float) * TILE);
  }
  for_blocks(columns.count, [&](auto block, int first) {
    for (int g = 0; g < GROUPS; g++) {
      if (units[g] < 1e-35f) continue;  // zeros
      weigh<block.value>(columns, first, g, blocks, 1 / units[g]);
      add_values<block.value>(columns, first, g, blocks, units[g]);
    }
  });
}

// Makes the columns' sums over V, [column][RANK] in packing order.
static void collect_pages(const Columns& columns, float* to) {
  const float* sums = columns.sums;
  for (long column = 0; column < columns.count; column++) {
    for (int i = 0; i < SUMS; i++, sums += VECTOR_FLOATS) {
      int group = i / 8, t = i / 2 % 4, e2 = i % 2;
      for (int word = 0; word < 4; word++) {  // e1 e0 = d3 d0
        float sum = 0;
        for (int lane = 0; lane < VECTOR_LANES; lane++) sum += sums[4 * lane + word];
        to[column * RANK + group * GROUP_SIZE + e2 * 16 + (word >> 1) * 8 + t * 2 + (word & 1)] = sum;
      }
    }
  }
}
