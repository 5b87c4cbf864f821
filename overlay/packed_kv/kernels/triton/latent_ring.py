"""The ring of recent latents: the tokens that decodes read there, attention over them, and the gather for prompts.

Attention over pages comes first, by whichever kernel, and leaves its output and lse; `attend_latent_ring` adds the
tokens of the ring to it. A token has its latent and its RoPE channels in one vector of 8 bits (`layout.py`), which
`latent_store.py` writes. The references are `LatentCodec.read_ring`, `page_lens` and `attend` of
`reference/latent_attention.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...layout import RingLayout, ring_layout
from ..checks import check_int32, check_ring
from ..units import LOG2_E
from .latent_decode import LatentShape, groups_at_a_time, row_tiles
from .launch import Arguments, Launch, StepLaunch
from .pages import KEY
from .records import strides
from .ring import ring_slots, ring_step_size

TILE_TOKENS = 64
"""Ring tokens per tile: the default recent window."""
WARPS = 8
"""Warps of a program; with 4, registers do not suffice."""
REQUESTS_A_PROGRAM = 128
"""Requests per program of `split_lens`."""
_LOG2_E = tl.constexpr(LOG2_E)
_MASKED = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["requests"])
def _split_lens_kernel(page_lens, query_start, seq_lens, first, requests, WINDOW: tl.constexpr, REQUESTS: tl.constexpr):
    """Grid: runs of REQUESTS requests. int32 `query_start` [requests + 1], `seq_lens` and `first` [requests]; fills
    `page_lens` [requests]."""
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    exists = request < requests
    start = tl.load(query_start + request, mask=exists, other=0)
    count = tl.load(query_start + request + 1, mask=exists, other=0) - start
    seq_len = tl.load(seq_lens + request, mask=exists, other=0)
    in_ring = tl.load(first + request, mask=exists, other=0)
    known = tl.where(in_ring > 0, in_ring + count - 1, 0)
    tl.store(page_lens + request, tl.maximum(tl.minimum(tl.maximum(known, seq_len - WINDOW), seq_len), 0), mask=exists)


def split_lens(
    query_start: torch.Tensor, seq_lens: torch.Tensor, first: torch.Tensor, window: int, page_lens: torch.Tensor
) -> None:
    """Fill `page_lens`, int32 [requests or more], with `latent_attention.page_lens` of the other arguments, in one
    launch."""
    requests = len(seq_lens)
    launch = _bind_split_lens(window, seq_lens.device)
    grid = (-(-requests // REQUESTS_A_PROGRAM), 1, 1)
    launch(grid, (page_lens, query_start, seq_lens, first), Arguments(requests))


@functools.cache
def _bind_split_lens(window: int, device: torch.device) -> Launch:
    """The kernel for this window; `device` keeps kernels of several devices apart."""
    return Launch(_split_lens_kernel, Arguments(), dict(WINDOW=window, REQUESTS=REQUESTS_A_PROGRAM), num_warps=4)


@triton.jit
def _load_groups(slots, scales, mask, at, COUNT: tl.constexpr):
    """COUNT groups of tokens' vectors, fp16 [tokens, 32 * COUNT], channels in the order of their bytes.

    slots: pointers to the tokens' slots; `scales`: to the groups' scales in them; `at`: offset of the groups' codes.
    """
    TOKENS: tl.constexpr = slots.shape[0]
    group = tl.arange(0, COUNT)
    code = tl.load(
        slots[:, None, None] + at + group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :],
        mask=mask[:, None, None], other=128,
    )  # fmt: skip
    step_size = ring_step_size(tl.load(scales[:, None] + group[None, :], mask=mask[:, None], other=0))
    return tl.reshape(((code.to(tl.float32) - 128) * step_size[:, :, None]).to(tl.float16), [TOKENS, 32 * COUNT])


@triton.jit
def _swap(x):
    """Reorder [rows, channels] from the order of channels to the order of their bytes, or the reverse."""
    y = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 4, 4, 2])
    return tl.reshape(tl.permute(y, (0, 1, 3, 2, 4)), x.shape)


@triton.jit
def _channel_of(position):
    """Channel of a vector whose byte is at `position`."""
    inner = position % 32
    return position // 32 * 32 + inner // 2 % 4 * 8 + inner // 8 * 2 + inner % 2


class LatentRingLayer(NamedTuple):
    """A layer's arguments of `_attend_latent_ring_kernel`: tensors at the launch, pointers in the kernel.

    Attributes:
        ring: uint8 [blocks, 1, block, ring_slot_bytes], with `block_stride` (int32).
        latent, rope, output: `Strides` of queries, of their RoPE channels and of the output.
        inverse_gain: fp32 [rank], factors of sums of the ring's latents.
        constant: fp32 [rank], added to the result; read where `has_constant`.
        scale: fp32, of scores, times log2 e.
    """

    ring: Any
    block_stride: Any
    latent: Any
    rope: Any
    output: Any
    inverse_gain: Any
    constant: Any
    scale: Any


class AttendRingConstants(NamedTuple):
    """Constants that `_attend_latent_ring_kernel` is compiled for: heads; rows of a program; tokens of a tile and of a
    ring's block; channels of a latent and of RoPE; whether a constant is added; and the ring's layout."""

    heads: int
    rows: int
    tokens: int
    block: int
    rank: int
    rope_dim: int
    has_constant: bool
    ring: RingLayout


_chunk_of = triton.constexpr_function(groups_at_a_time)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["q_latent", "q_rope", "table", "query_start", "seq_lens", "page_lens"],
)
def _attend_latent_ring_kernel(
    q_latent, q_rope, output, table, query_start, seq_lens, page_lens, part, lse, table_stride, layer,
    ATTEND: tl.constexpr,
):  # fmt: skip
    """Attention of rows over a request's ring, added to the attention over its pages, for a chunk of groups of outputs.

    Grid: (tiles of rows, requests, chunks of groups); each program has all scores.

    Args:
        q_latent, q_rope, output: fp16, bf16 or fp32 [tokens, heads, rank], [tokens, heads, rope_dim] and
            [tokens, heads, rank]; `output` is filled.
        table: int32 [requests, ring blocks], with `table_stride`.
        query_start, seq_lens, page_lens: int32 [requests + 1], [requests] and [requests].
        part, lse: fp32 [tokens, heads, rank] and [tokens, heads], contiguous: of the pages.
        layer: `LatentRingLayer`. ATTEND: `AttendRingConstants`.
    """
    HEADS: tl.constexpr = ATTEND.heads
    ROWS: tl.constexpr = ATTEND.rows
    TOKENS: tl.constexpr = ATTEND.tokens
    BLOCK: tl.constexpr = ATTEND.block
    RANK: tl.constexpr = ATTEND.rank
    ROPE_DIM: tl.constexpr = ATTEND.rope_dim
    RING: tl.constexpr = ATTEND.ring
    CHUNK: tl.constexpr = _chunk_of(RANK)
    CHUNKS: tl.constexpr = RANK // 32 // CHUNK
    CHANNELS: tl.constexpr = 32 * CHUNK
    request = tl.program_id(1)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    seq_len, page_len = tl.load(seq_lens + request), tl.load(page_lens + request)
    if tl.program_id(0) * ROWS >= count * HEADS:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < count * HEADS
    query, head = (start + row // HEADS).to(tl.int64), row % HEADS

    channel = tl.arange(0, CHANNELS)
    latent_query = q_latent + query * layer.latent.token + head * layer.latent.head
    rope_query = q_rope + query * layer.rope.token + head * layer.rope.head
    chunk, sums = tl.program_id(2), tl.zeros([ROWS, CHANNELS], tl.float32)
    maximum, total = tl.full([ROWS], _MASKED, tl.float32), tl.zeros([ROWS], tl.float32)

    limit = seq_len - count + row // HEADS + 1  # a row sees the tokens below it
    own_table = table + request.to(tl.int64) * table_stride
    for base in range(tl.maximum(page_len - count + 1, 0), seq_len, TOKENS):
        token = base + tl.arange(0, TOKENS)
        nearest = tl.minimum(token, seq_len - 1)
        entered = tl.load(own_table + nearest // BLOCK) > 0  # the null block has no token of the request
        slots = ring_slots(layer.ring, own_table, nearest, layer.block_stride, BLOCK, RING.slot_bytes)
        scales, codes = slots + RING.scales[KEY], slots + RING.codes[KEY]
        scores = tl.zeros([ROWS, TOKENS], tl.float32)
        for c in tl.static_range(CHUNKS):
            x = tl.load(latent_query[:, None] + c * CHANNELS + channel[None, :], mask=valid[:, None], other=0.0)
            latents = _load_groups(codes, scales + c * CHUNK, entered, c * CHANNELS, CHUNK)
            scores = tl.dot(_swap((x.to(tl.float32) * layer.scale).to(tl.float16)), tl.trans(latents), scores)
        for g in tl.static_range(ROPE_DIM // 32):
            x = tl.load(rope_query[:, None] + g * 32 + tl.arange(0, 32)[None, :], mask=valid[:, None], other=0.0)
            rope = _load_groups(codes, scales + RANK // 32 + g, entered, RANK + g * 32, 1)
            scores = tl.dot(_swap((x.to(tl.float32) * layer.scale).to(tl.float16)), tl.trans(rope), scores)
        visible = (token[None, :] < limit[:, None]) & (token[None, :] >= limit[:, None] - (seq_len - page_len))
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_maximum[:, None]), tl.exp2(maximum - new_maximum)
        maximum, total = new_maximum, total * shrink + tl.sum(weights, 1)
        latents = _load_groups(codes, scales + chunk * CHUNK, entered, chunk * CHANNELS, CHUNK)
        sums = tl.dot(weights.to(tl.float16), latents, sums * shrink[:, None])

    of_pages = tl.load(lse + query * HEADS + head, mask=valid, other=0.0) * _LOG2_E
    top = tl.maximum(maximum, of_pages)
    page_weight, ring_weight = tl.exp2(of_pages - top), tl.exp2(maximum - top)
    norm = 1 / tl.maximum(page_weight + ring_weight * total, 1.0e-30)
    at = chunk * CHANNELS + channel
    source = part + (query * HEADS + head)[:, None] * RANK + at[None, :]
    x = tl.load(source, mask=valid[:, None], other=0.0) * (page_weight * norm)[:, None]
    x += _swap(sums) * tl.load(layer.inverse_gain + at)[None, :] * (ring_weight * norm)[:, None]
    if ATTEND.has_constant:
        x += tl.load(layer.constant + at)[None, :]
    target = (query * layer.output.token + head * layer.output.head)[:, None] + at[None, :]
    tl.store(output + target, x.to(output.dtype.element_ty), mask=valid[:, None])


class AttendLatentRingLaunch(Launch):
    """Attends over a layer's `ring`, and adds the result to the attention over its pages. `inverse_gain`: 1 over V's
    gain. `constant`: added to each result, or None. Called with queries and an output of the dtypes and strides of
    `q_latent`, `q_rope` and `output`."""

    def __init__(
        self, codec: LatentCodec, shape: LatentShape, ring: torch.Tensor,
        like: tuple[torch.Tensor, torch.Tensor, torch.Tensor], inverse_gain: torch.Tensor,
        constant: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """`like`: `q_latent`, `q_rope` and `output`."""
        check_ring(ring, 1, codec.ring_slot_bytes, 8)
        latent, rope, output = map(strides, like)
        of_constant = inverse_gain if constant is None else constant
        layer = LatentRingLayer(
            ring, ring.stride(0), latent, rope, output, inverse_gain, of_constant, shape.scale * LOG2_E
        )
        attend = AttendRingConstants(
            shape.heads, shape.rows, TILE_TOKENS, ring.shape[2], codec.rank, codec.rope_dim, constant is not None,
            ring_layout(codec.rank + codec.rope_dim, 1),
        )  # fmt: skip
        super().__init__(
            _attend_latent_ring_kernel, Arguments(layer), dict(ATTEND=attend), num_warps=WARPS, num_stages=1
        )

    @staticmethod
    def step(
        shape: LatentShape,
        max_query_len: int,
        ring: Ring,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        page_lens: torch.Tensor,
        part: torch.Tensor,
        lse: torch.Tensor,
    ) -> StepLaunch:
        """`part`, `lse`: the attention over pages, without the constant. `max_query_len`: known on the host."""
        table, rank = ring.block_table, part.shape[2]
        check_int32(table, query_start, seq_lens, page_lens)
        assert part.is_contiguous() and lse.is_contiguous(), (part.stride(), lse.stride())
        grid = row_tiles(shape, max_query_len), len(seq_lens), rank // 32 // groups_at_a_time(rank)
        return StepLaunch(grid, Arguments(table, query_start, seq_lens, page_lens, part, lse, table.stride(0)))


class GatherConstants(NamedTuple):
    """Constants that `_gather_latent_ring_kernel` is compiled for: tokens of the recent `window`, of a tile and of a
    ring's `block`; `channels` of a row; whether latents are written `as_values`; and the `ring`'s layout."""

    window: int
    tokens: int
    block: int
    channels: int
    as_values: bool
    ring: RingLayout


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["rows", "table", "first", "starts", "first_rows", "context_lens"],
)
def _gather_latent_ring_kernel(
    rows, table, first, starts, first_rows, context_lens, table_stride, ring, block_stride, inverse_gain,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Grid: (requests, groups of 32 channels). int32 `table` [requests, ring blocks], `first`, `starts` and
    `context_lens` [requests], `first_rows` [requests + 1]; `rows` [tokens, channels] of any float dtype; `ring` uint8
    [blocks, 1, block, ring_slot_bytes]; `inverse_gain` fp32 [rank], read where `as_values`. GATHER:
    `GatherConstants`."""
    TOKENS: tl.constexpr = GATHER.tokens
    BLOCK: tl.constexpr = GATHER.block
    RING: tl.constexpr = GATHER.ring
    request, group = tl.program_id(0), tl.program_id(1)
    start, row, end_row = tl.load(starts + request), tl.load(first_rows + request), tl.load(first_rows + request + 1)
    end = start + end_row - row
    low = tl.maximum(tl.load(first + request), tl.load(context_lens + request) - GATHER.window + 1)
    own_table = table + request.to(tl.int64) * table_stride
    channel = group * 32 + _channel_of(tl.arange(0, 32))
    for base in range(tl.maximum(low, start), end, TOKENS):
        token = base + tl.arange(0, TOKENS)
        there = token < end
        slots = ring_slots(ring, own_table, tl.minimum(token, end - 1), block_stride, BLOCK, RING.slot_bytes)
        x = _load_groups(slots + RING.codes[KEY], slots + RING.scales[KEY] + group, there, group * 32, 1)
        if GATHER.as_values:
            x = x.to(tl.float32) * tl.load(inverse_gain + channel)[None, :]
        target = rows + (row + token - start).to(tl.int64)[:, None] * GATHER.channels + channel[None, :]
        tl.store(target, x.to(rows.dtype.element_ty), mask=there[:, None])


class GatherLatentRingLaunch(Launch):
    """Overwrites the tokens that `GatherLatentsLaunch` read from the pages and that a layer's ring has. `as_values`:
    latents, without RoPE, are written for V, so times `inverse_gain`. Called with the rows to fill."""

    def __init__(self, codec: LatentCodec, ring: Ring, inverse_gain: torch.Tensor, *, as_values: bool) -> None:
        cache = ring.cache
        check_ring(cache, 1, codec.ring_slot_bytes, 8)
        channels = codec.rank + codec.rope_dim
        constants = GatherConstants(
            ring.window, TILE_TOKENS, cache.shape[2], channels, as_values, ring_layout(channels, 1)
        )
        fixed = Arguments(cache, cache.stride(0), inverse_gain)
        super().__init__(_gather_latent_ring_kernel, fixed, dict(GATHER=constants), num_warps=1)

    @staticmethod
    def step(
        codec: LatentCodec,
        rows: torch.Tensor,
        ring: Ring,
        starts: torch.Tensor,
        first_rows: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        as_values: bool,
    ) -> StepLaunch:
        """`rows`, `starts`, `first_rows`: see `GatherLatentsLaunch`. `context_lens`: tokens of each request before its
        prompt's; the ring has the last `window` - 1 of them."""
        table = ring.block_table
        check_int32(table, starts, first_rows, context_lens)
        assert rows.is_contiguous(), rows.stride()
        channels = codec.rank if as_values else codec.rank + codec.rope_dim
        arguments = Arguments(table, ring.first, starts, first_rows, context_lens, table.stride(0))
        return StepLaunch((len(starts), channels // 32, 1), arguments)
