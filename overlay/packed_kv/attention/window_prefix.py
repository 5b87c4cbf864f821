"""Attention of chunks over what a short sliding window leaves of their prefixes, by the Triton decode kernel, which
reads it in the pages, in passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codecs.ring import Ring
from ..kernels.cuda import pass_tokens
from ..kernels.triton.decode import DecodeLaunch, DecodeShape
from ..kernels.triton.launch import Launches, StepLaunch
from ..kernels.triton.means import Means
from ..kernels.triton.merge import MergeLaunch, merge_tile
from ..layout import PageLayout
from .fused_prefix import row_limit
from .limits import Limits
from .passes import GRAPH_TOKENS, OverPrefixes, PassLimits, PrefixPasses
from .protocols import Memory, PrefixBatch, PrefixReader, PrefixStep

SPLITS = 1
"""A window's tokens are too few to be split."""


@dataclass(frozen=True)
class WindowPrefixStep(PrefixStep):
    """The launches of the decode kernel, and of the one that rotates its results back."""

    decode: StepLaunch
    merge: StepLaunch


class WindowPrefix(PrefixReader[WindowPrefixStep]):
    """The kernel over prefixes of one layer of pairs with a sliding window, in steps that are whole CUDA graphs: others
    gather what the window leaves. All tokens of the layer are in this rank's pages.

    Args:
        page: layout of the cache.
        shape: of the layer's decode kernel.
        from_rotated, means: what rotates results back, and V's means (`MergeLaunch`).
        limits: limits of steps.
    """

    def __init__(
        self, page: PageLayout, shape: DecodeShape, from_rotated: torch.Tensor, means: Means | None, limits: Limits
    ) -> None:
        self.page, self.shape, self.from_rotated, self.means = page, shape, from_rotated, means
        tokens, rows = pass_tokens(shape.group), min(GRAPH_TOKENS, row_limit(shape, limits))
        self.limits = PassLimits(0, rows // tokens + limits.max_requests, tokens, rows)

    def memory(self, passes: PrefixPasses, dtype: torch.dtype) -> Memory:
        return self._memory(passes.rows, dtype)

    def most_memory(self) -> Memory:
        return self._memory(self.limits.rows, torch.bfloat16)  # any of 2 bytes

    def compile(self) -> None:
        return None

    def _memory(self, rows: int, dtype: torch.dtype) -> Memory:
        """Return partial results and their softmax state, the output and its log-sum-exps."""
        shape, partial = self.shape, (rows, self.shape.kv_heads * self.shape.group, SPLITS)
        return [
            ((*partial, shape.head_dim), torch.float32),
            ((*partial, 2), torch.float32),
            ((*partial[:2], shape.head_dim), dtype),
            (partial[:2], torch.float32),
        ]

    def prepare(
        self, batch: PrefixBatch, rotated: torch.Tensor, bias: torch.Tensor | None, memory: list[torch.Tensor]
    ) -> WindowPrefixStep:
        (partial, stats, output, lse), table = memory, batch.passes.table
        tensors = rotated, batch.block_table, table, batch.query_start, partial, stats, bias, batch.ring
        decode = DecodeLaunch.passes(self.shape, self.limits.tokens, *tensors)
        biases = bias if self.shape.bias.keeps_first else None
        merge = MergeLaunch.step(partial, stats, self.shape.group, lse, biases)
        return WindowPrefixStep(OverPrefixes(batch.passes, output, lse), (*tensors, lse), decode, merge)

    def attend(self, step: WindowPrefixStep, bound: Launches, cache: torch.Tensor, ring: Ring | None) -> OverPrefixes:
        output = step.results.output
        apart = output.view(len(output), self.shape.kv_heads, self.shape.group, -1)
        of_ring = None if ring is None else (ring.cache.data_ptr(), ring.cache.stride(), ring.window)
        binding_key = cache.data_ptr(), cache.stride(), of_ring, output.stride(), output.dtype
        decode, merge = bound.get("prefixes", binding_key, lambda: self._bind(cache, ring, apart))
        grid, arguments = step.decode
        decode(grid, (), arguments)
        grid, arguments = step.merge
        merge(grid, (apart,), arguments)
        return step.results

    def _bind(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> tuple[DecodeLaunch, MergeLaunch]:
        columns = self.shape.tiles(self.limits.tokens)[0]
        decode = DecodeLaunch(self.page, self.shape, columns, cache, ring, has_passes=True)
        merge = MergeLaunch(
            output, self.from_rotated, merge_tile(SPLITS), has_lse=True, means=self.means,
            bias_columns=self.shape.bias.columns,
        )  # fmt: skip
        return decode, merge
