"""Kernel tests run on a GPU where there is one, else under Triton's interpreter.

The interpreter is chosen by the environment when triton is first imported, for the whole process; so these tests have
their own (`pytest tests/kernels`), and are skipped where triton came first without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
COUNT_LAUNCHES = ("test_precompile.py", "test_bound_launches.py", "test_launch.py")
"""Tests of launching itself, whose launches are not repeated."""
sys.path += [str(HERE / room) for room in ("triton", "cuda", "cpu")]  # tests take helpers from each other

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.hasten()


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
