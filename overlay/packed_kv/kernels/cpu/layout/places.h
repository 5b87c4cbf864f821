// Positions of bits in a micro-block and in a ring slot, as layout.py draws them. Role 0 is K or a latent; 1 is V.
#pragma once
#include "constants.h"

constexpr int VALUE = ROLES - 1;  // the role that is V: a latent is both
constexpr bool IS_LATENT = ROLES == 1;
constexpr int WIDTHS = sizeof CODES / sizeof CODES[0];
constexpr int ALL_CHANNELS = STORED_DIM + ROPE_DIM, ALL_GROUPS = ALL_CHANNELS / GROUP_SIZE;

// --- codes: token n of a micro-block, channel c of a group ---
struct InLane {
  int lane, code;
};
constexpr InLane in_lane(int role, int n, int c) {
  if (role == 0) return {(n & 7) * 4 + (c >> 1 & 3), (n >> 3) * 8 + (c >> 4) * 4 + (c >> 3 & 1) * 2 + (c & 1)};
  return {(c & 7) * 4 + (n >> 1 & 3), (c >> 4) * 8 + (c >> 3 & 1) * 4 + (n >> 3) * 2 + (n & 1)};
}

// Byte offset of a lane's word; word WORDS is the half word.
constexpr int word_at(int role, int word, int lane) {
  int at = WORDS_AT[role];
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    int width = CHUNK_WORDS[chunk];
    if (word < width) return at + 4 * (lane * width + word);
    word -= width, at += 4 * LANES * width;
  }
  return HALF_WORDS_AT[role] + 2 * lane;
}

enum Source { MAGNITUDES, SIGNS, SIGNS_OF_PAIR, SIGNS_OF_HALF };
constexpr Source signs_of(const Group& group) {
  if (!group.has_sign_words) return SIGNS;
  return group.sign_word == WORDS ? SIGNS_OF_HALF : SIGNS_OF_PAIR;
}
constexpr int bit_of(const Code& code, int e, Source source, int parity) {
  if (source == MAGNITUDES) return code.magnitude_shift[e];
  if (source == SIGNS) return code.sign_shift[e];
  if (source == SIGNS_OF_PAIR) return SIGN_WORD_SHIFT[e] + parity * SIGN_PARITY_SHIFT;
  return SIGN_HALF_SHIFT[e];
}

// --- scales and RoPE channels ---
// Byte of a scale among its lanes' scales: row g = n2 n1 n0 for K, t = n2 n1 for V.
constexpr int scale_at(int role, int group, int n, int groups = GROUPS) {
  if (role == 0) return (n & 7) * 2 * groups + 2 * group + (n >> 3);
  return (n >> 1 & 3) * 4 * groups + 4 * group + 2 * (n >> 3) + (n & 1);
}
constexpr int rope_at(int channel, int n) {
  constexpr int in_word = 32 / ROPE_BITS, words = CODES_PER_LANE / in_word;  // codes of a word, words of a group
  InLane in = in_lane(0, n, channel % GROUP_SIZE);
  int word = channel / GROUP_SIZE * words + in.code / in_word;
  return ROPE_AT + 4 * (word / 4 * 4 * LANES + in.lane * 4 + word % 4) + in.code % in_word * (ROPE_BITS / 8);
}
constexpr int rope_scale_at(int group, int n) { return ROPE_SCALES_AT + scale_at(0, group, n, ROPE_DIM / GROUP_SIZE); }

// --- the ring: channel of byte i of a group ---
struct RingOrder {
  unsigned char channel[2][GROUP_SIZE];
  constexpr RingOrder() : channel{} {
    for (int i = 0; i < GROUP_SIZE; i++) {
      channel[0][i] = (i >> 2 & 1) * 16 + (i >> 1 & 1) * 8 + (i >> 3) * 2 + (i & 1);
      channel[1][i] = (i >> 1 & 1) * 16 + (i & 1) * 8 + (i >> 2);
    }
  }
};
constexpr RingOrder RING_ORDER;
constexpr int ring_channel(int role, int i) { return RING_ORDER.channel[role][i]; }
