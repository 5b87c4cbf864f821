"""Hy4 on CUDA: picked latents beside attention sinks, in a cut model with the attention of the whole, random weights.

Indexer, machine and how to run are those of `test_sparse_on_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sparse_models
import torch
from harness import kv_tokens, mean_kl, teacher_forced_logits
from packed_kv.attention.sparse.flash import TritonSinks
from packed_kv.engine import capacity
from packed_kv_quality.engines import attention_layers
from test_sparse_on_cuda import (
    LENGTHS,
    NGRAM,
    TOKEN_IDS,
    Answer,
    Distance,
    check,
    eager_answers,
    engine_of,
    graphs,
    greedy,
    in_pytorch,
)  # fmt: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def cut_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable:
    return engine_of(sparse_models.save_cut(tmp_path / "cut", sparse_models.CUT_HY4), monkeypatch)


def logits_by_chunk(llm) -> dict[int, torch.Tensor]:
    logits = {chunk: teacher_forced_logits(llm, TOKEN_IDS, chunk).cpu() for chunk in (2300, 700)}
    llm.reset_prefix_cache()
    return logits | {1: teacher_forced_logits(llm, TOKEN_IDS[:200], 1).cpu()}


@pytest.mark.parametrize(
    ("name", "rope_bits", "decode_kernel"),
    [("tq4", 16, "auto"), ("turboquant25", 8, "auto"), ("tq4", 16, "triton")],
)
def test_logits_are_those_of_pytorch(name: str, rope_bits: int, decode_kernel: str, cut_engine, monkeypatch) -> None:
    """Decodes, whole prompts past `index_topk`, and chunks behind stored tokens. A whole prompt reads its own latents
    as they are, so its logits are vLLM's, whose kernels have sinks of their own. Sinks that are left out are seen."""
    options = {"packed_kv": {"latent_rope_bits": rope_bits, "decode_kernel": decode_kernel}}
    with cut_engine(name, additional_config=options) as llm:
        for layer in attention_layers(llm):
            kernels = layer.impl.kernels
            assert layer.prefill_backend is None and kernels.layer.sinks.std() > 1
            assert kernels.decode.language == ("Triton" if decode_kernel == "triton" else "CUDA")
        ours = logits_by_chunk(llm)
        llm.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(TritonSinks, "share", lambda *_arguments: None)
            without = logits_by_chunk(llm)
    with cut_engine(name, additional_config=options) as llm:
        in_pytorch(llm)
        expected = logits_by_chunk(llm)
    with cut_engine("auto") as llm:
        of_vllm = teacher_forced_logits(llm, TOKEN_IDS, 2300).cpu()
    loss = mean_kl(expected[2300][:200], expected[1])
    errors = {chunk: mean_kl(expected[chunk], ours[chunk]) for chunk in ours}
    faults = {chunk: mean_kl(expected[chunk], without[chunk]) for chunk in without}
    apart = mean_kl(of_vllm, ours[2300])
    print(f"{name}: KL from PyTorch's by chunk {errors}, without sinks {faults}; the codec costs {loss:.4f}")
    print(f"KL from vLLM's bf16, whole prompt: {apart:.1e}")
    assert all(error < loss / 5 for error in errors.values()) and apart < loss / 5
    assert all(fault > 5 * errors[chunk] and fault > loss / 5 for chunk, fault in faults.items())


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_give_eager_answers(mode: str, cut_engine) -> None:
    """Plain layers of vLLM store and attend in one part of a graph, or outside of it."""
    with cut_engine("tq4") as llm:
        eager, rounding = eager_answers(llm)
    with cut_engine("tq4", **graphs(mode)) as llm:
        check(mode, greedy(llm), eager, rounding)
    if mode == "FULL_DECODE_ONLY":
        with pytest.MonkeyPatch.context() as patch, cut_engine("tq4") as llm:
            patch.setattr(TritonSinks, "share", lambda *_arguments: None)
            apart = Distance.of(greedy(llm), eager)
        print(f"without sinks: {apart}")
        assert not apart.is_rounding(rounding), apart


def of_prompts(answers: list[Answer]) -> list[Answer]:
    """Answers to what is a prompt with drafts, too: with three of them vLLM takes a prompt of up to four tokens for a
    decode, which reads its own tokens from pages. (A prompt of three moved a log-probability here by 0.65.)"""
    return [answer for answer, length in zip(answers, LENGTHS, strict=True) if length > 4]


def test_drafts_in_graphs(cut_engine) -> None:
    """By n-grams, and by MTP, whose layer has sinks and picks of its own."""
    with cut_engine("tq4") as llm:
        plain, rounding = eager_answers(llm, of_prompts)
    with cut_engine("tq4", speculative_config=NGRAM, **graphs("FULL_DECODE_ONLY", 4)) as llm:
        check("n-grams", of_prompts(greedy(llm)), plain, rounding)
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    with cut_engine("tq4", speculative_config=mtp, **graphs("FULL_DECODE_ONLY", 3)) as llm:
        layers = attention_layers(llm)
        assert len(layers) == 4 and all(layer.kv_cache.shape[-1] == 400 for layer in layers)
        assert all(layer.impl.sinks is not None for layer in layers)
        check("MTP", of_prompts(greedy(llm)), plain, rounding)


def test_tokens_against_fp8(cut_engine) -> None:
    """KV tokens that the cache holds, by vLLM's count: the formula within 1 %."""
    held = {}
    for name in ("fp8", "tq4"):
        with cut_engine(name) as llm:
            held[name] = kv_tokens(llm)
            if name == "tq4":
                assert capacity.bytes_per_token(llm.llm_engine.vllm_config)[0] == 3 * 400 + 2 * 132
    print(f"tokens: {held}")
    assert held["tq4"] / held["fp8"] == pytest.approx((3 * 656 + 2 * 132) / (3 * 400 + 2 * 132), rel=0.01)
