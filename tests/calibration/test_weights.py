"""Estimates from weights agree with what a run sees, where hidden states are white: in random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from small_models import MAKERS, at_all_positions, build, config_of, save
from tiny_models import VOCAB
from torch.testing import assert_close
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.errors import UserError
from tq_calibrate.weights import Weights, estimate
from transformers import PretrainedConfig

LENGTH = 1024
FLOORS = {"partial-rope": 0.94, "sinks": 0.92}
"""Floors of models with more than is estimated: the bias of a LayerNorm, and YaRN's scaling of RoPE."""
FIGURES = ("key_energy", "value_energy", "key_weight", "value_weight")


def agreement(config: PretrainedConfig, folder: Path) -> dict[str, float]:
    """Correlation of the logarithms of each figure of the first layer, whose input is an embedding of random tokens."""
    collector = Collector()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (4, LENGTH), generator=generator).tolist()
    collector.run(build(config, ATTENTION), [ids], lambda _tokens: None)
    seen, found = at_all_positions(collector), estimate(config, Path(save(config, folder)))
    assert [*found.layers] == [*seen.layers] and found.head_sizes == seen.head_sizes
    logs = {name: [getattr(x.layers[0], name).log().flatten() for x in (seen, found)] for name in FIGURES}
    return {name: float(torch.corrcoef(torch.stack(pair))[0, 1]) for name, pair in logs.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_estimates_agree_with_a_run(name: str, tmp_path: Path) -> None:
    found = agreement(MAKERS[name](), tmp_path)
    assert min(found.values()) > FLOORS.get(name, 0.99), found


def test_gated_queries_and_layers_without_attention(tmp_path: Path) -> None:
    config = config_of(
        "Qwen3NextConfig", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    )()  # fmt: skip
    collector = Collector()
    collector.run(build(config, ATTENTION), [torch.randint(VOCAB, (4, LENGTH)).tolist()], lambda _tokens: None)
    seen, found = at_all_positions(collector), estimate(config, Path(save(config, tmp_path)))
    assert [*found.layers] == [*seen.layers] == [1]
    for name in FIGURES:
        pair = [getattr(x.layers[1], name).log().flatten() for x in (seen, found)]
        assert torch.corrcoef(torch.stack(pair))[0, 1] > 0.9, name


@pytest.mark.parametrize("scale", ["blocks", "rows", "tensor"])
def test_fp8_weights_are_multiplied_by_their_scales(scale: str, tmp_path: Path) -> None:
    weight = torch.randn(192, 320)
    if scale == "blocks":
        scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:192, :320]
    else:
        scales = full = torch.rand(192, 1) + 0.5 if scale == "rows" else torch.tensor([3.0])
    coded = (weight / full).to(torch.float8_e4m3fn)
    suffix = "weight_scale_inv" if scale == "blocks" else "weight_scale"
    save_file({"k_proj.weight": coded, f"k_proj.{suffix}": scales}, tmp_path / "model.safetensors")
    assert_close(Weights(tmp_path).get("k_proj.weight"), coded.float() * full)


def test_the_language_model_of_a_larger_one_is_found(tmp_path: Path) -> None:
    config = tiny_models.llama()
    expected = estimate(config, Path(save(config, tmp_path)))
    path = tmp_path / "model.safetensors"
    tensors = {f"model.language_model.{name}": tensor for name, tensor in load_file(path).items()}
    tensors["model.vision_tower.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 8)
    tensors["model.language_model.model.layers.3.self_attn.k_proj.weight"] = torch.zeros(8, 8)  # a draft's
    save_file(tensors, path)
    assert_close(estimate(config, tmp_path).layers[2].key_energy, expected.layers[2].key_energy)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    config = tiny_models.llama()
    with pytest.raises(UserError, match=r"has no \*\.safetensors"):
        estimate(config, tmp_path)
    path = tmp_path / "model.safetensors"
    for name, shape, message in (
        ("transformer.h.0.attn.c_attn.weight", (8, 8), "has no tensors named"),
        ("model.layers.0.self_attn.k_proj.qweight", (8, 8), "packed"),
        ("model.layers.0.self_attn.k_proj.weight", (64, 64), "q_proj.weight: missing, expected 4 heads of 64"),
    ):
        save_file({name: torch.zeros(shape)}, path)
        with pytest.raises(UserError, match=message) as refusal:
            estimate(config, tmp_path)
        assert "--weights-only" in str(refusal.value)
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        estimate(config, tmp_path)
