"""Latent attention in PyTorch: on the CPU, where a GPU has no kernel for the dtype, and the reference of kernels."""

from __future__ import annotations

import torch

from ...codecs.latent import LatentCodec
from ...layout import MICRO_BLOCK


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


def attend(
    codec: LatentCodec,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: list[int],
    seq_lens: list[int],
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    scale: float,
    constant: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of requests' last tokens over all of their cached ones, themselves included.

    Args:
        codec: of the layer.
        cache: uint8 [blocks, block_size, slot_bytes].
        block_table: int [requests, blocks].
        query_starts: requests + 1 rows; request i has query tokens query_starts[i] to query_starts[i + 1].
        seq_lens: tokens in the cache, of each request.
        q_latent, q_rope: float [tokens, heads, rank], which meets stored latents, and [tokens, heads, rope_dim].
        scale: of scores.
        constant: fp32 [rank], added to each result, or None.

    Returns:
        fp32 [tokens, heads, rank]; rows of no request are 0.
    """
    output = torch.zeros(q_latent.shape, dtype=torch.float32, device=cache.device)
    query = torch.cat((q_latent.float(), q_rope.float()), dim=-1)
    for request, end in enumerate(seq_lens):
        rows = slice(query_starts[request], query_starts[request + 1])
        count = rows.stop - rows.start
        if not count:
            continue
        latent, rope = read_tokens(codec, cache, block_table[request], 0, end)
        scores = torch.einsum("qhd,td->hqt", query[rows], torch.cat((latent, rope), dim=-1)) * scale
        position = torch.arange(end, device=cache.device)
        hidden = position[None] > position[end - count :, None]
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        output[rows] = torch.einsum("hqt,tl->qhl", weights, latent)
        if constant is not None:
            output[rows] += constant
    return output
