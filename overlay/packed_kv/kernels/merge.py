"""What stands before and after `decode.py`: rotate the query; combine the splits and rotate the output back.

Both rotations are products with the head_dim x head_dim matrix of the rotation, in fp16 with fp32 sums: a query is
rotated once a step, so exactness to the bit, which the codec needs, would buy nothing here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..codecs.codec import Codec
from .decode import LOG2_E


def rotation_matrix(codec: Codec, kv_heads: int, *, inverse: bool = False) -> torch.Tensor:
    """The matrix M with `rotate(x) = x @ M` (or `unrotate`), fp16 [1 or KV heads, head_dim, head_dim]."""
    per_head = codec.order is not None and codec.order.ndim == 2
    identity = torch.eye(codec.head_dim, device=codec.device).unsqueeze(1).repeat(1, kv_heads if per_head else 1, 1)
    matrix = codec.unrotate(identity) if inverse else codec.rotate(identity)
    return matrix.transpose(0, 1).to(torch.float16).contiguous()


@triton.jit(do_not_specialize=["rows"])
def _rotate_query_kernel(
    query, matrix, rotated, rows, token_stride, head_stride, matrix_head_stride, scale,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    token, member = row // QUERY_GROUP, row % QUERY_GROUP
    source = query + token * token_stride + (head * QUERY_GROUP + member) * head_stride
    part, channel = tl.arange(0, 32), tl.arange(0, PADDED_DIM)
    matrix += head.to(tl.int64) * matrix_head_stride
    result = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, 32):
        x = tl.load(source[:, None] + start + part[None, :], mask=(row < rows)[:, None], other=0.0)
        m = tl.load(matrix + (start + part[:, None]) * HEAD_DIM + channel[None, :],
                    mask=(channel < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        result = tl.dot(x.to(tl.float16), m, result)
    target = rotated + (token * KV_HEADS * QUERY_GROUP + head * QUERY_GROUP + member) * HEAD_DIM
    tl.store(target[:, None] + channel[None, :], (result * scale).to(rotated.dtype.element_ty),
             mask=(row < rows)[:, None] & (channel < HEAD_DIM)[None, :])  # fmt: skip


def rotate_query(query: torch.Tensor, matrix: torch.Tensor, rotated: torch.Tensor, scale: float) -> None:
    """Rotate queries and multiply them by `scale` and log2 e.

    Args:
        query: fp16, bf16 or fp32 [tokens, query heads, head_dim], unit stride over channels.
        matrix: `rotation_matrix` of the K codec.
        rotated: fp16 [tokens, KV heads, queries a KV head, head_dim], contiguous; filled.
        scale: attention scale.
    """
    tokens, kv_heads, group, head_dim = rotated.shape
    assert query.stride(-1) == 1, query.stride()
    assert rotated.is_contiguous(), rotated.stride()
    row_count = tokens * group
    _rotate_query_kernel[(triton.cdiv(row_count, 16), kv_heads)](
        query, matrix, rotated, row_count, query.stride(0), query.stride(1),
        0 if len(matrix) == 1 else matrix.stride(0), scale * LOG2_E,
        KV_HEADS=kv_heads, QUERY_GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim), ROWS=16,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_output, partial_stats, matrix, output, token_stride, head_stride, matrix_head_stride, splits,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PART: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, KV heads, query heads of a KV head / HEADS). SPLITS: at least `splits`, a power of two."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_member = tl.program_id(2) * HEADS
    member = first_member + tl.arange(0, HEADS)
    split = tl.arange(0, SPLITS)
    slot = (token * KV_HEADS * QUERY_GROUP + head * QUERY_GROUP + member[None, :]) * splits + split[:, None]
    known = (member < QUERY_GROUP)[None, :] & (split < splits)[:, None]
    part, channel = tl.arange(0, PART), tl.arange(0, PADDED_DIM)
    matrix += head.to(tl.int64) * matrix_head_stride
    result = tl.zeros([16, PADDED_DIM], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, PART):
        # All loads first: the sums have barriers, which no load passes, and a load is most of this kernel's time.
        m = tl.load(matrix + (start + part[:, None]) * HEAD_DIM + channel[None, :],
                    mask=(channel < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        values = tl.load(partial_output + slot[:, :, None] * HEAD_DIM + start + part[None, None, :],
                         mask=known[:, :, None], other=0.0)  # fmt: skip
        maxima = tl.load(partial_stats + slot * 2, mask=known, other=-1.0e30)
        totals = tl.load(partial_stats + slot * 2 + 1, mask=known, other=0.0)
        weights = tl.exp2(maxima - tl.max(maxima, 0)[None, :])
        total = tl.sum(totals * weights, 0)
        combined = tl.sum(values * weights[:, :, None], 0)
        # Rows enter the product at 1 to 2, whatever V's size is, as fp16 below 2^-14 would lose bits.
        exponent = tl.max(tl.abs(combined), 1).to(tl.int32, bitcast=True) & 0x7F800000
        rows = combined * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
        rows = tl.broadcast_to(rows.to(tl.float16)[None, :, :], [16 // HEADS, HEADS, PART])
        size = exponent.to(tl.float32, bitcast=True) * tl.where(total > 0, 1 / total, 0.0)
        size = tl.reshape(tl.broadcast_to(size[None, :], [16 // HEADS, HEADS]), [16])
        result += tl.dot(tl.reshape(rows, [16, PART]), m) * size[:, None]
    row = tl.arange(0, 16)
    target = output + token * token_stride + (head * QUERY_GROUP + first_member + row) * head_stride
    valid = (row < HEADS) & (first_member + row < QUERY_GROUP)
    tl.store(target[:, None] + channel[None, :], result.to(output.dtype.element_ty),
             mask=valid[:, None] & (channel < HEAD_DIM)[None, :])  # fmt: skip


def merge(
    partial_output: torch.Tensor, partial_stats: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor
) -> None:
    """Combine the splits of `decode` and rotate the result back.

    Args:
        partial_output: fp32 [tokens, query heads, up to 128 splits, head_dim].
        partial_stats: fp32 [tokens, query heads, splits, 2].
        matrix: `rotation_matrix(..., inverse=True)` of the V codec, [1 or KV heads, head_dim, head_dim].
        output: fp16, bf16 or fp32 [tokens, KV heads, queries a KV head, head_dim], unit stride over channels and the
            heads evenly strided; filled.
    """
    tokens, kv_heads, group, head_dim = output.shape
    splits = partial_output.shape[2]
    assert group <= 16 and splits <= 128, (group, splits)
    assert output.stride(-1) == 1, output.stride()
    # Many splits mean few programs (`split_count`): then one for each query head.
    padded_splits = next(size for size in (8, 32, 128) if splits <= size)
    heads = min(4, triton.next_power_of_2(group)) if splits <= 8 else 1
    _merge_kernel[(tokens, kv_heads, triton.cdiv(group, heads))](
        partial_output, partial_stats, matrix, output, output.stride(0), output.stride(2),
        0 if len(matrix) == 1 else matrix.stride(0), splits,
        KV_HEADS=kv_heads, QUERY_GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim),
        PART=min(128, head_dim & -head_dim), HEADS=heads, SPLITS=padded_splits,
        num_warps=8 if padded_splits == 128 or head_dim > 128 else 4,
    )  # fmt: skip
