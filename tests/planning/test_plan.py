"""`packed-kv plan`: its figures against those that engines and cards gave, and what it says of bad input."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from checkout import DEMO_MODEL, REPO
from coverage_models import MODELS
from huggingface_hub import errors
from packed_kv import private_file
from packed_kv.commands.plan import main
from packed_kv.formats import FORMATS
from packed_kv.model.config_fields import BadInput
from packed_kv.model.shape import bytes_per_token, parse
from packed_kv.planning import cache, cards, config_file, measured
from packed_kv.planning.plan import Demand, assumptions
from packed_kv.planning.plan import estimate as estimate_rows
from packed_kv.planning.weights import weights
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator

RESULTS = REPO / "benchmarks" / "results"
SHAPE_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 65536, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""The shape that benchmarks/bench_engine.py measures."""


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
    """Of 64 MB, at a context of 4,096 in steps of 64 tokens, two at a time, without a prefix cache."""
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


STEPS = ("release/decode.csv", "release/mixed.csv", *(f"release/h100/{name}.csv" for name in (
         "decode", "mixed", "tensor_parallel", "recent_window", "means")))  # fmt: skip


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def measured_steps() -> Iterator[tuple[str, dict[str, str]]]:
    """Every decode step of the 8B shape that is in the results, of the dtypes that have a share; but for those that
    varied by more than a quarter from p20 to p80, whose host was busy."""
    for name in STEPS:
        for row in rows(name):
            dtype = "bf16" if row["dtype"] == "auto" else row["dtype"]
            is_steady = float(row["p80_ms"]) <= 1.25 * float(row["p20_ms"])
            if dtype in measured.STEP["share"] and row.get("prompt", "0") == "0" and is_steady:
                yield name, {**row, "dtype": dtype}


def estimate(row: dict[str, str]) -> float:
    """Milliseconds of a row's step."""
    ranks = int(row.get("ranks") or 1)
    shape = parse(SHAPE_8B, "8B", ranks)
    recent = int(row.get("recent_tokens") or 64)
    serving = cache.Serving(int(row["context"]), recent)
    card = cards.find("H100" if "H100" in row["gpu"] else "H200")
    return 1e3 * measured.step_seconds(
        shape, row["dtype"], serving, weights(shape, None, None), int(row["requests"]), card
    )


def test_a_dtype_without_a_measured_share_has_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(measured.STEP["share"], "tq4")
    shape = parse(SHAPE_8B, "8B")
    demand = Demand(shape, cache.Serving(8192), weights(shape, None, None), cards.find("H200"), 20 << 30)
    steps = {row.dtype: row.step_ms for row in estimate_rows(demand)}
    assert steps.pop("tq4") is None and all(steps.values())
    assert "no step of tq4: not measured (planning/measured.json)" in assumptions(demand, [])


def test_steps_are_within_15_percent_of_all_that_was_measured() -> None:
    """Seven shapes, ten dtypes, an H200 or 1 to 4 H100s, with and without a window; the cells that the estimate was
    made of are few of them (next test)."""
    found = list(measured_steps())
    assert {name for name, _ in found} == set(STEPS)
    assert len(found) > 140
    for name, row in found:
        far = 0.15 if "H200" in row["gpu"] else 0.09  # as `packed-kv plan` says of an H100
        assert estimate(row) == pytest.approx(float(row["p50_ms"]), rel=far), (name, row)


def test_only_the_h100_of_the_table_reads_at_the_h200s_rates() -> None:
    """A bandwidth that is given counts, for bf16 and weights, too."""
    share, h200, h100 = measured.STEP["share"], cards.find("H200"), cards.find("H100")
    assert measured.rate("fp8", h100) == share["fp8"] * h200.bandwidth
    assert measured.rate("isoquant4", h100) == measured.rate("bf16", h100) == share["bf16"] * h100.bandwidth
    for name in ("H200", "H100"):
        for dtype in ("bf16", "fp8"):
            assert measured.rate(dtype, replace(cards.find(name), bandwidth=8e12)) == share[dtype] * 8e12


def test_a_step_reads_the_ring_beside_the_pages() -> None:
    """64 tokens of it, of 264 bytes a head of 128 channels (`layout.ring_slot_bytes`)."""
    row = {"dtype": "isoquant4", "requests": "32", "context": "8192", "gpu": "H200"}
    ring_ms = estimate({**row, "recent_tokens": "64"}) - estimate({**row, "recent_tokens": "0"})
    read = 32 * 36 * 8 * 64 * 264
    assert ring_ms == pytest.approx(1e3 * read / measured.rate("isoquant4", cards.find("H200")))


def test_the_estimate_gives_back_the_steps_that_it_is_made_of() -> None:
    """Those that benchmarks/plan_figures.py reads: the mean growth of a width's steps from 1,024 to 8,192 tokens,
    bf16's steps of 32 and 128 requests, and its step on two cards."""
    steps = {
        (row["dtype"], row["requests"], row["context"]): float(row["p50_ms"]) for row in rows("release/decode.csv")
    }
    case = {"ranks": "1", "recent_tokens": "0", "gpu": "H200", "requests": "32"}
    growths: dict[object, list[float]] = {}
    for dtype in measured.STEP["share"]:
        key = "auto" if dtype == "bf16" else dtype
        width = FORMATS[dtype].slot_bytes(128) if dtype in FORMATS else dtype
        growths.setdefault(width, []).append(steps[key, "32", "8192"] - steps[key, "32", "1024"])
    assert sorted(map(len, growths.values())) == [1, 1, 1, 1, 3, 3]
    for dtype in measured.STEP["share"]:
        short, long = (estimate({**case, "dtype": dtype, "context": context}) for context in ("1024", "8192"))
        width = FORMATS[dtype].slot_bytes(128) if dtype in FORMATS else dtype
        assert long - short == pytest.approx(mean(growths[width]), rel=1e-3), dtype
    for requests, context in (("32", "8192"), ("128", "2048")):
        found = estimate({**case, "dtype": "bf16", "requests": requests, "context": context})
        assert found == pytest.approx(steps["auto", requests, context], rel=1e-3)
    two = next(
        row for row in rows("release/h100/tensor_parallel.csv") if (row["dtype"], row["requests"]) == ("auto", "1")
    )
    assert estimate({**two, "dtype": "bf16"}) == pytest.approx(float(two["p50_ms"]), rel=1e-3)


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


@pytest.fixture
def shape_8b(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE_8B))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_recommendation_follows_the_target(shape_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    card = (shape_8b, "--gpu", "h100 80gb", "--context", "32k")
    few, some, many, none = (plan(capsys, *card, "--users", users) for users in ("4", "40", "46", "400"))
    assert few["recommendation"].startswith("bf16: ")
    assert some["recommendation"].startswith("tq4, calibrated: ")
    assert many["recommendation"].startswith("turboquant35, calibrated: ")
    assert none["recommendation"].startswith("none: turboquant25 holds the most")
    held = {row["dtype"]: row["requests"] for row in many["dtypes"]}
    assert held["tq4"] < 46 <= held["turboquant35"]
    assert plan(capsys, *card)["recommendation"].startswith("turboquant35, calibrated: the most requests")


def test_bf16_suffices_where_it_holds_what_vllm_serves_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --users; 256 requests, on a card of 70 GiB and more 1,024."""
    for card, at_once in (["--gpu", "L4"], "256"), (["--gpu", "H100"], "1,024"), (["--gpu", "A100"], "256"):
        found = plan(capsys, str(DEMO_MODEL), *card)
        held = next(row["requests"] for row in found["dtypes"] if row["dtype"] == "bf16")
        assert found["recommendation"] == (
            f"bf16: it suffices, as it holds {held:,} requests of 2,048 tokens, and vLLM serves {at_once} at once "
            "(--max-num-seqs; if you serve more, give --users)."
        )
    assert "it suffices" not in plan(capsys, str(DEMO_MODEL), "--kv-cache-memory", "100MB")["recommendation"]


def test_the_hub_that_does_not_answer_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library would try six times, waiting in between, with two lines each."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    started = time.monotonic()
    assert main(["nobody/nothing", "--gpu", "H200"]) == 2
    assert time.monotonic() - started < config_file.PATIENCE + 5
    error = capfd.readouterr().err
    assert error.endswith("(it does not answer); give the folder of a model, or its config.json\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GatedRepoError", "(who reads it must have accepted its terms there, and run: hf auth login)"),
        ("RepositoryNotFoundError", "(there is none, or it is private; then run: hf auth login)"),
    ],
)
def test_models_that_the_hub_does_not_give(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(*_args: object, **_options: object) -> None:
        response = SimpleNamespace(headers={}, request=None)
        raise getattr(errors, name)("401 Client Error. (Request ID: 1)", response=response)

    monkeypatch.setattr(config_file, "_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert main(["nobody/nothing", "--gpu", "H200"]) == 2
    assert f"{said}; give the folder of a model" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError("Too Many Requests"), ValueError("no"), errors.EntryNotFoundError("no")])
def test_an_optional_file_that_the_hub_does_not_give(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is asked once whether it answers."""
    probes: list[None] = []

    def download(name: str, file: str, local_files_only: bool) -> str:
        assert name == "some/model" and not local_files_only
        if file != "config.json":
            raise error
        return str(DEMO_MODEL / file)

    monkeypatch.setattr(config_file, "_answers", lambda: not probes.append(None))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    config, _ = config_file.load("some/model")
    assert config["model_type"] and "quantization_config" not in config and len(probes) == 1


def test_arguments_change_what_they_say(shape_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    card = (shape_8b, "--gpu", "L40S", "--context", "8k", "--users", "8")

    def of(dtype: str, *more: str) -> dict:
        return next(row for row in plan(capsys, *card, *more)["dtypes"] if row["dtype"] == dtype)

    plain = of("tq4")
    assert of("tq4", "--weights", "fp8")["requests"] > plain["requests"]
    assert of("tq4", "--recent-tokens", "0")["kv_tokens"] > plain["kv_tokens"]
    assert of("tq4", "--recent-tokens", "0")["kl"] > plain["kl"]
    assert of("tq4", "--skip-layers", "0", "1")["bytes_per_token"] == plain["bytes_per_token"] + 2 * (4096 - 1088)
    assert of("tq4", "--skip-layers", "0", "1")["recent_tokens"] == 64
    assert of("tq4", "--tensor-parallel", "2")["bytes_per_token"] == plain["bytes_per_token"] // 2
    assert of("tq4", "--tensor-parallel", "2")["step_ms"] < plain["step_ms"]
    assert of("bf16", "--kv-cache-memory", "10GB")["kv_tokens"] == int(10e9 // (16 * 147456)) * 16


@pytest.mark.parametrize(("context", "recent"), [("32", 64), ("4k", 4096)])
def test_a_window_is_bound_by_what_the_engine_serves(context: str, recent: int, capsys) -> None:
    """By the model's 2,048 tokens or a longer context, not by a request's tokens, of which the window has no more."""
    found = plan(capsys, str(DEMO_MODEL), "--gpu", "H200", "--context", context, "--recent-tokens", str(recent))
    (held,) = {row["recent_tokens"] for row in found["dtypes"] if row["dtype"] in FORMATS}
    assert held == min(recent, found["context"])


def test_what_was_assumed_stands_under_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DEMO_MODEL), "--gpu", "L4"]) == 0
    text = capsys.readouterr().out
    for said in (
        "--context 2,048 assumed",
        "3 GiB assumed",
        "0.92 of 22.5 GiB",
        "by the config",
        "on L4: not measured",
    ):
        assert said in text
    for more, said in ([], "within 9 % of those measured"), (["--bandwidth", "2"], "on H100: not measured"):
        assert main([str(DEMO_MODEL), "--gpu", "H100", *more]) == 0
        assert said in capsys.readouterr().out
    assert main([str(DEMO_MODEL), "--gpu-memory", "24GiB", "--context", "1k"]) == 0
    text = capsys.readouterr().out
    assert "--context" not in text
    assert "no step: the bandwidth of the card is not known (--bandwidth)" in text


def test_skipped_layers_that_would_blow_up_the_pages_are_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Gemma3ForCausalLM"]))
    assert main([str(tmp_path), "--gpu", "L4", "--skip-layers", "0"]) == 0
    text = capsys.readouterr().out
    said = "isoquant4, planarquant4, tq4 would not start: a packed --kv-cache-dtype cannot serve these skipped layers: "
    assert f"{said}--kv-cache-dtype-skip-layers 0" in " ".join(text.split())
    assert "layers of several kinds share pages of one size" in " ".join(text.split())


GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154880, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 202752,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def test_latent_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same vector on each rank; a ring of ten blocks of eight tokens; the KL of a model with latents, and no step
    that was measured on other models."""
    (tmp_path / "config.json").write_text(json.dumps(GLM_4_7_FLASH))
    command = [str(tmp_path), "--gpu", "H200", "--tensor-parallel", "2", "--context", "8k"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = {row["dtype"]: row for row in plan["dtypes"]}
    sizes = {"bf16": 1152, "fp8": 576, "tq4": 400, "tq3": 336, "turboquant35": 352, "turboquant25": 288}
    assert {name: found[name]["bytes_per_token"] for name in sizes} == {name: 47 * n for name, n in sizes.items()}
    packed = found["tq4"]["kv_tokens"] * (8192 // 16 + 10) / (8192 // 16)
    assert packed == pytest.approx(2.88 * found["bf16"]["kv_tokens"], rel=2e-3)
    assert {row["step_ms"] for row in found.values()} == {None}
    assert all(row["recent_tokens"] == 64 * (name in FORMATS) for name, row in found.items())
    assert (found["tq4"]["kl"], found["tq4"]["kl_uncalibrated"], found["fp8"]["kl"]) == (0.06, 0.08, 1)
    assert plan["recommendation"].startswith("turboquant25, calibrated: the most requests of 8,192 tokens")
    assert any("mla-demo, a small model" in line for line in plan["assumed"])
    assert main([*command, "--json", "--latent-rope-bits", "8", "--recent-tokens", "0"]) == 0
    plan = json.loads(capsys.readouterr().out)
    of_8 = {row["dtype"]: row for row in plan["dtypes"]}
    assert of_8["tq4"]["bytes_per_token"] == 47 * 338 and of_8["tq4"]["kl"] == 0.26
    assert of_8["tq4"]["kv_tokens"] == pytest.approx(3.41 * of_8["bf16"]["kv_tokens"], rel=1e-3)
    assert of_8["bf16"] == found["bf16"]
    assert any("64 of RoPE at 8 bits" in line for line in plan["assumed"])
    assert main([*command, "--skip-layers", "0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "?" not in text
    assert "47 layers of latents of 512 channels and 64 of RoPE" in text
    assert "a packed dtype keeps 0.20 GiB of folded weights per card" in text
    assert "cannot serve latent attention (MLA) with skipped layers: 0, whose" in text


def test_kl_of_latents_is_that_of_the_rows() -> None:
    """In units of fp8's, which no file changes."""
    for file, window in (("latent_quality.csv", ""), ("latent_window.csv", "-window64")):
        found = {(row["coding"], row["calibrated"]): float(row["kl"]) for row in rows(file)}
        for bits, rope in ((16, ""), (8, "-rope8")):
            for calibrated, state in ((True, "yes"), (False, "no")):
                known = partial(measured.kl, has_window=bool(window), calibrated=calibrated, rope_bits=bits)
                for dtype in FORMATS:
                    expected = round(found[dtype + window + rope, state] / found["fp8", "yes"], 2)
                    assert known(dtype) == expected, (dtype, window, bits, state)
                assert (known("fp8"), known("bf16")) == (1, 0)


def test_bits_of_rope_need_latents(shape_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shape_8b, "--gpu", "H200", "--latent-rope-bits", "8"]) == 2
    assert "has no latent attention (MLA), and so no RoPE channels of 8 bits" in capsys.readouterr().err


def test_plot(shape_8b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name in "plan.png", "plan", "plan.jpeg":
        assert main([shape_8b, "--gpu", "H200", "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "fifo")
    cases = {
        tmp_path / "no" / "plan.png": "cannot be written; name a file in a folder that is there",
        tmp_path / "folder.png": "is a folder; name a file, such as plan.png",
        tmp_path / "fifo": "is not a regular file; name a file, such as plan.png",
    }
    capsys.readouterr()
    for file, said in cases.items():
        assert main([shape_8b, "--gpu", "H200", "--plot", str(file)]) == 2
        shown = capsys.readouterr()
        assert f"--plot {file} {said}" in shown.err and not shown.out


def test_a_plot_needs_matplotlib(shape_8b: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([shape_8b, "--gpu", "H200", "--plot", "plan.png"]) == 2
    shown = capsys.readouterr()
    assert "--plot needs matplotlib" in shown.err and not shown.out


def test_a_file_that_is_not_ours_to_write(
    shape_8b: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Whoever runs the tests may write everything."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(private_file, "_make_file", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert main([shape_8b, "--gpu", "H200", "--plot", str(tmp_path / "plan.png")]) == 2
    assert f"{tmp_path} cannot be written to (Permission denied)" in capsys.readouterr().err


BAD_CONFIGS = {
    "no attention": ({**SHAPE_8B, "model_type": "mamba2"}, "has no attention layers"),
    "not a model": ({"a": 1}, "has no attention that its config describes"),
    "MLA": (
        {**SHAPE_8B, "kv_lora_rank": 512},
        "cannot serve latent attention (MLA) of this size: 512 channels and 0",
    ),
    "encoder": ({**SHAPE_8B, "is_encoder_decoder": True}, "cannot serve encoders: encoder_decoder attention"),
    "head size": (
        {**SHAPE_8B, "head_dim": 72},
        "cannot serve this head size: 72 channels, and packed pages need",
    ),
    "K and V": ({**SHAPE_8B, "v_head_dim": 192}, "cannot serve this head size of V: V of 192 channels with K of 128"),
    "size of V": (
        {**SHAPE_8B, "v_head_dim": 72},
        "V of 72 channels with K of 128; V may have",
    ),
    "Falcon": ({**SHAPE_8B, "architectures": ["FalconForCausalLM"]}, "FalconForCausalLM, whose pages would stay dense"),
    "kinds": ({**SHAPE_8B, "layer_types": ["full_attention"]}, "layer_types has 1 entries, but the model has 36"),
    "kind": ({**SHAPE_8B, "layer_types": ["odd"] * 36}, "layers of the kind odd are not known"),
    "picks": ({**SHAPE_8B, "layer_types": ["sparse"] * 36}, "layers of the kind sparse are not known"),
    "state": ({**SHAPE_8B, "layer_types": ["mamba", "attention"] * 18}, "whose size is not known"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_cannot_be_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = BAD_CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(tmp_path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("packed-kv plan: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("/no/such/model", "--gpu", "H200"),
            "/no/such/model is neither a folder nor a file; give the folder of a model",
        ),
        (
            ("nobody/nothing", "--gpu", "H200"),
            "nobody/nothing is neither a folder nor a file, and its config.json cannot be fetched",
        ),
        ((str(DEMO_MODEL),), "no card is named; give --gpu NAME (one of B300, B200"),
        (("{falcon}",), "cannot serve models that do not pass cache_config to their attention layers"),
        ((str(DEMO_MODEL), "--gpu", "H300"), "--gpu H300 is not known; known: B300, B200"),
        (
            ("{8b}", "--gpu", "L4", "--weights", "30GiB"),
            "30.0 GiB of weights per card (as given) and 3 GiB for the rest",
        ),
        (("{8b}", "--gpu-memory", "12GiB"), "give a larger --gpu, --tensor-parallel N or --weights fp8"),
        (("{8b}", "--gpu", "H200", "--tensor-parallel", "5"), "--tensor-parallel 5 does not divide the 32"),
        (("{8b}", "--gpu", "H200", "--skip-layers", "40"), "--skip-layers 40: no attention layer of"),
        (
            ("{8b}", "--gpu", "H200", "--context", "1k", "--recent-tokens", "65537"),
            "--recent-tokens 65,537 is more than the model's context of 65,536 tokens; give 0 to 65,536",
        ),
        (
            ("{mistral}", "--gpu", "H200", "--recent-tokens", "4097"),
            "--recent-tokens 4,097 is more than the sliding window of 4,096 tokens; give 0 to 4,096",
        ),
        (("{8b}", "--gpu", "H200", "--skip-layers", "0,1"), "expected a whole number, got '0,1'"),
        (("{8b}", "--gpu", "H200", "--skip-layers", "model.layers.0"), "a whole number, got 'model.layers.0'"),
        (
            ("{8b}", "--gpu", "H200", "--gpu-memory-utilization", "2"),
            "--gpu-memory-utilization 2 must be between 0 and 1",
        ),
        (("{8b}", "--gpu", "H200", "--context", "long"), "expected a number of tokens, such as 32k, got 'long'"),
        (("{8b}", "--gpu-memory", "80 bananas"), "expected a size, such as 80GiB, got '80 bananas'"),
        (("{8b}", "--gpu-memory", "80"), "expected a size of 1MiB or more, such as 80GiB, got '80': 80 bytes"),
        (("{8b}", "--gpu", "H200", "--kv-cache-memory", "20"), "1MiB or more, such as 80GiB, got '20': 20 bytes"),
        (
            ("{8b}", "--gpu", "L4", "--kv-cache-memory", "80GiB"),
            "--kv-cache-memory 80.0 GiB is more than the card's 22.5 GiB; give what one card has",
        ),
        (("{8b}", "--gpu", "H200", "--users", "0"), "expected a whole number of at least 1, got '0'"),
        (("{8b}", "--gpu", "H200", "--weights", "fp7"), "expected a size, such as 80GiB, got 'fp7'"),
    ],
)
def test_bad_input_is_one_line(
    arguments, said: str, shape_8b: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be served is refused before what else is missing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    falcon = {**json.loads((DEMO_MODEL / "config.json").read_text()), "architectures": ["FalconForCausalLM"]}
    paths = {"8b": shape_8b, "falcon": str(tmp_path / "falcon.json"), "mistral": str(tmp_path / "mistral.json")}
    for name, config in (("falcon", falcon), ("mistral", {**SHAPE_8B, "sliding_window": 4096})):
        Path(paths[name]).write_text(json.dumps(config))
    try:
        code = main([argument.format(**paths) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("packed-kv plan: ") and error.count("\n") == 1


def test_kv_heads_that_ranks_do_not_share() -> None:
    """Llama-3.2-3B on three cards: vLLM asserts that one number divides the other."""
    config = {**SHAPE_8B, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}
    with pytest.raises(BadInput, match="--tensor-parallel 3 neither divides the 8 KV heads of 3B nor is a multiple"):
        parse(config, "3B", ranks=3)
    assert {layer.kv_heads for layer in parse({**config, "num_key_value_heads": 4}, "3B", ranks=8).layers} == {1}


def test_a_config_in_float32_is_served_in_bf16() -> None:
    plain, wide = ({**SHAPE_8B, "torch_dtype": dtype} for dtype in ("bfloat16", "float32"))
    bf16, found = parse(plain, "8B"), parse(wide, "8B")
    assert [bytes_per_token([(layer, "bf16") for layer in model.layers]) for model in (found, bf16)] == [147456] * 2
    assert weights(found, None, None).total == weights(bf16, None, None).total


def test_an_empty_list_of_layers_without_rope_is_the_default() -> None:
    """As in Llama 4 Scout's config: every fourth layer has no RoPE and attends to everything."""
    config = {**SHAPE_8B, "attention_chunk_size": 8192, "no_rope_layers": []}
    kinds = [layer.kind for layer in parse(config, "Scout").layers]
    assert kinds == ["full" if (number + 1) % 4 == 0 else "chunked" for number in range(36)]


@pytest.mark.parametrize("size", [1_508_000_000_000, 1.6e10])
def test_weights_by_an_index(size: float, tmp_path: Path) -> None:
    """GLM-5's in bf16 are more than a terabyte; some tools write a float."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}}))
    assert weights(parse(SHAPE_8B, "8B"), None, tmp_path).total == size


def test_weights_that_an_index_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": -1}}')
    with pytest.raises(BadInput, match=r"index.json: total_size is -1, and no number of bytes; give --weights SIZE"):
        weights(parse(SHAPE_8B, "8B"), None, tmp_path)
