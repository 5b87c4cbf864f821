// The words of a micro-block that hold the codes of a group.
#pragma once
#include "places.h"
#include <stdint.h>

constexpr int MOST_SLOTS = 16;

// One part of the codes of a group, magnitudes or signs: its bits in the words of a micro-block, by channel of the
// group and token. Channels share a slot if, token by token, their bits lie in the same words.
struct Part {
  int from, mask, slots;                   // lowest bit of the part in a code; mask of its bits, shifted down by that
  bool joins_halves, joins_pairs;          // tokens n and n + 8, or 2 n and 2 n + 1, have the same words
  uint8_t slot[GROUP_SIZE];                // by channel
  uint8_t shift[GROUP_SIZE][MICRO_BLOCK];  // by channel and token: bit at which the part begins in its word
  uint32_t bits[MOST_SLOTS][MICRO_BLOCK];  // by slot and token: mask of all its bits in the word
  uint32_t whole[MOST_SLOTS][MICRO_BLOCK]; // by slot and first of the tokens that share a word: mask of all their bits

  // `words`: words of a lane that the part of a group takes.
  void fill(int role, const Code& code, Source source, int parity, int words) {
    from = source == MAGNITUDES ? 0 : code.bits - 1, mask = source == MAGNITUDES ? (1 << (code.bits - 1)) - 1 : 1;
    slots = role ? 8 * words : 4;
    joins_halves = role || words == 1, joins_pairs = role;
    for (int c = 0; c < GROUP_SIZE; c++) {
      slot[c] = role ? (c & 7) + (words == 2 ? c >> 4 << 3 : 0) : c >> 1 & 3;
      for (int n = 0; n < MICRO_BLOCK; n++) {
        shift[c][n] = bit_of(code, in_lane(role, n, c).code, source, parity);
        uint32_t in_word = (uint32_t)mask << shift[c][n];
        bits[slot[c]][n] |= in_word, whole[slot[c]][n & ~(8 * joins_halves | 1 * joins_pairs)] |= in_word;
      }
    }
  }
};
struct Plane {
  const Part* part;
  bool is_half;                          // words have 16 bits, else 32
  uint16_t at[MOST_SLOTS][MICRO_BLOCK];  // by slot and token: byte offset of the word in a micro-block
};

struct Words {  // filled in when the library is loaded
  Part parts[ROLES][WIDTHS][SIGNS_OF_HALF + 1][2];
  Plane planes[ROLES][GROUPS][2];  // magnitudes and signs

  Words() : parts{} {
    for (int role = 0; role < ROLES; role++)
      for (int g = 0; g < GROUPS; g++)
        for (int signs = 0; signs < 2; signs++) fill(role, GROUP_TABLE[role][g], signs, planes[role][g][signs]);
  }
  void fill(int role, const Group& group, bool signs, Plane& plane) {
    const Code& code = CODES[group.code];
    bool apart = signs && group.has_sign_words;
    Source source = signs ? signs_of(group) : MAGNITUDES;
    int parity = source == SIGNS_OF_PAIR ? group.parity : 0, words = apart ? 1 : code.words;
    Part& part = parts[role][group.code][source][parity];
    if (!part.slots) part.fill(role, code, source, parity, words);
    plane.part = &part, plane.is_half = source == SIGNS_OF_HALF;
    for (int c = 0; c < GROUP_SIZE; c++)
      for (int n = 0; n < MICRO_BLOCK; n++) {
        InLane in = in_lane(role, n, c);
        int word = apart ? group.sign_word : group.word + in.code * words / CODES_PER_LANE;
        plane.at[part.slot[c]][n] = word_at(role, word, in.lane);
      }
  }
};
static const Words WORD_PLACES;
