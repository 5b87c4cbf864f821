"""`packed-kv selftest` on a GPU: all is right by each kernel, in time, and planted faults are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_kv.attention.decode import CudaPairs, TritonPairs
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import runs_on
from packed_kv.selftest import __main__ as process

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SECONDS = 120
"""On an H100 or H200 with 16 cores, whether kernels are compiled or not."""


def test_all_is_right_in_time(tmp_path: Path) -> None:
    """The first run compiles everything. Where the CUDA kernel serves, each dtype has a row by it as well."""
    command = [sys.executable, "-m", "packed_kv.commands.main", "selftest", "--json"]
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "PACKED_KV_CACHE": str(tmp_path / "packed_kv")}
    kernels = {"CUDA", "Triton"} if runs_on(torch.cuda.get_device_capability()) else {"Triton"}
    for _ in range(2):
        start = time.monotonic()
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | caches)
        seconds = time.monotonic() - start
        assert run.returncode == 0, run.stderr + run.stdout
        found = json.loads(run.stdout)
        rows, has_fp8 = found["rows"], torch.cuda.get_device_capability()[0] == 9
        assert {(row["dtype"], row["kernel"]) for row in rows} == {(name, one) for name in FORMATS for one in kernels}
        assert all(row["microseconds"] > 0 and row["bf16_microseconds"] > 0 for row in rows)
        assert all((row["fp8_microseconds"] is not None) == has_fp8 for row in rows)
        assert found["timed"]["copy_rate"] > 1e11
        print(f"{seconds:.0f} s")
        assert seconds < SECONDS


def spoiled(attend: Callable[..., None]) -> Callable[..., None]:
    def attend_and_spoil(self: Any, step: Any, cache: Any, queries: Any, ring: Any, output: torch.Tensor) -> None:
        attend(self, step, cache, queries, ring, output)
        output[-1] *= 1.01

    return attend_and_spoil


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one row's output, inside and outside of graphs."""
    for kernel in (TritonPairs, CudaPairs):
        monkeypatch.setattr(kernel, "attend", spoiled(kernel.attend))
    said: list[dict[str, Any]] = []
    process.run(said.append, ["tq4"], "cuda", [("tq4", "triton")])
    (row,) = (what["row"] for what in said if "row" in what)
    assert not row["is_right"] and any(line.startswith(("decode", "merge")) for line in row["wrong"]), row["wrong"]
    assert row["microseconds"] is None, "no time of a wrong step"
