"""Distribute the tiles of a batch over the partitions of `latent.cu`.

A partition is one thread block's work (two blocks' with two row blocks): a run of tiles, of one request or of several
in turn. All partitions run at once, one an SM, so they get equal work. The host does not know the lengths, because a
CUDA graph holds the grid; one Triton program makes the schedule on the device, once per step. It takes the better of:

- equal cuts: a partition has tiles of one request, and each request is cut into equal parts. Their size is the smallest
for which there are enough partitions;
- stream-K (Osama et al., 2023): the tiles of all requests form one sequence that is cut into equal partitions. Each
request counts as `RUN_TILES` more tiles, roughly the cost of loading queries and storing outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import power_of_2
from ..checks import check_int32
from ..precompile import current
from ..triton.launch import Arguments, Launch

TILE_TOKENS = 64
RUN_TILES = 2
"""Cost of a run besides its tiles, in tiles."""
LEAST_SIZE, SIZE_RATIO = 64, 4
"""Requests that fit the smallest variant of the kernel, and the factor to the next variant. A variant for 4,096 takes
19 to 45 us for up to 64 requests, one for 64 takes 4 to 7 (docs/lab/tried.md)."""
SEARCH_STEPS = 16
"""Halvings in the search for the size of equal parts: a request has up to 65536 tiles more than a partition."""


@triton.jit(
    do_not_specialize=["requests", "partitions"], do_not_specialize_on_alignment=["begins", "spans", "seq_lens"]
)
def _schedule_kernel(
    begins, spans, seq_lens, requests, partitions,
    REQUESTS: tl.constexpr, TILE_TOKENS: tl.constexpr, RUN_TILES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """One program."""
    request = tl.arange(0, REQUESTS)
    exists = request < requests
    tokens = tl.load(seq_lens + request, mask=exists, other=0)
    tiles = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    costs = tl.where(tiles > 0, tiles + RUN_TILES, 0)
    stream = tl.maximum((tl.sum(costs) + partitions - 1) // partitions, 1)
    low, high = tl.sum(tiles) * 0, tl.maximum(tl.max(tiles), 1)
    for _ in range(SEARCH_STEPS):
        middle = tl.maximum((low + high) // 2, 1)
        suffices = tl.sum((tiles + middle - 1) // middle) <= partitions
        high = tl.where(suffices, middle, high)
        low = tl.where(suffices, low, middle)
    is_equal = (tl.sum((tiles + high - 1) // high) <= partitions) & (high <= stream)
    # Equal cuts: part k of a request begins at tile k * tiles / parts.
    equal_parts = (tiles + high - 1) // high
    equal_first = tl.cumsum(equal_parts, 0) - equal_parts
    # Stream-K: a request's cuts are multiples of `stream`.
    end = tl.cumsum(costs, 0)
    start = end - costs
    cut = (start + stream - 1) // stream
    cuts = (end + stream - 1) // stream - cut
    stream_first = (start + RUN_TILES) // stream
    stream_parts = tl.where(tiles > 0, (end - 1) // stream - stream_first + 1, 0)
    first = tl.where(is_equal, equal_first, cut)
    count = tl.where(is_equal, equal_parts, cuts)
    for k in range(tl.max(count)):
        equal_tile = k * tiles // tl.maximum(equal_parts, 1)
        stream_tile = tl.maximum((cut + k) * stream - start - RUN_TILES, 0)
        place, mask = begins + 2 * (first + k), k < count
        tl.store(place, request, mask=mask)
        tl.store(place + 1, tl.where(is_equal, equal_tile, stream_tile), mask=mask)
    used = tl.sum(count)
    for unused in range(used, partitions + 1, REQUESTS):
        mask = unused + request <= partitions
        tl.store(begins + 2 * (unused + request), request * 0 + requests, mask=mask)
        tl.store(begins + 2 * (unused + request) + 1, request * 0, mask=mask)
    tl.store(spans + 2 * request, tl.where(is_equal, equal_first, tl.where(tiles > 0, stream_first, 0)), mask=exists)
    tl.store(spans + 2 * request + 1, tl.where(is_equal, equal_parts, stream_parts), mask=exists)


class LatentScheduler:
    """Makes schedules on a device.

    Args:
        requests: the most of a batch.
        most_partitions: the most partitions of a schedule.
        device: of the schedules.
    """

    def __init__(self, requests: int, most_partitions: int, device: torch.device) -> None:
        self.requests = requests
        self.begins = torch.zeros(most_partitions + 1, 2, dtype=torch.int32, device=device)
        self.spans = torch.zeros(requests, 2, dtype=torch.int32, device=device)
        most = max(LEAST_SIZE, power_of_2(requests))
        sizes = [LEAST_SIZE]
        while sizes[-1] < most:
            sizes.append(min(sizes[-1] * SIZE_RATIO, most))
        self.launches = {size: self._launch(size) for size in sizes}

    @staticmethod
    def _launch(size: int) -> Launch:
        constants = dict(REQUESTS=size, TILE_TOKENS=TILE_TOKENS, RUN_TILES=RUN_TILES, SEARCH_STEPS=SEARCH_STEPS)
        return Launch(_schedule_kernel, Arguments(), constants, num_warps=min(16, size // LEAST_SIZE))

    def __call__(self, seq_lens: torch.Tensor, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `begins`, int32 [partitions + 1, 2], and `spans`, int32 [requests, 2]; the next call overwrites them.

        A batch takes the smallest variant that has room for it. In a `Precompiler` block all are noted.

        Args:
            seq_lens: int32 [requests], tokens of each request.
            partitions: runs of tiles that the card works on at a time.
        """
        check_int32(seq_lens)
        assert len(seq_lens) <= self.requests and partitions < len(self.begins), (len(seq_lens), partitions)
        begins, spans = self.begins[: partitions + 1], self.spans[: len(seq_lens)]
        suffice = [launch for size, launch in self.launches.items() if size >= len(seq_lens)]
        for launch in self.launches.values() if current() else suffice[:1]:
            launch((1, 1, 1), (begins, spans, seq_lens), Arguments(len(seq_lens), partitions))
        return begins, spans
