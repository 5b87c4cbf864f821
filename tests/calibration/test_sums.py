"""Sums give the means and variances of what was added, whoever added it and in however many parts."""

from __future__ import annotations

import torch
from torch.testing import assert_close
from tq_calibrate.sums import Sums

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 4000, 4, 2, 64


def random(heads: int, seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, heads, HEAD_SIZE, generator=torch.Generator().manual_seed(seed))


def test_the_variance_beside_a_large_mean() -> None:
    """A mean of 10^4 standard deviations, in two parts whose sequences begin anywhere."""
    query, value = random(HEADS, 1), random(KV_HEADS, 2)
    key = random(KV_HEADS, 3) * 0.01 + 100
    positions = torch.arange(TOKENS) % 50
    key[positions == 0] -= 200
    columns = torch.rand(HEADS * HEAD_SIZE)
    sums, asked = Sums(), []
    for part in (slice(0, 130), slice(130, None)):
        sums.add(7, query[part], key[part], value[part], positions[part], lambda: asked.append(1) or columns)
    assert len(asked) == 1
    statistics = sums.statistics()
    assert [*statistics.layers] == [7] and statistics.tokens == TOKENS
    assert (statistics.kv_heads, statistics.head_sizes) == ([KV_HEADS], (HEAD_SIZE, HEAD_SIZE))
    seen, later = statistics.layers[7], positions > 0
    kept = key[later].double()
    assert_close(seen.key_mean, kept.mean(0), rtol=1e-12, atol=0)
    assert_close(seen.key_variance, kept.var(0, correction=0), rtol=1e-6, atol=0)
    assert_close(seen.key_first_mean, key[~later].double().mean(0), rtol=1e-12, atol=0)
    queries = query[later].view(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE).double()
    assert_close(seen.key_weight, queries.square().mean((0, 2)), rtol=1e-6, atol=0)
    assert_close(seen.value_energy, value.double().square().mean(0), rtol=1e-6, atol=0)
    assert_close(seen.value_weight, columns.double().view(KV_HEADS, -1, HEAD_SIZE).sum(1))


def test_a_prompt_that_does_not_begin_at_position_0_leaves_the_first_mean_unknown() -> None:
    sums = Sums()
    sums.add(0, random(4, 1), random(2, 2), random(2, 3), torch.arange(TOKENS) + 1, lambda: torch.ones(4 * HEAD_SIZE))
    assert sums.statistics().layers[0].key_first_mean is None
