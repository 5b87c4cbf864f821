"""Gather kernel: micro-blocks of packed pages, wherever they lie, as plain K and V side by side.

vLLM's FlashAttention reads them when a prompt continues: a long prefix is dequantised once for all queries of a chunk
(the decode kernel would dequantise it again for every few queries). The reference is `PagedCodec.read`; then
`UnrotateLaunch` turns the vectors back in place, so that they have the same basis as the raw K and V of the chunk's own
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...layout import MICRO_BLOCK, PageLayout
from .. import power_of_2
from ..checks import check_pages, head_stride
from ..kernel_layout import kernel_layout
from .fragments import as_key, as_value
from .launch import Arguments, Launch, StepLaunch
from .means import Means
from .pages import decode_key, decode_value, load_key, load_value
from .scales import scale_byte

ROWS_A_PROGRAM = 64
"""Vectors that a program turns with one load of the matrix."""


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["micro_blocks", "rows"])
def _gather_kernel(
    micro_blocks, rows, count, key, value, cache, block_stride, head_stride,
    KV_HEADS: tl.constexpr, MICRO_BLOCKS_A_BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Decode micro-blocks. One warp decodes both of a pair, 32 tokens.

    Grid: (pairs of micro-blocks, KV heads).

    Args:
        micro_blocks, rows: int32 [count] and [count + 1]; see `gather`. count: int32.
        key, value: fp16 [tokens, KV_HEADS, head_dim], contiguous; filled.
        cache: uint8 [blocks, KV_HEADS, block_size, slot_bytes]; `block_stride` and `head_stride` in int32 words.
        MICRO_BLOCKS_A_BLOCK: block_size / 16. LAYOUT: `KernelLayout`.
    """
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    GROUPS: tl.constexpr = len(LAYOUT.key_vector.groups)
    MICRO_BLOCK_WORDS: tl.constexpr = LAYOUT.micro_block_bytes // 4
    first, head = tl.program_id(0) * 2, tl.program_id(1)
    second = tl.minimum(first + 1, count - 1)
    cache_head = cache.to(tl.pointer_type(tl.int32)) + head.to(tl.int64) * head_stride
    micro_block0, micro_block1 = tl.load(micro_blocks + first), tl.load(micro_blocks + second)
    base0 = cache_head + (micro_block0 // MICRO_BLOCKS_A_BLOCK).to(tl.int64) * block_stride
    base1 = cache_head + (micro_block1 // MICRO_BLOCKS_A_BLOCK).to(tl.int64) * block_stride
    base0 += micro_block0 % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS
    base1 += micro_block1 % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS

    token = tl.arange(0, 32)
    index = first + token // 16
    row = tl.load(rows + index, mask=index < count, other=0) + token % 16
    stored = row < tl.load(rows + index + 1, mask=index < count, other=0)
    target = (row.to(tl.int64) * KV_HEADS + head) * HEAD_DIM
    channel = tl.arange(0, 32)
    lanes = tl.arange(0, 32)[:, None]
    zero = tl.zeros([32, 2], tl.int32)
    words, scales = load_key(base0, base1, lanes, LAYOUT)
    for g in tl.static_range(GROUPS):
        x = _scaled(
            decode_key(words, zero, g, LAYOUT), _key_scales(scales, g, GROUPS), LAYOUT.key_vector.groups[g].factor
        )
        tl.store(key + target[:, None] + g * 32 + channel[None, :], x, mask=stored[:, None])
    words, scales = load_value(base0, base1, lanes, LAYOUT)
    for g in tl.static_range(GROUPS):
        x = _scaled(
            decode_value(words, zero, g, LAYOUT), _value_scales(scales[g]), LAYOUT.value_vector.groups[g].factor
        )
        tl.store(value + target[None, :] + g * 32 + channel[:, None], x, mask=stored[None, :])


@triton.jit
def _scaled(values, scales, factor: tl.constexpr):
    """Exact for K, as a decoded value has 8 bits (docs/formats.md); for V, `factor` includes the gain."""
    return (values.to(tl.float32) * (scales.to(tl.float32) * factor)).to(tl.float16)


@triton.jit
def _key_scales(words, group: tl.constexpr, GROUPS: tl.constexpr):
    """fp16 [32 tokens, 32 channels]: half n3 of a lane's codes has scale n3 of its group."""
    word = words[group // 2] if GROUPS % 4 == 0 else words[group]
    first: tl.constexpr = group % 2 * 2 if GROUPS % 4 == 0 else 0
    halves = tl.join(scale_byte(word, first), scale_byte(word, first + 1))
    return as_key(tl.broadcast_to(tl.reshape(halves, [8, 4, 2, 2, 1, 1, 1]), [8, 4, 2, 2, 2, 2, 2]))


@triton.jit
def _value_scales(word):
    """fp16 [32 channels, 32 tokens]: the low bits of a lane's code, n3 and n0, are its scale's."""
    low = tl.join(scale_byte(word, 0), scale_byte(word, 2))
    high = tl.join(scale_byte(word, 1), scale_byte(word, 3))
    scales = tl.reshape(tl.join(low, high), [8, 4, 2, 1, 1, 2, 2])
    return as_value(tl.broadcast_to(scales, [8, 4, 2, 2, 2, 2, 2]))


class GatherLaunch(Launch):
    """Dequantises micro-blocks of a layer's `cache`, still rotated: the values of `PagedCodec.read` as fp16, which
    holds K's values exactly. Called without tensors."""

    def __init__(self, page: PageLayout, cache: torch.Tensor, kv_heads: int) -> None:
        check_pages(cache)
        super().__init__(
            _gather_kernel,
            Arguments(cache, cache.stride(0) // 4, cache.stride(1) // 4),
            dict(
                KV_HEADS=kv_heads, MICRO_BLOCKS_A_BLOCK=cache.shape[2] // MICRO_BLOCK, LAYOUT=kernel_layout(page)
            ),
            num_warps=1, num_stages=1,
        )  # fmt: skip

    @staticmethod
    def step(micro_blocks: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> StepLaunch:
        """The first `rows[i + 1] - rows[i]` (at most 16) tokens of `micro_blocks[i]` go to rows `rows[i]` and on of
        `key` and `value`."""
        assert key.is_contiguous() and value.is_contiguous() and key.dtype == value.dtype == torch.float16, key.dtype
        count = len(micro_blocks)
        return StepLaunch((-(-count // 2), key.shape[1], 1), Arguments(micro_blocks, rows, count, key, value))


class UnrotateConstants(NamedTuple):
    """Constants that `_unrotate_kernel` is compiled for: KV heads; channels of a head, and the same padded to a power
    of 2; rows of a program; the means' blocks of positions (0: there are none); and positions of a block."""

    kv_heads: int
    head_dim: int
    padded_dim: int
    rows: int
    mean_blocks: int
    mean_block_tokens: int


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions"])
def _unrotate_kernel(
    vectors, positions, result, rows, matrix, means, spectrum, matrix_head_stride, means_head_stride,
    UNROTATE: tl.constexpr,
):  # fmt: skip
    """Rotate vectors back and add their means. A program overwrites only what it alone has read.

    Grid: (rows / rows of a program, KV heads).

    Args:
        vectors: fp16 [rows, kv_heads, head_dim], contiguous; rows: int32.
        positions: int32 [rows]; read where `mean_blocks` is not 0.
        result: fp16 or bf16 [rows, kv_heads, head_dim], the memory of `vectors`.
        matrix: fp16 [1 or kv_heads, head_dim, head_dim], with `matrix_head_stride` (int32).
        means: fp32 [1 or kv_heads, 3, head_dim] of `Means.rows`, with `means_head_stride` (int32).
        spectrum: fp32 [mean_blocks, 2, head_dim]; not read where `mean_block_tokens` is 0.
        UNROTATE: `UnrotateConstants`.
    """
    KV_HEADS: tl.constexpr = UNROTATE.kv_heads
    HEAD_DIM: tl.constexpr = UNROTATE.head_dim
    PADDED_DIM: tl.constexpr = UNROTATE.padded_dim
    ROWS: tl.constexpr = UNROTATE.rows
    MEAN_BLOCKS: tl.constexpr = UNROTATE.mean_blocks
    MEAN_BLOCK_TOKENS: tl.constexpr = UNROTATE.mean_block_tokens
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    inner, channel = tl.arange(0, 32), tl.arange(0, PADDED_DIM)
    place = (row * KV_HEADS + head) * HEAD_DIM
    matrix += head * matrix_head_stride
    x = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    if MEAN_BLOCKS > 0:
        there = channel < HEAD_DIM
        means += head * means_head_stride + channel
        mean = tl.load(means, mask=there, other=0.0)[None, :]
        of_first = tl.load(means + 2 * HEAD_DIM, mask=there, other=0.0)[None, :]
        position = tl.load(positions + row, mask=row < rows, other=0)
        if MEAN_BLOCK_TOKENS > 0:
            partner = tl.load(means + HEAD_DIM, mask=there, other=0.0)[None, :]
            block = tl.minimum(position // MEAN_BLOCK_TOKENS, MEAN_BLOCKS - 1)
            turn = spectrum + block[:, None] * (2 * HEAD_DIM) + channel[None, :]
            mean = mean * tl.load(turn, mask=there[None, :], other=0.0)
            mean += partner * tl.load(turn + HEAD_DIM, mask=there[None, :], other=0.0)
        x += tl.where(position[:, None] == 0, of_first, mean)  # before the products: they take the most registers
    for start in tl.static_range(0, HEAD_DIM, 32):
        y = tl.load(vectors + place[:, None] + start + inner[None, :], mask=(row < rows)[:, None], other=0.0)
        m = tl.load(matrix + (start + inner[:, None]) * HEAD_DIM + channel[None, :],
                    mask=(channel < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        x = tl.dot(y, m, x)
    tl.store(result + place[:, None] + channel[None, :], x.to(result.dtype.element_ty),
             mask=(row < rows)[:, None] & (channel < HEAD_DIM)[None, :])  # fmt: skip


class UnrotateLaunch(Launch):
    """Turns what `GatherLaunch` wrote back into the model's basis, in place, by a layer's `matrix` of K or V
    (`rotation_matrix`), and adds its `means`. Called without tensors."""

    def __init__(self, matrix: torch.Tensor, kv_heads: int, head_dim: int, means: Means | None) -> None:
        rows, spectrum = (matrix, matrix) if means is None else (means.rows, means.spectrum)
        assert rows.is_contiguous() and spectrum.is_contiguous(), (rows.stride(), spectrum.stride())
        blocks, block_tokens = (0, 0) if means is None else (means.blocks, means.block_tokens)
        constants = UnrotateConstants(kv_heads, head_dim, power_of_2(head_dim), ROWS_A_PROGRAM, blocks, block_tokens)
        fixed = Arguments(matrix, rows, spectrum, head_stride(matrix), head_stride(rows))
        super().__init__(_unrotate_kernel, fixed, dict(UNROTATE=constants), num_warps=4)

    @staticmethod
    def step(vectors: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor | None = None) -> StepLaunch:
        """`vectors` are overwritten as `dtype`, fp16 or bf16; `positions` are needed with means."""
        assert vectors.is_contiguous(), vectors.stride()
        rows, kv_heads, _ = vectors.shape
        if positions is None:
            positions = vectors.view(torch.int32)  # not read
        else:
            assert positions.shape == (rows,) and positions.dtype == torch.int32, (positions.shape, positions.dtype)
        arguments = Arguments(vectors, positions, vectors.view(dtype), rows)
        return StepLaunch((-(-rows // ROWS_A_PROGRAM), kv_heads, 1), arguments)
