"""Which route serves a request, on which card. Imports no Triton, as the CPU platform may lack it."""

from __future__ import annotations

import torch

MAX_COLUMNS = 64
"""Query heads of a KV head times query tokens of a request that the decode kernel serves, 8 columns a program. It
decodes a request's pages again for every 8 columns; the prefill route does it once, but through memory. At 64 columns
the kernel wins at every shape measured, at 128 no longer (benchmarks/routes.py; docs/attention.md has the table)."""


def fused_serves(group: int, query_len: int, dtype: torch.dtype) -> bool:
    """Whether the fused route takes requests of up to `query_len` query tokens, `group` query heads a KV head."""
    return dtype != torch.float32 and query_len <= longest_fused(group)


def longest_fused(group: int) -> int:
    """Query tokens of a request that the fused route takes. One it always takes, as CUDA graphs need this route."""
    return max(1, MAX_COLUMNS // group)
