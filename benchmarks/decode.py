"""Decode steps, prefill and throughput at equal memory of an 8B-shaped model in vLLM, for its dtypes and ours.

    python benchmarks/decode.py [--dtypes NAME ...] [--shapes 32x8192 ...] [--drafts N ...] [--prefill TOKENS ...]
        [--budget BYTES] [--kernels]

Each dtype gets one engine, in a process of its own, with dummy weights and CUDA graphs; rows are appended to
decode.csv (verify.csv with --drafts), prefill.csv and throughput.csv in --out as they come. All times are of the
engine's steps, from scheduling to sampled tokens, by the clock of the host; p20, p50 and p80 are of single steps or
prompts.

decode: every request decodes in every timed step; the contexts are filled as bench_engine.py says. A shape that the KV
cache does not hold has a row without times. With --kernels
`kernels_ms` is the time of a step in which the GPU is busy, by PyTorch's profiler; the rest is the host's.
verify: the same with --drafts, an engine for each number of tokens that a step drafts; 0 are the steps without. vLLM
looks n-grams up on the device. Every draft is verified in whole and refused, so that contexts stay as they are.
prefill: a prompt that runs alone, in chunks of 8,192 tokens, until its first token; `tokens_s` is by p50.
throughput: the scheduler gets the blocks of --budget bytes of KV cache, and as many requests of 8,192 tokens in and 256
out as fit start at once; TTFTs count from then. `output_tokens_s` is over the whole wave, prefill and all;
`decode_tokens_s` is requests over the median step in which all of them decode. The first is bounded by prefill, which
takes most of the time of such requests and does not get faster by a smaller cache; the second is what the cache's size
buys.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import made_up_calibration
import rows
import workers
from packed_kv import FORMATS
from packed_kv.model.shape import parse
from packed_kv.planning import cache

DTYPES = ("auto", "fp8", "int4_per_token_head", "turboquant_4bit_nc", *FORMATS)
SHAPES = ("32x8192", "128x2048", "1x32768", "8x32768")
SPARE_TOKENS = 64
PROFILED = 10
"""Steps of a shape that --kernels profiles."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=list(DTYPES), help="default: %(default)s")
    add("--shapes", nargs="*", default=list(SHAPES), help="requests x context (default: %(default)s)")
    add("--steps", type=int, default=64, help="timed decode steps a shape (default: %(default)s)")
    add("--drafts", nargs="+", type=int, default=[], help="tokens of a step's drafts (default: no drafts)")
    add("--kernels", action="store_true", help="profile ten more steps a shape, and say how long a GPU is busy in each")
    add("--prefill", nargs="*", type=int, default=[8192, 32768], help="prompt lengths (default: %(default)s)")
    add("--prompts", type=int, default=4, help="timed prompts a length (default: %(default)s)")
    add("--budget", type=float, default=20e9, help="KV bytes of the throughput; 0: none (default: %(default)g)")
    add("--input", type=int, default=8192, help="prompt tokens of the throughput (default: %(default)s)")
    add("--output", type=int, default=256, help="output tokens of the throughput (default: %(default)s)")
    add("--max-requests", type=int, default=128, help="most requests at once (default: %(default)s)")
    add("--model", help="folder of another model, for its shape (default: 8B-shaped)")
    add("--recent-tokens", type=int, help="of the packed dtypes' recent window (default: theirs; 0: none)")
    add("--tensor-parallel", type=int, default=1, help="devices that share the model (default: %(default)s)")
    add("--kv-cache-memory", type=float, help="bytes of KV cache of the engine (default: what the device has left)")
    add("--block-size", type=int, help="tokens (default: vLLM's)")
    add("--rope-bits", type=int, choices=(16, 8), help="of packed latents (default: theirs)")
    add("--random-weights", action="store_true", help="as of a model; with vLLM's dummy ones an indexer's keys are all "
        "alike")  # fmt: skip
    add("--no-search", action="store_true", help="do not let Triton search for configurations of kernels, which are of "
        "prompts where layers have states: to start sooner, where no prompt is timed")  # fmt: skip
    workers.add_arguments(parser, timeout=300)
    options = made_up_calibration.parse(parser)
    if options.kernels and options.tensor_parallel > 1:
        parser.error("--kernels profiles one process; leave out --tensor-parallel")
    if options.no_search and (options.prefill or options.budget):
        parser.error("--no-search makes prompts slower, which are timed here; add --prefill --budget 0")
    return options


def with_drafts(options: argparse.Namespace) -> argparse.Namespace:
    """The options with a name for each engine: its dtype, and behind a plus the tokens of its drafts."""
    if options.drafts and (options.prefill or options.budget):
        raise SystemExit("--drafts is of steps alone; add --prefill --budget 0")
    if options.drafts:
        options.dtypes = [f"{dtype}+{drafts}" for drafts in options.drafts for dtype in options.dtypes]
    return options


def measure(name: str, options: argparse.Namespace) -> None:
    """In a process of its own: measure one dtype, with drafts of one length."""
    import bench_engine as engine
    from vllm import LLM  # noqa: F401  (takes seconds; the rest waits for the device)

    if not workers.wait_for_device():
        return
    started = time.monotonic()
    dtype, _, drafts = name.partition("+")
    shapes = [tuple(map(int, text.split("x"))) for text in options.shapes]
    lengths = [context + options.steps for _, context in shapes] + options.prefill
    lengths += [options.input + options.output] if options.budget else []
    most = max([requests for requests, _ in shapes] + [options.max_requests if options.budget else 1])
    batches = () if options.budget else [requests for requests, _ in shapes] or [1]
    ranks = options.tensor_parallel
    memory = int(options.kv_cache_memory) if options.kv_cache_memory else None
    more: dict[str, Any] = {"block_size": options.block_size} if options.block_size else {}
    if options.rope_bits:
        more["additional_config"] = {"packed_kv": {"latent_rope_bits": options.rope_bits}}
    if options.random_weights:
        engine.random_weights()
    if options.no_search:
        engine.spare_search()
    with nullcontext(options.model) if options.model else tempfile.TemporaryDirectory() as folder:
        model = folder if options.model else engine.write_model(folder, options.means)
        longest, recent = max(lengths) + SPARE_TOKENS, options.recent_tokens
        limits = longest, most, memory, ranks, recent
        llm = engine.start(model, dtype, *limits, drafts=int(drafts or 0), batches=batches, **more)
        device = engine.Engine(llm)
        shape = parse(json.loads(Path(model, "config.json").read_text()), name, ranks)
    made_with = {
        "ranks": ranks,
        "recent_tokens": recent,
        **made_up_calibration.columns(options),
        **({"rope_bits": options.rope_bits if dtype in FORMATS else 16} if options.rope_bits else {}),
        "attention": device.attention(),
        **rows.machine(),
    }
    print(f"{name}: engine ready after {time.monotonic() - started:.0f} s, {made_with['attention']}", flush=True)

    def emit(file: str, **measured: object) -> None:
        workers.emit(file, {"dtype": dtype, **measured, **made_with})

    if shapes:
        device.fill_pages()
    for requests, context in shapes:
        fits = device.fits(requests, context, options.steps)
        steps = device.decode_steps(requests, context, options.steps) if fits else []
        case = {"requests": requests, "context": context, "steps": len(steps), **rows.percentiles(steps)}
        if options.kernels:
            kernels = device.kernel_seconds(requests, context, min(PROFILED, options.steps)) if fits else None
            case["kernels_ms"] = "" if kernels is None else f"{1e3 * kernels:.3f}"
        if options.drafts:
            emit("verify.csv", model=Path(options.model or "8b").name, drafts=drafts, **case)
        else:
            emit("decode.csv", **case)
    for tokens in options.prefill:
        seconds = device.prefill(tokens, options.prompts)
        rate = f"{tokens / statistics.median(seconds):.0f}"
        emit("prefill.csv", tokens=tokens, prompts=len(seconds), **rows.percentiles(seconds), tokens_s=rate)
    if options.budget:
        fit = device.requests_that_fit(int(options.budget), options.input + options.output)
        if dtype in FORMATS:  # whose requests have rings, too
            serving = cache.Serving(options.input + options.output, device.window)
            fit = min(fit, cache.capacity(shape, dtype, serving, int(options.budget)).requests)
        requests = min(fit, options.max_requests)
        wave = device.throughput(requests, int(options.budget), options.input, options.output)
        first = [f"{1e3 * wave.first_tokens[math.ceil(share * (requests - 1))]:.0f}" for share in (0.5, 0.99)]
        emit(
            "throughput.csv", kv_bytes=int(options.budget), input=options.input, output=options.output, fit=fit,
            requests=requests, seconds=f"{wave.seconds:.2f}", prefill_seconds=f"{wave.first_tokens[-1]:.2f}",
            p50_ttft_ms=first[0], p99_ttft_ms=first[1],
            output_tokens_s=f"{requests * options.output / wave.seconds:.0f}",
            decode_tokens_s=f"{requests / statistics.median(wave.decode_steps):.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    arguments = with_drafts(parse_arguments())
    sys.exit(workers.run(__file__, arguments, measure))
