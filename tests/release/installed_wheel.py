"""The built distributions, and an environment in which the wheel is installed (conftest.py makes both)."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SET_FOR_TESTS = ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
"""Variables that a user's environment has not."""


@dataclass(frozen=True)
class Distributions:
    wheel: Path
    source: Path


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment of its processes: its commands come first, and nothing leads to the checkout."""
        kept = {name: value for name, value in os.environ.items() if name not in SET_FOR_TESTS}
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(self.folder)}

    def run(self, command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, in its folder. Fails with its output if it fails."""
        whole = [self.folder / "bin" / command, *arguments]
        done = subprocess.run(
            whole, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done
