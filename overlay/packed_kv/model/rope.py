"""Rotary position embedding (RoPE): how it turns the channels of a key, and its parameters in configs. Imports no torch
and no vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..json_file import shown
from .config_fields import text_config

Parameters = dict[str, Any]


class Rope(NamedTuple):
    """At position p the channel pair number c turns by `frequencies[c]` * p radians; channels beyond the pairs stay
    unchanged.

    `frequencies`: one per pair, from 0 to pi, scaled as the model scales them (YaRN, Llama 3). `interleaved`: whether
    pair c is the channels (2c, 2c + 1); else it is (c, c + n), with n pairs.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False

    def pairs(self) -> list[tuple[int, int]]:
        """The channels of each pair."""
        n = len(self.frequencies)
        return [(2 * c, 2 * c + 1) if self.interleaved else (c, c + n) for c in range(n)]


def average_length(frequency: float, positions: int) -> float:
    """Signed length of the mean of `positions` unit vectors, each turned by `frequency` radians from the one before;
    negative if the mean points away from the middle vector. A geometric series."""
    under = positions * math.sin(frequency / 2)
    return math.sin(positions * frequency / 2) / under if under else 1.0


DEFAULTS: Parameters = {"partial_rotary_factor": 1.0, "mrope_interleaved": False}
"""Values of fields that a config leaves out."""
FIELDS = (
    "rope_type", "rope_theta", *DEFAULTS, "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
    "short_factor", "long_factor", "alpha", "mixed_b", "rope_dim", "mrope_section",
)  # fmt: skip
"""RoPE parameters of a config that decide by what angle channels turn, and their scale afterwards."""
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
THETA = ("rope_theta", "rotary_emb_base")
LEGACY_TYPES = {"su": "longrope", "mrope": "default"}
VARYING = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on the length of a request: keys then get one mean for all positions."""


def rope_parameters(config: Any) -> dict[str, Parameters]:
    """Parameters of a model's RoPE by its config: fields of `FIELDS` by type of layer, "" where layers do not differ.

    Args:
        config: of transformers, or what its config.json holds: older names of fields count, too.

    Returns:
        numbers, texts, lists of numbers; empty: the model has none, or the config does not tell.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    config = text_config(config) if isinstance(config, dict) else config
    given = _field(config, "rope_parameters", "rope_scaling") or {}
    nested = {name: part for name, part in given.items() if isinstance(part, dict)}
    if nested:
        return {name: normalised(part, config) for name, part in nested.items()}
    if not given and _field(config, *THETA, "rotary_dim") is None:
        return {}
    if (local := _field(config, "rope_local_base_freq")) is not None:  # Gemma 3
        sliding = normalised({"rope_theta": local}, config)
        return {"full_attention": normalised(given, config), "sliding_attention": sliding}
    return {"": normalised(given, config)}


def longest_with_short_factors(ropes: Mapping[str, Parameters]) -> int | None:
    """Largest `max_model_len` with which vLLM turns keys by longrope's short factors; None: no RoPE is longrope
    with a length."""
    lengths = [
        rope.get("original_max_position_embeddings") for rope in ropes.values() if rope["rope_type"] == "longrope"
    ]
    return max((int(length) for length in lengths if isinstance(length, int | float) and length > 0), default=None)


def rope_in_words(parameters: Parameters) -> str:
    """Name the parameters that differ from their defaults."""
    return ", ".join(f"{name} {shown(value)}" for name, value in parameters.items() if value != DEFAULTS.get(name))


def normalised(given: Parameters, config: Any) -> Parameters:
    """RoPE parameters, with defaults, names and fields of the config as `rope_parameters` gives them. `config`: the
    fields beside the parameters, or {}."""
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = LEGACY_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    outside: Parameters = {"rope_theta": _field(config, *THETA), "partial_rotary_factor": _field(config, *PARTIAL)}
    if kind in ("llama3", "yarn", "longrope"):
        names = ("original_max_position_embeddings", "max_position_embeddings")
        outside["original_max_position_embeddings"] = _field(config, *names)
    if outside["partial_rotary_factor"] is None and (turned := _field(config, "rotary_dim")):
        hidden, heads = _field(config, "hidden_size", "n_embd"), _field(config, "num_attention_heads", "n_head")
        head_dim = _field(config, "head_dim") or (hidden // heads if hidden and heads else turned)
        outside["partial_rotary_factor"] = turned / head_dim
    found = {**DEFAULTS, "rope_theta": 10000.0, **_there(outside), **_there(given), "rope_type": kind}
    return {
        name: list(found[name]) if isinstance(found[name], tuple) else found[name] for name in FIELDS if name in found
    }


def _there(fields: Parameters) -> Parameters:
    return {name: value for name, value in fields.items() if value is not None}


def _field(config: Any, *names: str) -> Any:
    """The first field that is there and not None."""
    values = (config.get(name) if isinstance(config, dict) else getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)
