"""What attention of one layer is made of, whoever serves it: storing a batch, steps of the kernels, and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ..codecs.pages import PagedCodec
from ..codecs.ring import Ring
from ..kernels.ahead import Ahead
from ..layout import MICRO_BLOCK
from ..window.metadata import RecentTokens
from ..window.step import WindowStep
from .active_blocks import AttentionOptions, attend
from .context_shard import UNSHARDED, ContextShard
from .cpu import CpuRoute
from .metadata import PackedMetadata

if TYPE_CHECKING:
    from ..window.layer import WindowLayer
    from .decode import FusedDecode
    from .prefill import FlashPrefill
    from .protocols import DecodeRoute, PrefillRoute


class LayerAttention:
    """Base of `PlainAttention` and `ContextParallelAttention`.

    Args:
        codec: of the layer.
        query_heads, kv_heads: of the layer on this rank.
        options: see `AttentionOptions`.
        fused: the route of the store and of decodes; None: there is none, and both run in PyTorch.
        prefill: the route of prefills; None: there is none, and they run in PyTorch.
        shard: which tokens are in this rank's pages.
    """

    def __init__(
        self,
        codec: PagedCodec,
        query_heads: int,
        kv_heads: int,
        options: AttentionOptions,
        fused: DecodeRoute | None,
        prefill: PrefillRoute | None,
        shard: ContextShard = UNSHARDED,
    ) -> None:
        self.codec, self.query_heads, self.kv_heads, self.options = codec, query_heads, kv_heads, options
        self.fused, self.prefill, self.shard = fused, prefill, shard
        self.group = query_heads * shard.ranks // kv_heads
        """Query heads a KV head that the decode kernel serves."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        metadata: PackedMetadata, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Store a batch and attend. See `PackedAttentionImpl.forward`."""
        raise NotImplementedError

    def reserve(self, query: torch.Tensor) -> None:
        """Take the workspace of all routes, so that vLLM's memory profile counts it."""
        fused, prefill = self._routes_of_cuda()
        fused.reserve_any_batch()
        if prefill is not None:
            prefill.reserve(query.dtype)

    def profile(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, block_size: int,
        window_layer: WindowLayer | None, *, shares_cache: bool = False,
    ) -> None:  # fmt: skip
        """Take the workspace, and begin to compile the kernels, for pages and a ring of our own. On a CPU, the routes
        have done so when they were made.

        Compilation goes on afterwards; `wait_for_all` of `kernels/ahead.py` returns once it is done.

        Args:
            query, key, value: of vLLM's profiling run; a layer that shares another's cache may have no key and value.
            block_size: tokens of a block of pages.
            window_layer: of this layer, or None.
            shares_cache: whether the layer shares another's cache, and so rotates queries without a store.
        """
        if self.fused is None or isinstance(self.fused, CpuRoute):
            return
        with Ahead():
            if key is not None and value is not None:
                batch = (query, key, value, block_size, window_layer)
                self._launch_decodes(*batch)  # first, as their kernels take longest
                self._launch_prefills(*batch)
            if shares_cache:
                self._launch_rotation(query)
            self._forget_launches()

    def _launch_rotation(self, query: torch.Tensor) -> None:
        """The launch that only rotates queries, in a block of `Ahead`."""
        if query.dtype == torch.float32:
            return
        fused, _ = self._routes_of_cuda()
        count = torch.arange(2, dtype=torch.int32, device=query.device)
        step = fused.decode_step(count[:1].long(), count[:1, None], count, count[1:], 1)
        fused.rotate(query[:1], step)

    def _launch_prefills(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_size: int,
        window_layer: WindowLayer | None,
    ) -> None:  # fmt: skip
        """Every launch of a step with prefills."""
        fused, prefill = self._routes_of_cuda()
        self.reserve(query)
        # PyTorch's own memory grows with the batch; FlashAttention's does not: a chunk behind a prefix will do.
        tokens = len(key) if prefill is None else min(2 * MICRO_BLOCK, len(key))
        new_tokens = tokens if prefill is None else -(-tokens // 2)
        pages = self._pages(tokens, block_size, key)
        heads = self.query_heads * self.shard.ranks
        batch = PackedMetadata.of_one_request(tokens, new_tokens, key.device, self.shard, heads, block_size)
        positions = torch.arange(tokens, device=key.device)
        fused.store(pages, key[:tokens], value[:tokens], fused.store_step(positions, positions))
        output = query.new_empty((*query.shape[:2], self.codec.value.head_dim))
        self.forward(query, key, value, pages, batch, output)
        if window_layer is not None and prefill is not None and window_layer.ring_block_size:
            ring = self._ring(tokens, window_layer, key)
            for start in (0, tokens - new_tokens):  # a new prompt's tokens go there with pages, a chunk's afterwards
                rows = positions[start:]
                step = fused.store_step(rows, rows, rows.to(torch.int32))
                fused.store(pages, key[rows], value[rows], step, ring.cache, only_ring=start > 0)
            prefill.attend(query, key, value, pages, batch, 0, output, ring)
            window_layer.fill_slots_of_one_request(ring)

    def _launch_decodes(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_size: int,
        window_layer: WindowLayer | None,
    ) -> None:  # fmt: skip
        """Every launch of steps of decodes alone, in a block of `Ahead`."""
        fused, _ = self._routes_of_cuda()
        if query.dtype == torch.float32:
            return
        for requests, query_len in fused.batches_to_compile():
            count = torch.arange(requests + 1, dtype=torch.int32, device=key.device)
            pages, positions = self._pages(1, block_size, key), count[:-1].long()
            ring, of_ring = None, None
            if window_layer is not None and window_layer.ring_block_size:
                ring, of_ring = self._ring(requests, window_layer, key), positions.to(torch.int32)
            queries, lse = query[:requests], None
            output = query.new_empty((requests, self.query_heads, self.codec.value.head_dim))
            if self.shard.ranks > 1:
                heads = self.query_heads * self.shard.ranks
                queries = query.new_empty((requests, heads, query.shape[2]))
                output = query.new_empty((requests, heads, output.shape[2]), dtype=torch.float32)
                lse = output.new_empty((requests, heads))
            tables = count[:-1, None], count, count[1:]
            step = fused.decode_step(positions, *tables, query_len, ring, lse)
            store = fused.store_step(positions, positions, of_ring, step)
            cache = None if ring is None else ring.cache
            fused.store(pages, key[:requests], value[:requests], store, cache, queries)
            fused.attend(pages, step, output, ring)

    def _pages(self, tokens: int, block_size: int, like: torch.Tensor) -> torch.Tensor:
        shape = (-(-tokens // block_size), self.kv_heads, block_size, self.codec.slot_bytes)
        return like.new_zeros(shape, dtype=torch.uint8)

    def _ring(self, tokens: int, layer: WindowLayer, like: torch.Tensor) -> Ring:
        return layer.ring_of_one_request(tokens, self.kv_heads, self.codec.key.head_dim, like.device)

    def _forget_launches(self) -> None:
        """Of pages and a ring of our own."""
        fused, prefill = self._routes_of_cuda()
        fused.bound.clear()
        if prefill is not None:
            prefill.bound.clear()

    def _routes_of_cuda(self) -> tuple[FusedDecode, FlashPrefill | None]:
        return cast("FusedDecode", self.fused), cast("FlashPrefill | None", self.prefill)

    def fused_decodes(self, metadata: PackedMetadata, dtype: torch.dtype) -> int:
        """How many requests, from the first on, the fused route serves."""
        fused = self.fused
        if fused is None or dtype == torch.float32 or metadata.decode_query_len > fused.longest:
            return 0
        return metadata.decodes

    def store(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        metadata: PackedMetadata, window: WindowStep | None, decodes: int, decode_step: Any,
    ) -> None:  # fmt: skip
        """Write the batch's tokens into their pages, and rotate the decodes' queries in the same launch.

        Tokens of decodes go into their rings too, as the kernel reads them there; prefills read what their rings had
        before, so that their tokens follow later, unless all prefills are new prompts, whose rings have nothing.
        """
        tokens, fused = metadata.num_actual_tokens, self.fused
        if fused is None:
            new = (metadata.slot_mapping[:tokens], key[:tokens], value[:tokens], metadata.positions[:tokens])
            self.codec.write(kv_cache, *new)
            return
        in_ring = 0
        if window:
            in_ring = tokens if metadata.has_new_prompts(decodes) else metadata.query_starts[decodes]

        def make() -> Any:
            ring_slots = window.metadata.slots[:in_ring] if window and in_ring else None
            where = (metadata.slot_mapping[:tokens], metadata.positions[:tokens], ring_slots)
            return fused.store_step(*where, decode_step)

        step = self.once_a_step(metadata, window, ("store", decodes, decode_step), make)
        ring = window.layer.kv_cache if window and in_ring else None
        fused.store(kv_cache, key, value, step, ring, query)

    def decode_step(self, metadata: PackedMetadata, window: WindowStep | None, lse: torch.Tensor | None = None) -> Any:
        """Of the batch's decodes, for the fused route. `lse`: see `FusedDecode.decode_step`."""
        fused, requests = self.fused, metadata.decodes
        assert fused is not None

        def make() -> Any:
            return fused.decode_step(
                metadata.positions[: metadata.decode_tokens], metadata.block_table[:requests],
                metadata.query_start_loc[: requests + 1],
                metadata.stored_lens[:requests], metadata.decode_query_len,
                window.ring(0, requests) if window else None, lse,
            )  # fmt: skip

        return self.once_a_step(metadata, window, ("decode", *fused.step_kind), make)

    def once_a_step(
        self, metadata: PackedMetadata, window: WindowStep | None, name: tuple, make: Callable[[], Any]
    ) -> Any:
        """What `make` returns, for the first layer of a step with these heads and this ring; kept for the others."""
        heads = (self.query_heads, self.kv_heads, self.codec.key.head_dim, self.codec.value.head_dim)
        return metadata.once((*name, *heads, window and window.metadata), make)

    def attend_in_pytorch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        metadata: PackedMetadata, window: WindowStep | None, first: int, output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Serve the batch's requests from `first` on, one by one. `lse`: fp32 [tokens, query heads], filled."""
        starts = metadata.query_starts
        recent: dict[int, RecentTokens] = {}
        if window:
            recent = window.recent_tokens(self.codec, key, value, metadata.positions, starts, metadata.context, first)
        for request in range(first, len(metadata.context)):
            rows = slice(starts[request], starts[request + 1])
            if rows.start < rows.stop:
                table, seq_len = metadata.block_table[request], metadata.context[request]
                batch = (table, seq_len, query[rows], self.options, recent.get(request), metadata.shard)
                result, row_lse = attend(self.codec, kv_cache, *batch)
                output[rows] = result.to(output.dtype)
                if lse is not None:
                    lse[rows] = row_lse
