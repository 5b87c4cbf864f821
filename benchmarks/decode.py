"""Decode steps, prefill and throughput at equal memory of an 8B-shaped model in vLLM, for its dtypes and ours.

    python benchmarks/decode.py [--dtypes NAME ...] [--shapes 32x8192 ...] [--prefill TOKENS ...] [--budget BYTES]

Each dtype gets one engine, in a process of its own, with dummy weights and CUDA graphs; rows are appended to
decode.csv, prefill.csv and throughput.csv in --out as they come. All times are of the engine's steps, from scheduling
to sampled tokens, by the clock of the host; p20, p50 and p80 are of single steps or prompts.

decode: every request decodes in every timed step; the contexts are filled as bench_engine.py says.
prefill: a prompt that runs alone, in chunks of 8,192 tokens, until its first token; `tokens_s` is by p50.
throughput: the scheduler gets the blocks of --budget bytes of KV cache, and as many requests of 8,192 tokens in and 256
out as fit start at once. `output_tokens_s` is over the whole wave, prefill and all; `decode_tokens_s` is requests over
the median step in which all of them decode. The first is bounded by prefill, which takes most of the time of such
requests and does not get faster by a smaller cache; the second is what the cache's size buys.

The next dtype's process imports vLLM while this one's engine starts; it touches the device when this one is done.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import rows
from packed_kv import FORMATS

DTYPES = ("auto", "fp8", "int4_per_token_head", "turboquant_4bit_nc", *FORMATS)
SHAPES = ("32x8192", "128x2048", "1x32768", "8x32768")
SPARE_TOKENS = 64
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is within reach
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of bench_engine.py run in the workers
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # tokens are greedy
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=list(DTYPES), help="default: %(default)s")
    add("--shapes", nargs="*", default=list(SHAPES), help="requests x context (default: %(default)s)")
    add("--steps", type=int, default=64, help="timed decode steps a shape (default: %(default)s)")
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
    add("--timeout", type=int, default=300, help="seconds a dtype may take (default: %(default)s)")
    add("--out", type=Path, default=Path("."), help="folder of the CSV files (default: here)")
    add("--commit", help="for the rows (default: what git says)")
    add("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(dtype: str, options: argparse.Namespace) -> None:
    """In a process of its own: measure one dtype and print a line `ROW [file, row]` for each row."""
    import bench_engine as engine
    from vllm import LLM  # noqa: F401  (takes seconds; the rest waits for the device)

    if not sys.stdin.readline():
        return
    started = time.monotonic()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    lengths = [context + options.steps for _, context in shapes] + options.prefill
    lengths += [options.input + options.output] if options.budget else []
    most = max([requests for requests, _ in shapes] + [options.max_requests if options.budget else 1])
    ranks = options.tensor_parallel
    memory = int(options.kv_cache_memory) if options.kv_cache_memory else None
    with nullcontext(options.model) if options.model else tempfile.TemporaryDirectory() as folder:
        model = folder if options.model else engine.write_model(folder)
        longest, recent = max(lengths) + SPARE_TOKENS, options.recent_tokens
        device = engine.Engine(engine.start(model, dtype, longest, most, memory, ranks, recent))
    made_with = {"ranks": ranks, "recent_tokens": recent, "attention": device.attention(), **rows.machine()}
    print(f"{dtype}: engine ready after {time.monotonic() - started:.0f} s, {made_with['attention']}", flush=True)

    def emit(file: str, **measured: object) -> None:
        print("ROW " + json.dumps([file, {"dtype": dtype, **measured, **made_with}]), flush=True)

    if shapes:
        device.fill_pages()
    for requests, context in shapes:
        if not device.fits(requests, context, options.steps):
            print(f"{dtype}: {requests}x{context} does not fit the KV cache", flush=True)
            continue
        steps = device.decode_steps(requests, context, options.steps)
        emit("decode.csv", requests=requests, context=context, steps=len(steps), **rows.percentiles(steps))
    for tokens in options.prefill:
        seconds = device.prefill(tokens, options.prompts)
        rate = f"{tokens / statistics.median(seconds):.0f}"
        emit("prefill.csv", tokens=tokens, prompts=len(seconds), **rows.percentiles(seconds), tokens_s=rate)
    if options.budget:
        fit = device.requests_that_fit(int(options.budget), options.input + options.output)
        requests = min(fit, options.max_requests)
        wave = device.throughput(requests, int(options.budget), options.input, options.output)
        emit(
            "throughput.csv", kv_bytes=int(options.budget), input=options.input, output=options.output, fit=fit,
            requests=requests, seconds=f"{wave.seconds:.2f}", prefill_seconds=f"{wave.prefill_seconds:.2f}",
            output_tokens_s=f"{requests * options.output / wave.seconds:.0f}",
            decode_tokens_s=f"{requests / statistics.median(wave.decode_steps):.0f}",
        )  # fmt: skip


def start_worker(dtype: str, log: Path) -> subprocess.Popen[str]:
    """A process that imports vLLM and measures once it reads a line."""
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", dtype],
            env={**ENVIRONMENT, **os.environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip


def collect(dtype: str, worker: subprocess.Popen[str], log: Path, options: argparse.Namespace, commit: str) -> bool:
    """Let a worker measure; write and print its rows. Whether it ended well."""
    assert worker.stdin is not None and worker.stdout is not None
    limit = threading.Timer(options.timeout, worker.kill)
    limit.daemon = True  # else an error here would wait for it
    limit.start()
    with suppress(BrokenPipeError):  # it has failed; its log says why
        worker.stdin.write("go\n")
        worker.stdin.close()
    last = ""
    for line in worker.stdout:
        last = line.strip() or last
        if line.startswith("ROW "):
            file, row = json.loads(line[4:])
            rows.append(options.out / file, {**row, "commit": commit})
            hidden = ("ranks", "recent_tokens", "attention", *rows.MACHINE)
            shown = {key: value for key, value in row.items() if key not in hidden}
            print(f"{file:14}", *(f"{key} {value} " for key, value in shown.items()), flush=True)
        elif line.startswith(f"{dtype}: "):
            print(line, end="", flush=True)
    code = worker.wait()
    if code:
        reason = f"took more than {options.timeout} s" if not limit.is_alive() else f"exit code {code}"
        print(f"{dtype} failed ({reason}): {last}\n{log.read_text()[-3000:]}", flush=True)
    limit.cancel()
    return code == 0


def main() -> int:
    options = parse_arguments()
    if options.worker:
        measure(options.worker, options)
        return 0
    commit = options.commit or rows.commit_here()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{i}.log") for i in range(len(options.dtypes))]
        workers = [start_worker(options.dtypes[0], logs[0])]
        try:
            for i, dtype in enumerate(options.dtypes):
                if i + 1 < len(options.dtypes):
                    workers.append(start_worker(options.dtypes[i + 1], logs[i + 1]))
                started = time.monotonic()
                if not collect(dtype, workers[i], logs[i], options, commit):
                    failed.append(dtype)
                print(f"{dtype}: {time.monotonic() - started:.0f} s in all", flush=True)
        finally:
            for worker in workers:
                worker.kill()
    if failed:
        print(f"failed: {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
