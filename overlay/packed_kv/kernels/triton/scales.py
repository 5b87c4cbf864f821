"""Scales, applied where the products are fewest: K's to the scores, V's to the weights (decode.py), 8 to 32 query
columns at a time.

As in `fragments.py`, lane i of a tensor is lane i of the warp, and all happens in its registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fragments import IS_INTERPRETED, halves, opaque


@triton.jit
def scale_byte(word, index: tl.constexpr):
    """Byte `index` of `word`, e5m3, as fp16."""
    return ((word >> (8 * index) & 0xFF) << 7).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def key_scales(scale_words, group: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The scales of K's tokens for `group`, fp32 [32 tokens, COLUMNS]. scale_words: a tuple of int32 [32, 2]."""
    if GROUPS % 4 == 0:
        low, high = _two_scales(scale_words[group // 2], group % 2)
    else:
        low, high = _two_scales(scale_words[group], 0)
    return over_scores(low, high, COLUMNS)


@triton.jit
def _two_scales(word, high: tl.constexpr):
    """Bytes 0 and 1 (2 and 3 if `high`) of `word` as fp32."""
    if IS_INTERPRETED:
        result = (scale_byte(word, 2 * high).to(tl.float32), scale_byte(word, 2 * high + 1).to(tl.float32))
    else:
        selector: tl.constexpr = 0x4342 if high else 0x4140
        result = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, $3; shl.b32 t, t, 7;
            mov.b32 {l, h}, t; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }""",
            "=f,=f,r,r", [word, selector], dtype=(tl.float32,) * 2, is_pure=True, pack=1,
        )  # fmt: skip
    return result


@triton.jit
def over_scores(low, high, COLUMNS: tl.constexpr):
    """[32 lanes, 2 micro-blocks], of tokens n3 = 0 and 1, -> [32 tokens, COLUMNS], as the scores lie."""
    x = tl.reshape(tl.join(low, high), [8, 1, 4, 1, 2, 2])  # g, 8 columns, t, column 0 or 1 of t's, micro-block, n3
    x = tl.broadcast_to(x, [8, COLUMNS // 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(x, (4, 5, 0, 1, 2, 3)), [32, COLUMNS])


@triton.jit
def headroom(scale_words, COLUMNS: tl.constexpr):
    """log2 of the largest factor of weights up to 1 with which products with V's scales stay finite in fp16.

    Without this factor, products below 2^-14 would lose bits: with a V of 1e-4, most of them. 15 where every scale is
    below 2, else 0, as scales go up to 40960.

    scale_words: a tuple of int32 [32, 2]. Returns fp32 [32 tokens, COLUMNS], the same everywhere.
    """
    words = scale_words[0]
    for g in tl.static_range(1, len(scale_words)):
        words = words | scale_words[g]
    words0, words1 = tl.split(words)
    words = words0 | words1
    if IS_INTERPRETED:
        large = tl.max((words & -0x7F7F7F80 != 0).to(tl.int32), 0)
        room = tl.full([32], 15.0, tl.float32) * (1 - large)
    else:
        room = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .pred p; and.b32 t, $1, 0x80808080; setp.ne.u32 p, t, 0;
            vote.sync.any.pred p, p, 0xffffffff; selp.f32 $0, 0f00000000, 0f41700000, p; }""",
            "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    room = tl.broadcast_to(room[:, None], [32, 2])
    return over_scores(room, room, COLUMNS)


@triton.jit
def online_softmax_update(scores, unit, maximum, total, value_scales):
    """Take a tile of scores into an online softmax.

    Args:
        scores: fp32 [32 tokens, columns]; times `unit` they are exponents of 2.
        maximum, total: fp32 [columns] and [8, columns], before this tile: the number subtracted from the exponents, and
            each lane's sums of its own tokens' weights, so that no tile needs a sum over lanes.
        value_scales: words with the scales of V, a tuple of int32 [32, 2]; see `headroom`.

    Returns:
        weights fp32 [32, columns]; the factor of earlier results, fp32 [columns]; the new maximum and total.
    """
    COLUMNS: tl.constexpr = scores.shape[1]
    new_maximum = tl.maximum(maximum, tl.max(scores * unit - headroom(value_scales, COLUMNS), 0))
    weights = tl.exp2(scores * unit - new_maximum[None, :])
    shrink = tl.exp2(maximum - new_maximum)
    return weights, shrink, new_maximum, total * shrink[None, :] + tl.sum(tl.reshape(weights, [4, 8, COLUMNS]), 0)


@triton.jit
def transpose_weights(weights):
    """fp32 [32 tokens, columns] -> for n3 = 0 and 1: int32 [32 lanes, columns / 8, 2 micro-blocks], two fp16 of n0 = 0
    and 1.

    Reorders an accumulator as a right operand: lane (g, t) gets column g of each 8, and of it the tokens n2 n1 = t.
    """
    EIGHTS: tl.constexpr = weights.shape[1] // 8
    if IS_INTERPRETED:
        bits = weights.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        x = tl.permute(tl.reshape(bits, [2, 2, 4, 2, EIGHTS, 8]), (5, 2, 4, 0, 1, 3))
        low, high = tl.split(tl.reshape(x, [32, EIGHTS, 2, 2, 2]))
        result = low & 0xFFFF | high << 16
    else:
        x = tl.permute(tl.reshape(weights, [2, 2, 8, EIGHTS, 4, 2]), (2, 4, 3, 0, 1, 5))
        low, high = tl.split(tl.reshape(x, [32, EIGHTS, 2, 2, 2]))
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.f16x2.f32 t, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, t; }",
            "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.split(result)


@triton.jit
def scale_weights(pair0, pair1, scale_word):
    """Weights of `transpose_weights` times V's scales, fp16 [32 tokens, columns]. scale_word: int32 [32, 2]."""
    EIGHTS: tl.constexpr = pair0.shape[1]
    scale_word = tl.broadcast_to(scale_word[:, None, :], [32, EIGHTS, 2])
    if IS_INTERPRETED:
        w00 = pair0.to(tl.int16).to(tl.float16, bitcast=True) * scale_byte(scale_word, 0)
        w01 = (pair0 >> 16).to(tl.int16).to(tl.float16, bitcast=True) * scale_byte(scale_word, 1)
        w10 = pair1.to(tl.int16).to(tl.float16, bitcast=True) * scale_byte(scale_word, 2)
        w11 = (pair1 >> 16).to(tl.int16).to(tl.float16, bitcast=True) * scale_byte(scale_word, 3)
        scaled = tl.join(tl.join(w00, w10), tl.join(w01, w11))
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x4140; shl.b32 a, a, 7; mul.rn.f16x2 $0, a, $2;
            prmt.b32 b, $4, 0, 0x4342; shl.b32 b, b, 7; mul.rn.f16x2 $1, b, $3; }""",
            "=r,=r,r,r,r", [pair0, pair1, scale_word], dtype=(tl.int32,) * 2, is_pure=True, pack=1,
        )  # fmt: skip
        scaled = halves(tl.join(low, high))
    x = tl.reshape(scaled, [8, 4, EIGHTS, 2, 2, 2])  # column of 8, t, 8 columns, micro-block, n3, n0
    return opaque(tl.reshape(tl.permute(x, (3, 4, 1, 5, 2, 0)), [32, 8 * EIGHTS]))
