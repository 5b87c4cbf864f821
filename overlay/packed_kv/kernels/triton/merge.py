"""Merge the splits after the decode kernel, rotate the output back, and add the means that V lacks.

The rotation is a product with the matrix of `rotate.py`, in tf32 with fp32 sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...formats import stored_dim
from .. import power_of_2
from ..checks import head_stride
from ..units import LOG2_E
from .fragments import to_tf32
from .launch import Arguments, Launch, StepLaunch
from .means import Means

_LOG2_E = tl.constexpr(LOG2_E)


class MergeDims(NamedTuple):
    """Channels of a `stored` vector of V; of the `output`; of the product, `padded` to a power of 2; and of the matrix
    `at_a_time`."""

    stored: int
    output: int
    padded: int
    at_a_time: int


class MergeConstants(NamedTuple):
    """Constants that `_merge_kernel` is compiled for.

    Attributes:
        kv_heads, group: KV heads, and query heads of each.
        dims: channels.
        tile: of `MERGE_TILES`: the most splits, a power of 2, and rows of a program.
        has_sinks, has_lse: whether there are sinks, and whether the lse is filled.
        bias_columns: columns of queries' biases, where V has means; 0: it has none.
    """

    kv_heads: int
    group: int
    dims: MergeDims
    tile: tuple[int, int]
    has_sinks: bool
    has_lse: bool
    bias_columns: int


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_kernel(
    output, partial_output, partial_stats, lse, rows, splits, matrix, token_stride, head_stride,
    matrix_head_stride, sinks, MERGE: tl.constexpr,
):  # fmt: skip
    """Combine the splits of rows (query heads of a token) and rotate them back.

    Grid: (rows / rows of a program, KV heads).

    Args:
        output: fp16, bf16 or fp32 [tokens, kv_heads * group, channels], with `token_stride` and `head_stride`
            (int32); filled.
        partial_output, partial_stats: fp32 [tokens, kv_heads * group, splits, stored] and [.., .., splits, 2].
        lse: fp32 [tokens, kv_heads * group]; filled where `has_lse`. With `bias_columns` a pair: lse, and fp32 [.., ..,
            bias_columns], whose last column has the scores of position 0, or -inf.
        rows, splits: int32, tokens times group, and at most those of the tile.
        matrix: fp16 [1 or kv_heads, stored, stored], with `matrix_head_stride` (int32). With `bias_columns` a
            record: that, and the means of V, fp32 [1 or kv_heads, 3, stored] of `Means.rows`, and their stride over
            heads.
        sinks: fp16, bf16 or fp32 [kv_heads * group]; read where `has_sinks`.
        MERGE: `MergeConstants`.
    """
    KV_HEADS: tl.constexpr = MERGE.kv_heads
    QUERY_GROUP: tl.constexpr = MERGE.group
    DIMS: tl.constexpr = MERGE.dims
    HEAD_DIM: tl.constexpr = DIMS.stored
    OUTPUT_DIM: tl.constexpr = DIMS.output
    PADDED_DIM: tl.constexpr = DIMS.padded
    CHANNELS: tl.constexpr = DIMS.at_a_time
    SPLITS: tl.constexpr = MERGE.tile[0]
    ROWS: tl.constexpr = MERGE.tile[1]
    HAS_SINKS: tl.constexpr = MERGE.has_sinks
    BIAS_COLUMNS: tl.constexpr = MERGE.bias_columns
    head = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    split = tl.arange(0, SPLITS)
    place = row // QUERY_GROUP * (KV_HEADS * QUERY_GROUP) + head * QUERY_GROUP + row % QUERY_GROUP
    slot = place[:, None] * splits + split[None, :]
    known = (row < rows)[:, None] & (split < splits)[None, :]
    # [rows, splits, channels]: splits first take 4.9 to 6.3 us where this takes 3.2 (isoquant4, 32 x 8192, H200).
    maxima = tl.load(partial_stats + slot * 2, mask=known, other=-1.0e30)
    totals = tl.load(partial_stats + slot * 2 + 1, mask=known, other=0.0)
    top = tl.max(maxima, 1)
    if HAS_SINKS:
        sink = tl.load(sinks + head * QUERY_GROUP + row % QUERY_GROUP).to(tl.float32) * _LOG2_E
        top = tl.maximum(top, sink)
    weights = tl.exp2(maxima - top[:, None])
    total = tl.sum(totals * weights, 1)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    norm = tl.where(total > 0, 1 / total, 0.0)
    if MERGE.has_lse:
        filled = lse[0] if BIAS_COLUMNS > 0 else lse
        tl.store(filled + place, (top + tl.log2(total)) / _LOG2_E, mask=row < rows)

    inner, channel = tl.arange(0, CHANNELS), tl.arange(0, PADDED_DIM)
    columns = (matrix[0] if BIAS_COLUMNS > 0 else matrix) + head.to(tl.int64) * matrix_head_stride
    result = tl.zeros([16, PADDED_DIM], tl.float32)
    if BIAS_COLUMNS > 0:  # the values' weights add up to 1 less the sink's; position 0's value has a mean of its own
        means = matrix[1] + head.to(tl.int64) * matrix[2] + channel
        mean = tl.load(means, mask=channel < HEAD_DIM, other=0.0)[None, :]
        of_first = tl.load(means + 2 * HEAD_DIM, mask=channel < HEAD_DIM, other=0.0)[None, :]
        score = tl.load(lse[1] + place * BIAS_COLUMNS + (BIAS_COLUMNS - 1), mask=row < rows, other=float("-inf"))
        all_weights, first_weight = tl.sum(totals * weights, 1) * norm, tl.exp2(score - top) * norm
        lacking = all_weights[:, None] * mean + first_weight[:, None] * (of_first - mean)
        result = tl.reshape(tl.broadcast_to(lacking[None, :, :], [16 // ROWS, ROWS, PADDED_DIM]), [16, PADDED_DIM])
    for start in tl.static_range(0, HEAD_DIM, CHANNELS):
        m = tl.load(columns + (start + inner[:, None]) * HEAD_DIM + channel[None, :],
                    mask=(channel < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        values = tl.load(partial_output + slot[:, :, None] * HEAD_DIM + start + inner[None, None, :],
                         mask=known[:, :, None], other=0.0)  # fmt: skip
        combined = tl.sum(values * weights[:, :, None], 1) * norm[:, None]
        # As exact as fp16, but for V of any size.
        combined = tl.broadcast_to(to_tf32(combined)[None, :, :], [16 // ROWS, ROWS, CHANNELS])
        result = tl.dot(tl.reshape(combined, [16, CHANNELS]), m.to(tl.float32), result, input_precision="tf32")
    row = tl.arange(0, 16)  # of the product: those past ROWS repeat the first
    index = (tl.program_id(0) * ROWS + row).to(tl.int64)
    target = output + index // QUERY_GROUP * token_stride + (head * QUERY_GROUP + index % QUERY_GROUP) * head_stride
    tl.store(target[:, None] + channel[None, :], result.to(output.dtype.element_ty),
             mask=((row < ROWS) & (index < rows))[:, None] & (channel < OUTPUT_DIM)[None, :])  # fmt: skip


MERGE_TILES = ((2, 16), (8, 8), (16, 4), (64, 2), (128, 1))
"""Pairs of the most splits and the rows of a program: with more rows the matrix is read less often, with fewer rows
more programs share the work. On an H200, 2 splits of 128 tokens take 3.9 us, 8 of 32 3.2, 33 of 8 3.8, 128 of 1 3.9."""


def merge_tile(splits: int) -> tuple[int, int]:
    """The tile of `MERGE_TILES` for this many splits."""
    assert splits <= MERGE_TILES[-1][0], splits
    return next(tile for tile in MERGE_TILES if splits <= tile[0])


class MergeLaunch(Launch):
    """Merges the splits of `DecodeLaunch` for a tile of `merge_tile` and rotates the result back by a layer's `matrix`;
    `has_lse`: fill the step's lse, sinks included; `means`: of V; its steps then have queries' biases of `bias_columns`
    columns. Called with an output of the dtype and strides of `output`."""

    def __init__(
        self,
        output: torch.Tensor,
        matrix: torch.Tensor,
        tile: tuple[int, int],
        sinks: torch.Tensor | None = None,
        *,
        has_lse: bool = False,
        means: Means | None = None,
        bias_columns: int = 0,
    ) -> None:
        _, kv_heads, group, output_dim = output.shape
        assert output_dim <= matrix.shape[2], (output.shape, matrix.shape)
        assert output.stride(-1) == 1, output.stride()
        assert sinks is None or (sinks.shape == (kv_heads * group,) and sinks.is_contiguous()), sinks.shape
        head_dim, padded_dim = matrix.shape[2], power_of_2(stored_dim(output_dim))
        at_a_time = min(16384 // padded_dim, head_dim & -head_dim)  # at most 64 KB of registers
        of_sinks = matrix if sinks is None else sinks
        stride = head_stride(matrix)
        of_matrix = matrix if means is None else (matrix, means.rows, head_stride(means.rows))
        merge = MergeConstants(
            kv_heads, group, MergeDims(head_dim, output_dim, padded_dim, at_a_time), tile, sinks is not None, has_lse,
            bias_columns if means is not None else 0,
        )  # fmt: skip
        super().__init__(
            _merge_kernel,
            Arguments(of_matrix, output.stride(0), output.stride(2), stride, of_sinks),
            dict(MERGE=merge),
            num_warps=8 if tile[1] >= 8 or head_dim > 128 else 4,
        )

    @staticmethod
    def step(
        partial_output: torch.Tensor, partial_stats: torch.Tensor, group: int, lse: torch.Tensor | None = None,
        query_bias: torch.Tensor | None = None,
    ) -> StepLaunch:  # fmt: skip
        """`group`: query heads per KV head. `lse`: for the kernel that fills it. `query_bias`: for the kernel that adds
        V's means."""
        lse = partial_stats if lse is None else lse
        assert lse.is_contiguous(), lse.stride()
        of_lse = lse if query_bias is None else (lse, query_bias)
        tokens, heads, splits, _ = partial_output.shape
        rows = tokens * group
        grid = -(-rows // merge_tile(splits)[1]), heads // group, 1
        return StepLaunch(grid, Arguments(partial_output, partial_stats, of_lse, rows, splits))
