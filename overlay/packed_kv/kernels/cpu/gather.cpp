// A request's tokens, out of its pages and its ring, in the model's dtype, rounded once. K and V as the model made
// them, rotated back: equal to `PagedCodec.read`, `codecs/ring.py` and `Codec.restore`. Latents with their RoPE
// channels as they are stored, as queries and weights meet them: equal to `LatentCodec.read`.
//
// 16 tokens of a head are worked on side by side (columns.h).
#include "restore.h"
#include "threads.h"

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
static void unpack(const uint8_t* from, const Plane* planes, uint32_t (*codes)[COLUMNS]) {
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
template <class C> static void decode(const uint32_t (*codes)[COLUMNS], const uint8_t* bytes, float gain, Row* x) {
  const SignedLevels<C> levels;
  Levels level(levels.at);
  for (int lane = 0; lane < 16; lane += VECTOR_FLOATS) {
    Floats scale = scale_of(load_bytes(bytes + lane)) * broadcast(gain);
    for (int c = 0; c < 32; c++) store_floats(x[c] + lane, level(load(codes[c] + lane)) * scale);
  }
}

struct MicroBlock {
  const Gather& call;
  const Layer& layer;
  alignas(64) Row x[VECTOR_CHANNELS];
  alignas(64) Vector vectors[COLUMNS], mean, plain;
  alignas(64) uint32_t codes[32][COLUMNS];

  void run(int token, int head) {
    const int count = call.end - token < 16 ? call.end - token : 16;
    const int block_size = call.pages.block_size;
    const int64_t slot = (int64_t)call.block_table[token / block_size] * block_size + token % block_size;
    const uint8_t* from = call.pages.micro_block(slot / 16, head, layer.micro_block_bytes);
    for (int role = 0; role < layer.roles; role++) {
      for (int g = 0; g < layer.groups; g++) {
        uint8_t bytes[16];  // 0 of tokens that are not there: theirs may be any
        for (int n = 0; n < 16; n++) bytes[n] = n < count ? from[layer.scale_at[role][g][n]] : 0;
        unpack(from, layer.plane[role][g], codes);
        float gain = layer.gain[role][g];
        if (layer.bits[g] == 4) decode<Code<4>>(codes, bytes, gain, x + 32 * g);
        if (layer.bits[g] == 3) decode<Code<3>>(codes, bytes, gain, x + 32 * g);
        if (layer.bits[g] == 2) decode<Code<2>>(codes, bytes, gain, x + 32 * g);
      }
      for (int n = 0; n < count; n++)
        if (call.ring.data && token + n >= call.ring_from) from_ring(token + n, head, role, n);
      if (layer.rope) {
        write_latents(from, token, count);
        continue;
      }
      rotate(layer, x, whole(count), true);
      to_vectors(x, vectors[0], VECTOR_CHANNELS, layer.channels, whole(count));
      for (int n = 0; n < count; n++) restore(vectors[n], role, head, token + n);
    }
  }

  void write_latents(const uint8_t* from, int token, int count) {
    bool in_place = call.dtype == FLOAT32 && count == 16;  // a whole micro-block needs no copy
    float* to = in_place ? (float*)call.vectors[0] + (token - call.first) * call.token_stride[0] : vectors[0];
    const long stride = in_place ? call.token_stride[0] : VECTOR_CHANNELS;
    to_vectors(x, to, stride, layer.channels, whole(count));
    for (int n = 0; n < count; n++) {
      float* rope = to + n * stride + layer.channels;
      read_rope(from, n, rope);
      if (!in_place) write_elements(place(0, 0, token + n), vectors[n], call.dtype, layer.all_channels());
    }
  }
  void read_rope(const uint8_t* from, int n, float* to) {
    for (int g = 0; g < layer.rope / 32; g++) {
      float step = layer.rope_bits == 8 ? step_of(from[layer.rope_scale_at[g][n]]) : 0;
      for (int c = 32 * g; c < 32 * g + 32; c++) {
        const uint8_t* at = from + layer.rope_at[c][n];
        uint16_t half = 0;
        memcpy(&half, at, layer.rope_bits / 8);
        to[c] = layer.rope_bits == 8 ? (float)(*at - 128) * step : float16_to_float(half);
      }
    }
  }
  static float step_of(uint8_t scale) {
    float step[VECTOR_FLOATS];
    store_floats(step, scale_of(broadcast_32(scale)) * broadcast(RING_UNIT));
    return step[0];
  }

  void from_ring(int token, int head, int role, int n) {
    const int block_size = call.ring.block_size;
    const int64_t slot = (int64_t)call.ring_table[token / block_size] * block_size + token % block_size;
    const uint8_t* from = call.ring.slot(slot, head);
    for (int g = 0; g < layer.groups; g++) {
      float step = step_of(from[layer.ring_scales[role] + g]);
      const uint8_t* of_group = from + layer.ring_codes[role] + 32 * g;
      for (int c = 0; c < 32; c++) x[32 * g + c][n] = (float)(of_group[layer.ring_byte[role][c]] - 128) * step;
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

struct Tasks {
  const Gather& call;
  int jobs, next;

  static void body(void* self) {
    Tasks& tasks = *(Tasks*)self;
    const Gather& call = tasks.call;
    MicroBlock micro_block{call, *call.layer};
    for (int i; (i = next_of(&tasks.next)) < tasks.jobs;)
      micro_block.run(call.first + i / call.kv_heads * 16, i % call.kv_heads);
  }
};

EXPORT long pk_gather_bytes() { return sizeof(Layer) + sizeof(Gather); }

EXPORT void pk_gather(const Gather* call) {
  Tasks tasks{*call, (call->end - call->first + 15) / 16 * call->kv_heads, 0};
  run_on_threads(Tasks::body, &tasks, tasks.jobs < call->threads ? tasks.jobs : call->threads);
}
