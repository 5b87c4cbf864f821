"""scripts/train_mla_demo.py: a tiny model learns, and is written as vLLM needs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import train_mla_demo
from checkout import LATENT_MODEL
from packed_kv_quality.recall import PROSE
from safetensors.torch import load_file

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", tmp_path / "model"
    prose = PROSE.read_text()
    text.write_text(prose * (train_mla_demo.PIECE * 11 // len(prose) + 1))
    train_mla_demo.main([str(text), str(out), "--tiny", "--runs", "4:0.1:3e-2:1000"])
    printed = capsys.readouterr().out
    print(printed)
    first, *_, last, kept = map(float, re.findall(r"held out ([\d.]+)", printed))
    assert kept == last < first
    weights = load_file(out / "model.safetensors")
    assert torch.equal(weights[HEAD], weights[EMBEDDING]) and weights[HEAD].dtype == torch.bfloat16
    assert (out / "tokenizer.json").is_file()


def test_the_model_in_the_repository_has_a_head_of_its_own() -> None:
    """vLLM ties none of this architecture: without it, every token is as likely."""
    weights = load_file(LATENT_MODEL / "model.safetensors")
    assert torch.equal(weights[HEAD], weights[EMBEDDING])
    size = sum(path.stat().st_size for path in LATENT_MODEL.iterdir())
    assert size < 17e6, "it lies in the repository"
