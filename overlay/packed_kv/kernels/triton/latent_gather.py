"""Gather kernel of latent attention: tokens of packed pages as rows of latents, as stored, and RoPE channels.

vLLM's prefill attends to them when a prompt continues: each row times the folded weights is K and V (`fold.py`). The
reference is `LatentCodec.read`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...layout import MICRO_BLOCK, PageLayout
from ..checks import check_int32, check_pages
from ..kernel_layout import kernel_layout, rope_layout
from .fragments import hide_from_optimizer
from .latent_pages import LATENT_UNIT, decode_groups, load_latents, load_rope, load_scales, micro_block_pointers
from .launch import Arguments, Launch, StepLaunch

MICRO_BLOCKS = 4
"""Micro-blocks of a tile: one per warp."""
TILE_TOKENS = MICRO_BLOCKS * MICRO_BLOCK


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["rows", "block_table", "starts", "first_rows"],
)
def _gather_latents_kernel(
    rows, block_table, starts, first_rows, table_stride, cache, block_stride,
    MICRO_BLOCKS: tl.constexpr, MICRO_BLOCKS_A_BLOCK: tl.constexpr, ROPE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Decode a tile of a request's tokens.

    Grid: (tiles of the longest request, requests).

    Args:
        rows: fp16, bf16 or fp32 [tokens, rank + RoPE channels], contiguous; filled.
        block_table: int32 [requests, blocks], with `table_stride`.
        starts, first_rows: int32 [requests] and [requests + 1]; see `GatherLatentsLaunch.step`.
        cache: uint8 [blocks, block_size, slot_bytes]; `block_stride` in int32 words.
        MICRO_BLOCKS_A_BLOCK: block_size / 16. ROPE: `RopeLayout`. LAYOUT: `KernelLayout`.
    """
    RANK: tl.constexpr = LAYOUT.head_dim
    ROPE_CHANNELS: tl.constexpr = ROPE.channels
    WIDTH: tl.constexpr = RANK + ROPE_CHANNELS
    TOKENS: tl.constexpr = MICRO_BLOCKS * 16
    request = tl.program_id(1)
    first_row, end = tl.load(first_rows + request), tl.load(first_rows + request + 1)
    row = first_row + tl.program_id(0) * TOKENS
    if row >= end:
        return
    first = tl.load(starts + request) // 16
    last = first + (end - first_row - 1) // 16
    pointers = micro_block_pointers(
        cache.to(tl.pointer_type(tl.int32)), block_table + request.to(tl.int64) * table_stride,
        first + tl.program_id(0) * MICRO_BLOCKS, last, block_stride,
        MICRO_BLOCKS, MICRO_BLOCKS_A_BLOCK, LAYOUT.micro_block_bytes // 4,
    )  # fmt: skip
    row += tl.arange(0, TOKENS)
    channel, known = tl.arange(0, 32), (row < end)[:, None]
    target = rows + row.to(tl.int64)[:, None] * WIDTH + channel[None, :]
    words, scales = load_latents(pointers, LAYOUT), load_scales(pointers, LAYOUT)
    zero = hide_from_optimizer(tl.zeros([MICRO_BLOCKS, 32], tl.int32))
    for g in tl.static_range(len(LAYOUT.key_vector.groups)):
        x = decode_groups(words, scales, zero, g, 1, LAYOUT).to(tl.float32) * (1 / LATENT_UNIT)
        tl.store(target + g * 32, x.to(rows.dtype.element_ty), mask=known)
    rope = load_rope(pointers, ROPE)
    for g in tl.static_range(ROPE_CHANNELS // 32):
        tl.store(target + RANK + g * 32, rope[g].to(rows.dtype.element_ty), mask=known)


class GatherLatentsLaunch(Launch):
    """Dequantises some tokens of each request in a layer's `cache`: the values of `LatentCodec.read`. Called with the
    rows to fill; latents in fp16 are exact, below 96."""

    def __init__(self, page: PageLayout, cache: torch.Tensor) -> None:
        check_pages(cache)
        super().__init__(
            _gather_latents_kernel,
            Arguments(cache, cache.stride(0) // 4),
            dict(
                MICRO_BLOCKS=MICRO_BLOCKS, MICRO_BLOCKS_A_BLOCK=cache.shape[1] // MICRO_BLOCK, ROPE=rope_layout(page),
                LAYOUT=kernel_layout(page),
            ),
            num_warps=MICRO_BLOCKS, num_stages=1,
        )  # fmt: skip

    @staticmethod
    def step(
        rows: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, first_rows: torch.Tensor, longest: int
    ) -> StepLaunch:
        """Tokens of request i from `starts[i]` on, a multiple of 16, go to `rows[first_rows[i] : first_rows[i + 1]]`.
        `longest`: most tokens of a request, known on the host."""
        check_int32(block_table, starts, first_rows)
        assert rows.is_contiguous(), rows.stride()
        arguments = Arguments(block_table, starts, first_rows, block_table.stride(0))
        return StepLaunch((-(-longest // TILE_TOKENS), len(starts), 1), arguments)
