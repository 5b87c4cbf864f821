"""Gather kernel: micro-blocks of packed pages, wherever they lie, as plain K and V side by side.

What vLLM's FlashAttention reads when a prompt continues: a long prefix is dequantised once for all queries of a chunk
(the decode kernel would do it again for every few of them). The reference is `PagedCodec.read`; then `unrotate` turns
the vectors back in place, so that they meet the raw K and V of the chunk's own tokens in one basis.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import MICRO_BLOCK, PageLayout
from . import power_of_2
from .decode import _decode_group, _load_key, _load_value, kernel_layout
from .fragments import OVER_UNIT, as_key, as_value
from .scales import scale_byte

ROWS_A_PROGRAM = 64
"""Vectors that `unrotate` turns with one load of the matrix."""


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def _gather_kernel(
    cache, micro_blocks, rows, count, key, value, block_stride, head_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MICRO_BLOCKS_A_BLOCK: tl.constexpr,
    MICRO_BLOCK_WORDS: tl.constexpr, GROUP_BITS: tl.constexpr, FIRST_WORD: tl.constexpr, SIGN_WORD: tl.constexpr,
    PARITY: tl.constexpr, CHUNKS: tl.constexpr, HALF_OFFSET: tl.constexpr, HAS_HALF: tl.constexpr,
    VALUE_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr,
):  # fmt: skip
    """Grid: (pairs of micro-blocks, KV heads). One warp decodes both of a pair, 32 tokens."""
    GROUPS: tl.constexpr = HEAD_DIM // 32
    first, head = tl.program_id(0) * 2, tl.program_id(1)
    second = tl.minimum(first + 1, count - 1)
    cache_head = cache.to(tl.pointer_type(tl.int32)) + head.to(tl.int64) * head_stride
    place0, place1 = tl.load(micro_blocks + first), tl.load(micro_blocks + second)
    base0 = cache_head + (place0 // MICRO_BLOCKS_A_BLOCK).to(tl.int64) * block_stride
    base1 = cache_head + (place1 // MICRO_BLOCKS_A_BLOCK).to(tl.int64) * block_stride
    base0 += place0 % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS
    base1 += place1 % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS

    token = tl.arange(0, 32)
    index = first + token // 16
    row = tl.load(rows + index, mask=index < count, other=0) + token % 16
    stored = row < tl.load(rows + index + 1, mask=index < count, other=0)
    target = (row.to(tl.int64) * KV_HEADS + head) * HEAD_DIM
    channel = tl.arange(0, 32)
    lanes = tl.arange(0, 32)[:, None]
    zero = tl.zeros([32, 2], tl.int32)
    words, scales = _load_key(base0, base1, lanes, CHUNKS, HALF_OFFSET, HAS_HALF, GROUPS, KEY_SCALES)
    for g in tl.static_range(GROUPS):
        x = _decode_group(words, zero, g, True, GROUP_BITS, FIRST_WORD, SIGN_WORD, PARITY)
        x = _scaled(x, _key_scales(scales, g, GROUPS))
        tl.store(key + target[:, None] + g * 32 + channel[None, :], x, mask=stored[:, None])
    words, scales = _load_value(base0, base1, lanes, CHUNKS, HALF_OFFSET, HAS_HALF, GROUPS, VALUE_CODES, VALUE_SCALES)
    for g in tl.static_range(GROUPS):
        x = _decode_group(words, zero, g, False, GROUP_BITS, FIRST_WORD, SIGN_WORD, PARITY)
        x = _scaled(x, _value_scales(scales[g]))
        tl.store(value + target[None, :] + g * 32 + channel[:, None], x, mask=stored[None, :])


@triton.jit
def _scaled(values, scales):
    """Exact: a decoded value has 8 bits (docs/formats.md)."""
    return (values.to(tl.float32) * (scales.to(tl.float32) * OVER_UNIT)).to(tl.float16)


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


def gather(
    page: PageLayout,
    cache: torch.Tensor,
    micro_blocks: torch.Tensor,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Dequantise micro-blocks, still rotated: the values of `PagedCodec.read`, which fp16 holds exactly.

    Args:
        page: layout of the cache.
        cache: uint8 [blocks, KV heads, block_size, slot_bytes], its last two dimensions contiguous, 16-byte aligned.
        micro_blocks: int32 [n], each (block * block_size + offset) / 16.
        rows: int32 [n + 1]; the first rows[i + 1] - rows[i] (at most 16) tokens of micro-block i go to rows[i] and on.
        key, value: fp16 [rows, KV heads, head_dim], contiguous; filled.
    """
    _, kv_heads, head_dim = key.shape
    count = len(micro_blocks)
    assert key.is_contiguous() and value.is_contiguous() and key.dtype == value.dtype == torch.float16, key.dtype
    assert cache.stride()[2:] == (cache.shape[3], 1), cache.stride()
    assert not any(stride % 16 for stride in cache.stride()[:2]), cache.stride()
    _gather_kernel[(-(-count // 2), kv_heads)](
        cache, micro_blocks, rows, count, key, value, cache.stride(0) // 4, cache.stride(1) // 4,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, MICRO_BLOCKS_A_BLOCK=cache.shape[2] // MICRO_BLOCK,
        **kernel_layout(page), num_warps=1, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _unrotate_kernel(
    vectors, matrix, means, first, result, rows, matrix_head_stride, means_head_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
    CENTRED: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid: (rows / ROWS, KV heads). A program overwrites only what it alone has read."""
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
    rows, kv_heads, head_dim = vectors.shape
    assert vectors.is_contiguous(), vectors.stride()
    assert means is None or means.is_contiguous(), means.stride()
    assert first is None or (len(first) == rows and first.dtype == torch.bool), (first.shape, rows)
    result = vectors.view(dtype)
    if means is None:
        means, first = matrix, None  # not read
    matrix_stride, means_stride = (0 if len(x) == 1 else x.stride(0) for x in (matrix, means))
    _unrotate_kernel[(-(-rows // ROWS_A_PROGRAM), kv_heads)](
        vectors, matrix, means, matrix if first is None else first.view(torch.uint8), result, rows,
        matrix_stride, means_stride,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, PADDED_DIM=power_of_2(head_dim), ROWS=ROWS_A_PROGRAM,
        CENTRED=means is not matrix, HAS_FIRST=first is not None, num_warps=4,
    )  # fmt: skip
    return result
