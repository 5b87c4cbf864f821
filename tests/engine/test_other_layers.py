"""Layers that are not vLLM's plain causal ones: served as `auto` serves them, or refused before weights are loaded."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coverage_engine
import pytest
import tiny_models
import torch
from coverage_models import tiny
from fake_codecs import register_null_format
from harness import engine, teacher_forced_logits
from packed_kv.attention.latent.metadata import LatentMetadataBuilder
from packed_kv.attention.metadata import PackedMetadataBuilder
from packed_kv.engine import registration
from packed_kv.engine.backend import backend_of
from packed_kv.formats import FORMATS
from packed_kv.model.shape import parse
from packed_kv.reference.context_shard import ContextShard
from packed_kv.refusals import rules
from packed_kv.refusals.table import refusals_of_model
from packed_kv.window import size
from transformers import HrmTextConfig
from vllm import LLM, SamplingParams
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import PrefillPrefixLMAttention
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models import llama
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec

ON_GPU = torch.cuda.is_available()
TOKEN_IDS = torch.randint(256, (150,), generator=torch.Generator().manual_seed(1)).tolist()
ENGINE: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512}


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ones that tell tokens apart, the same in every engine."""
    monkeypatch.setattr(DummyModelLoader, "load_weights", coverage_engine.set_weights)


def write(folder: Path, config: dict[str, Any]) -> str:
    coverage_engine.register(config["architectures"][0])
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """A Llama of two layers."""
    return write(tmp_path, tiny("llama", architectures=["LlamaForCausalLM"], num_hidden_layers=2))


def loop_coder(folder: Path) -> str:
    """In its second loop, a layer reads what it stored in the first: a call without K and V."""
    architecture = "IQuestLoopCoderForCausalLM"
    sizes = {"loop_num": 2, "loop_window_size": 64, "num_hidden_layers": 2}
    return write(folder, tiny("llama", architectures=[architecture], **sizes))


def test_a_layer_that_reads_what_it_stored_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact pages, logits are those of `auto`."""
    model = loop_coder(tmp_path)
    with engine(model, "auto", **ENGINE) as llm:
        expected = teacher_forced_logits(llm, TOKEN_IDS, 37)
    register_null_format(monkeypatch, "null_fp32")
    with engine(model, "null_fp32", **ENGINE) as llm:
        found = teacher_forced_logits(llm, TOKEN_IDS, 37)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("recent_tokens", [0, 32])
def test_such_layers_of_a_packed_dtype(recent_tokens: int, tmp_path: Path) -> None:
    """Chunks and decodes agree on the logits, and so do they with `auto` more or less. On a GPU, where a first chunk
    reads its own keys raw, more or less as well."""
    model, options = loop_coder(tmp_path), {**ENGINE, "dtype": "float16" if ON_GPU else "float32"}
    with engine(model, "auto", **options) as llm:
        expected = teacher_forced_logits(llm, TOKEN_IDS, 37)
    with engine(model, "tq4", recent_tokens=recent_tokens, **options) as llm:
        chunks, decodes = (teacher_forced_logits(llm, TOKEN_IDS, chunk) for chunk in (37, 1))
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        (result,) = llm.generate({"prompt_token_ids": TOKEN_IDS}, sampling, use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 8
    assert (chunks - decodes).norm() < (0.2 if ON_GPU else 1e-3) * expected.norm()
    assert (chunks - expected).norm() < 0.2 * expected.norm()
    assert (decodes - expected).norm() < 0.2 * expected.norm()


def test_such_layers_where_ranks_split_the_tokens(plain: str) -> None:
    """They are refused in the profiling run, as layers that share another's cache are when they are made."""
    with engine(plain, "tq4", **ENGINE) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        layer = next(layer for layer in layers if hasattr(layer, "impl"))
        layer.impl.shard, query = ContextShard(ranks=2), torch.zeros(1, 4, 64)
        with pytest.raises(ValueError, match="--decode-context-parallel-size with another layer's KV cache: 2 ranks"):
            layer.impl.forward(layer, query, None, None, torch.tensor([]), None, query)


def hrm_text(folder: Path) -> str:
    """A prompt is read in both directions."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 64, "H_cycles": 1, "L_cycles": 2}
    hidden = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1}
    config = HrmTextConfig(architectures=["HrmTextForCausalLM"], **sizes, **hidden).to_dict()
    return write(folder, config)


def refusal_before_weights(model: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """The line with which an engine with tq4 does not start."""
    monkeypatch.setattr(DummyModelLoader, "load_weights", lambda *_args: pytest.fail("weights were loaded"))
    with (
        pytest.raises(ValueError, match="--kv-cache-dtype tq4 cannot serve") as error,
        engine(model, "tq4", **{**ENGINE, **options}),
    ):
        pass
    line = str(error.value)
    assert "\n" not in line and len(line) < 320
    return line


def test_prompts_that_are_read_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's name, in `plan` and `doctor` too."""
    words = "cannot serve prompts that are read in both directions: HrmTextForCausalLM, and packed attention is causal"
    assert words in refusal_before_weights(hrm_text(tmp_path), monkeypatch)
    (refused,) = refusals_of_model(json.loads((tmp_path / "config.json").read_text()))
    assert words in refused.sentence()


def test_a_backend_derived_from_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever model makes such layers: here, one that no rule names."""
    monkeypatch.setattr(rules, "BOTH_WAYS", ())
    words = "models that choose their own attention backend: a layer has EncoderOnlyAttention_Tq4Backend, made from "
    assert words in refusal_before_weights(hrm_text(tmp_path), monkeypatch)
    monkeypatch.setattr(llama, "Attention", PrefillPrefixLMAttention)
    (tmp_path / "llama").mkdir()
    model = write(tmp_path / "llama", tiny("llama", architectures=["LlamaForCausalLM"]))
    assert words in refusal_before_weights(model, monkeypatch)


@pytest.mark.parametrize("builder", [PackedMetadataBuilder, LatentMetadataBuilder])
@pytest.mark.parametrize(
    "batch", [{"causal": False}, {"causal": torch.tensor([True])}, {"mm_req_doc_ranges": {0: [(0, 4)]}}], ids=str
)
def test_a_batch_whose_tokens_attend_to_later_ones(builder: type, batch: dict[str, Any]) -> None:
    """Whatever let its layers pass."""
    made = object.__new__(builder)
    made.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="tq4"))
    common = SimpleNamespace(**{"causal": True, **batch})
    with pytest.raises(ValueError, match="cannot serve prompts that are read in both directions"):
        made.build(0, common)


def test_caches_that_are_no_plain_ones() -> None:
    """Specs that say non-causal, or keep tokens by another rule."""
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8}
    backend = backend_of("tq4")
    assert backend.customize_spec(FullAttentionSpec(**sizes)).state_content_bytes
    with pytest.raises(ValueError, match="cannot serve prompts that are read in both directions"):
        backend.customize_spec(FullAttentionSpec(**sizes, non_causal=True))
    with pytest.raises(ValueError, match="cannot serve this kind of KV cache: a RSWASpec, whose tokens"):
        backend.customize_spec(RSWASpec(**sizes, rswa_window=8))


WORDS = {
    "99": "'99', and layers with a KV cache have numbers from 0 to 1",
    "-1": "'-1', which is neither a layer's number nor sliding_window",
    "01": "'01', which is neither",
    "0,1": "'0,1', which is neither",
    "0 1": "'0 1', which is neither",
    "1-2": "'1-2', which is neither",
    "full_attention": "'full_attention', which is neither",
    "model.layers.0": "'model.layers.0', which is neither",
    "": "'', which is neither",
}
"""A word of --kv-cache-dtype-skip-layers that names no layer -> what the refusal says."""


@pytest.mark.parametrize("word", WORDS)
def test_skipped_layers_that_do_not_exist(word: str, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = refusal_before_weights(plain, monkeypatch, kv_cache_dtype_skip_layers=["0", word])
    assert f"this word of --kv-cache-dtype-skip-layers: {WORDS[word]}" in line
    assert line.endswith("; write layer numbers separated by spaces, such as 0 35, or sliding_window")


@pytest.mark.parametrize(
    ("sizes", "word", "said"),
    [
        ({}, "sliding_window", "'sliding_window', and no layer has one"),
        ({"loop_num": 2}, "4", "'4', and layers with a KV cache have numbers from 0 to 3"),
    ],
    ids=["no_window", "loops"],
)
def test_words_that_only_the_layers_tell_wrong(sizes: dict[str, int], word: str, said: str, tmp_path: Path) -> None:
    """Loops give a model more caches than its config has layers."""
    architecture = "IQuestLoopCoderForCausalLM" if sizes else "LlamaForCausalLM"
    model = write(tmp_path, tiny("llama", architectures=[architecture], num_hidden_layers=2, **sizes))
    with pytest.raises(ValueError, match=said), engine(model, "tq4", kv_cache_dtype_skip_layers=[word], **ENGINE):
        pass


def test_skipped_layers_that_exist(plain: str) -> None:
    with engine(plain, "tq4", kv_cache_dtype_skip_layers=["1"], **ENGINE) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        assert [layer.kv_cache_dtype for layer in layers.values() if hasattr(layer, "impl")] == ["tq4", "auto"]


@pytest.mark.parametrize("skipped", ["1", "3"])
def test_a_skipped_layer_that_shares_a_cache(skipped: str, tmp_path: Path) -> None:
    """It would read packed pages as plain ones, or the other way round."""
    kinds = {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4}
    config = tiny_models.gemma4(**kinds, architectures=["Gemma4ForCausalLM"])
    model = write(tmp_path, config.to_dict())
    words = r"skipped layers that share a KV cache: model.layers.\d.self_attn.attn \((tq4|auto)\) reads the cache of "
    options = {**ENGINE, "kv_cache_dtype_skip_layers": [skipped]}
    with pytest.raises(ValueError, match=words), engine(model, "tq4", **options):
        pass


PER_HEAD = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True},
}
"""Quantization of a checkpoint with an fp8 scale for each KV head."""


def test_scales_of_a_checkpoint_are_set_aside(plain: str, tmp_path: Path) -> None:
    """Packed pages have scales of their own: logits are those without the checkpoint's."""
    with engine(plain, "tq4", **ENGINE) as llm:
        expected = teacher_forced_logits(llm, TOKEN_IDS, 37)
    (tmp_path / "scales").mkdir()
    architecture = ["LlamaForCausalLM"]
    config = tiny("llama", architectures=architecture, num_hidden_layers=2, quantization_config=PER_HEAD)
    with engine(write(tmp_path / "scales", config), "tq4", **ENGINE) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        assert {layer._k_scale.numel() for layer in layers.values() if hasattr(layer, "impl")} == {2}
        found = teacher_forced_logits(llm, TOKEN_IDS, 37)
    assert torch.equal(found, expected)


def test_a_remedy_names_a_dtype_that_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With such a checkpoint, `auto` is fp8."""
    config = tiny("llama", architectures=["LlamaForCausalLM"], head_dim=72, quantization_config=PER_HEAD)
    line = refusal_before_weights(write(tmp_path, config), monkeypatch)
    said = "; use --kv-cache-dtype bfloat16 for this model (auto would be fp8 by the checkpoint)"
    assert "cannot serve this head size: 72 channels" in line and line.endswith(said)
    refused = refusals_of_model(config, parse(config, "model"))
    assert [refusal.sentence().endswith(said) for refusal in refused] == [True]
    assert CacheConfig(cache_dtype="bfloat16").cache_dtype == "bfloat16"


def dflash(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the --speculative-config of a draft. `options`: of its own config."""
    folder.mkdir()
    config = {"target_layer_ids": [0, 1], "mask_token_id": 3, **options}
    architecture = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 8}
    return {"method": "dflash", "model": write(folder, tiny("qwen3", **architecture, dflash_config=config))}


def backends(llm: LLM) -> list[str]:
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer.get_attn_backend().get_name() for layer in layers]


@pytest.mark.parametrize("is_causal", [False, True], ids=["looks_ahead", "causal"])
def test_a_draft_that_writes_its_cache_itself(
    is_causal: bool, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy leaves the model its dtype, and does what it says."""
    drafts = {**dflash(tmp_path / "draft", causal=is_causal), "num_speculative_tokens": 3}
    with monkeypatch.context() as patch:
        line = refusal_before_weights(plain, patch, speculative_config=drafts)
    assert line == (
        "--kv-cache-dtype tq4 cannot serve drafts that write their KV cache themselves: dflash, whose tokens may "
        'attend to later ones, too; add "kv_cache_dtype": "auto" to --speculative-config, which changes nothing else'
    )
    dense = {"speculative_config": {**drafts, "kv_cache_dtype": "auto"}, "recent_tokens": None}
    with engine(plain, "tq4", **{**ENGINE, **dense}) as llm:
        assert sorted(backends(llm)) == [*["CPU_ATTN"] * 2, *["PACKED_KV_RECENT"] * 2, *["PACKED_KV_TQ4"] * 2]


def test_a_draft_with_heads_that_cannot_be_packed(tmp_path: Path) -> None:
    """Here too, the model keeps its dtype."""
    target = tiny_models.llama(num_hidden_layers=2)
    model = tiny_models.save(target, tmp_path / "model")
    draft = tiny_models.eagle(tmp_path / "draft", 2, 72, target)
    drafts = {"method": "eagle", "model": draft, "num_speculative_tokens": 2}
    words = r'this head size: 72 channels, and .*; add "kv_cache_dtype": "auto" to --speculative-config, which'
    with (
        pytest.raises(ValueError, match=words),
        engine(model, "tq4", speculative_config=drafts, **{**ENGINE, "load_format": "auto"}),
    ):
        pass


def test_the_log_says_once_an_engine_why_there_is_no_window(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def record(line: str, *arguments: object, **_options: object) -> None:
        if "also kept" in line or "no recent window" in line:
            lines.append(line % arguments)

    monkeypatch.setattr(size.logger, "info", record)
    options = {**ENGINE, "recent_tokens": None}
    reason = "KV cache: no recent window with --disable-hybrid-kv-cache-manager"
    for _ in range(2):
        with engine(plain, "tq4", disable_hybrid_kv_cache_manager=True, **options):
            (line,) = lines
            assert line.startswith(reason)
        lines.clear()
    with engine(plain, "tq4", **options):
        assert lines == ["KV cache: the last 64 tokens of a request are also kept at 8 bits"]


@pytest.mark.parametrize(("level", "levels"), [(logging.INFO, set()), (logging.DEBUG, {logging.DEBUG})])
def test_registering_a_backend_is_no_news(
    level: int, levels: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's line for each dtype in each process."""
    of_vllm = logging.getLogger("vllm.v1.attention.backends.registry")
    of_vllm.addHandler(caplog.handler)
    monkeypatch.setattr(of_vllm, "level", level)
    of_vllm._cache.clear()
    monkeypatch.setattr(registration.cache_config, "register_kv_cache_dtype", lambda _name: lambda handler: handler)
    registration.register_format(replace(FORMATS["tq4"], name=f"tq4_at_{level}"))
    of_vllm.removeHandler(caplog.handler)
    of_vllm._cache.clear()
    assert {record.levelno for record in caplog.records if "TQ4_AT" in record.message} == levels
