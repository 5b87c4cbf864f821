"""Base of the kernels that read prefixes of chunks in the pages, in passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from ..codecs.ring import Ring
from ..kernels.triton.decode import DecodeShape
from ..kernels.triton.launch import Launches
from .limits import Limits
from .passes import OverPrefixes, PassLimits, PrefixPasses
from .protocols import PrefixBatch

ROW_BYTES = 32 << 20
"""Limit in bytes of a step's rotated queries for passes, of their results, and of their biases: 4,096 rows of 32 heads
of 128 channels. Chunks beyond it take the prefill route, so in most models the workspace is no larger than that
route's."""
Memory: TypeAlias = "list[tuple[tuple[int, ...], torch.dtype]]"
"""Shapes and dtypes of tensors in the workspace."""


@dataclass(frozen=True)
class PrefixStep:
    """A step's results of passes; `tensors` keeps tensors alive whose addresses are arguments of its launches."""

    results: OverPrefixes
    tensors: tuple[Any, ...]


Read = TypeVar("Read", bound=PrefixStep)


class PrefixReader(ABC, Generic[Read]):
    """Reader of the prefixes of chunks of one layer of pairs, all of whose tokens are in this rank's pages:
    `FusedPrefix`, `WindowPrefix`. `shape`: of the layer's decode kernel. `limits`: of passes."""

    shape: DecodeShape
    limits: PassLimits

    def compile(self) -> None:
        """Compile what `prepare` launches."""
        return None

    @abstractmethod
    def memory(self, passes: PrefixPasses, dtype: torch.dtype) -> Memory:
        """Return the workspace for a step's passes. `dtype`: of the output."""

    @abstractmethod
    def most_memory(self) -> Memory:
        """Return the workspace that is enough for any step."""

    @abstractmethod
    def prepare(
        self, batch: PrefixBatch, rotated: torch.Tensor, bias: torch.Tensor | None, memory: list[torch.Tensor]
    ) -> Read:
        """Return the step of a batch's passes.

        Args:
            batch: with at least one pass.
            rotated: fp16 [rows or more, KV heads, group, head_dim], queries from the batch's first on.
            bias: biases of these queries, or None; see `RotateQueryLaunch`.
            memory: of the shapes and dtypes that `memory` returned.
        """

    def attend(self, step: Read, bound: Launches, cache: torch.Tensor, ring: Ring | None) -> OverPrefixes:
        """See `DecodeKernel.attend_prefixes`. `bound`: launches of the layer."""
        output = step.results.output
        apart = output.view(len(output), self.shape.kv_heads, self.shape.group, -1)
        of_ring = None if ring is None else (ring.cache.data_ptr(), ring.cache.stride(), ring.window)
        binding_key = cache.data_ptr(), cache.stride(), of_ring, output.stride(), output.dtype
        launches = bound.get("prefixes", binding_key, lambda: self._bind(cache, ring, apart))
        self._launch(launches, step, apart)
        return step.results

    @abstractmethod
    def _bind(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> Any:
        """Return launches for outputs [rows, KV heads, group, head_dim] of the dtype and strides of `output`."""

    @abstractmethod
    def _launch(self, launches: Any, step: Read, output: torch.Tensor) -> None:
        """Launch what `_bind` returned."""

    def _memory(self, partial: tuple[int, int, int], rows: int, dtype: torch.dtype) -> Memory:
        """Return partial results of this shape and their softmax state, and the output of rows and its log-sum-exps."""
        heads, head_dim = self.shape.kv_heads * self.shape.group, self.shape.head_dim
        return [
            ((*partial, head_dim), torch.float32),
            ((*partial, 2), torch.float32),
            ((rows, heads, head_dim), dtype),
            ((rows, heads), torch.float32),
        ]


def row_limit(shape: DecodeShape, limits: Limits) -> int:
    """Return the first rows of a batch that passes may cover."""
    bias_bytes = 4 * shape.bias.columns if shape.bias.blocks else 0
    return min(limits.max_tokens, ROW_BYTES // (shape.kv_heads * shape.group * max(2 * shape.head_dim, bias_bytes)))
