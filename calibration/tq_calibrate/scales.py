"""Per-channel scales with the least error; K and V are multiplied by them before they are stored.

A rotation over n channels spreads its error evenly: with channels of energy E_c s_c^2, each gets noise / n * sum of
E_c s_c^2, and divided by s_c again it meets a query of mean square W_c. So the error of scores is

    J = noise / n * (sum of E_c s_c^2) * (sum of W_c / s_c^2)

which by Cauchy and Schwarz is least, noise / n * (sum of sqrt(E_c W_c))^2, at s_c = (W_c / E_c)^(1/4).
"""

from __future__ import annotations

import math

import torch

BOUND = 64.0
"""Scales lie in [1 / BOUND, BOUND]."""
FLOOR = 1e-9
"""Lower bound of a channel's energy and weight, relative to the mean."""


def channel_scale(energy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scales of geometric mean 1 in each head.

    Args:
        energy: mean square of each channel as it is stored, for K less its mean; [heads, head_size], not negative.
        weight: mean square of what multiplies it, of that shape.

    Returns:
        float64 [heads, head_size], from 1 / BOUND to BOUND.
    """
    energy, weight = (x.double() for x in (energy, weight))
    energy, weight = (
        x.maximum(FLOOR * x.mean(-1, keepdim=True)).clamp_min(torch.finfo(x.dtype).tiny) for x in (energy, weight)
    )
    logarithm = (weight.log() - energy.log()) / 4
    logarithm -= logarithm.mean(-1, keepdim=True)
    return logarithm.clamp(-math.log(BOUND), math.log(BOUND)).exp()
