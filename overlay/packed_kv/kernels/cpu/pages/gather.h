// A request's tokens, out of its pages and its ring, in the model's dtype, rounded once. K and V as the model made
// them, rotated back: equal to `PagedCodec.read`, `codecs/ring.py` and `Codec.restore`. Latents and RoPE channels stay
// as stored, in the basis of folded queries and weights: equal to `LatentCodec.read`.
//
// 16 tokens of a head are worked on side by side (vectors16.h).
#pragma once
#include "../base/threads.h"
#include "../layout/restore.h"
#include "../layout/words.h"

struct Gather {
  const Layer* layer;
  Cache pages, ring;          // ring without data: it is not read
  const int32_t *block_table, *ring_table;  // of the request; entry i has tokens i * block_size and on
  void* vectors[2];           // K and V, or latents with RoPE channels, of token `first` and on, filled
  int64_t token_stride[2], head_stride[2];  // in numbers
  int32_t first, end;         // tokens; `first` is a multiple of 16
  int32_t ring_from;          // the token from which on they are read from the ring
  int32_t kv_heads, dtype, threads;
};

// Codes [32][16 tokens] of a group.
static void unpack(const uint8_t* from, const Plane* planes, uint32_t (*codes)[WIDE]) {
  for (int p = 0; p < 2; p++) {
    const Plane& plane = planes[p];
    const Part& part = *plane.part;
    alignas(64) uint32_t words[MOST_SLOTS][16] = {};
    for (int s = 0; s < part.slots; s++)
      for (int n = 0; n < 16; n++) memcpy(&words[s][n], from + plane.at[s][n], plane.is_half ? 2 : 4);
    Bytes mask = broadcast_32(part.mask), up = broadcast_32(part.from);
    for (int c = 0; c < 32; c++)
      for (int lane = 0; lane < 16; lane += VECTOR_FLOATS) {
        Bytes bits = shift_right(load(words[part.slot[c]] + lane), load_bytes(part.shift[c] + lane));
        bits = shift_left(bit_and(bits, mask), up);
        store(codes[c] + lane, p ? bit_or(bits, load(codes[c] + lane)) : bits);
      }
  }
}
template <int C> static void decode_group(const uint32_t (*codes)[WIDE], const uint8_t* bytes, float gain, Row* x) {
  const SignedLevels<C> level;
  for (int lane = 0; lane < 16; lane += VECTOR_FLOATS) {
    Floats scale = scale_of(load_bytes(bytes + lane)) * broadcast(gain);
    for (int c = 0; c < 32; c++) store_floats(x[c] + lane, level(load(codes[c] + lane)) * scale);
  }
}

struct MicroBlock {
  const Gather& call;
  const Layer& layer;
  alignas(64) Row x[ALL_CHANNELS];
  alignas(64) Vector vectors[WIDE], mean, plain;
  alignas(64) uint32_t codes[32][WIDE];

  void run(int token, int head) {
    const int count = call.end - token < 16 ? call.end - token : 16;
    const int block_size = call.pages.block_size;
    const int64_t slot = (int64_t)call.block_table[token / block_size] * block_size + token % block_size;
    const uint8_t* from = call.pages.micro_block(slot / 16, head);
    for (int role = 0; role < ROLES; role++) {
      for (int g = 0; g < GROUPS; g++) {
        uint8_t bytes[16];  // 0 for missing tokens, whose bytes may be anything
        for (int n = 0; n < 16; n++) bytes[n] = n < count ? from[SCALES_AT[role] + scale_at(role, g, n)] : 0;
        unpack(from, WORD_PLACES.planes[role][g], codes);
        unrolled<WIDTHS>([&](auto code) {
          if (GROUP_TABLE[role][g].code == code) decode_group<code.value>(codes, bytes, gain_of(role, g), x + 32 * g);
        });
      }
      for (int n = 0; n < count; n++)
        if (call.ring.data && token + n >= call.ring_from) from_ring(token + n, head, role, n);
      if constexpr (ROPE_DIM > 0) return write_latents(from, token, count);
      rotate(x, role, layer.rotation, whole(count), true);
      to_vectors(x, vectors[0], ALL_CHANNELS, STORED_DIM, whole(count));
      for (int n = 0; n < count; n++) restore(vectors[n], role, head, token + n);
    }
  }

  void write_latents(const uint8_t* from, int token, int count) {
    bool in_place = call.dtype == FLOAT32 && count == 16;  // a whole micro-block needs no copy
    float* to = in_place ? (float*)call.vectors[0] + (token - call.first) * call.token_stride[0] : vectors[0];
    const long stride = in_place ? call.token_stride[0] : ALL_CHANNELS;
    to_vectors(x, to, stride, STORED_DIM, whole(count));
    for (int n = 0; n < count; n++) {
      read_rope(from, n, to + n * stride + STORED_DIM);
      if (!in_place) write_elements(place(0, 0, token + n), vectors[n], call.dtype, ALL_CHANNELS);
    }
  }
  void read_rope(const uint8_t* from, int n, float* to) {
    for (int g = 0; g < ROPE_DIM / 32; g++) {
      float step = ROPE_BITS == 8 ? ring_step(from[rope_scale_at(g, n)]) : 0;
      for (int c = 32 * g; c < 32 * g + 32; c++) {
        const uint8_t* at = from + rope_at(c, n);
        uint16_t half = 0;
        memcpy(&half, at, ROPE_BITS / 8);
        to[c] = ROPE_BITS == 8 ? (float)(*at - 128) * step : float16_to_float(half);
      }
    }
  }

  void from_ring(int token, int head, int role, int n) {
    const int block_size = call.ring.block_size;
    const int64_t slot = (int64_t)call.ring_table[token / block_size] * block_size + token % block_size;
    const uint8_t* from = call.ring.slot(slot, head);
    for (int g = 0; g < GROUPS; g++) {
      float step = ring_step(from[RING_SCALES_AT[role] + g]);
      const uint8_t* of_group = from + RING_CODES_AT[role] + 32 * g;
      for (int i = 0; i < 32; i++) x[32 * g + ring_channel(role, i)][n] = (float)(of_group[i] - 128) * step;
    }
  }

  void restore(float* vector, int role, int head, int token) {
    restore_vector(layer, role, head, token, vector, place(role, head, token), call.dtype, plain, mean);
  }
  void* place(int role, int head, int token) {
    int64_t at = (token - call.first) * call.token_stride[role] + head * call.head_stride[role];
    return (uint8_t*)call.vectors[role] + at * element_bytes(call.dtype);
  }
};

EXPORT void pk_gather(const Gather* call) {
  hand_out((call->end - call->first + 15) / 16 * call->kv_heads, call->threads, [&](auto next) {
    MicroBlock micro_block{*call, *call->layer};
    for (int i; (i = next()) >= 0;) micro_block.run(call->first + i / call->kv_heads * 16, i % call->kv_heads);
  });
}
