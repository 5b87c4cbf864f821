"""Words and scales of packed pages, as one warp loads and decodes 2 micro-blocks; for `decode.py` and `gather.py`.

Pointers to micro-blocks are to int32; LAYOUT is a `KernelLayout`. What lies where: `layout.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fragments import as_key, as_value, decode_codes, load_words, opaque

KEY = tl.constexpr(0)
"""Index of K among the vectors of a page."""
VALUE = tl.constexpr(1)


@triton.jit
def _load_vector(base0, base1, lanes, VECTOR: tl.constexpr):
    """A lane's words of a vector, each int32 [32, 2]; a half word becomes a sign word of parity 0."""
    WORDS_AT: tl.constexpr = VECTOR.words_at
    HALF_WORDS_AT: tl.constexpr = VECTOR.half_words_at
    words0, words1 = base0 + WORDS_AT // 4, base1 + WORDS_AT // 4
    words = ()
    for chunk in tl.static_range(len(VECTOR.chunks)):
        offset = lanes * VECTOR.chunks[chunk]
        words = words + load_words(words0 + offset, words1 + offset, VECTOR.chunks[chunk])
        words0 += 32 * VECTOR.chunks[chunk]
        words1 += 32 * VECTOR.chunks[chunk]
    if VECTOR.has_half:
        half = _load_16_bits(base0, base1, HALF_WORDS_AT // 2 + lanes)
        words = words + (half & 0xCCCC | (half & 0x3333) << 18,)
    return words


@triton.jit
def _load_16_bits(base0, base1, offset):
    """offset: in 16-bit words, [32, 1] -> int32 [32, 2]."""
    half0, half1 = base0.to(tl.pointer_type(tl.uint16)), base1.to(tl.pointer_type(tl.uint16))
    both = tl.join(tl.reshape(tl.load(half0 + offset), [32]), tl.reshape(tl.load(half1 + offset), [32]))
    return both.to(tl.int32)


@triton.jit
def load_key(base0, base1, lanes, LAYOUT: tl.constexpr):
    """Words and scales of K of 2 micro-blocks: tuples of int32 [32, 2]."""
    VECTOR: tl.constexpr = LAYOUT.key_vector
    GROUPS: tl.constexpr = len(VECTOR.groups)
    SCALES_AT: tl.constexpr = VECTOR.scales_at
    words = _load_vector(base0, base1, lanes, VECTOR)
    scales = ()
    row = SCALES_AT // 2 + lanes // 4 * GROUPS
    if GROUPS % 4 == 0:
        for i in tl.static_range(GROUPS // 4):
            offset = row // 2 + 2 * i
            scales = scales + load_words(base0 + offset, base1 + offset, 2)
    else:
        for i in tl.static_range(GROUPS):
            scales = scales + (_load_16_bits(base0, base1, row + i),)
    return words, scales


@triton.jit
def load_value(base0, base1, lanes, LAYOUT: tl.constexpr):
    """Words and scales of V of 2 micro-blocks: tuples of int32 [32, 2]."""
    VECTOR: tl.constexpr = LAYOUT.value_vector
    GROUPS: tl.constexpr = len(VECTOR.groups)
    SCALES_AT: tl.constexpr = VECTOR.scales_at
    words = _load_vector(base0, base1, lanes, VECTOR)
    scales = ()
    row = SCALES_AT // 4 + lanes % 4 * GROUPS
    if GROUPS % 4 == 0:
        for i in tl.static_range(GROUPS // 4):
            scales = scales + load_words(base0 + row + 4 * i, base1 + row + 4 * i, 4)
    else:
        for i in tl.static_range(GROUPS):
            scales = scales + load_words(base0 + row + i, base1 + row + i, 1)
    return words, scales


@triton.jit
def decode_key(words, zero, group: tl.constexpr, LAYOUT: tl.constexpr):
    """One group of K, fp16 [32 tokens, 32 channels], in its unit and before its scales."""
    VECTOR: tl.constexpr = LAYOUT.key_vector
    return opaque(as_key(decode_codes(words, zero, group, VECTOR)))


@triton.jit
def decode_value(words, zero, group: tl.constexpr, LAYOUT: tl.constexpr):
    """One group of V, fp16 [32 channels, 32 tokens], in its unit and before its scales."""
    VECTOR: tl.constexpr = LAYOUT.value_vector
    return opaque(as_value(decode_codes(words, zero, group, VECTOR)))
