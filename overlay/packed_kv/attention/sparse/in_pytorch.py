"""Sparse attention over latent rows in PyTorch, in fp32: on a CPU, and the reference of tests."""

from __future__ import annotations

import torch

from ...reference.sparse_latents import attend_picks, gather_tokens, merge, share_with_sinks, split_picks
from ..layouts import SparseLayout
from .metadata import SparseBatch

SLICE_PICKS = 1 << 16
"""Most rows that decodes gather together."""


def attend_in_pytorch(layer: SparseLayout, batch: SparseBatch) -> None:
    """Fill `batch.output` and `batch.lse`: decodes read gathered rows, prompts read gathered rows and their own
    latents."""
    codec, metadata, picks = layer.codec, batch.metadata, batch.picks
    assert batch.lse is not None
    decodes, at_once = metadata.num_decode_tokens, max(1, SLICE_PICKS // picks.shape[1])

    def read(requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return gather_tokens(codec, batch.cache, metadata.block_table, requests, positions)

    for first in range(0, decodes, at_once):
        part = slice(first, min(first + at_once, decodes))
        picked = picks[part]
        rows = read(metadata.req_id_per_token[part].repeat_interleave(picked.shape[1]), picked.flatten())
        numbers = torch.arange(picked.numel(), device=picked.device).view_as(picked)
        found, batch.lse[part] = attend_picks(
            rows, torch.where(picked >= 0, numbers, -1), *batch.queries_of(part), layer.scale
        )
        batch.output[part] = found if layer.constant is None else found + layer.constant
    for prompt in metadata.prompts if len(picks) > decodes else ():
        part, stored = slice(prompt.first, prompt.last), None
        stored_picks, own_picks = split_picks(picks[part], prompt.first_own, prompt.stored_offset, prompt.own_offset)
        if prompt.stored_rows:
            rows = read(prompt.requests, prompt.positions)
            stored = attend_picks(rows, stored_picks, *batch.queries_of(part), layer.scale)
        latent, rope = batch.new_of_prompts()
        rows = torch.cat((codec.latent.prepare(latent), rope.float()), dim=-1)
        own = attend_picks(rows, own_picks, *batch.queries_of(part), layer.scale)
        batch.output[part] = merge(stored, own, codec.value_gain(), layer.constant)
        batch.lse[part] = own[1] if stored is None else torch.logaddexp(stored[1], own[1])
    if layer.sinks is not None:
        mean = codec.stored_mean()
        lacking = None if mean is None else batch.queries[0].float() @ mean * layer.scale
        batch.output.copy_(share_with_sinks(batch.output, batch.lse, layer.sinks.detach(), lacking))
