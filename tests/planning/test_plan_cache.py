"""`packed-kv plan`: KV tokens and requests are those that engines held, and states have vLLM's shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from coverage_models import MODELS
from packed_kv.model.config_fields import BadInput
from packed_kv.model.shape import parse
from packed_kv.planning import cache
from shape_8b import RESULTS, SHAPE_8B, rows
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator


def started_engines() -> Iterator[tuple[str, str, int]]:
    """Architecture, dtype and KV tokens of each engine that scripts/architectures/ started on an H200."""
    for row in json.loads((RESULTS / "models.json").read_text())["rows"]:
        is_packed = row.get("reason") != "no layer is packed"
        name, known = row["architecture"], (row["auto"], row["packed"] if is_packed else {})
        sizes = head_sizes(name)
        if sizes and sizes == row["auto"].get("head_sizes"):  # of one, the configuration has changed since
            yield from ((name, dtype, found["kv_tokens"]) for dtype, found in zip(("bf16", "tq4"), known, strict=True)
                        if "kv_tokens" in found)  # fmt: skip


def head_sizes(architecture: str) -> list[int]:
    try:
        return sorted({layer.head_size for layer in parse(MODELS[architecture], architecture).attention})
    except BadInput:
        return []


@pytest.mark.parametrize(("architecture", "dtype", "tokens"), list(started_engines()))
def test_kv_tokens_are_those_of_engines_on_an_h200(architecture: str, dtype: str, tokens: int) -> None:
    """The cache is 64 MB, the context 4,096; steps have 64 tokens, two at a time; there is no prefix cache."""
    parsed = parse(MODELS[architecture], architecture)
    serving = cache.Serving(4096, None, in_flight_tokens=2 * 64, keeps_prefixes=False)
    planned = cache.capacity(parsed, dtype, serving, 64 << 20)
    assert planned.tokens == pytest.approx(tokens, rel=0.02)


def test_there_are_engines_of_many_kinds() -> None:
    found = {architecture for architecture, _, _ in started_engines()}
    assert {"LlamaForCausalLM", "GptOssForCausalLM", "MistralForCausalLM", "JambaForCausalLM"} <= found
    assert len(found) > 25


def test_requests_are_those_that_a_measured_engine_held() -> None:
    """20 GB for the 8B shape at 8,192 + 256 tokens: benchmarks/results/release/throughput.csv."""
    for row in rows("release/throughput.csv"):
        serving = cache.Serving(int(row["input"]) + int(row["output"]), recent_tokens=64)
        dtype = "bf16" if row["dtype"] == "auto" else row["dtype"]
        shape = parse(SHAPE_8B, "8B")
        assert cache.capacity(shape, dtype, serving, int(row["kv_bytes"])).requests == int(row["fit"]), row


STATES = {
    "GraniteMoeHybridForCausalLM": 3 * 640 * 2 + 8 * 64 * 64 * 4,
    "FalconH1ForCausalLM": 3 * 640 * 2 + 8 * 64 * 64 * 4,
    "NemotronHForCausalLM": 3 * (512 + 2 * 2 * 64) * 2 + 8 * 64 * 64 * 4,
    "JambaForCausalLM": 3 * 512 * 2 + 512 * 16 * 4,
    "Qwen3NextForCausalLM": 3 * 512 * 2 + 4 * 64 * 64 * 4,
    "Lfm2ForCausalLM": 2 * 256 * 2,
}
"""Architecture of `coverage_models` -> bytes of a state: convolution (bfloat16) and recurrence (float32), in the shapes
that vLLM 0.32 builds."""


@pytest.mark.parametrize("architecture", STATES)
def test_states_have_vllms_shapes(architecture: str) -> None:
    found = parse(MODELS[architecture], architecture, recurrent_dtype="float32")
    assert {layer.state_bytes for layer in found.layers if layer.kind == "state"} == {STATES[architecture]}
    halved = parse(MODELS[architecture], architecture, ranks=2, recurrent_dtype="float32")
    group = (
        3 * 64 * 2 if MODELS[architecture].get("mamba_n_groups") == 1 else 0
    )  # which each rank has, half a one or not
    sizes = {layer.state_bytes for layer in halved.layers if layer.kind == "state"}
    assert sizes == {STATES[architecture] // 2 + group}


FULL = (4, 8, 12, 16, 20, 24, 27)
KIMI_LINEAR = {
    "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "vocab_size": 163840, "tie_word_embeddings": False, "model_max_length": 1048576,
    "linear_attn_config": {
        "full_attn_layers": [*FULL], "kda_layers": [n for n in range(1, 28) if n not in FULL], "num_heads": 32,
        "head_dim": 128, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
LING = {
    "model_type": "bailing_hybrid", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 10,
    "num_attention_heads": 8, "head_dim": 128, "layer_group_size": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 1024,
}  # fmt: skip
"""In the fields of Ling V2.5."""
ALICE = {
    "model_type": "alice_ai", "architectures": ["AliceAIForCausalLM"], "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024,
    "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
"""In the fields of AliceAI: Kimi's delta attention by the names of Qwen3-Next's."""
BESIDE_LATENTS = {
    "Kimi-Linear": (KIMI_LINEAR, FULL, 32, 4),
    "Ling V2.5": (LING, (4, 8), 8, 0),
    "Ling V3": ({**LING, "short_conv_kernel_size": 4}, (4, 8, 9, 10), 8, 4),
}
"""Config, layers of latents counted from 1, heads of 128 channels of the others, and tokens of a convolution there."""


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", BESIDE_LATENTS)
def test_states_beside_latents_have_vllms_shapes(name: str, ranks: int) -> None:
    """Kimi's delta attention, with fp32 states of its own, and Ling's linear attention."""
    config, full, heads, kernel = BESIDE_LATENTS[name]
    if kernel:
        shapes = MambaStateShapeCalculator.kda_state_shape(ranks, heads, 128, conv_kernel_size=kernel)
        dtypes = MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto")
    else:
        shapes = MambaStateShapeCalculator.linear_attention_state_shape(heads, ranks, 128)
        dtypes = MambaStateDtypeCalculator.linear_attention_state_dtype(torch.bfloat16, "auto")
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    found = parse(config, name, ranks)
    assert [layer.number + 1 for layer in found.layers if layer.rope_size == 64] == [*full]
    assert {layer.state_bytes for layer in found.layers if layer.kind == "state"} == {size}
    assert len(found.layers) == config["num_hidden_layers"]


def test_states_of_delta_attention_by_other_names() -> None:
    shapes = MambaStateShapeCalculator.kda_state_shape(2, 8, 128, conv_kernel_size=4)
    dtypes = MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto")
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    assert {layer.state_bytes for layer in parse(ALICE, "Alice", 2).layers} == {0, size}


def test_linear_attention_beside_softmax() -> None:
    """MiniMax-Text-01's layers; MiniMax-M2 has the same list, of ones."""
    config = {**SHAPE_8B, "attn_type_list": [1] * 36}
    assert {layer.kind for layer in parse(config, "M2").layers} == {"full"}
    with pytest.raises(BadInput, match="attn_type_list has layers of linear attention, as in MiniMax-Text-01"):
        parse({**config, "attn_type_list": [0, 1] * 18}, "Text-01")


@pytest.mark.parametrize(
    ("architecture", "every"),
    [("LlamaForCausalLM", True), ("JambaForCausalLM", False), ("Gemma3nForCausalLM", False)],
)
def test_layers_that_a_calibration_file_must_list(architecture: str, every: bool) -> None:
    """All, unless some are states or read the pages of others."""
    assert parse(MODELS[architecture], "model").calibrated_shape()["every_layer"] is every


@pytest.mark.parametrize(("dtype", "block"), [("bf16", 1920), ("fp8", 3840), ("tq4", 5504)])
def test_blocks_of_latents_hold_a_state(dtype: str, block: int) -> None:
    """Whole runs of 128 tokens, as vLLM enlarges them: 2.17 MB of a state of Kimi-Linear are 5,427.2 tokens of tq4."""
    specs = cache._specs(parse(KIMI_LINEAR, "Kimi-Linear"), dtype, cache.Serving(8192, recent_tokens=0))
    assert {spec.block_size for spec in specs if spec.kind == "full"} == {block}
    assert len({spec.page for spec in specs}) == 1
