"""Fields that a config.json leaves out count as transformers' config classes fill them in, or the config is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import config_defaults as generator
import pytest
import transformers
from checkout import REPO
from coverage_models import MODELS
from packed_kv.commands.plan import main
from packed_kv.model.config_defaults import Config
from packed_kv.model.config_fields import BadInput
from packed_kv.model.layer_kinds import SLIDING_AND_FULL
from packed_kv.model.shape import parse
from packed_kv.planning.plan import layers
from packed_kv.planning.weights import parameters
from transformers import CONFIG_MAPPING, PreTrainedConfig

of_pinned_transformers = pytest.mark.skipif(
    f"\ntransformers=={transformers.__version__}\n" not in (REPO / "requirements.txt").read_text(),
    reason="the table is of the transformers that requirements.txt pins",
)
NESTED = ("thinker_config", "text_config")
WITHOUT_LAYER_TYPES = {"granitemoehybrid", "mimo_v2_flash", "zamba2"}
"""Types of the table that are refused without `layer_types`."""


@pytest.fixture(autouse=True)
def types_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM names DeepseekV3Config `deepseek_v32` from the first V3.2 on that a process loads."""
    for kind in (*generator.TEXT, *generator.OUTER):
        if kind in CONFIG_MAPPING:
            monkeypatch.setattr(CONFIG_MAPPING[kind], "model_type", kind)


def full(config: PreTrainedConfig) -> Config:
    return dict(json.loads(json.dumps(config.to_dict())))


def text_of(config: Config) -> Config:
    name = next((name for name in NESTED if name in config), None)
    return text_of(config[name]) if name else config


def read(config: Config) -> tuple[Any, ...] | str:
    """Return what `plan` counts by, or why it counts nothing."""
    try:
        model = parse(config, "model")
        return model.layers, model.max_len, model.config.get("tie_word_embeddings", True), parameters(model)
    except BadInput as error:
        return str(error)


def left_out(config: Config, each: bool) -> Iterator[tuple[str, Config]]:
    """The config without its whole text, without any field of its text, and without each one."""
    names = {name for name in text_of(config) if name not in ("model_type", "architectures")}
    fields = {"layer_types", "layers_block_type", *generator.FIELDS} & names if each else set()
    for dropped in (names, *({name} for name in sorted(fields))):
        made = json.loads(json.dumps(config))
        for name in dropped:
            del text_of(made)[name]
        yield " ".join(sorted(dropped))[:60], made
    if text_of(config) is not config:
        yield "no text", {name: value for name, value in config.items() if name not in NESTED}


def check(kind: str, config: PreTrainedConfig, each: bool) -> set[str]:
    """Compare what is read of a config that lacks fields with what transformers makes of it. Returns refusals."""
    refused = set()
    for what, made in left_out(full(config), each):
        found = read(made)
        if isinstance(found, str):
            refused.add(found)
        else:
            assert found == read(full(CONFIG_MAPPING[kind].from_dict(made))), (kind, what)
    return refused


@of_pinned_transformers
def test_the_table_is_that_of_the_installed_transformers() -> None:
    assert json.loads(generator.FILE.read_text()) == generator.table(), f"run {Path(generator.__file__).name}"


@of_pinned_transformers
@pytest.mark.parametrize("each", [False, True], ids=["all", "each"])
def test_configs_without_defaults(each: bool) -> None:
    refused = set()
    for kind in (*generator.TEXT, *generator.OUTER):
        found = check(kind, CONFIG_MAPPING[kind](), each)
        refused |= {kind} if any("layer_types" in line for line in found) else set()
        assert all("layer_types" in line or "has no attention" in line for line in found), (kind, found)
    assert refused == WITHOUT_LAYER_TYPES


@of_pinned_transformers
@pytest.mark.parametrize("kind", sorted({*SLIDING_AND_FULL} & {*generator.TEXT}))
def test_layers_that_end_within_a_period(kind: str) -> None:
    config = full(CONFIG_MAPPING[kind](num_hidden_layers=11))
    del config["layer_types"]
    assert read(config) == read(full(CONFIG_MAPPING[kind].from_dict(config)))


@of_pinned_transformers
def test_models_that_were_tried_are_read_as_transformers_reads_them() -> None:
    """Models of types in the table, without the fields whose value is the default, and with all."""
    kinds = [kind for kind in MODELS if MODELS[kind]["model_type"] in {*generator.TEXT, *generator.OUTER}]
    assert len(kinds) > 50
    for name in kinds:
        config = CONFIG_MAPPING[MODELS[name]["model_type"]].from_dict(MODELS[name])
        assert read(full(config)) == read(MODELS[name]), name


LLAMA_IN_PARTS = {"hidden_size": 5120, "num_hidden_layers": 40, "num_key_value_heads": 8, "head_dim": 128}
PUBLISHED = {
    "Gemma 3 4B": (
        {"model_type": "gemma3", "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024}},
        "29 sliding layers (window 1,024) of 4 KV heads of 256 channels, 5 full layers of 4 KV heads of 256 channels"),
    "Mixtral": ({"model_type": "mixtral", "num_hidden_layers": 32}, "32 full layers of 8 KV heads of 128 channels"),
    "Mistral 7B v0.1": (
        {"model_type": "mistral", "num_hidden_layers": 32},
        "32 sliding layers (window 4,096) of 8 KV heads of 128 channels"),
    "Pixtral": (
        {"model_type": "llava", "text_config": {
            **LLAMA_IN_PARTS, "intermediate_size": 14336, "model_type": "mistral", "sliding_window": None}},
        "40 full layers of 8 KV heads of 128 channels"),
    "LLaVA 1.5": (
        {"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 4096}},
        "32 full layers of 32 KV heads of 128 channels"),
    "Qwen2-Audio": (
        {"model_type": "qwen2_audio", "text_config": {
            "intermediate_size": 11008, "model_type": "qwen2", "sliding_window": 32768, "vocab_size": 156032}},
        "32 full layers of 32 KV heads of 128 channels"),
    "Qwen3-Omni": (
        {"model_type": "qwen3_omni_moe", "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker", "text_config": {
                "model_type": "qwen3_omni_moe_text", "num_attention_heads": 32, "num_hidden_layers": 48,
                "head_dim": 128}}},
        "48 full layers of 4 KV heads of 128 channels"),
    "Qwen2-VL, flat": (
        {"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
         "num_key_value_heads": 4, "sliding_window": 32768},
        "28 full layers of 4 KV heads of 128 channels"),
    "GPT-2 by its other names": (
        {"model_type": "gpt2", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
        "24 full layers of 16 KV heads of 64 channels"),
}  # fmt: skip
"""Configs that leave out what their classes have, as published ones of these families do, and the models' layers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_that_leave_out_fields(name: str) -> None:
    config, said = PUBLISHED[name]
    assert layers(parse(config, name)) == said


def test_a_null_is_no_default() -> None:
    """Mistral 7B v0.2 has no window, as its config says."""
    config = {"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": None}
    assert {layer.kind for layer in parse(config, "7B").layers} == {"full"}


def test_layers_that_differ_by_an_unknown_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {name: value for name, value in MODELS["OlmoHybridForCausalLM"].items() if name != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(tmp_path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("layers of olmo_hybrid differ, but the config has no layer_types; give one that has\n")


@pytest.mark.parametrize(
    ("pattern", "kinds"), [("LLLG", "LLLGLLG"), ("GL", "GLGLGLG"), ("L", "LLLLLLG"), (3, "LLGLLGL")]
)
def test_letters_of_sliding_and_full_layers(pattern: str | int, kinds: str) -> None:
    """As transformers documents EXAONE 4's."""
    config = {"model_type": "exaone4", "num_hidden_layers": 7, "sliding_window_pattern": pattern}
    found = [layer.kind for layer in parse(config, "EXAONE 4").layers]
    assert found == [{"L": "sliding", "G": "full"}[letter] for letter in kinds]
    with pytest.raises(BadInput, match='sliding_window_pattern is "LLX"; it must be a whole number'):
        parse({**config, "sliding_window_pattern": "LLX"}, "EXAONE 4")


def test_a_config_without_its_text_is_refused() -> None:
    """The text that transformers puts there is not the default of its class (PaliGemma)."""
    with pytest.raises(BadInput, match="has no attention that its config describes"):
        parse({"model_type": "paligemma"}, "PaliGemma")


def test_gated_delta_nets_without_a_size_are_refused() -> None:
    """OLMo Hybrid's class has other defaults than Qwen3-Next's: it derives them."""
    config = {name: value for name, value in MODELS["OlmoHybridForCausalLM"].items() if name != "linear_key_head_dim"}
    with pytest.raises(BadInput, match="linear_key_head_dim must be above 0 in gated delta nets"):
        parse(config, "OLMo Hybrid")
