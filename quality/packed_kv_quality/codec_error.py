"""Test vectors for codecs, and their relative error."""

from __future__ import annotations

import torch

HEAD_DIM = 128
LARGE_CHANNELS, LARGE = 5, 12.0
"""Outlier channels of 128 (4 %), and their magnitude relative to the others."""


def vectors(count: int, large_channels: bool = False) -> torch.Tensor:
    """Gaussian vectors, fp32 [count, 128], from a fixed seed; 5 channels 12 times larger if asked for."""
    generator = torch.Generator().manual_seed(20240)
    x = torch.randn(count, HEAD_DIM, generator=generator)
    if large_channels:
        x[:, torch.randperm(HEAD_DIM, generator=generator)[:LARGE_CHANNELS]] *= LARGE
    return x


def relative_mse(x: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((x.double() - decoded).square().sum() / x.double().square().sum())
