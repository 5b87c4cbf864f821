"""Choose the bits of K's groups of 32 channels, for the dtypes with Hadamard rotation.

Channels cost unequally: an error of channel c moves a score by its weight, and with the best scales (`scales.py`) the
error is a section's noise times the squared sum of sqrt(weight * energy) over its channels. So channels are ranked by
that cost: groups of costly channels get more bits and groups of cheap channels fewer, with the same bytes in total.
Each group is rotated on its own, so that its noise stays in the group.

Here queries count by their attention to distant keys: unequal widths gain more by it than equal ones
(docs/lab/tried.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import torch
from packed_kv.formats import CODES, FORMATS, GROUP_SIZE, Format, runs
from packed_kv.layout import key_vector

from .choose import LayerChoice
from .statistics import LayerStatistics
from .sums import Sums

NOISE = {5: 0.0019, 4: 0.0062, 3: 0.0260, 2: 0.1068}
"""bits -> squared error of a code, relative to what is coded (docs/formats.md, section 8)."""
LARGEST_HEAD_OF_5 = 128
"""Channels of the largest heads whose groups may have 5 bits. Over heads of 256 the decode of a draft would take longer
(`tq4`, 24 columns, 32 x 8192, H200: 297 us instead of 244), and no such model has shown a gain."""
LEAST_GAIN = 0.95
"""Ratio of the error with other widths to the error with the dtype's own, from which on another layout is not worth
it."""


def key_widths(layers: dict[int, LayerStatistics], choices: dict[int, LayerChoice]) -> dict[str, tuple[int, ...]]:
    """Return the bits of K's groups for dtypes that lose clearly less with other widths than their own."""
    errors = [(choice, layers[number].key_variance, layers[number].key_weight) for number, choice in choices.items()]
    found = {}
    for fmt in _formats():
        gains = {bits: gain(fmt, bits, errors) for bits in candidates(fmt, errors[0][1].shape[-1])}
        best = min(gains, key=gains.__getitem__, default=None)
        if best is not None and gains[best] < LEAST_GAIN:
            found[fmt.name] = best
    return found


def weigh_from_afar(layers: dict[int, LayerStatistics]) -> None:
    """Weigh queries by their attention to distant keys, in place, where it is known."""
    for number, layer in layers.items():
        if layer.far_key_weight is not None:
            layers[number] = replace(layer, key_weight=layer.far_key_weight)


def held_out_gains(widths: dict[str, tuple[int, ...]], held: Sums, choices: dict[int, LayerChoice]) -> dict[str, float]:
    """Return the error with these widths over the error with the dtype's own, by dtype, on sums over another text than
    the choices were made from."""
    errors = []
    for number, choice in choices.items():
        sums = held.layers[number]
        energy = sums.squares_about(choice.key.mean, choice.rope)
        weight = sums.statistics().far_key_weight
        assert weight is not None
        errors.append((choice, energy, weight))
    return {name: gain(FORMATS[name], bits, errors) for name, bits in widths.items()}


def candidates(fmt: Format, head_size: int) -> list[tuple[int, ...]]:
    """Return lists of groups' bits, descending, with as many bytes as `fmt`, without its own list."""
    own, found = fmt.group_bits(head_size), []
    widths = (bits for bits in CODES if bits < 5 or head_size <= LARGEST_HEAD_OF_5)
    for bits in combinations_with_replacement(sorted(widths, reverse=True), len(own)):
        try:
            key_vector(fmt, head_size, bits)
        except ValueError:
            continue
        if bits != own:
            found.append(bits)
    return found


def gain(fmt: Format, bits: Sequence[int], errors: Iterable[tuple[LayerChoice, torch.Tensor, torch.Tensor]]) -> float:
    """Return the geometric mean over layers of the scores' error with these bits over the error with the dtype's own.

    errors: for each layer its choice, mean squares of stored channels minus their mean, and of queries, float64 [KV
    heads, head_size].
    """
    ratios = []
    for choice, energy, weight in errors:
        squares = choice.key.scale.square()
        stored, weight = energy * squares, weight / squares
        own = runs(fmt.group_bits(energy.shape[-1]))
        today = score_error(stored, weight, _packing_order(fmt, choice.key.outlier_channels, energy), own)
        ratios.append(score_error(stored, weight, choice.key.ranking, [(width, 1) for width in bits]) / today)
    return float(torch.tensor(ratios, dtype=torch.float64).log().mean().exp())


def score_error(
    energy: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, sections: Sequence[tuple[int, int]]
) -> float:
    """Return the error of scores of all heads, up to a factor.

    Args:
        energy, weight: mean squares of stored channels and of what multiplies them, float64 [heads, head_size].
        order: of channels as they are packed, int64 [heads, head_size].
        sections: (bits, number of groups) of each.
    """
    sizes, total = [GROUP_SIZE * groups for _, groups in sections], 0.0
    parts = zip(
        sections, energy.gather(-1, order).split(sizes, -1), weight.gather(-1, order).split(sizes, -1), strict=True
    )
    for (bits, _), of_energy, of_weight in parts:
        noise = NOISE[bits] / of_energy.shape[-1]
        total += noise * float((of_energy.sum(-1) * of_weight.sum(-1)).sum())
    return max(total, torch.finfo(torch.float64).tiny)


def _formats() -> list[Format]:
    return [fmt for fmt in FORMATS.values() if fmt.rotation == "hadamard"]


def _packing_order(fmt: Format, outliers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The dtype's own order of channels, outliers first, int64 [heads, head_size]."""
    if not fmt.outlier_bits:
        return torch.arange(like.shape[-1], device=like.device).expand(like.shape)
    regular = torch.ones(like.shape, dtype=torch.bool, device=like.device).scatter_(-1, outliers, False)
    return regular.int().argsort(dim=-1, stable=True)
