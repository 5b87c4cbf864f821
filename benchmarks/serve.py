"""Latency and throughput of a vLLM server under Poisson arrivals, by concurrency, for vLLM's dtypes and ours.

    python benchmarks/serve.py [--dtypes NAME ...] [--concurrency N ...] [--request-rate R] [--kv-cache-memory BYTES]

Each dtype gets a server of its own (`vllm serve`). The load is vLLM's: the function behind `vllm bench serve
--dataset-name random --request-rate R --burstiness 1 --max-concurrency N --ignore-eos`, called in this process, so that
it is imported once, while the first server starts. Requests arrive as a Poisson process of R a second; where N are
under way, the next waits. A rate above what the server can do therefore measures N requests at a time. Rows: TTFT and
TPOT in milliseconds, p50 and p99, and tokens a second over the whole run, appended to --csv as they come.
`async_engine.py` runs the same load without a server.

With `--prefixes N` prompts are one of N prefixes of --prefix tokens and --input tokens of their own (vLLM's dataset
`prefix_repetition`), in a random order, prefix caching is on, and rows have `hit_rate`: the share of prompt tokens that
the cache had, by the server's own counters, vLLM's one warm-up prompt included. They need a --csv of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_engine
import rows
from packed_kv_quality import servers
from packed_kv_quality.servers import Server

REPO = Path(__file__).resolve().parents[1]
NAME = "model"
GPU_OPTIONS = '--compilation-config {"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
METRICS = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4"], help="default: %(default)s. Options of vllm serve "
        "may stand behind a name, in the same argument: 'tq4 --stream-interval 8'")  # fmt: skip
    add("--concurrency", nargs="+", type=int, default=[1, 8, 32, 128], help="default: %(default)s")
    add("--request-rate", type=float, default=32.0, help="arrivals a second (default: %(default)s)")
    add("--rounds", type=int, default=3, help="requests are this many times the concurrency (default: %(default)s)")
    add("--input", type=int, default=2048, help="prompt tokens (default: %(default)s)")
    add("--output", type=int, default=128, help="output tokens (default: %(default)s)")
    add("--prefixes", type=int, default=0, help="prefixes that prompts share; they divide the requests (default: none)")
    add("--prefix", type=int, default=10240, help="tokens of a prefix (default: %(default)s)")
    add("--model", help="folder of a model with a tokenizer (default: 8B-shaped, dummy weights)")
    add("--kv-cache-memory", type=float, help="bytes of KV cache (default: what the device has left)")
    add("--server-options", default=GPU_OPTIONS, help="more options of vllm serve (default: %(default)s)")
    add(
        "--together",
        action="store_true",
        help="start all servers at once, to save time; load one after the other. "
        "They must fit the device: give --kv-cache-memory, and --gpu-memory-utilization in the server's options",
    )
    add("--start-seconds", type=int, default=240, help="how long a server may start (default: %(default)s)")
    add("--csv", type=Path, default=Path("serve.csv"), help="file of the rows (default: %(default)s)")
    add("--commit", help="for the rows (default: what git says)")
    options = parser.parse_args(arguments)
    requests = options.rounds * options.concurrency[0]
    if options.prefixes and (len(options.concurrency) > 1 or requests % options.prefixes):
        parser.error(
            f"--prefixes {options.prefixes} takes one --concurrency (a second would find the prompts of the first in "
            "the cache) and divides the requests, --rounds times that"
        )
    return options


def server(
    dtype: str, more: list[str], model: str, log: Path, options: argparse.Namespace
) -> contextlib.AbstractContextManager[Server]:
    """`vllm serve` with one dtype; the caller waits until it answers."""
    longest = options.prefix * bool(options.prefixes) + options.input + options.output + 64
    caching = "--enable-prefix-caching" if options.prefixes else "--no-enable-prefix-caching"
    arguments = [
        "--load-format", "dummy", "--max-model-len", str(longest), caching,
        "--max-num-batched-tokens", str(bench_engine.CHUNK), "--max-num-seqs", str(max(options.concurrency)),
        *shlex.split(options.server_options, posix=False), *more,
    ]  # fmt: skip
    if not options.model:
        arguments += ["--tokenizer", str(REPO / "models" / "demo-7m")]
    if options.kv_cache_memory:
        arguments += ["--kv-cache-memory-bytes", str(int(options.kv_cache_memory))]
    return servers.serve(model, dtype, NAME, arguments, log)


def load(port: int, tokenizer: str, concurrency: int, options: argparse.Namespace) -> dict[str, Any]:
    """The result of `vllm bench serve`."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    requests = options.rounds * concurrency
    dataset = f"random --random-input-len {options.input} --random-output-len {options.output}"
    if options.prefixes:
        dataset = (
            f"prefix_repetition --prefix-repetition-num-prefixes {options.prefixes} "
            f"--prefix-repetition-prefix-len {options.prefix} --prefix-repetition-suffix-len {options.input} "
            f"--prefix-repetition-output-len {options.output}"
        )
    arguments = parser.parse_args(
        f"--backend vllm --base-url http://127.0.0.1:{port} --model {NAME} --tokenizer {tokenizer} --seed 0 "
        f"--dataset-name {dataset} --ignore-eos --num-prompts {requests} --num-warmups 1 "
        f"--request-rate {options.request_rate} --burstiness 1 --max-concurrency {concurrency} --temperature 0 "
        "--percentile-metrics ttft,tpot --metric-percentiles 50,99 --disable-tqdm".split()
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = serve.main(arguments)
    if result["completed"] != requests:
        raise RuntimeError(f"{result['completed']} of {requests} requests completed")
    return result


def measure(dtype: str, more: list[str], running: Server, options: argparse.Namespace, commit: str) -> None:
    """Wait for a server, load it at each concurrency, write and print the rows."""
    started = time.monotonic()
    import vllm.benchmarks.serve  # noqa: F401  (takes seconds, while the server starts)

    made_with = rows.machine()
    running.wait_until_healthy(options.start_seconds)
    print(f"{dtype}: server ready after {time.monotonic() - started:.0f} s", flush=True)
    kv_bytes = int(options.kv_cache_memory) if options.kv_cache_memory else ""
    for concurrency in options.concurrency:
        counted = hits(running) if options.prefixes else (0.0, 0.0)
        result = load(running.port, options.model or str(REPO / "models" / "demo-7m"), concurrency, options)
        row: dict[str, object] = {
            "dtype": dtype, "concurrency": concurrency, "request_rate": options.request_rate,
            "requests": result["completed"], "input": options.input, "output": options.output,
            "kv_bytes": kv_bytes, **{name: f"{result[name]:.2f}" for name in METRICS},
            "output_tokens_s": f"{result['output_throughput']:.1f}",
            "total_tokens_s": f"{result['total_token_throughput']:.1f}",
            "server_options": " ".join([options.server_options, *more]),
        }  # fmt: skip
        if options.prefixes:
            found, asked = (now - before for now, before in zip(hits(running), counted, strict=True))
            row |= {"prefixes": options.prefixes, "prefix": options.prefix, "hit_rate": f"{found / asked:.3f}"}
        rows.append(options.csv, {**row, **made_with, "commit": commit})
        print("  ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)


def hits(running: Server) -> tuple[float, float]:
    """Prompt tokens so far: those that the prefix cache had, and all."""
    counters = running.counters()
    return counters.get("vllm:prefix_cache_hits_total", 0.0), counters.get("vllm:prefix_cache_queries_total", 0.0)


def main() -> int:
    options = parse_arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    commit = options.commit or rows.commit_here()
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or bench_engine.write_model(folder)
        runs = [(*text.split(maxsplit=1), "")[:2] for text in options.dtypes]
        for group in [runs] if options.together else [[run] for run in runs]:
            with contextlib.ExitStack() as stack:
                started = []
                for i, (dtype, more) in enumerate(group):
                    log = Path(folder, f"{i}.log")
                    run = dtype, shlex.split(more)
                    started.append((*run, stack.enter_context(server(*run, model, log, options))))
                for run in started:
                    try:
                        measure(*run, options, commit)
                    except RuntimeError as error:
                        failed.append(run[0])
                        print(f"{run[0]} failed: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
