"""Attention of one layer of pairs, and its step from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..codecs.pages import PagedCodec
from ..reference.attention import AttentionOptions, RecentVectors, attend
from ..reference.context_shard import UNSHARDED, ContextShard
from ..window.step import WindowStep
from .metadata import Batch, PackedMetadata
from .passes import PrefixPasses, plan_passes, prefix_passes
from .protocols import DecodeBatch, DecodeKernel, PrefillKernel, PrefixBatch
from .step import StepKey
from .store import PairStore

if TYPE_CHECKING:
    from .prefill import FlashPrefill


@dataclass(eq=False)
class PairKernels:
    """Kernels of a layer's attention, and its shape and options.

    `codec`, `query_heads`, `kv_heads`, `options`: of the layer, on this rank. `store`: all writes. `decode`: the kernel
    of decodes; None: they run in PyTorch. `prefill`: that of the other requests, likewise. `shard`: which tokens are in
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
        none of them."""
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
            return decode.prepare_with_prefixes(decodes, PrefixBatch(passes, metadata.block_table, dtype, ring))

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


class PairAttention:
    """Attention of a layer whose tokens are all in this rank's pages."""

    def __init__(self, kernels: PairKernels) -> None:
        self.kernels = kernels

    def forward(self, batch: Batch) -> None:
        """Store a batch, and attend to its decodes and to the other requests."""
        kernels, metadata, window = self.kernels, batch.metadata, batch.window
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
