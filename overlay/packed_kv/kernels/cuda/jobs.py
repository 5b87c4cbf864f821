"""Which blocks of the CUDA kernel work on which request: long requests get several, and the largest pieces come first.

Requests of a batch differ in length, and a grid that gives each the same blocks waits for the longest one. The host
does not know the lengths (a CUDA graph holds the grid), so one program plans on the device, once a step. It cuts the
requests in parts, in one of two ways, and sorts these by size, as blocks start in their order ("longest processing time
first", Graham 1969):

- A few requests, blocks of `SHARE_WARPS`: the requests lie one behind the other and are cut at multiples of a share of
  all tiles, wherever those fall, as "stream-K" cuts the work of a matrix product (Osama et al., 2023). A share is two
  thirds of what a place has to do, so that the card balances what blocks differ by; all of it where requests have three
  places and more. docs/kernels.md has figures of other shares.
- Many, blocks of fewer warps: those longer than what a place has to do are cut in equal parts. With several blocks a
  place the card balances the rest itself, and cuts cost more than they bring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..triton.launch import Arguments, Launch

SHARE_WARPS = 8
"""Of a block, where requests are cut at shares."""
MAX_PARTS = 32
"""Of a request: a lane each combines them."""
TILE_TOKENS = 32
CUT_TILES = 8
"""Requests are cut at multiples of these."""
MIN_TILES = 4
"""Of a warp of a request in parts; the last of equal parts may have fewer."""
MIN_PART = 8
"""A part has at least one in so many of a share's tiles: a block costs some 5 us besides its tiles."""
BUCKETS = 16
"""Sizes that are told apart when parts are sorted; fewer with more than 2048 requests, as shared memory is small."""


class Job(NamedTuple):
    """What a block does: `part` of the `parts` of a request of so many tokens, which is its tiles from
    `begin * CUT_TILES` to `end * CUT_TILES`, and to the last one in the last part. The parts' results are in places
    `first` and on."""

    request: int
    part: int
    parts: int
    first: int
    tokens: int
    begin: int
    end: int

    def words(self) -> tuple[int, int, int, int]:
        """As the kernel reads it."""
        return self.request | self.first << 16, self.tokens, self.begin | self.part << 24, self.end | self.parts << 24


def job_count(requests: int, places: int) -> int:
    """Jobs that a plan has room for; those it does not need are -1."""
    return requests + -(-3 * places // 2)


def plan_in_python(lengths: list[int], places: int, warps: int, buckets: int = BUCKETS) -> list[Job]:
    """The reference of `_plan_kernel`.

    Args:
        lengths: tokens of each request; 0 of those that fill up a CUDA graph's batch.
        places: blocks that the card works on at a time, of each KV head.
        warps: of a block.
        buckets: see `BUCKETS`.
    """
    tiles = [-(-n // TILE_TOKENS) for n in lengths]
    cuts = _cuts_at_shares(tiles, places, warps) if warps >= SHARE_WARPS else _equal_cuts(tiles, places, warps)
    found: list[tuple[int, Job]] = []
    for request, (n, inner) in enumerate(zip(tiles, cuts, strict=True)):
        ends = [0, *inner, n]
        units = [n // CUT_TILES for n in ends[:-1]] + [0]
        first, parts = len(found), len(inner) + 1
        for part in range(parts):
            job = Job(request, part, parts, first, lengths[request], units[part], units[part + 1])
            found.append((ends[part + 1] - ends[part], job))
    largest = max(size for size, _ in found)
    return [job for _, job in sorted(found, key=lambda x: -(x[0] * buckets // (largest + 1)))]


def _cuts_at_shares(tiles: list[int], places: int, warps: int) -> list[list[int]]:
    """Of each request, where it is cut."""
    total, fewest = max(sum(tiles), 1), MIN_TILES * warps
    requests = sum(n > 0 for n in tiles)
    if 6 * places * -(-requests // places) * max(tiles) <= 7 * total:
        return [[] for _ in tiles]  # whole, they end about as early
    thirds = 3 if 3 * requests <= places else 2
    share = max(-(-thirds * total // (3 * places * CUT_TILES)) * CUT_TILES, fewest)
    fewest = max(fewest, share // MIN_PART)
    cuts: list[list[int]] = []
    start = 0
    for n in tiles:
        step = max(share, -(-n // ((MAX_PARTS - 1) * CUT_TILES)) * CUT_TILES)
        multiples = range(start // step * step, start + n, step)
        cuts.append([k - start for k in multiples if k - start >= fewest and start + n - k >= fewest])
        start += n
    return cuts


def _equal_cuts(tiles: list[int], places: int, warps: int) -> list[list[int]]:
    total = max(sum(tiles), 1)
    aims = [max(min(-(-n * places // total), n // (MIN_TILES * warps), MAX_PARTS), 1) for n in tiles]
    steps = [max(-(-n // (aim * CUT_TILES)), 1) * CUT_TILES for n, aim in zip(tiles, aims, strict=True)]
    return [list(range(step, n, step)) for n, step in zip(tiles, steps, strict=True)]


@triton.jit(do_not_specialize=["requests", "jobs_there", "places"], do_not_specialize_on_alignment=["jobs", "seq_lens"])
def _plan_kernel(
    jobs, seq_lens, requests, jobs_there, places,
    REQUESTS: tl.constexpr, CUTS_AT_SHARES: tl.constexpr, FEWEST: tl.constexpr, TILE_TOKENS: tl.constexpr,
    CUT_TILES: tl.constexpr, MIN_PART: tl.constexpr, MAX_PARTS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """One program. The parts of a request are a head, middles of equal size, and a tail."""
    request, bucket = tl.arange(0, REQUESTS), tl.arange(0, BUCKETS)[None, :]
    exists = request < requests
    tokens = tl.load(seq_lens + request, mask=exists, other=0)
    tiles = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    total = tl.maximum(tl.sum(tiles), 1)
    # A request from `start` to `end` is cut at `low` to `high` times `step`.
    if CUTS_AT_SHARES:
        end = tl.cumsum(tiles, 0)
        start = end - tiles
        filled = tl.sum((tiles > 0).to(tl.int32))
        thirds, units = tl.where(3 * filled <= places, 3, 2), 3 * places * CUT_TILES
        share = tl.maximum((thirds * total + units - 1) // units * CUT_TILES, FEWEST)
        fewest = tl.maximum(share // MIN_PART, FEWEST)
        most = (MAX_PARTS - 1) * CUT_TILES
        step = tl.maximum((tiles + most - 1) // most * CUT_TILES, share)
        low = start // step + 1
        low += (low * step - start < fewest).to(tl.int32)
        high = tl.where(end >= fewest, (end - fewest) // step, 0)
        last_end = 6 * places * ((filled + places - 1) // places) * tl.max(tiles).to(tl.int64)
        stay_whole = last_end <= 7 * total.to(tl.int64)
        high = tl.where(stay_whole, 0, high)
    else:
        start, end = tiles * 0, tiles
        aim = ((tiles.to(tl.int64) * places + total - 1) // total).to(tl.int32)
        aim = tl.minimum(tl.minimum(aim, tiles // FEWEST), MAX_PARTS)
        units = tl.maximum(aim, 1) * CUT_TILES
        step = tl.maximum((tiles + units - 1) // units, 1) * CUT_TILES
        low, high = tiles * 0 + 1, tl.maximum(tiles - 1, 0) // step
    parts = tl.where(exists, tl.maximum(high - low + 1, 0) + 1, 0)
    heads, middles, tails = tl.minimum(parts, 1), tl.maximum(parts - 2, 0), tl.minimum(tl.maximum(parts - 1, 0), 1)
    head, tail = tl.where(parts > 1, low * step - start, tiles), end - high * step
    # Places in the order: parts of larger buckets, of earlier requests, and of the request's own.
    largest = tl.max(tl.maximum(heads * head, tl.maximum(tl.minimum(middles, 1) * step, tails * tail)))
    of_head = BUCKETS - 1 - head * BUCKETS // (largest + 1)
    of_middle = BUCKETS - 1 - step * BUCKETS // (largest + 1)
    of_tail = BUCKETS - 1 - tail * BUCKETS // (largest + 1)
    counts = tl.where(of_head[:, None] == bucket, heads[:, None], 0)
    counts += tl.where(of_middle[:, None] == bucket, middles[:, None], 0)
    counts += tl.where(of_tail[:, None] == bucket, tails[:, None], 0)
    in_buckets = tl.sum(counts, 0)
    before = (tl.cumsum(in_buckets, 0) - in_buckets)[None, :] + tl.cumsum(counts, 0) - counts
    head_place = tl.sum(tl.where(of_head[:, None] == bucket, before, 0), 1)
    middle_place = tl.sum(tl.where(of_middle[:, None] == bucket, before, 0), 1)
    middle_place += tl.where(of_middle == of_head, heads, 0)
    tail_place = tl.sum(tl.where(of_tail[:, None] == bucket, before, 0), 1)
    tail_place += tl.where(of_tail == of_head, heads, 0) + tl.where(of_tail == of_middle, middles, 0)
    first = tl.cumsum(parts, 0) - parts
    for part in range(tl.max(parts)):
        place = tl.where(part == parts - 1, tail_place, middle_place + part - 1)
        place = tl.where(part == 0, head_place, place)
        begin, next_begin = (low + part - 1) * step - start, (low + part) * step - start
        begin = tl.where(part == 0, 0, begin // CUT_TILES)
        next_begin = tl.where(part == parts - 1, 0, next_begin // CUT_TILES)
        job, there = jobs + 4 * place, part < parts
        tl.store(job, request | first << 16, mask=there)
        tl.store(job + 1, tokens, mask=there)
        tl.store(job + 2, begin | part << 24, mask=there)
        tl.store(job + 3, next_begin | parts << 24, mask=there)
    for empty in range(tl.sum(parts), jobs_there, REQUESTS):
        tl.store(jobs + 4 * (empty + request), request * 0 - 1, mask=empty + request < jobs_there)


class JobPlanner:
    """Plans on a device.

    Args:
        requests: the most of a batch.
        places: blocks that the card works on at a time, of each KV head.
        warps: of a block.
    """

    def __init__(self, requests: int, places: int, warps: int, device: torch.device) -> None:
        self.requests, self.places, self.warps = requests, places, warps
        count = job_count(requests, places)
        assert count <= 1 << 15, count  # the words of a job have no room for more
        self.jobs = torch.full((count, 4), -1, dtype=torch.int32, device=device)
        size = max(32, triton.next_power_of_2(requests))
        self.constants = dict(
            REQUESTS=size, CUTS_AT_SHARES=warps >= SHARE_WARPS, FEWEST=MIN_TILES * warps, TILE_TOKENS=TILE_TOKENS,
            CUT_TILES=CUT_TILES, MIN_PART=MIN_PART, MAX_PARTS=MAX_PARTS,
            BUCKETS=max(1, min(BUCKETS, 2048 * BUCKETS // size)),
        )  # fmt: skip
        self.num_warps = min(16, max(4, size // 32))
        self.launch = Launch(_plan_kernel, Arguments(), self.constants, num_warps=self.num_warps)

    def __call__(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """int32 [job_count, 4], the words of a `Job` each; what the last call returned is overwritten.
        seq_lens: int32 [requests]."""
        assert len(seq_lens) <= self.requests, (len(seq_lens), self.requests)
        jobs = self.jobs[: job_count(len(seq_lens), self.places)]
        self.launch((1, 1, 1), (jobs, seq_lens), Arguments(len(seq_lens), len(jobs), self.places))
        return jobs
