"""`packed-kv` where nothing is installed but packed-kv."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import REPO

BARE = "import sys; from packed_kv.commands.main import main; sys.exit(main(sys.argv[1:]))"
"""Run with -S, without site-packages."""


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `packed-kv` in a Python that has the standard library and packed-kv, and nothing else."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "packed_kv_patches").symlink_to(REPO / "vllm_patches")
    folders = [tmp_path / "packages", *(REPO / part for part in ("overlay", "calibration", "quality"))]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, folders))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # -P: where the checkout is installed, its metadata lies in the current folder.
        command = [sys.executable, "-S", "-P", "-c", BARE, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return run
