"""Weights of keys are the squares of the attention that the model pays them from afar."""

from __future__ import annotations

import pytest
import torch
from small_models import MAKERS, build
from tiny_models import VOCAB
from torch.testing import assert_close
from tq_calibrate import attended
from tq_calibrate.attended import NEAR, STRIDE, Scores, attention_from_afar
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.sums import Sums
from transformers import PreTrainedModel

HEADS, KV_HEADS, HEAD_SIZE, TOKENS = 4, 2, 64, 100


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model(name: str, attention: str) -> PreTrainedModel:
    """Build a model whose sinks, if it has any, take a part of attention: its scores are in the hundreds."""
    built = build(MAKERS[name](), attention)
    for parameter, weight in built.named_parameters():
        if parameter.endswith("sinks"):
            weight.data.fill_(1000.0)
    return built


def squares_from_afar(attention: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: [heads, queries, keys] of one sequence -> [keys, KV heads] and [queries, heads]."""
    asked = torch.arange(attended.NEAR, attention.shape[1], STRIDE)
    far = (asked.unsqueeze(1) - torch.arange(attention.shape[2])) >= attended.NEAR
    squares = torch.zeros_like(attention)
    squares[:, asked] = (attention[:, asked] * far).square()
    squares[..., 0] = 0
    return squares.sum(1).unflatten(0, (KV_HEADS, -1)).sum(1).T, squares.sum(2).T


@pytest.mark.parametrize("name", ["llama", "sliding", "soft-cap", "sinks"])
def test_weights_are_those_of_the_models_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' eager attention has it, of each layer and sequence of a batch. `NEAR` is less than the sliding
    windows here, so that these matter."""
    monkeypatch.setattr(attended, "NEAR", 10)
    found, add = {}, Sums.add

    def record(sums: Sums, layer: int, query, key, value, positions, scores: Scores, columns) -> None:
        found[layer] = attention_from_afar(query, key, positions, scores)
        add(sums, layer, query, key, value, positions, scores, columns)

    monkeypatch.setattr(Sums, "add", record)
    batch = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    Collector().run(model(name, ATTENTION), [batch.tolist()], lambda _tokens: None)
    with torch.no_grad():
        attentions = model(name, "eager")(batch, output_attentions=True).attentions
    assert len(found) == len(attentions)
    for layer, attention in enumerate(attentions):
        for ours, parts in zip(found[layer], zip(*map(squares_from_afar, attention), strict=True), strict=True):
            expected = torch.cat(parts)
            assert expected.max() > 0
            assert_close(ours, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


def test_tiles_and_sequences_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of one batch, of which one is too short to have anything afar, and queries in tiles of three."""
    lengths = (TOKENS, NEAR, 2 * TOKENS)
    query, key = random(sum(lengths), HEADS, HEAD_SIZE, seed=1), random(sum(lengths), KV_HEADS, HEAD_SIZE, seed=2)
    positions = torch.cat([torch.arange(length) for length in lengths])
    parts = zip(query.split(lengths), key.split(lengths), positions.split(lengths), strict=True)
    of_parts = [attention_from_afar(*part, Scores(0.125)) for part in parts]
    of_keys, of_queries = (torch.cat(of_each) for of_each in zip(*of_parts, strict=True))
    monkeypatch.setattr(attended, "TILE", 3)
    found = attention_from_afar(query, key, positions, Scores(0.125))
    assert_close(found.of_keys, of_keys)
    assert_close(found.of_queries, of_queries)
    short = slice(TOKENS, TOKENS + NEAR)
    assert not of_keys[short].any() and of_keys[1 : TOKENS - NEAR - STRIDE].all()
    assert not of_queries[short].any() and of_queries[NEAR + STRIDE : TOKENS : STRIDE].all()
