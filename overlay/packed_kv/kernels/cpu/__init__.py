"""Kernels in C++ for CPUs, compiled at first use (`build.py`). They know bit widths and offsets, never dtype names."""
