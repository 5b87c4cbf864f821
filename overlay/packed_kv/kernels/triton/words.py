"""Writes the store kernel's codes into the words of a page, beside the codes of other tokens.

A word holds codes of several tokens, which other programs may be writing: a program compares its own bits with the old
word, and flips the bits that differ with one atomic. Words of 4-bit K belong to one token and are stored plainly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import SIGN_HALF_SHIFT, SIGN_PARITY_SHIFT, SIGN_WORD_SHIFT

# Tables of another module. Triton hashes constexprs into the names of compiled kernels, other globals it does not.
_SIGN_WORD_SHIFT = tl.constexpr(SIGN_WORD_SHIFT)
_SIGN_HALF_SHIFT = tl.constexpr(SIGN_HALF_SHIFT)
_SIGN_PARITY_SHIFT = tl.constexpr(SIGN_PARITY_SHIFT)


# A register k = d4 d3 d0 holds, for token 0 of a micro-block, code e = k of K or e = d4 d3 00 of V; n3 adds 8 or 2.


@triton.constexpr_function
def _codes(is_key):
    """Index of each register's code in its lane, for token 0 of a micro-block."""
    return tuple(k if is_key else k >> 1 << 2 for k in range(8))


@triton.constexpr_function
def _words(codes, words):
    """Words of a group's `words` that have codes of token 0."""
    return tuple(sorted({e * words // 16 for e in codes}))


@triton.constexpr_function
def _registers(is_key, codes, words, d0, word):
    """Registers whose codes share a word of a group's `words`; for V, registers with one d0."""
    return tuple(k for k in range(8) if (is_key or k & 1 == d0) and codes[k] * words // 16 == word)


@triton.constexpr_function
def _own_bits(positions, codes, registers, field):
    """Bits of the registers' codes, for token 0 of a micro-block; `field` are the bits of one code."""
    return sum(field << positions[codes[k]] for k in registers)


@triton.jit
def store_codes(
    codes, n, group, lane, stored, magnitudes, signs, IS_KEY: tl.constexpr, SECTION: tl.constexpr, VECTOR: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the codes of token n of each row's micro-block, whose words begin at `codes`; LANES have words there.

    codes: pointers to bytes [lanes]; n, group (of the section), lane (d2 d1): int32 [lanes]; stored: bool [lanes];
    magnitudes, signs: tuples of 8 uint32 [lanes], by register; SECTION: of VECTOR, a `PackedVector`.
    """
    CODE: tl.constexpr = SECTION.code
    WORDS: tl.constexpr = CODE.code_words
    CODES: tl.constexpr = _codes(IS_KEY)
    NUMBERS: tl.constexpr = _words(CODES, WORDS)
    WORDS_OF_N3: tl.constexpr = (8 if IS_KEY else 2) * WORDS // 16
    for d0 in tl.static_range(1 if IS_KEY else 2):
        if IS_KEY:
            word_lane = n % 8 * 4 + lane
        else:
            word_lane = (2 * lane + d0) * 4 + n % 8 // 2
        for i in tl.static_range(len(NUMBERS)):
            word = SECTION.word + group * WORDS + NUMBERS[i]
            if WORDS_OF_N3 > 0:
                word += n // 8 * WORDS_OF_N3
            _store_word(
                codes, n, word, word_lane, stored, magnitudes, signs,
                IS_KEY, CODE, _registers(IS_KEY, CODES, WORDS, d0, NUMBERS[i]), VECTOR.words, LANES,
            )  # fmt: skip
        if len(CODE.sign_shift) == 0:
            _store_sign_word(
                codes, n, SECTION.signed_groups + group, word_lane, stored, signs,
                IS_KEY, _registers(IS_KEY, CODES, 1, d0, 0), VECTOR, LANES,
            )  # fmt: skip


@triton.jit
def _store_word(
    codes, n, word, word_lane, stored, magnitudes, signs,
    IS_KEY: tl.constexpr, CODE: tl.constexpr, REGISTERS: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    MAGNITUDE_SHIFT: tl.constexpr = CODE.magnitude_shift
    SIGN_SHIFT: tl.constexpr = CODE.sign_shift
    new, own = _collect(magnitudes, n, MAGNITUDE_SHIFT, IS_KEY, REGISTERS, (1 << (CODE.bits - 1)) - 1)
    if len(SIGN_SHIFT) > 0:
        new_signs, own_signs = _collect(signs, n, SIGN_SHIFT, IS_KEY, REGISTERS, 1)
        new, own = new | new_signs, own | own_signs
    if IS_KEY and CODE.code_words > 1:  # n3 selects the word, which belongs to this token alone
        pointer = codes + 4 * word_index(word, word_lane, WORDS, LANES)
        tl.store(pointer.to(tl.pointer_type(tl.uint32)), new, mask=stored)
    else:
        _flip(codes, word_index(word, word_lane, WORDS, LANES), new, own, stored)


@triton.jit
def _store_sign_word(
    codes, n, number, word_lane, stored, signs, IS_KEY: tl.constexpr, REGISTERS: tl.constexpr, VECTOR: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the signs of group `number`, counted among groups with sign words. Groups 2i and 2i + 1 share a word; an
    odd last group has a half word."""
    WORDS: tl.constexpr = VECTOR.words
    SIGN_WORDS: tl.constexpr = VECTOR.sign_words
    new, own = _collect(signs, n, _SIGN_WORD_SHIFT, IS_KEY, REGISTERS, 1)
    shift = (number % 2 * -_SIGN_PARITY_SHIFT).to(tl.uint32)
    new, own = new >> shift, own >> shift
    index = word_index(WORDS - SIGN_WORDS + number // 2, word_lane, WORDS, LANES)
    if VECTOR.has_half:
        last = number == 2 * SIGN_WORDS
        half, own_half = _collect(signs, n, _SIGN_HALF_SHIFT, IS_KEY, REGISTERS, 1)
        shift = (word_lane % 2 * 16).to(tl.uint32)
        new, own = tl.where(last, half << shift, new), tl.where(last, own_half << shift, own)
        index = tl.where(last, WORDS * LANES + word_lane // 2, index)
    _flip(codes, index, new, own, stored)


@triton.jit
def _collect(values, n, POSITIONS: tl.constexpr, IS_KEY: tl.constexpr, REGISTERS: tl.constexpr, FIELD: tl.constexpr):
    """The registers' values and the bits that they own in their word, uint32, for token n of the micro-block."""
    CODES: tl.constexpr = _codes(IS_KEY)
    new = values[REGISTERS[0]] << POSITIONS[CODES[REGISTERS[0]]]
    for i in tl.static_range(1, len(REGISTERS)):
        new |= values[REGISTERS[i]] << POSITIONS[CODES[REGISTERS[i]]]
    own = tl.full(n.shape, _own_bits(POSITIONS, CODES, REGISTERS, FIELD), tl.uint32)
    # Positions are linear in the bits of a code's index; the token adds n3 (K) or n3 n0 (V) to it.
    n3, n0 = (n // 8).to(tl.uint32), (n % 2).to(tl.uint32)
    if IS_KEY:
        new, own = _shift(new, n3, POSITIONS[8] - POSITIONS[0]), _shift(own, n3, POSITIONS[8] - POSITIONS[0])
    else:
        new, own = _shift(new, n3, POSITIONS[2] - POSITIONS[0]), _shift(own, n3, POSITIONS[2] - POSITIONS[0])
        new, own = _shift(new, n0, POSITIONS[1] - POSITIONS[0]), _shift(own, n0, POSITIONS[1] - POSITIONS[0])
    return new, own


@triton.jit
def _shift(word, bit, BY: tl.constexpr):
    """Shift left by BY (right if negative) where `bit` is 1."""
    if BY >= 0:
        return word << bit * BY
    else:
        return word >> bit * -BY


@triton.jit
def word_index(word, lane, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Offset in words of a lane's word among the codes of a micro-block or, with 4 LANES, of a row: chunks of 4, then
    2, then 1 (layout.py)."""
    FOURS: tl.constexpr = WORDS // 4 * 4
    index = word // 4 * (4 * LANES) + lane * 4 + word % 4
    if WORDS % 4 >= 2:
        index = tl.where(word >= FOURS, FOURS * LANES + lane * 2 + (word - FOURS), index)
    if WORDS % 2 == 1:
        index = tl.where(word == WORDS - 1, (WORDS - 1) * LANES + lane, index)
    return index


@triton.jit
def _flip(codes, index, new, own, stored):
    """Set a program's bits in words that other programs write at the same time."""
    pointer = (codes + 4 * index).to(tl.pointer_type(tl.uint32))
    old = tl.load(pointer, mask=stored, other=0)
    tl.atomic_xor(pointer, (old ^ new) & own, mask=stored, sem="relaxed")
