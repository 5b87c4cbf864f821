"""A `vllm serve` in processes of its own, on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The `vllm` command, also where its script is not installed."""


@dataclass(frozen=True)
class Server:
    """A running server; `process` leads a session of its own."""

    process: subprocess.Popen
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def counters(self) -> dict[str, float]:
        """Lines of /metrics by name, summed over their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if match := re.match(r"([a-z_:]+)(?:\{.*\})? ([-+.\de]+)$", line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def wait_until_healthy(self, seconds: float) -> None:
        """Raises RuntimeError with the end of the log if the server does not answer in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if self.is_healthy():
                return
            time.sleep(0.5)
        code = self.process.poll()
        reason = f"did not answer within {seconds:.0f} s" if code is None else f"ended with exit code {code}"
        raise RuntimeError(f"the server {reason}:\n{self.log.read_text()[-3000:]}")


@contextlib.contextmanager
def serve(model: str, dtype: str, name: str, options: list[str], log: Path) -> Iterator[Server]:
    """Start a server whose model is called `name`; the caller waits until it answers. Afterwards end it and all that it
    started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*VLLM, "serve", model, "--kv-cache-dtype", dtype, "--served-model-name", name, "--host", "127.0.0.1"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options], stdout=output, stderr=subprocess.STDOUT,
            env={"VLLM_NO_USAGE_STATS": "1", **os.environ}, start_new_session=True,
        )  # fmt: skip
    try:
        yield Server(process, port, log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the server's session may have an engine that outlives it
        process.wait()
