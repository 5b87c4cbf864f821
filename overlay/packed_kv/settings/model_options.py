"""The settings that change a model's numbers besides its weights: an engine's options, and the resolved config."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from ..model.rope import longest_with_short_factors, rope_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig, VllmConfig

RESOLVED = ("revision", "hf_overrides", "hf_config_path", "config_format", "disable_sliding_window", "model_impl")
"""Options whose whole effect is in the model's files, its resolved config or its class."""
CODE = ("trust_remote_code", "code_revision")
"""Options that decide which code a model of transformers runs."""
OTHERS = (
    "quantization", "quantization_config", "model_class_overrides", "mm_processor_kwargs", "media_io_kwargs",
    "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
MODEL_OPTIONS = (*RESOLVED, *CODE, *OTHERS)
"""Arguments of an engine that decide what its model computes of token ids and pictures; with its dtype, its length
(`_by_length`) and `load_format`."""
TOKENIZER_OPTIONS = ("tokenizer", "tokenizer_mode", "tokenizer_revision")
"""Arguments that decide which token ids a text has."""
SAME_FILES = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes"}
"""Values of `load_format` that read the same weights in other ways."""
NO_NUMBERS = {"_name_or_path", "transformers_version"}
"""Fields of a config that change no number: a path, and which library wrote it."""
OF_TRANSFORMERS = "Transformers"
"""Beginning of the names of vLLM's classes that run a model of transformers."""
CLIPS_ROPE = ("Plamo3", "MiniMaxM2")
"""Beginnings of architectures whose RoPE is made for the engine's `max_model_len`."""
LONGEST_UNTUNED = 32768
"""Tokens of an engine up to which vLLM's Llama 4 leaves queries as they are, unless a config says otherwise."""
KEPT = "_packed_kv_numbers"


def options_of(config: VllmConfig, names: Iterable[str]) -> dict[str, Any]:
    """Return the given ones of these arguments, as vLLM keeps them."""
    holders = (config.model_config, getattr(config.model_config, "multimodal_config", None))
    found = {name: next((getattr(x, name) for x in holders if hasattr(x, name)), None) for name in names}
    return {name: value for name, value in found.items() if value}


def keep_numbers(config: VllmConfig) -> None:
    """Note the settings that decide a model's numbers, before it is loaded: classes of vLLM's models change the config
    that they are made from, and vLLM may shorten `max_model_len` afterwards. The note goes with the config to
    workers."""
    setattr(config.model_config, KEPT, _numbers(config))


def model_numbers(config: VllmConfig) -> dict[str, Any]:
    """Everything besides weights and vLLM's code that decides what a model computes, as JSON: equal for equal models
    wherever they lie, and in all processes of an engine."""
    return getattr(config.model_config, KEPT, None) or _numbers(config)


def _numbers(config: VllmConfig) -> dict[str, Any]:
    model, load = config.model_config, config.load_config
    found: dict[str, Any] = {
        "dtype": str(model.dtype),
        "class": model.architecture,
        "config": model.hf_config,
        "options": options_of(config, (*OTHERS, *CODE) if model.architecture.startswith(OF_TRANSFORMERS) else OTHERS),
        "length": _by_length(model),
    }
    if load.load_format not in SAME_FILES:
        found["load"] = [load.load_format, load.model_loader_extra_config]
    if load.load_format == "dummy":
        found["seed"] = model.seed
    return _plain(found)


def _by_length(model: ModelConfig) -> dict[str, Any]:
    """Return the numbers that `max_model_len` decides: longrope's factors
    (`Phi3LongRoPEScaledRotaryEmbedding`), the base of dynamic RoPE, and whether Llama 4 tunes its queries
    (`Llama4ForCausalLM`)."""
    found: dict[str, Any] = {}
    for kind, rope in rope_parameters(model.hf_text_config).items():
        if (short := longest_with_short_factors({kind: rope})) is not None:
            found[f"long factors {kind}"] = model.max_model_len > short
        elif rope["rope_type"] == "dynamic" and model.architecture.startswith(CLIPS_ROPE):
            found[f"positions {kind}"] = model.max_model_len
    if model.architecture.startswith("Llama4"):
        given = {**model.try_get_generation_config(), **model.override_generation_config}
        found["tuning"] = given.get("attn_temperature_tuning", model.max_model_len > LONGEST_UNTUNED)
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it, the same in each process: no addresses, no order of sets."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items() if name not in NO_NUMBERS}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, map(_plain, value)))
    if value is None or isinstance(value, str | int | float):
        return value
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
