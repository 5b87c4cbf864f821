"""Steps that mix decodes with prompts, of an 8B-shaped model in vLLM, as servers run them.

    python benchmarks/mixed.py [--dtypes NAME ...] [--shapes 64x2048 ...] [--prompts TOKENS ...]

Each dtype gets one engine, in a process of its own, with dummy weights, torch.compile, piecewise CUDA graphs for mixed
steps and whole ones for steps of decodes alone. In every timed step, of at most --step-tokens tokens, all requests of
the shape decode and one new prompt of --prompts tokens is prefilled (0: none; more than fit: chunks of prompts that
follow one another). The decodes' contexts are filled as bench_engine.py says.

A row of mixed.csv has p20, p50 and p80 of the steps by the clock of the host, from scheduling to sampled tokens, behind
--first steps of the same kind, whose median is `first_ms`; and `launch_ms`, the median time in which the host launched
the model's kernels in a step, waiting for none of them. --profile adds Python's profile of a few more steps of each
kind to profile.txt.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path

import made_up_calibration
import rows
import workers

SHAPES = ("64x2048", "32x8192")
PROMPTS = (0, 128, 512, 1900, 12000)
SPARE_TOKENS = 256
GRAPH_SIZES = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
"""Tokens of the CUDA graphs: fewer than vLLM's own, up to the same, to start sooner."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4"], help="default: %(default)s")
    add("--shapes", nargs="+", default=list(SHAPES), help="decodes x context (default: %(default)s)")
    add("--prompts", nargs="+", type=int, default=list(PROMPTS), help="prompt lengths (default: %(default)s)")
    add("--step-tokens", type=int, default=2048, help="most tokens of a step (default: %(default)s)")
    add("--steps", type=int, default=20, help="timed steps of a kind (default: %(default)s)")
    add("--first", type=int, default=24, help="steps of a kind before them (default: %(default)s)")
    add("--profile", type=int, default=0, help="profiled steps of a kind (default: none)")
    add("--model", help="folder of another model, for its shape (default: 8B-shaped)")
    add("--recent-tokens", type=int, help="of the packed dtypes' recent window (default: theirs; 0: none)")
    add("--kv-cache-memory", type=float, nargs="+", help="bytes of KV cache, one number or one a dtype (default: all "
        "that the device has left)")  # fmt: skip
    add("--together", action="store_true", help="start all engines at once, to save time; measure one after the other")
    add("--after", type=Path, help="with --together: measure when this file is there, and not before")
    add("--no-compile", action="store_true", help="neither torch.compile nor piecewise graphs, to start sooner")
    workers.add_arguments(parser, timeout=400)
    options = made_up_calibration.parse(parser)
    if options.together and not options.kv_cache_memory:
        parser.error("--together needs --kv-cache-memory: bytes of KV cache of each dtype")
    return options


def measure(dtype: str, options: argparse.Namespace) -> None:
    """In a process of its own: measure one dtype."""
    import bench_engine as engine
    from vllm import LLM  # noqa: F401  (takes seconds; the rest waits for the device)

    if not options.together and not workers.wait_for_device():
        return
    started = time.monotonic()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    longest = max(options.prompts + [context for _, context in shapes]) + SPARE_TOKENS + options.first + options.steps
    most = max(requests for requests, _ in shapes) + 8
    memory = options.kv_cache_memory and int(
        dict(zip(options.dtypes, options.kv_cache_memory * len(options.dtypes), strict=False))[dtype]
    )
    compilation = None if options.no_compile else {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    with tempfile.TemporaryDirectory() as folder:
        llm = engine.start(
            options.model or engine.write_model(folder, options.means), dtype, longest, most, memory,
            recent_tokens=options.recent_tokens, chunk=options.step_tokens, compilation=compilation,
            memory_share=0.1 if options.together else 0.9,
        )  # fmt: skip
        device = engine.Engine(llm)
    made_with = {
        "recent_tokens": options.recent_tokens,
        **made_up_calibration.columns(options),
        "attention": device.attention(),
        **rows.machine(),
    }
    print(f"{dtype}: engine ready after {time.monotonic() - started:.0f} s, {made_with['attention']}", flush=True)
    if options.together and not workers.wait_for_device():
        return
    while options.after and not options.after.exists():
        time.sleep(1)
    device.fill_pages()
    for requests, context in shapes:
        for prompt in options.prompts:
            if not device.fits(requests, context, options.first + options.steps, prompt):
                print(f"{dtype}: {requests}x{context} and prompts of {prompt} do not fit the KV cache", flush=True)
                continue
            seconds, launches = device.mixed_steps(requests, context, prompt, options.first + options.steps)
            first, timed = seconds[: options.first] or seconds, seconds[options.first :]
            workers.emit(
                "mixed.csv",
                {
                    "dtype": dtype, "requests": requests, "context": context, "prompt": prompt, "steps": len(timed),
                    **rows.percentiles(timed), "first_ms": f"{statistics.median(first) * 1e3:.3f}",
                    "launch_ms": f"{statistics.median(launches[options.first :]) * 1e3:.3f}", **made_with,
                },
            )  # fmt: skip
            if options.profile:
                profile = cProfile.Profile()
                profile.enable()
                device.mixed_steps(requests, context, prompt, options.profile)
                profile.disable()
                text = io.StringIO()
                for order in ("tottime", "cumulative"):
                    pstats.Stats(profile, stream=text).sort_stats(order).print_stats(60)
                with (options.out / "profile.txt").open("a") as file:
                    file.write(f"{dtype}, {requests} x {context}, prompts of {prompt}\n{text.getvalue()}\n")


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(workers.run(__file__, arguments, measure, arguments.together))
