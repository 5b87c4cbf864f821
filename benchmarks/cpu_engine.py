"""Decode steps and prompts of packed dtypes against bf16 on a CPU, and the store kernel against its reference.

    python benchmarks/cpu_engine.py [MODEL] [--8b] [--dtypes NAME ...] [--shapes R,N ...] [--recent-tokens N]
        [--threads N] [--csv FILE]

Engines of all dtypes live in one process and take turns, so that what else the machine does falls on all alike: each
has a prompt in a round, then TURNS times TURN_STEPS decode steps, of which the first finds the caches as another engine
left them, and is not counted. Figures are milliseconds of a step, and prompt tokens a second, each with its ratio to
bf16 (`auto`), the median of the ratios of turns (of steps) or rounds (of prompts), and beside them the CPU time of all
threads (`cpu_ms`, `cpu_ratio`), which other work on a shared machine disturbs less. Shapes: requests x tokens, in all
up to CONTEXT; `512 behind 4096`, where no shapes are named, is a prompt of 4,608 tokens of which the prefix cache has
4,096. `--8b` adds steps of four layers of the 8B shape with dummy weights, whose contexts are filled as bench_engine.py
says. `store` is one layer's K and V of 2,048 tokens, one thread on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)  # fmt: skip

SHAPES = ((1, 512), (1, 4096), (8, 1024))
CHUNK, PREFIX, CONTEXT = 512, 4096, 8192
TURNS, TURN_STEPS = 4, 6
SHAPES_8B, STEPS_8B = ((4, 8192), (8, 8192)), 8
KV_BYTES_8B = 1_300_000_000
"""Enough for 8 requests of 8,192 tokens in bf16; a packed cache needs less than half."""
STORED = ((8, 128), (3, 64))
"""KV heads and channels."""
BASELINE = "auto"


def main() -> None:
    options = parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    if options.model:
        bench_engines(options)
    if options.shape_8b:
        bench_8b(options)
    torch.set_num_threads(1)
    for name in options.dtypes:
        for heads, channels in STORED:
            reference, ours = store_times(name, heads, channels)
            figures = {"ms": f"{ours * 1e3:.2f}", "reference_ms": f"{reference * 1e3:.1f}"}
            put(options, name, f"store of {heads} x {channels}", figures, reference / ours)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", help="folder of a model, with weights or without; if left out, none")
    made.add_argument("--8b", dest="shape_8b", action="store_true", help="steps of four layers of the 8B shape, too")
    made.add_argument("--dtypes", nargs="+", default=["tq4"])
    made.add_argument("--shapes", nargs="+", metavar="R,N", help="requests and tokens of each")
    made.add_argument("--recent-tokens", type=int, default=64)
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--csv", type=Path)
    return made


def shapes_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Requests and tokens of each shape. Raises ValueError if a step cannot hold the prompts."""
    shapes = [(int(requests), int(tokens)) for requests, tokens in (text.split(",") for text in options.shapes or ())]
    for requests, tokens in shapes:
        if requests * tokens > CONTEXT:
            raise ValueError(f"--shapes {requests},{tokens}: a step holds {CONTEXT} tokens of prompts; name fewer")
    return shapes or list(SHAPES)


def put(
    options: argparse.Namespace,
    name: str,
    what: str,
    figures: dict[str, str],
    ratio: float,
    cpu_ratio: float | None = None,
) -> None:
    """Print a line, and append a row."""
    from rows import append, commit_here, machine, processor

    shown = ", ".join(f"{key} {value}" for key, value in figures.items())
    print(f"{name:13s} {what}: {shown} ({ratio:.2f}"
          f"{'' if cpu_ratio is None else f', CPU time {cpu_ratio:.2f}'})", flush=True)  # fmt: skip
    if options.csv:
        both = {"ms": "", "cpu_ms": "", "tokens_a_second": "", "reference_ms": "", **figures}
        ratios = {"ratio": f"{ratio:.3f}", "cpu_ratio": "" if cpu_ratio is None else f"{cpu_ratio:.3f}"}
        row = {"dtype": name, "what": what, "threads": options.threads, **both, **ratios}
        append(options.csv, {**row, "cpu": processor(), **machine(), "commit": commit_here()})


class Times(NamedTuple):
    """Seconds of the clock, and of all threads' CPU time."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Times:
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def median(cls, times: Sequence[Times]) -> Times:
        return cls(*map(statistics.median, zip(*times, strict=True)))


def bench_engines(options: argparse.Namespace) -> None:
    """Steps and prompts of all dtypes, in turns."""
    shapes = shapes_of(options)
    engines = {name: start(options, name) for name in (BASELINE, *options.dtypes)}
    for requests, tokens in shapes:
        steps: dict[str, list[Times]] = {name: [] for name in engines}
        prompts: dict[str, list[Times]] = {name: [] for name in engines}
        for round_ in range(options.rounds + 1):  # the first one warms up
            for name, llm in engines.items():
                llm.reset_prefix_cache()
                add_requests(llm, prompts_of(requests, tokens, round_), TURNS * TURN_STEPS)
                first = step(llm)
                if round_:
                    prompts[name].append(first)
            for _ in range(TURNS):
                for name, llm in engines.items():
                    times = [step(llm) for _ in range(TURN_STEPS)]
                    if round_:
                        steps[name].append(Times.median(times[1:]))
            assert not any(llm.llm_engine.has_unfinished_requests() for llm in engines.values())
        shape = f"{requests} x {tokens}"
        report(options, f"decode step, {shape}", steps)
        report(options, f"prompt, {shape}", prompts, requests * tokens)
    if options.shapes:
        return
    later: dict[str, list[Times]] = {name: [] for name in engines}
    for round_ in range(options.rounds + 1):
        for name, llm in engines.items():
            llm.reset_prefix_cache()
            (prompt,) = prompts_of(1, PREFIX + CHUNK, round_)
            run(llm, [prompt[:PREFIX]], 1)
            first = run(llm, [prompt], 1)[0]
            if round_:
                later[name].append(first)
    report(options, f"prompt, {CHUNK} behind {PREFIX}", later, CHUNK)


def bench_8b(options: argparse.Namespace) -> None:
    """Steps of four layers of the 8B shape, of all dtypes, in turns; wall-clock time."""
    import bench_engine

    shape = {**bench_engine.MODEL_8B, "num_hidden_layers": 4, "vocab_size": 4096}
    room = bench_engine.WARM_UP_STEPS + STEPS_8B + 2 * bench_engine.SPARE_TOKENS
    longest, most = max(context for _, context in SHAPES_8B) + room, max(requests for requests, _ in SHAPES_8B)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        engines = {}
        for name in (BASELINE, *options.dtypes):
            window = None if name == BASELINE else options.recent_tokens
            memory = KV_BYTES_8B if name == BASELINE else KV_BYTES_8B // 2
            llm = bench_engine.start(
                folder, name, longest, most, memory, recent_tokens=window, compilation={"mode": 0}, enforce_eager=True
            )
            engines[name] = bench_engine.Engine(llm)
            engines[name].fill_pages()
        for requests, context in SHAPES_8B:
            steps: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(options.rounds):
                for name, engine in engines.items():
                    steps[name].append(statistics.median(engine.decode_steps(requests, context, STEPS_8B)))
            for name, times in steps.items():
                what = f"decode step, 8B's 4 layers, {requests} x {context}"
                ratio = statistics.median(a / b for a, b in zip(times, steps[BASELINE], strict=True))
                put(options, name, what, {"ms": f"{statistics.median(times) * 1e3:.1f}"}, ratio)


def report(options: argparse.Namespace, what: str, seconds: dict[str, list[Times]], tokens: int | None = None) -> None:
    """Print milliseconds of a step, or tokens a second of prompts of `tokens` tokens, and the median of their ratios to
    bf16's. `seconds`: of all engines in the same turns."""
    for name, times in seconds.items():
        (wall, cpu), base = Times.median(times), seconds[BASELINE]
        ratio = Times.median([Times(a.wall / b.wall, a.cpu / b.cpu) for a, b in zip(times, base, strict=True)])
        if tokens is None:
            put(options, name, what, _ms(wall, cpu), *ratio)
        else:
            rate = {"tokens_a_second": f"{tokens / wall:.0f}", "cpu_ms": f"{cpu * 1e3:.1f}"}
            put(options, name, what, rate, 1 / ratio.wall, 1 / ratio.cpu)


def _ms(wall: float, cpu: float) -> dict[str, str]:
    return {"ms": f"{wall * 1e3:.1f}", "cpu_ms": f"{cpu * 1e3:.1f}"}


def start(options: argparse.Namespace, name: str) -> Any:
    from vllm import LLM

    config = {} if name == BASELINE else {"packed_kv": {"recent_tokens": options.recent_tokens}}
    folder = Path(options.model)
    has_weights = not folder.is_dir() or any([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    print(f"{name}: {'weights of' if has_weights else 'dummy weights in the shape of'} {folder}", flush=True)
    return LLM(
        options.model, kv_cache_dtype=name, dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 30,
        max_model_len=CONTEXT, max_num_batched_tokens=CONTEXT, max_num_seqs=16, additional_config=config,
        enable_prefix_caching=True, load_format="auto" if has_weights else "dummy", skip_tokenizer_init=True,
    )  # fmt: skip


def prompts_of(requests: int, tokens: int, seed: int) -> list[list[int]]:
    import torch

    random = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 40000, (tokens,), generator=random).tolist() for _ in range(requests)]


def run(llm: Any, prompts: list[list[int]], new_tokens: int) -> list[Times]:
    """Time of each step: the prompts' first, then decodes."""
    add_requests(llm, prompts, new_tokens)
    times: list[Times] = []
    while llm.llm_engine.has_unfinished_requests():
        times.append(step(llm))
    return times


def step(llm: Any) -> Times:
    """Time of an engine's next step."""
    before = Times.now()
    llm.llm_engine.step()
    after = Times.now()
    return Times(after.wall - before.wall, after.cpu - before.cpu)


def add_requests(llm: Any, prompts: list[list[int]], new_tokens: int) -> None:
    """Add requests that have so many decode steps."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens + 1, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{time.monotonic_ns()}-{number}", {"prompt_token_ids": prompt}, sampling)


def store_times(name: str, heads: int, channels: int) -> tuple[float, float]:
    """CPU seconds of the reference and of the kernel, the least of several."""
    import torch
    from packed_kv.codecs.pages import PagedCodec
    from packed_kv.formats import FORMATS
    from packed_kv.kernels.cpu.store import CpuStore

    tokens, codec = 2048, PagedCodec(FORMATS[name], channels)
    store, slots = CpuStore(codec), torch.arange(tokens)
    key, value = torch.randn(2, tokens, heads, channels).bfloat16()
    cache = torch.zeros(tokens // 16, heads, 16, codec.slot_bytes, dtype=torch.uint8)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        for seconds, call in zip(times, (lambda: codec.write(cache, slots, key, value),
                                         lambda: store(cache, key, value, slots)), strict=True):  # fmt: skip
            before = time.thread_time()
            call()
            seconds.append(time.thread_time() - before)
    return min(times[0]), min(times[1])


if __name__ == "__main__":
    sys.exit(main())
