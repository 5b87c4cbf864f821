"""Bins of numbers. A GPU looks up a number's neighbouring levels by its bin instead of trying all levels."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from typing import NamedTuple

BINS = 16
"""Number of bins over |x| / scale; one more bin holds everything larger."""
FEWEST_LEVELS = 8
"""Least number of levels for which bins cost less than trying all."""


class Bins(NamedTuple):
    """Lookup table from |x| / scale to its two neighbouring levels and the nearer of them.

    `magic`: minus the bits of a step size, it is the bits of an fp32 number close to the inverse step size, in some
    unit. |x| times that number, at most 1, times 16 and rounded, is the number of a bin. `levels`: by bin, two
    neighbouring levels as bf16, the upper one in the upper half of a word; one of them is the nearest of all levels.
    `thresholds`: by bin, the middle of both levels as bf16, and in the lower half the index of the lower level. All are
    empty where there are no bins.
    """

    magic: int
    levels: tuple[int, ...]
    thresholds: tuple[int, ...]


@functools.cache
def make_bins(levels: tuple[float, ...]) -> Bins:
    """Bins with at most one threshold in each, for steps of 3 bits of mantissa."""
    if len(levels) < FEWEST_LEVELS:
        return Bins(0, (), ())
    thresholds = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
    if any(_bits(x) & 0xFFFF for x in (*levels, *thresholds)):
        return Bins(0, (), ())  # they are no bf16
    last = len(thresholds) - 1
    for unit in (thresholds[-1] * (1 + i / 64) for i in range(32)):
        magic = _bits(1 / unit) + _bits(1.0)
        factors = [_number(magic - _bits(step / 8)) * step / 8 for step in range(8, 16)]
        bins = []
        for number in range(BINS + 1):
            low = (number - 0.5) / BINS / max(factors) * (1 - 2**-12)
            high = (number + 0.5) / BINS / min(factors) * (1 + 2**-12) if number < BINS else math.inf
            below = sum(threshold < low for threshold in thresholds)
            inside = sum(low <= threshold <= high for threshold in thresholds)
            bins.append((inside, min(below, last)))
        if all(inside <= 1 for inside, _ in bins):
            pairs = [(levels[j], levels[j + 1], j) for _, j in bins]
            words = tuple(_bits(high) | _bits(low) >> 16 for low, high, _ in pairs)
            return Bins(magic, words, tuple(_bits((low + high) / 2) | j for low, high, j in pairs))
    return Bins(0, (), ())


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _number(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]
