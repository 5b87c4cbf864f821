"""vLLM's engine in this process as an `agents.Engine`: its scheduler, cache and model, without a server around it."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import bench_engine
from agents import Progress

DRAIN_SECONDS = 20
GRAPH_SIZES = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1088, 1152, 1216, 1280)
"""Tokens of the CUDA graphs of a compiled engine: up to a prompt of 1,024 tokens beside all decodes (vLLM's own end at
512), and fewer of them, to start sooner."""
SPARE_TOKENS = 64
SPARE_BYTES = 64 << 20
"""Tokens and bytes of an engine's KV cache beyond the largest budget: the scheduler gets the budget's blocks alone."""


def start(
    dtype: str, options: argparse.Namespace, budget: int, longest: int, requests: int
) -> bench_engine.Engine:  # fmt: skip
    """An engine for budgets up to `budget` bytes, of requests of `longest` tokens; says when it is ready.

    vLLM is imported first, which takes seconds; the device is not touched before `options.start_when` is there.
    """
    from vllm import LLM  # noqa: F401

    while options.start_when and not options.start_when.exists():
        time.sleep(0.2)
    started = time.monotonic()
    more: dict[str, Any] = {"kv_offloading_size": options.offload} if options.offload else {}
    if options.block_size:
        more["block_size"] = options.block_size
    with nullcontext(options.model) if options.model else tempfile.TemporaryDirectory() as folder:
        llm = bench_engine.start(
            folder if options.model else bench_engine.write_model(folder), dtype, longest + SPARE_TOKENS, requests,
            budget + SPARE_BYTES, memory_share=0.1, enable_prefix_caching=True,
            compilation={"cudagraph_capture_sizes": list(GRAPH_SIZES)} if options.compile else None, **more,
        )  # fmt: skip
    engine = bench_engine.Engine(llm)
    print(f"{dtype}: engine ready after {time.monotonic() - started:.0f} s, {engine.attention()}", flush=True)
    return engine


class LiveEngine:
    """Serves a load with `budget` bytes of KV cache, inside `with engine.serving(budget)`."""

    def __init__(self, engine: bench_engine.Engine) -> None:
        self._engine, self._llm = engine, engine.engine
        self.block_size, self.preemptions = engine.block_size, 0
        self._pool = engine.scheduler.kv_cache_manager.block_pool
        preempt = engine.scheduler._preempt_request

        def counted(*args: Any, **options: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **options)

        engine.scheduler._preempt_request = counted

    @contextmanager
    def serving(self, budget: int) -> Iterator[int]:
        """Empty the prefix cache, and leave the scheduler the blocks of `budget` bytes; yields their number."""
        self._settle()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset: blocks are in use")
        blocks = self._engine.blocks_of(budget)
        with self._engine.budget(blocks):
            yield blocks
            self._settle(blocks)

    def _settle(self, blocks: int | None = None) -> None:
        """Step until all blocks are free: transfers to a tier may hold some behind a request."""
        everything = self._pool.num_gpu_blocks - 1 if blocks is None else blocks
        end = time.monotonic() + DRAIN_SECONDS
        while self._pool.get_num_free_blocks() < everything and time.monotonic() < end:
            self._llm.step()

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))

    def add(self, name: str, tokens: list[int], output: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=output, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self._llm.add_request(name, {"prompt_token_ids": tokens}, sampling)

    def add_decoding(self, name: str, tokens: list[int], output: int) -> None:
        """A request whose prompt counts as computed, all but its last token, as after a transfer from another engine.

        It reads what its pages hold; call `bench_engine.Engine.fill_pages` before.
        """
        self.add(name, tokens, output)
        self._engine.scheduler.waiting[-1].num_computed_tokens = len(tokens) - 1

    def abort(self, names: list[str]) -> None:
        self._llm.abort_request(names)

    def is_busy(self) -> bool:
        return self._llm.has_unfinished_requests()

    def step(self) -> list[Progress]:
        return [
            Progress(
                result.request_id, list(result.outputs[0].token_ids), result.finished, result.num_cached_tokens or 0
            )
            for result in self._llm.step()
        ]
