"""The real vLLM engine, in this process, with its scheduler and model within reach of a test."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

KV_CACHE_BYTES = 64 << 20


@contextlib.contextmanager
def engine(model: str, kv_cache_dtype: str, **options: object) -> Iterator[LLM]:
    """An in-process, eager engine with a small cache; `options` override any argument of `LLM`."""
    defaults = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
        "seed": 0,
    }
    gc.freeze()  # until vLLM's shutdown: a start collects three times, 0.4 s each over all that is imported
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def scheduler(llm: LLM):
    """The scheduler of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def model_of(llm: LLM) -> torch.nn.Module:
    """The model of an in-process engine."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def kv_tokens(llm: LLM) -> int:
    """KV tokens that the engine says it holds."""
    return llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens


def teacher_forced_logits(llm: LLM, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits [tokens, vocabulary], fp32, of a prompt run alone in prefill chunks of `chunk` tokens.

    Every chunk but the first reads its prefix from the KV cache.
    """
    model, hidden = model_of(llm), []
    llm.reset_prefix_cache()
    limit = scheduler(llm).max_num_scheduled_tokens
    scheduler(llm).max_num_scheduled_tokens = chunk
    hook = model.register_forward_hook(lambda _module, _args, output: hidden.append(output.clone()))
    try:
        llm.generate({"prompt_token_ids": token_ids}, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    finally:
        hook.remove()
        scheduler(llm).max_num_scheduled_tokens = limit
    rows = torch.cat(hidden)
    assert len(hidden) == -(-len(token_ids) // chunk) and len(rows) == len(token_ids), [len(h) for h in hidden]
    return model.compute_logits(rows).float()


def mean_kl(baseline: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL divergence of `logits` from `baseline`, in nats, over rows [tokens, vocabulary]."""
    p, q = (x.log_softmax(-1) for x in (baseline, logits))
    return (p.exp() * (p - q)).sum(-1).mean().item()
