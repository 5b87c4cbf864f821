"""The plan of models of sparse attention over latents: rows, index keys, and figures against vLLM's fp8_ds_mla."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packed_kv.commands import plan
from packed_kv.formats import FORMATS
from packed_kv.model.config_fields import BadInput
from packed_kv.model.shape import DENSE, FP8, index_bytes, parse
from packed_kv.planning.cache import Serving, bytes_per_token, capacity, check_window, recent_window
from packed_kv.refusals.table import refusals_of_model

LATENTS = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536, "v_head_dim": 128, "index_topk": 2048,
    "index_head_dim": 128, "max_position_embeddings": 163840,
}  # fmt: skip
V32 = {
    **LATENTS, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "num_hidden_layers": 61,
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "qk_nope_head_dim": 128,
    "vocab_size": 129280, "n_routed_experts": 256, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "n_shared_experts": 1, "num_experts_per_tok": 8,
}  # fmt: skip
GLM = {
    **V32, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 78,
    "hidden_size": 6144, "num_attention_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "index_topk_freq": 4, "index_skip_topk_offset": 3,
}  # fmt: skip
"""GLM-5.2: its first three layers have an indexer, then every fourth."""
HY4 = {
    **LATENTS, "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "num_hidden_layers": 34,
    "hidden_size": 2816, "intermediate_size": 6912, "num_attention_heads": 32, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "vocab_size": 120832, "n_routed_experts": 256, "moe_intermediate_size": 768,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "layer_types": ["deepseek_sparse_attention"] * 34,
}  # fmt: skip
"""Hy4: an indexer in its first two layers, then in every fourth."""
SERVING, MEMORY = Serving(32768, in_flight_tokens=16384), 45 * 10**9
FIGURES = [("tq4", 16, 1.48, 1.59, 1.58), ("tq4", 8, 1.63, 1.78, 1.78), ("tq3", 8, 1.88, 2.14, 2.13)]
"""Dtype, bits of RoPE, and tokens in times fp8_ds_mla's, of V3.2, GLM-5.2 and Hy4."""


def shape(config: dict[str, Any], rope_bits: int = 16):
    return parse(config, "model", ranks=8).with_rope_bits(rope_bits)


def test_index_sharing() -> None:
    assert [index_bytes(V32, i) for i in range(61)] == [132] * 61
    with_keys = [i for i in range(78) if index_bytes(GLM, i)]
    assert with_keys == [0, 1, 2, *range(6, 78, 4)] and len(with_keys) == 21
    assert [index_bytes({"index_topk_pattern": "FSSF"}, i) for i in range(5)] == [132, 0, 0, 132, 132]
    assert [i for i in range(34) if index_bytes(HY4, i)] == [0, *range(1, 34, 4)]
    types = {**HY4, "indexer_types": ["full", *["shared"] * 33]}
    assert [i for i in range(34) if index_bytes(types, i)] == [0]


@pytest.mark.parametrize(("dtype", "rope_bits", "of_v32", "of_glm", "of_hy4"), FIGURES)
def test_tokens_against_fp8(dtype: str, rope_bits: int, of_v32: float, of_glm: float, of_hy4: float) -> None:
    for config, figure in ((V32, of_v32), (GLM, of_glm), (HY4, of_hy4)):
        model = shape(config, rope_bits)
        stored, of_fp8 = (bytes_per_token(model, name, SERVING) for name in (dtype, FP8))
        assert of_fp8 / stored == pytest.approx(figure, rel=0.005)
        tokens, fp8_tokens = (capacity(model, name, SERVING, MEMORY).tokens for name in (dtype, FP8))
        assert tokens / fp8_tokens == pytest.approx(figure, rel=0.01)
        assert tokens == pytest.approx(MEMORY / stored, rel=0.01)


def test_bytes_of_a_token() -> None:
    model = shape(V32)
    row = FORMATS["tq4"].latent_bytes(512, 64)
    found = [bytes_per_token(model, name, SERVING) for name in (DENSE, FP8, "tq4")]
    assert found == [61 * (size + 132) for size in (1152, 656, row)]
    assert recent_window(model, "tq4", SERVING)[1].startswith("sparse attention (its layers read picked tokens")


@pytest.mark.parametrize(("config", "indexers"), [(V32, 61), (GLM, 21), (HY4, 10)], ids=["V3.2", "GLM-5.2", "Hy4"])
def test_plan_says_it(
    config: dict, indexers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "installed_vllm", lambda: "0.33.0")
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--gpu", "H200", "--tensor-parallel", "8", "--weights", "fp8"]
    assert plan.main([str(tmp_path), *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"index keys of 132 bytes a token in {indexers} of {config['num_hidden_layers']} layers" in said
    assert "blocks of 64 tokens" in said and "attention of decodes: beside fp8_ds_mla's by query heads" in said


@pytest.mark.parametrize(("version", "is_refused"), [("0.32.0", True), ("0.33.0", False), ("0.32.0+cpu", False)])
def test_versions(version: str, is_refused: bool) -> None:
    refused = [refusal.sentence("tq4") for refusal in refusals_of_model(V32, shape(V32), version)]
    assert refused == [] if not is_refused else "sparse attention with this vLLM: 0.32.0, whose" in refused[0]


def test_sizes() -> None:
    for changed in ({"kv_lora_rank": 256}, {"qk_rope_head_dim": 32}):
        (refused,) = refusals_of_model({**V32, **changed})
        assert "sparse attention over latents of this size" in refused.sentence("tq4")


def test_sinks() -> None:
    """Hy4 is planned where all of its layers pick tokens. Layers of which its config says nothing are dense to vLLM."""
    assert refusals_of_model(HY4, shape(HY4), "0.33.0") == []
    row = FORMATS["tq4"].latent_bytes(512, 64)
    found = [bytes_per_token(shape(HY4), name, SERVING) for name in (FP8, "tq4")]
    assert found == [34 * size + 10 * 132 for size in (656, row)]
    for types in ([*HY4["layer_types"][:-1], "full_attention"], None):
        (refused,) = refusals_of_model({**HY4, "layer_types": types})
        assert "dense latent attention (MLA) with attention sinks: HYV4ForCausalLM" in refused.sentence("tq4")


def test_a_recent_window_is_refused_as_an_engine_refuses_it() -> None:
    for tokens in (None, 0):
        check_window(shape(V32), replace(SERVING, recent_tokens=tokens))
    with pytest.raises(BadInput, match=r"--recent-tokens 64 is not possible with sparse attention \(.*\); give 0"):
        check_window(shape(V32), replace(SERVING, recent_tokens=64))
