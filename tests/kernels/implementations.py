"""Decode attention by each of its implementations: what tests hold to one reference."""

from __future__ import annotations

from typing import Any

import torch
from launchers import decode, merge
from packed_kv.formats import GROUP_SIZE
from packed_kv.kernels.cuda import LARGE_HEAD, grids, launch, pass_tokens
from packed_kv.kernels.cuda.schedule import PART_SHIFT, SLOT_SHIFT, item_count
from packed_kv.layout import PageLayout
from schedules import reference_schedule


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
    splits: int | grids.Grid,
    *,
    max_query_len: int,
    **options: Any,
) -> None:
    """Attention of rotated queries and V's rotation back; the arguments are those of `decode` and `merge`.

    kernel: "triton", "cuda", or "cuda emulated" on the CPU, for which `splits` may be the grid. A final grid's `blocks`
    are the resident blocks for which the schedule is made.
    """
    tokens, kv_heads, group, head_dim = query.shape
    columns = 0 if kernel == "triton" else grids.column_count(group, max_query_len, unpackers=grids.has_unpackers(page))
    passes = 1 if kernel == "triton" else grids.pass_count(group, max_query_len)
    if columns and head_dim == LARGE_HEAD:
        warps = grids.LARGE_WARPS[columns]
    else:
        warps = 8 if columns <= 8 else head_dim // GROUP_SIZE
    shape = splits if isinstance(splits, grids.Grid) else grids.Grid(warps, splits, is_final=True)
    # Without a final grid, a warp of a narrow block is a split, and so is a team.
    is_team = grids.is_wide(columns, head_dim)
    assert kernel == "triton" or shape.is_final or shape.warps == 1 or is_team, (shape, columns)
    rows, schedule = (tokens, kv_heads * group, shape.blocks), None
    if kernel != "triton" and shape.is_final:
        schedule = make_schedule(seq_lens.repeat_interleave(passes), shape)
        rows = (len(schedule), kv_heads, columns)
    partial = torch.full((*rows, head_dim), float("nan"), device=query.device)
    stats = torch.full((*rows, 2), float("nan"), device=query.device)
    output = output.view(tokens, kv_heads, group, -1)
    batch = (query, cache, block_table, query_start, seq_lens)
    sinks, lse = options.pop("sinks", None), options.pop("lse", None)
    value_means = options.get("value_means")
    of_merge = {"value_means": value_means, "query_bias": options.get("query_bias")}
    if kernel == "triton":
        decode(page, *batch, partial, stats, max_query_len=max_query_len, **options)
        merge(partial, stats, matrix, output, sinks, lse, **of_merge)
        return
    assert sinks is None
    assert not options.pop("sliding_window", None) and not options.pop("logits_soft_cap", None), options
    bias, ring, tiles = options.pop("query_bias", None), options.pop("ring", None), options.pop("tiles_a_block", 0)
    step = launch.step_arguments(query, block_table, query_start, seq_lens, partial, stats, bias, ring, lse, schedule)
    packed = launch.pack_matrix(matrix, value_means)
    items = len(seq_lens) * passes if schedule is None else len(schedule)
    counters = torch.zeros(items * kv_heads, dtype=torch.int32, device=query.device)
    if kernel == "cuda":
        of_bias = None if bias is None else tiles
        cuda = launch.CudaDecode(page, packed, counters, cache, ring, output, of_bias, lse is not None)
        shape = shape if schedule is None else shape._replace(blocks=items)
        cuda(shape, max_query_len, len(seq_lens), step, output)
    else:
        import emulated

        variant = launch.PairVariant(
            shape.warps, shape.is_final, columns, cache.shape[2],
            ring.cache.shape[2] if ring else 0, ring.window if ring else 0, bias is not None, output.dtype,
            lse is not None and shape.is_final, tiles, passes, has_value_means=value_means is not None,
        )  # fmt: skip
        constants = launch.constants(page, kv_heads, group, variant)
        layer = launch.layer_arguments(cache, ring, output, packed, counters)
        blocks = (shape.blocks, kv_heads, items) if schedule is None else (1, kv_heads, items)
        emulated.run(constants, blocks, output, step, layer)
    if not shape.is_final:
        merge(partial, stats, matrix, output, lse=lse, **of_merge)
    assert not counters.any(), "not left for the next launch"
    if schedule is not None:
        check_parts(schedule, queries_of_passes(query_start, passes, pass_tokens(group)), stats)


def make_schedule(seq_lens: torch.Tensor, shape: grids.Grid) -> torch.Tensor:
    """Return the schedule for a card with `shape.blocks` resident blocks per KV head, int32 [items, 4]."""
    words = [item.words() for item in reference_schedule(seq_lens.tolist(), shape.blocks, shape.warps)]
    words += [(-1, -1, -1, -1)] * (item_count(len(seq_lens), shape.blocks) - len(words))
    return torch.tensor(words, dtype=torch.int32, device=seq_lens.device)


def queries_of_passes(query_start: torch.Tensor, passes: int, tokens: int) -> list[int]:
    """Return the query tokens of each pass of each request, `tokens` at most."""
    counts = query_start.diff().tolist()
    return [min(max(count - tokens * i, 0), tokens) if passes > 1 else count for count in counts for i in range(passes)]


def check_parts(schedule: torch.Tensor, queries: list[int], stats: torch.Tensor) -> None:
    """Assert that each part of a cut request has written its own slot of partial results, and nothing else has."""
    expected = {
        (word >> SLOT_SHIFT) + (begin >> PART_SHIFT)
        for word, _, begin, end in schedule.tolist()
        if word >= 0 and end >> PART_SHIFT > 1 and queries[word & (1 << SLOT_SHIFT) - 1] > 0
    }
    written = (~stats[..., 0].isnan()).any(-1).any(-1).tolist()
    assert written == [slot in expected for slot in range(len(schedule))]
