#!/usr/bin/env python3
"""Soak a server with a disk tier, whose engine is killed (-9) while "auto" calibrates and twice while the tier writes.

    python tests/soak/soak_restarts.py MODEL --folder DIR [--connector JSON] [options of soak.py]

The first server is killed while it calibrates, into an empty cache of its own below --folder. The next one calibrates,
answers a few prompts, and again with their pages cached; then clients come, and its engine is killed while files are
written; so is the third's. The fourth answers the few prompts with pages from disk: the same tokens as with cached
ones. Then it is soaked as by soak.py (--clients, --tokens; --seconds at most). At the end all files are checked.

The report goes to --out: wrong tokens, bad files, and what outlived a kill: processes, calibration locks and files in
/dev/shm. The exit code is 1 if there is any, but for the tier's host memory: vLLM leaves its file in /dev/shm with
every dtype (docs/tiers.md). It is counted and removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import mmap
import os
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import soak
import soak_clients
import soak_server
from packed_kv.sharing.file_tier import FOOTER, read_pages
from soak_server import Server

KILLS = 2
HOST_MEMORY = "vllm_offload_*"
FILES = 20
"""New files after which a kill counts as one while the tier writes."""


def main(arguments: list[str] | None = None) -> int:
    parser = soak.argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("soak_restarts"), help="new folder (default: %(default)s)")
    parser.add_argument("--connector", type=json.loads, default={}, help="more of kv_connector_extra_config, as JSON")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds; the load ends then, or after 20 s")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"soak_restarts: {folder} is not empty; name a new folder with --folder")
    report = restarts(folder, options)
    failed = failures(report, options)
    report["failed"] = failed
    soak_server.save(options.out, report)
    print(json.dumps(report, indent=1))
    return 1 if failed else 0


def restarts(folder: Path, options: Namespace) -> dict[str, object]:
    os.environ["VLLM_CACHE_ROOT"] = str(folder / "cache")  # where "auto" has its files
    pages, kills, wrong, read = folder / "kv", [], 0, 0
    pages.mkdir(parents=True)
    expected: list[list[int]] = []
    before = set(Path("/dev/shm").glob(HOST_MEMORY))
    started = time.monotonic()
    with server_of(folder, options, "calibrating") as server:
        kills.append(kill_when(server, lambda: calibrates(server), options.start_seconds))
    kills[-1]["locks_held"] = held_locks(folder / "cache")
    for number in range(KILLS + 1):
        kills[-1]["host_memory_left"] = clean_host_memory(before)
        with server_of(folder, options, f"server {number}") as server:
            server.wait_until_healthy(options.start_seconds)
            print(f"{time.monotonic() - started:.0f} s: server {number} ready", flush=True)
            if not number:
                asyncio.run(samples(server, options))  # whose pages the second time are cached
                expected = asyncio.run(samples(server, options))
            else:
                found = asyncio.run(samples(server, options))
                wrong += sum(a != b for a, b in zip(expected, found, strict=True))
                read += round(server.counters().get(soak.COUNTERS["offloaded_hits"], 0))
            if number < KILLS:
                kills.append(kill_under_load(server, options, pages, (number + 1) * options.clients))
            else:
                options.seconds = min(options.seconds, max(20, started + options.within - time.monotonic()))
                report = soak.soak(server, options)
    report["host_memory_left"] = clean_host_memory(before)
    return {
        "dtype": options.dtype, "seconds_in_all": round(time.monotonic() - started), "kills": kills,
        "answers_from_disk": KILLS * len(expected), "answers_from_disk_wrong": wrong, "tokens_from_disk": read,
        **report, **check_files(pages),
    }  # fmt: skip


@contextlib.contextmanager
def server_of(folder: Path, options: Namespace, name: str) -> Iterator[Server]:
    """A server with `--server-options`, "auto" calibration and a disk tier in `folder`."""
    more = shlex.split(options.server_options, posix=False)
    tier = {"type": "fs", "root_dir": str(folder / "kv")}
    transfer = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], **options.connector}
    more += ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": transfer})]
    more += ["--additional-config", json.dumps({"packed_kv": {"calibration": "auto"}})]
    with soak_server.serve(options.model, options.dtype, more, folder / f"{name}.log") as server:
        yield server


async def samples(server: Server, options: Namespace) -> list[list[int]]:
    """Tokens of the sample, one at a time, each with the same salt whenever it is asked."""
    load, found = soak.load_of(options), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for number in range(load.samples):
            prompt = load.sample_prompt(number)
            parts = soak_clients.stream(session, server.url, prompt, load.sample_answer, f"disk {number}")
            found.append([token async for part in parts for token in part])
    return found


def calibrates(server: Server) -> list[psutil.Process]:
    """The engine that waits for tq-calibrate, if one does."""
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tq_calibrate" in process.cmdline() and (parent := process.parent()):
                return [parent]
    return []


def kill_when(server: Server, find: Callable[[], list[psutil.Process]], seconds: float) -> dict[str, object]:
    """Kill what `find` finds as soon as it finds something, and 3 s on. Raises RuntimeError."""
    end = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > end or server.process.poll() is not None:
            raise RuntimeError(f"nothing to kill; the log's end:\n{server.log.read_text()[-4000:]}")
        time.sleep(0.05)
    time.sleep(3)
    return soak_server.kill_engine(server, 60, found)


def kill_under_load(server: Server, options: Namespace, pages: Path, first: int) -> dict[str, object]:
    """Kill the engine while clients, numbered from `first` on, stream and `FILES` files have just been written."""
    load, result = replace(soak.load_of(options), sample_share=0.0), soak_clients.Result()
    had = len([*pages.rglob("*.bin")])

    async def clients() -> dict[str, object]:
        end = time.monotonic() + 120
        running = [
            asyncio.create_task(soak_clients.client(first + i, server.url, load, [], sys.maxsize, end, result))
            for i in range(options.clients)
        ]
        try:
            while len([*pages.rglob("*.bin")]) < had + FILES:
                if time.monotonic() > end:
                    raise RuntimeError(f"the tier writes no files: {result.errors[:1]}")
                await asyncio.sleep(0.05)
            return await asyncio.to_thread(soak_server.kill_engine, server, 60)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    return asyncio.run(clients())


def held_locks(cache: Path) -> list[str]:
    """Locks of "auto" that a process still has."""
    held = []
    for path in cache.rglob("*.lock"):
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path.name)
    return held


def clean_host_memory(before: set[Path]) -> int:
    """Remove vLLM's new files of host memory in /dev/shm, and return their number."""
    left = set(Path("/dev/shm").glob(HOST_MEMORY)) - before
    for path in left:
        path.unlink()
    return len(left)


def check_files(pages: Path) -> dict[str, object]:
    """Count the files of pages: all, those that are not whole, and those that were only begun."""
    files, bad = sorted(pages.rglob("*.bin")), []
    for path in files:
        content = mmap.mmap(-1, max(1, path.stat().st_size - FOOTER))
        try:
            read_pages(path, pages, memoryview(content), direct=False)
        except OSError as error:
            bad.append(str(error))
    return {"files": len(files), "bad_files": bad, "files_begun": len([*pages.rglob("*.tmp")])}


def failures(report: dict, options: Namespace) -> list[str]:
    """Say what is wrong with a report."""
    found = soak.failures(report, options)
    if report["answers_from_disk_wrong"]:
        found.append(f"{report['answers_from_disk_wrong']} of {report['answers_from_disk']} answers from disk differ")
    if not report["tokens_from_disk"]:
        found.append("no prompt was found on disk")
    if report["bad_files"] or not report["files"]:
        found.append(f"{len(report['bad_files'])} of {report['files']} files bad: {report['bad_files'][:3]}")
    for number, kill in enumerate(report["kills"]):
        for what in ("processes_left", "shared_memory_left", "locks_held"):
            left = [name for name in kill.get(what, ()) if not Path(name).match(HOST_MEMORY)]
            if left:
                found.append(f"kill {number}: {what} {left}")
    return found


if __name__ == "__main__":
    sys.exit(main())
