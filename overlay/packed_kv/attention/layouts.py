"""Records of a layer's shape and attention options, which decide its kernels together with the engine's limits. Imports
no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..kernels.served import Pairs
from ..reference.context_shard import UNSHARDED, ContextShard
from .limits import Limits

if TYPE_CHECKING:
    from ..codecs.latent import LatentCodec
    from ..codecs.latent_rows import LatentRowCodec
    from ..codecs.pages import PagedCodec
    from ..formats import Format
    from ..reference.attention import AttentionOptions


def pairs_of(fmt: Format, head_dim: int, group: int, value_dim: int, options: AttentionOptions) -> Pairs:
    """Return the layer that a kernel has to serve, with these options; see `Pairs`."""
    has_sinks = options.sinks is not None
    return Pairs(fmt, head_dim, group, value_dim, options.sliding_window, options.logits_soft_cap, has_sinks)


@dataclass(frozen=True)
class PairLayout:
    """Shape of a layer of pairs, and options of its attention.

    `codec`: on the layer's device. `query_heads`, `kv_heads`: of this rank; where several ranks split the tokens, of
    all of them. `shard`: which tokens are in this rank's pages. With several ranks, a step has lse to fill.
    """

    codec: PagedCodec
    query_heads: int
    kv_heads: int
    options: AttentionOptions
    limits: Limits
    shard: ContextShard = UNSHARDED

    def asked(self) -> Pairs:
        """Return the layer that a kernel has to serve."""
        key, value = self.codec.key, self.codec.value
        return pairs_of(key.fmt, key.head_dim, self.query_heads // self.kv_heads, value.head_dim, self.options)


@dataclass(frozen=True)
class LatentLayout:
    """Shape of a layer of latents, and options of its attention.

    `codec`: on the layer's device. `heads`: query heads of this rank, or of all that split its tokens. `scale`: of
    scores. `dtype`: of queries and outputs. `constant`: fp32 [rank], added to outputs, or None. `window`: tokens that a
    query reads in its request's ring, 0: there is none. `is_shard`: whether the pages hold a rank's part of the tokens.
    """

    codec: LatentCodec
    heads: int
    scale: float
    dtype: torch.dtype
    limits: Limits
    constant: torch.Tensor | None
    window: int = 0
    is_shard: bool = False


class SparseKind(NamedTuple):
    """Key of the layers that share a step."""

    heads: int
    scale: float
    picks: int
    has_sinks: bool


@dataclass(frozen=True)
class SparseLayout:
    """Shape of a layer of latents whose tokens are picked, and options of its attention.

    `codec`: of the layer; a codec on a CUDA device has 512 + 64 channels. `heads`: query heads of this rank. `scale`:
    of scores. `constant`: fp32 [rank], added to outputs, or None. `picks`: of a query token, `index_topk`. `sinks`:
    float [heads], contiguous, the score of one more key of each head, which has no value; or None.
    """

    codec: LatentRowCodec
    heads: int
    scale: float
    constant: torch.Tensor | None
    picks: int
    sinks: torch.Tensor | None = None

    @property
    def kind(self) -> SparseKind:
        return SparseKind(self.heads, self.scale, self.picks, self.sinks is not None)
