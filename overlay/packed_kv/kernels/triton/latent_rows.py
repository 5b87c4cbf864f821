"""Gather kernel of sparse attention: it reads picked tokens of latent rows as rows of stored latents and RoPE channels.

A warp decodes 8 tokens at a time, as it decodes 16 of a micro-block: a lane has words of one token, whose two groups
stand where a micro-block has two tokens (layout.py). The reference is `reference.sparse_latents.gather_tokens`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...layout import ROW_TOKENS, RowLayout
from ..checks import check_int32
from ..kernel_layout import latent_row_layout
from .fragments import hide_from_optimizer, join_pairs
from .latent_pages import LATENT_UNIT, decode_group, lane_of, load_chunk, load_latents, product
from .launch import Arguments, Launch, StepLaunch
from .ring import key_pairs, ring_step_size

EIGHTS = 4
"""Runs of 8 tokens in a tile: one per warp."""
TILE_TOKENS = EIGHTS * ROW_TOKENS
_EIGHTS = tl.constexpr(EIGHTS)


@triton.jit(
    do_not_specialize=["count", "table_stride", "columns"],
    do_not_specialize_on_alignment=["positions", "block_table", "requests"],
)
def _gather_rows_kernel(
    rows, positions, count, block_table, requests, table_stride, columns, cache, block_stride,
    A_REQUEST: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Decode a tile of tokens.

    Grid: (tiles).

    Args:
        rows: fp16, bf16 or fp32 [count, rank + RoPE channels], contiguous; filled, with 0 where there is no token.
        positions: int32 [count], contiguous, positions of tokens in their requests (negative: no token); count: int32.
        block_table: int32 [requests, columns], with `table_stride`; columns: int32.
        requests: int32 [count / A_REQUEST], row of the block table for A_REQUEST neighbouring positions.
        cache: uint8 [blocks, BLOCK_SIZE, row bytes]; `block_stride` in int32 words.
        ROW: `LatentRowLayout`.
    """
    EIGHTS: tl.constexpr = _EIGHTS
    HALF: tl.constexpr = ROW.half
    ROPE: tl.constexpr = ROW.rope
    RANK: tl.constexpr = 2 * HALF.head_dim
    ROPE_CHANNELS: tl.constexpr = ROPE.channels
    WIDTH: tl.constexpr = RANK + ROPE_CHANNELS
    ROW_WORDS: tl.constexpr = ROW.row_bytes // 4
    index = tl.program_id(0).to(tl.int64) * (EIGHTS * 8) + tl.arange(0, EIGHTS * 8)
    pointers = _row_pointers(
        positions, index, count, block_table, requests, table_stride, columns, block_stride,
        A_REQUEST, BLOCK_SIZE, ROW_WORDS,
    )  # fmt: skip
    there = pointers[1]
    at = tl.reshape(tl.broadcast_to(pointers[0][:, None], [EIGHTS * 8, 4]), [EIGHTS, 32])
    at = cache.to(tl.pointer_type(tl.int32)) + at
    words, scales = load_latents(at, HALF, 4), _load_row_scales(at, ROW)
    zero = hide_from_optimizer(tl.zeros([EIGHTS, 32], tl.int32))
    target = rows + index[:, None] * WIDTH + tl.arange(0, 64)[None, :]
    known = (index < count)[:, None]
    for pair in tl.static_range(len(HALF.key_vector.groups)):
        x = _as_rows(decode_group(words, scales, zero, pair, HALF)).to(tl.float32) * (1 / LATENT_UNIT)
        x = tl.where(there[:, None], x, 0.0)
        tl.store(target + pair * 64, x.to(rows.dtype.element_ty), mask=known)
    for pair in tl.static_range(ROPE_CHANNELS // 64):
        x = tl.where(there[:, None], _as_rows(_load_row_rope(at, pair, ROPE)).to(tl.float32), 0.0)
        tl.store(target + RANK + pair * 64, x.to(rows.dtype.element_ty), mask=known)


@triton.jit
def _row_pointers(
    positions, index, count, block_table, requests, table_stride, columns, block_stride,
    A_REQUEST: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr,
):  # fmt: skip
    """Offsets of tokens' rows in words, int64 [tokens], and whether there is a token; if not, the offset is row 0's."""
    position = tl.load(positions + index, mask=index < count, other=-1)
    there = (position >= 0) & (position < columns * BLOCK_SIZE)
    position = tl.where(there, position, 0)
    request = tl.load(requests + index // A_REQUEST, mask=there, other=0).to(tl.int64)
    block = tl.load(block_table + request * table_stride + position // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    return block * block_stride + position % BLOCK_SIZE * ROW_WORDS, there


@triton.jit
def _load_row_scales(pointers, ROW: tl.constexpr):
    """Scale bytes of a lane's token, as `load_scales` returns those of two tokens."""
    HALF: tl.constexpr = ROW.half
    PAIRS: tl.constexpr = len(HALF.key_vector.groups)
    at = pointers + ROW.scales_at // 4
    scales = ()
    if PAIRS % 8 == 0:
        for i in tl.static_range(PAIRS // 8):
            scales = scales + load_chunk(at + 4 * i, 4)
    else:
        for i in tl.static_range(PAIRS):
            scales = scales + (tl.load(at.to(tl.pointer_type(tl.uint16)) + i).to(tl.int32),)
    return scales


@triton.jit
def _load_row_rope(pointers, PAIR: tl.constexpr, ROPE: tl.constexpr):
    """Two groups of RoPE channels, fp16 [EIGHTS, 32, group, d4, d3, d0]."""
    lane = lane_of(4)
    EIGHTS: tl.constexpr = pointers.shape[0]
    if ROPE.scales_at == 0:
        at = pointers + ROPE.at // 4 + PAIR * 32 + lane * 4
        values = tl.reshape(join_pairs(load_chunk(at, 4) + load_chunk(at + 16, 4)), [EIGHTS, 32, 2, 2, 2, 2])
    else:
        pairs = ()
        words = load_chunk(pointers + ROPE.at // 4 + PAIR * 16 + lane * 4, 4)
        for word in tl.static_range(4):
            pairs = pairs + key_pairs(words[word])
        codes = tl.reshape(join_pairs(pairs), [EIGHTS, 32, 2, 2, 2, 2])
        both = tl.load((pointers + ROPE.scales_at // 4).to(tl.pointer_type(tl.uint16)) + PAIR).to(tl.int32)
        step_sizes = tl.join(ring_step_size(both & 0xFF).to(tl.float16), ring_step_size(both >> 8).to(tl.float16))
        step_sizes = tl.reshape(step_sizes, [EIGHTS, 32, 2, 1, 1, 1])
        values = product(codes, tl.broadcast_to(step_sizes, [EIGHTS, 32, 2, 2, 2, 2]))
    return values


@triton.jit
def _as_rows(values):
    """[EIGHTS, 32, group, d4, d3, d0] -> [tokens, 64]."""
    EIGHTS: tl.constexpr = values.shape[0]
    x = tl.reshape(values, [EIGHTS, 8, 4, 2, 4, 2])  # g, t, group, d4 d3, d0
    return tl.reshape(tl.permute(x, (0, 1, 3, 4, 2, 5)), [EIGHTS * 8, 64])


class GatherRowsLaunch(Launch):
    """Dequantises tokens of requests from a layer's latent rows in `cache`: the values of `LatentRowCodec.read_slots`,
    in fp16 exact below 96. Called with the rows to fill and positions; `a_request`: neighbouring positions of one
    request."""

    def __init__(self, layout: RowLayout, cache: torch.Tensor, a_request: int) -> None:
        row = latent_row_layout(layout)
        assert cache.shape[2] == row.row_bytes and cache.stride()[1:] == (row.row_bytes, 1), (
            cache.shape,
            cache.stride(),
        )
        assert cache.stride(0) % 16 == 0, cache.stride()
        super().__init__(
            _gather_rows_kernel,
            Arguments(cache, cache.stride(0) // 4),
            dict(A_REQUEST=a_request, BLOCK_SIZE=cache.shape[1], ROW=row),
            num_warps=EIGHTS, num_stages=1,
        )  # fmt: skip

    @staticmethod
    def step(count: int, block_table: torch.Tensor, requests: torch.Tensor) -> StepLaunch:
        """`count`: of positions; `requests`: int32 [count / a_request], rows of `block_table` int32 [requests,
        blocks]."""
        check_int32(block_table, requests)
        arguments = Arguments(count, block_table, requests, block_table.stride(0), block_table.shape[1])
        return StepLaunch((-(-count // TILE_TOKENS), 1, 1), arguments)
