"""Fields of a config.json, checked as they are read, and its part on the language model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..json_file import shown
from .config_defaults import LAYERS, Config, text_type, with_defaults

MODEL_BYTES = 2
"""Bytes of a number of weights, activations and pages: by default vLLM serves a config's float32 in bf16."""
PICKING_KINDS = ("deepseek_sparse_attention", "indexed_attention", "sparse_attention", "sparse")
"""Words of `layer_types` for layers of latents that read picked tokens, as vLLM's models/hy_v4 knows them."""
EXPANDED_LATENTS = ("minicpm3",)
"""Model types with a `kv_lora_rank` whose latent vectors vLLM expands to K and V of every head."""
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
    above: Config = {key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in config}
    outer, kind = nested(config, "thinker_config") or config, word(config, "model_type")  # Qwen's Omni models
    text = nested(outer, "text_config", "llm_config")
    if text:
        own = word(text, "model_type") or text_type(kind)
        return with_defaults({**above, **text, "model_type": own}, kind, own)
    if text_type(kind) and {*LAYERS}.isdisjoint(outer):  # a default text may have other sizes than its class
        return config
    return with_defaults({**above, **outer}, text_type(kind) or kind)


def reads_latents(text: Config) -> bool:
    """True if vLLM serves the model with latent attention (MLA)."""
    return whole(text, "kv_lora_rank") > 0 and word(text, "model_type") not in EXPANDED_LATENTS


def picks_tokens(text: Config) -> bool:
    """True if layers of latent attention read picked tokens (DeepSeek V3.2, GLM-5)."""
    return reads_latents(text) and text.get("index_topk") is not None


def all_pick(layer_types: object) -> bool:
    """True if `layer_types` of a config says of every layer that it reads picked tokens."""
    return isinstance(layer_types, list) and bool(layer_types) and all(kind in PICKING_KINDS for kind in layer_types)
