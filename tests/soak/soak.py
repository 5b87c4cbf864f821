#!/usr/bin/env python3
"""Soak a server with many clients for a long time: check that nothing breaks or leaks, and that tokens stay the same.

    python tests/soak/soak.py MODEL [--dtype isoquant4] [--clients 100] [--tokens 10000] [--server-options ...]

A sample of prompts is served alone before and after the load; different tokens fail the soak. Between
them `--clients` clients ask for `--tokens` tokens each (or for --seconds): shared prefixes, lengths up to --prompt and
--answer, a tenth cancelled, some from the sample, whose tokens are compared. Give the server too small a KV cache,
so that requests are preempted. Memory is read every second, of all the server's processes (without shared pages) and of
the GPU; growth is the median of its last tenth over that of its second. --kill sends SIGKILL to the engine at the
end, while clients stream, and reports what the server did. The report goes to --out and the terminal.

Under load, batches are composed and rounded differently. With --exact the sample must also be the same under load;
docs/reliability.md says what that needs. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import soak_clients
import soak_server
from soak_server import Memory, Server

SAY_SECONDS = 5
LEAST_READINGS = 20
"""Readings of memory from which its growth is known."""
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "offloaded_hits": "vllm:external_prefix_cache_hits_total",
    "generated": "vllm:generation_tokens_total",
}


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="folder of a model")
    add("--dtype", default="isoquant4", help="KV-cache dtype (default: %(default)s)")
    add("--clients", type=int, default=100, help="at once (default: %(default)s)")
    add("--tokens", type=int, default=10_000, help="generated tokens of a client (default: %(default)s)")
    add("--seconds", type=float, default=3600, help="the load ends then at the latest (default: %(default)s)")
    add("--prompt", type=int, default=1500, help="tokens of a prompt at most (default: %(default)s)")
    add("--prefix", type=int, default=512, help="tokens of a shared prefix (default: %(default)s)")
    add("--answer", type=int, default=512, help="tokens of an answer at most (default: %(default)s)")
    add("--vocabulary", type=int, default=4000, help="prompts are of token ids below this (default: %(default)s)")
    add("--samples", type=int, default=8, help="prompts whose tokens are compared (default: %(default)s)")
    add("--sample-answer", type=int, default=128, help="tokens of their answers (default: %(default)s)")
    add("--sample-share", type=float, default=0.1, help="of the requests (default: %(default)s)")
    add("--exact", action="store_true", help="all of the sample must be the same under load")
    add("--growth", type=float, default=64, help="MiB that memory may grow (default: %(default)s)")
    add("--kill", action="store_true", help="kill the engine at the end, and see what the server does")
    add("--server-options", default="", help="more options of vllm serve, in one argument")
    add("--when", type=Path, help="begin when this file is there, with a server that has started")
    add("--start-seconds", type=float, default=240, help="how long the server may start (default: %(default)s)")
    add("--out", type=Path, default=Path("soak.json"), help="file of the report (default: %(default)s)")
    return parser


def load_of(options: argparse.Namespace) -> soak_clients.Load:
    return soak_clients.Load(
        options.vocabulary, options.prompt, options.answer, options.prefix, options.sample_answer,
        samples=options.samples, sample_share=options.sample_share,
    )  # fmt: skip


def growth(readings: list[float]) -> float:
    """Growth of memory, from its second tenth to its last, by medians. Raises ValueError for fewer than
    `LEAST_READINGS`."""
    if len(readings) < LEAST_READINGS:
        raise ValueError(f"{len(readings)} readings of memory: soak longer")
    tenth = len(readings) // 10
    return statistics.median(readings[-tenth:]) - statistics.median(readings[tenth : 2 * tenth])


def watch(
    server: Server, result: soak_clients.Result, readings: list[Memory], stop: threading.Event, every: float
) -> None:
    """Read the memory `every` so many seconds, and say now and then how it goes."""
    said = time.monotonic()
    while not stop.wait(every):
        readings.append(server.memory())
        if time.monotonic() - said > SAY_SECONDS:
            said, now = time.monotonic(), readings[-1]
            counts = f"{result.tokens} tokens, {result.cancelled} cancelled, {len(result.errors)} errors"
            parted = f"{len(result.parted)} of {result.samples} of the sample parted"
            print(f"{counts}, {parted}, host {now.host:.0f} MiB, device {now.device:.0f} MiB", flush=True)


def soak(server: Server, options: argparse.Namespace) -> dict[str, object]:
    """Load the server; the report."""
    load, result, stop = load_of(options), soak_clients.Result(), threading.Event()
    readings: list[Memory] = []
    before = asyncio.run(soak_clients.alone(server.url, load, "before"))
    counted = server.counters()
    watcher = threading.Thread(target=watch, args=(server, result, readings, stop, min(1.0, options.seconds / 200)))
    watcher.start()
    started = time.monotonic()
    clients = soak_clients.all_clients(
        server.url, load, options.clients, before, options.tokens, started + options.seconds, result,
        lambda: len(readings) >= LEAST_READINGS,  # few, where a host is so slow that each takes seconds
    )  # fmt: skip
    try:
        asyncio.run(clients)
    finally:
        stop.set()
        watcher.join()
    seconds = time.monotonic() - started
    if server.process.poll() is not None:
        raise RuntimeError(f"the server ended; its log's end:\n{server.log.read_text()[-4000:]}")
    counters = server.counters()
    after = asyncio.run(soak_clients.alone(server.url, load, "after"))
    logged = [line for line in server.log.read_text().splitlines() if " ERROR " in f" {line}"]
    return {
        "clients": options.clients, "seconds": round(seconds, 1), "requests": result.requests,
        "tokens": result.tokens, "tokens_a_client": result.tokens // options.clients,
        "tokens_s": round(result.tokens / seconds), "cancelled": result.cancelled,
        "errors": len(result.errors) + len(logged), "first_errors": (result.errors + logged)[:5],
        "samples": result.samples, "samples_parted": len(result.parted), "parted_after": sorted(result.parted)[:20],
        "alone": len(before), "alone_again_the_same": sum(a == b for a, b in zip(before, after, strict=True)),
        **{name: round(counters.get(key, 0) - counted.get(key, 0)) for name, key in COUNTERS.items()},
        **memory_report(readings),
    }  # fmt: skip


def memory_report(readings: list[Memory]) -> dict[str, object]:
    """MiB at the beginning, in the middle and at the end, and the growth."""
    found: dict[str, object] = {"device_is_own": all(reading.is_own for reading in readings)}
    for what in ("host", "device"):
        used = [getattr(reading, what) for reading in readings]
        found[f"{what}_mib"] = [round(used[i]) for i in (0, len(used) // 2, -1)]
        found[f"{what}_growth_mib"] = round(growth(used), 1)
    return found


def kill(server: Server, options: argparse.Namespace) -> dict[str, object]:
    """Kill the engine while clients stream."""
    load, result = replace(load_of(options), sample_share=0.0), soak_clients.Result()

    async def clients() -> dict[str, object]:
        end = time.monotonic() + 10
        streams = [
            asyncio.create_task(soak_clients.client(i, server.url, load, [], options.tokens, end, result))
            for i in range(8)
        ]
        while result.tokens < 8:
            if time.monotonic() > end:
                raise RuntimeError(f"no streams to kill the engine under: {result.errors[:1]}")
            await asyncio.sleep(0.1)
        found = await asyncio.to_thread(soak_server.kill_engine, server, 60)
        await asyncio.gather(*streams)
        return found

    return asyncio.run(clients())


def failures(report: dict[str, object], options: argparse.Namespace) -> list[str]:
    """The failures in a report, in words."""
    found = []
    if report["errors"]:
        found.append(f"{report['errors']} errors, the first: {report['first_errors']}")
    if report["alone_again_the_same"] != report["alone"]:
        found.append(f"alone, {report['alone_again_the_same']} of {report['alone']} answers were the same afterwards")
    if options.exact and report["samples_parted"]:
        found.append(f"{report['samples_parted']} of {report['samples']} answers under load were not those alone")
    for what in ("host", "device"):
        grown = report[f"{what}_growth_mib"]
        assert isinstance(grown, float)
        if grown > options.growth:
            found.append(f"{what} memory grew by {grown} MiB")
    return found


def main(arguments: list[str] | None = None) -> int:
    options = argument_parser(__doc__).parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends, too
    more = shlex.split(options.server_options, posix=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with soak_server.serve(options.model, options.dtype, more, log) as server:
            server.wait_until_healthy(options.start_seconds)
            print("server ready", flush=True)
            while options.when and not options.when.exists():
                time.sleep(0.2)
            report: dict[str, object] = {"dtype": options.dtype, "server_options": options.server_options}
            report |= soak(server, options)
            soak_server.save(options.out, report)
            if options.kill:
                print(json.dumps(report), flush=True)
                report["killed"] = kill(server, options)
                soak_server.save(options.out, report)
    failed = failures(report, options)
    report["failed"] = failed
    soak_server.save(options.out, report)
    print(json.dumps(report, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
