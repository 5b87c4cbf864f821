"""Rotate the query before the decode kernel.

It is a product with the head_dim x head_dim matrix of the rotation, in fp16 with fp32 sums: a query is rotated once a
step, so exactness to the bit, which the codec needs, would buy nothing here. Where the layer also stores tokens,
`store.py` does both in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...codecs.codec import Codec
from .. import power_of_2
from ..checks import head_stride
from ..units import LOG2_E
from .fragments import opaque
from .launch import Arguments, Launch, StepLaunch
from .means import QUERY_ROWS, Means, QueryConstants, Rotation, bias_of_rows, bias_programs

QUERY_CHANNELS = 32
"""Channels of a program: 78 registers per thread on sm_90, where 64 channels take 108, and the programs of `store.py`
that store have as many."""


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
    """Rotation of a layer's queries: `matrix` fp16 [1 or KV heads, stored_dim, stored_dim], attention `scale`, `means`
    of its keys or None, and whether a score of position 0 follows the biases."""

    matrix: torch.Tensor
    scale: float
    means: Means | None = None
    keeps_first: bool = False
    columns: torch.Tensor = field(init=False)
    """The matrix by columns."""

    def __post_init__(self) -> None:
        assert self.means is not None or not self.keeps_first
        object.__setattr__(self, "columns", self.matrix.transpose(1, 2).contiguous())

    def fixed(self, query: torch.Tensor) -> Rotation:
        """A kernel's arguments, for queries of these strides."""
        assert query.stride(2) == 1, query.stride()
        rows = self.matrix if self.means is None else self.means.rows
        assert rows.is_contiguous(), rows.stride()
        return Rotation(
            self.columns, query.stride(0), query.stride(1), head_stride(self.columns), self.scale * LOG2_E, rows,
            head_stride(rows),
        )  # fmt: skip

    def constants(self, query: torch.Tensor, kv_heads: int) -> QueryConstants:
        """Return the constants that a kernel is compiled for, for queries of these sizes."""
        means = (0, 0) if self.means is None else (self.means.blocks, self.means.block_tokens)
        group, stored_dim = query.shape[1] // kv_heads, self.matrix.shape[2]
        return QueryConstants(kv_heads, group, query.shape[2], stored_dim, self.bias_programs, *means, self.keeps_first)

    @property
    def bias_programs(self) -> int:
        """Programs that share the biases of a block of rows; 0: there are none."""
        return 0 if self.means is None else bias_programs(self.means.blocks)


padded = triton.constexpr_function(power_of_2)
"""Channels of a row's programs together, for this number of stored channels."""
_CHANNELS = tl.constexpr(QUERY_CHANNELS)


@triton.jit
def rotate_rows(query, rotated, rows, block, head, first_channel, rotation, QUERIES: tl.constexpr):
    """Rotate a block of 16 rows (query heads of one KV head, by token), multiply them by the scale, and store
    QUERY_CHANNELS of their channels, from `first_channel` on.

    Both operands are loaded in the lane order of `mma.m16n8k16`, lane 4 * g + t: of every 32 channels of queries, t has
    8 neighbours in rows g and g + 8, and in the matrix as many rows of QUERY_CHANNELS / 8 columns.
    Which channel counts as which k or n of a product is free, as long as both operands and the result agree.

    Args:
        query: pointer to fp16, bf16 or fp32 [tokens, query heads, dim].
        rotated: pointer to fp16 [tokens, query heads, stored_dim], contiguous.
        rows: int32, rows of a KV head: tokens times group.
        block, head, first_channel: int32.
        rotation: `Rotation`.
        QUERIES: `QueryConstants`.
    """
    KV_HEADS: tl.constexpr = QUERIES.kv_heads
    QUERY_GROUP: tl.constexpr = QUERIES.group
    QUERY_DIM: tl.constexpr = QUERIES.dim
    HEAD_DIM: tl.constexpr = QUERIES.stored_dim
    CHANNELS: tl.constexpr = _CHANNELS
    token_stride, head_stride = rotation.token_stride, rotation.head_stride
    EACH: tl.constexpr = CHANNELS // 8
    lane = tl.arange(0, 32)
    g, t = lane // 4, lane % 4
    low_valid, low_source, low_target = _row(
        query, rotated, rows, block * 16 + g, head, token_stride, head_stride, KV_HEADS, QUERY_GROUP, HEAD_DIM
    )
    high_valid, high_source, high_target = _row(
        query, rotated, rows, block * 16 + 8 + g, head, token_stride, head_stride, KV_HEADS, QUERY_GROUP, HEAD_DIM
    )
    columns = rotation.columns + head.to(tl.int64) * rotation.matrix_head_stride
    result = tl.zeros([16, CHANNELS], tl.float32)
    for start in tl.static_range(0, HEAD_DIM, 32):
        first = start + 8 * t
        channel = first[:, None] + tl.arange(0, 8)[None, :]
        low = tl.load(low_source[:, None] + channel, mask=low_valid[:, None] & (channel < QUERY_DIM), other=0.0)
        high = tl.load(high_source[:, None] + channel, mask=high_valid[:, None] & (channel < QUERY_DIM), other=0.0)
        x = tl.reshape(tl.join(low.to(tl.float16), high.to(tl.float16)), [8, 4, 2, 2, 2, 2])  # g, t, 3 bits of 8, row
        x = tl.reshape(tl.permute(x, (5, 0, 2, 3, 1, 4)), [16, 32])
        m = _columns(columns, channel, first_channel + EACH * g, HEAD_DIM, EACH, 1)
        m = tl.reshape(m, [8, 4, 2, 2, 2, EACH])  # g, t, 3 bits of 8, column of EACH
        m = tl.reshape(tl.permute(m, (2, 3, 1, 4, 5, 0)), [32, CHANNELS])
        result = tl.dot(opaque(x), opaque(m), result)
    scale = rotation.scale
    result = tl.reshape(result * scale, [2, 8, EACH, 4, 2])  # row / 8, g, column of EACH, t, and which of its two
    even, odd = tl.split(tl.reshape(tl.permute(result, (1, 3, 2, 0, 4)), [32, EACH, 2, 2]))
    for which in tl.static_range(2):
        low, high = tl.split(odd if which else even)
        column = (first_channel + EACH * (2 * t + which))[:, None] + tl.arange(0, EACH)[None, :]
        there = column < HEAD_DIM
        tl.store(low_target[:, None] + column, low.to(rotated.dtype.element_ty), mask=low_valid[:, None] & there)
        tl.store(high_target[:, None] + column, high.to(rotated.dtype.element_ty), mask=high_valid[:, None] & there)


@triton.jit
def _row(
    query, rotated, rows, row, head, token_stride, head_stride,
    KV_HEADS: tl.constexpr, QUERY_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return a mask of the rows that exist, bool [lanes], and pointers to their sources and targets."""
    token, member = (row // QUERY_GROUP).to(tl.int64), head * QUERY_GROUP + row % QUERY_GROUP
    source = query + token * token_stride + member * head_stride
    return row < rows, source, rotated + (token * (KV_HEADS * QUERY_GROUP) + member) * HEAD_DIM


@triton.jit
def _columns(columns, channel, column, HEAD_DIM: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Load rows `channel`, int32 [lanes, 8], in COUNT columns of a column-major matrix: every STEP-th column from
    `column` on, int32 [lanes]. Returns fp16 [lanes, 8, bits of a column's number], the highest bit first."""
    if COUNT == 1:
        own = column[:, None]
        return tl.load(columns + own * HEAD_DIM + channel, mask=own < HEAD_DIM, other=0.0)
    else:
        return tl.join(
            _columns(columns, channel, column, HEAD_DIM, COUNT // 2, 2 * STEP),
            _columns(columns, channel, column + STEP, HEAD_DIM, COUNT // 2, 2 * STEP),
        )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions"])
def _rotate_query_kernel(query, positions, rotated, bias, rows, rotation, spectrum, QUERIES: tl.constexpr):
    """Rotate queries and, with `bias_programs`, compute their biases.

    Grid: (blocks of QUERY_ROWS rows, KV heads, stored_dim, padded, / QUERY_CHANNELS + bias_programs).

    Args:
        query: fp16, bf16 or fp32 [tokens, query heads, dim].
        positions: int64 [tokens]; read where mean_block_tokens is not 0.
        rotated: fp16 [tokens, query heads, stored_dim], contiguous; filled.
        bias: fp32 [tokens, query heads, 1 + mean_blocks + keeps_first], contiguous; filled as by `bias_of_rows`.
        rows: int32, tokens times group.
        rotation: `Rotation`.
        spectrum: fp32 [mean_blocks, 2, stored_dim].
        QUERIES: `QueryConstants`.
    """
    block, head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROTATED: tl.constexpr = padded(QUERIES.stored_dim) // _CHANNELS
    if program < ROTATED:
        rotate_rows(query, rotated, rows, block, head, program * _CHANNELS, rotation, QUERIES)
    elif QUERIES.bias_programs > 0:
        bias_of_rows(query, bias, positions, rows, block, head, program - ROTATED, rotation, spectrum, QUERIES)


class RotateStep(NamedTuple):
    """The step's half of a rotation, which its layers share: the launch, and the tensors that it fills; `StoreLaunch`
    uses it, too."""

    launch: StepLaunch
    rotated: torch.Tensor
    bias: torch.Tensor
    rows: int


class RotateQueryLaunch(Launch):
    """Rotates queries by a layer's `rotation`, times its scale and log2 e, and fills their biases. Called with queries
    of the dtype and strides of `query`."""

    def __init__(self, query: torch.Tensor, kv_heads: int, rotation: QueryRotation) -> None:
        spectrum = rotation.matrix if rotation.means is None else rotation.means.spectrum
        super().__init__(
            _rotate_query_kernel, Arguments(rotation.fixed(query), spectrum),
            dict(QUERIES=rotation.constants(query, kv_heads)), num_warps=1,
        )  # fmt: skip

    @staticmethod
    def step(
        rotated: torch.Tensor,
        rotation: QueryRotation,
        positions: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> RotateStep:
        """`rotated`: fp16 [tokens, KV heads, queries per KV head, stored_dim]. `positions` are needed where keys have
        means by blocks of positions."""
        tokens, kv_heads, group, stored_dim = rotated.shape
        assert rotated.is_contiguous(), rotated.stride()
        assert bias is None or (bias.shape[:2] == (tokens, kv_heads * group) and bias.is_contiguous()), bias.shape
        if positions is None:
            assert bias is None or bias.shape[2] == 2, bias.shape
            positions = rotated.view(torch.int64)  # not read
        assert positions.dtype == torch.int64 and positions.is_contiguous(), (positions.dtype, positions.stride())
        rows, programs = tokens * group, power_of_2(stored_dim) // QUERY_CHANNELS
        grid = -(-rows // QUERY_ROWS), kv_heads, programs + rotation.bias_programs
        bias = rotated if bias is None else bias  # not filled
        return RotateStep(StepLaunch(grid, Arguments(positions, rotated, bias, rows)), rotated, bias, rows)
