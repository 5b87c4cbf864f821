"""Which blocks of the CUDA kernel work on which request: the plan on the device against the one in Python."""

from __future__ import annotations

import heapq
import random

import pytest
import torch
from packed_kv.kernels.cuda.jobs import MAX_PARTS, Job, JobPlanner, job_count, plan_in_python

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


@pytest.mark.parametrize("requests", [4, 24, 32, 97, 200])
@pytest.mark.parametrize("kind", ["equal", "spread", "one long", "any", "padded"])
def test_plan(kind: str, requests: int) -> None:
    lengths, (places, warps) = batch(kind, requests), (33, 8) if requests <= 33 else (66, 4)
    planner = JobPlanner(requests + 3, places, warps, DEVICE)
    planner.jobs.fill_(7)
    found = planner(torch.tensor(lengths, dtype=torch.int32, device=DEVICE)).tolist()
    expected = plan_in_python(lengths, places, warps)
    assert len(found) == job_count(requests, places) >= len(expected)
    assert found[: len(expected)] == [list(job.words()) for job in expected]
    assert all(job[0] == -1 for job in found[len(expected) :])
    parts = {(job.request, job.part) for job in expected}
    assert len(parts) == len(expected) and {request for request, _ in parts} == set(range(requests))
    assert max(job.parts for job in expected) <= MAX_PARTS


def span(lengths: list[int], places: int, warps: int, jobs: list[Job]) -> float:
    """When the last block ends, if each free place takes the next job. In tiles of a warp, without what blocks cost."""
    free = [0.0] * places
    for job in jobs:
        heapq.heapreplace(free, free[0] + -(-lengths[job.request] // 32) / (job.parts * warps))
    return max(free)


@pytest.mark.parametrize(("requests", "share"), [(32, 0.8), (97, 0.8), (128, 0.9), (200, 0.9)])
def test_lengths_that_differ_fill_the_card(requests: int, share: float) -> None:
    places, warps = (33, 8) if requests <= 33 else (66, 4)
    lengths = batch("spread", requests)
    ideal = sum(-(-n // 32) for n in lengths) / (places * warps)
    whole = [Job(request, 0, 1, request, lengths[request]) for request in range(requests)]
    planned = span(lengths, places, warps, plan_in_python(lengths, places, warps))
    assert ideal / planned > share > ideal / span(lengths, places, warps, whole)


@pytest.mark.parametrize(("requests", "places", "warps"), [(32, 33, 8), (33, 33, 8), (128, 66, 4), (66, 66, 4)])
def test_equal_lengths_that_fill_the_card_stay_whole(requests: int, places: int, warps: int) -> None:
    assert {job.parts for job in plan_in_python([8192] * requests, places, warps)} == {1}


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([1024] * 8, [1] * 8),  # a warp of a part has 4 tiles
        ([4096] * 4, [4] * 4),
        # A part costs more than its tiles, and as a block, too; and places get a long job with a short one.
        ([3072, 16384, 16384, 2048, 1024, 12288], [1, 10, 10, 1, 1, 7]),
        ([16384, 3072, 16384, 16384, 2048], [9, 1, 9, 9, 1]),
        ([16384, 1024, 1024, 3072, 2048, 3072, 12288, 12288], [11, 1, 1, 2, 2, 2, 8, 8]),
    ],
)
def test_parts_are_worth_their_cost(lengths: list[int], parts: list[int]) -> None:
    jobs = plan_in_python(lengths, 33, 8)
    assert [job.parts for job in sorted(jobs) if job.part == 0] == parts
