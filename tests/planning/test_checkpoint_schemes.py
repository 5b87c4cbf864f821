"""A checkpoint's quantization_config, of its weights and of its KV cache, is read as `auto` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import DEMO_MODEL
from packed_kv.commands.plan import main
from packed_kv.engine import registration
from packed_kv.model.cache_scheme import asked_cache, describe_cache_scheme
from packed_kv.model.shape import parse
from packed_kv.planning.weights import weights
from packed_kv.settings.facts import auto_cache
from shape_8b import SHAPE_8B
from vllm.engine.arg_utils import EngineArgs

FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": FP8_SCHEME,
}  # fmt: skip
WEIGHTS = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
ACTIVATIONS = {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8}}
ATTENTION = {"targets": ["LlamaAttention"], "weights": {"num_bits": 8}}
BY_QUARK = {"quant_method": "quark", "kv_cache_group": ["*k_proj"], "layer_quant_config": {"*k_proj": {"weight": None}}}
QUARK_FP8 = {"weight": {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor"}}
BY_LAYER = {f"model.layers.{layer}.self_attn": {"quant_algo": "FP8" if layer < 20 else "NVFP4"} for layer in range(36)}
MIXED = {"kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": BY_LAYER}
SCHEMES = {
    "cache alone": (LLM_COMPRESSOR, 16, "fp8"),
    "no groups": ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}, 16, "fp8"),
    "groups of attention": ({**LLM_COMPRESSOR, "config_groups": {"group_0": ATTENTION}}, 16, "fp8"),
    "activations alone": ({**LLM_COMPRESSOR, "config_groups": {"group_0": ACTIVATIONS}}, 16, "fp8"),
    "cache and weights": ({**LLM_COMPRESSOR, "config_groups": {"g": ATTENTION, "h": WEIGHTS}}, 4.25, "fp8"),
    "weights alone": ({"quant_method": "compressed-tensors", "config_groups": {"g": WEIGHTS}}, 4.25, ""),
    "ModelOpt, cache alone": ({"quant_method": "modelopt", "kv_cache_scheme": FP8_SCHEME}, 16, "fp8"),
    "ModelOpt, both": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 8, "fp8"),
    "ModelOpt, inside": (
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}},
        4.25,
        "nvfp4",
    ),
    "ModelOpt, weights": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, 8, ""),
    "Quark, cache alone": ({**BY_QUARK, "global_quant_config": {"weight": None}}, 16, ""),
    "Quark, both": (
        {**BY_QUARK, "layer_quant_config": {"*k_proj": QUARK_FP8}, "global_quant_config": QUARK_FP8},
        8,
        "",
    ),
    "ModelOpt, cache by layer": ({"quant_method": "modelopt", **MIXED}, 16, ""),
    "ModelOpt, cache by layer and weights": ({"quant_method": "modelopt", "quant_algo": "FP8", **MIXED}, 8, ""),
    "ModelOpt, layers of the cache alone": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}, **MIXED},
        16,
        "",
    ),
    "fp8": ({"quant_method": "fp8"}, 8, ""),
    "gptq": ({"quant_method": "gptq", "bits": 4}, 4.25, ""),
}
"""Scheme -> `quantization_config`, bits of a number in a linear layer, dtype of the cache that `auto` would be."""


@pytest.mark.parametrize("name", SCHEMES)
def test_bits_of_weights(name: str) -> None:
    quantization, bits, _ = SCHEMES[name]
    shape = parse({**SHAPE_8B, "quantization_config": quantization}, "8B")
    plain = weights(parse(SHAPE_8B, "8B"), None, None)
    tables = 2 * SHAPE_8B["vocab_size"] * SHAPE_8B["hidden_size"] * 2
    assert weights(shape, None, None).total == pytest.approx((plain.total - tables) * bits / 16 + tables)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_dtype_of_auto_is_vllms(name: str) -> None:
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    quantization, _, asked = SCHEMES[name]
    assert asked_cache(quantization) == asked
    if quantization["quant_method"] != "compressed-tensors":  # which attention layers read in vLLM 0.32.0
        model = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=quantization))
        resolved = resolve_kv_cache_dtype_string("auto", model)
        assert {"auto": "", "fp8_e4m3": "fp8"}.get(resolved, resolved) == asked


def test_the_plan_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "asks for an fp8 KV cache, which --kv-cache-dtype auto would be"
    for quantization, expected in (LLM_COMPRESSOR, True), ({"quant_method": "fp8"}, False):
        config = {**SHAPE_8B, "quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main([str(tmp_path), "--gpu", "H200"]) == 0
        assert (said in " ".join(capsys.readouterr().out.split())) is expected


@pytest.mark.parametrize("where", ["", "quantization"])
def test_dtypes_fixed_by_layer_are_named(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization = {"quant_method": "modelopt", **({where: MIXED} if where else MIXED)}
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE_8B, "quantization_config": quantization}))
    assert main([str(tmp_path), "--gpu", "H200"]) == 0
    said = (
        "the checkpoint fixes KV-cache dtypes of layers (kv_cache_quantized_layers: FP8 in 20, NVFP4 in 16), which "
        "vLLM does not read (auto would be the model's own dtype); packed dtypes set its scales aside"
    )
    assert said in " ".join(capsys.readouterr().out.split())


def test_an_engine_says_which_route_float32_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda line, *values: lines.append(line % values))
    monkeypatch.setattr(registration, "logger", log)
    for dtype, number in ("float32", 1), ("bfloat16", 0):
        options = EngineArgs(str(DEMO_MODEL), kv_cache_dtype="tq4", skip_tokenizer_init=True, dtype=dtype)
        lines.clear()
        registration.PackedDTypeHandler.before_engine(_handler(), options.create_engine_config())
        said = "tq4 with float32 activations: decodes run in PyTorch, and so do prompts, which read packed"
        assert sum(line.startswith(said) for line in lines) == number


def test_an_engine_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = SimpleNamespace(info=lambda line, *values: lines.append(line % values))
    monkeypatch.setattr(registration, "logger", log)
    for quantization in LLM_COMPRESSOR, None:
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        options = EngineArgs(str(tmp_path), kv_cache_dtype="tq4", skip_tokenizer_init=True, load_format="dummy")
        lines.clear()
        registration.PackedDTypeHandler.before_engine(_handler(), options.create_engine_config())
        found = [line for line in lines if line.startswith("KV cache dtype tq4: the checkpoint asks for an fp8 KV ")]
        assert len(found) == (quantization is not None)


@pytest.mark.parametrize("ops", ["none", "all"])
def test_an_engine_on_a_cpu_says_that_rope_is_wrong_for_latents(ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(registration, "logger", SimpleNamespace(info=lambda *_: None, warning=lines.append))
    model, compilation = str(DEMO_MODEL.parent / "mla-demo"), {"custom_ops": [ops]}
    options = EngineArgs(model, kv_cache_dtype="tq4", skip_tokenizer_init=True, compilation_config=compilation)
    registration.PackedDTypeHandler.before_engine(_handler(), options.create_engine_config())
    assert [line.startswith("rotary_embedding of vLLM's CPU platform") for line in lines] == [True] * (ops == "all")


def _handler() -> registration.PackedDTypeHandler:
    handler = registration.PackedDTypeHandler()
    handler.name = "tq4"
    return handler


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"kv_cache_quantized_layers": ["model.layers.0"]}, "kv_cache_quantized_layers is"),
        ({"kv_cache_quantized_layers": {"model.layers.0": "fp8"}}, "model.layers.0 is"),
        ({"kv_cache_quantized_layers": {"model.layers.0": {"quant_algo": 8}}}, "quant_algo is 8"),
        ({"quantization": {"kv_cache_quantized_layers": {"model.layers.0": {"quant_algo": 8}}}}, "quant_algo is 8"),
        ({"quantization": [8]}, "quantization is [8]"),
        ({"quant_method": 8}, "quant_method is 8"),
    ],
)
def test_what_cannot_be_read_does_not_end_a_start(quantization: dict, reason: str) -> None:
    quantization = {"quant_method": "modelopt", **quantization}
    (line,) = describe_cache_scheme(quantization).splitlines()
    assert line.startswith("what the checkpoint asks of the KV cache is not understood (") and reason in line
    model = SimpleNamespace(quantization_config=quantization)
    auto = auto_cache(SimpleNamespace(model_config=SimpleNamespace(hf_config=model)))
    assert auto == "" or "quantized_layers" in reason
