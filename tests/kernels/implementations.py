"""Decode attention by each of its implementations: what tests hold to one reference."""

from __future__ import annotations

from typing import Any

import torch
from packed_kv.kernels.cuda import launch
from packed_kv.kernels.decode import decode
from packed_kv.kernels.merge import merge
from packed_kv.layout import PageLayout


def attend_pages(
    kernel: str,
    page: PageLayout,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    matrix: torch.Tensor,
    output: torch.Tensor,
    splits: int | launch.Grid,
    *,
    max_query_len: int,
    **options: Any,
) -> None:
    """Attention of rotated queries and V's rotation back; the arguments are those of `decode` and `merge`.

    kernel: "triton"; "cuda"; or "cuda emulated" on the CPU, for which `splits` may say the grid.
    """
    tokens, kv_heads, group, head_dim = query.shape
    shape = splits if isinstance(splits, launch.Grid) else launch.Grid(launch.FUSED_WARPS, splits)
    rows = (tokens, kv_heads * group, shape.blocks)
    partial = torch.full((*rows, head_dim), float("nan"), device=query.device)
    stats = torch.full((*rows, 2), float("nan"), device=query.device)
    output = output.view(tokens, kv_heads, group, -1)
    batch = (query, cache, block_table, query_start, seq_lens)
    if kernel == "triton":
        decode(page, *batch, partial, stats, max_query_len=max_query_len, **options)
        merge(partial, stats, matrix, output)
        return
    assert not options.pop("sliding_window") and not options.pop("logits_soft_cap"), options
    if kernel == "cuda":
        cuda = launch.CudaDecode(page, matrix, kv_heads, group)
        cuda(shape, *batch, partial, stats, output, max_query_len=max_query_len, **options)
        counters = cuda.counters
    else:
        counters = _emulate(page, batch, matrix, output, partial, stats, shape, max_query_len, **options)
    if not shape.is_final:
        merge(partial, stats, matrix, output)
    assert not counters.any(), "not left for the next launch"


def _emulate(
    page: PageLayout, batch: tuple[torch.Tensor, ...], matrix: torch.Tensor, output: torch.Tensor,
    partial: torch.Tensor, stats: torch.Tensor, shape: launch.Grid, max_query_len: int, *, query_bias: Any = None,
    ring: Any = None,
) -> torch.Tensor:  # fmt: skip
    import emulated

    query, cache, *_, seq_lens = batch
    _, kv_heads, group, _ = query.shape
    variant = launch.Variant(
        shape.warps, 4 if group * max_query_len <= 4 else 8, cache.shape[2], ring.cache.shape[2] if ring else 0,
        ring.window if ring else 0, query_bias is not None, output.dtype,
    )  # fmt: skip
    constants = launch.constants(page, kv_heads, group, variant)
    counters = torch.zeros(len(seq_lens) * kv_heads, dtype=torch.int32)
    emulated.run(
        constants, shape, kv_heads, len(seq_lens), *batch, query_bias, ring, launch.pack_matrix(matrix), output,
        partial, stats, counters,
    )  # fmt: skip
    return counters
