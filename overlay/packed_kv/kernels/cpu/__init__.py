"""Kernels in C++ for CPUs, compiled at first use (`build.py`). They know bit widths and offsets, never dtype names."""

from __future__ import annotations

BITS = (5, 4, 3, 2)
"""Widths that `layout/codes.h` decodes."""
ROTATIONS = ("hadamard", "givens", "quaternion")
"""Rotations that `layout/rotation.h` has."""
MOST_CHANNELS, MOST_ROPE = 512, 128
"""The most channels of a latent, and of RoPE beside it."""
VECTOR_CHANNELS = 256
"""The most channels of a head."""
