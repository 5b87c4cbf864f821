"""Attention in PyTorch, fp32: the reference of the kernels, and what serves where there is none."""
