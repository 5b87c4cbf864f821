"""Attention of chunks over their prefixes by the CUDA decode kernel, which reads these where they lie, in passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..codecs.ring import Ring
from ..kernels.cuda import COLUMNS, pass_tokens
from ..kernels.cuda import launch as cuda
from ..kernels.cuda import prefix_launch as cuda_prefix
from ..kernels.triton.launch import Launches
from .passes import OverPrefixes, PassLimits, PrefixPasses
from .protocols import PrefixBatch

if TYPE_CHECKING:
    from .decode import PairLayout, Splits

ROW_BYTES = 32 << 20
"""Bytes of rotated queries of a step's passes, and of what comes back, and of their biases: 4,096 rows of 32 heads of
128 channels. Chunks behind take the other route: so the workspace is not larger than that route's in most models."""
PAIRS = 2048
"""The most pairs of a pass and a KV head of a step: 80 MB of partial results."""


@dataclass(frozen=True)
class PrefixStep:
    """A step's passes, their results and the arguments of the launch; `tensors` keeps alive those whose addresses are
    arguments."""

    results: OverPrefixes
    items: int
    arguments: bytes
    tensors: tuple[Any, ...]


class FusedPrefix:
    """The kernel over prefixes of one layer of pairs.

    Args:
        layer: its shape, whose tokens are all in this rank's pages.
        splits: of the layer's decode kernel.
        card: of that kernel.
        matrix: of `pack_matrix`.
    """

    def __init__(self, layer: PairLayout, splits: Splits, card: cuda.Card, matrix: torch.Tensor) -> None:
        self.layer, self.splits, self.card, self.matrix = layer, splits, card, matrix
        self.limits = pass_limits(layer, splits.shape.mean_blocks)
        self.schedules = cuda_prefix.PrefixSchedules(self.limits.total, card, matrix.device)

    def memory(self, rows: int, items: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and dtypes of the workspace for passes of the first `rows` rows of a batch: partial results and
        their softmax state, the output and its log-sum-exps."""
        head_dim, heads = self.splits.shape.head_dim, self.layer.query_heads
        partial = items, self.layer.kv_heads, COLUMNS
        return [
            ((*partial, head_dim), torch.float32), ((*partial, 2), torch.float32), ((rows, heads, head_dim), dtype),
            ((rows, heads), torch.float32),
        ]  # fmt: skip

    def most_memory(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return `memory` of any step."""
        return self.memory(self.limits.rows, self.schedules.items, torch.bfloat16)  # any of 2 bytes

    def items(self, passes: PrefixPasses) -> int:
        """Return the work items of each KV head."""
        return cuda_prefix.prefix_grid(len(passes.table), self.card).items

    def prepare(
        self, batch: PrefixBatch, rotated: torch.Tensor, bias: torch.Tensor | None, memory: list[torch.Tensor]
    ) -> PrefixStep:
        """Return the step of a batch's passes.

        Args:
            batch: with at least one pass.
            rotated: fp16 [rows or more, KV heads, group, head_dim], queries from the batch's first on.
            bias: of these, or None; see `RotateQueryLaunch`.
            memory: of `memory`.
        """
        schedule, (partial, stats, output, lse) = self.schedules(batch.passes.table), memory
        tensors = (rotated, batch.block_table, batch.passes.table, schedule, partial, stats, bias, batch.ring, lse)
        return PrefixStep(
            OverPrefixes(batch.passes, output, lse), len(schedule), cuda_prefix.prefix_arguments(*tensors), tensors
        )

    def attend(self, step: PrefixStep, bound: Launches, cache: torch.Tensor, ring: Ring | None) -> OverPrefixes:
        """See `DecodeKernel.attend_prefixes`. `bound`: launches of the layer."""
        apart = self.splits.heads_apart(step.results.output)
        held_for = self.splits.held_for(cache, ring, step.results.output)
        launch = bound.get("prefixes", held_for, lambda: self._bind(cache, ring, apart))
        launch(step.items, step.arguments, apart)
        return step.results

    def _bind(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> cuda_prefix.CudaPrefix:
        self.schedules.counters.zero_()  # `HopperPairs._bind` says why no step has to
        shape = self.splits.shape
        launch = cuda_prefix.CudaPrefix(
            self.layer.codec.layout, self.matrix, self.schedules.counters, cache, ring, output,
            shape.tiles_a_block if shape.mean_blocks else None,
        )  # fmt: skip
        launch.compile_variants()
        return launch


def pass_limits(layer: PairLayout, mean_blocks: int) -> PassLimits:
    """Return how many passes over prefixes a layer's steps have at most. `mean_blocks`: of its keys, see `Means`."""
    group, limits = layer.query_heads // layer.kv_heads, layer.limits
    tokens = pass_tokens(group)
    row_bytes = layer.query_heads * max(2 * layer.codec.key.stored_dim, 4 * (1 + mean_blocks) if mean_blocks else 0)
    rows = min(limits.max_tokens, ROW_BYTES // row_bytes)
    total = min(rows // tokens + limits.max_requests, max(1, PAIRS // layer.kv_heads))
    return PassLimits(cuda.most_passes(layer.codec.layout), total, tokens, rows)
