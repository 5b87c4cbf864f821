"""Random models of more architectures, whose K and V differ in size from channel to channel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import tiny_models
import torch
import transformers
from tiny_models import SMALL, WINDOW
from tq_calibrate.collect import Collector
from tq_calibrate.statistics import Statistics
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

Maker = Callable[..., PretrainedConfig]


def config_of(class_name: str, **options: object) -> Maker:
    """A maker of small configurations of a class of transformers; None leaves an option to the class."""
    given = {**SMALL, "tie_word_embeddings": False, **options}
    return functools.partial(getattr(transformers, class_name), **{k: v for k, v in given.items() if v is not None})


MAKERS: dict[str, Maker] = {
    "llama": tiny_models.llama,
    "tied": functools.partial(tiny_models.llama, tie_word_embeddings=True),
    "sliding": tiny_models.mistral,
    "soft-cap": tiny_models.gemma2,
    "gemma3": tiny_models.gemma3,
    "bias": config_of("Qwen2Config"),
    "k-norm": config_of("Qwen3Config"),
    "norm-of-all-heads": config_of("Olmo2Config"),
    "experts": config_of("MixtralConfig", num_local_experts=4),
    "fused": config_of("Phi3Config", head_dim=None, hidden_size=256, pad_token_id=0),
    "partial-rope": config_of("StableLmConfig", head_dim=None, hidden_size=256, partial_rotary_factor=0.25),
    "interleaved": config_of("Glm4Config", attention_bias=True, pad_token_id=0),
    "no-norm-weight": config_of("CohereConfig", head_dim=None, hidden_size=256),
    "sinks": config_of("GptOssConfig", num_local_experts=4, sliding_window=WINDOW,
                       layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
}  # fmt: skip


def build(config: PretrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """The model of a configuration, random but the same every time, in fp32. Projections' rows and columns, biases and
    norms are scaled at random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            parts = name.split(".")
            if name.endswith("bias") and "self_attn" in parts:
                weight.normal_()
            elif {"q_norm", "k_norm"} & {*parts}:
                weight.copy_(torch.randn_like(weight).mul_(0.5).exp_())
            elif "input_layernorm" in parts:  # far apart, or an estimate that leaves them out would do
                weight.copy_(torch.randn_like(weight).mul_(1.5).exp_())
            elif {"q_proj", "k_proj", "v_proj", "qkv_proj"} & {*parts}:
                weight.mul_(torch.randn(len(weight), 1).exp_())
            elif "o_proj" in parts:
                weight.mul_(torch.randn(weight.shape[1]).exp_())
    return model


def at_all_positions(collector: Collector) -> Statistics:
    """Statistics for one mean of keys at all positions, whatever RoPE they have."""
    for layer in collector.sums.layers.values():
        layer.ropes = ()
    return collector.statistics()


def save(config: PretrainedConfig, folder: Path) -> str:
    """Write `build`'s model and return its folder."""
    build(config).save_pretrained(folder)
    return str(folder)
