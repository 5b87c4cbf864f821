"""Layers that are not vLLM's plain causal ones: served as `auto` serves them, or refused before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import coverage_engine
import pytest
import tiny_models
import torch
from coverage_models import tiny
from fake_codecs import register_null_format
from harness import engine, teacher_forced_logits
from transformers import HrmTextConfig
from vllm import SamplingParams
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

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
    """Chunks and decodes agree on the logits, and so do they with `auto` more or less."""
    model = loop_coder(tmp_path)
    with engine(model, "auto", **ENGINE) as llm:
        expected = teacher_forced_logits(llm, TOKEN_IDS, 37)
    with engine(model, "tq4", recent_tokens=recent_tokens, **ENGINE) as llm:
        found = [teacher_forced_logits(llm, TOKEN_IDS, chunk) for chunk in (37, 1)]
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        (result,) = llm.generate({"prompt_token_ids": TOKEN_IDS}, sampling, use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 8
    chunks, decodes = found
    assert (chunks - decodes).norm() < 1e-3 * expected.norm()
    assert (chunks - expected).norm() < 0.2 * expected.norm()
