"""The processes that compile for the self-test: which dtypes each has, when they start, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_kv.formats import FORMATS
from packed_kv.selftest import __main__ as process
from packed_kv.selftest import compilers
from packed_kv.selftest.compilers import Compilers

CPU = torch.device("cpu")
THREE = ["isoquant3", "planarquant3", "tq3"]
FOUR = ["isoquant4", "planarquant4", "tq4"]


def into(folder: Path) -> Callable[[list[str], torch.device], None]:
    def compile_kernels(names: list[str], device: torch.device) -> None:
        (folder / str(os.getpid())).write_text(" ".join([*names, str(device)]))

    return compile_kernels


def test_dtypes_of_one_width_share_a_process(tmp_path: Path) -> None:
    started = Compilers(FORMATS, into(tmp_path))
    time.sleep(0.2)
    assert not list(tmp_path.iterdir()), "they wait for run"
    started.run(torch.device("cuda:1"))
    found = sorted(path.read_text() for path in tmp_path.iterdir())
    groups = (THREE, FOUR, ["turboquant25"], ["turboquant35"])
    assert found == sorted(" ".join([*names, "cuda:1"]) for names in groups)
    assert str(os.getpid()) not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("names", [[], ["tq4"], FOUR])
def test_one_width_needs_no_process(names: list[str], tmp_path: Path) -> None:
    started = Compilers(names, into(tmp_path))
    started.run(CPU)
    assert not started.started and not list(tmp_path.iterdir())


def test_one_that_fails_dies_or_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def compile_kernels(names: list[str], device: torch.device) -> None:
        if names == ["turboquant25"]:
            raise RuntimeError("no such architecture")
        if names == ["turboquant35"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        if names == THREE:
            time.sleep(60)
        into(tmp_path)(names, device)

    monkeypatch.setattr(compilers, "MOST_SECONDS", 2)
    started, begun = Compilers(FORMATS, compile_kernels), time.monotonic()
    started.run(CPU)
    assert time.monotonic() - begun < 30
    assert [path.read_text() for path in tmp_path.iterdir()] == [" ".join([*FOUR, "cpu"])]
    for one, _ in started.started:
        one.join(10)
        assert not one.is_alive()
    assert "no such architecture" in capfd.readouterr().err


PARALLEL = """
import os, torch
from packed_kv.selftest.compilers import Compilers

def work(names, device):
    os.write(1, f"{torch.ones(4_000_000).mul(2).sum():.0f} of {' '.join(names)}\\n".encode())

torch.set_num_threads(2)
assert torch.ones(4_000_000).mul(2).sum() == 8e6
assert len(os.listdir("/proc/self/task")) > 1
Compilers(["tq3", "tq4"], work).run(torch.device("cpu"))
"""


def test_they_do_not_wait_for_threads_of_the_process() -> None:
    """Which PyTorch's operations have started by then, and a forked process has not."""
    run = subprocess.run([sys.executable, "-c", PARALLEL], capture_output=True, text=True, check=False, timeout=120)
    assert sorted(run.stdout.split("\n")) == ["", "8000000 of tq3", "8000000 of tq4"], run.stderr


PARENT = """
import os, signal, sys
from packed_kv.selftest.compilers import Compilers
started = Compilers(["tq3", "tq4"], lambda names, device: None)
print(*(process.pid for process, _ in started.started), flush=True)
HOW
"""


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)", "raise ValueError"])
def test_they_end_with_the_process(how: str) -> None:
    """Without `run`, however it ends."""
    command = [sys.executable, "-c", PARENT.replace("HOW", how)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2, run.stderr
    end = time.monotonic() + 10
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive


def is_alive(pid: int) -> bool:
    """A process that nobody has waited for yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("platform", "asked", "names"),
    [("cuda", "auto", ["tq3", "tq4"]), ("cuda", "cuda:1", ["tq3", "tq4"]), ("cpu", "auto", []), ("cuda", "cpu", [])],
)
def test_a_cpu_needs_none(platform: str, asked: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are one library. In any case the process ends with who started it."""
    made: list[Any] = []
    parents: list[int] = []
    monkeypatch.setattr(process, "Compilers", lambda names, _compile: made.append(names))
    monkeypatch.setattr(process, "run", lambda *_arguments: None)
    monkeypatch.setattr(process.current_platform, "device_type", platform)
    monkeypatch.setattr(process.os, "dup2", lambda *_descriptors: None)
    monkeypatch.setattr(process, "end_with", parents.append)
    process.main([f'{{"dtypes": ["tq3", "tq4"], "device": "{asked}", "done": [], "parent": 1}}'])
    assert (made, parents) == ([names], [1])
