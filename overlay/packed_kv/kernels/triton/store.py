"""Store kernel: rotate, search the scales, quantise, pack and write K and V of new tokens, in one launch. It rotates
the queries of a step's decodes, too (`rotate.py`).

The bytes equal those of `PagedCodec.write`. The rounding rule, which makes them equal: everything is fp32, each add,
subtract and multiply rounded to nearest even on its own (no fused multiply-add, no flushing of denormals), in the order
that `codecs/rotations.py` and `codecs/scalar.py` state; a tie between two codes takes the lower magnitude, a tie
between two scales the one tried first. NaN and infinities become 0; centred and scaled, the rest is clamped to
+-INPUT_LIMIT.

A program takes `ROWS` groups of 32 channels, one a row, of one section (outlier or regular channels) of K or of V. A
channel's index in its group, d4..d0, is split between lanes and registers:

    tensor [ROWS * 4]   lanes: row * 4 + t, t = d2 d1
    tuple of 8 tensors  registers: k = d4 d3 d0

so that a lane holds all codes of one word of K (see layout.py), the error tree's levels 16, 8 and 1 stay inside a lane,
and rotations exchange lanes only for strides 2, 4, 32, 64, ... (lane ^ 1, 2, 4, 8, ...).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...codecs.pages import PagedCodec
from ...layout import ring_slot_bytes
from .. import power_of_2
from ..checks import check_ring, check_slots, check_stored_pages, head_stride
from ..kernel_layout import KernelLayout, kernel_layout
from .launch import Arguments, Launch, StepLaunch
from .means import COLUMNS, bias_of_rows
from .pages import KEY, VALUE
from .quantize import hadamard, load_rotated, quantize, round_to_half, search_scale
from .ring import store_ring
from .rotate import QUERY_CHANNELS, QUERY_ROWS, QueryRotation, rotate_rows
from .words import store_codes

ROWS = 8
"""Groups of a program: one for every 4 lanes of its one warp."""


class StoreLaunch(Launch):
    """Stores a layer's K and V in the pages of `cache` and, with `ring`, there too, in one launch, with no host sync:
    `PagedCodec.write`, and `codecs.ring.write`. With `queries`, it rotates some like these, too.

    Called with keys, values and queries of the dtypes and strides of `key`, `value` and `queries` (without queries:
    the key again); their rows beyond the slots are padding. `only_ring`: leave the pages alone.
    """

    def __init__(
        self,
        codec: PagedCodec,
        cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: torch.Tensor | None = None,
        queries: tuple[torch.Tensor, QueryRotation] | None = None,
        *,
        only_ring: bool = False,
    ) -> None:
        _, heads, block_size, _ = cache.shape
        check_stored_pages(cache, codec.slot_bytes)
        assert key.dtype == value.dtype and len(key) == len(value), (key.dtype, value.dtype, key.shape, value.shape)
        for x, one in ((key, codec.key), (value, codec.value)):
            assert x.shape[1:] == (heads, one.head_dim), (x.shape, heads, one.head_dim)
        assert key.stride(2) == value.stride(2) == 1, (key.stride(), value.stride())
        assert ring is not None or not only_ring
        for one in (codec.key, codec.value):
            assert one.heads in (None, heads), (one.heads, heads)
        if ring is not None:
            check_ring(ring, heads, ring_slot_bytes(codec.key.head_dim))
        channels = [codec.key.channels, codec.value.channels]
        transform = codec.key.transform
        tables = channels if codec.transform_tables is None else codec.transform_tables
        of_ring = cache if ring is None else ring
        unread = codec.key.rotation_constants
        of_query = (unread, 0, 0, 0, 0.0, unread, 0) if queries is None else queries[1].fixed(queries[0])
        padded_dim = power_of_2(codec.key.stored_dim)
        layout = kernel_layout(codec.layout)
        super().__init__(
            store_kernel,
            Arguments(
                cache, cache.stride(0), cache.stride(1),
                key.stride(0), key.stride(1), value.stride(0), value.stride(1),
                codec.key.rotation_constants,
                *(x for one in channels for x in (one, 0 if one.ndim == 1 else one.stride(0))),
                *(x for table in tables for x in (table, head_stride(table))),
                transform.spectrum,
                of_ring, of_ring.stride(0), of_ring.stride(1),
                *of_query,
            ),
            dict(
                TRANSFORMED=codec.transform_tables is not None, HAS_POSITIONS=transform.needs_positions,
                MEAN_BLOCKS=transform.mean_blocks, MEAN_BLOCK_TOKENS=transform.block_tokens,
                HEADS=heads, BLOCK_SIZE=block_size, ROWS=rows_of(layout), ROTATION=codec.key.fmt.rotation,
                ORDERED=codec.key.order is not None or codec.value.order is not None,
                HAS_PAGES=not only_ring, RING_BLOCK=0 if ring is None else ring.shape[2],
                QUERY_GROUP=0 if queries is None else queries[0].shape[1] // heads, QUERY_DIM=key.shape[2],
                QUERY_ROWS=QUERY_ROWS, QUERY_CHANNELS=QUERY_CHANNELS, PADDED_DIM=padded_dim,
                BIAS_PROGRAMS=0 if queries is None else queries[1].bias_programs, COLUMNS=COLUMNS,
                HEAD_DIM=codec.key.head_dim, VALUE_DIM=codec.value.head_dim, LAYOUT=layout,
            ),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    @staticmethod
    def step(
        codec: PagedCodec,
        kv_heads: int,
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        ring_slots: torch.Tensor | None = None,
        rotate: StepLaunch | None = None,
    ) -> StepLaunch:
        """`positions`: None where nothing of the codec depends on them. `ring_slots`: where the first so many tokens go
        in the ring. `rotate`: of `RotateQueryLaunch` with the same positions, for the launch with queries."""
        tokens = len(slots)
        if positions is None:
            assert not codec.key.transform.needs_positions
            positions = slots  # not read
        else:
            assert positions.is_contiguous() and positions.dtype == torch.int64, (positions.dtype, positions.stride())
            assert len(positions) >= tokens, (positions.shape, slots.shape)
        if ring_slots is None:
            ring_slots = slots[:0]
        check_slots(slots, ring_slots)
        nothing = slots.new_empty(0, dtype=torch.float16)  # its address is 0
        _, *of_queries = (positions, nothing, nothing, 0) if rotate is None else rotate.arguments.values
        layout = kernel_layout(codec.layout)
        groups = [power_of_2(section.groups) for section in layout.sections]
        programs = sum(-(-tokens * kv_heads // (rows_of(layout) // count)) for count in groups)
        rotating = 0 if rotate is None else math.prod(rotate.grid)
        arguments = Arguments(slots, tokens, positions, ring_slots, len(ring_slots), *of_queries)
        return StepLaunch((programs + -(-rotating // 2), 2, 1), arguments)


def rows_of(layout: KernelLayout) -> int:
    """Rows of a program: a vector's section fits."""
    return max(ROWS, *(power_of_2(section.groups) for section in layout.sections))


padded_groups = triton.constexpr_function(power_of_2)
"""Rows of a vector's section: a power of two, so that a rotation exchanges row and row ^ 2^i."""


@triton.jit(
    do_not_specialize=["tokens", "ring_tokens", "query_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "ring_slots_ptr"],
)
def store_kernel(
    key_ptr,
    value_ptr,
    query_ptr,
    slots_ptr,
    tokens,
    positions_ptr,
    ring_slots_ptr,
    ring_tokens,
    rotated_ptr,
    query_bias_ptr,
    query_rows,
    cache_ptr,
    cache_block_stride,
    cache_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    constants_ptr,
    key_channels_ptr,
    key_channels_stride,
    value_channels_ptr,
    value_channels_stride,
    key_table_ptr,
    key_table_stride,
    value_table_ptr,
    value_table_stride,
    spectrum_ptr,
    ring_ptr,
    ring_block_stride,
    ring_head_stride,
    columns_ptr,
    query_token_stride,
    query_head_stride,
    matrix_head_stride,
    query_scale,
    means_ptr,
    means_head_stride,
    TRANSFORMED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    MEAN_BLOCKS: tl.constexpr,
    MEAN_BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    QUERY_GROUP: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    QUERY_CHANNELS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BIAS_PROGRAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTATION: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Store new tokens and, with QUERY_GROUP, rotate a step's queries and compute their biases.

    Grid: (programs of each section in turn, K and V); behind these, those of the queries, in pairs.

    Args:
        key_ptr, value_ptr: fp16, bf16 or fp32 [tokens, HEADS, HEAD_DIM] and [tokens, HEADS, VALUE_DIM], with
            `key_token_stride`, `key_head_stride`, `value_token_stride` and `value_head_stride` (int32).
        query_ptr: fp16, bf16 or fp32 [query tokens, HEADS * QUERY_GROUP, QUERY_DIM], with `query_token_stride` and
            `query_head_stride` (int32).
        slots_ptr: int32 or int64 [tokens], -1: not stored; tokens: int32.
        positions_ptr: int64 [tokens]; read where HAS_POSITIONS, or MEAN_BLOCK_TOKENS is not 0.
        ring_slots_ptr: int32 [ring_tokens], -1: not stored; ring_tokens: int32.
        rotated_ptr: fp16 [query tokens, HEADS * QUERY_GROUP, stored_dim], contiguous; filled.
        query_bias_ptr: fp32 [query tokens, HEADS * QUERY_GROUP, 1 + MEAN_BLOCKS], contiguous; see `bias_of_rows`.
        query_rows: int32, query tokens times QUERY_GROUP.
        cache_ptr: uint8 [blocks, HEADS, BLOCK_SIZE, slot_bytes], with `cache_block_stride` and `cache_head_stride`.
        constants_ptr: fp32 [stored_dim], the rotations' constants by packed channel.
        key_channels_ptr, value_channels_ptr: int64 [1 or HEADS, stored_dim], the channels in packing order, with
            `key_channels_stride` and `value_channels_stride` over heads; read where ORDERED.
        key_table_ptr, value_table_ptr: fp32 [1 or HEADS, 4, stored_dim] of `ChannelTransform.table`, with
            `key_table_stride` and `value_table_stride` over heads; read where TRANSFORMED.
        spectrum_ptr: fp32 [MEAN_BLOCKS, 2, stored_dim]; read where MEAN_BLOCK_TOKENS is not 0.
        ring_ptr: uint8 [blocks, HEADS, RING_BLOCK, ring_slot_bytes], with `ring_block_stride` and `ring_head_stride`;
            written where RING_BLOCK is not 0.
        columns_ptr: fp16 [1 or HEADS, stored_dim, stored_dim], the rotation's matrix by columns, with
            `matrix_head_stride`; query_scale: fp32.
        means_ptr: fp32 [1 or HEADS, 3, stored_dim] of `Means.rows`, with `means_head_stride`.
        LAYOUT: `KernelLayout`, which has stored_dim.
    """
    STORED_DIM: tl.constexpr = LAYOUT.head_dim
    is_key = tl.program_id(1) == 0
    x_ptr = key_ptr if is_key else value_ptr
    token_stride = key_token_stride if is_key else value_token_stride
    head_stride = key_head_stride if is_key else value_head_stride
    channels_ptr = key_channels_ptr if is_key else value_channels_ptr
    channels_stride = key_channels_stride if is_key else value_channels_stride
    table_ptr = key_table_ptr if is_key else value_table_ptr
    table_stride = key_table_stride if is_key else value_table_stride
    program = tl.program_id(0)
    for s in tl.static_range(len(LAYOUT.sections)):
        programs = tl.cdiv(tokens * HEADS, ROWS // padded_groups(LAYOUT.sections[s].groups))
        if (program >= 0) & (program < programs):
            store_section(
                cache_ptr, cache_block_stride, cache_head_stride, slots_ptr, tokens,
                x_ptr, token_stride, head_stride, constants_ptr, channels_ptr, channels_stride,
                ring_ptr, ring_block_stride, ring_head_stride, ring_slots_ptr, ring_tokens, is_key, program,
                positions_ptr, table_ptr, table_stride, spectrum_ptr,
                TRANSFORMED, HAS_POSITIONS, MEAN_BLOCKS, MEAN_BLOCK_TOKENS,
                HEADS, BLOCK_SIZE, ROWS, ORDERED, HAS_PAGES, RING_BLOCK, ROTATION, HEAD_DIM, VALUE_DIM,
                s, LAYOUT, 1, 1,
            )  # fmt: skip
        program -= programs
    if QUERY_GROUP > 0:
        ROTATED: tl.constexpr = PADDED_DIM // QUERY_CHANNELS
        PARTS: tl.constexpr = ROTATED + BIAS_PROGRAMS
        program = 2 * program + tl.program_id(1)
        part, head, block = program % PARTS, program // PARTS % HEADS, program // (PARTS * HEADS)
        if (program >= 0) & (block * QUERY_ROWS < query_rows):
            if BIAS_PROGRAMS > 0 and part >= ROTATED:
                bias_of_rows(
                    query_ptr, query_bias_ptr, positions_ptr, query_rows, block, head, part - ROTATED,
                    query_token_stride, query_head_stride, query_scale, means_ptr, means_head_stride, spectrum_ptr,
                    HEADS, QUERY_GROUP, QUERY_DIM, STORED_DIM, QUERY_ROWS, MEAN_BLOCKS, MEAN_BLOCK_TOKENS, COLUMNS,
                    BIAS_PROGRAMS,
                )  # fmt: skip
            else:
                rotate_rows(
                    query_ptr, rotated_ptr, query_rows, block, head, part * QUERY_CHANNELS, columns_ptr,
                    query_token_stride, query_head_stride, matrix_head_stride, query_scale,
                    HEADS, QUERY_GROUP, QUERY_DIM, STORED_DIM, QUERY_CHANNELS,
                )  # fmt: skip


@triton.jit
def store_section(
    cache_ptr, cache_block_stride, cache_head_stride, slots_ptr, tokens,
    x_ptr, token_stride, head_stride, constants_ptr, channels_ptr, channels_stride,
    ring_ptr, ring_block_stride, ring_head_stride, ring_slots_ptr, ring_tokens, is_key, program,
    positions_ptr, table_ptr, table_stride, spectrum_ptr,
    TRANSFORMED: tl.constexpr, HAS_POSITIONS: tl.constexpr, MEAN_BLOCKS: tl.constexpr, MEAN_BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, ORDERED: tl.constexpr, HAS_PAGES: tl.constexpr,
    RING_BLOCK: tl.constexpr, ROTATION: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    NUMBER: tl.constexpr, LAYOUT: tl.constexpr, PARTS: tl.constexpr, split, ROW: tl.constexpr = None,
):  # fmt: skip
    """Store the groups of section NUMBER of ROWS / A_VECTOR vectors (token, head), those of program `program`; or, with
    `split` programs for these, a share of them: all rotate whole vectors, and each quantises its PARTS / split parts of
    the rows one after the other.

    `x_ptr`, `channels_ptr` and `table_ptr` with their strides are those of K, with `is_key`, or of V; the other
    arguments are `store_kernel`'s. ROW: `LatentRowLayout`, where pages have latent rows; else None.
    """
    SECTION: tl.constexpr = LAYOUT.sections[NUMBER]
    GROUPS: tl.constexpr = SECTION.groups
    FIRST_GROUP: tl.constexpr = SECTION.first_group
    HEAD_GROUPS: tl.constexpr = len(LAYOUT.groups)
    index = tl.arange(0, 4 * ROWS)
    block = program // split if PARTS > 1 else program
    group, vector, exists = _own_groups(index, block, tokens, HEADS, ROWS, GROUPS)
    token, head = (vector // HEADS).to(tl.int64), (vector % HEADS).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
    ring_slot = slot
    if RING_BLOCK > 0:
        ring_slot = tl.load(ring_slots_ptr + token, mask=exists & (token < ring_tokens), other=-1).to(tl.int64)

    x_row = x_ptr + token * token_stride + head * head_stride
    channels_row = channels_ptr + head * channels_stride
    table_row = table_ptr + head * table_stride
    mean_row, turn_row, turned = table_row, spectrum_ptr, tl.where(is_key, exists, False)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + token, mask=exists, other=1)
        mean_row += tl.where(position == 0, 2 * HEAD_GROUPS * 32, 0)
        if MEAN_BLOCK_TOKENS > 0:
            mean_block = tl.minimum(tl.maximum(position, 0) // MEAN_BLOCK_TOKENS, MEAN_BLOCKS - 1).to(tl.int32)
            turn_row += mean_block * (2 * HEAD_GROUPS * 32)
            turned = turned & (position != 0)
    scale_row = table_row + 3 * HEAD_GROUPS * 32
    dim = HEAD_DIM if is_key else VALUE_DIM
    x = load_rotated(
        x_row, channels_row, constants_ptr, FIRST_GROUP + group, exists, index, ORDERED, ROTATION,
        mean_row, scale_row, TRANSFORMED, turn_row, turned, HEAD_GROUPS * 32, MEAN_BLOCK_TOKENS > 0,
        dim, HEAD_DIM % 32 != 0 or VALUE_DIM != HEAD_DIM,
    )  # fmt: skip
    if ROTATION == "hadamard":
        x = hadamard(x, group, index, GROUPS)
    if PARTS == 1:
        _store_groups(
            x, group, head, slot, ring_slot, cache_ptr, cache_block_stride, cache_head_stride,
            ring_ptr, ring_block_stride, ring_head_stride, is_key, BLOCK_SIZE, HAS_PAGES, RING_BLOCK, NUMBER, LAYOUT,
            ROW,
        )  # fmt: skip
    else:
        first = program % split * (PARTS // split)
        for part in range(first, first + PARTS // split):
            own = part * (4 * ROWS // PARTS) + tl.arange(0, 4 * ROWS // PARTS)
            y = ()
            for k in tl.static_range(8):
                y += (tl.gather(x[k], own, 0),)
            own_group, own_vector, _ = _own_groups(own, block, tokens, HEADS, ROWS, GROUPS)
            _store_groups(
                y, own_group, (own_vector % HEADS).to(tl.int64), tl.gather(slot, own, 0), tl.gather(ring_slot, own, 0),
                cache_ptr, cache_block_stride, cache_head_stride, ring_ptr, ring_block_stride, ring_head_stride, is_key,
                BLOCK_SIZE, HAS_PAGES, RING_BLOCK, NUMBER, LAYOUT, ROW,
            )  # fmt: skip


@triton.jit
def _own_groups(index, block, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Group in the section, vector (token, head) and whether there is one, of the lanes `index` of a block of ROWS
    rows."""
    A_VECTOR: tl.constexpr = padded_groups(GROUPS)
    row = index // 4
    vector, group = block * (ROWS // A_VECTOR) + row // A_VECTOR, row % A_VECTOR
    return group, vector, (group < GROUPS) & (vector < tokens * HEADS)


@triton.jit
def _store_groups(
    x, group, head, slot, ring_slot, cache_ptr, cache_block_stride, cache_head_stride, ring_ptr, ring_block_stride,
    ring_head_stride, is_key, BLOCK_SIZE: tl.constexpr, HAS_PAGES: tl.constexpr, RING_BLOCK: tl.constexpr,
    NUMBER: tl.constexpr, LAYOUT: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Quantise rotated groups and write them to the ring and to pages.

    x: 8 fp32 tensors [lanes]; group, of the section, int32, and head, slot and ring_slot, int64 [lanes]. The other
    arguments are `store_section`'s.
    """
    SECTION: tl.constexpr = LAYOUT.sections[NUMBER]
    CODE: tl.constexpr = SECTION.code
    BINS: tl.constexpr = SECTION.bins
    FIRST_GROUP: tl.constexpr = SECTION.first_group
    HEAD_GROUPS: tl.constexpr = len(LAYOUT.groups)
    index = tl.arange(0, group.shape[0])
    lane = index % 4
    stored = slot >= 0
    slot = tl.where(stored, slot, 0)
    inside = slot % BLOCK_SIZE
    page = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + head * cache_head_stride
    RING: tl.constexpr = LAYOUT.ring
    if RING_BLOCK > 0:
        in_ring = ring_slot >= 0
        ring_slot = tl.where(in_ring, ring_slot, 0)
        entry = ring_ptr + ring_slot // RING_BLOCK * ring_block_stride + head * ring_head_stride
        entry += ring_slot % RING_BLOCK * RING.slot_bytes
        if is_key:
            store_ring(entry, x, FIRST_GROUP + group, index, in_ring, KEY, RING)
        else:
            store_ring(entry, x, FIRST_GROUP + group, index, in_ring, VALUE, RING)
    if HAS_PAGES:
        if len(CODE.magnitudes) == 0:
            magnitudes, signs, scale = round_to_half(x)
        else:
            scale = search_scale(x, index, CODE, BINS)
            magnitudes, signs = quantize(x, scale, CODE, BINS)
        if ROW is not None:
            HALF: tl.constexpr = ROW.half
            HALF_SECTION: tl.constexpr = HALF.sections[NUMBER]
            place, n, number = page + inside * ROW.row_bytes, group % 2 * 8, group // 2
            store_codes(place, n, number, lane, stored, magnitudes, signs, True, HALF_SECTION, HALF, 4)
            scale_at = ROW.scales_at + FIRST_GROUP + group
        else:
            place, n = page + inside // 16 * LAYOUT.micro_block_bytes, (inside % 16).to(tl.int32)
            if is_key:
                words_at = place + LAYOUT.words_at[KEY]
                store_codes(words_at, n, group, lane, stored, magnitudes, signs, True, SECTION, LAYOUT, 32)
                scale_at = n % 8 * (2 * HEAD_GROUPS) + 2 * (FIRST_GROUP + group) + n // 8 + LAYOUT.scales_at[KEY]
            else:
                words_at = place + LAYOUT.words_at[VALUE]
                store_codes(words_at, n, group, lane, stored, magnitudes, signs, False, SECTION, LAYOUT, 32)
                scale_at = n % 8 // 2 * (4 * HEAD_GROUPS) + 4 * (FIRST_GROUP + group) + n // 8 * 2 + n % 2
                scale_at += LAYOUT.scales_at[VALUE]
        tl.store(place + scale_at, scale.to(tl.uint8), mask=stored & (lane == 0))
