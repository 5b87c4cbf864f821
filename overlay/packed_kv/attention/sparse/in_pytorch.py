"""Sparse attention over latent rows in PyTorch, in fp32: on a CPU, and the reference of tests."""

from __future__ import annotations

import torch

from ...codecs.ring import Ring
from ...reference.sparse_latents import attend_picks, gather_tokens, merge, share_with_sinks, split_picks
from ..latent.in_pytorch import ReferenceLatentPrefix
from ..protocols import DecodeBatch, DecodeKernel, PrefillKernel
from ..store import LatentStore, reference_latent_store
from .layer import Results, Sinks, SparseBatch, SparseKernels, SparseLayout

SLICE_PICKS = 1 << 16
"""Most rows that decodes gather together."""


class ReferenceDecodes(DecodeKernel[DecodeBatch, None]):
    """Attends to decodes of one layer, from gathered rows."""

    language, longest, bound = "PyTorch", 1 << 30, None

    def __init__(self, layer: SparseLayout) -> None:
        self.layer, self.kind = layer, layer.kind

    def attend(
        self, step: DecodeBatch, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert output is not None and step.requests is not None
        layer, (q_latent, q_rope, picks) = self.layer, queries
        at_once = max(1, SLICE_PICKS // picks.shape[1])
        for first in range(0, len(picks), at_once):
            part = slice(first, first + at_once)
            picked = picks[part]
            requests = step.requests[part].long().repeat_interleave(picked.shape[1])
            rows = gather_tokens(layer.codec, cache, step.block_table, requests, picked.flatten())
            numbers = torch.arange(picked.numel(), device=picked.device).view_as(picked)
            own = torch.where(picked >= 0, numbers, -1)
            found, lse = attend_picks(rows, own, q_latent[part], q_rope[part], layer.scale)
            output[part] = found if layer.constant is None else found + layer.constant
            if step.lse is not None:
                step.lse[part] = lse


class ReferencePrompts(PrefillKernel[SparseBatch]):
    """Attends to prompts of one layer."""

    bound = None

    def __init__(self, layer: SparseLayout) -> None:
        self.layer = layer

    def attend(self, batch: SparseBatch, first: int, ring: Ring | None = None) -> None:
        layer, metadata = self.layer, batch.metadata
        codec, new = layer.codec, slice(metadata.num_decode_tokens, len(batch.picks))
        own_rows = torch.cat((codec.latent.prepare(batch.new[0][new]), batch.new[1][new].float()), dim=-1)
        for prompt in metadata.prompts:
            part, stored = slice(prompt.first, prompt.last), None
            offsets = prompt.first_own, prompt.stored_offset, prompt.own_offset
            stored_picks, own_picks = split_picks(batch.picks[part], *offsets)
            queries = batch.queries[0][part], batch.queries[1][part]
            if prompt.stored_rows:
                where = batch.cache, metadata.block_table, prompt.requests, prompt.positions
                stored = attend_picks(gather_tokens(codec, *where), stored_picks, *queries, layer.scale)
            own = attend_picks(own_rows, own_picks, *queries, layer.scale)
            batch.output[part] = merge(stored, own, codec.value_gain(), layer.constant)
            if batch.lse is not None:
                batch.lse[part] = own[1] if stored is None else torch.logaddexp(stored[1], own[1])


class ReferenceSinks(Sinks):
    """Shares weights with the sinks of one layer."""

    bound = None

    def __init__(self, layer: SparseLayout) -> None:
        self.layer, self.mean = layer, layer.codec.stored_mean()

    def share(self, output: torch.Tensor, lse: torch.Tensor, query: torch.Tensor) -> None:
        assert self.layer.sinks is not None
        lacking = None if self.mean is None else query.float() @ self.mean * self.layer.scale
        output.copy_(share_with_sinks(output, lse, self.layer.sinks.detach(), lacking))


def reference_kernels(layer: SparseLayout) -> SparseKernels:
    """Return the kernels of a layer in PyTorch."""
    store = LatentStore(reference_latent_store(layer.codec), layer.kind)
    sinks = None if layer.sinks is None else ReferenceSinks(layer)
    prefix = ReferenceLatentPrefix(layer.codec)

    def take(query: torch.Tensor) -> Results:
        return Results(torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32))

    return SparseKernels(store, ReferenceDecodes(layer), ReferencePrompts(layer), prefix, take, sinks)
