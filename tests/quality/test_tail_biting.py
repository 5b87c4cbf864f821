"""Chains are the nearest that a decoder can read, decoded as the module says, and the error is as the study found."""

from __future__ import annotations

import itertools

import pytest
import tail_biting
import torch
from torch.testing import assert_close


def decoded(memory: tuple[int, ...], choices: tuple[int, ...], bits: int) -> list[float]:
    """A chain by its memory bits and, for each channel, the bits of its index above e0."""
    found, length = [], len(memory)
    for t, choice in enumerate(choices):
        now, one, two = memory[t], memory[t - 1], memory[t - 2]
        after = memory[(t + 1) % length - 1]  # e0[t + 1] is s[t]
        assert after == now
        if bits == 1:
            sign, index = now ^ two, now ^ one ^ two
        else:
            e1 = choice & 1
            sign, index = e1 ^ now ^ two, choice * 2 + one
        found.append((-1) ** sign * tail_biting.MAGNITUDES[bits][index])
    return found


@pytest.mark.parametrize(("bits", "length"), [(1, 8), (2, 5), (3, 3)])
def test_chains_are_the_nearest_of_all(bits: int, length: int) -> None:
    every = torch.tensor(
        [
            decoded(memory, choices, bits)
            for memory in itertools.product((0, 1), repeat=length)
            for choices in itertools.product(range(1 << bits - 1), repeat=length)
        ]
    )
    x = torch.randn(20, length, generator=torch.Generator().manual_seed(bits))
    weights = torch.rand(20, length, generator=torch.Generator().manual_seed(9)) + 0.5
    errors = ((x[:, None] - every).square() * weights[:, None]).sum(-1)
    found = tail_biting.nearest_chains(x, [bits] * length, weights)
    assert_close(((x - found).square() * weights).sum(-1), errors.amin(-1))
    for chain in found:
        assert ((every - chain).abs().amax(-1) < 1e-6).any()


def test_free_ends_are_never_worse() -> None:
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(3))
    closed = (x - tail_biting.nearest_chains(x, [2] * 8, torch.ones_like(x))).square().sum(-1)
    free = tail_biting.least_error(x, [2] * 8)
    assert (free <= closed + 1e-5).all() and (free < closed - 1e-3).any()


@pytest.mark.parametrize(
    ("bits", "lane", "errors"),
    [((2, 2), 8, (0.0854, 0.0856)), ((3, 3), 8, (0.0198, 0.0200)), ((3, 2), 8, (0.0274, 0.0694))],
)
def test_error_of_gaussian_groups(bits: tuple[int, ...], lane: int, errors: tuple[float, ...]) -> None:
    """Of today's codes: 0.107 with 2 bits, 0.026 with 3."""
    x = torch.randn(1024, len(bits), 32, generator=torch.Generator().manual_seed(1))
    found = tail_biting.round_trip(x, bits, lane, longer=False)
    relative = (found - x).square().sum((0, 2)) / x.square().sum((0, 2))
    assert_close(relative, torch.tensor(errors), rtol=0.03, atol=0)


def test_zeros() -> None:
    assert (tail_biting.round_trip(torch.zeros(1, 2, 32), (2, 2), 8, longer=True) == 0).all()
