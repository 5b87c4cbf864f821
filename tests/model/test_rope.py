"""A config's RoPE is read whichever names its fields have, and what changes it is said."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packed_kv.model.rope import Rope, longest_with_short_factors, rope_parameters

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_interleaved": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8192}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"model_type": "gpt2"}, {}),
    "theta": ({"rope_theta": 5e5}, {"": {"rope_theta": 5e5}}),
    "older_theta": (
        {"rotary_emb_base": 1e6, "rotary_pct": 0.25},
        {"": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ),
    "partial": ({"rope_theta": 10000, "partial_rotary_factor": 0.5}, {"": {"partial_rotary_factor": 0.5}}),
    "dimension": ({"rotary_dim": 8}, {"": {"partial_rotary_factor": 0.5}}),
    "scaling": ({"rope_theta": 1e4, "rope_scaling": YARN | {"beta_fast": None}}, {"": YARN}),
    "older_type": ({"rope_scaling": {"type": "mrope", "mrope_section": (1, 2)}}, {"": {"mrope_section": [1, 2]}}),
    "length": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"": YARN | {"original_max_position_embeddings": 8192}},
    ),
    "parameters": ({"rope_parameters": {**YARN, "rope_theta": 2e4}}, {"": YARN | {"rope_theta": 2e4}}),
    "text": ({"text_config": {"rope_theta": 3e4}}, {"": {"rope_theta": 3e4}}),
    "by_layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}},
    ),
    "gemma3": (
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, "sliding_attention": {}},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_a_config(name: str) -> None:
    config, expected = CONFIGS[name]
    assert rope_parameters({**SHAPE, **config}) == {kind: DEFAULT | fields for kind, fields in expected.items()}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(rope_parameters={**YARN, "rope_theta": 5e5}, max_position_embeddings=8192),
        transformers.Gemma3TextConfig(),
        transformers.GPTNeoXConfig(),
        transformers.GPTJConfig(),
        transformers.Qwen2VLConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_objects_and_files_agree(config: transformers.PretrainedConfig) -> None:
    found = rope_parameters(config)
    assert found and found == rope_parameters(config.to_dict())


def test_pairs() -> None:
    assert Rope((1.0, 0.1, 0.0)).pairs() == [(0, 3), (1, 4), (2, 5)]
    assert Rope((1.0, 0.1, 0.0), interleaved=True).pairs() == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"original_max_position_embeddings": 64, "max_position_embeddings": 512}, 64),
        ({"max_position_embeddings": 512}, 512),
        ({}, None),
        ({"original_max_position_embeddings": "64"}, None),
        ({"original_max_position_embeddings": 0}, None),
    ],
)
def test_the_longest_context_with_short_factors(fields: dict[str, Any], longest: int | None) -> None:
    """Of longrope; None where a config has no length, or one that is no number."""
    ropes = rope_parameters({"rope_scaling": {"type": "longrope"}, **fields})
    assert longest_with_short_factors(ropes) == longest
