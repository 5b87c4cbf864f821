"""Compile kernels ahead of the steps that launch them, side by side.

A layer has about fifteen kernels and variants. Compiled one after the other, each where it is first launched, they take
longer than all the rest of an engine's start. So the layer's launches are first noted and not run (`Ahead`), and what
they need is compiled by several threads: most of a compilation is C++, which holds no lock of Python's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

Compile = Callable[[], object]
MAX_THREADS = 12
"""More wait for one another: Python code, the first part of a Triton compilation, runs in one thread at a time."""

_noting = threading.local()
_compiled: set[Hashable] = set()
"""Variants that this process has compiled ahead."""


class Ahead:
    """A block in whose thread launches are noted and not run. At its end, what they need is compiled.

    compiled: how many variants were, afterwards; 0 where all had been compiled before.
    """

    def __init__(self) -> None:
        self.jobs: dict[Hashable, Compile] = {}
        self.compiled = 0

    def __enter__(self) -> Ahead:
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
        if variant not in _compiled:
            self.jobs.setdefault(variant, compile_variant)

    def _compile(self) -> None:
        if not self.jobs:
            return
        threads = min(len(self.jobs), MAX_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, "packed_kv_compile") as pool:
            for done in [pool.submit(job) for job in self.jobs.values()]:
                done.result()
        _compiled.update(self.jobs)
        self.compiled = len(self.jobs)


def current() -> Ahead | None:
    """Return the block that this thread is in."""
    return getattr(_noting, "ahead", None)
