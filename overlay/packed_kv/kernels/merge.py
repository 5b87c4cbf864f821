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


@triton.jit
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


@triton.jit
def _merge_kernel(
    partial_output, partial_stats, matrix, output, token_stride, head_stride, matrix_head_stride,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member = tl.arange(0, 16)
    valid = member < QUERY_GROUP
    query_head = head * QUERY_GROUP + member
    first_slot = (token * KV_HEADS * QUERY_GROUP + query_head) * SPLITS
    every = tl.arange(0, PADDED_SPLITS)
    stats = partial_stats + (first_slot[:, None] + every[None, :]) * 2
    known = valid[:, None] & (every < SPLITS)[None, :]
    maxima = tl.load(stats, mask=known, other=-1.0e30)
    totals = tl.load(stats + 1, mask=known, other=0.0)
    maximum = tl.max(maxima, 1)
    total = tl.sum(totals * tl.exp2(maxima - maximum[:, None]), 1)
    norm = tl.where(total > 0, 1 / total, 0.0)

    part, channel = tl.arange(0, 32), tl.arange(0, PADDED_DIM)
    matrix += head.to(tl.int64) * matrix_head_stride
    result = tl.zeros([16, PADDED_DIM], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, 32):
        combined = tl.zeros([16, 32], tl.float32)
        for split in range(0, SPLITS, SPLITS_AT_ONCE):
            some = split + tl.arange(0, SPLITS_AT_ONCE)
            loaded = valid[:, None] & (some < SPLITS)[None, :]
            slot = first_slot[:, None] + some[None, :]
            weight = tl.exp2(tl.load(partial_stats + slot * 2, mask=loaded, other=-1.0e30) - maximum[:, None])
            values = tl.load(partial_output + slot[:, :, None] * HEAD_DIM + start + part[None, None, :],
                             mask=loaded[:, :, None], other=0.0)  # fmt: skip
            combined += tl.sum(values * weight[:, :, None], 1)
        m = tl.load(matrix + (start + part[:, None]) * HEAD_DIM + channel[None, :],
                    mask=(channel < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        result = tl.dot((combined * norm[:, None]).to(tl.float16), m, result)
    target = output + token * token_stride + query_head * head_stride
    tl.store(target[:, None] + channel[None, :], result.to(output.dtype.element_ty),
             mask=valid[:, None] & (channel < HEAD_DIM)[None, :])  # fmt: skip


def merge(
    partial_output: torch.Tensor, partial_stats: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor
) -> None:
    """Combine the splits of `decode` and rotate the result back.

    Args:
        partial_output: fp32 [tokens, query heads, splits, head_dim].
        partial_stats: fp32 [tokens, query heads, splits, 2].
        matrix: `rotation_matrix(..., inverse=True)` of the V codec, [1 or KV heads, head_dim, head_dim].
        output: fp16, bf16 or fp32 [tokens, KV heads, queries a KV head, head_dim], unit stride over channels and the
            heads evenly strided; filled.
    """
    tokens, kv_heads, group, head_dim = output.shape
    splits = partial_output.shape[2]
    assert group <= 16, group
    assert output.stride(-1) == 1, output.stride()
    _merge_kernel[(tokens, kv_heads)](
        partial_output, partial_stats, matrix, output, output.stride(0), output.stride(2),
        0 if len(matrix) == 1 else matrix.stride(0),
        KV_HEADS=kv_heads, QUERY_GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim),
        SPLITS=splits, PADDED_SPLITS=triton.next_power_of_2(splits),
        SPLITS_AT_ONCE=min(8, triton.next_power_of_2(splits)), num_warps=4,
    )  # fmt: skip
