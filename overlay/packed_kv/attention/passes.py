"""Prefixes that chunks read in the pages, in passes of 64 columns: which requests do so, and the table of their passes.

The decode kernel unpacks a prefix once for each pass. The prefill route unpacks it once for all of a chunk's rows, but
through memory (`prefill.py`). So chunks of up to a measured number of passes are read this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

GRAPH_TOKENS = 1024
"""Tokens of the largest step with prompts that is a whole CUDA graph."""


class PassLimits(NamedTuple):
    """The most passes of a chunk (`each`) and of a step (`total`), the query tokens of a pass (`tokens`), the first
    rows of a batch that passes may cover (`rows`), and the fewest tokens of a step's prefixes (`keys`). For a step that
    is a whole CUDA graph, `each` and `keys` do not count."""

    each: int
    total: int
    tokens: int
    rows: int
    keys: int = 0


class PrefixPass(NamedTuple):
    """A pass: index of the request in the batch, first row, number of rows, and tokens of the prefix."""

    request: int
    row: int
    rows: int
    keys: int


@dataclass(frozen=True)
class PrefixPasses:
    """Passes of a step. `table`: int32 [passes, 4] on the device, a `PrefixPass` each. `requests`: indices in the batch
    of the requests whose prefixes are read. `runs`: runs of neighbouring rows of these requests. `rows`: number of rows
    up to the last of them.

    In a CUDA graph the device refills the table in each replay: then `row_kinds`, int32 [rows], is the table of this
    name of `MixedTables`, `runs` are all rows, and `filled` is the number of passes of a step with one long chunk."""

    table: torch.Tensor
    requests: frozenset[int]
    runs: tuple[slice, ...]
    row_kinds: torch.Tensor | None = None
    filled: int = 0

    @classmethod
    def of_graph(cls, table: torch.Tensor, row_kinds: torch.Tensor, pass_tokens: int) -> PrefixPasses:
        """Return the passes of a table that the device fills."""
        rows = len(row_kinds)
        return cls(table, frozenset(), (slice(0, rows),), row_kinds, -(-rows // pass_tokens))

    @property
    def rows(self) -> int:
        return self.runs[-1].stop


class OverPrefixes(NamedTuple):
    """Attention of the rows of `passes` over prefixes: `output` [passes.rows, query heads, head_dim] in the model's
    dtype, and the scores' natural log-sum-exps `lse`, fp32 [passes.rows, query heads]; other rows hold anything."""

    passes: PrefixPasses
    output: torch.Tensor
    lse: torch.Tensor


def most_passes(tokens: int, requests: int, longest: int, pass_tokens: int) -> int:
    """Return the most passes over prefixes of a batch with up to this many tokens and requests. Decodes have up to
    `longest` tokens. The last pass of each chunk may have a single row."""
    chunks = min(requests, tokens // (longest + 1))
    return (tokens + chunks * (pass_tokens - 1)) // pass_tokens


def plan_passes(
    query_starts: Sequence[int], context: Sequence[int], first: int, limits: PassLimits
) -> list[PrefixPass]:
    """Return the passes of a batch's requests from `first` on, in order. A request gets all of its passes, or none if
    it has no prefix or a limit would be exceeded. If the prefixes are too short in total, no request gets any.

    Args:
        query_starts: first row of each request, and the end of the last one.
        context: tokens of each request, the batch's included.
        first: index of a request.
        limits: of the kernel.
    """
    passes: list[PrefixPass] = []
    all_keys = 0
    for request in range(first, len(context)):
        start, end = query_starts[request], query_starts[request + 1]
        keys = context[request] - (end - start)
        count = -(-(end - start) // limits.tokens)
        if keys > 0 and end <= limits.rows and count <= limits.each and len(passes) + count <= limits.total:
            all_keys += keys
            for row in range(start, end, limits.tokens):
                passes.append(PrefixPass(request, row, min(limits.tokens, end - row), keys))
    return passes if all_keys >= limits.keys else []


def prefix_passes(passes: Sequence[PrefixPass], query_starts: Sequence[int], device: torch.device) -> PrefixPasses:
    """Return passes, at least one, with their table on the device, without waiting for it.

    query_starts: see `plan_passes`.
    """
    host = torch.tensor(passes, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    requests = sorted({one.request for one in passes})
    runs = []
    for _, run in groupby(enumerate(requests), key=lambda numbered: numbered[1] - numbered[0]):
        neighbours = [request for _, request in run]
        runs.append(slice(query_starts[neighbours[0]], query_starts[neighbours[-1] + 1]))
    return PrefixPasses(host.to(device, non_blocking=True), frozenset(requests), tuple(runs))
