"""Tokens of a request that a rank keeps, where decode context parallelism deals them out."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

Index = TypeVar("Index", int, torch.Tensor)


class ContextShard(NamedTuple):
    """One rank's tokens: `run` in a row of every `ranks` * `run` of a request, from `rank` * `run` on (`run` is vLLM's
    `cp_kv_cache_interleave_size`). They lie in the rank's pages one behind the other."""

    ranks: int = 1
    rank: int = 0
    run: int = 1

    @property
    def has_first(self) -> bool:
        """True if the shard has the first token of each request."""
        return self.rank == 0

    def count(self, tokens: Index) -> Index:
        """Return the number of a request's first `tokens` that are in the shard, as vLLM's `get_dcp_local_seq_lens`."""
        rounds = tokens // (self.ranks * self.run)
        rest = tokens - rounds * (self.ranks * self.run) - self.rank * self.run
        rest = rest.clamp(0, self.run) if isinstance(rest, torch.Tensor) else max(0, min(rest, self.run))
        return rounds * self.run + rest

    def position(self, index: Index) -> Index:
        """The position in the request of the shard's token `index`."""
        return index // self.run * (self.run * self.ranks) + self.rank * self.run + index % self.run


UNSHARDED = ContextShard()
"""All tokens, on the only rank."""
