"""The schedules of the CUDA kernels in Python, to which those made on a device are compared."""

from __future__ import annotations

from typing import NamedTuple

from packed_kv.kernels.cuda import latent_schedule
from packed_kv.kernels.cuda.latent_schedule import RUN_TILES, SEARCH_STEPS
from packed_kv.kernels.cuda.schedule import (
    BUCKETS,
    CUT_TILES,
    MAX_PARTS,
    MIN_PART,
    MIN_WARP_TILES,
    PART_SHIFT,
    SLOT_SHIFT,
    TILE_TOKENS,
)


class WorkItem(NamedTuple):
    """Work of one block: part `part` of `parts` of a request of `tokens` tokens.

    The part has the request's tiles from `begin * CUT_TILES` to `end * CUT_TILES`; the last part ends with the request,
    and its `end` is 0. Partial results of the request's parts lie in slots `first_slot` and following.
    """

    request: int
    part: int
    parts: int
    first_slot: int
    tokens: int
    begin: int
    end: int

    def words(self) -> tuple[int, int, int, int]:
        """Return the item as the kernel reads it, four int32."""
        return (
            self.request | self.first_slot << SLOT_SHIFT,
            self.tokens,
            self.begin | self.part << PART_SHIFT,
            self.end | self.parts << PART_SHIFT,
        )


def reference_schedule(
    lengths: list[int], resident_blocks: int, warps: int, *, stream_k: bool | None = None
) -> list[WorkItem]:
    """Return the schedule that the kernel of `Scheduler` makes.

    Args:
        lengths: tokens of each request; 0 for those that pad the batch of a CUDA graph.
        resident_blocks: blocks that the card runs at a time, per KV head.
        warps: warps of a block.
        stream_k: whether requests are cut as stream-K does; None: with 8 warps and more.
    """
    tiles = [-(-n // TILE_TOKENS) for n in lengths]
    cut = _stream_k_cuts if (warps >= 8 if stream_k is None else stream_k) else _equal_cuts
    sized: list[tuple[int, WorkItem]] = []
    for request, (n, cuts) in enumerate(zip(tiles, cut(tiles, resident_blocks, warps), strict=True)):
        ends = [0, *cuts, n]
        units = [n // CUT_TILES for n in ends[:-1]] + [0]
        first_slot, parts = len(sized), len(cuts) + 1
        for part in range(parts):
            item = WorkItem(request, part, parts, first_slot, lengths[request], units[part], units[part + 1])
            sized.append((ends[part + 1] - ends[part], item))
    largest = max(size for size, _ in sized)
    return [item for _, item in sorted(sized, key=lambda x: -(x[0] * BUCKETS // (largest + 1)))]


def _stream_k_cuts(tiles: list[int], resident_blocks: int, warps: int) -> list[list[int]]:
    """Return the tiles at which each request is cut."""
    total, min_tiles = max(sum(tiles), 1), MIN_WARP_TILES * warps
    requests = sum(n > 0 for n in tiles)
    if 6 * resident_blocks * -(-requests // resident_blocks) * max(tiles) <= 7 * total:
        return [[] for _ in tiles]  # uncut, they end within 7/6 of the ideal time
    thirds = 3 if 3 * requests <= resident_blocks else 2
    part_size = max(-(-thirds * total // (3 * resident_blocks * CUT_TILES)) * CUT_TILES, min_tiles)
    min_tiles = max(min_tiles, part_size // MIN_PART)
    cuts: list[list[int]] = []
    start = 0
    for n in tiles:
        step = max(part_size, -(-n // ((MAX_PARTS - 1) * CUT_TILES)) * CUT_TILES)
        multiples = range(start // step * step, start + n, step)
        cuts.append([k - start for k in multiples if k - start >= min_tiles and start + n - k >= min_tiles])
        start += n
    return cuts


def _equal_cuts(tiles: list[int], resident_blocks: int, warps: int) -> list[list[int]]:
    """Return the tiles at which each request is cut."""
    total = max(sum(tiles), 1)
    parts = [max(min(-(-n * resident_blocks // total), n // (MIN_WARP_TILES * warps), MAX_PARTS), 1) for n in tiles]
    steps = [max(-(-n // (count * CUT_TILES)), 1) * CUT_TILES for n, count in zip(tiles, parts, strict=True)]
    return [list(range(step, n, step)) for n, step in zip(tiles, steps, strict=True)]


class LatentSchedule(NamedTuple):
    """Tiles of each partition: from `begins[p]` (request, tile) to `begins[p + 1]`, in order; and `spans[r]`: the first
    partition with tiles of request r, and how many have some."""

    begins: list[tuple[int, int]]
    spans: list[tuple[int, int]]


def reference_latent_schedule(lengths: list[int], partitions: int) -> LatentSchedule:
    """Return the schedule that the kernel of `LatentScheduler` makes.

    Args:
        lengths: tokens of each request; 0 for those that pad the batch of a CUDA graph.
        partitions: runs of tiles that the card works on at a time.
    """
    tiles = [-(-n // latent_schedule.TILE_TOKENS) for n in lengths]
    costs = [n + RUN_TILES if n else 0 for n in tiles]
    stream = max(-(-sum(costs) // partitions), 1)
    low, high = 0, max(*tiles, 1)  # the largest size that does not suffice, the smallest that does
    for _ in range(SEARCH_STEPS):
        middle = max((low + high) // 2, 1)
        if sum(-(-n // middle) for n in tiles) <= partitions:
            high = middle
        else:
            low = middle
    suffices = sum(-(-n // high) for n in tiles) <= partitions
    begins: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    if suffices and high <= stream:
        for request, n in enumerate(tiles):
            parts = -(-n // high)
            spans.append((len(begins), parts))
            begins += [(request, part * n // parts) for part in range(parts)]
    else:
        start = 0
        for request, (n, cost) in enumerate(zip(tiles, costs, strict=True)):
            first, last = (start + RUN_TILES) // stream, (start + cost - 1) // stream
            spans.append((first if n else 0, last - first + 1 if n else 0))
            cuts = range(-(-start // stream), -(-(start + cost) // stream))
            begins += [(request, max(cut * stream - start - RUN_TILES, 0)) for cut in cuts]
            start += cost
    return LatentSchedule(begins + [(len(lengths), 0)] * (partitions + 1 - len(begins)), spans)
