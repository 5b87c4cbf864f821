"""Gather kernel: micro-blocks of packed pages, wherever they lie, as plain K and V side by side.

What vLLM's FlashAttention reads when a prompt continues: a long prefix is dequantised once for all queries of a chunk
(the decode kernel would do it again for every few of them). The reference is `PagedCodec.read`; then `unrotate` turns
the vectors back in place, so that they meet the raw K and V of the chunk's own tokens in one basis.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...layout import MICRO_BLOCK, PageLayout
from .. import power_of_2
from ..kernel_layout import kernel_layout
from .fragments import as_key, as_value
from .launch import Arguments, Launch, head_stride
from .pages import decode_key, decode_value, load_key, load_value
from .scales import scale_byte

ROWS_A_PROGRAM = 64
"""Vectors that `unrotate` turns with one load of the matrix."""


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["micro_blocks", "rows"])
def _gather_kernel(
    micro_blocks, rows, count, key, value, cache, block_stride, head_stride,
    KV_HEADS: tl.constexpr, MICRO_BLOCKS_A_BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Grid: (pairs of micro-blocks, KV heads). One warp decodes both of a pair, 32 tokens.

    int32 `micro_blocks` [count] and `rows` [count + 1]; fp16 `key` and `value` [tokens, KV_HEADS, HEAD_DIM]; `cache`
    uint8 [blocks, KV_HEADS, block_size, slot_bytes], its strides in int32 words."""
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    GROUPS: tl.constexpr = len(LAYOUT.groups)
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
        x = _scaled(decode_key(words, zero, g, LAYOUT), _key_scales(scales, g, GROUPS), LAYOUT.groups[g].over_unit)
        tl.store(key + target[:, None] + g * 32 + channel[None, :], x, mask=stored[:, None])
    words, scales = load_value(base0, base1, lanes, LAYOUT)
    for g in tl.static_range(GROUPS):
        x = _scaled(decode_value(words, zero, g, LAYOUT), _value_scales(scales[g]), LAYOUT.groups[g].over_value_unit)
        tl.store(value + target[None, :] + g * 32 + channel[:, None], x, mask=stored[None, :])


@triton.jit
def _scaled(values, scales, over_unit: tl.constexpr):
    """Exact for K, as a decoded value has 8 bits (docs/formats.md); of V, `over_unit` has the gain."""
    return (values.to(tl.float32) * (scales.to(tl.float32) * over_unit)).to(tl.float16)


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


def bind_gather(page: PageLayout, cache: torch.Tensor, kv_heads: int) -> Launch:
    """The kernel bound to `cache`, uint8 [blocks, KV heads, block_size, slot_bytes], 16-byte aligned."""
    assert cache.stride()[2:] == (cache.shape[3], 1), cache.stride()
    assert not any(stride % 16 for stride in cache.stride()[:2]), cache.stride()
    return Launch(
        _gather_kernel,
        Arguments(cache, cache.stride(0) // 4, cache.stride(1) // 4),
        dict(
            KV_HEADS=kv_heads, MICRO_BLOCKS_A_BLOCK=cache.shape[2] // MICRO_BLOCK, LAYOUT=kernel_layout(page)
        ),
        num_warps=1, num_stages=1,
    )  # fmt: skip


def gather_arguments(
    micro_blocks: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Arguments:
    """A step's arguments: int32 `micro_blocks` [n] and `rows` [n + 1], `key` and `value` fp16 [rows, KV heads,
    head_dim]."""
    assert key.is_contiguous() and value.is_contiguous() and key.dtype == value.dtype == torch.float16, key.dtype
    return Arguments(micro_blocks, rows, len(micro_blocks), key, value)


def gather_grid(micro_blocks: torch.Tensor, kv_heads: int) -> tuple[int, int, int]:
    return -(-len(micro_blocks) // 2), kv_heads, 1


def gather(
    page: PageLayout,
    cache: torch.Tensor,
    micro_blocks: torch.Tensor,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Dequantise micro-blocks, still rotated: the values of `PagedCodec.read` as fp16, which holds those of K exactly.

    Args:
        page: layout of the cache.
        cache: uint8 [blocks, KV heads, block_size, slot_bytes], its last two dimensions contiguous, 16-byte aligned.
        micro_blocks: int32 [n], each (block * block_size + offset) / 16.
        rows: int32 [n + 1]; the first rows[i + 1] - rows[i] (at most 16) tokens of micro-block i go to rows[i] and on.
        key, value: fp16 [rows, KV heads, head_dim], contiguous; filled.
    """
    kv_heads = key.shape[1]
    launch = bind_gather(page, cache, kv_heads)
    launch(gather_grid(micro_blocks, kv_heads), (), gather_arguments(micro_blocks, rows, key, value))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["first"])
def _unrotate_kernel(
    vectors, first, result, rows, matrix, means, matrix_head_stride, means_head_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
    CENTRED: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid: (rows / ROWS, KV heads). A program overwrites only what it alone has read.

    `vectors` fp16 and, in the same memory, `result` fp16 or bf16 [rows, KV_HEADS, HEAD_DIM]; `first` uint8 [rows];
    `matrix` fp16 [1 or KV_HEADS, HEAD_DIM, HEAD_DIM]; `means` fp32 [1 or KV_HEADS, 2, HEAD_DIM]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    part, channel = tl.arange(0, 32), tl.arange(0, PADDED_DIM)
    place = (row * KV_HEADS + head) * HEAD_DIM
    matrix += head * matrix_head_stride
    x = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, 32):
        y = tl.load(vectors + place[:, None] + start + part[None, :], mask=(row < rows)[:, None], other=0.0)
        m = tl.load(matrix + (start + part[:, None]) * HEAD_DIM + channel[None, :],
                    mask=(channel < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        x = tl.dot(y, m, x)
    if CENTRED:
        means += head * means_head_stride
        x += tl.load(means + channel, mask=channel < HEAD_DIM, other=0.0)[None, :]
    if HAS_FIRST:
        further = tl.load(means + HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0)
        is_first = tl.load(first + row, mask=row < rows, other=0) != 0
        x += tl.where(is_first[:, None], further[None, :], 0.0)
    tl.store(result + place[:, None] + channel[None, :], x.to(result.dtype.element_ty),
             mask=(row < rows)[:, None] & (channel < HEAD_DIM)[None, :])  # fmt: skip


def bind_unrotate(
    matrix: torch.Tensor, kv_heads: int, head_dim: int, means: torch.Tensor | None, has_first: bool
) -> Launch:
    """The kernel bound to one layer's `matrix` of K or V, fp16 [1 or KV heads, head_dim, head_dim], and `means`, fp32
    [1 or KV heads, 2, head_dim]. `has_first`: the step's arguments say which tokens are the first."""
    assert means is None or means.is_contiguous(), means.stride()
    means_stride = 0 if means is None else head_stride(means)
    return Launch(
        _unrotate_kernel,
        Arguments(matrix, matrix if means is None else means, head_stride(matrix), means_stride),
        dict(
            KV_HEADS=kv_heads, HEAD_DIM=head_dim, PADDED_DIM=power_of_2(head_dim), ROWS=ROWS_A_PROGRAM,
            CENTRED=means is not None, HAS_FIRST=has_first and means is not None,
        ),
        num_warps=4,
    )  # fmt: skip


def unrotate_arguments(vectors: torch.Tensor, dtype: torch.dtype, first: torch.Tensor | None) -> Arguments:
    """A step's arguments: `vectors` fp16 [rows, KV heads, head_dim], contiguous, overwritten as `dtype` (fp16 or bf16);
    `first` bool [rows]."""
    assert vectors.is_contiguous(), vectors.stride()
    assert first is None or (len(first) == len(vectors) and first.dtype == torch.bool), (first.shape, vectors.shape)
    flags = vectors.view(torch.uint8) if first is None else first.view(torch.uint8)
    return Arguments(vectors, flags, vectors.view(dtype), len(vectors))


def unrotate_grid(vectors: torch.Tensor) -> tuple[int, int, int]:
    return -(-len(vectors) // ROWS_A_PROGRAM), vectors.shape[1], 1


def unrotate(
    vectors: torch.Tensor,
    matrix: torch.Tensor,
    dtype: torch.dtype,
    means: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn what `gather` wrote back into the model's basis, in place.

    Args:
        vectors: fp16 [rows, KV heads, head_dim], contiguous; overwritten.
        matrix: `rotation_matrix(..., inverse=True)` of the codec.
        dtype: fp16 or bf16.
        means: what to add to every row, and what to add beyond that to rows of first tokens: fp32 [1 or KV heads, 2,
            head_dim], contiguous, `ChannelTransform.mean_rows`; None without means.
        first: with `means`: bool [rows], which rows are the first token of a sequence; None: none is.

    Returns:
        the memory of `vectors` as `dtype`, [rows, KV heads, head_dim].
    """
    _, kv_heads, head_dim = vectors.shape
    launch = bind_unrotate(matrix, kv_heads, head_dim, means, first is not None)
    launch(unrotate_grid(vectors), (), unrotate_arguments(vectors, dtype, first))
    return vectors.view(dtype)
