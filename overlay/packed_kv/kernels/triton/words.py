"""Codes of the store kernel into the words of a page, beside the codes of other tokens.

A word holds codes of several tokens, which other programs may be writing: a program compares its own bits with the
old word and flips those that differ with one atomic. Words of 4-bit K belong to one token and are stored plainly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import layout
from .quantize import of

# Tables of other modules. Triton hashes constexprs into the names of compiled kernels, other globals it does not.
_GROUP_WORDS = tl.constexpr(layout.CODE_WORDS)
_MAGNITUDE_SHIFT = tl.constexpr(layout.MAGNITUDE_SHIFT)
_SIGN_SHIFT = tl.constexpr(layout.SIGN_SHIFT)
_SIGN_WORD_SHIFT = tl.constexpr(layout.SIGN_WORD_SHIFT[0])
_SIGN_HALF_SHIFT = tl.constexpr(layout.SIGN_HALF_SHIFT)
_BETWEEN_PARITIES = tl.constexpr(layout.SIGN_WORD_SHIFT[0][0] - layout.SIGN_WORD_SHIFT[1][0])


@triton.constexpr_function
def _positions(bits, what):
    """Bit position, by index of a code in its lane, of what is stored of it in a code word, sign word or half word."""
    if what == "sign word":
        return _SIGN_WORD_SHIFT.value
    if what == "half word":
        return _SIGN_HALF_SHIFT.value
    return _MAGNITUDE_SHIFT.value[bits] if what == "magnitude" else _SIGN_SHIFT.value[bits]


@triton.constexpr_function
def _registers(is_key, words, d0, part):
    """Registers k = d4 d3 d0 whose codes share a word: all for K; for V those of a d0 and, where a lane has 2 words of
    a group, of a d4."""
    return tuple(k for k in range(8) if is_key or (k & 1 == d0 and (words == 1 or k >> 2 == part)))


@triton.constexpr_function
def _position(positions, is_key, k):
    """Bit position of register k's code, for token 0 of a micro-block."""
    return positions[k if is_key else k >> 1 << 2]


@triton.constexpr_function
def _own_bits(positions, is_key, registers, field):
    """Bits of the registers' codes, for token 0 of a micro-block; `field` are the bits of one code."""
    return sum(field << positions[k if is_key else k >> 1 << 2] for k in registers)


@triton.jit
def store_codes(
    codes, n, group, lane, stored, magnitudes, signs,
    IS_KEY: tl.constexpr, BITS: tl.constexpr, FIRST_WORD: tl.constexpr, FIRST_SIGN: tl.constexpr,
    CODE_WORDS: tl.constexpr, SIGN_WORDS: tl.constexpr, HALF_WORDS: tl.constexpr,
):  # fmt: skip
    """Write the codes of token n of each row's micro-block, whose K or V codes begin at `codes`."""
    GROUP_WORDS: tl.constexpr = of(_GROUP_WORDS, BITS)
    for d0 in tl.static_range(1 if IS_KEY else 2):
        if IS_KEY:
            word_lane = n % 8 * 4 + lane
        else:
            word_lane = (2 * lane + d0) * 4 + n % 8 // 2
        for part in tl.static_range(1 if IS_KEY else GROUP_WORDS):
            word = FIRST_WORD + group * GROUP_WORDS + part
            _store_word(
                codes, n, word, word_lane, stored, magnitudes, signs,
                IS_KEY, BITS, GROUP_WORDS, _registers(IS_KEY, GROUP_WORDS, d0, part), CODE_WORDS + SIGN_WORDS,
            )  # fmt: skip
        if BITS == 3:
            _store_sign_word(
                codes, n, FIRST_SIGN + group, word_lane, stored, signs,
                IS_KEY, BITS, _registers(IS_KEY, GROUP_WORDS, d0, 0), CODE_WORDS, SIGN_WORDS, HALF_WORDS,
            )  # fmt: skip


@triton.jit
def _store_word(
    codes, n, word, word_lane, stored, magnitudes, signs,
    IS_KEY: tl.constexpr, BITS: tl.constexpr, GROUP_WORDS: tl.constexpr, REGISTERS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    new, own = _collect(magnitudes, n, BITS, "magnitude", IS_KEY, REGISTERS, (1 << (BITS - 1)) - 1)
    if BITS != 3:
        new_signs, own_signs = _collect(signs, n, BITS, "sign", IS_KEY, REGISTERS, 1)
        new, own = new | new_signs, own | own_signs
    if IS_KEY and GROUP_WORDS == 2:  # n3 selects the word, and all of it is this token's
        pointer = codes + 4 * _word_index(word + n // 8, word_lane, WORDS)
        tl.store(pointer.to(tl.pointer_type(tl.uint32)), new, mask=stored)
    else:
        _flip(codes, _word_index(word, word_lane, WORDS), new, own, stored)


@triton.jit
def _store_sign_word(
    codes, n, number, word_lane, stored, signs,
    IS_KEY: tl.constexpr, BITS: tl.constexpr, REGISTERS: tl.constexpr, CODE_WORDS: tl.constexpr,
    SIGN_WORDS: tl.constexpr, HALF_WORDS: tl.constexpr,
):  # fmt: skip
    """Signs of 3-bit group `number`; groups 2i and 2i + 1 share a word, an odd last one has a half word."""
    WORDS: tl.constexpr = CODE_WORDS + SIGN_WORDS
    new, own = _collect(signs, n, BITS, "sign word", IS_KEY, REGISTERS, 1)
    shift = (number % 2 * _BETWEEN_PARITIES).to(tl.uint32)
    new, own = new >> shift, own >> shift
    index = _word_index(CODE_WORDS + number // 2, word_lane, WORDS)
    if HALF_WORDS:
        last = number == 2 * SIGN_WORDS
        half, own_half = _collect(signs, n, BITS, "half word", IS_KEY, REGISTERS, 1)
        shift = (word_lane % 2 * 16).to(tl.uint32)
        new, own = tl.where(last, half << shift, new), tl.where(last, own_half << shift, own)
        index = tl.where(last, WORDS * 32 + word_lane // 2, index)
    _flip(codes, index, new, own, stored)


@triton.jit
def _collect(
    values, n, BITS: tl.constexpr, WHAT: tl.constexpr, IS_KEY: tl.constexpr, REGISTERS: tl.constexpr,
    FIELD: tl.constexpr,
):  # fmt: skip
    """The registers' values and the bits that they own in their word, uint32, for token n of the micro-block."""
    POSITIONS: tl.constexpr = _positions(BITS, WHAT)
    new = values[REGISTERS[0]] << _position(POSITIONS, IS_KEY, REGISTERS[0])
    for i in tl.static_range(1, len(REGISTERS)):
        new |= values[REGISTERS[i]] << _position(POSITIONS, IS_KEY, REGISTERS[i])
    own = tl.full(n.shape, _own_bits(POSITIONS, IS_KEY, REGISTERS, FIELD), tl.uint32)
    # Positions are linear in the bits of a code's index, to which the token gives n3 (K) or n3 n0 (V).
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
def _word_index(word, lane, WORDS: tl.constexpr):
    """Place of a lane's word among the codes of a micro-block, in words: chunks of 4, then 2, then 1 (layout.py)."""
    FOURS: tl.constexpr = WORDS // 4 * 4
    index = word // 4 * 128 + lane * 4 + word % 4
    if WORDS % 4 >= 2:
        index = tl.where(word >= FOURS, FOURS * 32 + lane * 2 + (word - FOURS), index)
    if WORDS % 2 == 1:
        index = tl.where(word == WORDS - 1, (WORDS - 1) * 32 + lane, index)
    return index


@triton.jit
def _flip(codes, index, new, own, stored):
    """Set the own bits of words which other programs write at the same time."""
    pointer = (codes + 4 * index).to(tl.pointer_type(tl.uint32))
    old = tl.load(pointer, mask=stored, other=0)
    tl.atomic_xor(pointer, (old ^ new) & own, mask=stored, sem="relaxed")
