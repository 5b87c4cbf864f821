"""Attention of chunks over their prefixes by the CUDA decode kernel, which reads the prefixes from the pages, in
passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codecs.ring import Ring
from ..kernels.cuda import COLUMNS, LARGE_HEAD, grids, pass_tokens
from ..kernels.cuda import prefix_launch as cuda_prefix
from ..kernels.triton.decode import DecodeShape
from ..kernels.triton.launch import Launches
from ..layout import PageLayout
from .limits import Limits
from .passes import OverPrefixes, PassLimits, PrefixPasses
from .protocols import Memory, PrefixBatch, PrefixReader, PrefixStep

ROW_BYTES = 32 << 20
"""Limit in bytes of a step's rotated queries for passes, of their results, and of their biases: 4,096 rows of 32 heads
of 128 channels. Chunks beyond it take the prefill route, so in most models the workspace is no larger than that
route's."""
PAIRS = 2048
"""The most (pass, KV head) pairs of a step: 82 MB of partial results with 128 channels. Heads of 256 have half."""


@dataclass(frozen=True)
class FusedStep(PrefixStep):
    """The work items of each KV head, and the arguments of the launch."""

    items: int
    arguments: bytes


class FusedPrefix(PrefixReader[FusedStep]):
    """The kernel over prefixes of one layer of pairs. All tokens of the layer are in this rank's pages.

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

    def memory(self, passes: PrefixPasses, dtype: torch.dtype) -> Memory:
        return self._memory(passes.rows, self.items(passes), dtype)

    def most_memory(self) -> Memory:
        return self._memory(self.limits.rows, self.schedules.items, torch.bfloat16)  # any of 2 bytes

    def compile(self) -> None:
        self.schedules.compile()

    def _memory(self, rows: int, items: int, dtype: torch.dtype) -> Memory:
        """Return partial results and their softmax state, the output and its log-sum-exps."""
        shape, partial = self.shape, (items, self.shape.kv_heads, COLUMNS)
        heads = shape.kv_heads * shape.group
        return [
            ((*partial, shape.head_dim), torch.float32),
            ((*partial, 2), torch.float32),
            ((rows, heads, shape.head_dim), dtype),
            ((rows, heads), torch.float32),
        ]

    def items(self, passes: PrefixPasses) -> int:
        """Return the work items of each KV head."""
        return cuda_prefix.prefix_grid(len(passes.table), self.grid_inputs, passes.filled).items

    def prepare(
        self, batch: PrefixBatch, rotated: torch.Tensor, bias: torch.Tensor | None, memory: list[torch.Tensor]
    ) -> FusedStep:
        schedule = self.schedules(batch.passes.table, batch.passes.filled)
        partial, stats, output, lse = memory
        tensors = (rotated, batch.block_table, batch.passes.table, schedule, partial, stats, bias, batch.ring, lse)
        arguments = cuda_prefix.prefix_arguments(*tensors)
        return FusedStep(OverPrefixes(batch.passes, output, lse), tensors, len(schedule), arguments)

    def attend(self, step: FusedStep, bound: Launches, cache: torch.Tensor, ring: Ring | None) -> OverPrefixes:
        output = step.results.output
        apart = output.view(len(output), self.shape.kv_heads, self.shape.group, -1)
        of_ring = None if ring is None else (ring.cache.data_ptr(), ring.cache.stride(), ring.window)
        binding_key = cache.data_ptr(), cache.stride(), of_ring, output.stride(), output.dtype
        launch = bound.get("prefixes", binding_key, lambda: self._bind(cache, ring, apart))
        launch(step.items, step.arguments, apart)
        return step.results

    def _bind(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> cuda_prefix.CudaPrefix:
        """Bind the kernel. Its counters become 0; `CudaPairs._bind` says why no step has to reset them."""
        counters, tiles = self.schedules.counters, self.shape.bias.tiles_a_block if self.shape.bias.blocks else None
        if not (counters.is_cuda and torch.cuda.is_current_stream_capturing()):
            counters.zero_()
        launch = cuda_prefix.CudaPrefix(self.page, self.matrix, counters, cache, ring, output, tiles)
        launch.compile_variants()
        return launch


def pass_limits(page: PageLayout, shape: DecodeShape, limits: Limits) -> PassLimits:
    """Return the most passes over prefixes that a step of a layer may have. `page`: layout of the cache."""
    tokens, rows = pass_tokens(shape.group), row_limit(shape, limits)
    pairs = PAIRS if shape.head_dim < LARGE_HEAD else PAIRS // 2
    total = min(rows // tokens + limits.max_requests, max(1, pairs // shape.kv_heads))
    pays = cuda_prefix.pays(page)
    return PassLimits(pays.passes, total, tokens, rows, -(-pays.channels // (shape.kv_heads * shape.head_dim)))


def row_limit(shape: DecodeShape, limits: Limits) -> int:
    """Return the first rows of a batch that passes may cover."""
    bias_bytes = 4 * shape.bias.columns if shape.bias.blocks else 0
    return min(limits.max_tokens, ROW_BYTES // (shape.kv_heads * shape.group * max(2 * shape.head_dim, bias_bytes)))
