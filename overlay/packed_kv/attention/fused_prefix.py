"""Attention of chunks over their prefixes by the CUDA decode kernel, which reads the prefixes from the pages, in
passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codecs.ring import Ring
from ..kernels.cuda import COLUMNS, LARGE_HEAD, grids, pass_tokens
from ..kernels.cuda import prefix_launch as cuda_prefix
from ..kernels.triton.decode import DecodeShape
from ..layout import PageLayout
from .limits import Limits
from .passes import OverPrefixes, PassLimits, PrefixPasses
from .prefix_reader import Memory, PrefixReader, PrefixStep, row_limit
from .protocols import PrefixBatch

PAIRS = 2048
"""The most (pass, KV head) pairs of a step: 82 MB of partial results with 128 channels. Heads of 256 have half."""


@dataclass(frozen=True)
class FusedStep(PrefixStep):
    """The work items of each KV head, and the arguments of the launch."""

    items: int
    arguments: bytes


class FusedPrefix(PrefixReader[FusedStep]):
    """The CUDA kernel over prefixes.

    Args:
        page: layout of the cache.
        shape, inputs, matrix: of the layer's decode kernel.
        limits: limits of steps.
    """

    def __init__(
        self, page: PageLayout, shape: DecodeShape, inputs: grids.GridInputs, matrix: torch.Tensor, limits: Limits
    ) -> None:
        self.page, self.shape, self.grid_inputs, self.matrix = page, shape, inputs, matrix
        self.limits = pass_limits(page, shape, limits)
        self.schedules = cuda_prefix.PrefixSchedules(self.limits.total, inputs, matrix.device)

    def compile(self) -> None:
        self.schedules.compile()

    def memory(self, passes: PrefixPasses, dtype: torch.dtype) -> Memory:
        items = cuda_prefix.prefix_grid(len(passes.table), self.grid_inputs, passes.filled).items
        return self._memory((items, self.shape.kv_heads, COLUMNS), passes.rows, dtype)

    def most_memory(self) -> Memory:
        partial = self.schedules.items, self.shape.kv_heads, COLUMNS
        return self._memory(partial, self.limits.rows, torch.bfloat16)  # any of 2 bytes

    def prepare(
        self, batch: PrefixBatch, rotated: torch.Tensor, bias: torch.Tensor | None, memory: list[torch.Tensor]
    ) -> FusedStep:
        schedule = self.schedules(batch.passes.table, batch.passes.filled)
        partial, stats, output, lse = memory
        tensors = (rotated, batch.block_table, batch.passes.table, schedule, partial, stats, bias, batch.ring, lse)
        arguments = cuda_prefix.prefix_arguments(*tensors)
        return FusedStep(OverPrefixes(batch.passes, output, lse), tensors, len(schedule), arguments)

    def _bind(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> cuda_prefix.CudaPrefix:
        """Bind the kernel. Its counters become 0; `CudaPairs._bind` says why no step has to reset them."""
        counters, tiles = self.schedules.counters, self.shape.bias.tiles_a_block if self.shape.bias.blocks else None
        if not (counters.is_cuda and torch.cuda.is_current_stream_capturing()):
            counters.zero_()
        launch = cuda_prefix.CudaPrefix(self.page, self.matrix, counters, cache, ring, output, tiles)
        launch.compile_variants()
        return launch

    def _launch(self, launches: cuda_prefix.CudaPrefix, step: FusedStep, output: torch.Tensor) -> None:
        launches(step.items, step.arguments, output)


def pass_limits(page: PageLayout, shape: DecodeShape, limits: Limits) -> PassLimits:
    """Return the most passes over prefixes that a step of a layer may have. `page`: layout of the cache."""
    tokens, rows = pass_tokens(shape.group), row_limit(shape, limits)
    pairs = PAIRS if shape.head_dim < LARGE_HEAD else PAIRS // 2
    total = min(rows // tokens + limits.max_requests, max(1, pairs // shape.kv_heads))
    pays = cuda_prefix.pays(page)
    return PassLimits(pays.passes, total, tokens, rows, -(-pays.channels // (shape.kv_heads * shape.head_dim)))
