"""Triton kernels. They know bit widths and offsets, never dtype names."""
