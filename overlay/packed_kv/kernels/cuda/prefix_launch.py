"""`decode.cu` over prefixes: passes of chunks' query tokens, which a table on the device lists.

A pass has 64 columns: query heads times query tokens. A chunk's new tokens follow its prefix, so each pass sees all of
it. A pass is a request to the kernel and its schedule. A launch depends on no length, so a CUDA graph can hold it: a
table may have more passes than a step needs; the rest have no query tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...codecs.ring import Ring
from ...layout import PageLayout
from ..checks import check_int32
from ..kernel_layout import kernel_layout
from . import COLUMNS, LARGE_HEAD
from .grids import BlockKind, GridInputs, block_kind, block_kinds, has_unpackers
from .kernel import Compilation, CudaKernel
from .launch import (
    CALL_ARGUMENTS,
    STEP_ARGUMENTS,
    PairVariant,
    constants,
    has_means,
    layer_arguments,
    source_of,
    step_arguments,
)
from .schedule import Scheduler, item_count

PASS_WORDS = 4
"""Words of a pass in a table: request, first query token, query tokens and tokens of the prefix."""


class Pays(NamedTuple):
    """The prefixes for which passes pay: up to `passes` of a chunk, and at least `channels` of K in all prefixes of a
    step (tokens, KV heads and channels of a head, multiplied)."""

    passes: int
    channels: int


PAYS = {"unpackers": Pays(12, 1 << 22), "team": Pays(4, 1 << 24), "large": Pays(6, 1 << 24)}
"""The prefixes that the kernel reads faster than they are gathered, rotated back and read by FlashAttention: with warps
that only unpack (`has_unpackers`), without, and over heads of 256 channels (benchmarks/prefixes.py,
docs/lab/kernels.md)."""
THIRDS = 3
"""Blocks of 64 columns run at equal speed, and their parts cost more than parts of few columns: each part is a whole
load."""


def pays(page: PageLayout) -> Pays:
    """Return the prefixes for which passes pay. `page`: layout of the cache."""
    if kernel_layout(page).head_dim == LARGE_HEAD:
        return PAYS["large"]
    return PAYS["unpackers" if has_unpackers(page) else "team"]


class PrefixGrid(NamedTuple):
    """Work items of each KV head, and the kind of the blocks that serve them."""

    items: int
    kind: BlockKind


def prefix_grid(passes: int, inputs: GridInputs, filled: int = 0) -> PrefixGrid:
    """Return the grid for a table of this many passes. Its blocks write the output, however few they are: a prefix is
    cut into up to 32 parts, which would need another launch to be merged. `filled`: passes that are expected to have
    query tokens;
    0: all."""
    kind = block_kind(filled or passes, inputs, COLUMNS)
    return PrefixGrid(item_count(passes, kind.resident(inputs)), kind)


class PrefixSchedules:
    """Schedules of steps of up to `passes` passes, and the counters of their launches, which these leave 0. `thirds`:
    see `Scheduler`."""

    def __init__(self, passes: int, inputs: GridInputs, device: torch.device, thirds: int = THIRDS) -> None:
        self.inputs = inputs
        self.schedulers = {
            kind: Scheduler(passes, kind.resident(inputs), kind.warps, device, stream_k=kind.stream_k, thirds=thirds)
            for kind in block_kinds(inputs, COLUMNS)
        }
        self.items = max(item_count(passes, kind.resident(inputs)) for kind in block_kinds(inputs, COLUMNS))
        """The most work items of a KV head."""
        self.counters = torch.zeros(self.items * inputs.kv_heads, dtype=torch.int32, device=device)

    def compile(self) -> None:
        """Compile the schedulers."""
        for scheduler in self.schedulers.values():
            scheduler(torch.zeros(1, dtype=torch.int32, device=self.counters.device))

    def __call__(self, table: torch.Tensor, filled: int = 0) -> torch.Tensor:
        """Return the schedule of a table, int32 [items, 4]. The next call overwrites it.

        table: int32 [passes, PASS_WORDS]. filled: see `prefix_grid`.
        """
        return self.schedulers[prefix_grid(len(table), self.inputs, filled).kind](table[:, 3])


def prefix_arguments(
    query: torch.Tensor,
    block_table: torch.Tensor,
    table: torch.Tensor,
    schedule: torch.Tensor,
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    query_bias: torch.Tensor | None,
    ring: Ring | None,
    lse: torch.Tensor,
) -> bytes:
    """Return the arguments that are the same for all layers of a step. They are addresses: keep the tensors.

    Args:
        query: fp16 [tokens, KV heads, queries per KV head, head_dim], contiguous, rotated and scaled.
        block_table: int32 [requests, blocks].
        table: int32 [passes, PASS_WORDS], contiguous.
        schedule: of `PrefixSchedules`.
        partial_output, partial_stats: fp32 [items, KV heads, COLUMNS, head_dim] and [items, KV heads, COLUMNS, 2].
        query_bias: see `launch.step_arguments`.
        ring: block table int32 [requests, blocks] and first tokens int32 [requests], before the ring has the chunks'
            own tokens; None: there is none.
        lse: fp32 [tokens, query heads], contiguous: filled for the query tokens of passes with the natural
            log-sum-exps of the scores, -inf where a prefix has no keys.
    """
    check_int32(table)
    assert table.is_contiguous() and table.shape[1] == PASS_WORDS and table.data_ptr() % 16 == 0, table.shape
    tables = block_table, table, table
    return step_arguments(query, *tables, partial_output, partial_stats, query_bias, ring, lse, schedule)


class CudaPrefix(CudaKernel[None]):
    """Attention of chunks over their prefixes in one layer's cache and ring.

    Args:
        page: layout of the cache.
        matrix: of `pack_matrix`.
        counters: of `PrefixSchedules`.
        cache, ring: see `CudaDecode`.
        output: fp16, bf16 or fp32 [tokens, KV heads, queries per KV head, head_dim], unit stride over channels; calls
            have its dtype and strides.
        tiles_a_block: see `CudaDecode`.
    """

    def __init__(
        self, page: PageLayout, matrix: torch.Tensor, counters: torch.Tensor, cache: torch.Tensor, ring: Ring | None,
        output: torch.Tensor, tiles_a_block: int | None,
    ) -> None:  # fmt: skip
        _, self.kv_heads, self.group, head_dim = output.shape
        self.page, self.keep_alive = page, (matrix, counters)
        inputs = GridInputs(self.kv_heads, head_dim, sm_count=1)
        self.variant = PairVariant(
            block_kind(1, inputs, COLUMNS).warps, True, COLUMNS, cache.shape[2],
            *((ring.cache.shape[2], ring.window) if ring else (0, 0)), tiles_a_block is not None, output.dtype,
            has_lse=True, tiles_a_block=tiles_a_block or 0, has_pass_table=True, has_value_means=has_means(matrix),
        )  # fmt: skip
        layer = layer_arguments(cache, ring, output, matrix, counters)
        super().__init__(CALL_ARGUMENTS.size + STEP_ARGUMENTS.size, layer, cache.device.index)

    def __call__(self, items: int, step: bytes, output: torch.Tensor) -> None:
        """Launch on the current stream; in a `Precompiler` block, do nothing.

        Args:
            items: work items of each KV head, of the step's schedule.
            step: of `prefix_arguments`.
            output: as in the constructor; filled for the query tokens of passes, with zeros where a prefix has no keys.
        """
        functions = self.functions.get(None) or self.functions_of(None)
        if functions is None:
            return
        launch, kernel, threads, shared_bytes = functions[0]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self.lock:
            self.arguments[: self.layer_at] = CALL_ARGUMENTS.pack(output.data_ptr()) + step
            launch(kernel, (1, self.kv_heads, items), threads, shared_bytes, stream, self.address)

    def compile_variants(self) -> None:
        """Compile and load the kernel, so that no step waits for it. In a `Precompiler` block, note it."""
        self.compile([None])

    def compilation(self, key: None) -> Compilation:
        """Return what the kernel is compiled from."""
        values = constants(self.page, self.kv_heads, self.group, self.variant)
        return Compilation.of(source_of(values), values)
