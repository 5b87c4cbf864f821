"""Attention in PyTorch, fp32: the reference of the kernels, and the fallback where there is no kernel."""
