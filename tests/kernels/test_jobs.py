"""Which blocks of the CUDA kernel work on which request: the plan on the device against the one in Python."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise

import pytest
import torch
from packed_kv.kernels.cuda.jobs import CUT_TILES, MAX_PARTS, Job, JobPlanner, job_count, plan_in_python

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(kind: str, requests: int) -> list[int]:
    rng = random.Random(f"{kind} {requests}")
    return {
        "equal": lambda: [8192] * requests,
        "spread": lambda: [1024 + 8192 * i // requests for i in range(requests)],
        "one long": lambda: [300] * (requests - 1) + [120_000],
        "any": lambda: [int(2 ** rng.uniform(0, 16)) for _ in range(requests)],
        "padded": lambda: [5000] * (requests - requests // 3) + [0] * (requests // 3),
    }[kind]()


def cuts(jobs: list[Job], lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Of each request the tiles of its parts, from one to another."""
    parts: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for job in sorted(jobs):
        end = -(-lengths[job.request] // 32) if job.part == job.parts - 1 else job.end * CUT_TILES
        parts[job.request].append((job.begin * CUT_TILES, end))
    return parts


@pytest.mark.parametrize("requests", [1, 4, 24, 32, 66, 97, 200])
@pytest.mark.parametrize("kind", ["equal", "spread", "one long", "any", "padded"])
def test_plan(kind: str, requests: int) -> None:
    """The device's plan is Python's, and covers every request once."""
    lengths, (places, warps) = batch(kind, requests), (33, 8) if requests <= 66 else (66, 4)
    planner = JobPlanner(requests + 3, places, warps, DEVICE)
    planner.jobs.fill_(7)
    found = planner(torch.tensor(lengths, dtype=torch.int32, device=DEVICE)).tolist()
    expected = plan_in_python(lengths, places, warps)
    assert len(found) == job_count(requests, places) >= len(expected)
    assert found[: len(expected)] == [list(job.words()) for job in expected]
    assert all(job[0] == -1 for job in found[len(expected) :])
    for request, parts in enumerate(cuts(expected, lengths)):
        assert parts[0][0] == 0 and parts[-1][1] == -(-lengths[request] // 32)
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        assert len(parts) == 1 or all(begin < end for begin, end in parts)
        assert len(parts) <= MAX_PARTS
    assert {job.parts for job in expected if job.request == 0} == {len(cuts(expected, lengths)[0])}
    assert sorted(job.first + job.part for job in expected) == list(range(len(expected)))


def test_words_hold_large_numbers() -> None:
    job = Job(request=4095, part=31, parts=32, first=30_000, tokens=2_000_000_000, begin=7_812_000, end=8_000_000)
    assert all(-(1 << 31) <= word < 1 << 31 for word in job.words())
    words = torch.tensor(job.words(), dtype=torch.int32).tolist()
    assert (words[0] & 0xFFFF, words[0] >> 16, words[1]) == (4095, 30_000, 2_000_000_000)
    assert (words[2] & 0xFFFFFF, words[2] >> 24) == (7_812_000, 31)
    assert (words[3] & 0xFFFFFF, words[3] >> 24) == (8_000_000, 32)


def span(jobs: list[Job], lengths: list[int], places: int, warps: int) -> float:
    """When the last block ends, if each free place takes the next job. In tiles of a warp, without what blocks cost."""
    parts, free = cuts(jobs, lengths), [0.0] * places
    for job in jobs:
        begin, end = parts[job.request][job.part]
        heapq.heapreplace(free, free[0] + (end - begin) / warps)
    return max(free)


@pytest.mark.parametrize(
    ("kind", "requests", "share"),
    [
        ("spread", 24, 0.85), ("spread", 32, 0.85), ("spread", 60, 0.9), ("spread", 97, 0.85), ("spread", 200, 0.9),
        ("equal", 12, 0.7), ("equal", 20, 0.8), ("equal", 40, 0.85),
    ],
)  # fmt: skip
def test_requests_that_do_not_fill_the_card_whole_are_cut(kind: str, requests: int, share: float) -> None:
    places, warps = (33, 8) if requests <= 66 else (66, 4)
    lengths = batch(kind, requests)
    ideal = sum(-(-n // 32) for n in lengths) / (places * warps)
    whole = [Job(request, 0, 1, request, lengths[request], 0, 0) for request in range(requests)]
    planned = span(plan_in_python(lengths, places, warps), lengths, places, warps)
    assert ideal / planned > share > ideal / span(whole, lengths, places, warps)


@pytest.mark.parametrize(
    ("requests", "places", "warps"), [(29, 33, 8), (64, 33, 8), (32, 33, 8), (33, 33, 8), (128, 66, 4), (66, 66, 4)]
)
def test_equal_lengths_that_fill_the_card_stay_whole(requests: int, places: int, warps: int) -> None:
    assert {job.parts for job in plan_in_python([8192] * requests, places, warps)} == {1}


@pytest.mark.parametrize(("places", "warps", "fewest"), [(33, 8, 32), (66, 4, 16)])
def test_parts_are_no_smaller_than_they_are_worth(places: int, warps: int, fewest: int) -> None:
    """Four tiles of a warp, and an eighth of a share; less what the rounding to CUT_TILES takes."""
    for kind in ("spread", "one long", "any"):
        lengths = batch(kind, 60)
        share = sum(-(-n // 32) for n in lengths) * 2 // 3 // places
        for parts in cuts(plan_in_python(lengths, places, warps), lengths):
            at_least = max(fewest, share // 8 if warps == 8 else 0) - CUT_TILES
            assert len(parts) == 1 or min(end - begin for begin, end in parts) > at_least


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([1024] * 8, [1] * 8),  # a warp of a part would have fewer than 4 tiles
        ([4096] * 4, [4] * 4),
        ([32768] * 8, [4] * 8),  # a place's whole share each: requests have three places and more
        ([8192] * 12, [4] * 12),  # two thirds
        ([32768] * 9 + [0] * 7, [4, 5, 4, 4, 5, 4, 4, 5, 4] + [1] * 7),  # as without those that fill up a batch
        ([8192] * 33 + [0] * 7, [1] * 40),
        ([200_000] + [300] * 30, [30] + [1] * 30),  # no more than a lane each combines
    ],
)
def test_parts(lengths: list[int], parts: list[int]) -> None:
    jobs = plan_in_python(lengths, 33, 8)
    assert [job.parts for job in sorted(jobs) if job.part == 0] == parts
