"""Sums of tensor-parallel ranks join to those of a process that has all heads."""

from __future__ import annotations

import pytest
import torch
from packed_kv.outliers import heads_of_rank
from torch.testing import assert_close
from tq_calibrate.ranks import join_ranks
from tq_calibrate.sums import Sums

HEADS, SIZE, TOKENS = 8, 64, 10


def sums(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, columns: torch.Tensor) -> Sums:
    """Of two layers; queries and keys of the second are twice as large."""
    seen = Sums()
    positions = torch.arange(TOKENS)
    for layer in (0, 1):
        seen.add(layer, query * (layer + 1), key * (layer + 1), value, positions, columns.flatten)
    return seen


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 1), (4, 2), (4, 4), (2, 4), (1, 4)])
def test_ranks_join_to_the_whole_model(kv_heads: int, ranks: int) -> None:
    """With more ranks than KV heads, too: then ranks in a row have the same head and some of its queries each."""
    query, columns = torch.randn(TOKENS, HEADS, SIZE), torch.rand(HEADS, SIZE)
    key, value = torch.randn(2, TOKENS, kv_heads, SIZE)
    whole = sums(query, key, value, columns)
    parts = []
    for rank in range(ranks):
        own = heads_of_rank(list(range(kv_heads)), max(1, kv_heads // ranks), ranks, rank)
        queries = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        parts.append((rank, sums(query[:, queries], key[:, own], value[:, own], columns[queries])))
    joined = join_ranks(reversed(parts)).statistics()
    assert joined.tokens == TOKENS
    for layer, expected in whole.statistics().layers.items():
        for name, value_of_name in vars(expected).items():
            assert_close(getattr(joined.layers[layer], name), value_of_name)


def test_processes_of_a_pipeline_and_layers_that_are_not_split() -> None:
    query, columns = torch.randn(TOKENS, HEADS, SIZE), torch.rand(HEADS, SIZE)
    key, value = torch.randn(2, TOKENS, 4, SIZE)
    first, last = sums(query, key, value, columns), sums(query, key, value, columns)
    del first.layers[1], last.layers[0]
    joined = join_ranks([(0, first), (1, first), (0, last), (1, last)])
    assert joined.layers == {0: first.layers[0], 1: last.layers[1]}
