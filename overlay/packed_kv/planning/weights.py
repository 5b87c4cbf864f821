"""Bytes of a model's weights, from its config: what lies on the cards, and what a decode step reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model_shape import Config, Model, first

BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.25}
"""`--weights` -> bits of a number in a linear layer; of 4 bits, groups of 64 share a scale of 16."""
PLAIN_MLP = (
    "gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "nemotron", "nemotron_h", "mpt",
    "gpt_bigcode", "codegen",
)  # fmt: skip
"""Model types whose MLP has two matrices; the others have three, one of them a gate."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """Bytes of the whole model, of what every token reads of it and of all experts, of which a token reads a share.

    `source`: where they are from, in words.
    """

    total: float
    dense: float
    experts: float
    experts_share: float
    source: str

    def read(self, tokens: float) -> float:
        """Bytes that a step of `tokens` tokens reads, if experts are chosen at random."""
        return self.dense + self.experts * (1 - (1 - self.experts_share) ** tokens)


def weights(model: Model, form: str | float | None, folder: Path | None) -> Weights:
    """Of a model in a form of `BITS`, or of a number of bytes; None: as its config and its folder say."""
    linear, experts, vocabulary = parameters(model)
    share = _experts_per_token(model.config) / max(1, _experts(model.config))
    bits, source = _bits(model.config, form if isinstance(form, str) else None)
    tables = 1 if model.config.get("tie_word_embeddings", True) else 2
    dense = linear * bits / 8 + vocabulary * model.dtype_bytes  # of an input embedding a step reads a few rows
    routed = experts * bits / 8
    total = dense + routed + (tables - 1) * vocabulary * model.dtype_bytes
    known = form if isinstance(form, (int, float)) else _known(folder) if form is None else None
    if known:
        source = "as given" if form else f"by {INDEX}"
        return Weights(known, known * dense / total, known * routed / total, share, source)
    count = linear + experts + tables * vocabulary
    return Weights(total, dense, routed, share, f"{count / 1e9:.2f}e9 parameters by the config, {source}")


def _known(folder: Path | None) -> float | None:
    """Bytes of the weights of a folder, as its index says; None where there is none."""
    if folder is None or not (folder / INDEX).is_file():
        return None
    return json.loads((folder / INDEX).read_text()).get("metadata", {}).get("total_size")


def _bits(config: Config, form: str | None) -> tuple[float, str]:
    """Bits of a number in a linear layer, and where they are from."""
    if form is not None:
        return BITS[form], f"linear layers in {form}"
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return 8.0 * {"float32": 4}.get(first(config, "dtype", "torch_dtype") or "", 2), "not quantized"
    method, bits = str(quantization.get("quant_method", "")), quantization.get("bits")
    groups = quantization.get("config_groups")
    if isinstance(groups, dict) and groups:
        bits = (next(iter(groups.values())).get("weights") or {}).get("num_bits")
    words = f"{method} {quantization.get('quant_algo', '')} {quantization.get('load_in_4bit', '')}".lower()
    if bits is None:
        bits = 4 if any(word in words for word in ("fp4", "mxfp4", "true", "awq", "gptq")) else 8
    return (BITS["int4"] if bits == 4 else float(bits)), f"quantized by {method or 'an unknown method'} to {bits} bits"


def parameters(model: Model) -> tuple[float, float, float]:
    """Numbers in linear layers that every token reads, in experts, and in an embedding or output layer."""
    config, hidden = model.config, model.config["hidden_size"]
    linear = experts = 0.0
    for layer in model.layers:
        linear += _attention(config, layer, model.ranks) if layer.kind != "state" else _state(config, hidden)
    for number in range(config["num_hidden_layers"]):
        dense, routed = _mlp(config, number, hidden)
        linear, experts = linear + dense, experts + routed
    vocabulary = first(config, "vocab_size", "padded_vocab_size") or 0
    return linear, experts, vocabulary * hidden


def _attention(config: Config, layer: Any, ranks: int) -> float:
    shared = 0 if layer.is_shared else layer.kv_heads * ranks * layer.channels
    return config["hidden_size"] * (config["num_attention_heads"] * layer.channels + shared)


def _state(config: Config, hidden: int) -> float:
    """Projections into a state layer and out of it; the rest of it is small."""
    if "linear_num_value_heads" in config:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return hidden * (2 * keys + 3 * values)
    if "conv_L_cache" in config:
        return 4 * hidden * hidden
    heads = first(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    size = first(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand", 2) * hidden)
    inner = heads * size if config.get("model_type") == "nemotron_h" and heads else inner
    return 3 * hidden * inner


def _mlp(config: Config, number: int, hidden: int) -> tuple[float, float]:
    """Numbers of a layer's MLP: those that every token reads, and those of the routed experts."""
    pattern = config.get("hybrid_override_pattern")
    if pattern and pattern[number] not in "-E":
        return 0, 0
    inner = first(config, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim") or 4 * hidden
    if isinstance(inner, list):
        inner = inner[number]
    matrices = (2 if config.get("model_type") in PLAIN_MLP else 3) * hidden
    count = _experts(config)
    step = first(config, "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period") or 1
    dense_first = first(config, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers") or 0
    is_sparse = count > 1 and number >= dense_first and (number + 1) % step == 0
    if pattern and pattern[number] == "-":
        is_sparse = False
    if isinstance(config.get("moe_layer_freq"), list):  # MiMo-V2
        is_sparse = count > 1 and bool(config["moe_layer_freq"][number])
    if not is_sparse:
        return matrices * (config.get("intermediate_size_mlp") or inner), 0
    expert = first(config, "moe_intermediate_size", "expert_hidden_dim") or inner
    shared = first(config, "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    if shared is None:
        shared = (first(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0) * expert
    if config.get("model_type") == "llama4_text":
        shared = expert
    return matrices * shared + hidden * count, count * matrices * expert


def _experts(config: Config) -> int:
    return first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 0


def _experts_per_token(config: Config) -> int:
    return first(config, "num_experts_per_tok", "moe_top_k", "moe_k", "top_k_experts") or 1
