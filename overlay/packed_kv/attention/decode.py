"""The decode kernels of pairs on CUDA: `kernels/cuda` where it serves a layer, else `kernels/triton/decode.py`.

The store kernel has already rotated a step's queries, into the step's workspace. The kernel leaves partial results of
each request's splits, which another launch merges. With a final grid, the CUDA kernel writes whole results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ..codecs.ring import Ring
from ..gpu_generations import generation_of
from ..kernels.cuda import grids
from ..kernels.cuda import launch as cuda
from ..kernels.served import CUDA, TRITON, Engine, who_reads_prefixes
from ..kernels.triton.decode import TILE_TOKENS, DecodeLaunch, DecodeShape, most_registers
from ..kernels.triton.launch import Launches, StepLaunch
from ..kernels.triton.means import NO_BIAS, Means, QueryBias
from ..kernels.triton.merge import MergeLaunch, merge_tile
from ..kernels.triton.rotate import QueryRotation, RotateQueryLaunch, RotateStep, rotation_matrix
from .choice import find_kernel
from .fused_prefix import FusedPrefix
from .layouts import PairLayout
from .passes import OverPrefixes
from .prefix_reader import PrefixReader, PrefixStep
from .protocols import DecodeBatch, DecodeKernel, PrefixBatch
from .window_prefix import WindowPrefix


def rotation_of(layer: PairLayout) -> QueryRotation:
    """Return how a layer's queries are rotated, scaled and corrected for the means of keys."""
    means = Means.of(layer.codec.key.transform, has_first=layer.shard.has_first)
    matrix, keeps_first = rotation_matrix(layer.codec.key, layer.kv_heads), layer.codec.value.transform.centres
    return QueryRotation(matrix, layer.options.scale, means, keeps_first)


class PairKind(NamedTuple):
    """Key of the layers that share a step: the kernel, the one that reads prefixes, heads and their channels, and the
    biases beside a query."""

    by_cuda: bool
    reads_prefixes: str | None
    query_heads: int
    kv_heads: int
    head_dims: tuple[int, int]
    bias: QueryBias


def _empty_launches() -> tuple[dict[int, DecodeLaunch], dict[tuple[int, int], MergeLaunch]]:
    """Launches of the Triton kernel by columns, and of the merge by tile."""
    return {}, {}


class Merge(NamedTuple):
    """The launch that merges splits, and its tile."""

    launch: StepLaunch
    tile: tuple[int, int]


@dataclass(frozen=True)
class PairStep:
    """The launches of a step that both kernels share: the rotation, and the merge, if one follows. `prefixes`: of
    passes over prefixes; None: there are none."""

    rotate: RotateStep
    merge: Merge | None
    prefixes: PrefixStep | None


Launched = TypeVar("Launched", bound=PairStep)


@dataclass(frozen=True)
class TritonPairStep(PairStep):
    """The launch of the decode kernel (None: no decodes), and the columns of its tiles."""

    launch: StepLaunch | None
    columns: int


@dataclass(frozen=True)
class CudaPairStep(PairStep):
    """Grid and arguments of the CUDA kernel's launch over decodes (None: no decodes). `tensors` keeps tensors alive
    whose addresses are arguments."""

    grid: grids.Grid | None
    max_query_len: int
    requests: int
    arguments: bytes
    tensors: tuple[Any, ...]


class StepMemory(NamedTuple):
    """A step's workspace: rotated queries, partial results of decodes and their softmax state, biases of queries, if
    there are any; and the step of passes over prefixes, if there are any."""

    rotated: torch.Tensor
    partial: torch.Tensor
    stats: torch.Tensor
    bias: torch.Tensor | None
    prefixes: PrefixStep | None


class PairWorkspace:
    """A step's rotated queries, which both kernels read, their partial results, and the merge of these.

    `longest`: query tokens of a request that the kernel serves. `option`: `decode_kernel`.
    """

    def __init__(self, layer: PairLayout, rotation: QueryRotation, longest: int, option: str = "auto") -> None:
        self.layer, self.rotation = layer, rotation
        self.longest = min(layer.limits.longest_decode, longest)
        means, tile_tokens = rotation.means, TILE_TOKENS * layer.shard.ranks
        assert means is None or means.block_tokens % tile_tokens == 0, (means.block_tokens, layer.shard)
        properties = torch.cuda.get_device_properties(layer.codec.key.device)
        self.sm_count = properties.multi_processor_count
        self.generation = generation_of((properties.major, properties.minor))
        self.shape = DecodeShape(
            layer.kv_heads, layer.query_heads // layer.kv_heads, layer.codec.key.stored_dim,
            layer.options.sliding_window, layer.options.logits_soft_cap,
            QueryBias(means.blocks, means.block_tokens // tile_tokens, rotation.keeps_first) if means else NO_BIAS,
            most_registers(layer.codec.layout, self.generation, has_bias=means is not None),
        )  # fmt: skip
        self.has_lse = layer.shard.ranks > 1
        self.from_rotated = rotation_matrix(layer.codec.value, layer.kv_heads, inverse=True)
        self.value_means = Means.of(layer.codec.value.transform, has_first=layer.shard.has_first)
        self.reads_prefixes = self._who_reads_prefixes(option)
        self.prefix = self._prefix_reader()

    def _who_reads_prefixes(self, option: str) -> str | None:
        layer, limits = self.layer, self.layer.limits
        if not limits.max_tokens:
            return None
        engine = Engine(
            "cuda", self.generation.capability, option, longest_decode=limits.longest_decode,
            requests=limits.max_requests, ranks=layer.shard.ranks, is_here=layer.codec.key.device.type == "cuda",
        )  # fmt: skip
        return who_reads_prefixes(engine, layer.asked(), mixed_graphs=limits.mixed_graphs)

    def _prefix_reader(self) -> FusedPrefix | WindowPrefix | None:
        page, limits = self.layer.codec.layout, self.layer.limits
        if self.reads_prefixes == CUDA:
            return FusedPrefix(page, self.shape, self.grid_inputs, self.matrix, limits)
        if self.reads_prefixes == TRITON:
            return WindowPrefix(page, self.shape, self.from_rotated, self.value_means, limits)
        return None

    @functools.cached_property
    def grid_inputs(self) -> grids.GridInputs:
        """Inputs of the CUDA kernel's grids."""
        return grids.grid_inputs(self.layer.codec.layout, self.layer.kv_heads, self.sm_count, self.generation)

    @functools.cached_property
    def matrix(self) -> torch.Tensor:
        """The matrix by which the CUDA kernel rotates results back (`pack_matrix`)."""
        return cuda.pack_matrix(self.from_rotated, self.value_means)

    def kind(self, *, by_cuda: bool) -> PairKind:
        """Return the kind of the kernel."""
        layer, dims = self.layer, (self.layer.codec.key.head_dim, self.layer.codec.value.head_dim)
        return PairKind(by_cuda, self.reads_prefixes, layer.query_heads, layer.kv_heads, dims, self.shape.bias)

    def take(
        self, tokens: int, partial: tuple[int, int, int], *more: tuple[tuple[int, ...], torch.dtype]
    ) -> list[torch.Tensor]:
        """Return workspace: rotated queries, partial outputs of this shape, their softmax state; then queries' biases,
        if there are any, and tensors of the shapes and dtypes `more`."""
        shape, heads = self.shape, self.layer.query_heads
        bias = [((tokens, heads, shape.bias.columns), torch.float32)] if shape.bias.blocks else []
        return current_workspace_manager().get_simultaneous(
            ((tokens, self.layer.kv_heads, shape.group, shape.head_dim), torch.float16),
            ((*partial, shape.head_dim), torch.float32),
            ((*partial, 2), torch.float32),
            *bias,
            *more,
        )

    def take_step(self, batch: DecodeBatch, partial: tuple[int, int, int], prefixes: PrefixBatch | None) -> StepMemory:
        """Return a step's workspace. `partial`: see `take`. `prefixes`: of the step, or None."""
        rows, more = batch.tokens, []
        if prefixes is not None:
            assert self.prefix is not None
            rows = max(rows, prefixes.passes.rows)
            more = self.prefix.memory(prefixes.passes, prefixes.dtype)
        rotated, outputs, stats, *rest = self.take(rows, partial, *more)
        bias, of_prefixes = rest.pop(0) if self.shape.bias.blocks else None, None
        if prefixes is not None and self.prefix is not None:
            of_prefixes = self.prefix.prepare(prefixes, rotated, bias, rest)
        return StepMemory(rotated, outputs, stats, bias, of_prefixes)

    def count(self, requests: int, query_len: int) -> int:
        """Return the splits of each request of the Triton kernel."""
        return self.shape.splits(requests, query_len, self.sm_count, self.generation)

    def reserve(self, *partials: tuple[int, int, int]) -> None:
        """Size the workspace for any number of these splits, and for partial results of the shapes `partials`; compile
        what steps of prefixes launch."""
        most, more = self.layer.limits.max_requests, []
        tokens = most * self.longest
        if self.prefix is not None:
            tokens, more = max(tokens, self.prefix.limits.rows), self.prefix.most_memory()
            self.prefix.compile()
        lengths = {self.shape.tiles(length): length for length in range(1, self.longest + 1)}.values()
        rows = max(n * length * self.count(n, length) for n in range(1, most + 1) for length in lengths)
        for partial in ((rows, self.layer.query_heads, 1), *partials):
            self.take(tokens, partial, *more)

    def prepare_rotation(self, rotated: torch.Tensor, batch: DecodeBatch, bias: torch.Tensor | None) -> RotateStep:
        """Return the launch that only rotates; the store's launches are made from it.

        rotated: fp16 [tokens, KV heads, group, stored_dim]. bias: see `RotateQueryLaunch`.
        """
        assert batch.positions is not None and self.has_lse == (batch.lse is not None)
        return RotateQueryLaunch.step(rotated, self.rotation, batch.positions, bias)

    def prepare_merge(
        self, partial: torch.Tensor, stats: torch.Tensor, lse: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Merge:
        """Return the merge of fp32 [tokens, query heads, splits, head_dim] and [tokens, query heads, splits, 2].
        `bias`: queries' biases that `take` returned."""
        bias = bias if self.shape.bias.keeps_first else None
        return Merge(MergeLaunch.step(partial, stats, self.shape.group, lse, bias), merge_tile(partial.shape[2]))

    def merge(self, merge: Merge, merges: dict[tuple[int, int], MergeLaunch], output: torch.Tensor) -> None:
        """Launch `merge`, which fills `output` [tokens, query heads, value_dim]. `merges`: launches bound to such
        outputs, by tile."""
        launch = merges.get(merge.tile)
        if launch is None:
            apart, sinks = self.heads_apart(output), self.layer.options.sinks
            launch = MergeLaunch(
                apart, self.from_rotated, merge.tile, sinks, has_lse=self.has_lse, means=self.value_means,
                bias_columns=self.shape.bias.columns,
            )  # fmt: skip
            merges[merge.tile] = launch
        grid, arguments = merge.launch
        launch(grid, (output,), arguments)

    def heads_apart(self, output: torch.Tensor) -> torch.Tensor:
        """[tokens, query heads, value_dim] -> [tokens, KV heads, group, value_dim]."""
        return output.view(len(output), self.layer.kv_heads, self.shape.group, output.shape[2])

    def binding_key(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> tuple[Any, ...]:
        """Return the binding key of launches: see `Launches.get`."""
        sinks = self.layer.options.sinks
        of_sinks = None if sinks is None else (sinks.data_ptr(), sinks.dtype)
        of_ring = None if ring is None else (ring.cache.data_ptr(), ring.cache.stride(), ring.window)
        return cache.data_ptr(), cache.stride(), of_ring, of_sinks, output.stride(), output.dtype

    def batches_to_compile(self, variant: Callable[[int, int], Hashable]) -> list[tuple[int, int]]:
        """Return (requests, query tokens of each) of steps that together launch all variants.

        variant: returns the variant of the kernel and the merge for a number of requests and query tokens of each.
        """
        steps: dict[Hashable, tuple[int, int]] = {}
        of_tiles = {self.shape.tiles(query_len): query_len for query_len in range(self.longest, 0, -1)}
        for query_len in sorted({1, self.longest, *of_tiles.values()}):
            for requests in range(self.layer.limits.max_requests, 0, -1):
                steps[variant(requests, query_len)] = requests, query_len
        return list(steps.values())


class PairDecode(DecodeKernel[Launched, None]):
    """A kernel over the pages of one layer of pairs, and its passes over prefixes."""

    splits: PairWorkspace

    def prepare(self, batch: DecodeBatch) -> Launched:
        return self._prepare(batch, None)

    def prepare_with_prefixes(self, batch: DecodeBatch, prefixes: PrefixBatch) -> Launched:
        return self._prepare(batch, prefixes)

    def _prepare(self, batch: DecodeBatch, prefixes: PrefixBatch | None) -> Launched:
        raise NotImplementedError

    def attend_prefixes(self, step: Launched, cache: torch.Tensor, ring: Ring | None = None) -> OverPrefixes:
        reader: PrefixReader[Any] | None = self.splits.prefix
        assert reader is not None and step.prefixes is not None and self.bound is not None
        return reader.attend(step.prefixes, self.bound, cache, ring)


class TritonPairs(PairDecode[TritonPairStep]):
    """The Triton kernel over the pages of one layer of pairs. `longest`: query tokens of a request that it serves.
    `option`: `decode_kernel`."""

    language = TRITON

    def __init__(self, layer: PairLayout, rotation: QueryRotation, longest: int, option: str = "auto") -> None:
        self.layer, self.longest = layer, longest
        self.splits = PairWorkspace(layer, rotation, longest, option)
        self.shape, self.kind = self.splits.shape, self.splits.kind(by_cuda=False)
        self.pass_limits = self.splits.prefix.limits if self.splits.prefix else None
        self.bound: Launches = Launches()

    def reserve(self) -> None:
        self.splits.reserve()

    def _prepare(self, batch: DecodeBatch, prefixes: PrefixBatch | None) -> TritonPairStep:
        requests, query_len, splits = len(batch.seq_lens), batch.max_query_len, self.splits
        count = splits.count(requests, query_len) if requests else 1
        rows = min(batch.tokens, requests * query_len)  # in a graph, more tokens than decodes' follow these
        memory = splits.take_step(batch, (rows, self.layer.query_heads, count), prefixes)
        rotated, partial, stats, bias, of_prefixes = memory
        tables, launch, merge = (batch.block_table, batch.query_start, batch.seq_lens), None, None
        if requests:
            launch = DecodeLaunch.step(self.shape, query_len, rotated, *tables, partial, stats, bias, batch.ring)
            merge = splits.prepare_merge(partial, stats, batch.lse, bias)
        return TritonPairStep(
            rotate=splits.prepare_rotation(rotated, batch, bias),
            merge=merge,
            prefixes=of_prefixes,
            launch=launch,
            columns=self.shape.tiles(query_len)[0] if requests else 0,
        )

    def attend(
        self, step: TritonPairStep, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert output is not None and step.launch is not None and step.merge is not None
        kernels, merges = self.bound.get("decode", self.splits.binding_key(cache, ring, output), _empty_launches)
        decode = kernels.get(step.columns)
        if decode is None:
            decode = DecodeLaunch(self.layer.codec.layout, self.shape, step.columns, cache, ring)
            kernels[step.columns] = decode
        grid, arguments = step.launch
        decode(grid, (), arguments)
        self.splits.merge(step.merge, merges, output)

    def batches_to_compile(self) -> list[tuple[int, int]]:
        return self.splits.batches_to_compile(self.variant)

    def variant(self, requests: int, query_len: int) -> Hashable:
        """Return the columns of the kernel's tiles and the tile of the merge."""
        return self.shape.tiles(query_len)[0], merge_tile(self.splits.count(requests, query_len))


class CudaPairs(PairDecode[CudaPairStep]):
    """The CUDA kernel over the pages of one layer of pairs. `longest`: query tokens of a request that it serves."""

    language = CUDA

    def __init__(self, layer: PairLayout, rotation: QueryRotation, longest: int) -> None:
        limits, group = layer.limits, layer.query_heads // layer.kv_heads
        self.layer, self.longest = layer, longest
        self.splits = PairWorkspace(layer, rotation, longest)
        self.shape, self.kind = self.splits.shape, self.splits.kind(by_cuda=True)
        self.pass_limits = self.splits.prefix.limits if self.splits.prefix else None
        self.bound: Launches = Launches()
        self.grid_inputs, self.matrix = self.splits.grid_inputs, self.splits.matrix
        unpackers, device = self.grid_inputs.unpackers, self.splits.from_rotated.device
        columns = grids.columns_of_steps(group, limits.longest_decode, unpackers=unpackers)
        self.counters = grids.make_counters(limits.max_requests, self.grid_inputs, columns, device)
        self.schedulers = grids.make_schedulers(limits.max_requests, self.grid_inputs, columns, device)

    def reserve(self) -> None:
        """Size the workspace, and compile the schedulers."""
        columns = self._columns(self.splits.longest)
        for scheduler in self.schedulers.values():
            scheduler(torch.zeros(1, dtype=torch.int32, device=scheduler.items.device))
        partials = [(len(scheduler.items), self.layer.kv_heads, columns) for scheduler in self.schedulers.values()]
        self.splits.reserve(*partials)

    def _prepare(self, batch: DecodeBatch, prefixes: PrefixBatch | None) -> CudaPairStep:
        requests, query_len, schedule = len(batch.seq_lens), batch.max_query_len, None
        # A merge would fill the rows of all tokens; in a graph only the device knows which of them are decodes.
        is_final = prefixes is not None and prefixes.passes.row_kinds is not None
        grid = self.grid(requests, query_len, is_final=is_final) if requests else None
        partial_shape = 0, self.layer.kv_heads, 1
        if grid is not None and grid.is_final:
            columns, passes = self._columns(query_len), grids.pass_count(self.shape.group, query_len)
            kind = grids.block_kind(requests * passes, self.grid_inputs, columns)
            schedule = self.schedulers[kind](batch.seq_lens, passes)
            partial_shape = grid.blocks, self.layer.kv_heads, columns
        elif grid is not None:
            partial_shape = batch.tokens, self.layer.query_heads, grid.blocks
        rotated, partial, stats, bias, of_prefixes = self.splits.take_step(batch, partial_shape, prefixes)
        tables = batch.block_table, batch.query_start, batch.seq_lens
        tensors = (rotated, *tables, partial, stats, bias, batch.ring, batch.lse, schedule)
        has_merge = grid is not None and not grid.is_final
        return CudaPairStep(
            rotate=self.splits.prepare_rotation(rotated, batch, bias),
            merge=self.splits.prepare_merge(partial, stats, batch.lse, bias) if has_merge else None,
            prefixes=of_prefixes,
            grid=grid,
            max_query_len=query_len,
            requests=requests,
            arguments=cuda.step_arguments(*tensors),
            tensors=tensors,
        )

    def attend(
        self, step: CudaPairStep, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert output is not None and step.grid is not None
        binding_key = self.splits.binding_key(cache, ring, output)
        decode, merges = self.bound.get(
            "decode", binding_key, lambda: (self._bind(cache, ring, output), _empty_launches()[1])
        )
        decode(step.grid, step.max_query_len, step.requests, step.arguments, output)
        if step.merge is not None:
            self.splits.merge(step.merge, merges, output)

    def _bind(self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor) -> cuda.CudaDecode:
        """Bind the kernel. Its counters become 0.

        No step has to reset them: a launch's last block of a pair does, and every launch reaches its end. A launch that
        CUDA refuses has not begun, a launch under way when a step raises or is aborted runs to its end, and a kernel
        that faults destroys the CUDA context, and this memory with it.
        """
        if not (self.counters.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph would at each replay
            self.counters.zero_()
        apart, shape = self.splits.heads_apart(output), self.shape
        decode = cuda.CudaDecode(
            self.layer.codec.layout, self.matrix, self.counters, cache, ring, apart,
            shape.bias.tiles_a_block if shape.bias.blocks else None, self.splits.has_lse,
        )  # fmt: skip
        decode.compile_variants(self.layer.limits.longest_decode)
        return decode

    def batches_to_compile(self) -> list[tuple[int, int]]:
        """A bound kernel has all of its variants, so one batch with a final grid is enough."""

        def variant(requests: int, query_len: int) -> Hashable:
            grid = self.grid(requests, query_len)
            return None if grid.is_final else (self.shape.tiles(query_len)[0], merge_tile(grid.blocks))

        return self.splits.batches_to_compile(variant)

    def grid(self, requests: int, query_len: int, *, is_final: bool = False) -> grids.Grid:
        """Return the kernel's grid. `is_final`: whether it must be."""
        passes = grids.pass_count(self.shape.group, query_len)
        return grids.grid(requests * passes, self.grid_inputs, self._columns(query_len), is_final=is_final)

    def _columns(self, query_len: int) -> int:
        return grids.column_count(self.shape.group, query_len, unpackers=self.grid_inputs.unpackers)


def pair_kernel(layer: PairLayout, rotation: QueryRotation, option: str) -> TritonPairs | CudaPairs:
    """Choose the decode kernel of a layer. `option`: `decode_kernel`."""
    asked = layer.asked()
    served = find_kernel(layer.codec.key.device, option, layer.limits, asked, f"GQA group {asked.group}")
    if served.kernel == CUDA:
        return CudaPairs(layer, rotation, served.longest)
    return TritonPairs(layer, rotation, served.longest, option)
