"""The decode kernels of latents on CUDA: `kernels/cuda` where it serves a layer, else `kernels/triton`.

A kernel attends over pages. Where the layer has a recent window, the pages hold the tokens before it (`split_lens`),
and a second launch adds the ring's tokens and the mean that V lacks. Where ranks split the tokens of a request, a layer
attends over its rank's tokens for the heads of all ranks, and returns the lse; there is no window then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ...codecs.ring import Ring
from ...gpu_generations import generation_of
from ...kernels import power_of_2
from ...kernels.cuda import latent_launch as cuda
from ...kernels.cuda import latent_ring_launch as cuda_ring
from ...kernels.cuda.latent_schedule import LatentScheduler
from ...kernels.served import CUDA, TRITON, Latents
from ...kernels.triton.latent_decode import (
    DecodeLatentsLaunch,
    MergeLatentsLaunch,
    latent_shape,
    programs,
    row_tiles,
    split_count,
)
from ...kernels.triton.latent_ring import AttendLatentRingLaunch, split_lens
from ...kernels.triton.launch import Launches, StepLaunch
from ..choice import find_kernel
from ..layouts import LatentLayout
from ..protocols import DecodeBatch, DecodeKernel
from .in_pytorch import Attended


class LatentKind(NamedTuple):
    """Key of the layers that share a step."""

    by_cuda: bool
    heads: int
    scale: float
    window: int


@dataclass(frozen=True)
class LatentMemory:
    """Workspace of a step, which each layer overwrites.

    `partial`, `stats`: fp32 [..., rank] and [..., 2], partial results. `over_pages`: [tokens, heads, rank], attention
    over pages, and `lse`, fp32 [tokens, heads], its lse, or None. `output`: [tokens, heads, rank], the layer's result.
    """

    partial: torch.Tensor
    stats: torch.Tensor
    over_pages: torch.Tensor
    lse: torch.Tensor | None
    output: torch.Tensor


class LatentWorkspace:
    """A layer's results over pages, which both kernels have.

    `are_partial`: whether attention over pages is a partial result, in fp32 and with its lse: over one rank's tokens,
    or as input of the ring's launch.
    """

    def __init__(self, layer: LatentLayout, *, are_partial: bool) -> None:
        assert not (layer.window and layer.is_shard), "ranks that split tokens have no recent window"
        self.layer, self.are_partial = layer, are_partial
        self.constant = None if layer.is_shard or layer.window else layer.constant
        """The constant that attention over pages adds."""
        self.inverse_gain = 1 / layer.codec.value_gain()
        self.sm_count = torch.cuda.get_device_properties(layer.codec.device).multi_processor_count
        self.page_lens = torch.zeros(layer.limits.max_requests, dtype=torch.int32, device=layer.codec.device)

    def take(self, partials: tuple[int, ...], tokens: int) -> LatentMemory:
        """Return workspace for partial results of this shape, and outputs of `tokens` query tokens."""
        layer, rank = self.layer, self.layer.codec.rank
        shape = (tokens, layer.heads, rank)
        outputs: list[tuple[tuple[int, ...], torch.dtype]] = []
        if self.are_partial:
            outputs += [(shape, torch.float32), (shape[:2], torch.float32)]
        if not layer.is_shard:
            outputs.append((shape, layer.dtype))
        partial, stats, *given = current_workspace_manager().get_simultaneous(
            ((*partials, rank), torch.float32), ((*partials, 2), torch.float32), *outputs
        )
        lse = given[1] if self.are_partial else None
        return LatentMemory(partial, stats, given[0], lse, given[0] if layer.is_shard else given[-1])

    def reserve(self, most_partials: tuple[int, ...]) -> None:
        """Size the workspace for any batch."""
        limits = self.layer.limits
        self.take(most_partials, limits.max_requests * limits.longest_decode)

    def count_tokens(self, batch: DecodeBatch) -> torch.Tensor:
        """Return the tokens that a step's requests read in pages, int32 [requests], in memory that outlives the
        step."""
        assert (batch.ring is None) == (not self.layer.window)
        if batch.ring is None:
            return batch.seq_lens
        lens = self.page_lens[: len(batch.seq_lens)]
        split_lens(batch.query_start, batch.seq_lens, batch.ring.first, batch.ring.window, lens)
        return lens

    def of_layer(self, memory: LatentMemory) -> Attended:
        """Return what the layer returns."""
        return memory.output, memory.lse if self.layer.is_shard else None


class TritonLatentStep(NamedTuple):
    """A step's launches, and its splits, a power of 2. `ring`: the ring's launch, if any."""

    memory: LatentMemory
    decode: StepLaunch
    merge: StepLaunch
    splits: int
    ring: StepLaunch | None


class TritonLatents(DecodeKernel[TritonLatentStep, Attended]):
    """The Triton kernels over latents of one layer."""

    language = TRITON

    def __init__(self, layer: LatentLayout) -> None:
        self.layer, self.longest = layer, layer.limits.longest_decode
        self.results = LatentWorkspace(layer, are_partial=layer.is_shard or layer.window > 0)
        self.kind = LatentKind(False, layer.heads, layer.scale, layer.window)
        self.shape = latent_shape(layer.heads, self.longest, layer.scale)
        generation = generation_of(torch.cuda.get_device_capability(layer.codec.device))
        self.resident = programs(self.shape, generation) * self.results.sm_count
        self.bound: Launches = Launches()

    def _splits(self, requests: int, query_len: int) -> int:
        return split_count(requests, row_tiles(self.shape, query_len), self.resident)

    def reserve(self) -> None:
        counts, lengths = range(1, self.layer.limits.max_requests + 1), range(1, self.longest + 1)
        rows = max(n * length * self._splits(n, length) for n in counts for length in lengths)
        self.results.reserve((rows, self.layer.heads))

    def prepare(self, batch: DecodeBatch) -> TritonLatentStep:
        requests, query_len, ring = len(batch.seq_lens), batch.max_query_len, None
        splits = self._splits(requests, query_len)
        memory = self.results.take((batch.tokens, self.layer.heads, splits), batch.tokens)
        lens = self.results.count_tokens(batch)
        if batch.ring is not None:
            assert memory.lse is not None
            tensors = batch.ring, batch.query_start, batch.seq_lens, lens, memory.over_pages, memory.lse
            ring = AttendLatentRingLaunch.step(self.shape, query_len, *tensors)
        return TritonLatentStep(
            memory,
            DecodeLatentsLaunch.step(
                self.shape, query_len, batch.block_table, batch.query_start, lens, memory.partial, memory.stats
            ),
            MergeLatentsLaunch.step(memory.partial, memory.stats, memory.lse),
            power_of_2(splits),
            ring,
        )

    def attend(
        self, step: TritonLatentStep, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        q_latent, q_rope = queries
        over_pages = step.memory.over_pages
        strides = cache.stride(), q_latent.stride(), q_rope.stride()
        decode = self.bound.get(
            "decode",
            (cache.data_ptr(), strides, q_latent.dtype, q_rope.dtype),
            lambda: DecodeLatentsLaunch(self.layer.codec.layout, self.shape, cache, q_latent, q_rope),
        )
        grid, arguments = step.decode
        decode(grid, (q_latent, q_rope), arguments)
        has_lse, constant = self.results.are_partial, self.results.constant
        merge = self.bound.get(
            ("merge", step.splits),
            (over_pages.stride(), over_pages.dtype),
            lambda: MergeLatentsLaunch(over_pages, constant, step.splits, has_lse=has_lse),
        )
        grid, arguments = step.merge
        merge(grid, (over_pages,), arguments)
        if ring is not None:
            self._add_ring(step, ring.cache, q_latent, q_rope)
        return self.results.of_layer(step.memory)

    def _add_ring(
        self, step: TritonLatentStep, ring: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor
    ) -> None:
        """Add the ring's tokens to the results over pages."""
        assert step.ring is not None
        layer, output = self.layer, step.memory.output
        strides = q_latent.stride(), q_rope.stride(), output.stride()
        launch = self.bound.get(
            "ring",
            (ring.data_ptr(), ring.stride(), strides, q_latent.dtype, q_rope.dtype, output.dtype),
            lambda: AttendLatentRingLaunch(
                layer.codec, self.shape, ring, (q_latent, q_rope, output), self.results.inverse_gain, layer.constant
            ),
        )
        grid, arguments = step.ring
        launch(grid, (q_latent, q_rope, output), arguments)

    def batches_to_compile(self) -> list[tuple[int, int]]:
        batches = {}
        for length in range(self.longest, 0, -1):
            for requests in range(self.layer.limits.max_requests, 0, -1):
                batches[power_of_2(self._splits(requests, length))] = requests, length
        return list(batches.values())


class HopperLatentStep(NamedTuple):
    """Arguments and grids of a step's launches; `ring` has the launch that reads the ring, if there is one. `tensors`
    keeps tensors alive whose addresses are arguments."""

    memory: LatentMemory
    decode: cuda.Step
    ring: cuda_ring.Step | None
    tensors: tuple[DecodeBatch, torch.Tensor, cuda.Parts]


class HopperLatents(DecodeKernel[HopperLatentStep, Attended]):
    """The CUDA kernels over latents of one layer. The ring's launch also merges the partial results over pages."""

    language = CUDA

    def __init__(self, layer: LatentLayout) -> None:
        self.layer, self.longest = layer, layer.limits.longest_decode
        self.results = LatentWorkspace(layer, are_partial=layer.is_shard)
        self.kind = LatentKind(True, layer.heads, layer.scale, layer.window)
        self.scheduler = LatentScheduler(layer.limits.max_requests, self.results.sm_count, layer.codec.device)
        self.bound: Launches = Launches()

    def _partials(self, requests: int, query_len: int) -> tuple[int]:
        """Rows of partial results. Where the ring's launch merges them, one of each request stays partial."""
        shape = cuda.latent_grid(self.layer.heads * query_len, self.results.sm_count)
        return (shape.partial_rows(requests if self.layer.window else 0),)

    def reserve(self) -> None:
        requests, lengths = self.layer.limits.max_requests, range(1, self.longest + 1)
        self.results.reserve(max(self._partials(requests, length) for length in lengths))

    def prepare(self, batch: DecodeBatch) -> HopperLatentStep:
        layer, query_len, sm_count, ring = self.layer, batch.max_query_len, self.results.sm_count, None
        memory = self.results.take(self._partials(len(batch.seq_lens), query_len), batch.tokens)
        lens = self.results.count_tokens(batch)
        shape = cuda.latent_grid(layer.heads * query_len, sm_count)
        parts = cuda.Parts(shape, self.scheduler(lens, shape.partitions), memory.partial, memory.stats)
        tables = batch.block_table, batch.query_start, lens
        decode = cuda.make_step(layer.heads, query_len, layer.scale, *tables, parts, memory.lse)
        if batch.ring is not None:
            lengths = batch.query_start, batch.seq_lens, lens
            ring = cuda_ring.make_step(layer.heads, query_len, layer.scale, sm_count, batch.ring, *lengths, parts)
        return HopperLatentStep(memory, decode, ring, (batch, lens, parts))

    def attend(
        self, step: HopperLatentStep, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        """Nothing is launched between the kernel over pages and the ring's kernel, which begins
        early (`kernels/cuda/early_launch.py`)."""
        q_latent, q_rope = queries
        binding_key = (cache.data_ptr(), cache.stride(), q_latent.dtype)
        decode = self.bound.get("decode", binding_key, lambda: self._bind(cache, q_latent.dtype))
        decode(step.decode, q_latent, q_rope, None if self.layer.window else step.memory.over_pages)
        if ring is not None and step.ring is not None:
            of_ring, result = ring.cache, step.memory.output
            attend = self.bound.get(
                "ring",
                (of_ring.data_ptr(), of_ring.stride(), q_latent.dtype, result.dtype),
                lambda: self._bind_ring(of_ring, q_latent.dtype, result.dtype),
            )
            attend(step.ring, q_latent, q_rope, result)
        return self.results.of_layer(step.memory)

    def _bind(self, cache: torch.Tensor, dtype: torch.dtype) -> cuda.CudaLatentDecode:
        layer, has_lse = self.layer, self.results.are_partial
        output = torch.float32 if has_lse else None if layer.window else layer.dtype
        decode = cuda.CudaLatentDecode(
            layer.codec.layout, cache, layer.heads, dtype, output, self.results.constant, has_lse=has_lse
        )
        decode.compile_variants(self.longest)
        return decode

    def _bind_ring(self, ring: torch.Tensor, query: torch.dtype, output: torch.dtype) -> cuda_ring.CudaLatentRing:
        layer = self.layer
        attend = cuda_ring.CudaLatentRing(ring, layer.heads, query, output, self.results.inverse_gain, layer.constant)
        attend.compile_variants()
        return attend

    def batches_to_compile(self) -> list[tuple[int, int]]:
        """Return one batch, as a bound kernel has all variants."""
        return [(1, 1)]


def latent_kernel(layer: LatentLayout, option: str) -> TritonLatents | HopperLatents:
    """Choose the decode kernel of a layer. `option`: `decode_kernel`."""
    codec = layer.codec
    asked = Latents(codec.fmt, codec.rank, codec.rope_dim, layer.heads)
    served = find_kernel(codec.device, option, layer.limits, asked, f"latents, {layer.heads} query heads")
    return (HopperLatents if served.kernel == CUDA else TritonLatents)(layer)
