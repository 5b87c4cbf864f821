"""Bytes of quantized weights: layer by layer as vLLM's quantization layers read a checkpoint, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from packed_kv.commands.plan import main
from packed_kv.model.cache_scheme import asked_cache
from packed_kv.model.config_fields import BadInput, text_config
from packed_kv.model.shape import parse
from packed_kv.planning import config_file
from packed_kv.planning.modules import modules
from packed_kv.planning.quantization import NotKnown, scheme_of
from packed_kv.planning.weights import INDEX, weights
from shape_8b import SHAPE_8B
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target, should_ignore_layer
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

HIDDEN, LAYERS, INNER = SHAPE_8B["hidden_size"], SHAPE_8B["num_hidden_layers"], SHAPE_8B["intermediate_size"]
ATTENTION = LAYERS * HIDDEN * 128 * (32 + 8 + 8 + 32)
MLP = LAYERS * HIDDEN * INNER * 3
TABLES = 2 * SHAPE_8B["vocab_size"] * HIDDEN * 2
"""Numbers of the linear layers of attention and of MLPs, and bytes of both embeddings."""


def group(bits: int, *targets: str) -> dict:
    return {"targets": [*targets], "weights": {"num_bits": bits, "type": "float", "group_size": 128}}


def compressed(ignore: tuple[str, ...], *groups: dict) -> dict:
    named = {f"group_{number}": one for number, one in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": ["lm_head", *ignore]}


def modelopt(**layers: str) -> dict:
    names = {name.replace("__", "."): {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": names}


def torchao(kind: object) -> dict:
    return {"quant_method": "torchao", "quant_type": {"default": kind}}


INT4 = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}
A8W4 = {"_type": "Int8DynamicActivationInt4WeightConfig", "_data": {}}
INTX = {"_type": "IntxWeightOnlyConfig", "_data": {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}}}
FLOAT8 = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}}
LAYERS_BY_NAME = {"_default": INT4, "re:.*self_attn.*": None}
BY_NAME = {"_type": "ModuleFqnToConfig", "_data": {"module_fqn_to_config": LAYERS_BY_NAME}}
SCHEMES = {
    "groups by expression": (compressed((), group(8, "re:.*self_attn.*"), group(4, "re:.*mlp.*")), 8, 4.25),
    "groups in another order": (compressed((), group(4, "re:.*mlp.*"), group(8, "re:.*self_attn.*")), 8, 4.25),
    "a group beside all": (compressed((), group(4, "Linear"), group(8, "re:.*self_attn.*")), 8, 4.25),
    "ignored": (compressed(("re:.*self_attn.*",), group(4, "Linear")), 16, 4.25),
    "ModelOpt's FP8 and none": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*self_attn*"]}, 16, 8),
    "NVFP4, older": (
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]}},
        16, 4.25,
    ),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*self_attn.*": {}}}, 16, 4.25),
    "GPTQ's other bits": ({"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*self_attn.*": {"bits": 8}}}, 8, 4.25),
    "AWQ": ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}, 16, 4.25),
    "AutoRound": ({"quant_method": "auto-round", "bits": 2, "extra_config": {"re:.*self_attn.*": {"bits": 8}}}, 8, 2),
    "fp8": ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}, 16, 8),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.25, 4.25),
    "HQQ": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, 4.25, 4.25),
    "torchao": (torchao(INT4), 4.25, 4.25),
    "torchao, 8-bit activations": (torchao(A8W4), 4.25, 4.25),
    "torchao, any width": (torchao(INTX), 4.25, 4.25),
    "torchao, fp8": (torchao(FLOAT8), 8, 8),
    "torchao's older word": (torchao("int4_weight_only"), 4.25, 4.25),
    "torchao, by name": (torchao(BY_NAME), 16, 4.25),
}  # fmt: skip
"""Scheme -> `quantization_config`, bits of a number as stored in attention and in MLPs."""


@pytest.mark.parametrize("name", SCHEMES)
def test_layers_are_weighed_by_their_own_bits(name: str) -> None:
    quantization, attention, mlp = SCHEMES[name]
    found = weights(parse({**SHAPE_8B, "quantization_config": quantization}, "8B"), None, None)
    assert found.total == pytest.approx(ATTENTION * attention / 8 + MLP * mlp / 8 + TABLES)


EXPERTS = {
    **SHAPE_8B, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024,
}  # fmt: skip
ROUTED = LAYERS * 8 * HIDDEN * 1024 * 3
BY_LAYER = modelopt(**{
    f"model__layers__{layer}__{name}": algorithm
    for layer in range(LAYERS)
    for name, algorithm in [("mlp__experts", "NVFP4"), *((f"self_attn__{c}_proj", "FP8") for c in "qkvo")]
})  # fmt: skip


def test_experts_have_their_own_bits() -> None:
    router = LAYERS * HIDDEN * 8 * 2
    for quantization, attention in (({"quant_method": "mxfp4"}, 16), (BY_LAYER, 8)):
        found = weights(parse({**EXPERTS, "quantization_config": quantization}, "moe"), None, None)
        assert found.experts == pytest.approx(ROUTED * 4.25 / 8)
        assert found.total == pytest.approx(ROUTED * 4.25 / 8 + ATTENTION * attention / 8 + router + TABLES)


def names_of_checkpoint(config: dict) -> list[str]:
    """One name of each linear layer, as Qwen's checkpoints have it."""
    found = [module.names for module in modules(parse(config, "8B"))]
    shown = ("self_attn.", "mlp.")
    return [next(name for name in names if name.startswith("model.layers.") and name.split(".", 3)[3].startswith(shown))
            for names in found]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, row in SCHEMES.items() if row[0]["quant_method"][0] == "c"])
def test_compressed_tensors_are_read_as_vllm_reads_them(name: str) -> None:
    ours = scheme_of(SCHEMES[name][0])
    copied = json.loads(json.dumps(SCHEMES[name][0]))  # which vLLM changes
    theirs = CompressedTensorsConfig.from_config({**copied, "format": "pack-quantized"})
    layer = torch.nn.Linear(1, 1)
    for checked in names_of_checkpoint(SHAPE_8B):
        target = find_matched_target(checked, layer, theirs.target_scheme_map)
        is_plain = should_ignore_layer(checked, theirs.ignore) or target is None
        bits = 16 if is_plain else theirs.target_scheme_map[target]["weights"].num_bits
        assert ours.bits([checked])[0] == bits, checked


def test_modelopts_layers_are_read_as_vllm_reads_them() -> None:
    ours, theirs = scheme_of(BY_LAYER), ModelOptMixedPrecisionConfig.from_config(json.loads(json.dumps(BY_LAYER)))
    for checked in names_of_checkpoint(EXPERTS):
        algorithm = theirs._resolve_quant_algo(checked.split(".experts.")[0] + ".experts" * (".experts." in checked))
        assert ours.bits([checked])[0] == {None: 16, "FP8": 8, "NVFP4": 4}[algorithm], checked


UNKNOWN = {
    "a method": ({"quant_method": "quip"}, "quant_method 'quip' is not read here"),
    "no method": ({"bits": 4}, "quant_method '' is not read here"),
    "no bits": ({"quant_method": "gptq"}, "gptq does not say with how many bits"),
    "an algorithm": ({"quant_method": "modelopt", "quant_algo": "W5"}, "quant_algo W5 is not read here"),
    "a torchao class": (torchao({"_type": "CodebookConfig"}), "torchao's CodebookConfig is not read here"),
    "a group that fits none": (
        compressed((), group(8, "re:.*self_attn.*"), group(4, "re:.*blocks.*")), "by other names than are known here",
    ),
    "layers that are not the model's": (modelopt(blocks__0__q="FP8"), "by other names than are known here"),
    "an expression that takes years": (compressed((), group(4, "re:(a+)+$")), "is an expression that is not read here"),
    "a broken expression": (compressed((), group(4, "re:[")), "is no regular expression"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_understood_is_not_known(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization, said = UNKNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE_8B, "quantization_config": quantization}))
    with pytest.raises(NotKnown):
        weights(parse({**SHAPE_8B, "quantization_config": quantization}, "8B"), None, tmp_path)
    assert main([str(tmp_path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.endswith("so the bytes of the weights are not known; give --weights SIZE\n")
    assert main([str(tmp_path), "--gpu", "H200", "--weights", "5GiB"]) == 0
    (tmp_path / INDEX).write_text('{"metadata": {"total_size": 6000000000}}')
    assert weights(parse({**SHAPE_8B, "quantization_config": quantization}, "8B"), None, tmp_path).total == 6e9


def test_float32_on_the_disk_is_half_of_it_on_the_card(tmp_path: Path) -> None:
    plain, wide = parse(SHAPE_8B, "8B"), parse({**SHAPE_8B, "torch_dtype": "float32"}, "8B")
    bf16 = int(weights(plain, None, None).total)
    for size, model, expected in ((2 * bf16, wide, bf16), (bf16, wide, bf16), (bf16, plain, bf16)):
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}}))
        found = weights(model, None, tmp_path)
        assert found.total == expected and ("float32" in found.source) is (size != bf16)


NVFP4 = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"],
    },
}  # fmt: skip


def test_the_file_of_model_optimizer_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE_8B))
    (tmp_path / config_file.QUANTIZATION).write_text(json.dumps(NVFP4))
    for source in tmp_path, tmp_path / "config.json":
        config, folder = config_file.load(str(source))
        found = weights(parse(config, "8B"), None, folder)
        assert found.total == pytest.approx((ATTENTION + MLP) * 4.25 / 8 + TABLES)
    assert main([str(tmp_path), "--gpu", "H200"]) == 0
    assert "asks for an fp8 KV cache, which --kv-cache-dtype auto would be" in " ".join(capsys.readouterr().out.split())
    config["quantization_config"] = {"quant_method": "fp8"}  # which config.json's own stands above
    (tmp_path / "config.json").write_text(json.dumps(config))
    config, folder = config_file.load(str(tmp_path))
    assert weights(parse(config, "8B"), None, folder).total == pytest.approx(ATTENTION + MLP + TABLES)


@pytest.mark.parametrize("where", ["compression_config", "text", "top before text"])
def test_other_fields_that_vllm_reads(where: str) -> None:
    from transformers import PretrainedConfig
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    int4, fp8 = compressed((), group(4, "Linear")), {"quant_method": "fp8"}
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "compressed_tensors"}
    config = {
        "compression_config": {**SHAPE_8B, "compression_config": {**int4, **scheme}},
        "text": {"model_type": "gemma3", "text_config": {**SHAPE_8B, "quantization_config": int4}},
        "top before text": {"quantization_config": fp8, "text_config": {**SHAPE_8B, "quantization_config": int4}},
    }[where]
    theirs = PretrainedConfig(**{name: value for name, value in config.items() if name != "text_config"})
    theirs.text_config = PretrainedConfig(**config["text_config"]) if "text_config" in config else None
    read = ModelArchConfigConvertorBase(theirs, theirs.text_config or theirs).get_quantization_config()
    ours = text_config(config)["quantization_config"]
    assert ours == read
    assert asked_cache(ours) == ("fp8" if where == "compression_config" else "")
    expected = 8 if where == "top before text" else 4.25
    assert weights(parse(config, "8B"), None, None).total == pytest.approx((ATTENTION + MLP) * expected / 8 + TABLES)


OTHERS = {
    "adapter": ({"adapter_config.json": {"base_model_name_or_path": "Qwen/Qwen3-8B"}}, "give its model, Qwen/Qwen3-8B"),
    "nameless adapter": ({"adapter_config.json": {"peft_type": "LORA"}}, "it is an adapter (LoRA); give its model"),
    "Mistral's": ({"params.json": {"dim": 5120}}, "params.json is Mistral's own format, which is not read here"),
    "GGUF": ({"m-Q4.gguf": "GGUF"}, "GGUF is not read here; give the Hugging Face model that it was made from"),
    "nothing": ({}, "has no config.json; give the folder of a Hugging Face model"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_folders_of_other_kinds_are_told_so(name: str, tmp_path: Path) -> None:
    files, said = OTHERS[name]
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(BadInput) as error:
        config_file.load(str(tmp_path))
    assert said in str(error.value) and "\n" not in str(error.value)
    for file in (file for file in files if file.endswith(".gguf")):
        with pytest.raises(BadInput, match="is a GGUF file, which is not read here; give the Hugging Face model"):
            config_file.load(str(tmp_path / file))
