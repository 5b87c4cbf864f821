"""One process a dtype, one after the other: each measures, and its rows go into CSV files as they come.

The next dtype's process imports vLLM while this one's engine starts; it touches the device when this one is done. With
--begin the first one imports vLLM as well, and touches the device when that file is there. With `together`, all
processes start at once: then their engines must fit the device side by side. They may hand the device over, once they
are ready and between their cases: the others have their turns before the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import rows

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is within reach
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of in_worker.py run in the workers
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # tokens are greedy
}
MIXED = {"MIXED": True, "UNMIXED": False}
"""Modes that set `mixed_graphs`, beside vLLM's modes of CUDA graphs."""
TURN = "TURN"
"""The line by which a worker hands over."""
HIDDEN = ("ranks", "recent_tokens", "attention", *rows.MACHINE)
"""Columns that are not printed."""


def add_arguments(parser: argparse.ArgumentParser, *, timeout: int) -> None:
    """Add the options that `run` reads."""
    add = parser.add_argument
    add("--timeout", type=int, default=timeout, help="seconds a dtype, or a turn of it, may take "
        "(default: %(default)s)")  # fmt: skip
    add("--out", type=Path, default=Path("."), help="folder of the CSV files (default: here)")
    add("--commit", help="for the rows (default: what git says)")
    add("--begin", type=Path, help="import everything, and touch the device when this file is there")
    add("--worker", help=argparse.SUPPRESS)


def split_mode(name: str) -> tuple[str, str]:
    """A dtype and vLLM's mode of CUDA graphs, of a name such as `fp8` or `fp8:FULL`; "" is vLLM's default mode."""
    dtype, _, mode = name.partition(":")
    return dtype, mode


def options_of_mode(mode: str) -> tuple[str, dict[str, Any]]:
    """vLLM's mode of CUDA graphs, "" for its default, and `additional_config`, of a name's mode: `MIXED` and `UNMIXED`
    are the default mode with `mixed_graphs` true and false."""
    return ("", {"packed_kv": {"mixed_graphs": MIXED[mode]}}) if mode in MIXED else (mode, {})


def wait_for_device() -> bool:
    """In a worker, which has imported what takes long: whether it is its turn."""
    return bool(sys.stdin.readline())


def hand_over() -> bool:
    """In a worker that began together with the others: let them have their turns; whether it is its turn again."""
    print(TURN, flush=True)
    return wait_for_device()


def emit(file: str, row: dict[str, object]) -> None:
    """In a worker: hand over a row for `file`."""
    print("ROW " + json.dumps([file, row]), flush=True)


def run(
    script: str, options: argparse.Namespace, measure: Callable[[str, argparse.Namespace], None], together: bool = False
) -> int:
    """Measure each of `options.dtypes` in a process of its own, made by running `script` again; an exit code.

    `measure` is called in these processes, where `wait_for_device` and `hand_over` say when. A line that begins with
    the dtype's name and a colon is passed on.
    """
    if options.worker:
        measure(options.worker, options)
        return 0
    commit = options.commit or rows.commit_here()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{i}.log") for i in range(len(options.dtypes))]
        workers: list[subprocess.Popen[str]] = []
        try:
            turns, seconds = deque(range(len(options.dtypes))), [0.0] * len(options.dtypes)
            while turns:
                i = turns.popleft()
                for ahead in range(len(workers), len(options.dtypes) if together else min(i + 2, len(options.dtypes))):
                    workers.append(_start(script, options.dtypes[ahead], logs[ahead]))
                while options.begin and not options.begin.exists():
                    time.sleep(0.1)
                started = time.monotonic()
                ended_well = _collect(options.dtypes[i], workers[i], logs[i], options, commit)
                seconds[i] += time.monotonic() - started
                if ended_well is None:
                    turns.append(i)
                    continue
                if not ended_well:
                    failed.append(options.dtypes[i])
                print(f"{options.dtypes[i]}: {seconds[i]:.0f} s in all", flush=True)
        finally:
            for worker in workers:
                worker.kill()
    if failed:
        print(f"failed: {' '.join(failed)}")
    return 1 if failed else 0


def _start(script: str, dtype: str, log: Path) -> subprocess.Popen[str]:
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, script, *sys.argv[1:], "--worker", dtype],
            env={**ENVIRONMENT, **os.environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip


def _collect(
    dtype: str, worker: subprocess.Popen[str], log: Path, options: argparse.Namespace, commit: str
) -> bool | None:
    """Let a worker measure; write and print its rows. Whether it ended well; None if it hands over."""
    assert worker.stdin is not None and worker.stdout is not None
    limit = threading.Timer(options.timeout, worker.kill)
    limit.daemon = True  # else an error here would wait for it
    limit.start()
    with suppress(BrokenPipeError):  # it has failed; its log says why
        worker.stdin.write("go\n")
        worker.stdin.flush()
    last = ""
    for line in worker.stdout:
        if line.strip() == TURN:
            limit.cancel()
            return None
        last = line.strip() or last
        if line.startswith("ROW "):
            file, row = json.loads(line[4:])
            rows.append(options.out / file, {**row, "commit": commit})
            shown = {key: value for key, value in row.items() if key not in HIDDEN}
            print(f"{file:14}", *(f"{key} {value} " for key, value in shown.items()), flush=True)
        elif line.startswith(f"{dtype}: "):
            print(line, end="", flush=True)
    code = worker.wait()
    if code:
        reason = f"took more than {options.timeout} s" if not limit.is_alive() else f"exit code {code}"
        print(f"{dtype} failed ({reason}): {last}\n{log.read_text()[-3000:]}", flush=True)
    limit.cancel()
    return code == 0
