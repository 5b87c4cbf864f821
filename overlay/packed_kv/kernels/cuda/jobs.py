"""Which blocks of the CUDA kernel work on which request: long requests get several, and the largest shares come first.

Requests of a batch differ in length, and a grid that gives each the same blocks waits for the longest one. The host
does not know the lengths (a CUDA graph holds the grid), so one program plans on the device, once a step: it cuts
requests in parts of about what a place of the card has to do on average, rounded down and up, takes what ends first,
and sorts the parts by size, as blocks start in their order ("longest processing time first", Graham 1969).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import Arguments, Launch

MAX_PARTS = 32
"""Of a request: a lane each combines them."""
TILE_TOKENS = 32
MIN_TILES = 4
"""Of a warp of a request in parts."""
BLOCK_COST, PART_COST = 2, 1
"""What a block costs besides its tiles, and what one of several parts costs beyond that, in tiles of a warp (an H200:
some 2 us; two blocks with half of the tiles each, one behind the other, take 3.5 us more than one)."""
CHUNK = 32


class Job(NamedTuple):
    """What a block does: `part` of the `parts` of a request of so many tokens, whose first job is `first`."""

    request: int
    part: int
    parts: int
    first: int
    tokens: int

    def words(self) -> tuple[int, int, int, int]:
        """As the kernel reads it."""
        return self.request, self.part | self.parts << 16, self.first, self.tokens


def job_count(requests: int, places: int) -> int:
    """Jobs that a plan has room for; those it does not need have a request of -1."""
    return requests + places


def plan_in_python(lengths: list[int], places: int, warps: int) -> list[Job]:
    """The reference of `_plan_kernel`.

    Args:
        lengths: tokens of each request.
        places: blocks that the card works on at a time, of each KV head.
        warps: of a block.
    """
    tiles = [-(-n // TILE_TOKENS) for n in lengths]
    total, best = max(sum(tiles), 1), None
    for up in (0, 1):
        aims = [(n * places + up * (total - 1)) // total for n in tiles]
        parts = [max(1, min(aim, n // (MIN_TILES * warps), MAX_PARTS)) for n, aim in zip(tiles, aims, strict=True)]
        costs = [-(-n // (k * warps)) + BLOCK_COST + PART_COST * (k > 1) for n, k in zip(tiles, parts, strict=True)]
        order = sorted(range(len(tiles)), key=lambda r: -costs[r])
        queue = [costs[r] for r in order for _ in range(parts[r])]
        # The places take jobs in turn, forth and back.
        waves = [queue[i : i + places] for i in range(0, len(queue), places)]
        waves = [[*wave, *[0] * (places - len(wave))] for wave in waves]
        span = max(map(sum, zip(*(w if i % 2 == 0 else w[::-1] for i, w in enumerate(waves)), strict=True)))
        if best is None or span < best[0]:
            best = span, [(r, parts[r]) for r in order]
    assert best is not None
    jobs: list[Job] = []
    for request, parts_of in best[1]:
        first = len(jobs)
        jobs.extend(Job(request, part, parts_of, first, lengths[request]) for part in range(parts_of))
    return jobs


@triton.jit(do_not_specialize=["requests", "jobs_there", "places"], do_not_specialize_on_alignment=["jobs", "seq_lens"])
def _plan_kernel(
    jobs, seq_lens, requests, jobs_there, places, scratch,
    REQUESTS: tl.constexpr, PLACES: tl.constexpr, WARPS: tl.constexpr, CHUNK: tl.constexpr, TILE_TOKENS: tl.constexpr,
    MIN_TILES: tl.constexpr, MAX_PARTS: tl.constexpr, BLOCK_COST: tl.constexpr, PART_COST: tl.constexpr,
):  # fmt: skip
    """One program. scratch: int32 [2 REQUESTS + jobs]: costs and parts of the requests, costs of the jobs in order."""
    request, place = tl.arange(0, REQUESTS), tl.arange(0, PLACES)
    exists = request < requests
    tokens = tl.load(seq_lens + request, mask=exists, other=0)
    tiles = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    total = tl.maximum(tl.sum(tiles), 1)
    queue = scratch + 2 * REQUESTS
    best_span = total * 0 + 2147483647
    best_parts, best_before = tiles * 0, tiles * 0
    for up in range(2):
        parts = (tiles * places + up * (total - 1)) // total
        parts = tl.maximum(tl.minimum(tl.minimum(parts, tiles // (MIN_TILES * WARPS)), MAX_PARTS), 1)
        cost = (tiles + parts * WARPS - 1) // (parts * WARPS) + BLOCK_COST + tl.where(parts > 1, PART_COST, 0)
        parts = tl.where(exists, parts, 0)
        tl.debug_barrier()
        tl.store(scratch + request, cost)
        tl.store(scratch + REQUESTS + request, parts)
        tl.debug_barrier()
        before = parts * 0
        for start in range(0, requests, CHUNK):
            other = start + tl.arange(0, CHUNK)
            others_cost = tl.load(scratch + other, mask=other < REQUESTS, other=0)
            others_parts = tl.load(scratch + REQUESTS + other, mask=other < REQUESTS, other=0)
            is_larger = others_cost[None, :] > cost[:, None]
            is_first = (others_cost[None, :] == cost[:, None]) & (other[None, :] < request[:, None])
            before += tl.sum(tl.where(is_larger | is_first, others_parts[None, :], 0), 1)
        for part in range(tl.max(parts)):
            tl.store(queue + before + part, cost, mask=part < parts)
        tl.debug_barrier()
        count = tl.sum(parts)
        load = place * 0
        for wave in range((count + places - 1) // places):
            index = wave * places + tl.where(wave % 2 == 0, place, places - 1 - place)
            load += tl.load(queue + index, mask=(place < places) & (index < count), other=0)
        span = tl.max(load)
        is_better = span < best_span
        best_span = tl.where(is_better, span, best_span)
        best_parts, best_before = tl.where(is_better, parts, best_parts), tl.where(is_better, before, best_before)
    for part in range(tl.max(best_parts)):
        job, there = jobs + 4 * (best_before + part), part < best_parts
        tl.store(job, request, mask=there)
        tl.store(job + 1, part | best_parts << 16, mask=there)
        tl.store(job + 2, best_before, mask=there)
        tl.store(job + 3, tokens, mask=there)
    for start in range(tl.sum(best_parts), jobs_there, REQUESTS):
        index = start + request
        tl.store(jobs + 4 * index, request * 0 - 1, mask=index < jobs_there)


class JobPlanner:
    """Plans on a device.

    Args:
        requests: the most of a batch.
        places: blocks that the card works on at a time, of each KV head.
        warps: of a block.
    """

    def __init__(self, requests: int, places: int, warps: int, device: torch.device) -> None:
        self.requests, self.places, self.warps = requests, places, warps
        self.jobs = torch.full((job_count(requests, places), 4), -1, dtype=torch.int32, device=device)
        size = max(CHUNK, triton.next_power_of_2(requests))
        self.scratch = torch.empty(2 * size + len(self.jobs), dtype=torch.int32, device=device)
        self.launch = Launch(
            _plan_kernel,
            Arguments(self.scratch),
            dict(
                REQUESTS=size, PLACES=triton.next_power_of_2(places), WARPS=warps, CHUNK=CHUNK,
                TILE_TOKENS=TILE_TOKENS, MIN_TILES=MIN_TILES, MAX_PARTS=MAX_PARTS, BLOCK_COST=BLOCK_COST,
                PART_COST=PART_COST,
            ),
            num_warps=min(16, max(4, size // 32)),
        )  # fmt: skip

    def __call__(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """int32 [job_count, 4], the words of a `Job` each; what the last call returned is overwritten.
        seq_lens: int32 [requests]."""
        assert len(seq_lens) <= self.requests, (len(seq_lens), self.requests)
        jobs = self.jobs[: job_count(len(seq_lens), self.places)]
        self.launch((1, 1, 1), (jobs, seq_lens), Arguments(len(seq_lens), len(jobs), self.places))
        return jobs
