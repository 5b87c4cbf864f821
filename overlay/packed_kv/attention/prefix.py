"""The cached tokens that a prefill reads, cut into parts that fit the workspace. The host does this once a step.

A request's new tokens (its chunk) attend over themselves, causally, and over its prefix. All new tokens follow the
prefix, so a piece of it needs no causal mask, and pieces combine by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..layout import MICRO_BLOCK
from ..reference.context_shard import UNSHARDED, ContextShard


@dataclass(frozen=True)
class Span:
    """Tokens `start` (a multiple of 16) .. `end` of a request, for its first `queries` rows; the others see none.

    `left` is FlashAttention's left window: how many keys before its own position a row sees, if the last row has the
    position of the last key; -1: all.
    """

    request: int
    queries: int
    start: int
    end: int
    left: int = -1


def prefix_parts(
    query_lens: Sequence[int],
    prefixes: Sequence[int],
    sliding_window: int | None,
    capacity: int,
    whole_blocks: bool = False,
) -> list[list[Span]]:
    """Spans that cover the prefixes of a batch, in parts of at most `capacity` tokens.

    Args:
        query_lens: new tokens of each request, at least 1.
        prefixes: tokens of each request before them.
        sliding_window: tokens that a query sees, its own included, or None.
        capacity: tokens that the workspace holds, a positive multiple of 16.
        whole_blocks: leave out the tokens of a prefix behind its last whole micro-block (see `own_part`).

    Returns:
        parts; the spans of a part are of different requests, in order, share one `left`, and leave out no request
        between them (those without a prefix have an empty span).
    """
    parts: list[list[Span]] = []
    part: list[Span] = []
    room = capacity
    for request, (count, prefix) in enumerate(zip(query_lens, prefixes, strict=True)):
        end = prefix // MICRO_BLOCK * MICRO_BLOCK if whole_blocks else prefix
        if sliding_window is not None:
            parts += [[span] for span in _window_spans(request, count, prefix, end, sliding_window, capacity)]
            continue
        start = 0
        while end - start > room:
            part.append(Span(request, count, start, start + room))
            start += room
            parts.append(part)
            part, room = [], capacity
        part.append(Span(request, count, start, end))
        room -= -(-(end - start) // MICRO_BLOCK) * MICRO_BLOCK
    parts.append(part)
    return [trimmed for trimmed in map(_trim, parts) if trimmed]


def own_part(query_lens: Sequence[int], prefixes: Sequence[int]) -> list[Span]:
    """The new tokens, read back from the pages: for layers that have no K and V of their own. Micro-blocks are read
    whole, so the part begins with the tokens that `whole_blocks` left out; the causal mask, aligned to the end, lets
    every row see them.
    """
    return [
        Span(request, count, prefix // MICRO_BLOCK * MICRO_BLOCK, prefix + count)
        for request, (count, prefix) in enumerate(zip(query_lens, prefixes, strict=True))
    ]


def _window_spans(request: int, count: int, prefix: int, last: int, sliding_window: int, capacity: int) -> list[Span]:
    """Spans of one request with a sliding window, up to token `last`. Each span is a part, because each has another
    `left`."""
    first = max(0, prefix - sliding_window + 1) // MICRO_BLOCK * MICRO_BLOCK
    spans = []
    for start in range(first, last, capacity):
        end = min(start + capacity, last)
        # Row i, at position prefix + i, sees keys from prefix + i - sliding_window + 1 on.
        queries = min(count, end - prefix + sliding_window - 1)
        if queries > 0:
            spans.append(Span(request, queries, start, end, left=end - prefix - queries + sliding_window - 1))
    return spans


def _trim(part: list[Span]) -> list[Span]:
    """Return the spans without the empty ones at the ends."""
    filled = [i for i, span in enumerate(part) if span.end > span.start]
    return part[filled[0] : filled[-1] + 1] if filled else []


@dataclass(frozen=True)
class KeyPart:
    """A part in the form that the kernels and FlashAttention take.

    `seen` are its rows of the prefill; `lengths`, FlashAttention's arguments for where each request's rows and keys
    begin in the part, int32 [requests + 1] on the device, and the most rows and keys of a request; `micro_blocks` and
    `rows` are arguments of `gather`; `positions`, int32 [tokens], are the keys' places in their requests; `recent` are
    the spans of `gather_ring`, or None.

    For a window with only a left end, FlashAttention 2 puts the right end `max_seqlen_k` keys on. With more rows than
    keys, that is too near for the first rows, so it gets the larger of both numbers (for other versions it is only an
    upper bound).
    """

    seen: slice
    lengths: dict[str, torch.Tensor | int]
    tokens: int
    left: int
    micro_blocks: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    recent: torch.Tensor | None


def key_part(
    spans: Sequence[Span],
    query_starts: Sequence[int],
    block_table: torch.Tensor,
    block_size: int,
    recent_from: Sequence[int] | None = None,
    shard: ContextShard = UNSHARDED,
) -> KeyPart:
    """Put a part's indices on the device, without waiting for it.

    Args:
        spans: of one part.
        query_starts: first row of each request of the prefill.
        block_table: int32 [requests, blocks], of the same requests.
        block_size: tokens of a block, a multiple of 16.
        recent_from: for each request, the token from which on the ring is read first; None: no ring is read.
        shard: which tokens of the requests the spans count.
    """
    first_row = query_starts[spans[0].request]
    queries, keys, rows = [0], [0], [0]
    requests, numbers, recent = [], [], []
    for span in spans:
        row = query_starts[span.request] - first_row
        assert row == queries[-1], "rows of a part are neighbours"
        queries.append(row + span.queries)
        keys.append(keys[-1] + span.end - span.start)
        if recent_from is not None and (low := max(span.start, recent_from[span.request])) < span.end:
            recent += [span.request, keys[-2] - span.start, low, span.end]
        tokens = range(span.start, span.end, MICRO_BLOCK)
        requests += [span.request] * len(tokens)
        numbers += [token // MICRO_BLOCK for token in tokens]
        rows += [keys[-2] + min(token + MICRO_BLOCK, span.end) - span.start for token in tokens]
    starts = [span.start - key for span, key in zip(spans, keys, strict=False)]
    lists = (queries, keys, rows, requests, numbers, recent, starts)
    host = torch.tensor([index for indices in lists for index in indices], dtype=torch.int32)
    if block_table.is_cuda:
        host = host.pin_memory()
    on_device = host.to(block_table.device, non_blocking=True).split([len(indices) for indices in lists])
    queries_, keys_, rows_, requests_, numbers_, recent_, starts_ = on_device
    a_block = block_size // MICRO_BLOCK
    micro_blocks = block_table[requests_, numbers_ // a_block] * a_block + numbers_ % a_block
    # For each key: its position less its index in the part. A known size saves waiting for the device.
    offsets = starts_.repeat_interleave(keys_.diff(), output_size=keys[-1])
    indices = torch.arange(keys[-1], dtype=torch.int32, device=block_table.device) + offsets
    longest = max(span.queries for span in spans)
    return KeyPart(
        seen=slice(first_row, first_row + queries[-1]),
        lengths=dict(
            cu_seqlens_q=queries_, cu_seqlens_k=keys_, max_seqlen_q=longest,
            max_seqlen_k=max(longest, *(span.end - span.start for span in spans)),
        ),
        tokens=keys[-1],
        left=spans[0].left,
        micro_blocks=micro_blocks,
        rows=rows_,
        positions=indices if shard == UNSHARDED else shard.position(indices),
        recent=recent_.view(-1, 4) if recent else None,
    )  # fmt: skip
