// Products of queries with codes of K.
#pragma once
#include "columns.h"

// Tables of levels of all codes, in registers.
struct Tables {
  Bytes low[WIDTHS], high[WIDTHS];
  static INLINE_MEMBER Tables read() {
    Tables tables;
    unrolled<WIDTHS>([&](auto code) { table_of<code.value>(&tables.low[code.value], &tables.high[code.value]); });
    return tables;
  }
  // Levels of a group and t of an arranged part of a role's vectors.
  template <int ROLE, class G, class T>
  INLINE_MEMBER void decode(Index<ROLE>, G, T, const uint8_t* arranged, Bytes* levels) const {
    constexpr int code = GROUP_TABLE[ROLE][G::value].code;
    ::decode<ROLE, G::value, T::value>(arranged, low[code], high[code], levels);
  }
};

// Scores of a part of a micro-block for C columns from `first` on, written to `scores`, the first column's. `source`
// calls body(group) for each group, and reads the levels of a group and t. `scales`: of the part, by group.
// `add(column, sum)` adds the other terms of the scores.
template <int C, class Source, class Add>
INLINE void score_part(const Columns& columns, int first, const Source& source, const float* scales, float* scores,
                       int tile, Add add) {
  const int16_t* queries = columns.queries + (long)first * STORED_DIM;
  Floats sum[C];
  for (int c = 0; c < C; c++) sum[c] = broadcast(0);
  source.each_group([&](auto group) {
    Bytes low[C], high[C];  // of e3 = 0 and 1
    for (int c = 0; c < C; c++) low[c] = high[c] = zero();
    unrolled<4>([&](auto t) {
      Bytes levels[4];
      source.read(group, t, levels);
      const int16_t* q = queries + (group * 4 + t.value) * 8 * C;
      for (int e2 = 0; e2 < 2; e2++)
        for (int c = 0; c < C; c++) {
          Bytes four = broadcast_64(q + 4 * (e2 * C + c));
          low[c] = dot16(low[c], levels[2 * e2], four), high[c] = dot16(high[c], levels[2 * e2 + 1], four);
        }
    });
    Floats scale = load_floats(scales + group * MICRO_BLOCK);
    for (int c = 0; c < C; c++) {
      Bytes products = add32(even_words(low[c], high[c]), odd_words(low[c], high[c]));
      sum[c] = multiply_add(to_floats(products), scale, sum[c]);
    }
  });
  for (int c = 0; c < C; c++) sum[c] = sum[c] * broadcast(columns.factors[first + c]);
  add(sum);
  for (int c = 0; c < C; c++) store_floats(scores + (long)c * tile, sum[c]);
}
