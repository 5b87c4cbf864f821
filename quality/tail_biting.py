"""A tail-biting trellis of 4 states with one memory bit a channel, which no dtype has: codes of 1 to 3 bits.

The memory bits s of a chain of channels go round, s[t - n] being s[t - n + length]. A code of b bits is an index of
magnitudes, whose lowest bits are e0[t] = s[t - 1] and, from 2 bits on, e1[t] = s[t] ^ s[t - 2] ^ sign[t]: so a decoder
computes the sign of channel t as e1[t] ^ e0[t + 1] ^ e0[t - 1]. With 1 bit the index is s[t] ^ s[t - 1] ^ s[t - 2] and
the sign s[t] ^ s[t - 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from packed_kv.codecs import scalar
from packed_kv.formats import GROUP_SIZE, MAX_SCALE_BYTE

MAGNITUDES = {
    1: (0.45, 1.38),
    2: (0.25, 0.5, 1.0, 2.0),
    3: tuple(m / 64 for m in (11, 20, 42, 59, 80, 104, 136, 192)),
}
"""bits -> magnitudes by index, in units of a group's scale."""
VALUE_GAIN = {1: 1.0, 2: 1.045, 3: 1.015}
"""bits -> factor of decoded V, as `formats.Code.value_gain` for today's codes."""
SEARCH = {1: range(-3, 4), 2: range(-3, 4), 3: range(-5, 3)}
"""bits -> scale bytes tried, from the root mean square's byte (3 bits: the largest magnitude's) on."""


@cache
def _levels(bits: int) -> torch.Tensor:
    """The signed levels of each e0 and s[t] ^ s[t - 2], fp32 [2, 2, 2^(bits - 1)]."""

    def level(e0: int, other: int, choice: int) -> float:
        e1 = choice & 1
        index = other ^ e0 if bits == 1 else choice // 2 * 4 + 2 * e1 + e0
        return -MAGNITUDES[bits][index] if e1 ^ other else MAGNITUDES[bits][index]

    choices = range(1 << bits - 1)
    return torch.tensor([[[level(e0, other, c) for c in choices] for other in (0, 1)] for e0 in (0, 1)])


def _nearest(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The level nearest to each number, fp32 [..., 2, 2] by e0 and s[t] ^ s[t - 2]."""
    levels = _levels(bits)
    best = levels[..., 0].expand(*x.shape, 2, 2)
    for choice in levels.unbind(-1)[1:]:
        is_nearer = (x[..., None, None] - choice).abs() < (x[..., None, None] - best).abs()
        best = torch.where(is_nearer, choice, best)
    return best


def _by_widths(chains: torch.Tensor, bits: Sequence[int]) -> torch.Tensor:
    found = torch.empty(*chains.shape, 2, 2)
    for width in set(bits):
        at = [channel for channel, b in enumerate(bits) if b == width]
        found[:, at] = _nearest(chains[:, at], width)
    return found


def least_error(chains: torch.Tensor, bits: Sequence[int]) -> torch.Tensor:
    """The squared error [chains] of chains fp32 [chains, channels] that begin and end in any state."""
    errors = (chains[..., None, None] - _by_widths(chains, bits)).square()
    cost = torch.zeros(len(chains), 2, 2)  # by s[t - 1], s[t - 2]
    for error in errors.unbind(1):
        cost = torch.stack([(cost + error).amin(-1), (cost + error.flip(-1)).amin(-1)], 1)
    return cost.flatten(1).amin(1)


def nearest_chains(chains: torch.Tensor, bits: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
    """Code chains fp32 [chains, channels] as tail-biting chains of least weighted squared error, by Viterbi's algorithm
    from each of the 4 states."""
    levels = _by_widths(chains, bits)
    errors = (chains[..., None, None] - levels).square() * weights[..., None, None]
    states = torch.arange(4)
    cost = torch.full((len(chains), 4, 2, 2), torch.inf)  # by first state, s[t - 1], s[t - 2]
    cost[:, states, states % 2, states // 2] = 0
    came_from = []  # s[t - 2] of the survivors, by first state, s[t], s[t - 1]
    for error in errors.unbind(1):
        to = torch.stack([cost + error[:, None], cost + error.flip(-1)[:, None]], 2)
        came_from.append(to[..., 1] < to[..., 0])
        cost = to.amin(-1)
    first = cost[:, states, states % 2, states // 2].argmin(1)
    found, every = torch.empty_like(chains), torch.arange(len(chains))
    now, one = first % 2, first // 2
    for t in reversed(range(len(bits))):
        two = came_from[t][every, first, now, one].long()
        found[:, t] = levels[every, t, one, now ^ two]
        now, one = one, two
    return found


def round_trip(groups: torch.Tensor, bits: Sequence[int], lane: int, longer: bool) -> torch.Tensor:
    """Groups fp32 [..., groups, 32] of these widths, coded by chains over all groups and decoded.

    Args:
        lane: channels of each group that a chain has.
        longer: whether decoded vectors are multiplied by `VALUE_GAIN`.
    """
    x = groups.reshape(-1, len(bits), GROUP_SIZE)
    scales = torch.stack([_scale(x[:, i], width, lane) for i, width in enumerate(bits)], 1)
    lanes = GROUP_SIZE // lane

    def chains(y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(-1, (lanes, lane)).transpose(1, 2).flatten(2).flatten(0, 1)

    weights = chains((scales / scales.amax(1, keepdim=True)).square().nan_to_num()[..., None].expand_as(x))
    widths = [width for width in bits for _ in range(lane)]
    found = nearest_chains(chains((x / scales[..., None]).nan_to_num()), widths, weights)
    found = found.unflatten(0, (-1, lanes)).unflatten(-1, (len(bits), lane)).transpose(1, 2).flatten(-2)
    if longer:
        scales = scales * torch.tensor([VALUE_GAIN[width] for width in bits])
    return (found * scales[..., None]).reshape(groups.shape)


def _scale(groups: torch.Tensor, bits: int, lane: int) -> torch.Tensor:
    """The scale fp32 [groups] of each group [groups, 32] with the least error of chains within the group that end in
    any state."""
    about = groups.square().mean(-1).sqrt() if bits < 3 else groups.abs().amax(-1) / MAGNITUDES[bits][-1]
    start = about.half().view(torch.int16) >> 7
    best, least = torch.zeros(len(groups)), torch.full((len(groups),), torch.inf)
    for offset in SEARCH[bits]:
        scale = scalar.decode_scale((start + offset).clamp(0, MAX_SCALE_BYTE).to(torch.uint8))
        chains = (groups / scale[:, None]).nan_to_num().reshape(-1, lane)
        error = least_error(chains, [bits] * lane).reshape(len(groups), -1).sum(1) * scale.square()
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best
