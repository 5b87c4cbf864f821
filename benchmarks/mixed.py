"""Steps that mix decodes with prompts, of an 8B-shaped model in vLLM, as servers run them.

    python benchmarks/mixed.py [--dtypes NAME ...] [--shapes 64x2048 ...] [--prompts TOKENS ...] [--prefixes TOKENS ...]

Each dtype gets one engine, in a process of its own, with dummy weights, torch.compile and CUDA graphs in vLLM's default
mode, or in another: `fp8:FULL`; `tq4:MIXED` and `tq4:UNMIXED` are the default mode with `mixed_graphs` true and false.
In every timed step, of at most --step-tokens tokens, all requests of the shape decode and one new prompt of --prompts
tokens is prefilled (0: none; more than fit: chunks of prompts that follow one another), behind --prefixes tokens that
are in the prefix cache (none where the step has no whole prompt). The decodes' contexts are filled as bench_engine.py
says.

A row of mixed.csv has p20, p50 and p80 of the steps by the clock of the host, from one step's sampled tokens to the
next one's, behind --first steps of the same kind, whose median is `first_ms`; `launch_ms`, the median time in which the
host launched the model's kernels in a step, waiting for none of them; and `graph`, the mode and tokens of the CUDA
graphs of most steps. Rows of the last of --rounds have what PyTorch's profiler says of --kernel-steps further steps:
`kernel_ms` and `kernels`, the time of the kernels of a step and their number; where a step is one CUDA graph also
`span_ms`, from its first kernel to its last, and `gap_ms`, from there to the first one of the next. With --together the
engines take turns, a case each. --profile adds Python's profile of a few more steps of each kind to profile.txt.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import math
import pstats
import statistics
import sys
import tempfile
import time
from typing import Any

import made_up_calibration
import rows
import workers

SHAPES = ("64x2048", "32x8192")
PROMPTS = (0, 128, 512, 1900, 12000)
PREFIXES = (0, 8192)
SPARE_TOKENS = 256
GRAPH_SIZES = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 448, 576, 640)
"""Tokens of the CUDA graphs: fewer than vLLM's own, to start sooner, and more, for 512 tokens beside 64 decodes."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4"], metavar="NAME[:MODE]", help="default: %(default)s")
    add("--shapes", nargs="+", default=list(SHAPES), help="decodes x context (default: %(default)s)")
    add("--prompts", nargs="+", type=int, default=list(PROMPTS), help="prompt lengths (default: %(default)s)")
    add("--prefixes", nargs="+", type=int, default=list(PREFIXES), help="cached tokens before a prompt that fits a "
        "step (default: %(default)s)")  # fmt: skip
    add("--step-tokens", type=int, default=2048, help="most tokens of a step (default: %(default)s)")
    add("--steps", type=int, default=20, help="timed steps of a kind (default: %(default)s)")
    add("--first", type=int, default=24, help="steps of a kind before them (default: %(default)s)")
    add("--rounds", type=int, default=1, help="how often each case is measured (default: %(default)s)")
    add("--kernel-steps", type=int, default=3, help="steps of a kind for the kernels' times (default: %(default)s)")
    add("--profile", type=int, default=0, help="profiled steps of a kind (default: none)")
    add("--model", help="folder of another model, for its shape (default: 8B-shaped)")
    add("--recent-tokens", type=int, help="of the packed dtypes' recent window (default: theirs; 0: none)")
    add("--kv-cache-memory", type=float, nargs="+", help="bytes of KV cache, one number or one a dtype (default: all "
        "that the device has left)")  # fmt: skip
    add("--together", action="store_true", help="start all engines at once, to save time; measure a case each in turns")
    add("--no-compile", action="store_true", help="neither torch.compile nor piecewise graphs, to start sooner")
    workers.add_arguments(parser, timeout=400)
    options = made_up_calibration.parse(parser, arguments)
    if options.together and not options.kv_cache_memory:
        parser.error("--together needs --kv-cache-memory: bytes of KV cache of each dtype")
    return options


def cases(options: argparse.Namespace) -> list[tuple[int, int, int, int]]:
    """Requests, context, prompt and prefix of each case: prefixes where a whole prompt fits the step."""
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    return [
        (requests, context, prompt, prefix)
        for requests, context in shapes
        for prefix in options.prefixes
        for prompt in options.prompts
        if not prefix or 0 < prompt <= options.step_tokens - requests
    ]


def compilation(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's options of compilation and CUDA graphs; `mode`: of the graphs, "" for the default."""
    if options.no_compile:
        return {"mode": 0, "cudagraph_mode": mode or "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(GRAPH_SIZES)}
    return {"cudagraph_capture_sizes": list(GRAPH_SIZES), **({"cudagraph_mode": mode} if mode else {})}


def milliseconds(seconds: float) -> str:
    """Milliseconds of a row; "" of nan."""
    return "" if math.isnan(seconds) else f"{seconds * 1e3:.3f}"


def measure(name: str, options: argparse.Namespace) -> None:
    """In a process of its own: measure one dtype in one mode."""
    import bench_engine as engine
    from vllm import LLM  # noqa: F401  (takes seconds; the rest waits for the device)

    if not options.together and not workers.wait_for_device():
        return
    started = time.monotonic()
    dtype, mode = workers.split_mode(name)
    graphs, additional_config = workers.options_of_mode(mode)
    wanted = cases(options)
    longest = max(max(prefix + prompt, context) for _, context, prompt, prefix in wanted)
    longest += SPARE_TOKENS + options.first + options.steps + options.kernel_steps
    most = max(requests for requests, *_ in wanted) + 8
    memory = options.kv_cache_memory and int(
        dict(zip(options.dtypes, options.kv_cache_memory * len(options.dtypes), strict=False))[name]
    )
    with tempfile.TemporaryDirectory() as folder:
        llm = engine.start(
            options.model or engine.write_model(folder, options.means), dtype, longest, most, memory,
            recent_tokens=options.recent_tokens, chunk=options.step_tokens, compilation=compilation(graphs, options),
            additional_config=additional_config,
            memory_share=0.1 if options.together else 0.9, enable_prefix_caching=any(options.prefixes),
        )  # fmt: skip
        device = engine.Engine(llm)
    made_with = {
        "recent_tokens": options.recent_tokens,
        **made_up_calibration.columns(options),
        "attention": device.attention(),
        **rows.machine(),
    }
    print(f"{name}: engine ready after {time.monotonic() - started:.0f} s, {made_with['attention']}", flush=True)
    if options.together and not workers.wait_for_device():
        return
    device.fill_pages()
    failed = False
    for number in range(1, 1 + options.rounds):
        kernel_steps = options.kernel_steps if number == options.rounds else 0
        for requests, context, prompt, prefix in wanted:
            if options.together and not workers.hand_over():
                return
            case = f"{name}: {requests}x{context} and prompts of {prompt} behind {prefix}"
            if not device.fits(requests, context, options.first + options.steps + kernel_steps, prompt, prefix):
                print(f"{case} do not fit the KV cache", flush=True)
                continue
            steps = options.first + options.steps
            try:
                found = device.mixed_steps(requests, context, prompt, steps, prefix, kernel_steps)
            except (RuntimeError, ValueError) as error:
                print(f"{case}: {error}", flush=True)
                failed = True
                continue
            first, timed = found.seconds[: options.first] or found.seconds, found.seconds[options.first :]
            kernels = found.kernels
            workers.emit(
                "mixed.csv",
                {
                    "dtype": dtype, "mode": mode or "default", "requests": requests, "context": context,
                    "prompt": prompt, "prefix": prefix, "round": number, "steps": len(timed), **rows.percentiles(timed),
                    "first_ms": milliseconds(statistics.median(first)),
                    "launch_ms": milliseconds(statistics.median(found.launches[options.first :])),
                    "graph": found.graph(options.first), "kernel_ms": milliseconds(kernels.seconds) if kernels else "",
                    "kernels": f"{kernels.kernels:.0f}" if kernels else "",
                    "span_ms": milliseconds(kernels.graph) if kernels else "",
                    "gap_ms": milliseconds(kernels.between) if kernels else "", **made_with,
                },
            )  # fmt: skip
            if options.profile:
                profile = cProfile.Profile()
                profile.enable()
                device.mixed_steps(requests, context, prompt, options.profile, prefix)
                profile.disable()
                text = io.StringIO()
                for order in ("tottime", "cumulative"):
                    pstats.Stats(profile, stream=text).sort_stats(order).print_stats(60)
                with (options.out / "profile.txt").open("a") as file:
                    file.write(f"{case}\n{text.getvalue()}\n")
    if failed:
        sys.exit("a case failed")


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(workers.run(__file__, arguments, measure, arguments.together))
