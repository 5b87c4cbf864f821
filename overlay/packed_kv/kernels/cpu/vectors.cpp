// Vectors packed one by one, as `Codec.encode` packs them: the codes of each run of groups of one width as a stream of
// bits, then the scales; and the newest tokens at 8 bits, as a ring has them. The bytes equal the reference's, and the
// numbers that are read do, rounded once. For a cache outside of vLLM (`transformers.py`).
//
// 16 vectors are worked on side by side (columns.h). 32 codes of b bits are b whole words, so what is done to a channel
// of a group is known when this is compiled.
#include "quantize.h"
#include "restore.h"
#include "threads.h"

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
  int32_t role, dtype, threads;
};

constexpr int MOST_WORDS = VECTOR_CHANNELS / 8;

struct Place {
  int sequence, head, token;
};

struct Worker {
  const Vectors& call;
  const Layer& layer;
  alignas(64) Row x[VECTOR_CHANNELS];
  alignas(64) Vector vectors[COLUMNS], given, mean;
  alignas(64) uint8_t codes[VECTOR_CHANNELS][COLUMNS], scales[VECTOR_CHANNELS / 32][COLUMNS];
  alignas(64) uint32_t words[MOST_WORDS][COLUMNS];

  int words_of_codes() const {
    int count = 0;
    for (int g = 0; g < layer.groups; g++) count += layer.bits[g];
    return count;
  }
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
  template <int BITS> void join(const uint8_t (*from)[COLUMNS], uint32_t (*to)[COLUMNS], int lane) {
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
  template <int BITS> void read_group(const uint32_t (*from)[COLUMNS], const uint8_t* bytes, float gain, Row* to,
                                      int lane) {
    const SignedLevels<Code<BITS>> levels;
    Levels level(levels.at);
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
    const int all = whole(count), code_words = words_of_codes();
    Place places[COLUMNS];
    bool any_recent = false;
    for (int n = 0; n < count; n++) {
      Place p = places[n] = place(first + n);
      any_recent |= p.token >= older();
      const void* from = at(call.vectors, p, element_bytes(call.dtype));
      prepare_vector(layer, call.role, p.head, position(p), from, call.dtype, vectors[n], given, mean);
    }
    memset(vectors[count], 0, sizeof(Vector) * (all - count));
    to_columns(vectors, x, layer.channels, all);
    rotate(layer, x, all, false);
    for (int lane = 0; lane < all; lane += VECTOR_FLOATS)
      for (int g = 0, word = 0; g < layer.groups; word += layer.bits[g++]) {
        uint8_t(*of_group)[COLUMNS] = codes + 32 * g;
        if (layer.bits[g] == 4) quantize<Code<4>>(x + 32 * g, lane, of_group, scales[g]);
        if (layer.bits[g] == 3) quantize<Code<3>>(x + 32 * g, lane, of_group, scales[g]);
        if (layer.bits[g] == 2) quantize<Code<2>>(x + 32 * g, lane, of_group, scales[g]);
        if (layer.bits[g] == 4) join<4>(of_group, words + word, lane);
        if (layer.bits[g] == 3) join<3>(of_group, words + word, lane);
        if (layer.bits[g] == 2) join<2>(of_group, words + word, lane);
      }
    for (int n = 0; n < count; n++) {
      uint8_t* to = at(call.packed, places[n], 1);
      for (int w = 0; w < code_words; w++) memcpy(to + 4 * w, &words[w][n], 4);
      for (int g = 0; g < layer.groups; g++) to[4 * code_words + g] = scales[g][n];
    }
    if (!any_recent) return;
    for (int lane = 0; lane < all; lane += VECTOR_FLOATS)
      for (int g = 0; g < layer.groups; g++) quantize_for_ring(x + 32 * g, lane, codes + 32 * g, scales[g]);
    for (int n = 0; n < count; n++) {
      if (places[n].token < older()) continue;
      uint8_t *to = at(call.codes, places[n], 1, older()), *to_scales = at(call.scales, places[n], 1, older());
      for (int c = 0; c < layer.channels; c++) to[c] = codes[c][n] - 128;
      for (int g = 0; g < layer.groups; g++) to_scales[g] = scales[g][n];
    }
  }

  void decode(int64_t first, int count) {
    const int all = whole(count), code_words = words_of_codes();
    Place places[COLUMNS];
    for (int n = 0; n < count; n++) {
      places[n] = place(first + n);
      const uint8_t* from = at(call.packed, places[n], 1);
      for (int w = 0; w < code_words; w++) memcpy(&words[w][n], from + 4 * w, 4);
      for (int g = 0; g < layer.groups; g++) scales[g][n] = from[4 * code_words + g];
    }
    for (int n = count; n < all; n++)
      for (int g = 0; g < layer.groups; g++) scales[g][n] = 0;
    for (int lane = 0; lane < all; lane += VECTOR_FLOATS)
      for (int g = 0, word = 0; g < layer.groups; word += layer.bits[g++]) {
        float gain = layer.gain[call.role][g];
        if (layer.bits[g] == 4) read_group<4>(words + word, scales[g], gain, x + 32 * g, lane);
        if (layer.bits[g] == 3) read_group<3>(words + word, scales[g], gain, x + 32 * g, lane);
        if (layer.bits[g] == 2) read_group<2>(words + word, scales[g], gain, x + 32 * g, lane);
      }
    for (int n = 0; n < count; n++)
      if (places[n].token >= older()) read_recent(places[n], n);
    rotate(layer, x, all, true);
    to_vectors(x, vectors[0], VECTOR_CHANNELS, layer.channels, all);
    for (int n = 0; n < count; n++) {
      Place p = places[n];
      void* to = at(call.vectors, p, element_bytes(call.dtype));
      restore_vector(layer, call.role, p.head, position(p), vectors[n], to, call.dtype, given, mean);
    }
  }

  void read_recent(Place p, int n) {
    const int8_t* from = (const int8_t*)at(call.codes, p, 1, older());
    const uint8_t* from_scales = at(call.scales, p, 1, older());
    for (int g = 0; g < layer.groups; g++) {
      float step[VECTOR_FLOATS];
      store_floats(step, scale_of(broadcast_32(from_scales[g])) * broadcast(RING_UNIT));
      for (int c = 32 * g; c < 32 * g + 32; c++) x[c][n] = (float)from[c] * step[0];
    }
  }
};

struct Tasks {
  const Vectors& call;
  bool reads;
  int count, next;

  static void body(void* self) {
    Tasks& tasks = *(Tasks*)self;
    const Vectors& call = tasks.call;
    Worker worker{call, *call.layer};
    const int64_t all = (int64_t)call.sequences * call.heads * call.tokens;
    for (int i; (i = next_of(&tasks.next)) < tasks.count;) {
      int64_t first = (int64_t)i * COLUMNS, rest = all - first;
      int count = rest < COLUMNS ? (int)rest : COLUMNS;
      if (tasks.reads) worker.decode(first, count);
      else worker.encode(first, count);
    }
  }
};

EXPORT long pk_vectors_bytes() { return sizeof(Layer) + sizeof(Vectors); }

EXPORT void pk_vectors(const Vectors* call, int reads) {
  int64_t all = (int64_t)call->sequences * call->heads * call->tokens;
  Tasks tasks{*call, reads != 0, (int)((all + COLUMNS - 1) / COLUMNS), 0};
  run_on_threads(Tasks::body, &tasks, tasks.count < call->threads ? tasks.count : call->threads);
}
