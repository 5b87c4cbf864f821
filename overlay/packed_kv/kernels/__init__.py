"""Kernels in Triton, CUDA C++ and C++ for CPUs. They know bit widths and offsets, never dtype names."""

from __future__ import annotations


def power_of_2(size: int) -> int:
    """The least power of 2 that is at least `size`. Triton's own wraps its arguments, which slows each launch down."""
    return 1 << (size - 1).bit_length()
