"""Scales: of geometric mean 1, within bounds, and of less true error of scores than without."""

from __future__ import annotations

import pytest
import torch
from packed_kv import get_codec
from tq_calibrate.scales import BOUND, channel_scale

HEADS, HEAD_SIZE = 3, 128


def sizes(seed: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(seed)).mul(spread).exp().double()


def test_no_other_scales_have_less_modelled_error() -> None:
    energy, weight = sizes(1), sizes(2)
    scale = channel_scale(energy, weight)
    assert scale.dtype == torch.float64
    torch.testing.assert_close(scale.log().mean(-1), torch.zeros(HEADS, dtype=torch.float64), rtol=0, atol=1e-9)

    def error(s: torch.Tensor) -> torch.Tensor:
        return (energy * s.square()).sum(-1) * (weight / s.square()).sum(-1)

    for seed in range(3, 9):
        assert (error(scale * sizes(seed, 0.1)) > error(scale)).all()


def test_scales_are_bounded_and_dead_channels_do_not_disturb() -> None:
    energy, weight = sizes(1, 12.0), sizes(2, 12.0)
    energy[0, :5] = weight[0, 3:9] = 0
    energy[1] = 0
    scale = channel_scale(energy, weight)
    assert (scale >= 1 / BOUND).all() and (scale <= BOUND).all()
    assert scale.max() == pytest.approx(BOUND)


def test_scores_of_a_rotation_of_the_whole_head_are_better() -> None:
    energy, weight = sizes(3, 1.5), sizes(4, 1.5)
    keys = torch.randn(2048, HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(5)) * energy.sqrt().float()
    scale, codec = channel_scale(energy, weight).float(), get_codec("tq4", HEAD_SIZE)
    errors = [
        float(((codec.decode(codec.encode(keys * s)) / s - keys).square().mean(0) * weight).sum())
        for s in (scale, torch.ones_like(scale))
    ]
    assert errors[0] < 0.6 * errors[1], errors
