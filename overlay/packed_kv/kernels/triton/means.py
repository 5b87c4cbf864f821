"""The means of a layer's keys and values in the kernels' form: by channel, block of positions and head
(`codecs/transform.py`).

A score lacks the query's product with the mean of its key: `bias_of_rows` computes that for each block of positions. An
output lacks the mean of its values, which is added when the output is rotated back (`merge.py`,
`kernels/cuda/combine.cuh`); The value of position 0 has a mean of its own, so the decode kernels store its score behind
the biases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...codecs.transform import ChannelTransform
from .fragments import hide_from_optimizer, to_tf32
from .quantize import product

QUERY_ROWS = 16
"""Rows of a program: the least that the tensor core takes. A row is a query head of a token."""
COLUMNS = 16
"""Biases of a query that a program computes at a time: with fewer, the launch ends sooner."""
MAX_BIAS_PROGRAMS = 8
"""Most programs that share the biases of a block of rows. With more, most would find nothing to do: contexts are
shorter than a model's longest."""
_QUERY_ROWS, _COLUMNS = tl.constexpr(QUERY_ROWS), tl.constexpr(COLUMNS)
LATER_TOKENS = tl.constexpr(256)
"""Most positions from a query to the request's last token (`served.py`): a query's tiles end where the request's do."""


class Means(NamedTuple):
    """Means of keys, or of values, in the model's order of channels.

    `rows`: fp32 [1 or KV heads, 3, stored_dim], contiguous: a and p of the mean a * cosine + p * sine, and the mean of
    position 0. `spectrum`: fp32 [blocks, 2, stored_dim], contiguous: cosine and sine of each block of positions.
    `block_tokens`: positions of a block, a multiple of 32; 0: there is one block, with the mean a.
    """

    rows: torch.Tensor
    spectrum: torch.Tensor
    block_tokens: int

    @classmethod
    def of(cls, transform: ChannelTransform, *, has_first: bool = True) -> Means | None:
        """Means of the transform of K or V, None if it subtracts none. Without `has_first`, position 0 is like any
        other of its block: for a rank that does not have it."""
        rows = transform.mean_rows()
        if rows is None:
            return None
        if not has_first:
            cosine, sine = transform.spectrum[0]
            rows = torch.stack((rows[:, 0], rows[:, 1], rows[:, 0] * cosine + rows[:, 1] * sine), dim=1)
        return cls(rows, transform.spectrum, transform.block_tokens)

    @property
    def blocks(self) -> int:
        return len(self.spectrum)


def bias_programs(blocks: int) -> int:
    """Programs that share the biases of a block of rows."""
    return min(MAX_BIAS_PROGRAMS, -(-(1 + blocks) // COLUMNS))


class QueryConstants(NamedTuple):
    """Constants of kernels that rotate queries: KV heads, query heads of each, channels of a query, and of
    what is stored; programs that compute biases (0: there are none), the means' blocks of positions and positions of a
    block, and whether a score of position 0 follows the biases."""

    kv_heads: int
    group: int
    dim: int
    stored_dim: int
    bias_programs: int
    mean_blocks: int
    mean_block_tokens: int
    keeps_first: bool


class QueryBias(NamedTuple):
    """Numbers beside a query of a layer with means: biases for `blocks` blocks of positions (0: none), with
    `tiles_a_block` tiles of 32 tokens in a block (0: there is one block). With `keeps_first`, where V has means, the
    score of position 0 follows the biases."""

    blocks: int = 0
    tiles_a_block: int = 0
    keeps_first: bool = False

    @property
    def columns(self) -> int:
        """Numbers of a query."""
        return 1 + self.blocks + self.keeps_first


NO_BIAS = QueryBias()


class Rotation(NamedTuple):
    """A layer's arguments of kernels that rotate queries: tensors at the launch, pointers in the kernel.

    Attributes:
        columns: fp16 [1 or KV heads, stored_dim, stored_dim], the rotation's matrix by columns.
        token_stride, head_stride: of queries, int32.
        matrix_head_stride: of `columns`, int32.
        scale: fp32.
        means: fp32 [1 or KV heads, 3, stored_dim] of `Means.rows`; read where there are biases.
        means_head_stride: int32.
    """

    columns: Any
    token_stride: Any
    head_stride: Any
    matrix_head_stride: Any
    scale: Any
    means: Any
    means_head_stride: Any


@triton.jit
def bias_of_rows(
    query, bias, positions, rows, block, head, program, rotation, spectrum, QUERIES: tl.constexpr
):  # fmt: skip
    """Compute the biases of the scores of a block of 16 rows (query heads of one KV head, by token), in columns: the
    query's product with the mean of position 0 less that of block 0, then with the mean of each block of positions; all
    times the scale. Of all `bias_programs`, program `program` computes every so many-th run of COLUMNS columns, up to
    those that a tile of these requests needs; the others stay as they are. With `keeps_first`, one more column becomes
    -inf: the score of position 0 for a query that does not see it.

    The products are as exact as fp32: a mean may be large, and scores of different blocks are compared. A query is
    taken in tf32 (fp32 is rounded), a mean as the sum of two such numbers.

    Args:
        query: pointer to fp16, bf16 or fp32 [tokens, query heads, dim].
        bias: pointer to fp32 [tokens, query heads, 1 + mean_blocks + keeps_first], contiguous; filled.
        positions: pointer to int64 [tokens]; not read where mean_block_tokens is 0.
        rows: int32, rows of a KV head: tokens times group.
        block, head, program: int32.
        rotation: `Rotation`.
        spectrum: pointer to fp32 [mean_blocks, 2, stored_dim].
        QUERIES: `QueryConstants`.
    """
    KV_HEADS: tl.constexpr = QUERIES.kv_heads
    QUERY_GROUP: tl.constexpr = QUERIES.group
    QUERY_DIM: tl.constexpr = QUERIES.dim
    HEAD_DIM: tl.constexpr = QUERIES.stored_dim
    ROWS: tl.constexpr = _QUERY_ROWS
    BLOCKS: tl.constexpr = QUERIES.mean_blocks
    BLOCK_TOKENS: tl.constexpr = QUERIES.mean_block_tokens
    COLUMNS: tl.constexpr = _COLUMNS
    PROGRAMS: tl.constexpr = QUERIES.bias_programs
    BIAS_COLUMNS: tl.constexpr = 1 + BLOCKS + QUERIES.keeps_first
    token_stride, head_stride, scale = rotation.token_stride, rotation.head_stride, rotation.scale
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token, member = row // QUERY_GROUP, head * QUERY_GROUP + row % QUERY_GROUP
    source = query + token * token_stride + member * head_stride
    means = rotation.means + head.to(tl.int64) * rotation.means_head_stride
    if QUERIES.keeps_first and program == 0:
        place = token * (KV_HEADS * QUERY_GROUP) + member
        tl.store(
            bias + place * BIAS_COLUMNS + (BIAS_COLUMNS - 1), tl.full([ROWS], float("-inf"), tl.float32), row < rows
        )
    end = 1 + BLOCKS
    if BLOCK_TOKENS > 0:
        position = tl.load(positions + token, mask=row < rows, other=0)
        last = (tl.max(position, 0) + (LATER_TOKENS - 1)) // BLOCK_TOKENS
        end = tl.minimum(last, BLOCKS - 1).to(tl.int32) + 2
    inner = tl.arange(0, 16)
    for first in tl.range(program * COLUMNS, end, PROGRAMS * COLUMNS, num_stages=1):
        column = first + tl.arange(0, COLUMNS)
        of_block = tl.minimum(tl.maximum(column - 1, 0), BLOCKS - 1)
        result = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, HEAD_DIM, 16, num_stages=1):
            known = (row < rows)[:, None] & (start + inner < QUERY_DIM)[None, :]
            x = tl.load(source[:, None] + start + inner[None, :], mask=known, other=0.0).to(tl.float32)
            mean = tl.load(means + start + inner)[:, None]
            partner = tl.load(means + HEAD_DIM + start + inner)[:, None]
            of_first = tl.load(means + 2 * HEAD_DIM + start + inner)[:, None]
            turn = spectrum + of_block[None, :] * (2 * HEAD_DIM) + start + inner[:, None]
            turned = product(mean, tl.load(turn)) + product(partner, tl.load(turn + HEAD_DIM))
            turned = tl.where(column[None, :] == 0, of_first - turned, turned)
            high = to_tf32(turned)
            if query.dtype.element_ty == tl.float32:
                x = to_tf32(x)
            result = tl.dot(x, high, result, input_precision="tf32")
            result = tl.dot(x, turned - high, result, input_precision="tf32")
        # Computed again, so that the loop takes as few registers as possible.
        own = hide_from_optimizer(block) * ROWS + tl.arange(0, ROWS)
        place = own // QUERY_GROUP * (KV_HEADS * QUERY_GROUP) + head * QUERY_GROUP + own % QUERY_GROUP
        target = bias + place.to(tl.int64)[:, None] * BIAS_COLUMNS + column[None, :]
        tl.store(target, result * scale, mask=(own < rows)[:, None] & (column < 1 + BLOCKS)[None, :])


class ColumnConstants(NamedTuple):
    """Constants of the columns of a decode's tile, which are query heads of one KV head, by token.

    Attributes:
        kv_heads, group: KV heads, and query heads of each.
        tile: columns of a tile.
        mean_blocks: number of blocks of positions whose means scores lack; 0: they lack nothing.
        tiles_a_block: tiles of tokens in such a block; 0: there is one block.
        biases: numbers of a query in `query_bias`.
    """

    kv_heads: int
    group: int
    tile: int
    mean_blocks: int
    tiles_a_block: int
    biases: int


@triton.jit
def columns_and_rows(column_tile, COLUMNS: tl.constexpr):
    """The columns of a tile, int32 [tile], and each column's row in queries and outputs, relative to column 0's row.
    COLUMNS: `ColumnConstants`."""
    KV_HEADS: tl.constexpr = COLUMNS.kv_heads
    GROUP: tl.constexpr = COLUMNS.group
    columns = column_tile * COLUMNS.tile + tl.arange(0, COLUMNS.tile)
    return columns, columns // GROUP * (KV_HEADS * GROUP) + columns % GROUP


@triton.jit
def _bias_pointers(query_bias, first_row, count, COLUMNS: tl.constexpr):
    """Pointers to the biases of a program's columns, and which columns there are, bool [tile]. Made where they are
    needed: registers are scarce."""
    columns, rows = columns_and_rows(hide_from_optimizer(tl.program_id(1)) // COLUMNS.kv_heads, COLUMNS)
    return query_bias + (first_row.to(tl.int64) + rows) * COLUMNS.biases, columns < count * COLUMNS.group


@triton.jit
def block_of(tile, TILES_A_BLOCK: tl.constexpr):
    """The block of positions of a tile of keys."""
    return tile // TILES_A_BLOCK if TILES_A_BLOCK > 0 else 0


@triton.jit
def bias_of_block(query_bias, block, first_row, count, COLUMNS: tl.constexpr):
    """Biases of a program's columns for the keys of a block of positions (the last block, if `block` is beyond it),
    fp32 [tile]. query_bias: pointer to fp32 [tokens, query heads, biases]; block, first_row (that of column 0), count
    (query tokens): int32. COLUMNS: `ColumnConstants`."""
    MEAN_BLOCKS: tl.constexpr = COLUMNS.mean_blocks
    pointers, valid = _bias_pointers(query_bias, first_row, count, COLUMNS)
    return tl.load(pointers + 1 + tl.minimum(block, MEAN_BLOCKS - 1), mask=valid, other=0.0)


@triton.jit
def bias_increase(query_bias, block, first_row, count, COLUMNS: tl.constexpr):
    """The bias of a block (`bias_of_block`) minus the previous block's, or a finite number for block 0."""
    MEAN_BLOCKS: tl.constexpr = COLUMNS.mean_blocks
    pointers, valid = _bias_pointers(query_bias, first_row, count, COLUMNS)
    own = tl.load(pointers + 1 + tl.minimum(block, MEAN_BLOCKS - 1), mask=valid, other=0.0)
    return own - tl.load(pointers + tl.minimum(block, MEAN_BLOCKS), mask=valid, other=0.0)


@triton.jit
def add_first_bias(
    scores, tokens, query_bias, first_row, count, INVERSE_UNIT: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Add the correction of token 0 to scores fp32 [32 tokens, columns], in a unit: what its score lacks beyond its
    block's bias.
    tokens: int32 [32]; the rest as in `bias_of_block`."""
    pointers, valid = _bias_pointers(query_bias, first_row, count, COLUMNS)
    bias = tl.load(pointers, mask=valid, other=0.0) / INVERSE_UNIT
    return scores + tl.where((tokens == 0)[:, None], bias[None, :], 0.0)


@triton.jit
def store_first_score(scores, tokens, query_bias, first_row, count, COLUMNS: tl.constexpr):
    """Store the scores of token 0 behind the biases of the columns that see it.

    scores: fp32 [32 tokens, columns], whole, in log2 units, -inf where a column does not see a token; the rest as in
    `add_first_bias`.
    """
    pointers, valid = _bias_pointers(query_bias, first_row, count, COLUMNS)
    target = tl.broadcast_to(pointers[None, :] + (COLUMNS.biases - 1), scores.shape)
    tl.store(target, scores, mask=(tokens == 0)[:, None] & valid[None, :] & (scores > float("-inf")))
