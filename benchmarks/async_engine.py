"""The load of serve.py on vLLM's engine without a server: what of a server's time is the engine's, and what is HTTP's.

    python benchmarks/async_engine.py [--dtypes NAME ...] [--concurrency N] [--max-num-seqs N ...]

Each dtype gets an `AsyncLLM` in a process of its own, which runs the engine in another, as a server does: requests of
--input random tokens arrive as a Poisson process, at most --concurrency are under way, each makes --output tokens. A
row of async.csv has what serve.csv has, by this process's clock as outputs arrive; nothing is detokenized.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import rows
import workers


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4"], help="default: %(default)s")
    add("--concurrency", type=int, default=96, help="requests under way at most (default: %(default)s)")
    add("--request-rate", type=float, default=32.0, help="arrivals a second (default: %(default)s)")
    add("--rounds", type=int, default=2, help="requests are this many times the concurrency (default: %(default)s)")
    add("--input", type=int, default=2048, help="prompt tokens (default: %(default)s)")
    add("--output", type=int, default=128, help="output tokens (default: %(default)s)")
    add("--max-num-seqs", type=int, nargs="+", help="requests that run at once; an engine each (default: all)")
    add("--model", help="folder of another model, for its shape (default: 8B-shaped)")
    add("--kv-cache-memory", type=float, default=8e9, help="bytes of KV cache (default: %(default)g)")
    add("--together", action="store_true", help="start all engines at once, to save time; measure one after the other")
    workers.add_arguments(parser, timeout=300)
    return parser.parse_args()


async def request(engine: Any, number: int, options: argparse.Namespace) -> tuple[float, float]:
    """One request; seconds to its first token, and a token after it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vocabulary = range(3, engine.model_config.get_vocab_size())
    prompt = {"prompt_token_ids": random.Random(number).choices(vocabulary, k=options.input)}
    sampling = SamplingParams(
        temperature=0, max_tokens=options.output, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    started, first = time.perf_counter(), 0.0
    async for _ in engine.generate(prompt, sampling, str(number)):
        first = first or time.perf_counter()
    return first - started, (time.perf_counter() - first) / (options.output - 1)


async def load(engine: Any, options: argparse.Namespace) -> dict[str, str]:
    """All requests; the row's figures."""
    arrivals, gate = random.Random(0), asyncio.Semaphore(options.concurrency)
    await request(engine, -1, options)  # warms up
    started = time.perf_counter()

    async def gated(number: int) -> tuple[float, float]:
        async with gate:
            return await request(engine, number, options)

    tasks = []
    for number in range(options.rounds * options.concurrency):
        tasks.append(asyncio.create_task(gated(number)))
        await asyncio.sleep(arrivals.expovariate(options.request_rate))
    times = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - started
    figures = {}
    for name, values in zip(("ttft", "tpot"), zip(*times, strict=True), strict=True):
        figures |= {f"p{p}_{name}_ms": f"{rows.percentile(values, p) * 1e3:.2f}" for p in (50, 99)}
    return {**figures, "output_tokens_s": f"{len(tasks) * options.output / seconds:.1f}"}


def start(model: str, dtype: str, options: argparse.Namespace, loggers: Sequence[Any] = (), **more: Any) -> Any:
    """An `AsyncLLM` with dummy weights and the `kv_cache_memory` of the options; `loggers`: what makes loggers of its
    statistics. `more`: arguments of `AsyncEngineArgs`."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model, kv_cache_dtype=dtype, load_format="dummy", skip_tokenizer_init=True, seed=0,
        kv_cache_memory_bytes=int(options.kv_cache_memory),
        gpu_memory_utilization=0.1 if options.together else 0.9, **more,
    )  # fmt: skip
    return AsyncLLM.from_engine_args(arguments, stat_loggers=[*loggers])


async def measure_engines(dtype: str, model: str, options: argparse.Namespace) -> None:
    for number, at_once in enumerate(options.max_num_seqs or [options.concurrency]):
        engine = start(
            model, dtype, options, enable_prefix_caching=False, max_model_len=options.input + options.output + 64,
            max_num_batched_tokens=8192, max_num_seqs=at_once, disable_log_stats=True,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        )  # fmt: skip
        try:
            if options.together and number == 0 and not workers.wait_for_device():
                return
            workers.emit(
                "async.csv",
                {
                    "dtype": dtype, "concurrency": options.concurrency, "max_num_seqs": at_once,
                    "request_rate": options.request_rate, "requests": options.rounds * options.concurrency,
                    "input": options.input, "output": options.output, "kv_bytes": int(options.kv_cache_memory),
                    **await load(engine, options), **rows.machine(),
                },
            )  # fmt: skip
        finally:
            engine.shutdown()


def measure(dtype: str, options: argparse.Namespace, measure_engines: Any = measure_engines) -> None:
    """In a process of its own: measure one dtype, by a coroutine of the dtype, a model's folder and the options."""
    import bench_engine

    if not options.together and not workers.wait_for_device():
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure_engines(dtype, options.model or bench_engine.write_model(folder), options))


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(workers.run(__file__, arguments, measure, arguments.together))
