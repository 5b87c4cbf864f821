"""Latent attention in PyTorch: on a CPU, and where a GPU has no kernel for the dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...kernels.served import ANY, PYTORCH
from ...reference.latent_attention import attend, read_recent, read_tokens
from ..protocols import DecodeBatch, DecodeKernel

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""Output [tokens, heads, rank] of decodes; where ranks split the tokens, also the natural lse, fp32 [tokens, heads]."""


@dataclass(frozen=True)
class RecentContext:
    """The rings of a chunk's requests, and for each request the tokens before the batch's own, int32 [requests]."""

    ring: Ring
    context_lens: torch.Tensor


class PrefixChunk(NamedTuple):
    """Tokens of requests to gather. `starts`: int32 [requests], first token of each, a multiple of 16. `cu_seq_lens`:
    int32 [requests + 1], target rows. `max_seq_len`: the most of a request. `seq_lens`: on the host. vLLM's chunks of a
    prefix have the same fields."""

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
        """Fill rows [tokens, rank + rope_dim] with stored latents and RoPE channels of a chunk's requests; tokens in
        the ring are read from there. `block_table`: the requests' rows of the block table."""
        row = 0
        for blocks, start, count in zip(block_table, chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True):
            self.read_pages(cache, blocks, start, rows[row : row + count])
            row += count
        if recent is not None:
            self.read_ring(chunk, rows, recent, 1.0)

    def read_pages(self, cache: torch.Tensor, blocks: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Fill rows [tokens, rank + rope_dim] with a request's tokens from `start` on. `blocks`: of its pages."""
        rows.copy_(torch.cat(read_tokens(self.codec, cache, blocks, start, start + len(rows)), dim=-1))

    def gather_values(self, chunk: Any, rows: torch.Tensor, recent: RecentContext) -> None:
        """Divide the latents in `rows` [tokens, rank + rope_dim] that `gather` read from the ring by V's gain, which is
        folded into `W_UV`."""
        self.read_ring(chunk, rows, recent, self.codec.value_gain())

    def read_ring(self, chunk: Any, rows: torch.Tensor, recent: RecentContext, gain: torch.Tensor | float) -> None:
        """Copy these tokens' vectors from the rings to `rows` [tokens, rank + rope_dim], latents divided by `gain`."""
        ring, row = recent.ring, 0
        for request, (start, count) in enumerate(zip(chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True)):
            low = max(int(ring.first[request]), int(recent.context_lens[request]) - ring.window + 1, start)
            if low < start + count:
                latent, rope = read_recent(self.codec, ring, request, low, start + count)
                rows[row + low - start : row + count] = torch.cat((latent / gain, rope), dim=-1)
            row += count


class ReferenceLatents(DecodeKernel[DecodeBatch, Attended]):
    """Attends to the decodes of one layer.

    Args:
        codec: of the layer.
        scale: of scores.
        constant: fp32 [rank], added to results, or None.
        is_shard: whether the pages hold a rank's part of the tokens.
    """

    language, kind, longest, bound = PYTORCH, "reference", ANY, None

    def __init__(
        self, codec: LatentCodec, scale: float, constant: torch.Tensor | None, *, is_shard: bool = False
    ) -> None:
        self.codec, self.scale, self.constant, self.is_shard = codec, scale, constant, is_shard

    def attend(
        self, step: DecodeBatch, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        q_latent, q_rope = queries
        tables = (cache, step.block_table, step.query_start, step.seq_lens)
        batch = (self.codec, *tables, q_latent, q_rope, self.scale)
        if not self.is_shard:
            return attend(*batch, self.constant, ring).to(q_latent.dtype), None
        lse = q_latent.new_full(q_latent.shape[:2], float("-inf"), dtype=torch.float32)
        return attend(*batch, None, ring, lse), lse
