"""The threads of kernels in C++: PyTorch's own, and what is said where they are not found."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
from packed_kv.kernels.cpu import build, threads
from packed_kv.selftest.__main__ import describe_wrong
from packed_kv.selftest.checks import check_threads


@pytest.fixture
def no_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No library of the process's global scope has the function that runs work on PyTorch's threads."""
    read = build.read_sources

    def changed(program: build.Program) -> dict[str, str]:
        return {name: text.replace("GOMP_parallel", "no_such_function") for name, text in read(program).items()}

    monkeypatch.setattr(build, "read_sources", changed)
    monkeypatch.setattr(build, "POOL", "no_such_function")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for cached in (build._load, build._warn_of_one_thread):
        cached.cache_clear()
    yield
    for cached in (build._load, build._warn_of_one_thread):
        cached.cache_clear()


def test_as_many_threads_as_are_asked_for() -> None:
    assert [len(threads.thread_ids(count)) for count in (1, 2, 3)] == [1, 2, 3]
    assert check_threads().is_right


def test_without_threads(no_pool: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test finds it, and one line of the log names cause and remedy."""
    monkeypatch.setattr(build, "logger", logging.getLogger("packed_kv_test"))  # vLLM's does not propagate
    wrong = check_threads()
    assert not wrong.is_right and "kernels in C++ run on 1 of 2 threads" in describe_wrong(wrong)
    build._load.cache_clear()
    threads.thread_ids(2)
    (record,) = caplog.records
    assert re.search(r"on one thread instead of 2: .*LD_PRELOAD=/\S*lib\w*omp\S*\.so", record.getMessage())
