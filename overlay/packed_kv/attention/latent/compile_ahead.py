"""Have the kernels of a layer of latents compiled before the steps that launch them; see `kernels/ahead.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...codecs.ring import Ring
from ...kernels.ahead import Ahead
from .fused import FusedLatents
from .metadata import LatentDecodeMetadata
from .plain import RecentContext, Span

if TYPE_CHECKING:
    from ...window.layer import WindowLayer


def compile_ahead(pages: FusedLatents, block_size: int, query_dim: int, window_layer: WindowLayer | None) -> None:
    """Note every launch of a layer's steps, for pages, rings and queries of our own; threads then compile them.

    Args:
        pages: of the layer.
        block_size: tokens of a block of pages.
        query_dim: channels from one head of a step's queries to the next, without RoPE and with it.
        window_layer: of the layer, or None.
    """
    layer, codec = pages.decode.layer, pages.codec
    device, channels, most = codec.device, codec.rank + codec.rope_dim, layer.max_requests

    def vectors(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=layer.dtype, device=device)

    counts = torch.zeros(most + 1, dtype=torch.int32, device=device)
    table, one = counts[:most, None], counts[:1]
    cache = torch.zeros(1, block_size, codec.slot_bytes, dtype=torch.uint8, device=device)
    q_latent, q_rope = vectors(1, layer.heads, codec.rank), vectors(1, layer.heads, query_dim)[..., -codec.rope_dim :]
    if layer.is_shard:  # vLLM gathers them side by side
        q_latent, q_rope = vectors(1, layer.heads, channels).split([codec.rank, codec.rope_dim], dim=-1)
    rows = vectors(1, channels)
    new = vectors(1, codec.rank), rows[:, codec.rank :]
    chunk, ring, recent = Span(one, counts[:2], 1, one), None, None
    if window_layer is not None and window_layer.ring_block_size:
        shape = (1, 1, window_layer.ring_block_size, codec.ring_slot_bytes)
        ring = Ring(torch.zeros(shape, dtype=torch.uint8, device=device), table, counts[:most], window_layer.window)
    with Ahead():
        if (ring is None) == (pages.decode.recent is None):  # first, as their kernels take longest
            for requests, query_len in pages.decode.batches_to_compile():
                starts = counts[: requests + 1]
                metadata = LatentDecodeMetadata(
                    block_table=table[:requests], seq_lens=counts[:requests], dcp_tot_seq_lens=None,
                    query_start=starts, query_starts=starts, max_query_len=query_len,
                )  # fmt: skip
                pages.attend(cache, metadata, q_latent, q_rope, ring)
        if window_layer is not None and ring is not None:
            window_layer.fill_slots_of_one_request(ring)
            pages.store(cache, one.long(), *new, ring.cache, one)
            pages.store_in_ring(cache, *new, ring.cache, one)
            recent = RecentContext(ring, one)
            pages.gather_values(chunk, rows, recent)
        else:
            pages.store(cache, one.long(), *new)
        pages.gather(cache, table[:1], chunk, rows, recent)
    pages.forget_launches()
