"""The threads that kernels in C++ run on: `base/threads.h`."""

from __future__ import annotations

import ctypes

from .build import Program, load_library

PROGRAM = Program("base/threads.cpp")


def thread_ids(count: int) -> set[int]:
    """Return how many threads work ran on, of the `count` requested ones. Raises BuildError."""
    function = load_library(PROGRAM, "").thread_ids
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.POINTER(ctypes.c_uint64), ctypes.c_int64]
    ids = (ctypes.c_uint64 * count)()
    return set(ids[: function(ids, count)])
