"""Latent attention in PyTorch."""

from __future__ import annotations

import torch

from ..codecs.latent import LatentCodec
from ..codecs.ring import Ring
from ..layout import MICRO_BLOCK


def page_lens(query_start: torch.Tensor, seq_lens: torch.Tensor, first: torch.Tensor, window: int) -> torch.Tensor:
    """Tokens of decodes that their last query reads in latents' pages; each query before it reads one less. Later
    tokens, its own included, are read in the ring: up to `window`.

    The reference of `kernels.triton.latent_ring.split_lens`. Where a ring lacks part of the window, the first query
    token reads in pages all tokens before the ring's first one, and each further query token one more.

    Args:
        query_start: int32 [requests + 1].
        seq_lens: int32 [requests].
        first: int32 [requests], of `fill_slots`.

    Returns:
        int32 [requests].
    """
    known = torch.where(first > 0, first + query_start.diff() - 1, 0)
    return torch.minimum(torch.maximum(known, seq_lens - window), seq_lens).clamp(min=0)


def read_tokens(
    codec: LatentCodec, cache: torch.Tensor, blocks: torch.Tensor, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a request, from `start`, a multiple of 16, on: stored latents fp32 [end - start, rank] and RoPE
    channels fp32 [end - start, rope_dim].

    cache: uint8 [blocks, block_size, slot_bytes]. blocks: int [blocks], the request's row of the block table.
    """
    assert start % MICRO_BLOCK == 0, start
    a_block = cache.shape[1] // MICRO_BLOCK
    numbers = torch.arange(start // MICRO_BLOCK, -(-end // MICRO_BLOCK), device=cache.device)
    latent, rope = codec.read(cache, blocks.long()[numbers // a_block] * a_block + numbers % a_block)
    return latent[: end - start], rope[: end - start]


def read_recent(
    codec: LatentCodec, ring: Ring, request: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `start` .. `end` - 1 of a request from its ring: latents fp32 [end - start, rank] and RoPE channels fp32
    [end - start, rope_dim]."""
    block_size, positions = ring.cache.shape[2], torch.arange(start, end, device=ring.cache.device)
    blocks = ring.block_table[request, positions // block_size].long()
    return codec.read_ring(ring.cache, blocks * block_size + positions % block_size)


def attend(
    codec: LatentCodec,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    scale: float,
    constant: torch.Tensor | None,
    ring: Ring | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of requests' last tokens over all of their cached ones, themselves included.

    Args:
        codec: of the layer.
        cache: uint8 [blocks, block_size, slot_bytes].
        block_table: int [requests, blocks].
        query_start: int32 [requests + 1]; request i has query tokens query_start[i] to query_start[i + 1].
        seq_lens: int32 [requests], tokens in the cache, of each request.
        q_latent, q_rope: float [tokens, heads, rank], to be multiplied with stored latents, and [tokens, heads,
            rope_dim].
        scale: of scores.
        constant: fp32 [rank], added to each result, or None.
        ring: of the requests' recent tokens, read there and not in the pages (`page_lens`); None: there is none.
        lse: fp32 [tokens, heads], filled with the natural log-sum-exps of the scores; None: not wanted.

    Returns:
        fp32 [tokens, heads, rank]; rows of no request are 0.
    """
    output = torch.zeros(q_latent.shape, dtype=torch.float32, device=cache.device)
    query = torch.cat((q_latent.float(), q_rope.float()), dim=-1)
    in_pages = seq_lens if ring is None else page_lens(query_start, seq_lens, ring.first, ring.window)
    starts, gain = query_start.tolist(), codec.value_gain()
    for request, (end, page_len) in enumerate(zip(seq_lens.tolist(), in_pages.tolist(), strict=True)):
        rows = slice(starts[request], starts[request + 1])
        count = rows.stop - rows.start
        if not count:
            continue
        latent, rope = read_tokens(codec, cache, block_table[request], 0, page_len)
        position = torch.arange(end, device=cache.device)
        own = torch.arange(end - count, end, device=cache.device)[:, None]
        hidden = position[:page_len] > own - (end - page_len)
        if ring is not None:
            low = min(max(page_len - count + 1, int(ring.first[request])), end)
            near, near_rope = read_recent(codec, ring, request, low, end)
            latent, rope = torch.cat((latent, near)), torch.cat((rope, near_rope))
            position = position[low:]
            hidden = torch.cat((hidden, (position > own) | (position <= own - (end - page_len))), dim=1)
        scores = torch.einsum("qhd,td->hqt", query[rows], torch.cat((latent, rope), dim=-1)) * scale
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        if lse is not None:
            lse[rows] = scores.logsumexp(-1).T
        if ring is not None:
            latent[page_len:] /= gain
        output[rows] = torch.einsum("hqt,tl->qhl", weights, latent)
        if constant is not None:
            output[rows] += constant
    return output
