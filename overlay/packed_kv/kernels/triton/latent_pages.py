"""Latents and RoPE channels of packed pages, as a block of threads loads and decodes several micro-blocks; for
`latent_decode.py` and `latent_gather.py`.

Tensors [MICRO_BLOCKS, 32] have an element for each micro-block and lane of layout.py's drawing. Decoded groups are fp16
[tokens, channels], latents times `LATENT_UNIT`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats import CODES
from .fragments import IS_INTERPRETED, decode_words, join_pairs
from .ring import key_pairs, ring_step_size

LATENT_UNIT = tl.constexpr(2.0**-7)
"""The number that a latent's value of 1 is decoded to. With it, products of magnitude and scale are exact in fp16 for
scales from 2^-7 on."""
_MAX_SCALE_BYTE = tl.constexpr(0xA7)
"""The largest scale below 64, the most that `LATENT_UNIT` leaves room for. Larger scales, and bytes of padding, are cut
to it. A latent behind its RMS norm has no larger scale (docs/formats.md)."""
assert all(code.unit <= 2.0**-11 for code in CODES.values())


@triton.jit
def micro_block_pointers(
    cache, table, first, last, block_stride, MICRO_BLOCKS: tl.constexpr, MICRO_BLOCKS_A_BLOCK: tl.constexpr,
    MICRO_BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Pointers to a request's micro-blocks `first` and on, in int32 words, [MICRO_BLOCKS, 1]; past the `last` one,
    pointers repeat it.

    cache: pointer to int32; `block_stride` in such words. table: pointer to the request's row of the block table.
    """
    number = tl.minimum(first + tl.arange(0, MICRO_BLOCKS), last)
    block = tl.load(table + number // MICRO_BLOCKS_A_BLOCK).to(tl.int64)
    pointers = cache + block * block_stride + number % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS
    return pointers[:, None]


@triton.jit
def load_chunk(pointers, COUNT: tl.constexpr):
    """COUNT (1, 2 or 4) neighbouring words of every lane: pointers to int32 [MICRO_BLOCKS, 32] -> a tuple of int32 of
    that shape."""
    if COUNT == 1:
        words = (tl.load(pointers),)
    else:
        some = tl.load(pointers[:, :, None] + tl.arange(0, COUNT)[None, None, :])
        if COUNT == 2:
            words = tl.split(some)
        else:
            even, odd = tl.split(tl.reshape(some, [some.shape[0], 32, 2, 2]))
            w0, w2 = tl.split(even)
            w1, w3 = tl.split(odd)
            words = (w0, w1, w2, w3)
    return words


@triton.jit
def lane_of(LANES: tl.constexpr):
    """Number of a lane among the LANES behind its pointer, [1, 32]."""
    lane = tl.arange(0, 32)[None, :]
    if LANES < 32:
        lane = lane % LANES
    return lane


@triton.jit
def load_latents(pointers, LAYOUT: tl.constexpr, LANES: tl.constexpr = 32):
    """A lane's words of the latents: a tuple of int32 [MICRO_BLOCKS, 32], a half word as a sign word of parity 0.

    LANES: lanes with words behind one pointer; 4 for latent rows, whose pointers are [MICRO_BLOCKS, 32].
    """
    lane = lane_of(LANES)
    at = pointers + LAYOUT.key_vector.words_at // 4
    words = ()
    for chunk in tl.static_range(len(LAYOUT.key_vector.chunks)):
        words = words + load_chunk(at + lane * LAYOUT.key_vector.chunks[chunk], LAYOUT.key_vector.chunks[chunk])
        at += LANES * LAYOUT.key_vector.chunks[chunk]
    if LAYOUT.key_vector.has_half:
        half = tl.load((pointers + LAYOUT.key_vector.half_words_at // 4).to(tl.pointer_type(tl.uint16)) + lane).to(
            tl.int32
        )
        words = words + (half & 0xCCCC | (half & 0x3333) << 18,)
    return words


@triton.jit
def load_scales(pointers, LAYOUT: tl.constexpr):
    """Scale bytes of a lane's two tokens of each group: a tuple of int32 [MICRO_BLOCKS, 32], two groups in each where
    their number is a multiple of 8, else one."""
    GROUPS: tl.constexpr = len(LAYOUT.key_vector.groups)
    SCALES_AT: tl.constexpr = LAYOUT.key_vector.scales_at
    row = tl.arange(0, 32)[None, :] // 4
    scales = ()
    if GROUPS % 8 == 0:
        for i in tl.static_range(GROUPS // 8):
            scales = scales + load_chunk(pointers + SCALES_AT // 4 + row * (GROUPS // 2) + 4 * i, 4)
    else:
        halves = (pointers + SCALES_AT // 4).to(tl.pointer_type(tl.uint16)) + row * GROUPS
        for i in tl.static_range(GROUPS):
            scales = scales + (tl.load(halves + i).to(tl.int32),)
    return scales


@triton.jit
def decode_groups(words, scales, zero, FIRST: tl.constexpr, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """COUNT (1, 2 or 4) groups from number FIRST on, fp16 [tokens, 32 * COUNT], times LATENT_UNIT.

    zero: int32 [MICRO_BLOCKS, 32], all 0, unknown to the compiler; see `decode_codes`.
    """
    if COUNT == 1:
        values = decode_group(words, scales, zero, FIRST, LAYOUT)
    elif COUNT == 2:
        values = tl.join(
            decode_group(words, scales, zero, FIRST, LAYOUT), decode_group(words, scales, zero, FIRST + 1, LAYOUT)
        )
    else:
        even = tl.join(
            decode_group(words, scales, zero, FIRST, LAYOUT), decode_group(words, scales, zero, FIRST + 2, LAYOUT)
        )
        odd = tl.join(
            decode_group(words, scales, zero, FIRST + 1, LAYOUT),
            decode_group(words, scales, zero, FIRST + 3, LAYOUT),
        )
        values = tl.join(even, odd)
    return _as_tokens(values, COUNT)


@triton.jit
def decode_group(words, scales, zero, GROUP: tl.constexpr, LAYOUT: tl.constexpr):
    """fp16 [MICRO_BLOCKS, 32, n3, d4, d3, d0]."""
    MICRO_BLOCKS: tl.constexpr = zero.shape[0]
    GROUPS: tl.constexpr = len(LAYOUT.key_vector.groups)
    UNIT: tl.constexpr = LAYOUT.key_vector.groups[GROUP].code.unit
    GAIN: tl.constexpr = LATENT_UNIT / UNIT
    VECTOR: tl.constexpr = LAYOUT.key_vector
    values = tl.reshape(decode_words(words, zero, GROUP, VECTOR), [MICRO_BLOCKS, 32, 2, 2, 2, 2])
    if GROUPS % 8 == 0:
        both = scales[GROUP // 2] >> (16 * (GROUP % 2))
    else:
        both = scales[GROUP]
    factors = tl.join(_scale(both & 0xFF, GAIN), _scale(both >> 8 & 0xFF, GAIN))
    factors = tl.reshape(factors, [MICRO_BLOCKS, 32, 2, 1, 1, 1])
    return product(values, tl.broadcast_to(factors, [MICRO_BLOCKS, 32, 2, 2, 2, 2]))


@triton.jit
def _scale(byte, GAIN: tl.constexpr):
    """GAIN times the scale of a byte, fp16."""
    bits = tl.minimum(byte, _MAX_SCALE_BYTE) << 7
    return (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * GAIN).to(tl.float16)


@triton.jit
def product(x, y):
    """x * y of fp16, two by one instruction."""
    if IS_INTERPRETED:
        return x * y
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def load_rope(pointers, ROPE: tl.constexpr):
    """RoPE channels, fp16 [tokens, 32] of each group of 32: a tuple. ROPE: `RopeLayout`."""
    lane = tl.arange(0, 32)[None, :]
    groups = ()
    for group in tl.static_range(ROPE.channels // 32):
        if ROPE.scales_at == 0:
            at = pointers + ROPE.at // 4 + group * 256 + lane * 4
            values = join_pairs(load_chunk(at, 4) + load_chunk(at + 128, 4))
        else:
            values = _load_rope_codes(pointers, lane, group, ROPE)
        groups = groups + (_as_tokens(values, 1),)
    return groups


@triton.jit
def _load_rope_codes(pointers, lane, GROUP: tl.constexpr, ROPE: tl.constexpr):
    """A group of RoPE channels at 8 bits, fp16 [MICRO_BLOCKS, 32, n3, d4, d3, d0]; exact, for scales from 2^-14 on."""
    MICRO_BLOCKS: tl.constexpr = pointers.shape[0]
    pairs = ()
    words = load_chunk(pointers + ROPE.at // 4 + GROUP * 128 + lane * 4, 4)
    for word in tl.static_range(4):
        pairs = pairs + key_pairs(words[word])
    codes = tl.reshape(join_pairs(pairs), [MICRO_BLOCKS, 32, 2, 2, 2, 2])
    scales = (pointers + ROPE.scales_at // 4).to(tl.pointer_type(tl.uint16)) + lane // 4 * (ROPE.channels // 32)
    both = tl.load(scales + GROUP).to(tl.int32)
    step_sizes = tl.join(ring_step_size(both & 0xFF).to(tl.float16), ring_step_size(both >> 8).to(tl.float16))
    step_sizes = tl.reshape(step_sizes, [MICRO_BLOCKS, 32, 2, 1, 1, 1])
    return product(codes, tl.broadcast_to(step_sizes, [MICRO_BLOCKS, 32, 2, 2, 2, 2]))


@triton.jit
def _as_tokens(values, COUNT: tl.constexpr):
    """[MICRO_BLOCKS, 32, n3, d4, d3, d0] and the bits of a group's number -> [tokens, 32 * COUNT]."""
    MICRO_BLOCKS: tl.constexpr = values.shape[0]
    x = tl.reshape(values, [MICRO_BLOCKS, 8, 4, 2, 4, 2, COUNT])  # g, t, n3, d4 d3, d0, group
    x = tl.permute(x, (0, 3, 1, 6, 4, 2, 5))
    return tl.reshape(x, [MICRO_BLOCKS * 16, 32 * COUNT])
