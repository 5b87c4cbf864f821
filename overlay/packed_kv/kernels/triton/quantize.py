"""Rotation, scale search and codes of the store kernel: the arithmetic that must equal the codec's to the bit.

Values are tuples of 8 fp32 tensors [lanes]; see `store_section.py` for the place of each channel, and for the rounding
rule.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from ...codecs.scalar import ONE
from ...formats import GROUP_SIZE, INPUT_LIMIT, MAX_SCALE_BYTE
from .fragments import IS_INTERPRETED

# Tables of other modules. Triton hashes constexprs into the names of compiled kernels, other globals it does not.
_INPUT_LIMIT = tl.constexpr(INPUT_LIMIT)
_MAX_SCALE_BYTE = tl.constexpr(MAX_SCALE_BYTE)
_ONE = tl.constexpr(ONE)
_NORMALISATIONS = tl.constexpr(tuple(1 / math.sqrt(GROUP_SIZE << i) for i in range(16)))


class Transform(NamedTuple):
    """Transform of a vector's channels before they are quantised.

    Attributes:
        rotation: of the format.
        ordered: whether channels are packed in an order of their own.
        has_table: whether they have means and scales.
        has_positions: whether means depend on a token's position.
        mean_blocks: blocks of positions that have means of their own.
        mean_block_tokens: positions of a block; 0: there is one block.
    """

    rotation: str
    ordered: bool
    has_table: bool
    has_positions: bool
    mean_blocks: int
    mean_block_tokens: int


@triton.constexpr_function
def of(table, key):
    return table[key]


@triton.constexpr_function
def _threshold(levels, number):
    return (levels[number] + levels[number + 1]) / 2


@triton.constexpr_function
def _spacing(levels):
    """Distance d of levels that are odd multiples of d / 2, if they are too many to try all; else 0."""
    odd = all(level == (2 * i + 1) * levels[0] for i, level in enumerate(levels))
    return 2 * levels[0] if odd and len(levels) >= 16 else 0.0


@triton.constexpr_function
def _stages(groups):
    """Hadamard stages that mix groups."""
    return groups.bit_length() - 1


@triton.jit
def load_rotated(
    x_row, channels_row, constants_ptr, group, exists, index, table_rows, dim, STORED_DIM: tl.constexpr,
    HAS_PADDING: tl.constexpr, TRANSFORM: tl.constexpr,
):  # fmt: skip
    """Channels of each row's group, cleaned, centred and scaled if `Transform.has_table`, and multiplied by the
    rotation's constants: for Givens and quaternions, rotated. Returns a tuple of 8 fp32 [lanes].

    Args:
        x_row: pointers to fp16, bf16 or fp32 [dim] [lanes]; with HAS_PADDING, channels past `dim` are 0.
        channels_row: pointers to int64 [STORED_DIM] [lanes], the channels in packing order; not read unless ordered.
        constants_ptr: pointer to fp32 [STORED_DIM], of the rotation, in packing order.
        group, exists, index: int32, bool and int32 [lanes]; only what `exists` is read.
        table_rows: pointers to means and to scales, fp32 [STORED_DIM] [lanes] in packing order, a mean's partner behind
            it; pointers to fp32 [2, STORED_DIM] [lanes], cosine and sine in the model's order; and bool [lanes]:
            whether, with blocks of positions, the row's mean is turned: mean * cosine + partner * sine.
        TRANSFORM: `Transform`.
    """
    ROTATION: tl.constexpr = TRANSFORM.rotation
    mean_row, scale_row, turn_row, turned = table_rows
    lane = index % 4
    d0 = tl.arange(0, 2)[None, :]
    mask = exists[:, None]
    x = ()
    for d43 in tl.static_range(4):
        channel = (group * 32 + d43 * 8 + lane * 2)[:, None] + d0
        source = channel
        if TRANSFORM.ordered:
            source = tl.load(channels_row[:, None] + channel, mask=mask, other=0).to(tl.int32)
        there = mask
        if HAS_PADDING:
            there = mask & (source < dim)
        value = tl.load(x_row[:, None] + source, mask=there, other=0.0).to(tl.float32)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        if TRANSFORM.has_table:
            mean = tl.load(mean_row[:, None] + channel, mask=mask, other=0.0)
            if TRANSFORM.mean_block_tokens > 0:
                turns = turned[:, None]
                cosine = tl.load(turn_row[:, None] + source, mask=turns, other=1.0)
                sine = tl.load(turn_row[:, None] + STORED_DIM + source, mask=turns, other=0.0)
                partner = tl.load(mean_row[:, None] + STORED_DIM + channel, mask=turns, other=0.0)
                mean = product(mean, cosine) + product(partner, sine)
            value -= mean
            value = product(value, tl.load(scale_row[:, None] + channel, mask=mask, other=0.0))
        value = tl.minimum(tl.maximum(value, -_INPUT_LIMIT), _INPUT_LIMIT)
        if ROTATION == "hadamard":
            x += tl.split(product(value, tl.load(constants_ptr + channel, mask=mask, other=0.0)))
        elif ROTATION == "givens":
            x0, x1 = tl.split(value)
            cos, sin = tl.split(tl.load(constants_ptr + channel, mask=mask, other=0.0))
            x += (product(cos, x0) - product(sin, x1), product(sin, x0) + product(cos, x1))
        elif ROTATION == "identity":
            x += tl.split(value)
        else:
            tl.static_assert(ROTATION == "quaternion")
            # Parts w and i of a quadruple are in even lanes, j and k in the odd lanes beside them; there c and d change
            # sign.
            x0, x1 = tl.split(value)
            y0, y1 = tl.gather(x0, index ^ 1, 0), tl.gather(x1, index ^ 1, 0)
            parts = constants_ptr + (group * 32 + d43 * 8 + lane // 2 * 4)[:, None] + d0
            a, b = tl.split(tl.load(parts, mask=mask, other=0.0))
            c, d = tl.split(tl.load(parts + 2, mask=mask, other=0.0))
            c, d = tl.where(lane % 2 == 1, -c, c), tl.where(lane % 2 == 1, -d, d)
            x += (
                product(a, x0) - product(b, x1) - product(c, y0) - product(d, y1),
                product(a, x1) + product(b, x0) + product(c, y1) - product(d, y0),
            )
    return x


@triton.jit
def product(a, b):
    """a * b in a form that no compiler fuses with an add: LLVM packs plain multiplies for Blackwell, and ptxas 12.9
    (Triton 3.6) makes FFMA2 of those, though they say .rn and it is told --fmad=false."""
    if IS_INTERPRETED:
        return a * b
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def hadamard(x, group, index, GROUPS: tl.constexpr):
    """Butterflies over strides 1, 2, 4, ..., then the normalisation; see `rotations.Hadamard`."""
    x = _register_butterflies(x, 1)
    x = _lane_butterflies(x, index, 1, True)
    x = _lane_butterflies(x, index, 2, True)
    x = _register_butterflies(x, 2)
    x = _register_butterflies(x, 4)
    normalisation = tl.full(group.shape, of(_NORMALISATIONS, 0), tl.float32)
    for stage in tl.static_range(_stages(GROUPS)):
        # A section is blocks of descending powers of two; those larger than this stage's stride take part.
        mixed = group < (GROUPS >> (stage + 1) << (stage + 1))
        x = _lane_butterflies(x, index, 4 << stage, mixed)
        normalisation = tl.where(mixed, of(_NORMALISATIONS, stage + 1), normalisation)
    y = ()
    for k in tl.static_range(8):
        y += (product(x[k], normalisation),)
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
        y += (tl.where(mixed, tl.gather(x[k], index ^ BIT, 0) + product(x[k], sign), x[k]),)
    return y


# $1: |x|; $2: step size; $3: its inverse; $4: the bins' words. Computes a, and w, the word of its bin. The last bits of
# 2^19 plus the product are the bin's number; `shfl` takes five of them as the lane.
_BIN = """{ .reg .f32 a, t, u; .reg .b32 n, w; .reg .pred p;
    abs.f32 a, $1; mul.rn.sat.f32 t, a, $3; add.rn.f32 t, t, 0f49000000; mov.b32 n, t;
    shfl.sync.idx.b32 w, $4, n, 31, -1; """
# The square of the distance to the nearer of two levels t and u. Steps and levels have 4 significant bits, so their
# products are exact, and a fused multiply-add rounds as a subtraction of such a product does.
_SQUARE = tl.constexpr(
    _BIN
    + """shl.b32 n, w, 16; mov.b32 t, n; and.b32 w, w, 0xffff0000; mov.b32 u, w;
    neg.f32 a, a; fma.rn.f32 t, t, $2, a; fma.rn.f32 u, u, $2, a;
    abs.f32 t, t; abs.f32 u, u; min.f32 t, t, u; mul.rn.f32 $0, t, t; }"""
)
# The number of the lower level, and 1 if a is above the threshold t.
_INDEX = tl.constexpr(
    _BIN
    + """and.b32 n, w, 0xffff0000; mov.b32 t, n; mul.rn.f32 t, t, $2; setp.gt.f32 p, a, t;
    and.b32 $0, w, 0xffff; @p add.u32 $0, $0, 1; }"""
)


@triton.constexpr_function
def _has_bins(bins):
    """The interpreter has no lanes for look-ups, and tries all levels."""
    return len(bins.levels) > 0 and not IS_INTERPRETED


@triton.jit
def _by_lane(words: tl.constexpr, like):
    """Word i in lane i of the warp; lanes past the last word repeat it. int32 of the shape of `like`."""
    lane = tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.b32 t, $1; mov.u32 $0, %laneid; }", "=r,r", [like], dtype=tl.int32, is_pure=True, pack=1
    )
    word = tl.full(like.shape, words[0], tl.int32)
    for number in tl.static_range(1, len(words)):
        if words[number] != words[number - 1]:
            word = tl.where(lane >= number, tl.full(like.shape, words[number], tl.int32), word)
    return word


@triton.jit
def _inverse(step_size, BINS: tl.constexpr):
    """The factor from absolute values to their bins. With a step size of 0, all values but 0 are in the last bin."""
    inverse = (BINS.magic - step_size.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.where(step_size > 0, inverse, float("inf"))


# Not pure: the compiler must not move a look-up to where some lanes are idle.
@triton.jit
def _square(x, step_size, inverse, words):
    return tl.inline_asm_elementwise(
        _SQUARE, "=f,f,f,f,r", [x, step_size, inverse, words], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def _index(x, step_size, inverse, words):
    index = tl.inline_asm_elementwise(
        _INDEX, "=r,f,f,f,r", [x, step_size, inverse, words], dtype=tl.int32, is_pure=False, pack=1
    )
    return index.to(tl.uint32, bitcast=True)


@triton.jit
def _nearest_threshold(x, inverse, LEVELS: tl.constexpr):
    """|x|, and the number, fp32, of the threshold nearest to it between evenly spaced levels, 1 to len(LEVELS) - 1. One
    of the two levels beside that threshold is the nearest, however the product is rounded: rounding matters only near
    the middle of two thresholds. With a step size of 0 the number is arbitrary."""
    number = tl.minimum(tl.maximum(tl.abs(x) * inverse, 1.0), len(LEVELS) - 1.0)
    return tl.abs(x), (number + 8388608.0) - 8388608.0  # 2^23: rounded to an integer


@triton.jit
def search_scale(x, index, CODE: tl.constexpr, BINS: tl.constexpr):
    """The scale byte of each row, int32 [lanes], the same in all of a row; see `scalar.search_scale`."""
    ABOVE: tl.constexpr = CODE.search[0]
    BELOW: tl.constexpr = CODE.search[1]
    LARGEST: tl.constexpr = CODE.magnitudes[-1]
    WORDS: tl.constexpr = BINS.levels
    top = tl.abs(x[0])
    for k in tl.static_range(1, 8):
        top = tl.maximum(top, tl.abs(x[k]))
    top = tl.maximum(top, tl.gather(top, index ^ 1, 0))
    top = tl.maximum(top, tl.gather(top, index ^ 2, 0))
    ratio = (top * (1 / LARGEST)).to(tl.float16)
    start = tl.minimum(ratio.to(tl.int16, bitcast=True).to(tl.int32) >> 7, _MAX_SCALE_BYTE)
    words = start
    if _has_bins(BINS):
        words = _by_lane(WORDS, start)
    best = start
    least = tl.full(top.shape, float("inf"), tl.float32)
    for i in range(ABOVE + BELOW + 1):
        candidate = tl.minimum(tl.maximum(start + (ABOVE - i), 0), _MAX_SCALE_BYTE)
        error = _group_error(x, _decode_scale(candidate), index, words, CODE, BINS)
        better = error < least
        best = tl.where(better, candidate, best)
        least = tl.where(better, error, least)
    return best


@triton.jit
def _decode_scale(scale):
    return (scale << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _group_error(x, step_size, index, words, CODE: tl.constexpr, BINS: tl.constexpr):
    """Squared error of coding each row with a step size; the tree of `scalar.group_error`. With bins, only two levels
    are tried instead of all: the least distance is the same."""
    LEVELS: tl.constexpr = CODE.magnitudes
    SPACING: tl.constexpr = _spacing(LEVELS)
    terms = ()
    if SPACING > 0:
        distance = step_size * SPACING
        inverse = 1 / tl.maximum(distance, 2.0**-40)
        for k in tl.static_range(8):
            magnitude, number = _nearest_threshold(x[k], inverse, LEVELS)
            below, above = product(distance, number - 0.5), product(distance, number + 0.5)
            nearest = tl.minimum(tl.abs(magnitude - below), tl.abs(magnitude - above))
            terms += (product(nearest, nearest),)
    elif _has_bins(BINS):
        inverse = _inverse(step_size, BINS)
        for k in tl.static_range(8):
            terms += (_square(x[k], step_size, inverse, words),)
    else:
        for k in tl.static_range(8):
            nearest = tl.abs(tl.abs(x[k]) - step_size * LEVELS[0])
            for level in tl.static_range(1, len(LEVELS)):
                nearest = tl.minimum(nearest, tl.abs(tl.abs(x[k]) - step_size * LEVELS[level]))
            terms += (product(nearest, nearest),)
    even = (terms[0] + terms[4]) + (terms[2] + terms[6])
    odd = (terms[1] + terms[5]) + (terms[3] + terms[7])
    even += tl.gather(even, index ^ 2, 0)
    odd += tl.gather(odd, index ^ 2, 0)
    even += tl.gather(even, index ^ 1, 0)
    odd += tl.gather(odd, index ^ 1, 0)
    return even + odd


@triton.jit
def round_to_half(x):
    """Magnitudes and signs of fp16 numbers, and their scale, as `quantize` and `search_scale` return them."""
    magnitudes, signs = (), ()
    for k in tl.static_range(8):
        bits = x[k].to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        magnitudes += (bits & 0x7FFF,)
        signs += (bits >> 15,)
    return magnitudes, signs, tl.full(x[0].shape, _ONE, tl.int32)


@triton.jit
def quantize(x, scale, CODE: tl.constexpr, BINS: tl.constexpr):
    """Magnitude indices and signs, two tuples of 8 uint32 [lanes]."""
    LEVELS: tl.constexpr = CODE.magnitudes
    WORDS: tl.constexpr = BINS.thresholds
    SPACING: tl.constexpr = _spacing(LEVELS)
    step_size = _decode_scale(scale)
    magnitudes, signs = (), ()
    if SPACING > 0:
        distance = step_size * SPACING
        inverse = 1 / tl.maximum(distance, 2.0**-40)
        for k in tl.static_range(8):
            magnitude, number = _nearest_threshold(x[k], inverse, LEVELS)
            is_above = magnitude > product(distance, number)
            index = number.to(tl.int32) - tl.where(is_above, 0, 1)
            # with a step size of 0 all thresholds are 0
            index = tl.where(step_size > 0, index, tl.where(magnitude > 0, len(LEVELS) - 1, 0))
            magnitudes += (index.to(tl.uint32),)
    elif _has_bins(BINS):
        inverse, words = _inverse(step_size, BINS), _by_lane(WORDS, scale)
        for k in tl.static_range(8):
            magnitudes += (_index(x[k], step_size, inverse, words),)
    else:
        for k in tl.static_range(8):
            index = tl.zeros(scale.shape, tl.uint32)
            for i in tl.static_range(len(LEVELS) - 1):
                index += (tl.abs(x[k]) > step_size * _threshold(LEVELS, i)).to(tl.uint32)
            magnitudes += (index,)
    for k in tl.static_range(8):
        signs += ((x[k] < 0).to(tl.uint32),)
    return magnitudes, signs
