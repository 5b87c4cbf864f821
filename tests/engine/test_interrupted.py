"""Requests that are interrupted, with drafts in flight or scheduled ahead, get the tokens that they get alone.

Interrupted: preempted in a cache that is too small, and all at once, as `reset_prefix_cache(reset_running_requests=
True)` does between two updates of a model that is trained. Products are those of `test_scheduling.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import exact_products
import pytest
import tiny_models
import torch
from coverage_models import MODELS
from harness import Start, count_preemptions, engine, keep_chunks, scheduler
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

IDS = torch.randint(3, 250, (900,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [{"prompt_token_ids": IDS[:32] + IDS[37 * i :][: 40 + 7 * i]} for i in range(8)]
SAMPLING = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, detokenize=False)
ENGINE: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "block_size": 16,
    "scheduler_reserve_full_isl": False,
}  # fmt: skip
BLOCKS = 36
"""Blocks of 16 tokens, of a cache without a window. The requests share 2, need up to 6 each to begin with, up to 8 at
last."""
RESETS = (3, 6, 10)
"""Steps before which all running requests are interrupted."""


def tokens(llm: LLM, prompts: list[dict]) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, SAMPLING, use_tqdm=False)]


def tokens_alone(llm: LLM) -> list[list[int]]:
    """Return the tokens of each prompt by itself, with nothing of it in the cache."""
    found = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        found += tokens(llm, [prompt])
    llm.reset_prefix_cache()
    return found


def check_preempted(llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that tokens are those of requests served alone, although the cache is too small for all of them."""
    preempted = count_preemptions(llm, monkeypatch)
    assert tokens(llm, PROMPTS) == alone
    assert preempted, "nothing was preempted: the cache is too large for this test"


def check_reset(llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that tokens are those of requests served alone, although all are interrupted at once, three times."""
    running = reset_running(llm, monkeypatch)
    assert tokens(llm, PROMPTS) == alone
    assert len(running) == len(RESETS) and min(running) > 1, running
    pool = scheduler(llm).kv_cache_manager.block_pool
    llm.reset_prefix_cache()
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are lost"


def reset_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows: how many requests run when all are interrupted."""
    core, steps, running = scheduler(llm), count(1), []
    schedule: Callable[..., Any] = core.schedule

    def reset_and_schedule(*arguments: Any, **options: Any) -> Any:
        if next(steps) in RESETS:
            running.append(len(core.running))
            assert core.reset_prefix_cache(reset_running_requests=True)
        return schedule(*arguments, **options)

    monkeypatch.setattr(core, "schedule", reset_and_schedule)
    return running


def schedule_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU platform switches asynchronous scheduling off, but runs it."""
    check = CpuPlatform.check_and_update_config

    def check_and_switch_on(_platform: type, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_switch_on))


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_eagle(ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_products.install(monkeypatch)
    config = tiny_models.llama()
    model = tiny_models.save(config, tmp_path / "model")
    draft = {"method": "eagle", "model": tiny_models.eagle(tmp_path / "draft", 2, 64, config)}
    with engine(model, "tq4", **ENGINE) as llm:  # without a window, as `engine` starts it
        alone = tokens_alone(llm)
    if ahead:
        schedule_ahead(monkeypatch)
    speculation = {**draft, "num_speculative_tokens": 3}
    with engine(model, "tq4", speculative_config=speculation, num_gpu_blocks_override=BLOCKS, **ENGINE) as llm:
        assert isinstance(scheduler(llm), AsyncScheduler) == ahead
        check_preempted(llm, alone, monkeypatch)
        check_reset(llm, alone, monkeypatch)


def test_mtp(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_products.install(monkeypatch)
    name = "Glm4MoeForCausalLM"
    monkeypatch.setitem(MODELS[name], "num_nextn_predict_layers", 1)
    options = {**ENGINE, "recent_tokens": 0}
    with start(name, "tq4", **options) as llm:
        alone = tokens_alone(llm)
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    with start(name, "tq4", speculative_config=speculation, num_gpu_blocks_override=BLOCKS, **options) as llm:
        check_preempted(llm, alone, monkeypatch)
        check_reset(llm, alone, monkeypatch)


@pytest.mark.parametrize(("name", "dtype"), [("gemma3", "tq4"), ("gemma2", "tq3")])
def test_sliding_windows_scheduled_ahead(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that slide out of a layer's window are freed while the next step is already scheduled."""
    exact_products.install(monkeypatch)
    model = tiny_models.save(getattr(tiny_models, name)(), tmp_path)
    options = {**ENGINE, "recent_tokens": 32, "enable_prefix_caching": False}
    with engine(model, dtype, **options) as llm:
        alone = tokens_alone(llm)
    schedule_ahead(monkeypatch)
    with engine(model, dtype, **options) as llm:
        assert isinstance(scheduler(llm), AsyncScheduler)
        check_reset(llm, alone, monkeypatch)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_steps_without_requests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a data-parallel rank runs them while another has requests: they touch no page and no ring. (vLLM 0.32.0 on a
    CPU runs no experts over two ranks.)"""
    keep_chunks(monkeypatch, prefix_cache=False)
    model = tiny_models.save(getattr(tiny_models, name)(), tmp_path)
    with engine(model, "tq4", **ENGINE, recent_tokens=32, enable_prefix_caching=False) as llm:
        before = tokens(llm, PROMPTS[:3])
        core, schedule, idle = scheduler(llm), scheduler(llm).schedule, llm.llm_engine.model_executor

        def idle_and_schedule(*arguments: Any, **options: Any) -> Any:
            idle.execute_dummy_batch()
            caches = [layer.kv_cache.clone() for layer in caching_layers(llm)]
            idle.execute_dummy_batch()
            assert all(map(torch.equal, caches, (layer.kv_cache for layer in caching_layers(llm))))
            return schedule(*arguments, **options)

        monkeypatch.setattr(core, "schedule", idle_and_schedule)
        assert tokens(llm, PROMPTS[:3]) == before


def caching_layers(llm: LLM) -> list[Any]:
    """Packed layers and window layers."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if getattr(layer, "kv_cache", torch.tensor([])).numel()]
