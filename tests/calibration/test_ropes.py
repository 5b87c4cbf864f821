"""A layer's RoPE is found in its keys, in every architecture, and their mean is the one before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from packed_kv.codecs.rope import partner, spectrum_of_blocks
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import Rope
from small_models import MAKERS, build, config_of
from tiny_models import VOCAB
from torch.testing import assert_close
from tq_calibrate.attended import Scores
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.ropes import ModelRope, before_rope, ropes_of, stored_squares, turned_squares, why_none
from tq_calibrate.sums import Sums
from transformers import PreTrainedModel

LENGTH, HEAD_SIZE = 512, 64
MODELS = {
    **MAKERS,
    "every fourth without": config_of("Cohere2Config", num_hidden_layers=4, head_dim=None, hidden_size=256),
    "the third without": config_of("SmolLM3Config", num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1], pad_token_id=0),
}
INTERLEAVED = ("interleaved", "no-norm-weight", "every fourth without")
WITHOUT = {"every fourth without": [3], "the third without": [2]}
"""Layers without RoPE."""


def model_of(name: str) -> PreTrainedModel:
    """Keys have a constant in them, as those of trained models: a random model's hidden states have none."""
    Collector()  # which transformers must know before it makes a model
    model = build(MODELS[name](), ATTENTION)
    embeddings = model.get_input_embeddings().weight.data
    embeddings += 0.05 * torch.randn(embeddings.shape[1], generator=torch.Generator().manual_seed(2))
    return model


def keys_before_rope(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Filled as the model runs: layer -> keys [batch, tokens, KV heads, head_size] as projection and norm give them."""
    found: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        fused = getattr(attention, "qkv_proj", None)
        module = getattr(attention, "k_norm", None) or fused or attention.k_proj

        def keep(_module: Any, _inputs: Any, output: torch.Tensor, number: int = number, fused: Any = fused) -> None:
            keys = output[..., 256:384] if fused is not None else output
            keys = keys.transpose(1, 2) if keys.ndim == 4 and keys.shape[2] == LENGTH else keys
            found[number] = keys.reshape(2, LENGTH, 2, HEAD_SIZE)

        module.register_forward_hook(keep)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_each_layers_rope_is_found_and_the_mean_is_that_before_it(name: str) -> None:
    model = model_of(name)
    rotary, kinds = model.model.rotary_emb, getattr(model.config, "layer_types", None)
    raw, collector = keys_before_rope(model), Collector()
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    collector.run(model, [ids], lambda _tokens: None)
    statistics = collector.sums.statistics(even=1.0)
    for number, layer in statistics.layers.items():
        cached = collector.sums.layers[number].key / (2 * LENGTH - 2)
        if number in WITHOUT.get(name, ()):
            assert layer.rope is None, number
            assert_close(layer.key_mean, cached)
            continue
        frequencies, factor = (
            getattr(rotary, f"{kinds[number]}_{what}" if kinds and hasattr(rotary, f"{kinds[number]}_{what}") else what)
            for what in ("inv_freq", "attention_scaling")
        )
        assert layer.rope is not None, number
        assert layer.rope.rope == Rope(tuple(frequencies.tolist()), name in INTERLEAVED), number
        turned = 2 * len(frequencies)
        before = raw[number][:, 1:].double().mean((0, 1))
        before[:, :turned] *= factor
        assert_close(layer.key_mean, before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize("interleaved", [False, True])
def test_statistics_are_those_of_all_positions_of_the_model(interleaved: bool) -> None:
    """Whatever the positions that were seen: keys and queries turned to each position of two blocks, and keys less
    their block's mean there. Channels differ before RoPE, and some pairs hardly turn."""
    rope = Rope(tuple((1e6 ** (-torch.arange(0, 48, 2).double() / 48)).tolist()), interleaved)
    generator = torch.Generator().manual_seed(1)
    constant, spread = torch.randn(2, 2, HEAD_SIZE, generator=generator, dtype=torch.float64)
    positions = torch.arange(90, 130)
    spread = (2 * spread).exp()
    raw = [constant + spread * torch.randn(40, 2, HEAD_SIZE, generator=generator), torch.randn(40, 4, HEAD_SIZE)]
    raw[1][:, :2] *= spread.flip(0).float()
    keys, queries = (before_rope(x.double(), -positions, rope) for x in raw)
    sums = Sums([ModelRope(rope, {}, 2 * MEAN_BLOCK)])
    sums.add(0, queries, keys, keys, positions, Scores(0.1), lambda: torch.ones(4 * HEAD_SIZE))
    seen = sums.statistics().layers[0]
    assert seen.rope is not None and seen.rope.rope == rope and seen.key_first_mean is None
    mean = raw[0].mean(0)
    assert_close(seen.key_mean, mean)

    every = torch.arange(2 * MEAN_BLOCK)
    table = spectrum_of_blocks(rope, HEAD_SIZE, 2)[every // MEAN_BLOCK].unsqueeze(2)
    blocks = (mean * table[:, 0] + partner(rope, mean) * table[:, 1]).double()
    at_each = [before_rope(x.double().expand(len(every), -1, -1), -every, rope) for x in raw[0]]
    left = torch.stack([(key - blocks).square().mean(0) for key in at_each]).mean(0)
    for first, second in rope.pairs():
        found = seen.key_variance[:, [first, second]]
        assert_close(found.sum(1), left[:, [first, second]].sum(1), rtol=1e-5, atol=1e-9)
        assert_close(found, left[:, [first, second]], rtol=0.1, atol=0.02 * float(left[:, [first, second]].max()))
    assert_close(seen.key_variance[:, 48:], left[:, 48:])
    sampled = [before_rope(x.double().expand(len(every), -1, -1), -every, rope).square().mean(0) for x in raw[1][7::8]]
    assert_close(seen.key_weight, torch.stack(sampled).mean(0).unflatten(0, (2, 2)).mean(1), rtol=1e-5, atol=1e-9)
    slow = seen.key_variance[:, list(rope.pairs()[-1])]
    assert (slow.amax(1) > 2 * slow.amin(1)).any()  # a pair that stays as it is keeps its two sizes


@pytest.mark.parametrize("read", [stored_squares, turned_squares])
def test_statistics_stay_on_the_device_of_their_sums(read: Callable[[torch.Tensor, ModelRope], torch.Tensor]) -> None:
    sums = torch.zeros(2, HEAD_SIZE * 5 // 2, dtype=torch.float64, device="meta")  # it meets no tensor of a CPU
    assert read(sums, ModelRope(Rope((1.0, 0.5)), {})).device == sums.device


def test_keys_without_a_mean_before_rope_have_one_mean() -> None:
    """A constant behind RoPE, as where the cache holds keys that RoPE left alone."""
    constant, positions = torch.randn(2, HEAD_SIZE), torch.arange(LENGTH)
    keys = constant.expand(LENGTH, -1, -1)
    ropes = [ModelRope(Rope((1.0, 0.1), interleaved), {}) for interleaved in (False, True)]
    sums = Sums(ropes)
    sums.add(0, keys, keys, keys, positions, Scores(0.1), lambda: torch.ones(2 * HEAD_SIZE))
    seen = sums.statistics().layers[0]
    assert seen.rope is None
    assert_close(seen.key_mean, constant.double())
    assert seen.key_variance.max() < 1e-9


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "RoPE of the kind dynamic"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 32,
          "long_factor": [2.0] * 32, "original_max_position_embeddings": 64}, "RoPE of the kind longrope"),
    ],
)  # fmt: skip
def test_frequencies_that_depend_on_the_length_are_not_used(parameters: dict, reason: str) -> None:
    config = tiny_models.llama(rope_parameters=parameters)
    assert ropes_of(config) == [] and reason in (why_none(config) or "")


def test_a_configuration_without_rope() -> None:
    config = SimpleNamespace(model_type="gpt2", n_head=4)
    assert ropes_of(config) == [] and why_none(config) == "its configuration names no RoPE"


def test_scaled_frequencies_are_those_of_the_model() -> None:
    """Llama 3's scaling, of which no other model here has any."""
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}  # fmt: skip
    config = tiny_models.llama(rope_parameters=parameters)
    neox, interleaved = ropes_of(config)
    assert torch.equal(build(config).model.rotary_emb.inv_freq, torch.tensor(neox.rope.frequencies))
    assert neox.rope.frequencies == interleaved.rope.frequencies and interleaved.rope.interleaved
    assert math.isclose(neox.parameters["rope_theta"], 5e5) and neox.parameters["rope_type"] == "llama3"
