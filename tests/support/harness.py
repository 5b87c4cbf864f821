"""Engines of tests: the quality harness's engine in this process, teacher forcing through it, and a mean of KL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

import pytest
import torch
from packed_kv.engine import registration
from packed_kv_quality import engines, lockstep
from packed_kv_quality.engines import KV_CACHE_BYTES, kv_tokens, model_of, scheduler
from packed_kv_quality.teacher_forced import logits, token_kl
from vllm import LLM, SamplingParams

__all__ = [
    "KV_CACHE_BYTES", "engine", "kv_tokens", "mean_kl", "model_of", "newest_logits", "scheduler",
    "teacher_forced_logits",
]  # fmt: skip

Start = Callable[..., AbstractContextManager[LLM]]
"""Type of the fixture `start`: architecture, KV-cache dtype and options -> an engine."""
HYBRIDS = (
    "Qwen3_5ForCausalLM",
    "Qwen3NextForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Lfm2ForCausalLM",
)
"""Hybrids of `coverage_models`: gated delta nets twice, Mamba 2 with attention in each layer and in layers of its own,
Mamba 1, short convolutions."""


def engine(
    model: str, kv_cache_dtype: str, *, recent_tokens: int | None = 0, **options: Any
) -> AbstractContextManager[LLM]:
    """An engine without a recent window, as tests of pages want it; None: with the one that it has by default."""
    given = dict(options.pop("additional_config", {}))
    if recent_tokens is not None and isinstance(given.get("packed_kv", {}), dict):
        given["packed_kv"] = {"recent_tokens": recent_tokens, **given.get("packed_kv", {})}
    return engines.engine(model, kv_cache_dtype, additional_config=given, **options)


def keep_chunks(monkeypatch: pytest.MonkeyPatch, *, prefix_cache: bool = True) -> None:
    """vLLM's CPU platform serves latent attention without chunked prefill and prefix cache, which its own backend
    cannot; ours can."""
    before = registration.PackedDTypeHandler.before_engine

    def before_engine(self, config):
        before(self, config)
        config.scheduler_config.enable_chunked_prefill = True
        config.cache_config.enable_prefix_caching = prefix_cache

    monkeypatch.setattr(registration.PackedDTypeHandler, "before_engine", before_engine)


def count_preemptions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that the ids of preempted requests are added to."""
    preempted: list[str] = []
    preempt = scheduler(llm)._preempt_request

    def record(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler(llm), "_preempt_request", record)
    return preempted


def teacher_forced_logits(llm: LLM, token_ids: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits [tokens, vocabulary], fp32, of all positions of a short prompt, run alone in chunks of `chunk` tokens."""
    return logits(llm, lockstep.run(llm, [token_ids], repeat(chunk))[0])


def mean_kl(baseline: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL divergence of `logits` from `baseline`, in nats, over rows [tokens, vocabulary]."""
    return token_kl(baseline.log_softmax(-1), logits.log_softmax(-1)).mean().item()


def newest_logits(llm: LLM, token_ids: list[int], chunk: int = 8) -> torch.Tensor:
    """Logits of the tokens that the engine computes, in steps of `chunk`, those of a prefix-cache hit left out."""
    rows: list[torch.Tensor] = []
    hook = model_of(llm).register_forward_hook(lambda _module, _inputs, output: rows.append(output.clone()))
    core = scheduler(llm)
    before, core.max_num_scheduled_tokens = core.max_num_scheduled_tokens, chunk
    sampling = SamplingParams(max_tokens=1, temperature=0)
    llm.generate({"prompt_token_ids": token_ids}, sampling, use_tqdm=False)
    core.max_num_scheduled_tokens = before
    hook.remove()
    return logits(llm, torch.cat(rows))
