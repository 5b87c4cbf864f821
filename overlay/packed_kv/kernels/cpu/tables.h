// What the store and the gather are told of a layer: filled in by tables.py, whose ctypes structures these are.
#pragma once
#include <stdint.h>

enum { MOST_CHANNELS = 512, MOST_GROUPS = MOST_CHANNELS / 32, MOST_SLOTS = 16, MOST_ROPE = 128 };
enum Rotation { HADAMARD, GIVENS, QUATERNION };
#define EXPORT extern "C" __attribute__((visibility("default")))

// One part of the codes of a group, magnitudes or signs: its bits in the words of a micro-block, by channel of the
// group and token. Channels share a slot if, token by token, their bits lie in the same words.
struct Part {
  int32_t from;                   // lowest bit of the part in a code
  int32_t mask;                   // the part's bits, shifted down by `from`
  int32_t slots;
  uint8_t slot[32];               // by channel
  uint8_t shift[32][16];          // by channel and token: where the part begins in its word
  uint32_t bits[MOST_SLOTS][16];  // by slot and token: all of them in the word
  int32_t joins_halves;           // tokens n and n + 8 have the same words
  int32_t joins_pairs;            // tokens 2 n and 2 n + 1 have the same words
  uint32_t whole[MOST_SLOTS][16]; // by slot and first of the tokens that share a word: the bits of them all
};
struct Plane {
  const Part* part;
  int32_t is_half;                // words have 16 bits, else 32
  uint16_t at[MOST_SLOTS][16];    // by slot and token: byte offset of the word in a micro-block
};

// Arrays of two are of K and of V. Latents are K alone, with the RoPE channels of their tokens beside them.
struct Layer {
  int32_t roles;                  // 2: K and V; 1: latents
  int32_t channels, groups;       // of a vector, as stored
  int32_t sections, section[2];   // channels that are rotated together
  int32_t rotation;
  const float* constants;         // of the rotation, [channels]
  int32_t dim[2];                 // channels of a head; zeros follow
  int32_t bits[MOST_GROUPS];
  float gain[2][MOST_GROUPS];     // what values that are read are multiplied by
  const int32_t* order[2];        // channels in packing order, [heads or 1][channels]; null: as they come
  int32_t order_heads[2];
  const float* table[2];          // mean, its partner, first mean, scale, [heads or 1][4][channels], in packing order
  int32_t table_heads[2];
  int32_t centres[2], scales[2];  // whether vectors have a mean taken off, and are multiplied by a scale
  const float* spectrum[2];       // factors of mean and partner, [blocks][2][channels], in the model's order
  int32_t blocks[2], block_tokens[2];
  int32_t micro_block_bytes;
  uint16_t scale_at[2][MOST_GROUPS][16];  // byte offset in a micro-block, by group and token
  Plane plane[2][MOST_GROUPS][2];         // magnitudes and signs
  int32_t ring_codes[2], ring_scales[2];  // byte offsets in a ring slot
  uint8_t ring_byte[2][32];               // of a channel, among those of its group
  int32_t rope, rope_bits;                // channels beside a latent, 0 beside K and V; 16 or 8
  uint16_t rope_at[MOST_ROPE][16];        // byte offset in a micro-block, by channel and token
  uint16_t rope_scale_at[MOST_ROPE / 32][16];  // of their scales, where they have 8 bits

  int all_channels() const { return channels + rope; }
  int all_groups() const { return groups + rope / 32; }
};

// Pages, or a ring: [blocks, KV heads, block_size, slot_bytes]; strides in bytes.
struct Cache {
  uint8_t* data;
  int64_t block_stride, head_stride;
  int32_t block_size, slot_bytes;

  uint8_t* micro_block(int64_t number, int head, int bytes) const {
    int64_t a_block = block_size / 16;
    return data + number / a_block * block_stride + head * head_stride + number % a_block * bytes;
  }
  uint8_t* slot(int64_t number, int head) const {
    return data + number / block_size * block_stride + head * head_stride + number % block_size * slot_bytes;
  }
};
