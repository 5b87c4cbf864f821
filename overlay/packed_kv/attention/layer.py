"""Attention of one layer of pairs, and its step from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ..codecs.pages import PagedCodec
from ..reference.attention import AttentionOptions, RecentVectors, attend
from ..reference.context_shard import UNSHARDED, ContextShard
from ..window.step import WindowStep
from .metadata import Batch, PackedMetadata
from .passes import OverPrefixes, PrefixPasses, most_passes, plan_passes, prefix_passes
from .protocols import DecodeBatch, DecodeKernel, NewTokens, PrefillKernel, PrefixBatch
from .step import StepKey
from .store import PairStore

if TYPE_CHECKING:
    from ..codecs.ring import Ring
    from .prefill import FlashPrefill


@dataclass(eq=False)
class PairKernels:
    """Kernels of a layer's attention, and its shape and options.

    `codec`, `query_heads`, `kv_heads`, `options`: of the layer, on this rank. `store`: all writes. `decode`: the kernel
    of decodes; None: PyTorch. `prefill`: the kernel of the other requests; None: PyTorch. `shard`: which tokens are in
    this rank's pages.
    """

    codec: PagedCodec
    query_heads: int
    kv_heads: int
    options: AttentionOptions
    store: PairStore
    decode: DecodeKernel[Any, None] | None
    prefill: PrefillKernel[Batch] | None
    shard: ContextShard = UNSHARDED

    def count_decodes(self, metadata: PackedMetadata, dtype: torch.dtype) -> int:
        """Return how many requests, from the first on, the decode kernel serves."""
        if self.decode is None or dtype == torch.float32 or metadata.decode_query_len > self.decode.longest:
            return 0
        return metadata.decodes

    def find_passes(self, batch: Batch, first: int) -> PrefixPasses | None:
        """Return the passes in which the decode kernel reads prefixes of the requests from `first` on; None: it reads
        no prefix."""
        metadata, decode = batch.metadata, self.decode
        limits = None if decode is None else decode.pass_limits
        if limits is None or self.prefill is None or batch.key is None or first == len(metadata.context):
            return None

        def make() -> PrefixPasses | None:
            found = plan_passes(metadata.query_starts, metadata.context, first, limits)
            return prefix_passes(found, metadata.query_starts, batch.query.device) if found else None

        return metadata.steps.get(StepKey("passes", limits, first), make)

    def prepare_decodes(
        self, metadata: PackedMetadata, requests: int, window: WindowStep | None, lse: torch.Tensor | None = None,
        passes: PrefixPasses | None = None, dtype: torch.dtype = torch.float16,
    ) -> Any:  # fmt: skip
        """Return the step of the batch's decodes, its first `requests`, and of passes over the others' prefixes; layers
        of one kind share it. `lse`: see `DecodeBatch`. `dtype`: of queries."""
        decode = self.decode
        assert decode is not None
        tokens = metadata.query_starts[requests] if requests < len(metadata.context) else metadata.decode_tokens

        def make() -> Any:
            decodes = DecodeBatch(
                block_table=metadata.block_table[:requests],
                query_start=metadata.query_start_loc[: requests + 1],
                seq_lens=metadata.stored_lens[:requests],
                tokens=tokens,
                max_query_len=metadata.decode_query_len,
                positions=metadata.positions[: tokens if passes is None else max(tokens, passes.rows)],
                ring=window.ring(0, requests) if window else None,
                lse=lse,
            )
            if passes is None:
                return decode.prepare(decodes)
            ring = window.ring(0, len(metadata.context)) if window else None
            of_requests = metadata.block_table, metadata.query_start_loc
            return decode.prepare_with_prefixes(decodes, PrefixBatch(passes, *of_requests, dtype, ring))

        rings = window.metadata if window else None
        what = "decode" if passes is None else "decode and prefixes"
        return metadata.steps.get(StepKey(what, decode.kind, requests, rings), make)

    def attend_in_pytorch(self, batch: Batch, first: int, lse: torch.Tensor | None = None) -> None:
        """Serve the batch's requests from `first` on, one by one. `lse`: fp32 [tokens, query heads], filled."""
        metadata, starts = batch.metadata, batch.metadata.query_starts
        recent: dict[int, RecentVectors] = {}
        if batch.window:
            new = batch.key, batch.value, metadata.positions
            recent = batch.window.recent_vectors(self.codec, *new, starts, metadata.context, first)
        for request in range(first, len(metadata.context)):
            rows = slice(starts[request], starts[request + 1])
            if rows.start < rows.stop:
                table, seq_len = metadata.block_table[request], metadata.context[request]
                of_request = table, seq_len, batch.query[rows], self.options, recent.get(request), metadata.shard
                result, row_lse = attend(self.codec, batch.cache, *of_request)
                batch.output[rows] = result.to(batch.output.dtype)
                if lse is not None:
                    lse[rows] = row_lse


class GraphStep(NamedTuple):
    """A mixed step that a CUDA graph holds: the step of decodes and passes, `MixedTables.chunk_start`, and the steps of
    two writes. The first writes pages and the decodes' rings; the second, after attention, writes the chunks' rings, if
    any."""

    decode: Any
    chunk_start: torch.Tensor
    store: Any
    store_rest: Any


class PairAttention:
    """Attention of a layer whose tokens are all in this rank's pages."""

    def __init__(self, kernels: PairKernels) -> None:
        self.kernels = kernels

    def forward(self, batch: Batch) -> None:
        """Store a batch, and attend to its decodes and to the other requests."""
        kernels, metadata, window = self.kernels, batch.metadata, batch.window
        if metadata.is_mixed_graph:
            return self._forward_in_graph(batch)
        decodes = kernels.count_decodes(metadata, batch.query.dtype)
        passes, decode_step = kernels.find_passes(batch, decodes), None
        if decodes or passes is not None:
            decode_step = kernels.prepare_decodes(metadata, decodes, window, None, passes, batch.query.dtype)
        if batch.key is not None:
            kernels.store.store(batch, decodes, decode_step)
        elif decode_step is not None:
            kernels.store.kernel.rotate(batch.query, decode_step)
        if decodes:
            assert kernels.decode is not None
            ring = window.ring(0, decodes) if window else None
            kernels.decode.attend(decode_step, batch.cache, (batch.query,), ring, batch.output)
        if decodes == len(metadata.context):
            return
        if batch.query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("prefill cannot be captured in a CUDA graph: its schedule is built on the host")
        if kernels.prefill is None:
            kernels.attend_in_pytorch(batch, decodes)
        else:
            ring = None
            if window and batch.key is not None and not metadata.has_new_prompts(decodes):
                ring = window.ring(decodes, len(metadata.context))
            if passes is None:
                kernels.prefill.attend(batch, decodes, ring)
            else:
                assert kernels.decode is not None
                over_prefixes = kernels.decode.attend_prefixes(decode_step, batch.cache, ring)
                cast("FlashPrefill", kernels.prefill).attend(batch, decodes, ring, over_prefixes)
        if batch.key is not None:
            kernels.store.store_rest(batch, decodes)

    def _forward_in_graph(self, batch: Batch) -> None:
        """Launch a step that serves any batch of up to this many requests and tokens: the kernels read the batch on the
        device."""
        kernels, metadata, window = self.kernels, batch.metadata, batch.window
        decode, prefill, store = kernels.decode, cast("FlashPrefill", kernels.prefill), kernels.store
        assert decode is not None
        ring = window.ring(0, len(metadata.seq_lens)) if window else None
        slots = window.metadata.slots if window else None
        key = StepKey("mixed graph", decode.kind, window=window.metadata if window else None)
        step = metadata.steps.get(key, lambda: self.prepare_graph(batch, ring, slots))
        prefill.attend_in_graph(batch, step.chunk_start, self.attend_pages_in_graph(batch, step, ring))
        if step.store_rest is not None:
            store.write_in_graph(step.store_rest, batch, ring)

    def attend_pages_in_graph(self, batch: Batch, step: GraphStep, ring: Ring | None) -> OverPrefixes:
        """Write a step's tokens, attend to its decodes, and return attention of its chunks over their prefixes."""
        decode = self.kernels.decode
        assert decode is not None
        self.kernels.store.write_in_graph(step.store, batch, ring)
        decode.attend(step.decode, batch.cache, (batch.query,), ring, batch.output)
        return decode.attend_prefixes(step.decode, batch.cache, ring)

    def prepare_graph(self, batch: Batch, ring: Ring | None, slots: torch.Tensor | None) -> GraphStep:
        """Return the launches of a step that a CUDA graph holds, and launch the kernel that fills their tables. `ring`
        and `slots`, int32 [tokens or more]: of the window, if there is one."""
        from ..kernels.triton.mixed_plan import MixedTables, plan_mixed

        metadata, decode, store = batch.metadata, self.kernels.decode, self.kernels.store.kernel
        assert decode is not None and decode.pass_limits is not None
        requests, tokens, longest = len(metadata.seq_lens), metadata.num_actual_tokens, metadata.decode_query_len
        pass_tokens = decode.pass_limits.tokens
        count = most_passes(tokens, requests, longest, pass_tokens)
        tables = MixedTables.empty(requests, tokens, count, has_ring=slots is not None, device=batch.query.device)
        slots = None if slots is None else slots[:tokens]
        plan_mixed(tables, metadata.query_start_loc, metadata.seq_lens, slots, longest, pass_tokens)
        positions, pages = metadata.positions[:tokens], metadata.slot_mapping[:tokens]
        lists = metadata.block_table[:requests], tables.decode_start, tables.decode_lens
        passes = PrefixPasses.of_graph(tables.passes, tables.row_kinds, pass_tokens)
        prepared = decode.prepare_with_prefixes(
            DecodeBatch(*lists, tokens, longest, positions, ring),
            PrefixBatch(passes, metadata.block_table, tables.chunk_start, batch.query.dtype, ring),
        )
        new, rest = NewTokens(pages, positions, None if slots is None else tables.decode_slots, prepared), None
        if slots is not None:
            rest = store.prepare(NewTokens(pages, positions, tables.chunk_slots, only_ring=True))
        return GraphStep(prepared, tables.chunk_start, store.prepare(new), rest)
