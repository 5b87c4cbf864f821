"""Sums give the means and variances of what was added, whoever added it and in however many parts."""

from __future__ import annotations

import torch
from torch.testing import assert_close
from tq_calibrate.attended import NEAR, STRIDE, Scores
from tq_calibrate.sums import EVEN, Sums

TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 4000, 4, 2, 64
SCORES = Scores(HEAD_SIZE**-0.5)


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
        sums.add(7, query[part], key[part], value[part], positions[part], SCORES, lambda: asked.append(1) or columns)
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
    assert_close(seen.value_mean, value[later].double().mean(0), rtol=1e-10, atol=0)
    assert_close(seen.value_first_mean, value[~later].double().mean(0), rtol=1e-10, atol=0)
    assert_close(seen.value_variance, value[later].double().var(0, correction=0), rtol=1e-6, atol=0)
    assert_close(seen.value_weight, columns.double().view(KV_HEADS, -1, HEAD_SIZE).sum(1))


def test_a_prompt_that_does_not_begin_at_position_0_leaves_the_first_mean_unknown() -> None:
    sums = Sums()
    positions = torch.arange(TOKENS) + 1
    sums.add(0, random(4, 1), random(2, 2), random(2, 3), positions, SCORES, lambda: torch.ones(4 * HEAD_SIZE))
    assert sums.statistics().layers[0].key_first_mean is None


def test_queries_that_look_far_back_count_more() -> None:
    """One query of the second head looks at one key, far behind it, and the others at themselves, as do all queries of
    the first head: channels have their weight by that one query alone, and in the first head, where none is weighed,
    by all queries."""
    tokens, looked_at, at = 4 * NEAR, 9, 3 * NEAR
    assert at % STRIDE == 0
    query, key, value = (random(heads, seed)[:tokens] for heads, seed in ((HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)))
    key = torch.nn.functional.normalize(key, dim=-1)
    query = 1e4 * key.repeat_interleave(HEADS // KV_HEADS, 1)
    query[at, HEADS // 2] = 1e4 * key[looked_at, 1]
    sums = Sums()
    sums.add(0, query, key, value, torch.arange(tokens), SCORES, lambda: torch.ones(HEADS * HEAD_SIZE))
    weight = sums.statistics().layers[0].far_key_weight
    assert weight is not None
    assert_close(weight[0], query[1:, 0].double().square().mean(0), rtol=1e-6, atol=0)
    assert_close(weight[1], query[at, HEADS // 2].double().square(), rtol=1e-6, atol=0)


def test_keys_that_are_looked_at_from_afar_count_more() -> None:
    """Two keys of the second head, far from all others, get all of its queries' attention, half of it each; nobody
    looks far behind in the first head."""
    tokens, looked_at, direction = 4 * NEAR, [5, 9], torch.nn.functional.normalize(random(1, 7)[0, 0], dim=0)
    query, key, value = (random(heads, seed)[:tokens] for heads, seed in ((HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)))
    key[looked_at, 1] = 100 * direction
    query[:, HEADS // 2 :] = 20 * direction
    query[:, : HEADS // 2] = 200 * key[:, :1]  # the token itself
    sums = Sums()
    sums.add(0, query, key, value, torch.arange(tokens), SCORES, lambda: torch.ones(HEADS * HEAD_SIZE))
    seen, kept = sums.statistics().layers[0], key[1:].double()
    plain, squares = kept.mean(0), kept.square().mean(0)
    assert_close(seen.key_mean[0], plain[0])
    assert_close(seen.key_variance[0], kept[:, 0].var(0, correction=0))
    mean = EVEN * plain[1] + (1 - EVEN) * 100 * direction
    assert_close(seen.key_mean[1], mean)
    attended = (100 * direction.double()).square()
    assert_close(seen.key_variance[1], EVEN * squares[1] + (1 - EVEN) * attended - mean**2, rtol=1e-6, atol=1e-4)
