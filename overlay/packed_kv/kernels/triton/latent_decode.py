"""Split-KV decode of latent attention over packed pages: rows (heads times query tokens) attend to latents as stored.

A tile of tokens is unpacked for the scores, and again for the sums: that takes fewer registers than keeping it. It
serves any rank, and any card from sm_80 on; where `kernels/cuda` serves, it is faster.
`reference/latent_attention.attend` is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...gpu_generations import Generation
from ...layout import MICRO_BLOCK, PageLayout
from .. import power_of_2
from ..checks import check_int32, check_pages
from ..kernel_layout import KernelLayout, RopeLayout, kernel_layout, rope_layout
from ..units import LOG2_E
from .fragments import hide_from_optimizer
from .latent_pages import LATENT_UNIT, decode_groups, load_latents, load_rope, load_scales, micro_block_pointers
from .launch import Arguments, Launch, StepLaunch
from .records import strides

MICRO_BLOCKS = 4
"""Micro-blocks of a tile: one per warp."""
MAX_ROWS = 32
"""Most rows of a program. 16 at least: the left operand of `mma.m16n8k16`."""
MAX_SPLITS = 128
SHARED_BYTES = {16: 42 << 10, 32: 60 << 10}
"""Upper bound of a program's shared memory, by its rows, for latents of 512 channels with 64 RoPE channels."""
REGISTERS = 255
"""Registers of a thread, at most."""
MERGED_CHANNELS = 64
_MASKED = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(LOG2_E)


@dataclass(frozen=True)
class LatentShape:
    """Shape that decides the variant of the kernel together with the page: `heads` of this rank, `rows` of a program,
    `scale` of the scores."""

    heads: int
    rows: int
    scale: float


def latent_shape(heads: int, longest_decode: int, scale: float) -> LatentShape:
    """Return the shape for requests of up to `longest_decode` query tokens."""
    return LatentShape(heads, max(16, min(MAX_ROWS, power_of_2(heads * longest_decode))), scale)


class LatentLayer(NamedTuple):
    """A layer's arguments of `_decode_latents_kernel`: tensors at the launch, pointers in the kernel.

    Attributes:
        cache: uint8 [blocks, block_size, slot_bytes]; `block_stride` in int32 words.
        latent, rope: `Strides` of queries and of their RoPE channels.
        scale: fp32, of scores, times log2 e.
    """

    cache: Any
    block_stride: Any
    latent: Any
    rope: Any
    scale: Any


class DecodeLatentsConstants(NamedTuple):
    """Constants that `_decode_latents_kernel` is compiled for: heads; rows of a program; micro-blocks of a tile and of
    a block of the cache; groups of a product, `chunk`; and where a page has its RoPE channels and latents."""

    heads: int
    rows: int
    micro_blocks: int
    micro_blocks_a_block: int
    chunk: int
    rope: RopeLayout
    layout: KernelLayout


@triton.jit(
    do_not_specialize=["table_stride", "splits"],
    do_not_specialize_on_alignment=["q_latent", "q_rope", "block_table", "query_start", "seq_lens"],
)
def _decode_latents_kernel(
    q_latent, q_rope, block_table, query_start, seq_lens, partial_output, partial_stats, table_stride, splits, layer,
    DECODE: tl.constexpr,
):  # fmt: skip
    """Partial attention of some rows over a split of a request's tokens.

    Grid: (splits, tiles of rows, requests).

    Args:
        q_latent, q_rope: fp16, bf16 or fp32 [tokens, heads, rank] and [tokens, heads, RoPE channels].
        block_table: int32 [requests, blocks], with `table_stride`.
        query_start, seq_lens: int32 [requests + 1] and [requests].
        partial_output, partial_stats: fp32 [tokens, heads, splits, rank] and [tokens, heads, splits, 2], contiguous;
            filled with sums of latents, and with maximum and sum of the weights.
        layer: `LatentLayer`. DECODE: `DecodeLatentsConstants`.
    """
    HEADS: tl.constexpr = DECODE.heads
    ROWS: tl.constexpr = DECODE.rows
    MICRO_BLOCKS: tl.constexpr = DECODE.micro_blocks
    CHUNK: tl.constexpr = DECODE.chunk
    ROPE: tl.constexpr = DECODE.rope
    LAYOUT: tl.constexpr = DECODE.layout
    RANK: tl.constexpr = LAYOUT.head_dim
    CHUNKS: tl.constexpr = len(LAYOUT.key_vector.groups) // CHUNK
    CHANNELS: tl.constexpr = 32 * CHUNK
    TOKENS: tl.constexpr = 16 * MICRO_BLOCKS
    split, request = tl.program_id(0), tl.program_id(2)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    if tl.program_id(1) * ROWS >= count * HEADS:
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = row < count * HEADS
    token, head = (start + row // HEADS).to(tl.int64), row % HEADS

    channel = tl.arange(0, CHANNELS)
    source = q_latent + token * layer.latent.token + head * layer.latent.head
    queries, outputs = (), ()
    for c in tl.static_range(CHUNKS):
        x = tl.load(source[:, None] + c * CHANNELS + channel[None, :], mask=valid[:, None], other=0.0)
        queries = queries + ((x.to(tl.float32) * layer.scale).to(tl.float16),)
        outputs = outputs + (tl.zeros([ROWS, CHANNELS], tl.float32),)
    source = q_rope + token * layer.rope.token + head * layer.rope.head
    rope_queries = ()
    for g in tl.static_range(ROPE.channels // 32):
        x = tl.load(source[:, None] + g * 32 + tl.arange(0, 32)[None, :], mask=valid[:, None], other=0.0)
        rope_queries = rope_queries + ((x.to(tl.float32) * layer.scale).to(tl.float16),)
    maximum, total = tl.full([ROWS], _MASKED, tl.float32), tl.zeros([ROWS], tl.float32)

    tiles = tl.cdiv(seq_len, TOKENS)
    a_split = tl.cdiv(tiles, splits)
    low, high = split * a_split, tl.minimum(split * a_split + a_split, tiles)
    limit = seq_len - count + row // HEADS + 1  # a row sees the tokens below it
    pages, table = layer.cache.to(tl.pointer_type(tl.int32)), block_table + request.to(tl.int64) * table_stride
    zero = hide_from_optimizer(tl.zeros([MICRO_BLOCKS, 32], tl.int32))
    for tile in range(low, high):
        pointers = micro_block_pointers(
            pages, table, tile * MICRO_BLOCKS, (seq_len - 1) // 16, layer.block_stride,
            MICRO_BLOCKS, DECODE.micro_blocks_a_block, LAYOUT.micro_block_bytes // 4,
        )  # fmt: skip
        words, scales = load_latents(pointers, LAYOUT), load_scales(pointers, LAYOUT)
        rope = load_rope(pointers, ROPE)
        scores = tl.zeros([ROWS, TOKENS], tl.float32)
        for c in tl.static_range(CHUNKS):
            latents = decode_groups(words, scales, zero, c * CHUNK, CHUNK, LAYOUT)
            scores = tl.dot(queries[c], tl.trans(latents), scores)
        scores *= 1 / LATENT_UNIT
        for g in tl.static_range(ROPE.channels // 32):
            scores = tl.dot(rope_queries[g], tl.trans(rope[g]), scores)
        position = tile * TOKENS + tl.arange(0, TOKENS)
        scores = tl.where(position[None, :] < limit[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_maximum[:, None]), tl.exp2(maximum - new_maximum)
        maximum, total = new_maximum, total * shrink + tl.sum(weights, 1)
        halves, sums = weights.to(tl.float16), ()
        for c in tl.static_range(CHUNKS):
            latents = decode_groups(words, scales, hide_from_optimizer(zero), c * CHUNK, CHUNK, LAYOUT)
            sums = sums + (tl.dot(halves, latents, outputs[c] * shrink[:, None]),)
        outputs = sums

    slot = (token * HEADS + head) * splits + split
    for c in tl.static_range(CHUNKS):
        target = partial_output + slot[:, None] * RANK + c * CHANNELS + channel[None, :]
        tl.store(target, outputs[c] * (1 / LATENT_UNIT), mask=valid[:, None])
    tl.store(partial_stats + slot * 2, maximum, mask=valid)
    tl.store(partial_stats + slot * 2 + 1, total, mask=valid)


def programs(shape: LatentShape, generation: Generation) -> int:
    """Programs that an SM holds at once."""
    return generation.resident_blocks(REGISTERS, SHARED_BYTES[shape.rows], MICRO_BLOCKS)


def split_count(requests: int, tiles_of_rows: int, resident: int) -> int:
    """Splits of each request, for one wave of programs; the card holds `resident` programs at once. It depends on no
    sequence length, so that a CUDA graph can hold it."""
    return max(1, min(MAX_SPLITS, resident // (requests * tiles_of_rows)))


def row_tiles(shape: LatentShape, max_query_len: int) -> int:
    return -(-shape.heads * max_query_len // shape.rows)


def groups_at_a_time(rank: int) -> int:
    """Return how many of a latent's groups of 32 channels a product takes: up to 4, a divisor of their number."""
    groups = rank // 32
    return min(4, groups & -groups)


class DecodeLatentsLaunch(Launch):
    """Attends over the latents of a layer's `cache`. Called with queries of the dtypes and strides of `q_latent` and
    `q_rope`."""

    def __init__(
        self, page: PageLayout, shape: LatentShape, cache: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor
    ) -> None:
        check_pages(cache)
        layout = kernel_layout(page)
        layer = LatentLayer(cache, cache.stride(0) // 4, strides(q_latent), strides(q_rope), shape.scale * LOG2_E)
        decode = DecodeLatentsConstants(
            shape.heads, shape.rows, MICRO_BLOCKS, cache.shape[1] // MICRO_BLOCK, groups_at_a_time(layout.head_dim),
            rope_layout(page), layout,
        )  # fmt: skip
        super().__init__(
            _decode_latents_kernel, Arguments(layer), dict(DECODE=decode), num_warps=MICRO_BLOCKS, num_stages=1
        )

    @staticmethod
    def step(
        shape: LatentShape,
        max_query_len: int,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        partial_output: torch.Tensor,
        partial_stats: torch.Tensor,
    ) -> StepLaunch:
        """`max_query_len`: most query tokens of a request, known on the host."""
        check_int32(block_table, query_start, seq_lens)
        assert partial_output.is_contiguous() and partial_stats.is_contiguous()
        splits, stride = partial_output.shape[2], block_table.stride(0)
        arguments = Arguments(block_table, query_start, seq_lens, partial_output, partial_stats, stride, splits)
        return StepLaunch((splits, row_tiles(shape, max_query_len), len(seq_lens)), arguments)


class MergeLatentsConstants(NamedTuple):
    """Constants that `_merge_latents_kernel` is compiled for: heads, their rank, `channels` of a program, the most
    `splits`, a power of 2, and whether a constant is added and the lse filled."""

    heads: int
    rank: int
    channels: int
    splits: int
    has_constant: bool
    has_lse: bool


@triton.jit(do_not_specialize=["splits"])
def _merge_latents_kernel(
    output, partial_output, partial_stats, lse, splits, constant, token_stride, head_stride, MERGE: tl.constexpr
):  # fmt: skip
    """Combine the splits of a row.

    Grid: (tokens times heads, rank / channels).

    Args:
        output: fp16, bf16 or fp32 [tokens, heads, rank], with `token_stride` and `head_stride` (int32); filled.
        partial_output, partial_stats: of the decode kernel; splits: int32, at most `MERGE.splits`.
        lse: fp32 [tokens, heads], filled where `has_lse`: -inf of a row that sees no token.
        constant: fp32 [rank], added; read where `has_constant`.
        MERGE: `MergeLatentsConstants`.
    """
    HEADS: tl.constexpr = MERGE.heads
    RANK: tl.constexpr = MERGE.rank
    CHANNELS: tl.constexpr = MERGE.channels
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, MERGE.splits)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    slot, known = row * splits + split, split < splits
    maxima = tl.load(partial_stats + slot * 2, mask=known, other=_MASKED)
    maximum = tl.max(maxima, 0)
    weights = tl.exp2(maxima - maximum)
    total = tl.sum(tl.load(partial_stats + slot * 2 + 1, mask=known, other=0.0) * weights, 0)
    there = channel < RANK
    parts = tl.load(partial_output + slot[:, None] * RANK + channel[None, :], mask=known[:, None] & there[None, :],
                    other=0.0)  # fmt: skip
    result = tl.sum(parts * weights[:, None], 0) / tl.maximum(total, 1.0e-30)
    if MERGE.has_constant:
        result += tl.load(constant + channel, mask=there, other=0.0)
    target = output + row // HEADS * token_stride + row % HEADS * head_stride + channel
    tl.store(target, result.to(output.dtype.element_ty), mask=there)
    if MERGE.has_lse:
        natural = (maximum + tl.log2(tl.maximum(total, 1.0e-30))) * (1 / _LOG2_E)
        tl.store(lse + row, tl.where(total > 0, natural, float("-inf")), mask=tl.program_id(1) == 0)


class MergeLatentsLaunch(Launch):
    """Merges up to `splits` splits (a power of 2) of `DecodeLatentsLaunch` and adds `constant`, fp32 [rank] or None;
    `has_lse`: fill the step's lse. Called with an output of the dtype and strides of `output`."""

    def __init__(
        self, output: torch.Tensor, constant: torch.Tensor | None, splits: int, *, has_lse: bool = False
    ) -> None:
        assert output.stride(2) == 1, output.stride()
        _, heads, rank = output.shape
        of_constant, channels = output if constant is None else constant, min(MERGED_CHANNELS, power_of_2(rank))
        merge = MergeLatentsConstants(heads, rank, channels, splits, constant is not None, has_lse)
        super().__init__(
            _merge_latents_kernel,
            Arguments(of_constant, *output.stride()[:2]),
            dict(MERGE=merge),
            num_warps=4 if splits > 16 else 2,
        )

    @staticmethod
    def step(partial_output: torch.Tensor, partial_stats: torch.Tensor, lse: torch.Tensor | None = None) -> StepLaunch:
        """`lse`: for the kernel that fills it."""
        assert lse is None or lse.is_contiguous(), lse.stride()
        tokens, heads, splits, rank = partial_output.shape
        arguments = Arguments(partial_output, partial_stats, partial_stats if lse is None else lse, splits)
        return StepLaunch((tokens * heads, -(-rank // MERGED_CHANNELS), 1), arguments)
