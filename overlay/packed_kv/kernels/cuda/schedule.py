"""Distribute the requests of a batch over the blocks of the CUDA kernel, as a schedule of work items.

The requests of a batch differ in length, and a grid that gives each of them the same number of blocks waits for the
longest. The host does not know the lengths, because a CUDA graph holds the grid. One Triton program therefore makes the
schedule on the device, once per step. It cuts requests into parts and sorts the parts by size, because blocks start in
order ("longest processing time first", Graham 1969). Blocks of different sizes are cut differently:

- Few requests, larger blocks: the tiles of all requests form one sequence that is cut at multiples
  of the part size, wherever a request ends, as stream-K does for matrix products (Osama et al., 2023). A part is two
  thirds of a resident block's load, so that the card can balance blocks of different speed. It is the whole load if
  there are three resident blocks per request. docs/lab/kernels.md compares other sizes.
- Many requests, smaller blocks: a request longer than a resident block's load is cut into equal parts. Several blocks
  wait for each slot of the card, which balances the rest, and more cuts cost more than they gain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import power_of_2
from ..triton.launch import Arguments, Launch

MAX_PARTS = 32
"""The most parts of a request: one warp combines them, a lane per part."""
TILE_TOKENS = 32
CUT_TILES = 8
"""Requests are cut at multiples of this many tiles."""
MIN_WARP_TILES = 4
"""Fewest tiles of a warp in a request that is cut; the last of equal parts may have fewer."""
MIN_PART = 8
"""Stream-K parts have at least 1/8 of the part size: a block costs about 5 us in addition to its tiles."""
BUCKETS = 16
"""Number of part sizes that sorting tells apart; fewer for more than 2048 requests, because shared memory is small."""
SLOT_SHIFT, PART_SHIFT = 16, 24
"""Positions of a work item's slot and part in their words; `WorkItem` of decode.cu reads them."""
_TILE_TOKENS, _CUT_TILES = tl.constexpr(TILE_TOKENS), tl.constexpr(CUT_TILES)
_MIN_PART, _MAX_PARTS = tl.constexpr(MIN_PART), tl.constexpr(MAX_PARTS)


class ScheduleConstants(NamedTuple):
    """Constants that the kernel is compiled for: the most `requests`, a power of 2; whether they are cut as stream-K
    does; the fewest tiles of a part; `buckets` that sorting tells apart; size of a stream-K part in `thirds` of a
    resident block's load; and the bit positions of an item's slot and part."""

    requests: int
    stream_k: bool
    min_tiles: int
    buckets: int
    thirds: int
    slot_shift: int = SLOT_SHIFT
    part_shift: int = PART_SHIFT


def item_count(requests: int, resident_blocks: int) -> int:
    """Return how many work items a schedule has room for; its first word marks an unused one by -1."""
    return requests + -(-3 * resident_blocks // 2)


@triton.jit(
    do_not_specialize=["requests", "item_count", "resident_blocks", "passes", "stride"],
    do_not_specialize_on_alignment=["items", "seq_lens"],
)
def _schedule_kernel(items, seq_lens, requests, item_count, resident_blocks, passes, stride, SCHEDULE: tl.constexpr):
    """One program. The parts of a request are a head, middles of equal size, and a tail.

    Args:
        items: int32 [item_count, 4], filled; seq_lens: int32 [requests / passes], with `stride` (int32).
        requests, item_count, resident_blocks, passes: int32; a pass over a request's keys is a request here.
        SCHEDULE: `ScheduleConstants`.
    """
    REQUESTS: tl.constexpr = SCHEDULE.requests
    MIN_TILES: tl.constexpr = SCHEDULE.min_tiles
    BUCKETS: tl.constexpr = SCHEDULE.buckets
    request, bucket = tl.arange(0, REQUESTS), tl.arange(0, BUCKETS)[None, :]
    exists = request < requests
    tokens = tl.load(seq_lens + request // passes * stride, mask=exists, other=0)
    tiles = (tokens + _TILE_TOKENS - 1) // _TILE_TOKENS
    total = tl.maximum(tl.sum(tiles), 1)
    # A request from `start` to `end` is cut at `low` to `high` times `step`.
    if SCHEDULE.stream_k:
        end = tl.cumsum(tiles, 0)
        start = end - tiles
        filled = tl.sum((tiles > 0).to(tl.int32))
        thirds, units = tl.where(3 * filled <= resident_blocks, 3, SCHEDULE.thirds), 3 * resident_blocks * _CUT_TILES
        part_size = tl.maximum((thirds * total + units - 1) // units * _CUT_TILES, MIN_TILES)
        min_tiles = tl.maximum(part_size // _MIN_PART, MIN_TILES)
        most = (_MAX_PARTS - 1) * _CUT_TILES
        step = tl.maximum((tiles + most - 1) // most * _CUT_TILES, part_size)
        low = start // step + 1
        low += (low * step - start < min_tiles).to(tl.int32)
        high = tl.where(end >= min_tiles, (end - min_tiles) // step, 0)
        waves = (filled + resident_blocks - 1) // resident_blocks
        stay_whole = 6 * resident_blocks * waves * tl.max(tiles).to(tl.int64) <= 7 * total.to(tl.int64)
        high = tl.where(stay_whole, 0, high)
    else:
        start, end = tiles * 0, tiles
        count = ((tiles.to(tl.int64) * resident_blocks + total - 1) // total).to(tl.int32)
        count = tl.minimum(tl.minimum(count, tiles // MIN_TILES), _MAX_PARTS)
        units = tl.maximum(count, 1) * _CUT_TILES
        step = tl.maximum((tiles + units - 1) // units, 1) * _CUT_TILES
        low, high = tiles * 0 + 1, tl.maximum(tiles - 1, 0) // step
    parts = tl.where(exists, tl.maximum(high - low + 1, 0) + 1, 0)
    heads, middles, tails = tl.minimum(parts, 1), tl.maximum(parts - 2, 0), tl.minimum(tl.maximum(parts - 1, 0), 1)
    head, tail = tl.where(parts > 1, low * step - start, tiles), end - high * step
    # Positions in the schedule: after parts of larger buckets, of earlier requests, and of the same request.
    largest = tl.max(tl.maximum(heads * head, tl.maximum(tl.minimum(middles, 1) * step, tails * tail)))
    head_bucket = BUCKETS - 1 - head * BUCKETS // (largest + 1)
    middle_bucket = BUCKETS - 1 - step * BUCKETS // (largest + 1)
    tail_bucket = BUCKETS - 1 - tail * BUCKETS // (largest + 1)
    counts = tl.where(head_bucket[:, None] == bucket, heads[:, None], 0)
    counts += tl.where(middle_bucket[:, None] == bucket, middles[:, None], 0)
    counts += tl.where(tail_bucket[:, None] == bucket, tails[:, None], 0)
    bucket_sizes = tl.sum(counts, 0)
    before = (tl.cumsum(bucket_sizes, 0) - bucket_sizes)[None, :] + tl.cumsum(counts, 0) - counts
    head_position = tl.sum(tl.where(head_bucket[:, None] == bucket, before, 0), 1)
    middle_position = tl.sum(tl.where(middle_bucket[:, None] == bucket, before, 0), 1)
    middle_position += tl.where(middle_bucket == head_bucket, heads, 0)
    tail_position = tl.sum(tl.where(tail_bucket[:, None] == bucket, before, 0), 1)
    before_tail = tl.where(tail_bucket == head_bucket, heads, 0) + tl.where(tail_bucket == middle_bucket, middles, 0)
    tail_position += before_tail
    first_slot = tl.cumsum(parts, 0) - parts
    for part in range(tl.max(parts)):
        position = tl.where(part == parts - 1, tail_position, middle_position + part - 1)
        position = tl.where(part == 0, head_position, position)
        begin, next_begin = (low + part - 1) * step - start, (low + part) * step - start
        begin = tl.where(part == 0, 0, begin // _CUT_TILES)
        next_begin = tl.where(part == parts - 1, 0, next_begin // _CUT_TILES)
        item, mask = items + 4 * position, part < parts
        tl.store(item, request | first_slot << SCHEDULE.slot_shift, mask=mask)
        tl.store(item + 1, tokens, mask=mask)
        tl.store(item + 2, begin | part << SCHEDULE.part_shift, mask=mask)
        tl.store(item + 3, next_begin | parts << SCHEDULE.part_shift, mask=mask)
    for unused in range(tl.sum(parts), item_count, REQUESTS):
        tl.store(items + 4 * (unused + request), request * 0 - 1, mask=unused + request < item_count)


class Scheduler:
    """Makes schedules on a device.

    Args:
        requests: the most of a batch.
        resident_blocks: blocks that the card runs at a time, per KV head.
        warps: warps of a block.
        device: of the schedules.
        stream_k: whether requests are cut as stream-K does.
        thirds: size of a stream-K part in thirds of a resident block's load, where there are few blocks per request.
    """

    def __init__(
        self, requests: int, resident_blocks: int, warps: int, device: torch.device, *, stream_k: bool, thirds: int = 2
    ) -> None:
        self.requests, self.resident_blocks, self.warps = requests, resident_blocks, warps
        count = item_count(requests, resident_blocks)
        assert count <= 1 << (31 - SLOT_SHIFT), count  # the range of an item's words
        self.items = torch.full((count, 4), -1, dtype=torch.int32, device=device)
        size = max(32, power_of_2(requests))
        buckets = max(1, min(BUCKETS, 2048 * BUCKETS // size))
        schedule = ScheduleConstants(size, stream_k, MIN_WARP_TILES * warps, buckets, thirds)
        self.constants, self.num_warps = dict(SCHEDULE=schedule), min(16, max(4, size // 32))
        self.launch = Launch(_schedule_kernel, Arguments(), self.constants, num_warps=self.num_warps)

    def __call__(self, seq_lens: torch.Tensor, passes: int = 1) -> torch.Tensor:
        """Return the schedule of a batch, int32 [item_count, 4], the words of a work item each.

        The next call overwrites it.

        Args:
            seq_lens: int32 [requests], tokens of each request, of any stride.
            passes: over the keys of each request; each pass is a request in the schedule.
        """
        requests = len(seq_lens) * passes
        assert seq_lens.dtype == torch.int32, seq_lens.dtype
        assert requests <= self.requests, (requests, self.requests)
        items = self.items[: item_count(requests, self.resident_blocks)]
        self.launch(
            (1, 1, 1),
            (items, seq_lens),
            Arguments(requests, len(items), self.resident_blocks, passes, seq_lens.stride(0)),
        )
        return items
