"""`packed-kv plan`: weights are the parameters of published models, of a folder, and of an index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout import DEMO_MODEL
from packed_kv.model.config_fields import BadInput
from packed_kv.model.shape import parse
from packed_kv.planning import config_file
from packed_kv.planning.weights import weights
from shape_8b import SHAPE_8B
from test_plan_cache import KIMI_LINEAR


def test_weights_of_the_8b_shape() -> None:
    """16.2 GB, of which a step reads all but the input embedding (README: 16.0 GB)."""
    shape = parse(SHAPE_8B, "8B")
    found = weights(shape, None, None)
    assert found.total == pytest.approx(2 * 8.11e9, rel=0.01)
    assert found.read(1) == pytest.approx(16.0e9, rel=0.01)
    assert weights(shape, "fp8", None).total == pytest.approx(found.total / 2, rel=0.05)


PUBLISHED = {
    "Llama 3.1 8B": (8.03e9, {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    }),
    "Mixtral 8x7B": (46.7e9, {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    }),
    "gpt-oss 20B": (20.9e9, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False,
    }),
    "Gemma 3 27B": (27.0e9, {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    }),
    "Qwen3-Next 80B": (80e9, {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "tie_word_embeddings": False,
    }),
    "Kimi-Linear 48B-A3B": (49e9, KIMI_LINEAR),
    "MiMo-V2-Flash": (309e9, {
        "model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "sliding_window": 128, "hybrid_layer_pattern": [0 if i in (0, *range(5, 48, 6)) else 1 for i in range(48)],
        "vocab_size": 152576, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "moe_layer_freq": [0] + [1] * 47, "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""Model -> parameters as published, and what its config says of them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_the_published_parameters(name: str) -> None:
    parameters, config = PUBLISHED[name]
    assert weights(parse(config, name), "bf16", None).total == pytest.approx(2 * parameters, rel=0.01)


def test_weights_of_a_folder_are_what_its_file_holds() -> None:
    config, folder = config_file.load(str(DEMO_MODEL))
    size = (DEMO_MODEL / "model.safetensors").stat().st_size
    assert weights(parse(config, "demo"), None, folder).total == pytest.approx(size, rel=0.01)


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    experts = {**SHAPE_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    found = weights(parse(experts, "8x"), None, None)
    assert found.read(1) == pytest.approx(found.dense + found.experts / 4)
    assert found.read(64) == pytest.approx(found.dense + found.experts, rel=0.01)


@pytest.mark.parametrize("size", [1_508_000_000_000, 1.6e10])
def test_weights_by_an_index(size: float, tmp_path: Path) -> None:
    """GLM-5's in bf16 are more than a terabyte; some tools write a float."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}}))
    assert weights(parse(SHAPE_8B, "8B"), None, tmp_path).total == size


def test_weights_that_an_index_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": -1}}')
    with pytest.raises(BadInput, match=r"index.json: total_size is -1, and no number of bytes; give --weights SIZE"):
        weights(parse(SHAPE_8B, "8B"), None, tmp_path)
