"""Attention weights of distant keys: how much an error of each key costs, which weighs K's means and variances.

An error e of key j moves a score of query i by q_i . e, and the attention's output o_i by about p_ij (q_i . e) (v_j -
o_i), where p_ij is the attention weight of the pair. The weight of a key is the sum of p_ij^2 over queries; v_j - o_i
makes no measurable difference (docs/tried.md). In most layers a few keys (of delimiters, say) have most of the weight,
and they differ from the mean of all keys.

Keys nearer than `NEAR` are left out: the recent window holds them raw, and they would outweigh all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

NEAR = 64
"""A query gives weight to keys at least this many tokens before it."""
STRIDE = 8
"""Every eighth query is sampled."""
TILE = 1024
"""Queries per product with the keys, over all query heads of a KV head."""


@dataclass(frozen=True)
class Scores:
    """A layer's way from products of queries and keys to attention.

    Its softmax is over `scale` * q . k, within ±`soft_cap` by tanh if there is one, of the last `window` keys (None: of
    all), with `sinks` [heads] beside them.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


def attention_from_afar(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Sum of squared attention weights that each key gets from queries at least `NEAR` tokens later.

    Args:
        query: float [tokens, heads, head_dim] of whole sequences, one behind the other.
        key: float [tokens, KV heads, head_dim].
        positions: int [tokens], of each token in its own sequence; a sequence begins at each 0.
        scores: how the layer attends.

    Returns:
        fp32 [tokens, KV heads]. Keys of position 0 get 0, as do all of sequences up to `NEAR` tokens.
    """
    weights = torch.zeros(key.shape[:2], dtype=torch.float32, device=key.device)
    heads = query.shape[1] // key.shape[1]
    for tokens in _sequences(positions):
        for head in range(key.shape[1]):  # one at a time, or scores of long sequences would fill the memory
            own = slice(head * heads, (head + 1) * heads)
            sinks = None if scores.sinks is None else scores.sinks[own]
            weights[tokens, head] = _of_a_sequence(query[tokens, own], key[tokens, head], scores, sinks)
    return weights.masked_fill_((positions == 0).unsqueeze(1), 0)


def _sequences(positions: torch.Tensor) -> Iterator[slice]:
    starts = [0, *((positions[1:] == 0).nonzero()[:, 0] + 1).tolist(), len(positions)]
    return (slice(start, end) for start, end in pairwise(starts) if end - start > NEAR)


def _of_a_sequence(query: torch.Tensor, key: torch.Tensor, scores: Scores, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights fp32 [tokens] of one head's keys [tokens, head_dim], from `query` [tokens, heads, head_dim]."""
    asked, at = torch.arange(NEAR, len(key), STRIDE, device=key.device), torch.arange(len(key), device=key.device)
    weights, keys = torch.zeros(len(key), dtype=torch.float32, device=key.device), key.float().T
    for rows in asked.split(max(1, TILE // query.shape[1])):
        products = query[rows].float().transpose(0, 1) @ keys * scores.scale  # [heads, queries, keys]
        if scores.soft_cap:
            products = scores.soft_cap * (products / scores.soft_cap).tanh()
        behind = rows.unsqueeze(1) - at
        products.masked_fill_((behind < 0) | (behind >= (scores.window or len(key))), -torch.inf)
        if sinks is not None:
            products = torch.cat((products, sinks.float().view(-1, 1, 1).expand(-1, len(rows), 1)), -1)
        attention = products.softmax(-1)[..., : len(key)].masked_fill(behind < NEAR, 0)
        weights += attention.square().sum((0, 1))
    return weights
