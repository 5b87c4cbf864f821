"""The schedule of the latent kernel's partitions: the one made on the device against the one made in Python."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from packed_kv.kernels.cuda.latent_schedule import RUN_TILES, LatentScheduler
from packed_kv.kernels.precompile import Precompiler
from packed_kv.kernels.triton.launch import Arguments
from schedules import LatentSchedule, reference_latent_schedule
from test_schedule import DEVICE, batch


def runs(schedule: LatentSchedule, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Return what `latent.cu` makes of a schedule: each partition's request, first tile and number of tiles."""
    result = []
    for (request, begin), (last, last_tile) in pairwise(schedule.begins):
        own = []
        while request < last or (request == last and begin < last_tile):
            end = last_tile if request == last else -(-lengths[request] // 64)
            if end > begin:
                own.append((request, begin, end - begin))
            request, begin = request + 1, 0
        result.append(own)
    return result


@pytest.mark.parametrize("partitions", [132, 66])
@pytest.mark.parametrize("requests", [1, 4, 64, 97, 200, 1100])
@pytest.mark.parametrize("kind", ["equal", "spread", "one long", "any", "padded", "short"])
def test_schedule(kind: str, requests: int, partitions: int) -> None:
    """The device's schedule is Python's, covers every tile once, and gives no partition much more than its share."""
    lengths = batch(kind, requests)
    scheduler = LatentScheduler(requests + 3, 140, DEVICE)
    scheduler.begins.fill_(7)
    begins, spans = scheduler(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), partitions)
    expected = reference_latent_schedule(lengths, partitions)
    assert [tuple(x) for x in begins.tolist()] == expected.begins
    assert [tuple(x) for x in spans.tolist()] == expected.spans
    of_partitions = runs(expected, lengths)
    for request, tokens in enumerate(lengths):
        parts = [(p, first, n) for p, own in enumerate(of_partitions) for r, first, n in own if r == request]
        first, count = expected.spans[request]
        assert [p for p, _, _ in parts] == list(range(first, first + count))
        assert sum(n for _, _, n in parts) == -(-tokens // 64)
        assert all(a[1] + a[2] == b[1] for a, b in pairwise(parts)) and (not parts or parts[0][1] == 0)
    costs = [sum(n + RUN_TILES for _, _, n in own) for own in of_partitions]
    fair = -(-sum(-(-n // 64) + RUN_TILES for n in lengths) // partitions)
    assert max(costs) <= fair + 2 * RUN_TILES


def test_equal_requests_are_not_cut_across() -> None:
    assert all(len(own) == 1 for own in runs(reference_latent_schedule([4096] * 64, 132), [4096] * 64)[:128])
    assert all(parts == 1 for _, parts in reference_latent_schedule([2048] * 128, 132).spans)


def test_variants_are_compiled_ahead_of_the_batches_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packed_kv.kernels.precompile._compilations", {})  # of other tests
    scheduler, one = LatentScheduler(1030, 140, DEVICE), torch.ones(1030, dtype=torch.int32, device=DEVICE)
    assert list(scheduler.launches) == [64, 256, 1024, 2048]
    with Precompiler() as ahead:
        scheduler(one[:1], 132)
        noted = set(ahead.jobs)
    for requests in (1, 64, 65, 1024, 1030):
        size = min(size for size in scheduler.launches if size >= requests)
        begins, spans = scheduler(one[:requests], 132)
        assert (len(begins), len(spans)) == (133, requests)
        arguments = Arguments(requests, 132)
        assert scheduler.launches[size].variant((begins, spans, one), arguments) in noted
