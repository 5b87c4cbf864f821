"""The mean of a key behind RoPE, by blocks of positions, from its mean before RoPE (docs/formats.md, section 5).

Behind RoPE a pair of channels of the mean turns with the position p, by w p radians. Averaged over the positions of
block b, p = b B .. (b + 1) B - 1, the turn is the complex number

    g = exp(i w (b B + (B - 1) / 2)) * sin(B w / 2) / (B sin(w / 2)),        1 for w = 0

and the pair's mean is k g, with k the pair's mean before RoPE as a complex number. In channels: mean[c] = k[c] Re g +
partner[c] Im g, where partner is -k of the other channel for a pair's first channel, and +k of the other channel for
its second.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ..layout import MEAN_BLOCK
from ..model.rope import Rope, average_length


@functools.lru_cache(maxsize=16)
def spectrum_of_blocks(
    rope: Rope, head_dim: int, blocks: int, stored_dim: int | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Re g and Im g of blocks of positions, by channel in the model's order: fp32 [blocks, 2, stored_dim], on `device`,
    the same tensor for all layers that ask for it. Made on the CPU in float64, rounded once.

    stored_dim: channels of a row, those beyond head_dim with g = 1; None: head_dim. device: None: the CPU.

    Raises:
        ValueError: more pairs than head_dim has, a frequency that is not from 0 to pi.
    """
    check(rope, head_dim)
    on_cpu: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    frequency = torch.tensor(rope.frequencies, **on_cpu)
    middle = torch.arange(blocks, **on_cpu)[:, None] * MEAN_BLOCK + (MEAN_BLOCK - 1) / 2
    length = torch.tensor([average_length(w, MEAN_BLOCK) for w in rope.frequencies], **on_cpu)
    angle = middle * frequency
    table = torch.zeros(blocks, 2, head_dim if stored_dim is None else stored_dim, **on_cpu)
    table[:, 0] = 1
    for channels in zip(*rope.pairs(), strict=True):
        table[:, 0, list(channels)] = length * torch.cos(angle)
        table[:, 1, list(channels)] = length * torch.sin(angle)
    return table.float().to(device or torch.device("cpu"))


def partner(rope: Rope, mean: torch.Tensor) -> torch.Tensor:
    """The factor of Im g for a mean before RoPE, fp32 [..., head_dim] -> the same shape; 0 for channels that do not
    turn."""
    first, second = (list(channels) for channels in zip(*rope.pairs(), strict=True))
    turned = torch.zeros_like(mean)
    turned[..., first], turned[..., second] = -mean[..., second], mean[..., first]
    return turned


def check(rope: Rope, head_dim: int) -> None:
    """Raise ValueError if heads of `head_dim` channels cannot have this RoPE."""
    count = len(rope.frequencies)
    if not 1 <= count <= head_dim // 2:
        raise ValueError(f"rope must have 1 to {head_dim // 2} frequencies for heads of {head_dim}, got {count}")
    wrong = [w for w in rope.frequencies if not 0 <= w <= math.pi]  # NaN is in no range
    if wrong:
        raise ValueError(f"a frequency of rope must be from 0 to pi, got {wrong[0]:g}")
