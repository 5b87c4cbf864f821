"""Store kernel: rotate, search the scales, quantise, pack and write K and V of new tokens, in one launch.

The bytes equal those of `PagedCodec.write`. The rounding rule, which makes them equal: everything is fp32, each add,
subtract and multiply rounded to nearest even on its own (no fused multiply-add, no flushing of denormals), in the order
that `codecs/rotations.py` and `codecs/scalar.py` state; a tie between two codes takes the lower magnitude, a tie
between two scales the one tried first. NaN and infinities become 0, the rest is clamped to +-INPUT_LIMIT.

A program takes `ROWS` groups of 32 channels, one a row, of one section (outlier or regular channels) of K or of V. A
channel's index in its group, d4..d0, is split between lanes and registers:

    tensor [ROWS * 4]   lanes: row * 4 + t, t = d2 d1
    tuple of 8 tensors  registers: k = d4 d3 d0

so that a lane holds all codes of one word of K (see layout.py), the error tree's levels 16, 8 and 1 stay inside a lane,
and rotations exchange lanes only for strides 2, 4, 32, 64, ... (lane ^ 1, 2, 4, 8, ...).

A word holds codes of several tokens, which other programs may be writing: a program compares its own bits with the
old word and flips those that differ with one atomic. Words of 4-bit K belong to one token and are stored plainly.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from .. import layout
from ..codecs.codec import INPUT_LIMIT
from ..codecs.pages import PagedCodec
from ..codecs.scalar import SEARCH
from ..formats import GROUP_SIZE, MAGNITUDES, MAX_SCALE_BYTE, Format
from ..layout import MICRO_BLOCK, page_layout

ROWS = 8
"""Groups of a program: one for every 4 lanes of its one warp."""

# Tables of other modules. Triton hashes constexprs into the names of compiled kernels, other globals it does not.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_INPUT_LIMIT = tl.constexpr(INPUT_LIMIT)
_MAX_SCALE_BYTE = tl.constexpr(MAX_SCALE_BYTE)
_NORMALISATIONS = tl.constexpr(tuple(1 / math.sqrt(GROUP_SIZE << i) for i in range(16)))
_LEVELS = tl.constexpr(MAGNITUDES)
_INVERSE_TOP_LEVELS = tl.constexpr({bits: 1 / levels[-1] for bits, levels in MAGNITUDES.items()})
_THRESHOLDS = tl.constexpr(
    {bits: tuple((low + high) / 2 for low, high in pairwise(levels)) for bits, levels in MAGNITUDES.items()}
)
_SEARCH = tl.constexpr(SEARCH)
_GROUP_WORDS = tl.constexpr(layout.CODE_WORDS)
_MAGNITUDE_SHIFT = tl.constexpr(layout.MAGNITUDE_SHIFT)
_SIGN_SHIFT = tl.constexpr(layout.SIGN_SHIFT)
_SIGN_WORD_SHIFT = tl.constexpr(layout.SIGN_WORD_SHIFT[0])
_SIGN_HALF_SHIFT = tl.constexpr(layout.SIGN_HALF_SHIFT)


def store_tokens(
    codec: PagedCodec, cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Store tokens: `PagedCodec.write` in one launch, with no host sync and no allocation.

    Args:
        codec: the codec of the layer, on the device of the tensors.
        cache: uint8 [blocks, KV heads, block_size, slot_bytes]; the last two dimensions contiguous, block_size a
            multiple of 16, address and other strides multiples of 4.
        slots: int32 or int64 [tokens], contiguous: block * block_size + offset. Negative ones are skipped, the others
            are distinct.
        key, value: fp16, bf16 or fp32 [tokens or more, KV heads, head_dim] of one dtype, channels contiguous; rows
            beyond the slots are padding.
    """
    _, heads, block_size, slot_bytes = cache.shape
    assert cache.dtype == torch.uint8 and slot_bytes == codec.slot_bytes, (cache.dtype, cache.shape)
    assert cache.stride()[2:] == (slot_bytes, 1) and block_size % MICRO_BLOCK == 0, (cache.shape, cache.stride())
    assert cache.data_ptr() % 4 == 0 and cache.stride(0) % 4 == 0 and cache.stride(1) % 4 == 0, cache.stride()
    assert slots.ndim == 1 and slots.is_contiguous() and not slots.is_floating_point(), (slots.dtype, slots.shape)
    assert key.dtype == value.dtype and key.shape == value.shape, (key.dtype, value.dtype, key.shape, value.shape)
    assert key.shape[1:] == (heads, codec.key.head_dim) and len(key) >= len(slots), (key.shape, slots.shape)
    assert key.stride(2) == value.stride(2) == 1, (key.stride(), value.stride())
    for part in (codec.key, codec.value):
        assert part.channels.ndim == 1 or len(part.channels) == heads, (part.channels.shape, heads)
    constants = store_constants(codec.key.fmt, codec.key.head_dim)
    rows = max(ROWS, *(padded_groups(groups) for _, groups, *_ in constants["SECTIONS"]))
    vectors = len(slots) * heads
    programs = sum(triton.cdiv(vectors, rows // padded_groups(groups)) for _, groups, *_ in constants["SECTIONS"])
    if not programs:
        return
    store_kernel[(programs, 2)](
        cache,
        cache.stride(0),
        cache.stride(1),
        slots,
        len(slots),
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        codec.key.rotation_constants,
        codec.key.channels,
        0 if codec.key.channels.ndim == 1 else codec.key.channels.stride(0),
        codec.value.channels,
        0 if codec.value.channels.ndim == 1 else codec.value.channels.stride(0),
        HEADS=heads,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        ORDERED=codec.key.order is not None or codec.value.order is not None,
        **constants,
        num_warps=1,
        enable_fp_fusion=False,
    )


@functools.cache
def store_constants(fmt: Format, head_dim: int) -> dict[str, Any]:
    """The kernel's constexpr arguments that a format decides: bits and offsets.

    SECTIONS has (first group, groups, bits, first code word, 3-bit groups before) of each section.
    """
    page = page_layout(fmt, head_dim)
    group_bits = page.vector.group_bits
    outlier_groups = fmt.outlier_channels(head_dim) // GROUP_SIZE
    sections = []
    for first, end in ((0, outlier_groups), (outlier_groups, len(group_bits))):
        if end > first:
            words = sum(layout.CODE_WORDS[bits] for bits in group_bits[:first])
            sections.append((first, end - first, group_bits[first], words, group_bits[:first].count(3)))
    return dict(
        ROTATION=fmt.rotation,
        HEAD_GROUPS=len(group_bits),
        SECTIONS=tuple(sections),
        CODE_WORDS=page.vector.code_words,
        SIGN_WORDS=page.vector.sign_words,
        HALF_WORDS=page.vector.half_words,
        MICRO_BLOCK_BYTES=page.micro_block_bytes,
        KEY_CODES=page.key_codes,
        VALUE_CODES=page.value_codes,
        KEY_SCALES=page.key_scales,
        VALUE_SCALES=page.value_scales,
    )


@triton.constexpr_function
def padded_groups(groups):
    """Rows of a vector's section: a power of two, so that a rotation exchanges row and row ^ 2^i."""
    return 1 << (groups - 1).bit_length()


@triton.constexpr_function
def _of(table, key):
    return table[key]


@triton.constexpr_function
def _stages(groups):
    """Hadamard stages that mix groups."""
    return groups.bit_length() - 1


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


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    cache_ptr,
    cache_block_stride,
    cache_head_stride,
    slots_ptr,
    tokens,
    key_ptr,
    key_token_stride,
    key_head_stride,
    value_ptr,
    value_token_stride,
    value_head_stride,
    constants_ptr,
    key_channels_ptr,
    key_channels_stride,
    value_channels_ptr,
    value_channels_stride,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
    ROTATION: tl.constexpr,
    HEAD_GROUPS: tl.constexpr,
    SECTIONS: tl.constexpr,
    CODE_WORDS: tl.constexpr,
    SIGN_WORDS: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    MICRO_BLOCK_BYTES: tl.constexpr,
    KEY_CODES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
):
    """Grid: (programs of each section in turn, K and V). Arguments: see `store_tokens` and `store_constants`."""
    is_key = tl.program_id(1) == 0
    x_ptr = key_ptr if is_key else value_ptr
    token_stride = key_token_stride if is_key else value_token_stride
    head_stride = key_head_stride if is_key else value_head_stride
    channels_ptr = key_channels_ptr if is_key else value_channels_ptr
    channels_stride = key_channels_stride if is_key else value_channels_stride
    program = tl.program_id(0)
    for s in tl.static_range(len(SECTIONS)):
        programs = tl.cdiv(tokens * HEADS, ROWS // padded_groups(SECTIONS[s][1]))
        if (program >= 0) & (program < programs):
            _store_section(
                cache_ptr, cache_block_stride, cache_head_stride, slots_ptr, tokens,
                x_ptr, token_stride, head_stride, constants_ptr, channels_ptr, channels_stride, is_key, program,
                HEADS, BLOCK_SIZE, ROWS, ORDERED, ROTATION, HEAD_GROUPS,
                SECTIONS[s][0], SECTIONS[s][1], SECTIONS[s][2], SECTIONS[s][3], SECTIONS[s][4],
                CODE_WORDS, SIGN_WORDS, HALF_WORDS, MICRO_BLOCK_BYTES, KEY_CODES, VALUE_CODES, KEY_SCALES, VALUE_SCALES,
            )  # fmt: skip
        program -= programs


@triton.jit
def _store_section(
    cache_ptr, cache_block_stride, cache_head_stride, slots_ptr, tokens,
    x_ptr, token_stride, head_stride, constants_ptr, channels_ptr, channels_stride, is_key, program,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, ORDERED: tl.constexpr, ROTATION: tl.constexpr,
    HEAD_GROUPS: tl.constexpr, FIRST: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, FIRST_WORD: tl.constexpr,
    FIRST_SIGN: tl.constexpr, CODE_WORDS: tl.constexpr, SIGN_WORDS: tl.constexpr, HALF_WORDS: tl.constexpr,
    MICRO_BLOCK_BYTES: tl.constexpr, KEY_CODES: tl.constexpr, VALUE_CODES: tl.constexpr, KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
):  # fmt: skip
    """Store GROUPS groups, from group FIRST on, of ROWS / padded_groups(GROUPS) vectors (token, head)."""
    A_VECTOR: tl.constexpr = padded_groups(GROUPS)
    index = tl.arange(0, 4 * ROWS)
    row, lane = index // 4, index % 4
    vector, group = program * (ROWS // A_VECTOR) + row // A_VECTOR, row % A_VECTOR
    token, head = (vector // HEADS).to(tl.int64), (vector % HEADS).to(tl.int64)
    exists = (group < GROUPS) & (vector < tokens * HEADS)
    slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
    stored = slot >= 0
    slot = tl.where(stored, slot, 0)
    inside = slot % BLOCK_SIZE
    micro_block = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + head * cache_head_stride
    micro_block += inside // 16 * MICRO_BLOCK_BYTES
    n = (inside % 16).to(tl.int32)

    x_row = x_ptr + token * token_stride + head * head_stride
    channels_row = channels_ptr + head * channels_stride
    x = _load(x_row, channels_row, constants_ptr, FIRST + group, exists, index, ORDERED, ROTATION)
    if ROTATION == "hadamard":
        x = _hadamard(x, group, index, GROUPS)
    scale = _search_scale(x, index, BITS)
    magnitudes, signs = _quantize(x, scale, BITS)
    if is_key:
        _store_codes(
            micro_block + KEY_CODES, n, group, lane, stored, magnitudes, signs,
            True, BITS, FIRST_WORD, FIRST_SIGN, CODE_WORDS, SIGN_WORDS, HALF_WORDS,
        )  # fmt: skip
        scale_at = KEY_SCALES + n % 8 * (2 * HEAD_GROUPS) + 2 * (FIRST + group) + n // 8
    else:
        _store_codes(
            micro_block + VALUE_CODES, n, group, lane, stored, magnitudes, signs,
            False, BITS, FIRST_WORD, FIRST_SIGN, CODE_WORDS, SIGN_WORDS, HALF_WORDS,
        )  # fmt: skip
        scale_at = VALUE_SCALES + n % 8 // 2 * (4 * HEAD_GROUPS) + 4 * (FIRST + group) + n // 8 * 2 + n % 2
    tl.store(micro_block + scale_at, scale.to(tl.uint8), mask=stored & (lane == 0))


@triton.jit
def _load(x_row, channels_row, constants_ptr, group, exists, index, ORDERED: tl.constexpr, ROTATION: tl.constexpr):
    """Channels of each row's group as a tuple of 8 fp32 [lanes], cleaned and multiplied by the rotation's constants:
    for Givens and quaternions, rotated."""
    lane = index % 4
    d0 = tl.arange(0, 2)[None, :]
    mask = exists[:, None]
    x = ()
    for d43 in tl.static_range(4):
        channel = (group * 32 + d43 * 8 + lane * 2)[:, None] + d0
        source = channel
        if ORDERED:
            source = tl.load(channels_row[:, None] + channel, mask=mask, other=0)
        value = tl.load(x_row[:, None] + source, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        value = tl.minimum(tl.maximum(value, -_INPUT_LIMIT), _INPUT_LIMIT)
        if ROTATION == "hadamard":
            x += tl.split(_product(value, tl.load(constants_ptr + channel, mask=mask, other=0.0)))
        elif ROTATION == "givens":
            x0, x1 = tl.split(value)
            cos, sin = tl.split(tl.load(constants_ptr + channel, mask=mask, other=0.0))
            x += (_product(cos, x0) - _product(sin, x1), _product(sin, x0) + _product(cos, x1))
        else:
            tl.static_assert(ROTATION == "quaternion")
            # Parts w i of a quadruple are in even lanes, j k in the odd lanes beside them, where c and d change sign.
            x0, x1 = tl.split(value)
            y0, y1 = tl.gather(x0, index ^ 1, 0), tl.gather(x1, index ^ 1, 0)
            parts = constants_ptr + (group * 32 + d43 * 8 + lane // 2 * 4)[:, None] + d0
            a, b = tl.split(tl.load(parts, mask=mask, other=0.0))
            c, d = tl.split(tl.load(parts + 2, mask=mask, other=0.0))
            c, d = tl.where(lane % 2 == 1, -c, c), tl.where(lane % 2 == 1, -d, d)
            x += (
                _product(a, x0) - _product(b, x1) - _product(c, y0) - _product(d, y1),
                _product(a, x1) + _product(b, x0) + _product(c, y1) - _product(d, y0),
            )
    return x


@triton.jit
def _product(a, b):
    """a * b in a form that no compiler fuses with an add: LLVM packs plain multiplies for Blackwell, and ptxas 12.9
    (Triton 3.6) makes FFMA2 of those, though they say .rn and it is told --fmad=false."""
    if _INTERPRETED:
        return a * b
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _hadamard(x, group, index, GROUPS: tl.constexpr):
    """Butterflies over strides 1, 2, 4, ..., then the normalisation; see `rotations.Hadamard`."""
    x = _register_butterflies(x, 1)
    x = _lane_butterflies(x, index, 1, True)
    x = _lane_butterflies(x, index, 2, True)
    x = _register_butterflies(x, 2)
    x = _register_butterflies(x, 4)
    normalisation = tl.full(group.shape, _of(_NORMALISATIONS, 0), tl.float32)
    for stage in tl.static_range(_stages(GROUPS)):
        # A section is blocks of descending powers of two; those larger than this stage's stride take part.
        mixed = group < (GROUPS >> (stage + 1) << (stage + 1))
        x = _lane_butterflies(x, index, 4 << stage, mixed)
        normalisation = tl.where(mixed, _of(_NORMALISATIONS, stage + 1), normalisation)
    y = ()
    for k in tl.static_range(8):
        y += (_product(x[k], normalisation),)
    return y


@triton.jit
def _register_butterflies(x, BIT: tl.constexpr):
    y = ()
    for k in tl.static_range(8):
        if (k & BIT) == 0:
            y += (x[k] + x[k ^ BIT],)
        else:
            y += (x[k ^ BIT] - x[k],)
    return y


@triton.jit
def _lane_butterflies(x, index, BIT: tl.constexpr, mixed):
    sign = tl.where((index & BIT) != 0, -1.0, 1.0)
    y = ()
    for k in tl.static_range(8):
        y += (tl.where(mixed, tl.gather(x[k], index ^ BIT, 0) + _product(x[k], sign), x[k]),)
    return y


@triton.jit
def _search_scale(x, index, BITS: tl.constexpr):
    """The scale byte of each row, int32 [lanes], the same in all of a row; see `scalar.search_scale`."""
    ABOVE: tl.constexpr = _of(_SEARCH, BITS)[0]
    BELOW: tl.constexpr = _of(_SEARCH, BITS)[1]
    top = tl.abs(x[0])
    for k in tl.static_range(1, 8):
        top = tl.maximum(top, tl.abs(x[k]))
    top = tl.maximum(top, tl.gather(top, index ^ 1, 0))
    top = tl.maximum(top, tl.gather(top, index ^ 2, 0))
    ratio = (top * _of(_INVERSE_TOP_LEVELS, BITS)).to(tl.float16)
    start = tl.minimum(ratio.to(tl.int16, bitcast=True).to(tl.int32) >> 7, _MAX_SCALE_BYTE)
    best = start
    least = tl.full(top.shape, float("inf"), tl.float32)
    for i in range(ABOVE + BELOW + 1):
        candidate = tl.minimum(tl.maximum(start + (ABOVE - i), 0), _MAX_SCALE_BYTE)
        error = _group_error(x, _decode_scale(candidate), index, BITS)
        better = error < least
        best = tl.where(better, candidate, best)
        least = tl.where(better, error, least)
    return best


@triton.jit
def _decode_scale(scale):
    return (scale << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _group_error(x, step, index, BITS: tl.constexpr):
    """Squared error of coding each row with a step; the tree of `scalar.group_error`."""
    LEVELS: tl.constexpr = _of(_LEVELS, BITS)
    terms = ()
    for k in tl.static_range(8):
        nearest = tl.abs(tl.abs(x[k]) - step * LEVELS[0])
        for level in tl.static_range(1, len(LEVELS)):
            nearest = tl.minimum(nearest, tl.abs(tl.abs(x[k]) - step * LEVELS[level]))
        terms += (_product(nearest, nearest),)
    even = (terms[0] + terms[4]) + (terms[2] + terms[6])
    odd = (terms[1] + terms[5]) + (terms[3] + terms[7])
    even += tl.gather(even, index ^ 2, 0)
    odd += tl.gather(odd, index ^ 2, 0)
    even += tl.gather(even, index ^ 1, 0)
    odd += tl.gather(odd, index ^ 1, 0)
    return even + odd


@triton.jit
def _quantize(x, scale, BITS: tl.constexpr):
    """Magnitude indices and signs, two tuples of 8 uint32 [lanes]."""
    THRESHOLDS: tl.constexpr = _of(_THRESHOLDS, BITS)
    step = _decode_scale(scale)
    magnitudes, signs = (), ()
    for k in tl.static_range(8):
        index = (tl.abs(x[k]) > step * THRESHOLDS[0]).to(tl.uint32)
        for i in tl.static_range(1, len(THRESHOLDS)):
            index += (tl.abs(x[k]) > step * THRESHOLDS[i]).to(tl.uint32)
        magnitudes += (index,)
        signs += ((x[k] < 0).to(tl.uint32),)
    return magnitudes, signs


@triton.jit
def _store_codes(
    codes, n, group, lane, stored, magnitudes, signs,
    IS_KEY: tl.constexpr, BITS: tl.constexpr, FIRST_WORD: tl.constexpr, FIRST_SIGN: tl.constexpr,
    CODE_WORDS: tl.constexpr, SIGN_WORDS: tl.constexpr, HALF_WORDS: tl.constexpr,
):  # fmt: skip
    """Write the codes of token n of each row's micro-block, whose K or V codes begin at `codes`."""
    GROUP_WORDS: tl.constexpr = _of(_GROUP_WORDS, BITS)
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
    shift = (number % 2 * 4).to(tl.uint32)
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
