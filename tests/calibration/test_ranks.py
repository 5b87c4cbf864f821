"""Sums of tensor-parallel ranks join to those of a process that has all heads."""

from __future__ import annotations

import pytest
import torch
from packed_kv.calibration_file import heads_of_rank
from packed_kv.model.rope import Rope
from torch.testing import assert_close
from tq_calibrate.attended import NEAR, Scores
from tq_calibrate.errors import UserError
from tq_calibrate.ranks import join_ranks
from tq_calibrate.ropes import ModelRope, before_rope
from tq_calibrate.sums import Sums

HEADS, SIZE, TOKENS = 8, 64, 2 * NEAR
ROPES = [ModelRope(Rope((1.0, 0.1, 0.01), interleaved), {}) for interleaved in (False, True)]


def sums(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, columns: torch.Tensor) -> Sums:
    """Return the sums of two layers; queries and keys of the second are twice as large."""
    seen = Sums(ROPES)
    positions = torch.arange(TOKENS)
    for layer in (0, 1):
        seen.add(layer, query * (layer + 1), key * (layer + 1), value, positions, Scores(0.1), columns.flatten)
    return seen


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 1), (4, 2), (4, 4), (2, 4), (1, 4)])
def test_ranks_join_to_the_whole_model(kv_heads: int, ranks: int) -> None:
    """With more ranks than KV heads, too: then ranks in a row have the same head and some of its queries each."""
    query, columns = torch.randn(TOKENS, HEADS, SIZE), torch.rand(HEADS, SIZE)
    key, value = torch.randn(2, TOKENS, kv_heads, SIZE)
    constant = torch.randn(kv_heads, SIZE, dtype=torch.float64).expand(TOKENS, -1, -1)
    key += before_rope(constant, -torch.arange(TOKENS), ROPES[1].rope).float()
    whole = sums(query, key, value, columns)
    parts = []
    for rank in range(ranks):
        own = heads_of_rank(list(range(kv_heads)), max(1, kv_heads // ranks), ranks, rank)
        queries = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        parts.append((rank, sums(query[:, queries], key[:, own], value[:, own], columns[queries])))
    joined = join_ranks(reversed(parts), kv_heads).statistics()
    assert joined.tokens == TOKENS
    for layer, expected in whole.statistics().layers.items():
        figures, rope = vars(expected), expected.rope
        assert joined.layers[layer].rope == rope == ROPES[1]
        for name in figures.keys() - {"rope"}:
            assert_close(getattr(joined.layers[layer], name), figures[name])


def test_processes_of_a_pipeline_and_layers_that_are_not_split() -> None:
    query, columns = torch.randn(TOKENS, HEADS, SIZE), torch.rand(HEADS, SIZE)
    key, value = torch.randn(2, TOKENS, 4, SIZE)
    first, last = sums(query, key, value, columns), sums(query, key, value, columns)
    del first.layers[1], last.layers[0]
    joined = join_ranks([(0, first), (1, first), (0, last), (1, last)], 4)
    assert joined.layers == {0: first.layers[0], 1: last.layers[1]}


def test_ranks_whose_keys_do_not_tell_who_shares_them_are_refused() -> None:
    """Ranks of one head rounded it otherwise; and two heads that are all zeros."""
    query, columns = torch.randn(TOKENS, 2, SIZE), torch.rand(2, SIZE)
    key, value = torch.randn(2, TOKENS, 1, SIZE)
    near = [(rank, sums(query[:, rank : rank + 1], key * (1 + rank / 1e3), value, columns[rank])) for rank in (0, 1)]
    with pytest.raises(UserError, match="come to 2 KV heads per layer, but the model has 1; calibrate with"):
        join_ranks(near, 1)
    zeros = [(rank, sums(query[:, rank : rank + 1], 0 * key, value, columns[rank])) for rank in (0, 1)]
    with pytest.raises(UserError, match="come to 1 KV heads per layer, but the model has 2"):
        join_ranks(zeros, 2)
