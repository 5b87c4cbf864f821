"""Attention weights between distant tokens: how much an error of each key costs, and by which queries.

An error e of key j moves a score of query i by q_i . e, and the attention's output o_i by about p_ij (q_i . e) (v_j -
o_i), where p_ij is the attention weight of the pair. The weight of a key is the sum of p_ij^2 over queries; v_j - o_i
makes no measurable difference (docs/lab/tried.md). In most layers a few keys (of delimiters, say) have most of the
weight, and they differ from the mean of all keys: so K's means and variances are weighed by it. The same sum over keys
is the weight of a query, by which its squares count where the channels' scales are chosen.

Keys nearer than `NEAR` are left out: the recent window holds them raw, and they would outweigh all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

NEAR = 64
"""A query gives weight to keys at least this many tokens before it."""
STRIDE = 8
"""Every eighth query is sampled."""
TILE = 1024
"""Queries per product with the keys, over all query heads of a KV head."""


@dataclass(frozen=True)
class Scores:
    """A layer's parameters from products of queries and keys to attention.

    Its softmax is over `scale` * q . k, within ±`soft_cap` by tanh if there is one, of the last `window` keys (None: of
    all), with `sinks` [heads] beside them.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


class FarAttention(NamedTuple):
    """Sums of squared attention weights over pairs of a key and a sampled query at least `NEAR` tokens later.

    `of_keys`: fp32 [tokens, KV heads], sum of each key. `of_queries`: fp32 [tokens, heads], sum of each query. Both
    leave out keys of position 0, and are 0 in sequences of up to `NEAR` tokens.
    """

    of_keys: torch.Tensor
    of_queries: torch.Tensor


def attention_from_afar(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scores: Scores
) -> FarAttention:
    """Return the weights of a layer's keys and queries.

    Args:
        query: float [tokens, heads, head_dim] of whole sequences, one behind the other.
        key: float [tokens, KV heads, head_dim].
        positions: int [tokens], of each token in its own sequence; a sequence begins at each 0.
        scores: the layer's parameters.
    """
    of_keys, of_queries = (torch.zeros(x.shape[:2], dtype=torch.float32, device=x.device) for x in (key, query))
    heads = query.shape[1] // key.shape[1]
    for tokens in _sequences(positions):
        for head in range(key.shape[1]):  # one at a time, or scores of long sequences would fill the memory
            own = slice(head * heads, (head + 1) * heads)
            sinks = None if scores.sinks is None else scores.sinks[own]
            found = _of_a_sequence(query[tokens, own], key[tokens, head], positions[tokens] == 0, scores, sinks)
            of_keys[tokens, head], of_queries[tokens, own] = found
    return FarAttention(of_keys, of_queries)


def _sequences(positions: torch.Tensor) -> Iterator[slice]:
    starts = [0, *((positions[1:] == 0).nonzero()[:, 0] + 1).tolist(), len(positions)]
    return (slice(start, end) for start, end in pairwise(starts) if end - start > NEAR)


def _of_a_sequence(
    query: torch.Tensor, key: torch.Tensor, is_first: torch.Tensor, scores: Scores, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 [tokens] of one head's keys [tokens, head_dim], and [tokens, heads] of `query` [tokens, heads,
    head_dim]. is_first: bool [tokens], keys without weight."""
    asked, at = torch.arange(NEAR, len(key), STRIDE, device=key.device), torch.arange(len(key), device=key.device)
    of_keys, of_queries = (torch.zeros(shape, device=key.device) for shape in (key.shape[:1], query.shape[:2]))
    keys = key.float().T
    for rows in asked.split(max(1, TILE // query.shape[1])):
        products = query[rows].float().transpose(0, 1) @ keys * scores.scale  # [heads, queries, keys]
        if scores.soft_cap:
            products = scores.soft_cap * (products / scores.soft_cap).tanh()
        behind = rows.unsqueeze(1) - at
        products.masked_fill_((behind < 0) | (behind >= (scores.window or len(key))), -torch.inf)
        if sinks is not None:
            products = torch.cat((products, sinks.float().view(-1, 1, 1).expand(-1, len(rows), 1)), -1)
        squares = products.softmax(-1)[..., : len(key)].masked_fill((behind < NEAR) | is_first, 0).square()
        of_keys += squares.sum((0, 1))
        of_queries[rows] = squares.sum(-1).T
    return of_keys, of_queries
