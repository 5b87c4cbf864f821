"""Columns, grids and schedules of `decode.cu`: how a batch is cut into blocks, and how many blocks run at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...formats import GROUP_SIZE
from ...gpu_generations import KIB, Generation, generation_of
from ...layout import PageLayout
from ..kernel_layout import kernel_layout
from . import COLUMNS, LARGE_HEAD, pass_tokens
from .schedule import Scheduler, item_count

COLUMN_COUNTS = (4, 8, 16, 24, 32, 48, COLUMNS)
"""The columns that kernels are compiled for. Beyond the last, query tokens take several passes over the keys."""
NARROW, NARROW_LARGE = 32, 8
"""The most columns that each warp serves alone, for heads of up to 128 channels and for larger ones. Beyond, a block's
warps share one unpacking (`wide.cuh`, `roles.cuh`)."""
REGISTERS = {4: 128, 8: 128, 16: 255, 24: 255, 32: 255, 48: 255, 64: 255}
"""Registers of a lane, by columns, that the kernels are compiled to fit."""
ROLE_REGISTERS = 128
"""The same for blocks with warps that only unpack, on average: these warps give registers to the warps that attend."""
WARP_BYTES = {4: 9 * KIB, 8: 9 * KIB, 16: 11 * KIB, 24: 16 * KIB, 32: 22 * KIB, 48: 24 * KIB, 64: 28 * KIB}
"""Shared memory of a warp, by columns: an upper bound, for any layout, of its share of a block's."""
LARGE_WARPS = {4: 4, 8: 4, 16: 2, 24: 4, 32: 8, 48: 8, 64: 8}
"""Warps of a block over heads of `LARGE_HEAD` channels: outputs take twice the registers that 128 channels take, and
tiles have twice the bytes. From 16 columns on they are a team, which shares the channels: a warp of 2 holds the outputs
of 128, of 4 of 64, of 8 of 32. The fewer they are, the less they wait for each other."""
LARGE_REGISTERS = {4: 168, 8: 168, 16: 255, 24: 255, 32: 128, 48: 255, 64: 255}
"""`REGISTERS` for such heads. Up to 8 columns, an SM holds three blocks with 168 registers, two with 255; with 32
columns, two with 128."""
LARGE_WARP_BYTES = {4: 18 * KIB, 8: 18 * KIB, 16: 24 * KIB, 24: 25 * KIB, 32: 14 * KIB, 48: 16 * KIB, 64: 18 * KIB}
"""`WARP_BYTES` of such heads."""
HOPPER = generation_of((9, 0))
UNPACKERS = 4
"""Warps of a block that only unpack, where it has any (`roles.cuh`): as many as attend."""
MAX_FINAL_BLOCKS = 8
"""Resident blocks per (request, KV head) pair up to which blocks write the output. Beyond, a warp has so few tiles that
combining several warps costs more than a second launch: blocks of one warp write partial results for `merge`."""
MAX_SPLITS = 128
"""The most partial results that `merge` combines."""


def is_wide(columns: int, head_dim: int) -> bool:
    """Return whether the warps of a block share columns."""
    return columns > (NARROW_LARGE if head_dim == LARGE_HEAD else NARROW)


class Grid(NamedTuple):
    """Blocks of `warps` warps.

    With `is_final`, they write the output, and `blocks` is the work items of each KV head (`schedule.py`). Otherwise
    they write partial results, and `blocks` is the splits of each (request, KV head) pair.
    """

    warps: int
    blocks: int
    is_final: bool


class GridInputs(NamedTuple):
    """Numbers that decide how many blocks run at a time: KV heads of this rank, channels of a head, SMs, whether blocks
    of many columns have warps that only unpack (`has_unpackers`), and the GPU's generation."""

    kv_heads: int
    head_dim: int
    sm_count: int
    unpackers: bool = False
    generation: Generation = HOPPER

    def warps_per_sm(self, columns: int) -> int:
        """Return how many warps an SM holds, without the warps that only unpack: a power of 2, or whole blocks over
        heads of 256 channels."""
        if self.unpackers and columns > NARROW:
            return self.generation.resident_warps(ROLE_REGISTERS) // 2
        if self.head_dim == LARGE_HEAD:
            warps = LARGE_WARPS[columns]
            by_memory = self.generation.shared_bytes // LARGE_WARP_BYTES[columns]
            most = min(self.generation.resident_warps(LARGE_REGISTERS[columns]), by_memory)
            return most // warps * warps
        by_memory = self.generation.shared_bytes // WARP_BYTES[columns]
        return min(self.generation.resident_warps(REGISTERS[columns]), 1 << by_memory.bit_length() - 1)


def grid_inputs(page: PageLayout, kv_heads: int, sm_count: int, generation: Generation = HOPPER) -> GridInputs:
    """Return the `GridInputs` of `sm_count` SMs of a generation for layers with such pages."""
    return GridInputs(kv_heads, kernel_layout(page).head_dim, sm_count, has_unpackers(page), generation)


class BlockKind(NamedTuple):
    """A form of blocks that write the output: warps of a block, warps that an SM holds, and whether requests are cut as
    stream-K does."""

    warps: int
    warps_per_sm: int
    stream_k: bool

    def resident(self, inputs: GridInputs) -> int:
        """Return how many blocks the card runs at a time, per KV head."""
        return max(1, inputs.sm_count * self.warps_per_sm // self.warps // inputs.kv_heads)


def block_kinds(inputs: GridInputs, columns: int) -> tuple[BlockKind, BlockKind]:
    """Return the form of blocks for batches of up to two requests per resident block, and for larger batches.

    For the latter, smaller blocks leave less of the card idle (an H200 at 128 x 2048 and 4 columns: 81 us instead of
    88).
    """
    most = inputs.warps_per_sm(columns)
    # On Blackwell, warps of blocks of 2 spill up to 240 bytes, and fewer of them fit an SM of 12.x.
    few, many = most // 2, 2 if columns == 16 and inputs.generation.is_seen else 4
    if inputs.head_dim == LARGE_HEAD:
        few = many = LARGE_WARPS[columns]
    elif columns > 16:
        few = many = 4 if columns <= NARROW else inputs.head_dim // GROUP_SIZE
    return BlockKind(few, most, stream_k=True), BlockKind(many, most, stream_k=False)


def block_kind(requests: int, inputs: GridInputs, columns: int) -> BlockKind:
    """Return the form of blocks for a number of requests, each counted once per pass."""
    few, many = block_kinds(inputs, columns)
    return few if requests <= 2 * few.resident(inputs) else many


def grid(requests: int, inputs: GridInputs, columns: int, *, is_final: bool = False) -> Grid:
    """Return the grid for a number of requests, each counted once per pass. `is_final`: whether it must be.

    It depends on no sequence length, so a CUDA graph can hold it.
    """
    kind, pairs = block_kind(requests, inputs, columns), requests * inputs.kv_heads
    blocks = inputs.sm_count * kind.warps_per_sm // kind.warps
    if is_final or blocks // pairs <= MAX_FINAL_BLOCKS:
        return Grid(kind.warps, item_count(requests, kind.resident(inputs)), True)
    if not is_wide(columns, inputs.head_dim):
        return Grid(1, min(MAX_SPLITS, blocks * kind.warps // pairs), False)
    return Grid(kind.warps, min(MAX_SPLITS, blocks // pairs), False)


def has_unpackers(page: PageLayout) -> bool:
    """Return whether blocks of more than `NARROW` columns have warps that only unpack (`roles.cuh`)."""
    layout = kernel_layout(page)
    return layout.head_dim == 128 and all(group.code.bits == 4 for group in layout.value_vector.groups)


def make_counters(requests: int, inputs: GridInputs, columns: Mapping[int, int], device: torch.device) -> torch.Tensor:
    """Return int32 zeros that count the finished parts of each (request, KV head) pair in batches of up to `requests`
    with any of these columns and their passes.

    Launches leave them 0; `CudaPairs._bind` sets them to 0 and says why no step has to. Layers may share them,
    because the launches of one stream do not overlap.
    """
    most = max(
        item_count(requests * passes, kind.resident(inputs))
        for count, passes in columns.items()
        for kind in block_kinds(inputs, count)
    )
    return torch.zeros(most * inputs.kv_heads, dtype=torch.int32, device=device)


def make_schedulers(
    requests: int, inputs: GridInputs, columns: Mapping[int, int], device: torch.device
) -> dict[BlockKind, Scheduler]:
    """Return the schedulers for batches of up to `requests`, of these columns and their passes."""
    batches: dict[BlockKind, int] = {}
    for count, passes in columns.items():
        few, many = block_kinds(inputs, count)
        most = requests * passes
        for kind, batch in ((few, min(most, 2 * few.resident(inputs))), (many, most)):
            batches[kind] = max(batch, batches.get(kind, 0))  # columns may share a kind
    return {
        kind: Scheduler(batch, kind.resident(inputs), kind.warps, device, stream_k=kind.stream_k)
        for kind, batch in batches.items()
    }


def column_count(group: int, max_query_len: int, *, unpackers: bool) -> int:
    """Return the columns of the variant: the fewest that are enough for a pass. unpackers: `has_unpackers`; such blocks
    have 64 columns, as their products have 64 rows."""
    tokens = min(max_query_len, pass_tokens(group))
    columns = next(columns for columns in COLUMN_COUNTS if group * tokens <= columns)
    return COLUMNS if unpackers and columns > NARROW else columns


def pass_count(group: int, max_query_len: int) -> int:
    """Return how many passes over the keys of a request its query tokens take."""
    return -(-max_query_len // pass_tokens(group))


def columns_of_steps(group: int, longest_decode: int, *, unpackers: bool) -> dict[int, int]:
    """Return the columns of steps of up to `longest_decode` query tokens per request, and the most passes of each."""
    lengths = range(1, longest_decode + 1)
    return {column_count(group, length, unpackers=unpackers): pass_count(group, length) for length in lengths}
