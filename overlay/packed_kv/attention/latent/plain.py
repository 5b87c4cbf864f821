"""Latent attention in PyTorch: on the CPU, where a GPU has no kernel for the dtype, and the reference of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...layout import MICRO_BLOCK
from ...window.slots import page_lens


@dataclass(frozen=True)
class RecentContext:
    """The rings of a chunk's requests, and tokens of each before the batch's own, int32 [requests]."""

    ring: Ring
    context_lens: torch.Tensor


class Span(NamedTuple):
    """Tokens of requests to gather: `starts`, int32 [requests], the first of each, a multiple of 16; `cu_seq_lens`,
    int32 [requests + 1], rows where they go; `max_seq_len` of a request; `seq_lens`, on the host. vLLM's chunks of a
    prefix have these, too."""

    starts: torch.Tensor
    cu_seq_lens: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor


class ReferenceLatentPrefix:
    """Reads the prefixes of prompts. `codec`: of the layer."""

    def __init__(self, codec: LatentCodec) -> None:
        self.codec = codec

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, chunk: Any, rows: torch.Tensor,
        recent: RecentContext | None = None,
    ) -> None:  # fmt: skip
        """Fill rows [tokens, rank + rope_dim] with stored latents and RoPE channels of requests of a prompt's chunk,
        whose rows of the block table are `block_table`; those in the ring from there."""
        row = 0
        for blocks, start, count in zip(block_table, chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True):
            rows[row : row + count] = torch.cat(read_tokens(self.codec, cache, blocks, start, start + count), dim=-1)
            row += count
        if recent is not None:
            self._read_ring(chunk, rows, recent, 1.0)

    def gather_values(self, chunk: Any, rows: torch.Tensor, recent: RecentContext) -> None:
        """Divide latents in `rows` that `gather` read in the ring by V's gain, which the folded `W_UV` has."""
        self._read_ring(chunk, rows, recent, self.codec.value_gain())

    def _read_ring(self, chunk: Any, rows: torch.Tensor, recent: RecentContext, gain: torch.Tensor | float) -> None:
        ring, row = recent.ring, 0
        for request, (start, count) in enumerate(zip(chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True)):
            low = max(int(ring.first[request]), int(recent.context_lens[request]) - ring.window + 1, start)
            if low < start + count:
                latent, rope = read_recent(self.codec, ring, request, low, start + count)
                rows[row + low - start : row + count] = torch.cat((latent / gain, rope), dim=-1)
            row += count


class ReferenceLatents:
    """Attends to the decodes of one layer. See `attention/protocols.DecodeKernel`.

    Args:
        codec: of the layer.
        scale: of scores.
        constant: fp32 [rank], added to results, or None.
        is_shard: whether the pages hold a rank's part of the tokens.
    """

    kind, longest = "reference", 1 << 30

    def __init__(
        self, codec: LatentCodec, scale: float, constant: torch.Tensor | None, *, is_shard: bool = False
    ) -> None:
        self.codec, self.scale, self.constant, self.is_shard = codec, scale, constant, is_shard

    def reserve(self) -> None:
        """Do nothing: no memory is kept."""

    def prepare(self, batch: Any) -> Any:
        """Return the batch as it is."""
        return batch

    def attend(
        self, step: Any, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """See `DecodeKernel`; lse is -inf where the part has no token."""
        q_latent, q_rope = queries
        tables = (cache, step.block_table, step.query_start, step.seq_lens)
        batch = (self.codec, *tables, q_latent, q_rope, self.scale)
        if not self.is_shard:
            return attend(*batch, self.constant, ring).to(q_latent.dtype), None
        lse = q_latent.new_full(q_latent.shape[:2], float("-inf"), dtype=torch.float32)
        return attend(*batch, None, ring, lse), lse

    def batches_to_compile(self) -> list[tuple[int, int]]:
        """Return none: there is nothing to compile."""
        return []


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
        q_latent, q_rope: float [tokens, heads, rank], which meets stored latents, and [tokens, heads, rope_dim].
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
