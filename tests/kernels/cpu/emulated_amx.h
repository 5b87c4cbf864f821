// AMX in software, by the pseudocode of Intel's manual, for processors without it: included before a kernel, which is then
// compiled as if it had tiles. A tile that is read before it is configured, or in another shape, ends the process.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define HAS_AMX 1

struct EmulatedTile {
  uint8_t bytes[16][64];
};
struct EmulatedTiles {
  uint8_t config[64];
  EmulatedTile tile[8];
};
static thread_local EmulatedTiles emulated;

static inline EmulatedTile& emulated_tile(int i) {
  uint16_t row_bytes;
  memcpy(&row_bytes, emulated.config + 16 + 2 * i, 2);
  if (emulated.config[0] != 1 || row_bytes != 64 || emulated.config[48 + i] != 16) __builtin_trap();
  return emulated.tile[i];
}
static inline void emulated_loadconfig(const void* config) {
  memcpy(emulated.config, config, 64);
  memset(emulated.tile, 0, sizeof(emulated.tile));
}
static inline void emulated_storeconfig(void* config) { memcpy(config, emulated.config, 64); }
static inline void emulated_release() { memset(&emulated, 0, sizeof(emulated)); }
static inline void emulated_zero(int i) { memset(&emulated_tile(i), 0, sizeof(EmulatedTile)); }
static inline void emulated_loadd(int i, const void* from, long stride) {
  for (int row = 0; row < 16; row++) memcpy(emulated_tile(i).bytes[row], (const char*)from + row * stride, 64);
}
static inline void emulated_stored(int i, void* to, long stride) {
  for (int row = 0; row < 16; row++) memcpy((char*)to + row * stride, emulated_tile(i).bytes[row], 64);
}
static inline float emulated_bfloat16(const uint8_t* from) {  // a subnormal number is 0
  uint16_t half;
  memcpy(&half, from, 2);
  const uint32_t bits = half & 0x7f80 ? (uint32_t)half << 16 : 0;
  float number;
  memcpy(&number, &bits, 4);
  return number;
}
static inline void emulated_dpbf16ps(int sums, int left, int right) {
  for (int row = 0; row < 16; row++) {
    for (int pair = 0; pair < 16; pair++) {
      for (int column = 0; column < 16; column++) {
        float sum;
        memcpy(&sum, emulated_tile(sums).bytes[row] + 4 * column, 4);
        for (int half = 0; half < 2; half++) {
          sum += emulated_bfloat16(emulated_tile(left).bytes[row] + 4 * pair + 2 * half) *
                 emulated_bfloat16(emulated_tile(right).bytes[pair] + 4 * column + 2 * half);
        }
        memcpy(emulated_tile(sums).bytes[row] + 4 * column, &sum, 4);
      }
    }
  }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_storeconfig emulated_storeconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
