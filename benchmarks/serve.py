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

With `--trace N` it is N agents whose contexts grow turn by turn, as in `agentic.py`, written down as a trace, which
vLLM's dataset `timed_trace` sends at the trace's own times. The loop is open, that of `agentic.py` closed: see
`traces.py` for what that changes. The agents' first turns are a trace of their own, which is sent before and is in no
figure. The client sends as many at a time as the trace asks for; the server runs at most N (its --max-num-seqs). Rows
have N as `concurrency`, p90 for p99, the requests a second from the trace's first to its last as `request_rate`, the
mean prompt as `input`, `hit_rate`, and `best_hit_rate`, that of a cache in which everything fits. They need a --csv of
their own, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agents
import bench_engine
import rows
import traces
from packed_kv_quality import servers
from packed_kv_quality.servers import Server

REPO = Path(__file__).resolve().parents[1]
NAME = "model"
NOT_OF_A_TRACE = ("concurrency", "request_rate", "rounds", "input", "prefixes", "prefix")
OF_A_TRACE = ("turns", "answer_seconds", "shared", "first", "last", "tool", "think")
"""The options that --trace does not read, and those that nothing else reads."""
GPU_OPTIONS = '--compilation-config {"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'


@dataclass(frozen=True)
class Load:
    """Load that `vllm bench serve` sends: a number of requests, and its options for them.

    At most `concurrency` run at a time: by the client's limit, beyond which requests wait in the client; of a trace by
    the server's, beyond which they wait in the server. `rate` is requests a second, `prompt` tokens in the mean, `tail`
    the percentile beside the median; `columns` are further ones of the row. `counts` is false for what only fills the
    cache.
    """

    concurrency: int
    requests: int
    dataset: str
    rate: float
    prompt: float
    tail: int = 99
    columns: dict[str, object] = field(default_factory=dict)
    counts: bool = True


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4"], help="default: %(default)s. Options of vllm serve "
        "may stand behind a name, in the same argument: 'tq4 --stream-interval 8'")  # fmt: skip
    add("--concurrency", nargs="+", type=int, help="default: 1 8 32 128")
    add("--request-rate", type=float, default=32.0, help="arrivals a second (default: %(default)s)")
    add("--rounds", type=int, default=3, help="requests are this many times the concurrency (default: %(default)s)")
    add("--input", type=int, default=2048, help="prompt tokens (default: %(default)s)")
    add("--prefixes", type=int, default=0, help="prefixes that prompts share; they divide the requests (default: none)")
    add("--prefix", type=int, default=10240, help="tokens of a prefix (default: %(default)s)")
    own = ", ".join(map(flag, OF_A_TRACE))
    add("--trace", type=int, default=0, help=f"agents whose turns are the load (default: none); {own} are its own")
    add("--turns", type=int, default=4, help="of each agent, behind its first (default: %(default)s)")
    add(
        "--answer-seconds", type=float, default=4.0, help="from a turn to the end of its answer, as the trace assumes; "
        "with that and --think, 16 agents ask about 3.2 turns a second (default: %(default)s)",
    )  # fmt: skip
    agents.add_arguments(parser)
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
    options = parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(NOT_OF_A_TRACE + OF_A_TRACE)))
    refuse_what_is_not_read(parser, options)
    for name in NOT_OF_A_TRACE + OF_A_TRACE:
        if getattr(options, name) is None:
            setattr(options, name, parser.get_default(name))
    if options.trace:
        if options.turns < 1 or options.answer_seconds <= 0:
            parser.error(
                f"--trace {options.trace} takes --turns and --answer-seconds above 0, not {options.turns} and "
                f"{options.answer_seconds:g}"
            )
        options.concurrency = [options.trace]
    options.concurrency = options.concurrency or [1, 8, 32, 128]
    requests = options.rounds * options.concurrency[0]
    if options.prefixes and (len(options.concurrency) > 1 or requests % options.prefixes):
        parser.error(
            f"--prefixes {options.prefixes} takes one --concurrency (a second would find the prompts of the first in "
            "the cache) and divides the requests, --rounds times that"
        )
    return options


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_what_is_not_read(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """`options`: None where the command line has none."""
    unread = NOT_OF_A_TRACE if options.trace else OF_A_TRACE
    given = ", ".join(flag(name) for name in unread if getattr(options, name) is not None)
    if given:
        with_which = f"with --trace {options.trace}" if options.trace else "without --trace"
        parser.error(f"{given} would not be read {with_which}: leave out what does not belong to the load")


def server(
    dtype: str, more: list[str], model: str, log: Path, options: argparse.Namespace
) -> contextlib.AbstractContextManager[Server]:
    """`vllm serve` with one dtype; the caller waits until it answers."""
    prompt = options.last if options.trace else options.prefix * bool(options.prefixes) + options.input
    caching = "--enable-prefix-caching" if caches_prefixes(options) else "--no-enable-prefix-caching"
    arguments = [
        "--load-format", "dummy", "--max-model-len", str(prompt + options.output + 64), caching,
        "--max-num-batched-tokens", str(bench_engine.CHUNK), "--max-num-seqs", str(max(options.concurrency)),
        *shlex.split(options.server_options, posix=False), *more,
    ]  # fmt: skip
    if not options.model:
        arguments += ["--tokenizer", str(REPO / "models" / "demo-7m")]
    if options.kv_cache_memory:
        arguments += ["--kv-cache-memory-bytes", str(int(options.kv_cache_memory))]
    return servers.serve(model, dtype, NAME, arguments, log)


def poisson(concurrency: int, options: argparse.Namespace) -> Load:
    """Requests that arrive at random, with common prefixes if these are wanted."""
    columns: dict[str, object] = {}
    dataset = f"random --random-input-len {options.input} --random-output-len {options.output}"
    if options.prefixes:
        columns = {"prefixes": options.prefixes, "prefix": options.prefix}
        dataset = (
            f"prefix_repetition --prefix-repetition-num-prefixes {options.prefixes} "
            f"--prefix-repetition-prefix-len {options.prefix} --prefix-repetition-suffix-len {options.input} "
            f"--prefix-repetition-output-len {options.output}"
        )
    dataset += f" --num-warmups 1 --request-rate {options.request_rate} --burstiness 1 --max-concurrency {concurrency}"
    requests = options.rounds * concurrency
    return Load(concurrency, requests, dataset, options.request_rate, options.input, columns=columns)


def agents_turns(folder: str, options: argparse.Namespace) -> list[Load]:
    """The agents' first turns, and the trace behind them; their files are written into `folder`."""
    load, loads = agents.load_of(options.trace, options), []
    first, later = traces.trace_of(load, options.turns, options.answer_seconds)
    columns = {
        "turns": options.turns, "answer_seconds": options.answer_seconds, "think": load.think, "shared": load.shared,
        "first": load.first, "last": load.last, "tool": load.tool,
        "best_hit_rate": f"{traces.best_hit_rate(first, later):.3f}",
    }  # fmt: skip
    for name, requests in (("first", first), ("later", later)):
        file = Path(folder, f"{name}.jsonl")
        traces.write(file, requests)
        dataset = f"timed_trace --dataset-path {file} --timed-trace-chunk-hash-size {traces.CHUNK} --num-warmups 0"
        prompt = sum(request.input_length for request in requests) / len(requests)
        rate, counts = traces.rate(requests), requests is later
        loads.append(Load(load.agents, len(requests), dataset, rate, prompt, 90, columns, counts))
    return loads


def send(port: int, tokenizer: str, load: Load) -> dict[str, Any]:
    """The result of `vllm bench serve`."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    arguments = parser.parse_args(
        f"--backend vllm --base-url http://127.0.0.1:{port} --model {NAME} --tokenizer {tokenizer} --seed 0 "
        f"--dataset-name {load.dataset} --ignore-eos --num-prompts {load.requests} --temperature 0 "
        f"--percentile-metrics ttft,tpot --metric-percentiles 50,{load.tail} --disable-tqdm".split()
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = serve.main(arguments)
    if result["completed"] != load.requests:
        raise RuntimeError(f"{result['completed']} of {load.requests} requests completed")
    return result


def measure(
    dtype: str, more: list[str], running: Server, loads: list[Load], options: argparse.Namespace, commit: str
) -> None:
    """Wait for a server, send it each load, write and print the rows."""
    started = time.monotonic()
    import vllm.benchmarks.serve  # noqa: F401  (takes seconds, while the server starts)

    made_with = rows.machine()
    running.wait_until_healthy(options.start_seconds)
    print(f"{dtype}: server ready after {time.monotonic() - started:.0f} s", flush=True)
    kv_bytes = int(options.kv_cache_memory) if options.kv_cache_memory else ""
    for load in loads:
        counted = hits(running) if caches_prefixes(options) else (0.0, 0.0)
        result = send(running.port, options.model or str(REPO / "models" / "demo-7m"), load)
        if not load.counts:
            continue
        metrics = [f"p{percent}_{metric}_ms" for metric in ("ttft", "tpot") for percent in (50, load.tail)]
        row: dict[str, object] = {
            "dtype": dtype, "concurrency": load.concurrency, "request_rate": round(load.rate, 2),
            "requests": result["completed"], "input": round(load.prompt), "output": options.output,
            "kv_bytes": kv_bytes, **{name: f"{result[name]:.2f}" for name in metrics},
            "output_tokens_s": f"{result['output_throughput']:.1f}",
            "total_tokens_s": f"{result['total_token_throughput']:.1f}",
            "server_options": " ".join([options.server_options, *more]), **load.columns,
        }  # fmt: skip
        if caches_prefixes(options):
            found, asked = (now - before for now, before in zip(hits(running), counted, strict=True))
            row |= {"hit_rate": f"{found / asked:.3f}"}
        rows.append(options.csv, {**row, **made_with, "commit": commit})
        print("  ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)


def caches_prefixes(options: argparse.Namespace) -> bool:
    return bool(options.prefixes or options.trace)


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
        loads = agents_turns(folder, options) if options.trace else [poisson(n, options) for n in options.concurrency]
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
                        measure(*run, loads, options, commit)
                    except RuntimeError as error:
                        failed.append(run[0])
                        print(f"{run[0]} failed: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
