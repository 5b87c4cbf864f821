"""Fields of a config.json, checked as they are read, and the part about the language model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..json_file import shown
from .config_defaults import LAYERS, Config, text_type, with_defaults

MODEL_BYTES = 2
"""Dtype -> bytes per number of weights, activations and pages: by default vLLM serves a config's float32 in bf16."""
PICKING_KINDS = ("deepseek_sparse_attention", "indexed_attention", "sparse_attention", "sparse")
"""Words of `layer_types` for layers of latents that read picked tokens, as vLLM's models/hy_v4 knows them."""
EXPANDED_LATENTS = ("minicpm3",)
"""Model types with a `kv_lora_rank`, where vLLM expands latent vectors to K and V of every head."""
MODELOPT = {
    "FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt", "FP8_PB_WO": "modelopt", "NVFP4": "modelopt_fp4",
    "MIXED_PRECISION": "modelopt_mixed",
}  # fmt: skip
"""Algorithms of Model-Optimizer's hf_quant_config.json -> vLLM's name of the method."""
LARGEST_WHOLE = 1 << 40
"""Bound of the numbers in a config."""


class BadInput(ValueError):
    """Input that cannot be used; the message is one line that says what was read and what to give."""


def whole(config: Config, *names: str, default: int = 0) -> int:
    """The first field that is there and not null: a whole number. Raises BadInput for anything else."""
    name, value = _first(config, names)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value <= LARGEST_WHOLE:
        raise BadInput(f"{name} is {shown(value)}; it must be a whole number of at most {LARGEST_WHOLE:,}")
    return value


def word(config: Config, *names: str) -> str:
    """The first field that is there and not null, a text; "": there is none. Raises BadInput for anything else."""
    name, value = _first(config, names)
    if not isinstance(value, str | None):
        raise BadInput(f"{name} is {shown(value)}; it must be a string")
    return value or ""


def nested(config: Config, *names: str) -> Config:
    """The first field that is there and not null, an object; {}: there is none. Raises BadInput for anything else."""
    name, value = _first(config, names)
    if not isinstance(value, dict | None):
        raise BadInput(f"{name} is {shown(value)}; it must be an object")
    return value or {}


def listed(config: Config, *names: str, of: type, least: int = 0) -> list[Any]:
    """The first field that is there and not null, a list; []: there is none. Raises BadInput for anything else, and for
    fewer than `least` entries."""
    name, value = _first(config, names)
    if value is None:
        return []
    bounded = range(LARGEST_WHOLE + 1)
    if not isinstance(value, list) or not all(isinstance(x, of) and (of is not int or x in bounded) for x in value):
        kinds = {int: "whole numbers", str: "words"}[of]
        raise BadInput(f"{name} is {shown(value)}; it must be a list of {kinds}")
    if len(value) < least:
        raise BadInput(f"{name} has {len(value)} entries, but the model has {least} layers; give a config that agrees")
    return value


def _first(config: Config, names: Iterable[str]) -> tuple[str, Any]:
    return next(((name, config[name]) for name in names if config.get(name) is not None), ("", None))


def text_config(config: Config) -> Config:
    """The part of a config that describes the language model, with the defaults that it leaves out. Raises BadInput."""
    above: Config = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    outer, kind = nested(config, "thinker_config") or config, word(config, "model_type")  # Qwen's Omni models
    text = nested(outer, "text_config", "llm_config")
    if quantization := _quantization(config) or _quantization(text):
        config = {**config, "quantization_config": quantization}
        outer = {**outer, "quantization_config": quantization}
        text = text and {**text, "quantization_config": quantization}
    if text:
        own = word(text, "model_type") or text_type(kind)
        return with_defaults({**above, **text, "model_type": own}, kind, own)
    if text_type(kind) and {*LAYERS}.isdisjoint(outer):  # a model's default text config may differ from its class's
        return config
    return with_defaults({**above, **outer}, text_type(kind) or kind)


def _quantization(config: Config) -> Config:
    """A config's quantization settings, with vLLM's name of the method; {}: none. As `_normalize_quantization_config`
    of vLLM's `model_arch_config_convertor.py`. Raises BadInput."""
    found = nested(config, "quantization_config")
    if not found:
        found = nested(config, "compression_config")
    elif not found.get("quant_method") and (inner := _modelopt(found)):
        return {**found, "quant_method": MODELOPT.get(word(inner, "quant_algo").upper(), "")}
    method = word(found, "quant_method").lower().replace("compressed_tensors", "compressed-tensors")
    return {**found, "quant_method": method} if found else {}


def _modelopt(quantization: Config) -> Config:
    """The settings in a file that Model-Optimizer before 0.31 wrote; {}: it is another tool's file."""
    producer, inner = quantization.get("producer"), quantization.get("quantization")
    if not isinstance(inner, dict):
        return {}
    by_name = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return inner if by_name or "modelopt_quant_config" in inner else {}


def reads_latents(text: Config) -> bool:
    """True if vLLM serves the model with latent attention (MLA)."""
    return whole(text, "kv_lora_rank") > 0 and word(text, "model_type") not in EXPANDED_LATENTS


def picks_tokens(text: Config) -> bool:
    """True if layers of latent attention read picked tokens (DeepSeek V3.2, GLM-5)."""
    return reads_latents(text) and text.get("index_topk") is not None


def all_pick(layer_types: object) -> bool:
    """True if `layer_types` of a config says of every layer that it reads picked tokens."""
    return isinstance(layer_types, list) and bool(layer_types) and all(kind in PICKING_KINDS for kind in layer_types)
