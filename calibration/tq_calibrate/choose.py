"""Choose which channels share a section so that the error of scores and outputs is least.

A section (the outlier channels, the others; or 32 channels with one scale) spreads its error evenly: each channel gets
`noise * mean energy of the section`, whichever channels carried the energy. A score q.k is off by the sum of
E[q_c^2] * error_c, an output by the same with the norms of the output projection. So with W and E the sums of weight
and energy in a section of n channels, the error to minimise is

    J = sum over sections of  noise / n * W * E

Large channels are therefore best grouped with channels of low weight, not with the next largest. Exchanging two
channels changes J in closed form; starting from several guesses, the best exchange is made until none lowers J.

The choice is made for stored vectors: K minus its mean and scaled (`scales`), whose energies and weights are nearly
equal; V scaled for dtypes with outlier channels, and unscaled for other dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.formats import FORMATS, GROUP_SIZE

from .ropes import ModelRope
from .scales import channel_scale
from .statistics import LayerStatistics

NOISE_OF_A_BIT = 1 / 4
"""Ratio of squared errors with and without one more bit (docs/lab/formats.md: 0.24, from 2 to 3 and 3 to 4 bits)."""
LEAST_GAIN = 1e-9
"""Exchanges that lower J by a smaller fraction are rounding."""
FLOOR = 1e-9
"""Lower bound of a channel's energy and weight, relative to the mean, so that guesses may divide by them."""


@dataclass
class LayerChoice:
    """A layer's entry in the file: channels int64 [KV heads, outliers] and [KV heads, head_size], means and scales
    float64 [KV heads, head_size] or None; V's have V's head_size. `key.mean` is the mean before `rope`, if there is
    one; `key.rope` and `key.group_bits` are not used."""

    key: ChannelCalibration
    value: ChannelCalibration
    rope: ModelRope | None = None


def choose(layer: LayerStatistics, recipe: str, *, centres_values: bool = False) -> LayerChoice:
    """Scales of a layer, and the outlier channels and channel orders of least error for scaled vectors. With
    `centres_values`, V is stored minus its mean, which it must have."""
    count = FORMATS[recipe].outlier_channels(layer.key_energy.shape[-1])
    key_scale = channel_scale(layer.key_variance, layer.key_weight)
    value_energy = layer.value_energy
    if centres_values:
        assert layer.value_variance is not None
        value_energy = layer.value_variance
    value_scale = channel_scale(value_energy, layer.value_weight)
    key = (layer.key_variance * key_scale.square(), layer.key_weight / key_scale.square())
    value = (value_energy * value_scale.square(), layer.value_weight / value_scale.square())
    value_order = channel_order(value_energy, layer.value_weight)
    means = layer.key_mean, layer.key_first_mean
    value_means = (layer.value_mean, layer.value_first_mean) if centres_values else (None, None)
    ranking = (layer.key_variance * layer.key_weight).argsort(dim=-1, descending=True, stable=True)
    return LayerChoice(
        ChannelCalibration(outlier_channels(*key, count), channel_order(*key), *means, key_scale, ranking=ranking),
        ChannelCalibration(outlier_channels(*value, count), value_order, *value_means, value_scale),
        layer.rope,
    )


def outlier_channels(energy: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` channels that get one more bit: [heads, head_size] twice -> [heads, count], ascending."""
    sizes = (count, energy.shape[-1] - count)
    section = partition(energy, weight, sizes, noise=(NOISE_OF_A_BIT, 1.0))
    return (section == 0).nonzero()[:, 1].view(-1, count)


def channel_order(energy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The channels by scale group: [heads, head_size] twice -> a permutation [heads, head_size].

    The rotations mix 2 or 4 neighbours. Within a group, large channels are paired with small ones, and large pairs
    with small pairs, so that after the rotation no value stands out of its group.
    """
    groups = energy.shape[-1] // GROUP_SIZE
    section = partition(energy, weight, (GROUP_SIZE,) * groups, noise=(1.0,) * groups)
    by_size = energy.argsort(dim=-1, descending=True, stable=True)
    by_group = by_size.gather(-1, section.gather(-1, by_size).argsort(dim=-1, stable=True))
    ranked = by_group.unflatten(-1, (groups, GROUP_SIZE))
    pairs = torch.stack((ranked, ranked.flip(-1)), dim=-1)[..., : GROUP_SIZE // 2, :]
    quads = torch.cat((pairs, pairs.flip(-2)), dim=-1)[..., : GROUP_SIZE // 4, :]
    return quads.flatten(-3)


def partition(energy: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int], noise: Sequence[float]) -> torch.Tensor:
    """The section of each channel.

    Args:
        energy, weight: [heads, head_size], not negative.
        sizes: channels of each section; they add up to head_size.
        noise: error of each section over its mean energy; only ratios matter.

    Returns:
        int64 [heads, head_size], the section's number.
    """
    heads, channels = energy.shape
    energy, weight = (x / x.mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) for x in (energy, weight))
    energy, weight = (x.to(torch.float64).clamp_min(FLOOR) for x in (energy, weight))
    guesses = (energy, energy / weight, energy * weight)
    in_order = torch.repeat_interleave(torch.tensor(sizes)).to(energy.device).expand(heads, -1)
    ranks = [guess.argsort(dim=-1, descending=True, stable=True) for guess in guesses]
    section = torch.cat([torch.empty_like(rank).scatter_(-1, rank, in_order) for rank in ranks])
    cost = torch.tensor(noise, dtype=torch.float64, device=energy.device) / in_order[0].bincount()
    error = exchange(energy.repeat(len(guesses), 1), weight.repeat(len(guesses), 1), section, cost)
    best = error.view(len(guesses), heads).argmin(0)
    return section.view(len(guesses), heads, channels)[best, torch.arange(heads, device=best.device)]


def exchange(energy: torch.Tensor, weight: torch.Tensor, section: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """Exchange channels between sections, the best pair of each row at a time, until none lowers J.

    `energy`, `weight` float64 [rows, channels]; `section` int64 of that shape is changed in place; `cost` [sections] is
    noise / n. Returns J, [rows].
    """
    rows, channels = energy.shape
    energy_gain, weight_gain = (x[:, None, :] - x[:, :, None] for x in (energy, weight))  # of a's section, if b comes
    both = energy_gain * weight_gain
    while True:
        sums = torch.zeros(2, rows, len(cost), dtype=energy.dtype, device=energy.device)
        sums.scatter_add_(-1, section.expand(2, -1, -1), torch.stack((energy, weight)))
        error = (sums[0] * sums[1] * cost).sum(-1)
        e, w = ((x * cost).gather(-1, section) for x in sums)
        c = cost[section]
        change = (e[:, :, None] - e[:, None]) * weight_gain
        change += (w[:, :, None] - w[:, None]) * energy_gain
        change += (c[:, :, None] + c[:, None]) * both
        change.masked_fill_(section[:, :, None] == section[:, None], 0.0)
        least, pair = change.flatten(1).min(-1)
        row = (least < -LEAST_GAIN * error).nonzero()[:, 0]
        if not len(row):
            return error
        a, b = pair[row] // channels, pair[row] % channels
        section[row, a], section[row, b] = section[row, b], section[row, a]
