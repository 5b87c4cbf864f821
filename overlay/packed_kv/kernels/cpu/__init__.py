"""Kernels in C++ for CPUs, compiled at first use (`build.py`). They know bit widths and offsets, never dtype names."""

from __future__ import annotations

BITS = (4, 3, 2)
"""Widths that `pages.h` decodes."""
ROTATIONS = ("hadamard", "givens", "quaternion")
"""Rotations, in the order of their numbers in `constants.h`."""
MOST_CHANNELS, MOST_ROPE = 512, 128
"""The most channels of a latent, and of RoPE beside it."""
VECTOR_CHANNELS, LATENT_CHANNELS = 256, MOST_CHANNELS + MOST_ROPE
"""Channels that memory of the store and the gather has room for: of a K or V, and of a latent with RoPE channels."""
