"""The process of `packed-kv selftest` that loads vLLM: one line of JSON for each thing that happens.

`{"machine": ...}` comes first, or `{"cannot": LINE}`; `{"begin": [dtype, kernel]}` before anything of a row is made or
launched, so that a process that dies has named the row; `{"timed": ...}`, the layer and batch that are timed and the
rate of a copy, when all rows are made, but not in a process that continues another's rows; `{"row": ...}` when the row
is done, `{"end": rows}` last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from ..child_process import end_with
from ..formats import FORMATS
from ..kernels.precompile import wait_for_all
from . import launches
from .checks import THREADS, Check, check_pairs, check_threads, pair_layers
from .compilers import Compilers
from .device import CannotRun, describe, find_device, kernels
from .latents import check_latents, latent_layers
from .launches import CPP
from .timing import TimedBatch, Times, describe_timed, time_step

Say = Callable[[dict[str, Any]], None]
REFERENCE_THREADS = 1
"""Threads of PyTorch on the CPU where a GPU is tested: references there are many small operations. On two idle cores a
second thread saves a quarter of their time; on busy ones threads wait for one another, and take 20 times as long."""
MOST_WRONG = 5
"""Most wrong comparisons of a row that are listed."""


def main(arguments: Sequence[str]) -> int:
    """Run with one argument, JSON: `dtypes`, `device`, `done`, rows as [dtype, kernel] to leave out, and `parent`, the
    process ID of who reads."""
    asked = json.loads(arguments[0])
    end_with(asked["parent"])
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's output is not part of the answer

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=stream, flush=True)

    dtypes, device, done = asked["dtypes"], asked["device"], [tuple(row) for row in asked["done"]]
    is_cpu = "cpu" in (device, current_platform.device_type)
    run(say, dtypes, device, done, Compilers([] if is_cpu else dtypes, compile_kernels))
    return 0


def run(
    say: Say, dtypes: list[str], asked: str, done: Collection[tuple[str, str]], compilers: Compilers | None = None
) -> None:
    """Report the rows of all dtypes and kernels, but for those that are `done`. `compilers` run once the device is
    known."""
    try:
        device = find_device(asked)
        if device.type == "cuda":
            torch.set_num_threads(REFERENCE_THREADS)
        say({"machine": describe(device)})
        if compilers is not None:
            compilers.run(device)
        rows = [(name, kernel) for name in dtypes for kernel in kernels(device) if (name, kernel) not in {*done}]
        launches.prepare(device, [FORMATS[name] for name in dtypes])
        made = []
        for name, kernel in rows:
            say({"begin": [name, kernel]})
            made.append(Row(name, kernel, device))
        if not done:
            say({"timed": describe_timed(device)})
        while made:
            row = made.pop(0)
            say({"begin": [row.name, row.kernel]})
            say({"row": row.run()})
        say({"end": len(rows)})
    except CannotRun as error:
        say({"cannot": str(error)})
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        say({"cannot": f"--device {asked}: {first}; end what holds the memory, or name another GPU: --device cuda:N"})


def compile_kernels(dtypes: list[str], device: torch.device) -> None:
    """Compile the kernels of all rows of the dtypes on a GPU."""
    torch.cuda.set_device(device)
    launches.prepare(device, [FORMATS[name] for name in dtypes])
    for name in dtypes:
        for kernel in kernels(device):
            Row(name, kernel, device)
    wait_for_all()


class Row:
    """A dtype by one decode kernel. Making it has its kernels compiled in other threads."""

    def __init__(self, name: str, kernel: str, device: torch.device) -> None:
        self.name, self.kernel, self.device, self.fmt = name, kernel, device, FORMATS[name]
        self.pairs = pair_layers(self.fmt, device, kernel)
        # "cuda" is a row where "auto" takes Triton's kernels (`kernels`): latents have no others
        self.latents = [] if kernel == "cuda" else latent_layers(self.fmt, device, kernel)
        self.timed = TimedBatch(self.fmt, device, kernel)
        self.timed.compile_ahead()

    def run(self) -> dict[str, Any]:
        """Return the row's results; see docs/commands.md."""
        start, times = time.monotonic(), None
        found: list[Check] = []
        if self.pairs[0].kernel == CPP and torch.get_num_threads() > 1:
            found.append(check_threads())
        for layer in self.pairs:
            found += check_pairs(self.fmt, layer, self.device)
        for latents in self.latents:
            found += check_latents(self.fmt, latents, self.device)
        for result in time_step(self.timed):
            if isinstance(result, Times):
                times = result
            else:
                found.append(result)
        wrong = [check for check in found if not check.is_right]
        return {
            "dtype": self.name,
            "decode_kernel": self.kernel,
            "kernel": self.pairs[0].kernel,
            "latents_kernel": self.latents[0].kernel if self.latents else None,
            "parts": parts(found),
            "wrong": [describe_wrong(check) for check in wrong[:MOST_WRONG]],
            "repeats": sum(check.repeats for check in found),
            "differ": sum(check.differ for check in found),
            "microseconds": times and times.packed,
            "bf16_microseconds": times and times.bf16,
            "fp8_microseconds": times and times.fp8,
            "is_right": not wrong,
            "seconds": time.monotonic() - start,
        }


def parts(found: list[Check]) -> dict[str, dict[str, Any]]:
    """Return each part's comparisons, and the error that is largest relative to its bound; an error that is NaN becomes
    None."""
    made: dict[str, dict[str, Any]] = {}
    for check in sorted(found, key=lambda check: check.error / check.bound if check.bound else check.error * 1e9):
        cases = made.get(check.part, {"cases": 0})["cases"]
        error = check.error if check.error < float("inf") else None
        made[check.part] = {"cases": cases + 1, "error": error, "bound": check.bound}
    return made


def describe_wrong(check: Check) -> str:
    """A line about a comparison that failed."""
    if check.part == THREADS:
        return check.case
    if check.differ:
        return f"{check.part}, {check.case}: {check.differ} of {check.repeats} launches left other bits"
    what = "of the bytes differ" if not check.bound else f"relative error, {check.bound:.1e} allowed"
    return f"{check.part}, {check.case}: {check.error:.1e} {what}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
