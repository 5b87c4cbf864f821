"""Words and scales of packed pages, as one warp loads and decodes 2 micro-blocks; for `decode.py` and `gather.py`.

What lies where: `layout.py`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ...layout import CODE_WORDS, PageLayout
from ..units import VALUE_UNITS
from .fragments import decode_key, decode_value, in_registers, load_words


@triton.jit
def _load_vector_words(base0, base1, chunk_widths: tl.constexpr, lanes):
    words = ()
    for chunk in tl.static_range(len(chunk_widths)):
        offset = lanes * chunk_widths[chunk]
        words = words + load_words(base0 + offset, base1 + offset, chunk_widths[chunk])
        base0 += 32 * chunk_widths[chunk]
        base1 += 32 * chunk_widths[chunk]
    return words


@triton.jit
def _load_16_bits(pointer0, pointer1):
    """pointer0, pointer1: to uint16, [32, 1] -> int32 [32, 2]."""
    both = tl.join(tl.reshape(tl.load(pointer0), [32]), tl.reshape(tl.load(pointer1), [32]))
    return both.to(tl.int32)


@triton.jit
def _spread_half_word(half):
    """The signs of an odd last 3-bit group as they lie in a sign word of parity 0: two bits of each nibble."""
    return half & 0xCCCC | (half & 0x3333) << 18


@triton.jit
def load_key(
    base0, base1, lanes,
    CHUNKS: tl.constexpr, HALF_OFFSET: tl.constexpr, HAS_HALF: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Words and scales of K of 2 micro-blocks at base0 and base1, pointers to int32."""
    words = _load_vector_words(base0, base1, CHUNKS, lanes)
    half0, half1 = base0.to(tl.pointer_type(tl.uint16)), base1.to(tl.pointer_type(tl.uint16))
    if HAS_HALF:
        offset = HALF_OFFSET // 2 + lanes
        words = words + (_spread_half_word(_load_16_bits(half0 + offset, half1 + offset)),)
    scales = ()
    row = SCALES // 2 + lanes // 4 * GROUPS
    if GROUPS % 4 == 0:
        for i in tl.static_range(GROUPS // 4):
            offset = row // 2 + 2 * i
            scales = scales + load_words(base0 + offset, base1 + offset, 2)
    else:
        for i in tl.static_range(GROUPS):
            scales = scales + (_load_16_bits(half0 + row + i, half1 + row + i),)
    return words, scales


@triton.jit
def load_value(
    base0, base1, lanes,
    CHUNKS: tl.constexpr, HALF_OFFSET: tl.constexpr, HAS_HALF: tl.constexpr, GROUPS: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Words and scales of V of 2 micro-blocks at base0 and base1, pointers to int32."""
    words = _load_vector_words(base0 + CODES // 4, base1 + CODES // 4, CHUNKS, lanes)
    if HAS_HALF:
        half0, half1 = base0.to(tl.pointer_type(tl.uint16)), base1.to(tl.pointer_type(tl.uint16))
        offset = (CODES + HALF_OFFSET) // 2 + lanes
        words = words + (_spread_half_word(_load_16_bits(half0 + offset, half1 + offset)),)
    scales = ()
    row = SCALES // 4 + lanes % 4 * GROUPS
    if GROUPS % 4 == 0:
        for i in tl.static_range(GROUPS // 4):
            scales = scales + load_words(base0 + row + 4 * i, base1 + row + 4 * i, 4)
    else:
        for i in tl.static_range(GROUPS):
            scales = scales + load_words(base0 + row + i, base1 + row + i, 1)
    return words, scales


@triton.jit
def decode_group(
    words, zero, group: tl.constexpr, is_key: tl.constexpr,
    GROUP_BITS: tl.constexpr, FIRST_WORD: tl.constexpr, SIGN_WORD: tl.constexpr, PARITY: tl.constexpr,
):  # fmt: skip
    """One group, fp16, as `decode_key` or `decode_value` returns it."""
    bits: tl.constexpr = GROUP_BITS[group]
    first: tl.constexpr = FIRST_WORD[group]
    second: tl.constexpr = SIGN_WORD[group] if bits == 3 else first + (1 if bits == 4 else 0)
    constants = in_registers(zero, bits)
    if is_key:
        result = decode_key(words[first], words[second], constants, bits, PARITY[group])
    else:
        result = decode_value(words[first], words[second], constants, bits, PARITY[group])
    return result


@functools.cache
def kernel_layout(page: PageLayout) -> dict[str, object]:
    """The constants of the kernels that a page's layout decides."""
    vector = page.vector
    first, signs, parity = [], [], []
    word = threes = 0
    for bits in vector.group_bits:
        first.append(word)
        word += CODE_WORDS[bits]
        signs.append(vector.code_words + threes // 2 if bits == 3 else 0)
        parity.append(threes % 2 if bits == 3 else 0)
        threes += bits == 3
    return {
        "MICRO_BLOCK_WORDS": page.micro_block_bytes // 4,
        "GROUP_BITS": vector.group_bits,
        "FIRST_WORD": tuple(first),
        "SIGN_WORD": tuple(signs),
        "PARITY": tuple(parity),
        "OVER_UNITS": tuple(1 / VALUE_UNITS[bits] for bits in vector.group_bits),
        "CHUNKS": vector.chunks,
        "HALF_OFFSET": 128 * sum(vector.chunks),
        "HAS_HALF": bool(vector.half_words),
        "VALUE_CODES": page.value_codes,
        "KEY_SCALES": page.key_scales,
        "VALUE_SCALES": page.value_scales,
    }
