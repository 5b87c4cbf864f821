"""The collector sees what the KV cache holds, in every architecture, and the model does not notice."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tiny_models
import torch
from small_models import MAKERS, at_all_positions, build, config_of
from tiny_models import VOCAB
from torch.testing import assert_close
from tq_calibrate.collect import ATTENTION, Collector, output_weight
from tq_calibrate.errors import UserError
from tq_calibrate.model import Shape, load_config, load_model, shape_of
from transformers import AutoModelForImageTextToText, Gemma3Config, PretrainedConfig


def sequences(count: int, length: int) -> list[list[int]]:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def collect(config: PretrainedConfig, batches: list[list[list[int]]]) -> Collector:
    collector = Collector()
    collector.run(build(config, ATTENTION), batches, lambda _tokens: None)
    return collector


@pytest.mark.parametrize("name", MAKERS)
def test_statistics_are_those_of_the_kv_cache(name: str) -> None:
    """Of sequences within the sliding windows, so that transformers' own cache still has all of them."""
    batch = sequences(3, 32)
    statistics = at_all_positions(collect(MAKERS[name](), [batch[:2], batch[2:]]))
    reference = build(MAKERS[name]())
    with torch.no_grad():
        cache = reference(torch.tensor(batch), use_cache=True).past_key_values
    assert [*statistics.layers] == list(range(len(cache.layers))) and statistics.tokens == 96
    for layer, seen in statistics.layers.items():
        for role in ("key", "value"):
            cached = getattr(cache.layers[layer], f"{role}s").double()
            assert_close(getattr(seen, f"{role}_max"), cached.abs().amax((0, 2)), rtol=1e-4, atol=1e-5)
            if role == "key":
                assert_close(seen.key_first_mean, cached[:, :, 0].mean(0), rtol=1e-4, atol=1e-5)
                cached = cached[:, :, 1:]
                assert_close(seen.key_mean, cached.mean((0, 2)), rtol=1e-4, atol=1e-5)
                assert_close(seen.key_variance, cached.var((0, 2), correction=0), rtol=1e-4, atol=1e-6)
            assert_close(getattr(seen, f"{role}_energy"), cached.square().mean((0, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_the_model_computes_what_it_always_does(name: str) -> None:
    """Beyond the sliding windows, against transformers' eager attention."""
    ids = torch.tensor(sequences(2, 100))
    Collector()
    with torch.inference_mode():
        ours, eager = (build(MAKERS[name](), attention)(ids).logits for attention in (ATTENTION, "eager"))
    assert_close(ours, eager, rtol=1e-3, atol=1e-3 * eager.abs().max().item())


def test_queries_are_averaged_over_the_heads_that_share_a_kv_head() -> None:
    """RoPE turns pairs of channels (i, i + 32) and leaves the sums of their squares. Not of position 0."""
    config = tiny_models.llama(num_hidden_layers=1)
    seen = at_all_positions(collect(config, [sequences(5, 3)])).layers[0]
    model = build(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        hidden = layer.input_layernorm(model.model.embed_tokens(torch.tensor(sequences(5, 3))[:, 1:]))
        queries = layer.self_attn.q_proj(hidden).view(5, 2, 2, 2, 2, 32).double()
    pairs = seen.key_weight.view(2, 2, 32).sum(1)
    assert_close(pairs, queries.square().mean((0, 1, 3)).sum(1), rtol=1e-4, atol=1e-6)


def test_value_weight_is_the_norm_of_the_output_projections_columns() -> None:
    config = tiny_models.llama(num_hidden_layers=1)
    seen = collect(config, [sequences(1, 8)]).statistics().layers[0]
    weight = build(config).model.layers[0].self_attn.o_proj.weight.detach().double()
    assert_close(seen.value_weight, weight.view(64, 2, 2, 64).square().sum((0, 2)), rtol=1e-4, atol=1e-6)


class PackedLinear(torch.nn.Module):
    """A projection whose weight is not a matrix that we can read, as AWQ's and GPTQ's."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.qweight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        self.forward = linear.forward


def test_a_packed_output_projection_is_asked_for_its_columns() -> None:
    module = torch.nn.Module()
    module.q_proj = torch.nn.Linear(4, 4)
    module.o_proj = torch.nn.Linear(600, 40)
    direct = output_weight(module, 600)
    module.o_proj = PackedLinear(module.o_proj)
    assert_close(output_weight(module, 600), direct, rtol=1e-4, atol=1e-6)


def test_the_text_model_of_a_multimodal_one_is_seen(tmp_path: Path) -> None:
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=tiny_models.gemma3().to_dict(), vision_config=eyes, mm_tokens_per_image=4)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    loaded = load_config(str(tmp_path))
    assert shape_of(loaded) == Shape(layers=6, kv_heads=2, head_size=64, value_head_size=64, every_layer=True)
    collector = Collector()
    model = load_model(str(tmp_path), ATTENTION, "float32", torch.device("cpu"))
    collector.run(model, [sequences(1, 8)], lambda _tokens: None)
    statistics = collector.statistics()
    assert (statistics.kv_heads, statistics.head_sizes) == ([2], (64, 64)) and [*statistics.layers] == list(range(6))


def test_layers_that_share_or_lack_a_cache_are_left_out() -> None:
    shared = tiny_models.gemma4(global_head_dim=64)
    assert [*collect(shared, [sequences(1, 8)]).statistics().layers] == [0, 1, 2, 3]
    layers = ["conv", "full_attention", "conv", "full_attention"]
    hybrid = config_of("Lfm2Config", num_hidden_layers=4, layer_types=layers)()
    assert [*collect(hybrid, [sequences(1, 8)]).statistics().layers] == [1, 3]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            tiny_models.gemma4,
            "layers differ in shape (layer 0: 2 KV heads of 64 channels, layer 1: 2 KV heads of 128 channels)",
        ),
        (functools.partial(tiny_models.llama, head_dim=48), "heads of 48 channels"),
        (functools.partial(tiny_models.llama, head_dim=32), "heads of 32 channels"),
        (config_of("BloomConfig", hidden_size=256, n_head=4), "attention interface"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(config, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        collect(config(), [sequences(1, 8)]).statistics()
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_statistics_of_latents() -> None:
    """A latent is one KV head: K behind W_UK, V behind W_UV and W_O, whose weights of channels are averaged."""
    config = tiny_models.deepseek_v2(kv_lora_rank=64)
    batch, seen = sequences(2, 20), {}
    statistics = collect(config, [batch]).sums.statistics(even=1.0)
    reference = build(config)
    for number, layer in enumerate(reference.model.layers):
        attention = layer.self_attn
        attention.kv_b_proj.register_forward_hook(lambda _module, x, _y, n=number: seen.update({("c", n): x[0][:, 0]}))
        attention.q_proj.register_forward_hook(lambda _module, _x, y, n=number: seen.update({("q", n): y}))
    with torch.no_grad():
        reference(torch.tensor(batch))
        for number, layer in enumerate(reference.model.layers):
            found, attention = statistics.layers[number], layer.self_attn
            latent = seen["c", number][:, 1:].double()  # without position 0
            assert_close(found.key_mean, latent.mean((0, 1))[None], rtol=1e-4, atol=1e-5)
            assert_close(found.key_variance, latent.var((0, 1), correction=0)[None], rtol=1e-4, atol=1e-6)
            up = attention.kv_b_proj.weight.double().view(4, 64, 64)  # heads, 32 of K and 32 of V, rank
            query = seen["q", number].double().view(2, 20, 4, 96)[:, 1:, :, :32]
            of_key = torch.einsum("bthp,hpr->bthr", query, up[:, :32]).square().mean((0, 1, 2))
            columns = torch.einsum("ohv,hvr->hor", attention.o_proj.weight.double().view(-1, 4, 32), up[:, 32:])
            of_value = columns.square().sum((0, 1))
            expected = (of_key / of_key.mean() + of_value / of_value.mean()) / 2
            assert_close(found.key_weight, expected[None], rtol=1e-3, atol=1e-6)
            assert torch.equal(found.value_weight, found.key_weight)
            means = found.key_first_mean, found.value_mean, found.value_first_mean
            assert means == (None,) * 3, "V is the latent, whose mean is K's"


def test_a_model_that_does_not_run_is_refused() -> None:
    model = build(tiny_models.llama(), ATTENTION)
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(3, 3)
    with pytest.raises(UserError, match=r"does not run on cpu in torch.float32 \(mat1 and mat2"):
        Collector().run(model, [sequences(1, 8)], lambda _tokens: None)


def test_an_overflow_is_refused() -> None:
    collector = Collector()
    model = build(tiny_models.llama(), ATTENTION)
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.inf
    collector.run(model, [sequences(1, 8)], lambda _tokens: None)
    with pytest.raises(UserError, match=r"layer 1: key_energy is not finite"):
        collector.statistics()
