"""The fork's trellis: its paths are the nearest, and a vector goes the way that the definition says."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
import torch
import trellis_code
from torch.testing import assert_close

FIRST_SIGNS = ("-++--+-+--++++++", "++++-++-+---+---")
"""Signs of the first 16 channels, as published."""


def test_signs() -> None:
    for bits, expected in zip(trellis_code.SIGNS, FIRST_SIGNS, strict=True):
        assert "".join("-" if sign < 0 else "+" for sign in trellis_code.signs(bits, 16).tolist()) == expected


def test_paths_are_the_nearest_of_all() -> None:
    """Five channels have 64 beginnings times 4^5 paths."""
    levels = torch.tensor(trellis_code.LEVELS)
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)) * 0.1
    all_paths = []
    for start in range(64):
        for inputs in itertools.product(range(4), repeat=5):
            state, path = start << 2, []
            for bits in inputs:
                state = state >> 2 | bits << 6
                path.append(state)
            all_paths.append(path)
    known = torch.tensor(all_paths)
    errors = (x[:, None] - levels[known]).square().sum(-1)
    found = trellis_code.paths(x, levels)
    assert all(path in all_paths for path in found.tolist())
    assert_close((x - levels[found]).square().sum(-1), errors.amin(-1), rtol=1e-4, atol=1e-6)


def by_definition(vector: list[float]) -> list[float]:
    """A vector of 128 channels, coded and decoded by loops in fp64 except the stored factor."""
    signs = [[(-1) ** (bits >> i & 1) for i in range(128)] for bits in trellis_code.SIGNS]
    matrix = [[(-1) ** (i & j).bit_count() / math.sqrt(128) for j in range(128)] for i in range(128)]
    norm = math.sqrt(sum(x * x for x in vector))
    unit = [x / norm * sign for x, sign in zip(vector, signs[0], strict=True)]
    unit = [sum(a * b for a, b in zip(row, unit, strict=True)) * s for row, s in zip(matrix, signs[1], strict=True)]
    best = {state: (0.0, ()) for state in range(256)}
    for x in unit:
        after: dict[int, tuple[float, tuple]] = {}
        for state, (cost, path) in best.items():
            for bits in range(4):
                following = state >> 2 | bits << 6
                total = cost + (x - trellis_code.LEVELS[following]) ** 2
                if following not in after or total < after[following][0]:
                    after[following] = total, (path, following)
        best = after
    path, levels = min(best.values(), key=lambda found: found[0])[1], []
    while path:
        path, state = path
        levels.append(trellis_code.LEVELS[state])
    coded = [level * sign for level, sign in zip(reversed(levels), signs[1], strict=True)]
    factor = float(numpy.float16(norm / math.sqrt(sum(x * x for x in levels))))
    return [
        factor * sign * sum(a * b for a, b in zip(row, coded, strict=True))
        for row, sign in zip(matrix, signs[0], strict=True)
    ]


@pytest.mark.parametrize("channels", [64, 128])
def test_a_vector_is_read_back_as_by_the_definition(channels: int) -> None:
    x = torch.randn(2, 3, channels, generator=torch.Generator().manual_seed(2)) * 7
    found = trellis_code.read_back(x)
    filled = x[1, 2].tolist() + [0.0] * (128 - channels)
    assert_close(found[1, 2], torch.tensor(by_definition(filled))[:channels], rtol=1e-4, atol=1e-4)
    assert not trellis_code.read_back(torch.zeros(1, channels)).any()


def test_error_of_gaussian_channels() -> None:
    """2 bits by a scalar code have 0.1175, by the best code of any length 0.0625; heads of 64 have half of 128's."""
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(3))
    errors = [
        float((trellis_code.read_back(part, size) - part).square().sum() / part.square().sum())
        for part, size in ((x, 128), (x[:, :64], 64), (x[:, :64], 128))
    ]
    assert 0.0625 < errors[0] < 0.09 and 0.0625 < errors[1] < 0.09 and 0.45 < errors[2] / errors[0] < 0.55


def test_v_is_longer_in_longer_contexts() -> None:
    assert trellis_code.value_gain(7000) == pytest.approx(1.04 * 1.05915, abs=1e-5)
    assert trellis_code.value_gain(10) == 1.04 and trellis_code.value_gain(1 << 20) == pytest.approx(1.04 * 1.12)
