"""Attention of chunks over what a short sliding window leaves of their prefixes, by the Triton decode kernel, which
reads it in the pages, in passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codecs.ring import Ring
from ..kernels.cuda import pass_tokens
from ..kernels.triton.decode import DecodeLaunch, DecodeShape
from ..kernels.triton.launch import StepLaunch
from ..kernels.triton.means import Means
from ..kernels.triton.merge import MergeLaunch, merge_tile
from ..layout import PageLayout
from .limits import Limits
from .passes import GRAPH_TOKENS, OverPrefixes, PassLimits, PrefixPasses
from .prefix_reader import Memory, PrefixReader, PrefixStep, row_limit
from .protocols import PrefixBatch

SPLITS = 1
"""A window's tokens are too few to be split."""


@dataclass(frozen=True)
class WindowPrefixStep(PrefixStep):
    """The launches of the decode kernel, and of the one that rotates its results back."""

    decode: StepLaunch
    merge: StepLaunch


class WindowPrefix(PrefixReader[WindowPrefixStep]):
    """The Triton kernel over prefixes of a layer with a sliding window, in steps that are whole CUDA graphs: others
    gather what the window leaves.

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
        self.heads = shape.kv_heads * shape.group
        tokens, rows = pass_tokens(shape.group), min(GRAPH_TOKENS, row_limit(shape, limits))
        self.limits = PassLimits(0, rows // tokens + limits.max_requests, tokens, rows)

    def memory(self, passes: PrefixPasses, dtype: torch.dtype) -> Memory:
        return self._memory((passes.rows, self.heads, SPLITS), passes.rows, dtype)

    def most_memory(self) -> Memory:
        rows = self.limits.rows
        return self._memory((rows, self.heads, SPLITS), rows, torch.bfloat16)  # any of 2 bytes

    def prepare(
        self, batch: PrefixBatch, rotated: torch.Tensor, bias: torch.Tensor | None, memory: list[torch.Tensor]
    ) -> WindowPrefixStep:
        (partial, stats, output, lse), table = memory, batch.passes.table
        tensors = rotated, batch.block_table, table, batch.query_start, partial, stats, bias, batch.ring
        decode = DecodeLaunch.passes(self.shape, self.limits.tokens, *tensors)
        biases = bias if self.shape.bias.keeps_first else None
        merge = MergeLaunch.step(partial, stats, self.shape.group, lse, biases)
        return WindowPrefixStep(OverPrefixes(batch.passes, output, lse), (*tensors, lse), decode, merge)

    def _bind(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> tuple[DecodeLaunch, MergeLaunch]:
        columns = self.shape.tiles(self.limits.tokens)[0]
        decode = DecodeLaunch(self.page, self.shape, columns, cache, ring, has_passes=True)
        merge = MergeLaunch(
            output, self.from_rotated, merge_tile(SPLITS), has_lse=True, means=self.means,
            bias_columns=self.shape.bias.columns,
        )  # fmt: skip
        return decode, merge

    def _launch(self, launches: tuple[DecodeLaunch, MergeLaunch], step: WindowPrefixStep, output: torch.Tensor) -> None:
        decode, merge = launches
        grid, arguments = step.decode
        decode(grid, (), arguments)
        grid, arguments = step.merge
        merge(grid, (output,), arguments)
