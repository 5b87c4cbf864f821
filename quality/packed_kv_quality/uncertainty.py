"""Standard errors: how far a mean over positions would move on other text of the same kinds.

Positions that follow each other share their context, so they do not count as independent. Means of blocks of up to
`BLOCK` consecutive positions of one window do; kinds of text are strata of fixed weight, so that the difference between
fiction and manuals is no error. With n_t blocks b of the kind t, of N in all (Cochran, Sampling Techniques, 5.3):

    error^2 = sum over t of (n_t / N)^2 var(b_t) / n_t
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

BLOCK = 256
LEAST_BLOCKS = 4
"""Least blocks of a kind of text. The spread of fewer says little."""

Strata = Sequence[Sequence[float]]
"""Block means of each kind of text."""


def block_means(windows: Sequence[torch.Tensor]) -> list[float]:
    """Values of consecutive positions, fp32 [positions] a window -> means of nearly equal blocks."""
    blocks = [block for values in windows for block in values.double().tensor_split(-(-len(values) // BLOCK))]
    return [block.mean().item() for block in blocks]


def standard_error(strata: Strata) -> float | None:
    """The standard error of the mean; None if a kind of text has fewer than `LEAST_BLOCKS`."""
    total = sum(map(len, strata))
    if not total or min(map(len, strata)) < LEAST_BLOCKS:
        return None
    return sum((len(blocks) / total) ** 2 * statistics.variance(blocks) / len(blocks) for blocks in strata) ** 0.5


def ratio(ours: Strata, theirs: Strata) -> tuple[float, float | None]:
    """Mean of `ours` over mean of `theirs`, and its standard error (linearised; blocks of the same text are pairs)."""
    (mean, other), pairs = (_mean(strata) for strata in (ours, theirs)), list(zip(ours, theirs, strict=True))
    found = mean / other
    error = standard_error([[a - found * b for a, b in zip(one, two, strict=True)] for one, two in pairs])
    return found, None if error is None else error / other


def _mean(strata: Strata) -> float:
    return statistics.fmean(value for blocks in strata for value in blocks)
