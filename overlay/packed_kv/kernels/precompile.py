"""Compile kernels ahead of the steps that launch them, side by side, while vLLM goes on.

A layer has some twenty kernels and variants. Compiled one after the other, each where it is first launched, they take
longer than all the rest of an engine's start. So the layer's launches are first noted and not run (`Precompiler`), and
several threads compile their kernels: most of a compilation is C++, which holds no lock of Python's. Meanwhile vLLM
compiles kernels of its own. A launch waits for its variant (`wait_for`), and the engine waits for all variants
(`wait_for_all`) before it captures graphs and serves. A variant that was not noted is compiled by the step that first
launches it, and a line of the log says so.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

logger = logging.getLogger("vllm.packed_kv")

Compile = Callable[[], object]
MAX_THREADS = 12
"""Threads that compile. More would wait for one another: Python code, the first part of a Triton compilation, runs in
one thread at a time."""

_noting = threading.local()
_compilations: dict[Hashable, Future[object]] = {}
"""Variants that this process compiles ahead, or has compiled."""
_unforeseen: set[Hashable] = set()
"""Variants that were needed and had not been noted."""


class Precompiler:
    """A `with` block in whose thread launches are noted and not run. At its end, threads begin to compile their
    kernels."""

    def __init__(self) -> None:
        self.jobs: dict[Hashable, Compile] = {}

    def __enter__(self) -> Precompiler:
        assert current() is None, "one block at a time"
        _noting.ahead = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _noting.ahead = None
        if error is None:
            self._compile()

    def note(self, variant: Hashable, compile_variant: Compile) -> None:
        """Have a variant compiled, once per process. `compile_variant` runs in another thread."""
        if variant not in _compilations:
            self.jobs.setdefault(variant, compile_variant)

    def _compile(self) -> None:
        _compilations.update((variant, _pool().submit(job)) for variant, job in self.jobs.items())


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """The process's threads; they sleep once all is compiled."""
    return ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "packed_kv_compile")


def current() -> Precompiler | None:
    """Return the block that this thread is in."""
    return getattr(_noting, "ahead", None)


def wait_for(variant: Hashable, kernel: str = "") -> None:
    """Return once the variant is compiled, or at once if it was never noted: then, in a process that compiles ahead,
    the log says once that `kernel` makes a step wait. Raises the error of its compilation."""
    compilation = _compilations.get(variant)
    if compilation is not None:
        compilation.result()
    elif _compilations and variant not in _unforeseen:
        _unforeseen.add(variant)
        logger.warning("the kernel %s was not compiled ahead in this variant: a step waits for that now", kernel)


def wait_for_all() -> None:
    """Return once all noted variants are compiled. Raises the error of the first compilation that failed."""
    for variant in tuple(_compilations):
        wait_for(variant)
