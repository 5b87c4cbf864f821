"""The fused route on CUDA: one kernel stores tokens and rotates the queries, one or two attend over packed pages.

The decode kernel has two implementations: `kernels/cuda` where it serves a layer, else the portable one,
`kernels/triton/decode.py`.
No host sync, and no allocation once vLLM's profiling run has sized the workspace. What a step decides is worked out for
its first layer (`decode_step`, `store_step`); the others only launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.workspace import current_workspace_manager

from ..codecs.pages import PagedCodec
from ..codecs.ring import Ring
from ..kernels.cuda import launch as cuda
from ..kernels.cuda import longest_query, refusal
from ..kernels.triton.decode import (
    MAX_REGISTERS,
    TILE_TOKENS,
    DecodeShape,
    bind_decode,
    decode_arguments,
    decode_grid,
)
from ..kernels.triton.launch import Arguments, Launch, Launches
from ..kernels.triton.means import Means
from ..kernels.triton.merge import bind_merge, merge_arguments, merge_grid, merge_tile
from ..kernels.triton.rotate import (
    QueryRotation,
    bind_rotate_query,
    rotate_query_arguments,
    rotate_query_grid,
    rotation_matrix,
)
from ..kernels.triton.store import bind_store, store_arguments, store_grid
from .active_blocks import AttentionOptions
from .context_shard import UNSHARDED, ContextShard
from .routes import longest_fused

logger = init_logger("vllm.packed_kv")

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class CudaDecodeStep:
    """Of the CUDA kernel's launch; `tensors` are those whose addresses the arguments are."""

    grid: cuda.Grid
    max_query_len: int
    requests: int
    arguments: bytes
    tensors: tuple[Any, ...]


@dataclass(frozen=True, eq=False)  # an object is a key of the step's store: it names itself alone
class DecodeStep:
    """Grids and arguments of a step's launches, query rows a KV head, the splits' tile of the merge, if one follows,
    and the columns of the Triton kernel's tiles."""

    rotate: tuple[Grid, Arguments]
    decode: tuple[Grid, Arguments] | CudaDecodeStep
    merge: tuple[Grid, Arguments] | None
    rows: int
    tile: tuple[int, int]
    columns: int


@dataclass(frozen=True)
class StoreStep:
    """Grid and arguments of a step's launch, and whether it rotates queries."""

    grid: Grid
    arguments: Arguments
    rotates: bool


class FusedDecode:
    """Decode attention of one layer.

    Args:
        codec: of the layer, on a CUDA device.
        query_heads, kv_heads: of this rank; of all ranks that split the tokens, where there are several.
        options: see `AttentionOptions`.
        longest_decode: query tokens of a request, drafts included.
        max_requests: of a step.
        kernel: "triton", or "auto": the CUDA kernel where it serves.
        shard: what is in this rank's pages. Where there are several ranks, a step has lse to fill.
    """

    def __init__(
        self,
        codec: PagedCodec,
        query_heads: int,
        kv_heads: int,
        options: AttentionOptions,
        longest_decode: int,
        max_requests: int,
        kernel: str = "auto",
        shard: ContextShard = UNSHARDED,
    ) -> None:
        self.codec, self.query_heads, self.kv_heads, self.options = codec, query_heads, kv_heads, options
        self.longest_decode, self.max_requests = longest_decode, max_requests
        self.has_lse = shard.ranks > 1
        means = Means.of(codec.key.transform, has_first=shard.has_first)
        self.mean_blocks = 0 if means is None else means.blocks
        """Blocks of positions for which queries have a bias; 0: they have none."""
        tile_tokens = TILE_TOKENS * shard.ranks
        assert means is None or means.block_tokens % tile_tokens == 0, (means.block_tokens, shard)
        tiles_a_block = 0 if means is None else means.block_tokens // tile_tokens
        self.rotation = QueryRotation(rotation_matrix(codec.key, kv_heads), options.scale, means)
        self.from_rotated = rotation_matrix(codec.value, kv_heads, inverse=True)
        properties = torch.cuda.get_device_properties(codec.key.device)
        self.sm_count = properties.multi_processor_count
        self.shape = DecodeShape(
            kv_heads, query_heads // kv_heads, codec.key.stored_dim, options.sliding_window, options.logits_soft_cap,
            self.mean_blocks, tiles_a_block, MAX_REGISTERS if properties.major == 9 else None,
        )  # fmt: skip
        self.bound = Launches()
        refused = refusal(
            (properties.major, properties.minor), codec.key.head_dim, self.shape.group, longest_decode,
            options.sliding_window, options.logits_soft_cap, has_sinks=options.sinks is not None,
            value_dim=codec.value.head_dim, group_bits=codec.layout.vector.group_bits,
        )  # fmt: skip
        serves = refused is None and kernel != "triton"
        reason = "is disabled by decode_kernel=triton" if kernel == "triton" else f"does not serve {refused}"
        group = self.shape.group
        served = f"{group} query heads per KV head, {longest_decode} tokens with drafts, of which it takes up to"
        logger.info_once(
            "KV cache: decodes are served by the %s",
            f"CUDA kernel ({served} {longest_query(group)})" if serves else f"Triton kernel (the CUDA kernel {reason})",
            scope="local",
        )
        self.longest = longest_fused(group, by_cuda=serves)
        """Query tokens of a request that this route takes."""
        self.of_cuda: tuple[torch.Tensor, torch.Tensor] | None = None
        """What the CUDA kernel keeps on the device; None: the Triton kernel serves."""
        self.card = cuda.card_of(codec.layout, kv_heads, self.sm_count)
        self.schedulers: dict[cuda.Kind, cuda.Scheduler] = {}
        """Of the CUDA kernel, by the kind of its blocks."""
        if serves:
            device = self.from_rotated.device
            columns = cuda.columns_of_steps(self.shape.group, longest_decode)
            counters = cuda.make_counters(max_requests, self.card, columns, device)
            self.of_cuda = cuda.pack_matrix(self.from_rotated), counters
            self.schedulers = cuda.make_schedulers(max_requests, self.card, columns, device)

    def store_step(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        ring_slots: torch.Tensor | None = None,
        decodes: DecodeStep | None = None,
    ) -> StoreStep | None:
        """For a step's tokens: see `store_tokens`. `ring_slots`: of the first of them; `decodes`: whose queries to
        rotate. None: no tokens."""
        if not len(slots):
            return None
        rotate, rows = (None, 0) if decodes is None else (decodes.rotate[1], decodes.rows)
        grid = store_grid(self.codec, len(slots), self.kv_heads, rows, self.rotation.bias_programs)
        return StoreStep(grid, store_arguments(self.codec, slots, positions, ring_slots, rotate), rotate is not None)

    def store(
        self,
        cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: StoreStep | None,
        ring: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        *,
        only_ring: bool = False,
    ) -> None:
        """Write new tokens, into the ring too if the step has `ring_slots`; see `store_tokens`. `query` is looked at
        where the step has decodes."""
        if step is None:
            return
        queries = None if query is None or not step.rotates else (query, self.rotation)
        read = key if queries is None else queries[0]
        of_ring = None if ring is None else (ring.data_ptr(), ring.stride())
        held_for = (
            cache.data_ptr(), cache.stride(), of_ring, key.dtype, value.dtype, read.dtype,
            key.stride(), value.stride(), read.stride(),
        )  # fmt: skip
        launch = self.bound.get(
            ("store", ring is None, step.rotates, only_ring),
            held_for,
            lambda: bind_store(self.codec, cache, key, value, ring, queries, only_ring=only_ring),
        )
        launch(step.grid, (key, value, read), step.arguments)

    def rotate(self, query: torch.Tensor, step: DecodeStep) -> None:
        """Rotate a step's queries in a layer that stores no tokens."""
        held_for = (query.stride(), query.dtype)
        launch = self.bound.get("rotate", held_for, lambda: bind_rotate_query(query, self.kv_heads, self.rotation))
        launch(step.rotate[0], (query,), step.rotate[1])

    def decode_step(
        self,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        max_query_len: int,
        ring: Ring | None = None,
        lse: torch.Tensor | None = None,
    ) -> DecodeStep:
        """For the decodes of a step, and layers of the same heads.

        Args:
            positions: int64 [query tokens].
            block_table: int32 [requests, blocks].
            query_start: int32 [requests + 1].
            seq_lens: int32 [requests], tokens in this rank's pages.
            max_query_len: known on the host.
            ring: of these requests, of any of these layers; None: there is none.
            lse: with several ranks, fp32 [tokens, query heads], contiguous, filled; else None.
        """
        assert self.has_lse == (lse is not None)
        shape, tokens = self.shape, len(positions)
        requests, schedule = len(seq_lens), None
        grid = self._grid(requests, max_query_len)
        if grid.is_final:
            columns, passes = cuda.column_count(shape.group, max_query_len), cuda.pass_count(shape.group, max_query_len)
            schedule = self.schedulers[cuda.kind_of(requests * passes, self.card, columns)](seq_lens, passes)
            rotated, partial, stats, *bias = self.reserve(tokens, (grid.blocks, self.kv_heads, columns))
        else:
            rotated, partial, stats, *bias = self.reserve(tokens, (tokens, self.query_heads, grid.blocks))
        query_bias = bias[0] if bias else None
        batch = (rotated, block_table, query_start, seq_lens, partial, stats, query_bias, ring)
        decode: tuple[Grid, Arguments] | CudaDecodeStep
        if self.of_cuda is not None:
            tensors = (*batch, lse, schedule)
            decode = CudaDecodeStep(grid, max_query_len, requests, cuda.step_arguments(*tensors), tensors)
        else:
            decode = decode_grid(shape, grid.blocks, requests, max_query_len), decode_arguments(*batch)
        tile, merge = (0, 0), None
        if not grid.is_final:
            tile = merge_tile(grid.blocks)
            arguments = merge_arguments(partial, stats, shape.group, lse)
            merge = merge_grid(tokens, shape.kv_heads, shape.group, tile), arguments
        rotate = rotate_query_grid(rotated, self.rotation), rotate_query_arguments(rotated, positions, query_bias)
        columns, _ = shape.tiles(max_query_len)
        return DecodeStep(rotate, decode, merge, tokens * shape.group, tile, columns)

    @property
    def step_kind(self) -> tuple:
        """Keys of some layers have means, of more or fewer blocks, and layers with a window have the other kernel."""
        return self.mean_blocks, self.of_cuda is not None

    def attend(
        self, cache: torch.Tensor, step: DecodeStep, output: torch.Tensor, ring: Ring | None = None,
        query: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of requests with few query tokens, over all of their cached tokens. `store` or `rotate` has rotated
        their queries.

        Args:
            cache: uint8 [blocks, KV heads, block_size, slot_bytes].
            step: of these tokens.
            output: fp16, bf16 or fp32 [tokens or more, query heads, value_dim]; the rows of these tokens are filled.
            ring: of the layer, the new tokens included; None: there is none.
            query: not looked at, as they are rotated.
        """
        sinks = self.options.sinks
        of_sinks = None if sinks is None else (sinks.data_ptr(), sinks.dtype)
        of_ring = None if ring is None else (ring.cache.data_ptr(), ring.cache.stride(), ring.window)
        held_for = (cache.data_ptr(), cache.stride(), of_ring, of_sinks, output.stride(), output.dtype)
        decode, merges = self.bound.get("decode", held_for, lambda: self._bind(cache, ring, output))
        if isinstance(step.decode, CudaDecodeStep):
            launch = step.decode
            decode(launch.grid, launch.max_query_len, launch.requests, launch.arguments, output)
        else:
            of_columns = decode.get(step.columns)
            if of_columns is None:
                of_columns = bind_decode(self.codec.layout, self.shape, step.columns, cache, ring)
                decode[step.columns] = of_columns
            of_columns(step.decode[0], (), step.decode[1])
        if step.merge is None:
            return
        merge = merges.get(step.tile)
        if merge is None:
            apart = self._heads_apart(output)
            merge = bind_merge(apart, self.from_rotated, step.tile, sinks, has_lse=self.has_lse)
            merges[step.tile] = merge
        merge(step.merge[0], (output,), step.merge[1])

    def _bind(
        self, cache: torch.Tensor, ring: Ring | None, output: torch.Tensor
    ) -> tuple[Any, dict[tuple[int, int], Launch]]:
        """Launches of decode, of Triton's kernel by the columns of its tiles, none yet, and of the merge by its tile,
        none yet. The CUDA kernel's counters become 0.

        No step has to reset these. A launch's last block of a pair does, and no launch ends before: one that CUDA
        refuses has not begun, one under way when a step raises or is aborted goes on to its end, and a kernel that
        faults takes the CUDA context along, and this memory with it.
        """
        if self.of_cuda is None:
            return {}, {}
        _, counters = self.of_cuda
        if not (counters.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph would do so at each replay
            counters.zero_()
        apart = self._heads_apart(output)
        decode = cuda.CudaDecode(
            self.codec.layout, *self.of_cuda, cache, ring, apart, self.mean_blocks > 0, self.has_lse,
            self.shape.tiles_a_block,
        )  # fmt: skip
        decode.compile_variants(self.longest_decode)
        return decode, {}

    def _heads_apart(self, output: torch.Tensor) -> torch.Tensor:
        return output.view(len(output), self.kv_heads, self.shape.group, output.shape[2])

    def batches_to_compile(self) -> list[tuple[int, int]]:
        """Requests and their query tokens, of steps that launch all variants of the kernels between them."""
        steps: dict[tuple[int, tuple[int, int]] | None, tuple[int, int]] = {}
        longest = min(self.longest_decode, self.longest)
        of_tiles = {self.shape.tiles(query_len): query_len for query_len in range(longest, 0, -1)}
        for query_len in sorted({1, longest, *of_tiles.values()}):
            columns, _ = self.shape.tiles(query_len)
            for requests in range(self.max_requests, 0, -1):
                grid = self._grid(requests, query_len)
                steps[None if grid.is_final else (columns, merge_tile(grid.blocks))] = requests, query_len
        return list(steps.values())

    def _grid(self, requests: int, max_query_len: int) -> cuda.Grid:
        """Of the CUDA kernel, or with the splits of Triton's."""
        if self.of_cuda is None:
            return cuda.Grid(1, self.shape.splits(requests, max_query_len, self.sm_count), is_final=False)
        group = self.shape.group
        passes = cuda.pass_count(group, max_query_len)
        return cuda.grid(requests * passes, self.card, cuda.column_count(group, max_query_len))

    def reserve_any_batch(self) -> None:
        """Size the workspace for any batch, and compile the schedulers."""
        counts = range(1, self.max_requests + 1)
        query_len = min(self.longest_decode, self.longest)
        lengths = {self.shape.tiles(length): length for length in range(1, query_len + 1)}.values()
        rows = max(n * length * self.shape.splits(n, length, self.sm_count) for n in counts for length in lengths)
        self.reserve(self.max_requests * query_len, (rows, self.query_heads, 1))
        for scheduler in self.schedulers.values():
            scheduler(torch.zeros(1, dtype=torch.int32, device=scheduler.items.device))
            columns = cuda.column_count(self.shape.group, self.longest_decode)
            self.reserve(self.max_requests * query_len, (len(scheduler.items), self.kv_heads, columns))

    def reserve(self, tokens: int, partial: tuple[int, int, int]) -> list[torch.Tensor]:
        """Workspace for rotated queries, partial outputs of that shape, their softmax state; for queries' biases if
        there are."""
        head_dim = self.shape.head_dim
        bias = [((tokens, self.query_heads, 1 + self.mean_blocks), torch.float32)] if self.mean_blocks else []
        return current_workspace_manager().get_simultaneous(
            ((tokens, self.kv_heads, self.shape.group, head_dim), torch.float16),
            ((*partial, head_dim), torch.float32),
            ((*partial, 2), torch.float32),
            *bias,
        )
