"""What stands before `decode.py`: rotate the query.

It is a product with the head_dim x head_dim matrix of the rotation, in fp16 with fp32 sums: a query is rotated once a
step, so exactness to the bit, which the codec needs, would buy nothing here. Where the layer stores tokens too,
`store.py` does both in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...codecs.codec import Codec
from .. import power_of_2
from ..units import LOG2_E
from .launch import Arguments, Launch, head_stride

QUERY_ROWS = 16
"""Of a program: the least that the tensor core takes. A row is a query head of a token."""


def rotation_matrix(codec: Codec, kv_heads: int, *, inverse: bool = False) -> torch.Tensor:
    """The matrix M with x @ M = `rotate(x / scale)`, or, inverse, `unrotate(x) / scale`, with the scale of the codec's
    channels: fp16 [1 or KV heads, stored_dim, stored_dim]; a head's padding has rows and columns, too."""
    per_head = codec.heads is not None
    identity = torch.eye(codec.stored_dim, device=codec.device).unsqueeze(1).repeat(1, kv_heads if per_head else 1, 1)
    unscale = codec.transform.unscale
    matrix = unscale(codec.unrotate(identity)) if inverse else codec.rotate(unscale(identity))
    return matrix.transpose(0, 1).to(torch.float16).contiguous()


@dataclass(frozen=True)
class QueryRotation:
    """Of a layer: `matrix` fp16 [1 or KV heads, stored_dim, stored_dim], attention `scale`, and `bias_rows` fp32 [1 or
    KV heads, 2, stored_dim] or None."""

    matrix: torch.Tensor
    scale: float
    bias_rows: torch.Tensor | None = None

    def fixed(self, query: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
        """A kernel's arguments from the matrix on, for queries of these strides."""
        assert query.stride(2) == 1, query.stride()
        rows = self.matrix if self.bias_rows is None else self.bias_rows
        assert rows.is_contiguous(), rows.stride()
        return (
            self.matrix, query.stride(0), query.stride(1), head_stride(self.matrix), self.scale * LOG2_E, rows,
            head_stride(rows),
        )  # fmt: skip


@triton.jit
def rotate_rows(
    query, rotated, rows, block, head, first_channel, matrix, token_stride, head_stride, matrix_head_stride, scale,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, QUERY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """CHANNELS channels, from `first_channel` on, of a block of ROWS rows of a KV head."""
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token, member = row // QUERY_GROUP, head * QUERY_GROUP + row % QUERY_GROUP
    source = query + token * token_stride + member * head_stride
    part, channel = tl.arange(0, 32), first_channel + tl.arange(0, CHANNELS)
    matrix += head.to(tl.int64) * matrix_head_stride
    result = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, 32):
        known = (row < rows)[:, None] & (start + part < QUERY_DIM)[None, :]
        x = tl.load(source[:, None] + start + part[None, :], mask=known, other=0.0)
        m = tl.load(matrix + (start + part[:, None]) * HEAD_DIM + channel[None, :],
                    mask=(channel < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        result = tl.dot(x.to(tl.float16), m, result)
    target = rotated + (token * KV_HEADS * QUERY_GROUP + member) * HEAD_DIM
    tl.store(target[:, None] + channel[None, :], (result * scale).to(rotated.dtype.element_ty),
             mask=(row < rows)[:, None] & (channel < HEAD_DIM)[None, :])  # fmt: skip


@triton.jit
def bias_of_rows(
    query, bias, rows, block, head, token_stride, head_stride, scale, bias_rows, bias_rows_head_stride,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, QUERY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The two biases of such a block; in fp32: a mean may be large, and in a soft cap its product counts as it is."""
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token, member = row // QUERY_GROUP, head * QUERY_GROUP + row % QUERY_GROUP
    source = query + token * token_stride + member * head_stride
    bias_rows += head.to(tl.int64) * bias_rows_head_stride
    part = tl.arange(0, 32)
    first, second = tl.zeros([ROWS, 32], tl.float32), tl.zeros([ROWS, 32], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, 32):
        known = (row < rows)[:, None] & (start + part < QUERY_DIM)[None, :]
        x = tl.load(source[:, None] + start + part[None, :], mask=known, other=0.0).to(tl.float32)
        first += x * tl.load(bias_rows + start + part)[None, :]
        second += x * tl.load(bias_rows + HEAD_DIM + start + part)[None, :]
    target = bias + (token * KV_HEADS * QUERY_GROUP + member) * 2
    tl.store(target, tl.sum(first, 1) * scale, mask=row < rows)
    tl.store(target + 1, tl.sum(second, 1) * scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _rotate_query_kernel(
    query, rotated, bias, rows, matrix, token_stride, head_stride, matrix_head_stride, scale,
    bias_rows, bias_rows_head_stride,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, QUERY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, KV heads). `query` fp16, bf16 or fp32 [tokens, query heads, QUERY_DIM]; `rotated` fp16
    [tokens, query heads, HEAD_DIM]; `bias` fp32 [tokens, query heads, 2]; `matrix` fp16 [1 or KV_HEADS, HEAD_DIM,
    HEAD_DIM]; `bias_rows` fp32 [1 or KV_HEADS, 2, HEAD_DIM]."""
    block, head = tl.program_id(0), tl.program_id(1)
    rotate_rows(
        query, rotated, rows, block, head, 0, matrix, token_stride, head_stride, matrix_head_stride, scale,
        KV_HEADS, QUERY_GROUP, QUERY_DIM, HEAD_DIM, PADDED_DIM, ROWS,
    )  # fmt: skip
    if HAS_BIAS:
        bias_of_rows(
            query, bias, rows, block, head, token_stride, head_stride, scale, bias_rows, bias_rows_head_stride,
            KV_HEADS, QUERY_GROUP, QUERY_DIM, HEAD_DIM, ROWS,
        )  # fmt: skip


def bind_rotate_query(query: torch.Tensor, kv_heads: int, rotation: QueryRotation) -> Launch:
    """The kernel for queries of the dtype and strides of `query` (fp16, bf16 or fp32 [tokens, query heads, head_dim]),
    bound to `rotation`: its matrix fp16 [1 or KV heads, stored_dim, stored_dim], its bias rows fp32 [1 or KV heads, 2,
    stored_dim]."""
    head_dim = rotation.matrix.shape[2]
    return Launch(
        _rotate_query_kernel,
        Arguments(*rotation.fixed(query)),
        dict(
            KV_HEADS=kv_heads, QUERY_GROUP=query.shape[1] // kv_heads, QUERY_DIM=query.shape[2], HEAD_DIM=head_dim,
            PADDED_DIM=power_of_2(head_dim), ROWS=QUERY_ROWS, HAS_BIAS=rotation.bias_rows is not None,
        ),
        num_warps=4,
    )  # fmt: skip


def rotate_query_arguments(rotated: torch.Tensor, bias: torch.Tensor | None) -> Arguments:
    """A step's arguments: `rotated` fp16 [tokens, KV heads, queries a KV head, stored_dim], `bias` fp32 [tokens, query
    heads, 2]."""
    tokens, kv_heads, group, _ = rotated.shape
    assert rotated.is_contiguous(), rotated.stride()
    assert bias is None or (bias.shape == (tokens, kv_heads * group, 2) and bias.is_contiguous()), bias.shape
    return Arguments(rotated, rotated if bias is None else bias, tokens * group)


def rotate_query_grid(rotated: torch.Tensor) -> tuple[int, int, int]:
    tokens, kv_heads, group, _ = rotated.shape
    return -(-tokens * group // QUERY_ROWS), kv_heads, 1


def rotate_query(
    query: torch.Tensor,
    matrix: torch.Tensor,
    rotated: torch.Tensor,
    scale: float,
    bias_rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Rotate queries and multiply them by `scale` and log2 e, once.

    Args:
        query: fp16, bf16 or fp32 [tokens, query heads, head_dim], unit stride over channels.
        matrix: `rotation_matrix` of the K codec.
        rotated: fp16 [tokens, KV heads, queries a KV head, stored_dim], contiguous; filled.
        scale: attention scale.
        bias_rows: `PagedCodec.query_bias_rows`, fp32 [1 or KV heads, 2, stored_dim], contiguous, or None.
        bias: with `bias_rows`: fp32 [tokens, query heads, 2], contiguous; filled with the queries' products with them,
            times `scale` and log2 e too.
    """
    assert (bias is None) == (bias_rows is None)
    launch = bind_rotate_query(query, rotated.shape[1], QueryRotation(matrix, scale, bias_rows))
    launch(rotate_query_grid(rotated), (query,), rotate_query_arguments(rotated, bias))
