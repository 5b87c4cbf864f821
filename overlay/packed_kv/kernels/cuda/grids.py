"""Columns, grids and schedules of `decode.cu`: how a batch is cut into blocks, and how many of these run at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...formats import GROUP_SIZE
from ...layout import PageLayout
from ..kernel_layout import kernel_layout
from . import COLUMNS, pass_tokens
from .schedule import Scheduler, item_count

COLUMN_COUNTS = (4, 8, 16, 32, COLUMNS)
"""The columns that kernels are compiled for. Beyond the last, query tokens take several passes over the keys."""
NARROW = 32
"""The most columns that warps serve alone. Beyond, a block's warps share one unpacking (`wide.cuh`, `roles.cuh`)."""
WARPS_PER_SM = {4: 16, 8: 16, 16: 8, 32: 8, 64: 8}
"""Warps that an SM holds, by columns: their registers decide."""
UNPACKERS, ATTENDERS_PER_SM = 4, 8
"""Warps of a block that only unpack, where it has any (`roles.cuh`), and the others that an SM holds then."""
MAX_FINAL_BLOCKS = 8
"""Resident blocks per (request, KV head) pair up to which blocks write the output. Beyond, a warp has so few tiles that
combining several warps costs more than a second launch: blocks of one warp write partial results for `merge`."""
MAX_SPLITS = 128
"""The most partial results that `merge` combines."""


class Grid(NamedTuple):
    """Blocks of `warps` warps.

    With `is_final`, they write the output, and `blocks` is the work items of each KV head (`schedule.py`). Otherwise
    they write partial results, and `blocks` is the splits of each (request, KV head) pair.
    """

    warps: int
    blocks: int
    is_final: bool


class Card(NamedTuple):
    """Numbers that decide how many blocks run at a time: KV heads of this rank, channels of a head, SMs, and whether
    blocks of many columns have warps that only unpack (`has_unpackers`)."""

    kv_heads: int
    head_dim: int
    sm_count: int
    unpackers: bool = False

    def warps_per_sm(self, columns: int) -> int:
        """Return how many warps an SM holds, those that only unpack not counted."""
        return ATTENDERS_PER_SM if self.unpackers and columns > NARROW else WARPS_PER_SM[columns]


def card_of(page: PageLayout, kv_heads: int, sm_count: int) -> Card:
    """Return the `Card` of `sm_count` SMs for layers with such pages."""
    return Card(kv_heads, kernel_layout(page).head_dim, sm_count, has_unpackers(page))


class Kind(NamedTuple):
    """Blocks that write the output: their warps, how many warps an SM holds, and whether requests are cut as stream-K
    does."""

    warps: int
    warps_per_sm: int
    stream_k: bool

    def resident(self, card: Card) -> int:
        """Return how many blocks the card runs at a time, per KV head."""
        return max(1, card.sm_count * self.warps_per_sm // self.warps // card.kv_heads)


def kinds(card: Card, columns: int) -> tuple[Kind, Kind]:
    """Return the blocks of batches of up to two requests per resident block, and those of larger ones.

    There, smaller blocks leave less of the card idle (an H200 at 128 x 2048 and 4 columns: 81 us instead of 88).
    """
    most = card.warps_per_sm(columns)
    few, many = (most // 2, 2 if columns == 16 else 4) if columns <= NARROW else (card.head_dim // GROUP_SIZE,) * 2
    return Kind(few, most, stream_k=True), Kind(many, most, stream_k=False)


def kind_of(requests: int, card: Card, columns: int) -> Kind:
    """Return the blocks that serve a number of requests, each counted once per pass."""
    few, many = kinds(card, columns)
    return few if requests <= 2 * few.resident(card) else many


def grid(requests: int, card: Card, columns: int) -> Grid:
    """Return the grid for a number of requests, each counted once per pass.

    It depends on no sequence length, so a CUDA graph can hold it.
    """
    kind, pairs = kind_of(requests, card, columns), requests * card.kv_heads
    blocks = card.sm_count * kind.warps_per_sm // kind.warps
    if blocks // pairs <= MAX_FINAL_BLOCKS:
        return Grid(kind.warps, item_count(requests, kind.resident(card)), True)
    if columns <= NARROW:
        return Grid(1, min(MAX_SPLITS, blocks * kind.warps // pairs), False)
    return Grid(kind.warps, min(MAX_SPLITS, blocks // pairs), False)


def has_unpackers(page: PageLayout) -> bool:
    """Return whether blocks of more than `NARROW` columns have warps that only unpack (`roles.cuh`)."""
    layout = kernel_layout(page)
    groups = layout.key.groups + layout.value.groups
    return layout.head_dim == 128 and all(group.code.bits == 4 for group in groups)


def make_counters(requests: int, card: Card, columns: Mapping[int, int], device: torch.device) -> torch.Tensor:
    """Return int32 zeros that count the finished parts of each (request, KV head) pair in batches of up to `requests`
    with any of these columns and their passes.

    Launches leave them 0; `HopperPairs._bind` sets them to 0 and says why no step has to. Layers may share them,
    because the launches of one stream do not overlap.
    """
    most = max(
        item_count(requests * passes, kind.resident(card))
        for count, passes in columns.items()
        for kind in kinds(card, count)
    )
    return torch.zeros(most * card.kv_heads, dtype=torch.int32, device=device)


def make_schedulers(
    requests: int, card: Card, columns: Mapping[int, int], device: torch.device, thirds: int = 2
) -> dict[Kind, Scheduler]:
    """Return the schedulers for batches of up to `requests`, of these columns and their passes. `thirds`: see
    `Scheduler`."""
    batches: dict[Kind, int] = {}
    for count, passes in columns.items():
        few, many = kinds(card, count)
        most = requests * passes
        for kind, batch in ((few, min(most, 2 * few.resident(card))), (many, most)):
            batches[kind] = max(batch, batches.get(kind, 0))  # columns may share a kind
    return {
        kind: Scheduler(batch, kind.resident(card), kind.warps, device, stream_k=kind.stream_k, thirds=thirds)
        for kind, batch in batches.items()
    }


def column_count(group: int, max_query_len: int) -> int:
    """Return the columns that the kernel is compiled for: the fewest that are enough for a pass."""
    tokens = min(max_query_len, pass_tokens(group))
    return next(columns for columns in COLUMN_COUNTS if group * tokens <= columns)


def pass_count(group: int, max_query_len: int) -> int:
    """Return how many passes over the keys of a request its query tokens take."""
    return -(-max_query_len // pass_tokens(group))


def columns_of_steps(group: int, longest_decode: int) -> dict[int, int]:
    """Return the columns of steps of up to `longest_decode` query tokens per request, and the most passes of each."""
    return {column_count(group, length): pass_count(group, length) for length in range(1, longest_decode + 1)}
