"""The schedule of the CUDA kernel's blocks: the one made on the device against the one made in Python."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise

import pytest
import torch
from packed_kv.kernels.cuda.schedule import CUT_TILES, MAX_PARTS, Scheduler, item_count
from schedules import WorkItem, reference_schedule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(kind: str, requests: int) -> list[int]:
    rng = random.Random(f"{kind} {requests}")
    return {
        "equal": lambda: [8192] * requests,
        "spread": lambda: [1024 + 8192 * i // requests for i in range(requests)],
        "one long": lambda: [300] * (requests - 1) + [120_000],
        "any": lambda: [int(2 ** rng.uniform(0, 16)) for _ in range(requests)],
        "padded": lambda: [5000] * (requests - requests // 3) + [0] * (requests // 3),
        "short": lambda: [rng.randrange(1, 70) for _ in range(requests)],
    }[kind]()


def tiles_of_parts(schedule: list[WorkItem], lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Return, for each request, the first tile and the end of each of its parts."""
    parts: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for item in sorted(schedule):
        end = -(-lengths[item.request] // 32) if item.part == item.parts - 1 else item.end * CUT_TILES
        parts[item.request].append((item.begin * CUT_TILES, end))
    return parts


@pytest.mark.parametrize("requests", [1, 4, 24, 32, 66, 97, 200])
@pytest.mark.parametrize("kind", ["equal", "spread", "one long", "any", "padded"])
def test_schedule(kind: str, requests: int) -> None:
    """The device's schedule is Python's, and covers every request once."""
    lengths, (blocks, warps) = batch(kind, requests), (33, 8) if requests <= 66 else (66, 4)
    scheduler = Scheduler(requests + 3, blocks, warps, DEVICE, stream_k=warps >= 8)
    scheduler.items.fill_(7)
    found = scheduler(torch.tensor(lengths, dtype=torch.int32, device=DEVICE)).tolist()
    expected = reference_schedule(lengths, blocks, warps)
    assert len(found) == item_count(requests, blocks) >= len(expected)
    assert found[: len(expected)] == [list(item.words()) for item in expected]
    assert all(words[0] == -1 for words in found[len(expected) :])
    scheduler = Scheduler(3 * requests, blocks, warps, DEVICE, stream_k=warps >= 8)
    thrice = scheduler(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), 3)
    of_passes = reference_schedule([n for n in lengths for _ in range(3)], blocks, warps)
    assert thrice.tolist()[: len(of_passes)] == [list(item.words()) for item in of_passes]
    for request, parts in enumerate(tiles_of_parts(expected, lengths)):
        assert parts[0][0] == 0 and parts[-1][1] == -(-lengths[request] // 32)
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        assert len(parts) == 1 or all(begin < end for begin, end in parts)
        assert len(parts) <= MAX_PARTS
        assert {item.parts for item in expected if item.request == request} == {len(parts)}
    assert sorted(item.first_slot + item.part for item in expected) == list(range(len(expected)))


@pytest.mark.parametrize("kind", ["equal", "one long", "any", "padded"])
@pytest.mark.parametrize(("blocks", "warps"), [(132, 2), (66, 4)])
def test_stream_k_of_small_teams(kind: str, blocks: int, warps: int) -> None:
    """Few requests with heads of 256 are cut so, too, in blocks of 2 and 4 warps."""
    lengths = batch(kind, 24)
    scheduler = Scheduler(24, blocks, warps, DEVICE, stream_k=True)
    found = scheduler(torch.tensor(lengths, dtype=torch.int32, device=DEVICE)).tolist()
    expected = reference_schedule(lengths, blocks, warps, stream_k=True)
    assert found[: len(expected)] == [list(item.words()) for item in expected]
    assert expected != reference_schedule(lengths, blocks, warps, stream_k=False)


def test_words_hold_large_numbers() -> None:
    item = WorkItem(
        request=4095, part=31, parts=32, first_slot=30_000, tokens=2_000_000_000, begin=7_812_000, end=8_000_000
    )
    assert all(-(1 << 31) <= word < 1 << 31 for word in item.words())
    words = torch.tensor(item.words(), dtype=torch.int32).tolist()
    assert (words[0] & 0xFFFF, words[0] >> 16, words[1]) == (4095, 30_000, 2_000_000_000)
    assert (words[2] & 0xFFFFFF, words[2] >> 24) == (7_812_000, 31)
    assert (words[3] & 0xFFFFFF, words[3] >> 24) == (8_000_000, 32)


def duration(schedule: list[WorkItem], lengths: list[int], blocks: int, warps: int) -> float:
    """Return when the last of `blocks` resident blocks ends, in tiles of a warp, without a block's fixed cost."""
    parts, free = tiles_of_parts(schedule, lengths), [0.0] * blocks
    for item in schedule:
        begin, end = parts[item.request][item.part]
        heapq.heapreplace(free, free[0] + (end - begin) / warps)
    return max(free)


@pytest.mark.parametrize(
    ("kind", "requests", "efficiency"),
    [
        ("spread", 24, 0.85), ("spread", 32, 0.85), ("spread", 60, 0.9), ("spread", 97, 0.85), ("spread", 200, 0.9),
        ("equal", 12, 0.7), ("equal", 20, 0.8), ("equal", 40, 0.85),
    ],
)  # fmt: skip
def test_requests_that_do_not_fill_the_card_whole_are_cut(kind: str, requests: int, efficiency: float) -> None:
    blocks, warps = (33, 8) if requests <= 66 else (66, 4)
    lengths = batch(kind, requests)
    ideal = sum(-(-n // 32) for n in lengths) / (blocks * warps)
    uncut = [WorkItem(request, 0, 1, request, lengths[request], 0, 0) for request in range(requests)]
    scheduled = duration(reference_schedule(lengths, blocks, warps), lengths, blocks, warps)
    assert ideal / scheduled > efficiency > ideal / duration(uncut, lengths, blocks, warps)


@pytest.mark.parametrize(
    ("requests", "blocks", "warps"), [(29, 33, 8), (64, 33, 8), (32, 33, 8), (33, 33, 8), (128, 66, 4), (66, 66, 4)]
)
def test_equal_lengths_that_fill_the_card_stay_whole(requests: int, blocks: int, warps: int) -> None:
    assert {item.parts for item in reference_schedule([8192] * requests, blocks, warps)} == {1}


@pytest.mark.parametrize(("blocks", "warps", "min_tiles"), [(33, 8, 32), (66, 4, 16)])
def test_parts_are_worth_a_block(blocks: int, warps: int, min_tiles: int) -> None:
    """Parts have four tiles per warp, and an eighth of the part size, less the rounding to CUT_TILES."""
    for kind in ("spread", "one long", "any"):
        lengths = batch(kind, 60)
        part_size = sum(-(-n // 32) for n in lengths) * 2 // 3 // blocks
        for parts in tiles_of_parts(reference_schedule(lengths, blocks, warps), lengths):
            at_least = max(min_tiles, part_size // 8 if warps == 8 else 0) - CUT_TILES
            assert len(parts) == 1 or min(end - begin for begin, end in parts) > at_least


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([1024] * 8, [1] * 8),  # a warp of a part would have fewer than 4 tiles
        ([4096] * 4, [4] * 4),
        ([32768] * 8, [4] * 8),  # three resident blocks per request: parts are a block's whole load
        ([8192] * 12, [4] * 12),  # two thirds
        ([32768] * 9 + [0] * 7, [4, 5, 4, 4, 5, 4, 4, 5, 4] + [1] * 7),  # padding changes nothing
        ([8192] * 33 + [0] * 7, [1] * 40),
        ([200_000] + [300] * 30, [30] + [1] * 30),  # no more parts than a warp combines
    ],
)
def test_parts(lengths: list[int], parts: list[int]) -> None:
    schedule = reference_schedule(lengths, 33, 8)
    assert [item.parts for item in sorted(schedule) if item.part == 0] == parts
