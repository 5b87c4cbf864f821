"""Engines in half precision on a CPU, whose attention runs in C++, against the codec and against PyTorch's route.

Engines in fp32 store by the same kernel and attend in PyTorch: the other files here test them.
"""

from __future__ import annotations

import importlib.util

import pytest
from harness import count_preemptions, engine, mean_kl, scheduler, teacher_forced_logits
from packed_kv.attention import cpu
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu import build, compiler
from packed_kv_quality.engines import attention_layers
from test_models import MODELS, TOKEN_IDS, folder_of, tiny_engine  # noqa: F401  (fixtures)
from tiny_models import true_logits
from vllm import LLM, SamplingParams
from vllm.logger import init_logger
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="of vLLM's CPU platform")
CHUNK = 37
TEXT = "'hello', " * 24 + "'hello'"
"""Continued with a lead of about a nat in each place (test_drafts.py): rounding decides nothing."""
SAMPLING = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def decode_kernels(llm: LLM) -> list[object]:
    """The decode kernels of the layers."""
    return [layer.impl.attention.kernels.decode for layer in attention_layers(llm)]


@pytest.mark.parametrize(("name", "kv_cache_dtype"), list(zip(MODELS, [*FORMATS] * 2, strict=False)))
def test_a_model(name: str, kv_cache_dtype: str, folder_of, tiny_engine) -> None:  # noqa: F811
    """Decodes are as near to the codec as PyTorch's route; chunks cost no more than the codec, as they read themselves
    raw."""
    model = folder_of[name]
    plain, coded = true_logits(model, TOKEN_IDS), true_logits(model, TOKEN_IDS, kv_cache_dtype)
    with tiny_engine(model, kv_cache_dtype, dtype="bfloat16") as llm:
        assert all(isinstance(kernel, cpu.CpuPairs) for kernel in decode_kernels(llm))
        decoded, chunked = (teacher_forced_logits(llm, TOKEN_IDS, chunk) for chunk in (1, CHUNK))
        for layer in attention_layers(llm):
            layer.impl.attention.kernels.decode = layer.impl.attention.kernels.prefill = None
        in_pytorch = teacher_forced_logits(llm, TOKEN_IDS, 1)
    ours, theirs = mean_kl(coded, decoded), mean_kl(coded, in_pytorch)
    loss, of_codec = mean_kl(plain, chunked), mean_kl(plain, coded)
    print(
        f"{kv_cache_dtype}: KL from the codec {ours:.1e}, PyTorch's {theirs:.1e}; chunks {loss:.4f} of {of_codec:.4f}"
    )
    assert ours < 1.25 * theirs
    assert loss < of_codec


@pytest.mark.parametrize(
    ("name", "recent_tokens", "skipped"), [("tq4", None, []), ("planarquant4", 0, []), ("tq4", None, ["0"])]
)
def test_however_it_is_scheduled(
    name: str, recent_tokens: int | None, skipped: list[str], demo_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in chunks, together, preempted, behind a cached prefix: the same tokens, those of bf16 pages."""
    options = {"dtype": "bfloat16", "block_size": 32, "max_model_len": 512, "enable_prefix_caching": True}
    with engine(demo_model, "auto", **options) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        requests = [{"prompt_token_ids": ids[start:]} for start in (0, 3, 6, 9, 30, 12)]
        expected = [tokens(llm, request) for request in requests]
    options |= {
        "num_gpu_blocks_override": 20 + (30 if recent_tokens is None else 0),
        "kv_cache_dtype_skip_layers": skipped,
    }
    with engine(
        demo_model, name, recent_tokens=recent_tokens, scheduler_reserve_full_isl=False, **options
    ) as llm:  # fmt: skip
        assert [tokens(llm, request) for request in requests] == expected
        monkeypatch.setattr(scheduler(llm), "max_num_scheduled_tokens", 40)
        preempted = count_preemptions(llm, monkeypatch)
        llm.reset_prefix_cache()
        together = llm.generate([*requests, *requests], SAMPLING, use_tqdm=False)
        assert preempted, "nothing was preempted: the cache is too large for this test"
        assert [list(result.outputs[0].token_ids) for result in together] == expected * 2
        for cached in (False, True):
            (result,) = llm.generate(requests[1], SAMPLING, use_tqdm=False)
            assert result.num_cached_tokens or not cached, "no prefix was cached"
            assert list(result.outputs[0].token_ids) == expected[1]


def tokens(llm: LLM, request: dict) -> list[int]:
    (result,) = llm.generate(request, SAMPLING, use_tqdm=False)
    return list(result.outputs[0].token_ids)


def test_without_a_compiler(
    demo_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """PyTorch serves, and one line says so, with the remedy and what it costs."""
    if importlib.util.find_spec("ziglang") is not None:
        pytest.skip("ziglang is installed, and serves as a compiler")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler, "NAMES", ("no-such-compiler",))
    compiler._find.cache_clear()
    build._load.cache_clear()
    request.addfinalizer(compiler._find.cache_clear)
    request.addfinalizer(build._load.cache_clear)
    monkeypatch.setattr(cpu, "logger", init_logger("vllm_of_test.packed_kv"))  # vLLM's does not propagate
    with engine(demo_model, "isoquant3", dtype="bfloat16") as llm:
        assert not any(decode_kernels(llm))
        assert tokens(llm, {"prompt_token_ids": list(range(20, 60))})
    lines = [record.getMessage() for record in caplog.records if "PyTorch" in record.getMessage()]
    assert len(lines) == 1, lines
    assert "there is no C++ compiler" in lines[0] and "apt install g++, or pip install ziglang" in lines[0]
    assert cpu.SLOWER in lines[0]
