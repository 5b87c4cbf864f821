// Vectors packed one by one, as `Codec.encode` packs them: the codes of each run of groups of one width as a stream of
// bits, then the scales; and the newest tokens at 8 bits, as a ring has them. Bytes equal the reference's, and numbers
// read back equal the reference's rounded once. For a cache outside of vLLM (`transformers.py`).
//
// 16 vectors are worked on side by side (vectors16.h). 32 codes of b bits are b whole words, so the compiler knows the
// operations for each channel of a group.
#include "../base/threads.h"
#include "../layout/quantize.h"
#include "../layout/restore.h"

// A tensor [sequences, KV heads, tokens, any]; strides in numbers.
struct Tensor {
  uint8_t* data;
  int64_t stride[3];
};
struct Vectors {
  const Layer* layer;
  Tensor vectors, packed;   // of a type; of bytes
  Tensor codes, scales;     // the newest tokens at 8 bits, int8 and bytes
  const int64_t* positions; // [sequences, tokens]
  int64_t positions_stride; // of sequences
  int32_t sequences, heads, tokens, recent;  // the last `recent` tokens are in `codes` and `scales`
  int32_t role, reads, dtype, threads;
};

constexpr int bits_before(int role, int group) {
  int bits = 0;
  for (int g = 0; g < group; g++) bits += CODES[GROUP_TABLE[role][g].code].bits;
  return bits;
}
constexpr int CODE_WORDS = bits_before(0, GROUPS);
static_assert(CODE_WORDS == bits_before(1, GROUPS), "K and V have as many bytes");

struct Place {
  int sequence, head, token;
};

struct Worker {
  const Vectors& call;
  const Layer& layer;
  alignas(64) Row x[ALL_CHANNELS];
  alignas(64) Vector vectors[WIDE], given, mean;
  alignas(64) uint8_t codes[ALL_CHANNELS][WIDE], scales[GROUPS][WIDE];
  alignas(64) uint32_t words[CODE_WORDS][WIDE];

  Place place(int64_t number) const {
    int64_t row = number / call.tokens;
    return {(int)(row / call.heads), (int)(row % call.heads), (int)(number % call.tokens)};
  }
  uint8_t* at(const Tensor& tensor, Place p, int bytes, int from = 0) const {
    return tensor.data + bytes * (p.sequence * tensor.stride[0] + p.head * tensor.stride[1] +
                                  (p.token - from) * tensor.stride[2]);
  }
  int64_t position(Place p) const { return call.positions[p.sequence * call.positions_stride + p.token]; }
  int older() const { return call.tokens - call.recent; }

  // Words of a group from the codes of 32 channels, and back.
  template <int BITS> void join(const uint8_t (*from)[WIDE], uint32_t (*to)[WIDE], int lane) {
    Bytes word[BITS];
    for (int w = 0; w < BITS; w++) word[w] = zero();
#pragma GCC unroll 32
    for (int c = 0; c < 32; c++) {
      Bytes code = load_bytes(from[c] + lane);
      const int w = c * BITS / 32, shift = c * BITS % 32;
      word[w] = bit_or(word[w], shift_left(code, broadcast_32(shift)));
      if (shift + BITS > 32) word[w + 1] = bit_or(word[w + 1], shift_right(code, broadcast_32(32 - shift)));
    }
    for (int w = 0; w < BITS; w++) store(to[w] + lane, word[w]);
  }
  template <int C> void read_group(const uint32_t (*from)[WIDE], const uint8_t* bytes, float gain, Row* to,
                                      int lane) {
    constexpr int BITS = CODES[C].bits;
    const SignedLevels<C> level;
    Floats scale = scale_of(load_bytes(bytes + lane)) * broadcast(gain);
    Bytes mask = broadcast_32((1 << BITS) - 1);
#pragma GCC unroll 32
    for (int c = 0; c < 32; c++) {
      const int w = c * BITS / 32, shift = c * BITS % 32;
      Bytes code = shift_right(load(from[w] + lane), broadcast_32(shift));
      if (shift + BITS > 32) code = bit_or(code, shift_left(load(from[w + 1] + lane), broadcast_32(32 - shift)));
      store_floats(to[c] + lane, level(bit_and(code, mask)) * scale);
    }
  }

  void encode(int64_t first, int count) {
    const int all = whole(count);
    Place places[WIDE];
    bool any_recent = false;
    for (int n = 0; n < count; n++) {
      Place p = places[n] = place(first + n);
      any_recent |= p.token >= older();
      const void* from = at(call.vectors, p, element_bytes(call.dtype));
      prepare_vector(layer, call.role, p.head, position(p), from, call.dtype, vectors[n], given, mean);
    }
    memset(vectors[count], 0, sizeof(Vector) * (all - count));
    to_rows(vectors, x, STORED_DIM, all);
    rotate(x, call.role, layer.rotation, all, false);
    for (int lane = 0; lane < all; lane += VECTOR_FLOATS)
      for (int g = 0; g < GROUPS; g++)
        unrolled<WIDTHS>([&](auto code) {
          if (GROUP_TABLE[call.role][g].code != code) return;
          quantize<code.value>(x + 32 * g, lane, codes + 32 * g, scales[g]);
          join<CODES[code.value].bits>(codes + 32 * g, words + bits_before(call.role, g), lane);
        });
    for (int n = 0; n < count; n++) {
      uint8_t* to = at(call.packed, places[n], 1);
      for (int w = 0; w < CODE_WORDS; w++) memcpy(to + 4 * w, &words[w][n], 4);
      for (int g = 0; g < GROUPS; g++) to[4 * CODE_WORDS + g] = scales[g][n];
    }
    if (!any_recent) return;
    for (int lane = 0; lane < all; lane += VECTOR_FLOATS)
      for (int g = 0; g < GROUPS; g++) quantize_for_ring(x + 32 * g, lane, codes + 32 * g, scales[g]);
    for (int n = 0; n < count; n++) {
      if (places[n].token < older()) continue;
      uint8_t *to = at(call.codes, places[n], 1, older()), *to_scales = at(call.scales, places[n], 1, older());
      for (int c = 0; c < STORED_DIM; c++) to[c] = codes[c][n] - 128;
      for (int g = 0; g < GROUPS; g++) to_scales[g] = scales[g][n];
    }
  }

  void decode(int64_t first, int count) {
    const int all = whole(count);
    Place places[WIDE];
    for (int n = 0; n < count; n++) {
      places[n] = place(first + n);
      const uint8_t* from = at(call.packed, places[n], 1);
      for (int w = 0; w < CODE_WORDS; w++) memcpy(&words[w][n], from + 4 * w, 4);
      for (int g = 0; g < GROUPS; g++) scales[g][n] = from[4 * CODE_WORDS + g];
    }
    for (int n = count; n < all; n++)
      for (int g = 0; g < GROUPS; g++) scales[g][n] = 0;
    for (int lane = 0; lane < all; lane += VECTOR_FLOATS)
      for (int g = 0; g < GROUPS; g++)
        unrolled<WIDTHS>([&](auto code) {
          if (GROUP_TABLE[call.role][g].code == code)
            read_group<code.value>(words + bits_before(call.role, g), scales[g], gain_of(call.role, g), x + 32 * g,
                                   lane);
        });
    for (int n = 0; n < count; n++)
      if (places[n].token >= older()) read_recent(places[n], n);
    rotate(x, call.role, layer.rotation, all, true);
    to_vectors(x, vectors[0], ALL_CHANNELS, STORED_DIM, all);
    for (int n = 0; n < count; n++) {
      Place p = places[n];
      void* to = at(call.vectors, p, element_bytes(call.dtype));
      restore_vector(layer, call.role, p.head, position(p), vectors[n], to, call.dtype, given, mean);
    }
  }

  void read_recent(Place p, int n) {
    const int8_t* from = (const int8_t*)at(call.codes, p, 1, older());
    const uint8_t* from_scales = at(call.scales, p, 1, older());
    for (int g = 0; g < GROUPS; g++) {
      float step = ring_step(from_scales[g]);
      for (int c = 32 * g; c < 32 * g + 32; c++) x[c][n] = (float)from[c] * step;
    }
  }
};

EXPORT long pk_vectors_bytes() { return sizeof(Layer) + sizeof(Vectors); }

EXPORT void pk_vectors(const Vectors* call) {
  const int64_t all = (int64_t)call->sequences * call->heads * call->tokens;
  hand_out((int)((all + WIDE - 1) / WIDE), call->threads, [&](auto next) {
    Worker worker{*call, *call->layer};
    for (int i; (i = next()) >= 0;) {
      int64_t first = (int64_t)i * WIDE, rest = all - first;
      int count = rest < WIDE ? (int)rest : WIDE;
      if (call->reads) worker.decode(first, count);
      else worker.encode(first, count);
    }
  });
}
