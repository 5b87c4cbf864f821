"""Latent attention in PyTorch: on the CPU, where a GPU has no kernel for the dtype, and the reference of kernels."""

from __future__ import annotations

from typing import Any

import torch

from ...codecs.latent import LatentCodec
from ...layout import MICRO_BLOCK


class PlainLatents:
    """Pages of one layer's latents.

    Args:
        codec: of the layer.
        scale: of scores.
        constant: fp32 [rank], added to what `attend` returns, or None.
    """

    def __init__(self, codec: LatentCodec, scale: float, constant: torch.Tensor | None) -> None:
        self.codec, self.scale, self.constant = codec, scale, constant

    def store(self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Store tokens: cache uint8 [blocks, block_size, slot_bytes]; slots int [tokens], negative ones are skipped;
        latent and rope float [tokens, rank] and [tokens, rope_dim]."""
        self.codec.write(cache, slots, latent, rope)

    def gather(self, cache: torch.Tensor, block_table: torch.Tensor, chunk: Any, rows: torch.Tensor) -> None:
        """Fill rows [tokens, rank + rope_dim] with stored latents and RoPE channels of requests of a prompt's chunk,
        whose rows of the block table are `block_table`."""
        row = 0
        for blocks, start, count in zip(block_table, chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True):
            rows[row : row + count] = torch.cat(read_tokens(self.codec, cache, blocks, start, start + count), dim=-1)
            row += count

    def attend(self, cache: torch.Tensor, metadata: Any, q_latent: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """Attention of a batch's decodes, whose `LatentDecodeMetadata` it is: q_latent [tokens, heads, rank] and q_rope
        [tokens, heads, rope_dim] -> [tokens, heads, rank] of their dtype."""
        starts, lens = metadata.query_starts.tolist(), metadata.seq_lens.tolist()
        tables = (cache, metadata.block_table, starts, lens)
        return attend(self.codec, *tables, q_latent, q_rope, self.scale, self.constant).to(q_latent.dtype)

    def reserve_any_batch(self) -> None:
        """Make sure of memory for any batch: none is needed."""


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
