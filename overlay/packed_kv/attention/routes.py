"""Limits of the decode route, by card. Imports no Triton, as the CPU platform may lack it.

Fused means that the decode kernel reads codes and attends in one; prefill unpacks codes into a workspace first."""

from __future__ import annotations

from ..kernels.cuda import longest_query

MAX_COLUMNS = 64
"""Query heads of a KV head times query tokens of a request that the Triton kernel serves. It decodes a request's pages
again for every tile of them; the prefill route does it once, but through memory. In tiles of 8 the kernel wins at every
shape measured with 64 columns, with 128 no longer (docs/tried.md). The CUDA kernel, which decodes them once for 64
columns, takes more (`kernels.cuda.longest_query`)."""


def longest_fused(group: int, *, by_cuda: bool) -> int:
    """Return the query tokens of a request that the decode kernel takes. One it always takes, as CUDA graphs need it.

    group: query heads a KV head. by_cuda: whether the CUDA kernel serves the layer, or Triton's.
    """
    return max(1, longest_query(group) if by_cuda else MAX_COLUMNS // group)
