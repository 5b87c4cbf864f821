"""Times of the kernels of steps, from PyTorch's profiler."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much time spans from a start to an end cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def device_kernels(profile: Any) -> list[tuple[int, float, float]]:
    """Kernels that a CUDA device ran: the number of the launch, start and end in microseconds. Raises RuntimeError if
    PyTorch's profiler saw none on the device that is there."""
    found = [
        (event.id, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    if torch.cuda.is_available() and not found:
        raise RuntimeError("PyTorch's profiler sees no kernel: it needs CUPTI, and the engine in this process")
    return found


@dataclass(frozen=True)
class KernelTimes:
    """Means of a step: seconds that its kernels take, summed; their number; seconds from the first to the last kernel
    of its whole CUDA graph, and from there to the first of the next step's (nan where there is none)."""

    seconds: float
    kernels: float
    graph: float = float("nan")
    between: float = float("nan")


def kernel_times(kernels: Sequence[tuple[int, float, float]], steps: int, is_whole: bool) -> KernelTimes:
    """The times of `steps` steps from all their kernels: the number of the launch, start and end in microseconds.

    `is_whole`: each step ran in one CUDA graph, whose kernels have one launch and are most of the step's.
    """
    seconds = sum(end - start for _, start, end in kernels) * 1e-6 / steps
    launches: dict[int, list[tuple[float, float]]] = {}
    for launch, start, end in kernels:
        launches.setdefault(launch, []).append((start, end))
    largest = sorted(launches.values(), key=len)[-steps:]
    if not is_whole or 2 * sum(map(len, largest)) < len(kernels):
        return KernelTimes(seconds, len(kernels) / steps)
    graphs = sorted((min(start for start, _ in found), max(end for _, end in found)) for found in largest)
    between = [(later - end) * 1e-6 for (_, end), (later, _) in pairwise(graphs)]
    span = statistics.fmean((end - start) * 1e-6 for start, end in graphs)
    return KernelTimes(seconds, len(kernels) / steps, span, statistics.fmean(between) if between else float("nan"))
