"""Kernel tests run on a GPU where there is one, else under Triton's interpreter; with `--as-capability` as kernels run
on an older GPU (`older_gpu.py`).

The interpreter is chosen by the environment when triton is first imported, for the whole process; so these tests have
their own (`pytest tests/kernels`), and are skipped where triton came first without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import older_gpu
import pytest
import torch
from packed_kv.gpu_generations import generation_of

HERE = Path(__file__).parent
COUNT_LAUNCHES = ("test_precompile.py", "test_bound_launches.py", "test_launch.py")
"""Tests of launching itself, whose launches are not repeated."""
sys.path += [str(HERE / room) for room in ("triton", "cuda", "cpu")]  # tests take helpers from each other

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.hasten()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-capability", choices=older_gpu.CAPABILITIES, help="take the GPU for one of this capability")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported, which ask for the capability."""
    if (asked := config.getoption("as_capability", None)) is None:  # unknown to pytest of another folder
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError(f"--as-capability {asked}: PyTorch sees no GPU; run it on one of 9.0 or later")
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    older_gpu.pretend(patch, older_gpu.CAPABILITIES[asked])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="triton was imported without its interpreter: run pytest tests/kernels by itself")
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name != "test_compile.py":
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _launches_are_repeated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a GPU, have every launch of a Triton kernel leave the same bits each time: a race may be right once. Memory
    that a test used is free after it, for the other processes."""
    is_kernel = request.path.is_relative_to(HERE) and request.path.name not in COUNT_LAUNCHES
    if torch.cuda.is_available() and is_kernel:
        from packed_kv.kernels.triton.launch import Launch
        from repeated import repeat_launches

        monkeypatch.setattr(Launch, "__call__", repeat_launches(Launch.__call__))
        yield
        torch.cuda.empty_cache()
    else:
        yield


@pytest.fixture(autouse=True)
def _cuda_kernels_are_skipped_where_none_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() and not generation_of(torch.cuda.get_device_capability()).cuda_columns:
        from packed_kv.kernels.cuda import kernel

        monkeypatch.setattr(kernel, "load", lambda *_: pytest.skip("the CUDA kernels do not compile for this GPU"))
