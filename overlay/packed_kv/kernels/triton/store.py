"""Store kernel: rotate, search the scales, quantise, pack and write K and V of new tokens, in one launch. It rotates
the queries of a step's decodes, too (`rotate.py`). `store_section.py` stores, and says by which rules."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...codecs.pages import PagedCodec
from ...layout import ring_slot_bytes
from .. import power_of_2
from ..checks import check_ring, check_slots, check_stored_pages, head_stride
from ..kernel_layout import KernelLayout, PackedVector, kernel_layout
from .launch import Arguments, Launch, StepLaunch
from .means import QUERY_ROWS, QueryConstants, Rotation, bias_of_rows
from .quantize import Transform
from .records import blocks, stride_of_heads
from .rotate import QUERY_CHANNELS, QueryRotation, RotateStep, padded, rotate_rows
from .store_section import StoreConstants, StoreLayer, Vectors, padded_groups, rows_of, store_section


class PairConstants(NamedTuple):
    """Constants that `store_kernel` is compiled for. `queries`: None where it rotates no queries."""

    store: StoreConstants
    queries: QueryConstants | None


class StoreLaunch(Launch):
    """Stores a layer's K and V in the pages of `cache` and, if given, in the `ring`, in one launch, with no host sync:
    `PagedCodec.write`, and `codecs.ring.write`. With `queries`, it also rotates queries of this dtype and these
    strides.

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
        of_ring = cache if ring is None else ring
        tables = [one.channels for one in (codec.key, codec.value)]  # not read
        if codec.transform_tables is not None:
            tables = list(codec.transform_tables)
        of_key, of_value = (
            Vectors(
                x.stride(0), stride_of_heads(x), one.channels, head_stride(one.channels.view(-1, one.stored_dim)),
                table, head_stride(table),
            )
            for x, one, table in zip((key, value), (codec.key, codec.value), tables, strict=True)
        )  # fmt: skip
        transform, layout = codec.key.transform, kernel_layout(codec.layout)
        layer = StoreLayer(
            blocks(cache), of_key, of_value, codec.key.rotation_constants, transform.spectrum, blocks(of_ring)
        )  # fmt: skip
        constants = StoreConstants(
            heads,
            (0 if only_ring else block_size, 0 if ring is None else ring.shape[2]),
            Transform(
                codec.key.fmt.rotation,
                codec.key.order is not None or codec.value.order is not None,
                codec.transform_tables is not None,
                codec.needs_positions,
                transform.mean_blocks,
                transform.block_tokens,
            ),
            (codec.key.head_dim, codec.value.head_dim),
            layout,
            rows_of(layout),
        )
        if queries is None:
            unread = codec.key.rotation_constants
            rotation, of_queries = Rotation(unread, 0, 0, 0, 0.0, unread, 0), None
        else:
            rotation, of_queries = queries[1].fixed(queries[0]), queries[1].constants(queries[0], heads)
        super().__init__(
            store_kernel, Arguments((layer, rotation)), dict(CONSTANTS=PairConstants(constants, of_queries)),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    @staticmethod
    def step(
        codec: PagedCodec,
        kv_heads: int,
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        ring_slots: torch.Tensor | None = None,
        rotate: RotateStep | None = None,
    ) -> StepLaunch:
        """`positions`: None where the codec does not depend on them. `ring_slots`: slots in the ring of the first
        tokens. `rotate`: of `RotateQueryLaunch` with the same positions, for the launch with queries."""
        tokens = len(slots)
        if positions is None:
            assert not codec.needs_positions
            positions = slots  # not read
        else:
            assert positions.is_contiguous() and positions.dtype == torch.int64, (positions.dtype, positions.stride())
            assert len(positions) >= tokens, (positions.shape, slots.shape)
        if ring_slots is None:
            ring_slots = slots[:0]
        check_slots(slots, ring_slots)
        if rotate is None:
            nothing = slots.new_empty(0, dtype=torch.float16)  # its address is 0
            targets, rows, rotating = (nothing, nothing), 0, 0
        else:
            targets, rows, rotating = (rotate.rotated, rotate.bias), rotate.rows, math.prod(rotate.launch.grid)
        layout = kernel_layout(codec.layout)
        programs = max(
            _programs(vector, layout, tokens * kv_heads) for vector in (layout.key_vector, layout.value_vector)
        )
        arguments = Arguments(slots, tokens, positions, ring_slots, len(ring_slots), targets, rows)
        return StepLaunch((programs + -(-rotating // 2), 2, 1), arguments)


def _programs(vector: PackedVector, layout: KernelLayout, count: int) -> int:
    """Programs that store this many vectors of K, or of V."""
    groups = [power_of_2(section.groups) for section in vector.sections]
    return sum(-(-count // (rows_of(layout) // rows)) for rows in groups)


_QUERY_ROWS = tl.constexpr(QUERY_ROWS)
_QUERY_CHANNELS = tl.constexpr(QUERY_CHANNELS)


@triton.constexpr_function
def _are_alike(layout):
    """Return whether K and V have the same sections, so that a program's number alone decides its section."""
    return layout.key_vector.sections == layout.value_vector.sections


@triton.jit(
    do_not_specialize=["tokens", "ring_tokens", "query_rows"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "ring_slots_ptr"],
)
def store_kernel(
    key_ptr, value_ptr, query_ptr, slots_ptr, tokens, positions_ptr, ring_slots_ptr, ring_tokens, query_targets,
    query_rows, fixed, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Store new tokens and, with `PairConstants.queries`, rotate a step's queries and compute their biases.

    Grid: (programs of each section in turn, K and V); then the programs of the queries, in pairs.

    Args:
        key_ptr, value_ptr: fp16, bf16 or fp32 [tokens, heads, channels]; strides are in `StoreLayer`.
        query_ptr: fp16, bf16 or fp32 [query tokens, heads * group, dim]; strides are in `Rotation`.
        slots_ptr: int32 or int64 [tokens], -1: not stored; tokens: int32.
        positions_ptr: int64 [tokens]; read where `Transform.has_positions`.
        ring_slots_ptr: int32 [ring_tokens], -1: not stored; ring_tokens: int32.
        query_targets: fp16 [query tokens, heads * group, stored_dim], contiguous, filled with rotated queries; and fp32
            [query tokens, heads * group, 1 + mean_blocks + keeps_first], contiguous; see `bias_of_rows`.
        query_rows: int32, query tokens times group.
        fixed: (`StoreLayer`, `Rotation`); without queries the rotation is not read.
        CONSTANTS: `PairConstants`.
    """
    STORE: tl.constexpr = CONSTANTS.store
    LAYOUT: tl.constexpr = STORE.layout
    HEADS: tl.constexpr = STORE.heads
    ROWS: tl.constexpr = STORE.rows
    layer = fixed[0]
    is_key = tl.program_id(1) == 0
    x_ptr = key_ptr if is_key else value_ptr
    source = (
        x_ptr,
        layer.key.token_stride if is_key else layer.value.token_stride,
        layer.key.head_stride if is_key else layer.value.head_stride,
        layer.key.channels if is_key else layer.value.channels,
        layer.key.channels_stride if is_key else layer.value.channels_stride,
        layer.key.table if is_key else layer.value.table,
        layer.key.table_stride if is_key else layer.value.table_stride,
    )
    program = tl.program_id(0)
    if _are_alike(LAYOUT):
        for s in tl.static_range(len(LAYOUT.key_vector.sections)):
            programs = tl.cdiv(tokens * HEADS, ROWS // padded_groups(LAYOUT.key_vector.sections[s].groups))
            if (program >= 0) & (program < programs):
                store_section(
                    source, slots_ptr, tokens, positions_ptr, ring_slots_ptr, ring_tokens, layer, is_key,
                    (program, 1), s, True, STORE,
                )  # fmt: skip
            program -= programs
    else:
        of_value = program
        for s in tl.static_range(len(LAYOUT.key_vector.sections)):
            programs = tl.cdiv(tokens * HEADS, ROWS // padded_groups(LAYOUT.key_vector.sections[s].groups))
            if is_key & (program >= 0) & (program < programs):
                store_section(
                    source, slots_ptr, tokens, positions_ptr, ring_slots_ptr, ring_tokens, layer, True,
                    (program, 1), s, True, STORE,
                )  # fmt: skip
            program -= programs
        for s in tl.static_range(len(LAYOUT.value_vector.sections)):
            programs = tl.cdiv(tokens * HEADS, ROWS // padded_groups(LAYOUT.value_vector.sections[s].groups))
            if (tl.program_id(1) == 1) & (of_value >= 0) & (of_value < programs):
                store_section(
                    source, slots_ptr, tokens, positions_ptr, ring_slots_ptr, ring_tokens, layer, False,
                    (of_value, 1), s, False, STORE,
                )  # fmt: skip
            of_value -= programs
        program = tl.minimum(program, of_value)  # the longer of K's and V's come first
    QUERIES: tl.constexpr = CONSTANTS.queries
    if QUERIES is not None:
        ROTATED: tl.constexpr = padded(QUERIES.stored_dim) // _QUERY_CHANNELS
        BIAS_PROGRAMS: tl.constexpr = QUERIES.bias_programs
        PARTS: tl.constexpr = ROTATED + BIAS_PROGRAMS
        rotated_ptr, query_bias_ptr = query_targets
        program = 2 * program + tl.program_id(1)
        part, head, block = program % PARTS, program // PARTS % HEADS, program // (PARTS * HEADS)
        if (program >= 0) & (block * _QUERY_ROWS < query_rows):
            if BIAS_PROGRAMS > 0 and part >= ROTATED:
                bias_of_rows(
                    query_ptr, query_bias_ptr, positions_ptr, query_rows, block, head, part - ROTATED, fixed[1],
                    layer.spectrum, QUERIES,
                )  # fmt: skip
            else:
                rotate_rows(query_ptr, rotated_ptr, query_rows, block, head, part * _QUERY_CHANNELS, fixed[1], QUERIES)
