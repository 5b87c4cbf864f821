"""The `vllm serve` of a soak: its processes, their memory, its counters and its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from packed_kv_quality import servers

NAME, ENGINE = "soaked", "EngineCore"
MIB = 1 << 20
LINGER_SECONDS = 15
"""Seconds that a process may outlive its server."""


@dataclass(frozen=True)
class Memory:
    """MiB of all the server's processes on the host, without pages that they share with files, and on the device;
    `is_own`: not of others on the device, too."""

    host: float
    device: float
    is_own: bool


@dataclass(frozen=True)
class Server(servers.Server):
    """A server under observation."""

    def processes(self) -> list[psutil.Process]:
        """All that live of the server and what it started."""
        try:
            leader = psutil.Process(self.process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def engines(self) -> list[psutil.Process]:
        """The processes of the engine: those with its name, by vLLM's own title of a process."""
        named = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if ENGINE in process.name() or ENGINE in " ".join(process.cmdline()):
                    named.append(process)
        return named

    def memory(self) -> Memory:
        host, processes = 0, self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.memory_info()
                host += used.rss - used.shared
        return Memory(host / MIB, *device_memory({process.pid for process in processes}))


def device_memory(pids: set[int]) -> tuple[float, bool]:
    """MiB that these processes use on the first GPU that is visible, and True; False and what all use, where the driver
    does not name them, as in some containers. 0 where there is no GPU."""
    if not shutil.which("nvidia-smi"):
        return 0.0, True
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={gpu}", "--format=csv,noheader,nounits"]

    def ask(what: str) -> list[list[str]]:
        answer = subprocess.run([*command, what], capture_output=True, text=True, check=True).stdout
        return [line.split(", ") for line in answer.splitlines()]

    own = [
        float(used) for pid, used in ask("--query-compute-apps=pid,used_memory") if pid.isdigit() and int(pid) in pids
    ]
    return (sum(own), True) if own else (float(ask("--query-gpu=memory.used")[0][0]), False)


@contextlib.contextmanager
def serve(model: str, dtype: str, options: list[str], log: Path) -> Iterator[Server]:
    """Start a server, and end it."""
    with servers.serve(model, dtype, NAME, options, log) as running:
        yield Server(running.process, running.port, running.log)


def kill_engine(server: Server, seconds: float, engines: list[psutil.Process] | None = None) -> dict[str, object]:
    """Kill the engine (or `engines`) with -9 and see what becomes of the server within `seconds`."""
    engines, everything = engines or server.engines(), server.processes()
    if not engines:
        raise RuntimeError(f"the server has no process called {ENGINE}")
    segments = shared_memory(everything)
    for engine in engines:
        engine.kill()
    started = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(seconds)
    code = server.process.poll()
    _, alive = psutil.wait_procs(everything, timeout=LINGER_SECONDS)
    return {
        "killed": len(engines), "exit_code": code, "seconds": round(time.monotonic() - started, 1),
        "healthy_afterwards": code is None and server.is_healthy(),
        "processes_left": sorted(_title(process) for process in alive if process.is_running()),
        "shared_memory_left": sorted(path for path in segments if Path(path).exists()),
    }  # fmt: skip


def shared_memory(processes: list[psutil.Process]) -> set[str]:
    """Files of /dev/shm that the processes have mapped."""
    paths = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            paths |= {area.path for area in process.memory_maps() if area.path.startswith("/dev/shm/")}
    return paths


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.name()} ({process.status()})"
    return ""


def save(file: Path, report: dict[str, object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
