"""Dry runs of a layer: every launch of its steps, for pages, a ring and queries of our own, so that their kernels are
compiled ahead (`kernels/precompile.py`) and the workspace is sized. Threads go on compiling afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ..codecs.ring import Ring
from ..kernels.precompile import Precompiler
from ..layout import MICRO_BLOCK
from ..reference.context_shard import UNSHARDED
from .context_parallel import ContextParallelAttention
from .latent.in_pytorch import PrefixChunk, RecentContext
from .latent.kernels import LatentKernels
from .layer import PairAttention
from .limits import Limits
from .metadata import Batch, PackedMetadata
from .mixed import layer_lacks
from .passes import PrefixPass, prefix_passes
from .protocols import DecodeBatch, LayerKernel, NewTokens, PrefixBatch
from .sparse.layer import SparseKernels
from .sparse.metadata import PromptPart, SparseDecodes
from .step import StepCache, StepKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..window.layer import WindowLayer
    from .latent.decode import TritonLatents
    from .latent.prefix import TritonLatentPrefix
    from .prefill import FlashPrefill
    from .sparse.flash import FlashPrompts, RowGather


def block_size_of(config: VllmConfig) -> int:
    """Return the tokens of a block, or a valid number if vLLM has not settled it yet."""
    block_size = config.cache_config.block_size
    return block_size if block_size and block_size % MICRO_BLOCK == 0 else MICRO_BLOCK


def release(*kernels: LayerKernel | None) -> None:
    """Forget launches for the dry run's pages and ring, which are freed."""
    for kernel in kernels:
        if kernel is not None and kernel.bound is not None:
            kernel.bound.clear()


class PairWarmup:
    """The dry run of a layer of pairs on CUDA.

    Args:
        attention: of the layer.
        query, key, value: of vLLM's profiling run; a layer that shares another's cache may have no key and value.
        block_size: tokens of a block of pages.
        window_layer: of this layer, or None.
        limits: of the engine's steps.
    """

    def __init__(
        self, attention: PairAttention | ContextParallelAttention, query: torch.Tensor, key: torch.Tensor | None,
        value: torch.Tensor | None, block_size: int, window_layer: WindowLayer | None, limits: Limits,
    ) -> None:  # fmt: skip
        kernels, self.limits = attention.kernels, limits
        self.attention, self.kernels, self.block_size = attention, kernels, block_size
        self.query, self.key, self.value = query, key, value
        self.window_layer = window_layer if window_layer is not None and window_layer.ring_block_size else None
        assert kernels.decode is not None
        self.store, self.decode, self.prefill = kernels.store.kernel, kernels.decode, kernels.prefill
        self.heads = kernels.query_heads * kernels.shard.ranks

    def run(self, *, shares_cache: bool) -> None:
        """Note all launches. `shares_cache`: whether the layer shares another's cache, and so rotates queries without a
        store."""
        with Precompiler():
            if self.key is not None and self.value is not None:
                self._decodes(self.key, self.value)  # first, as their kernels take longest
                self._prefills(self.key, self.value)
            if shares_cache:
                self._rotation()
            release(self.store, self.decode, self.prefill)

    def _rotation(self) -> None:
        if self.query.dtype == torch.float32:
            return
        count = torch.arange(2, dtype=torch.int32, device=self.query.device)
        batch = DecodeBatch(count[:1, None], count, count[1:], 1, 1, count[:1].long())
        self.store.rotate(self.query[:1], self.decode.prepare(batch))

    def _reserve(self) -> None:
        """Take all workspace, and the memory that ranks exchange, so that vLLM's memory profile counts it."""
        self.decode.reserve()
        if self.prefill is not None:
            self.prefill.reserve(self.query.dtype)
        if isinstance(self.attention, ContextParallelAttention):
            self.attention.ranks.reserve(self.query, self.kernels.codec.value.head_dim)

    def _prefills(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Every launch of a step with prefills."""
        kernels, query, store, prefill = self.kernels, self.query, self.store, self.prefill
        self._reserve()
        # PyTorch's own memory grows with the batch; FlashAttention's does not: a chunk behind a prefix will do.
        tokens = len(key) if prefill is None else min(2 * MICRO_BLOCK, len(key))
        new_tokens = tokens if prefill is None else -(-tokens // 2)
        pages = self._pages(tokens)
        positions = torch.arange(tokens, device=key.device)
        store.write(store.prepare(NewTokens(positions, positions)), pages, key[:tokens], value[:tokens])
        output = query.new_empty((*query.shape[:2], kernels.codec.value.head_dim))
        batch = Batch(query, key, value, pages, self._one_request(tokens, new_tokens), output)
        passes, ring = self.decode.pass_limits, None
        batch.metadata.steps.get(StepKey("passes", passes), lambda: None)  # the prefix is gathered
        self.attention.forward(batch)
        if self.window_layer is not None and prefill is not None:
            ring = self._ring(tokens, self.window_layer)
            for start in (0, tokens - new_tokens):  # new prompts' tokens are written with pages, chunks' later
                rows = positions[start:]
                step = store.prepare(NewTokens(rows, rows, rows.to(torch.int32), only_ring=start > 0))
                store.write(step, pages, key[rows], value[rows], ring.cache)
            prefill.attend(batch, 0, ring)
            self.window_layer.fill_slots_of_one_request(ring)
        if passes is not None and prefill is not None and query.dtype != torch.float32:
            if passes.each:
                self._passes(batch, new_tokens, ring)
            if self.limits.mixed_graphs and not layer_lacks(kernels):
                self._graph(batch, ring)

    def _passes(self, batch: Batch, new_tokens: int, ring: Ring | None) -> None:
        """Every launch of a step without decodes whose prefixes are read in passes, of `_one_request`."""
        metadata, (query, key, value, pages, *_) = batch.metadata, batch
        assert key is not None and value is not None
        one = [PrefixPass(0, 0, new_tokens, metadata.context[0] - new_tokens)]
        passes = prefix_passes(one, metadata.query_starts, query.device)
        no_decodes = metadata.block_table[:0], metadata.query_start_loc[:1], metadata.seq_lens[:0], 0, 1
        prefixes = PrefixBatch(passes, metadata.block_table, metadata.query_start_loc, query.dtype, ring)
        step = self.decode.prepare_with_prefixes(DecodeBatch(*no_decodes, metadata.positions), prefixes)
        tokens = NewTokens(metadata.slot_mapping, metadata.positions, None, step)
        self.store.write(self.store.prepare(tokens), pages, key[:new_tokens], value[:new_tokens], None, query)
        over_prefixes = self.decode.attend_prefixes(step, pages, ring)
        cast("FlashPrefill", self.prefill).attend(batch, 0, ring, over_prefixes)

    def _graph(self, batch: Batch, ring: Ring | None) -> None:
        """Every launch of a step that a CUDA graph holds, of `_one_request`, but FlashAttention's: only a launch fills
        the tables that it reads."""
        attention, prefill = cast("PairAttention", self.attention), cast("FlashPrefill", self.prefill)
        metadata = replace(
            batch.metadata, is_mixed_graph=True, decode_query_len=self.limits.longest_decode, steps=StepCache()
        )
        batch = batch._replace(metadata=metadata)
        tokens = metadata.num_actual_tokens
        step = attention.prepare_graph(batch, ring, None if ring is None else metadata.positions.to(torch.int32))
        over_prefixes = attention.attend_pages_in_graph(batch, step, ring)
        lse = torch.empty(self.heads, tokens, dtype=torch.float32, device=batch.query.device)
        prefill.combine_in_graph(batch.output[:tokens], lse, over_prefixes)
        if step.store_rest is not None:
            self.kernels.store.write_in_graph(step.store_rest, batch, ring)

    def _decodes(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Every launch of steps of decodes alone."""
        kernels, query = self.kernels, self.query
        if query.dtype == torch.float32:
            return
        for requests, query_len in self.decode.batches_to_compile():
            count = torch.arange(requests + 1, dtype=torch.int32, device=key.device)
            pages, positions = self._pages(1), count[:-1].long()
            ring, ring_slots = None, None
            if self.window_layer is not None:
                ring, ring_slots = self._ring(requests, self.window_layer), positions.to(torch.int32)
            queries, lse = query[:requests], None
            output = query.new_empty((requests, kernels.query_heads, kernels.codec.value.head_dim))
            if kernels.shard.ranks > 1:
                queries = query.new_empty((requests, self.heads, query.shape[2]))
                output = query.new_empty((requests, self.heads, output.shape[2]), dtype=torch.float32)
                lse = output.new_empty((requests, self.heads))
            tables = count[:-1, None], count, count[1:]
            step = self.decode.prepare(DecodeBatch(*tables, requests, query_len, positions, ring, lse))
            tokens = self.store.prepare(NewTokens(positions, positions, ring_slots, step))
            cache = None if ring is None else ring.cache
            self.store.write(tokens, pages, key[:requests], value[:requests], cache, queries)
            self.decode.attend(step, pages, (queries,), ring, output)

    def _one_request(self, tokens: int, new_tokens: int) -> PackedMetadata:
        """A request in the blocks of `_pages`; the last `new_tokens` of its `tokens` are in the batch."""
        device, shard = self.query.device, self.kernels.shard
        slots = torch.arange(tokens, device=device)
        seq_lens = torch.tensor([tokens], dtype=torch.int32, device=device)
        is_whole = shard == UNSHARDED
        return PackedMetadata(
            num_actual_tokens=new_tokens,
            block_table=slots[: -(-tokens // self.block_size)].to(torch.int32).unsqueeze(0),
            slot_mapping=slots[tokens - new_tokens :],
            positions=slots[tokens - new_tokens :],
            query_start_loc=torch.tensor([0, new_tokens], dtype=torch.int32, device=device),
            seq_lens=seq_lens,
            query_starts=[0, new_tokens],
            context=[tokens],
            decodes=0,
            decode_tokens=0,
            decode_query_len=1,
            stored_lens=shard.count(seq_lens),
            shard=shard,
            lse=None if is_whole else torch.empty(new_tokens * self.heads, dtype=torch.float32, device=device),
        )

    def _pages(self, tokens: int) -> torch.Tensor:
        shape = (-(-tokens // self.block_size), self.kernels.kv_heads, self.block_size, self.kernels.codec.slot_bytes)
        return self.query.new_zeros(shape, dtype=torch.uint8)

    def _ring(self, tokens: int, layer: WindowLayer) -> Ring:
        sizes = self.kernels.kv_heads, self.kernels.codec.key.head_dim
        return layer.ring_of_one_request(tokens, *sizes, self.query.device)


def warm_up_latents(kernels: LatentKernels, block_size: int, query_dim: int, window_layer: WindowLayer | None) -> None:
    """Note every launch of the steps of a layer of latents on CUDA.

    Args:
        kernels: of the layer.
        block_size: tokens of a block of pages.
        query_dim: stride in channels from one head of a step's queries to the next, without RoPE and with it.
        window_layer: of the layer, or None.
    """
    store = kernels.store.kernel
    decode = cast("TritonLatents", kernels.decode)  # or `HopperLatents`
    prefix = cast("TritonLatentPrefix", kernels.prefix)
    layer, codec = decode.layer, decode.layer.codec
    device, channels, most = codec.device, codec.rank + codec.rope_dim, layer.limits.max_requests

    def vectors(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=layer.dtype, device=device)

    counts = torch.zeros(most + 1, dtype=torch.int32, device=device)
    table, one = counts[:most, None], counts[:1]
    cache = torch.zeros(1, block_size, codec.slot_bytes, dtype=torch.uint8, device=device)
    queries = vectors(1, layer.heads, codec.rank), vectors(1, layer.heads, query_dim)[..., -codec.rope_dim :]
    if layer.is_shard:  # vLLM gathers them side by side
        queries = vectors(1, layer.heads, channels).split([codec.rank, codec.rope_dim], dim=-1)
    rows = vectors(1, channels)
    new = vectors(1, codec.rank), rows[:, codec.rank :]
    chunk, ring, recent = PrefixChunk(one, counts[:2], 1, one), None, None
    if window_layer is not None and window_layer.ring_block_size:
        shape = (1, 1, window_layer.ring_block_size, codec.ring_slot_bytes)
        ring = Ring(torch.zeros(shape, dtype=torch.uint8, device=device), table, counts[:most], window_layer.window)
    with Precompiler():
        if (ring is None) == (not layer.window):  # first, as their kernels take longest
            for requests, query_len in decode.batches_to_compile():
                tables = table[:requests], counts[: requests + 1], counts[:requests]
                step = decode.prepare(DecodeBatch(*tables, 1, query_len, ring=ring))
                decode.attend(step, cache, queries, ring)
        if window_layer is not None and ring is not None:
            window_layer.fill_slots_of_one_request(ring)
            for slots, only_ring in ((one.long(), False), (one, True)):
                tokens = NewTokens(slots, ring_slots=one, only_ring=only_ring)
                store.write(store.prepare(tokens), cache, *new, ring.cache)
            recent = RecentContext(ring, one)
            prefix.gather_values(chunk, rows, recent)
        else:
            store.write(store.prepare(NewTokens(one.long())), cache, *new)
        prefix.gather(cache, table[:1], chunk, rows, recent)
    release(store, decode)
    prefix.bound.clear()


def warm_up_sparse(kernels: SparseKernels, block_size: int) -> None:
    """Size the workspace, and note every launch of the steps of a layer of picked latents on CUDA. `block_size`: tokens
    of a block of pages."""
    layer, codec, device = kernels.layer, kernels.layer.codec, kernels.layer.codec.device
    assert kernels.decode is not None and kernels.take is not None
    gather, prompts = cast("RowGather", kernels.prefix), cast("FlashPrompts", kernels.prefill)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    table, starts, picks = one[:, None], torch.cat((one, one)), one.repeat(1, layer.picks)
    new = [torch.zeros(1, channels, dtype=torch.bfloat16, device=device) for channels in (codec.rank, codec.rope_dim)]
    cache = torch.zeros(1, block_size, codec.slot_bytes, dtype=torch.uint8, device=device)
    memory = kernels.take()
    query = memory.query[:1, : layer.heads]
    queries, output = (query[..., : codec.rank], query[..., codec.rank :]), memory.output[:1]
    lse = None if kernels.sinks is None else memory.lse[:1]
    results = memory.stored[:1], torch.zeros(1, memory.stored.shape[1], device=device)
    store, decode = kernels.store.kernel, kernels.decode
    with Precompiler():
        store.write(store.prepare(NewTokens(one.long())), cache, *new)
        batch = SparseDecodes(table, starts, one, 1, 1, lse=lse, requests=one, memory=memory)
        decode.attend(decode.prepare(batch), cache, (*queries, picks), output=output)
        gather.gather_tokens(cache, table, one, one, memory.rows[:1])
        of_prompt = prompts.split(memory, picks, PromptPart(0, 1, 1, one, one, one, one, one), slice(0, 1))
        for stored in (None, results):
            prompts.merge(output, stored, results, of_prompt, lse)
        if kernels.sinks is not None:
            kernels.sinks.share(output, memory.lse[:1], queries[0])
    release(store, decode, prompts, gather, kernels.sinks)
