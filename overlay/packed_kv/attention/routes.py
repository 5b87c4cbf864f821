"""Which route serves a request, on which card. Imports no Triton, as the CPU platform may lack it."""

from __future__ import annotations

import torch

from ..kernels.cuda import CAPABILITY, longest_query

MAX_COLUMNS = 64
"""Query heads of a KV head times query tokens of a request that the Triton kernel serves. It decodes a request's pages
again for every few of them; the prefill route does it once, but through memory. At 64 columns the kernel wins at every
shape measured, at 128 no longer (benchmarks/routes.py; docs/attention.md has the table). The CUDA kernel, which decodes
them once for 64 columns, takes more (`kernels.cuda.longest_query`)."""


def fused_serves(
    group: int, query_len: int, dtype: torch.dtype, capability: tuple[int, int] | None, kernel: str
) -> bool:
    """Whether the fused route takes requests of up to `query_len` query tokens, `group` query heads a KV head.

    capability: of the GPU; None: there is none. kernel: the option `decode_kernel`.
    """
    return dtype != torch.float32 and query_len <= longest_fused(group, capability, kernel)


def longest_fused(group: int, capability: tuple[int, int] | None, kernel: str) -> int:
    """Query tokens of a request that the fused route takes. One it always takes, as CUDA graphs need this route."""
    of_cuda = longest_query(group) if capability == CAPABILITY and kernel != "triton" else 0
    return max(1, MAX_COLUMNS // group, of_cuda)
