"""`tq-calibrate show`: a calibration file on one screen."""

from __future__ import annotations

import math
import statistics
from typing import Any

from packed_kv.calibration_file import Calibration, load
from packed_kv.channel_calibration import LayerCalibration
from packed_kv.json_file import read_json
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import Rope, average_length

ROLES = ("key", "value")
Rows = list[list[float]]


def read(path: str) -> tuple[Calibration, dict[str, Any]]:
    """Check a file. Returns its calibration and its whole content. Raises CalibrationError."""
    return load(path), read_json(path)


def summary(path: str) -> str:
    """Text that says what a file holds and how channels differ in each layer. Raises CalibrationError."""
    calibration, content = read(path)
    layers = list(calibration.layers.values())
    orders = any(layer.key.channel_order or layer.value.channel_order for layer in layers)
    means, key_scales, value_scales, value_means = (
        any(field in layer.known() for layer in layers)
        for field in ("key_mean", "key_scale", "value_scale", "value_mean")
    )
    lines = [
        f"{path}: {content.get('model_name') or 'unnamed model'}, made for {calibration.recipe}",
        f"{len(layers)} layers, {calibration.heads}, {len(layers[0].key.outlier_channels[0])} outlier channels each",
        f"{_with(orders)} channel orders for isoquant and planarquant, {_with(means)} means of keys, "
        f"{_with(key_scales)} scales of keys, {_with(value_scales)} scales of values",
        *(["with means of values"] if value_means else []),
        *(f"{name}: {', '.join(map(str, bits))} bits in groups of keys" for name, bits in calibration.key_bits.items()),
        *_ropes(calibration),
        *(f"  {name}: {value}" for name, value in (content.get("calibration") or {}).items()),
    ]
    entries = list(content["layers"].values())
    if all(entry.get(f"{role}_channel_rms") for entry in entries for role in ROLES):
        lines.append(
            "\n                 as turboquant stores them:\n"
            "        energy   largest / median rms   energy in outlier channels\n"
            "layer  in mean         K       V              K       V"
        )
        lines += [_row(*at, entry) for at, entry in zip(calibration.layers.items(), entries, strict=True)]
    return "\n".join(lines)


def _ropes(calibration: Calibration) -> list[str]:
    """A line for each RoPE that turns means, and a line if some means do not turn."""
    count: dict[Rope | None, int] = {}
    for layer in calibration.layers.values():
        if layer.key.mean:
            count[layer.key.rope] = count.get(layer.key.rope, 0) + 1
    return [
        f"means of {layers} layers "
        + (
            "are the same at all positions"
            if rope is None
            else f"turn with RoPE: {len(rope.frequencies)} pairs of channels "
            f"{'2i, 2i + 1' if rope.interleaved else f'i, i + {len(rope.frequencies)}'}, "
            f"wavelengths {_wavelength(max(rope.frequencies))} to {_wavelength(min(rope.frequencies))}"
        )
        for rope, layers in count.items()
    ]


def _wavelength(frequency: float) -> str:
    """Positions to a turn, in words."""
    return f"{2 * math.pi / frequency:,.0f}" if frequency else "without end"


def stored_rms(role: str, layer: LayerCalibration, entry: dict[str, Any]) -> Rows:
    """Root mean square of each channel as turboquant stores it, [KV heads][head_size]: K less its mean, both scaled.

    `entry` is the layer in the file; its `key_channel_rms` is already of K minus the mean.
    """
    rms: Rows = entry[f"{role}_channel_rms"]
    scale = layer.key.scale if role == "key" else layer.value.scale
    if scale is None:
        return rms
    return [[x * s for x, s in zip(*head, strict=True)] for head in zip(rms, scale, strict=True)]


def _with(there: bool) -> str:
    return "with" if there else "without"


def _row(number: int, layer: LayerCalibration, entry: dict[str, Any]) -> str:
    """A row of the table, in means over the layer's heads.

    The share of K's energy that its mean has, the spread of channels, and the share of energy in outlier channels.
    """
    spread, part = [], []
    for role in ROLES:
        heads = stored_rms(role, layer, entry)
        chosen = entry[f"{role}_high_precision_indices"]
        spread.append(statistics.mean(max(rms) / (statistics.median(rms) or 1) for rms in heads))
        part.append(
            statistics.mean(
                sum(rms[channel] ** 2 for channel in outliers) / (_energy(rms) or 1)
                for rms, outliers in zip(heads, chosen, strict=True)
            )
        )
    constant = statistics.mean(
        _energy(mean) / (_energy(mean) + _energy(rms) or 1)
        for mean, rms in zip(_taken_off(layer), entry["key_channel_rms"], strict=True)
    )
    return f"{number:5d}  {constant:7.1%}  {spread[0]:8.1f}  {spread[1]:6.1f}  {part[0]:13.1%}  {part[1]:6.1%}"


def _taken_off(layer: LayerCalibration) -> Rows:
    """Root mean squares of the mean that is subtracted from K, after RoPE and averaged over a block of positions, [KV
    heads][head_size]; how a pair's channels share them is ignored."""
    means = layer.key.mean or [[0.0]] * layer.kv_heads
    if layer.key.rope is None or not layer.key.mean:
        return means
    lengths = [1.0] * len(means[0])
    for frequency, channels in zip(layer.key.rope.frequencies, layer.key.rope.pairs(), strict=True):
        for channel in channels:
            lengths[channel] = abs(average_length(frequency, MEAN_BLOCK))
    return [[mean * length for mean, length in zip(head, lengths, strict=True)] for head in means]


def _energy(numbers: list[float]) -> float:
    return sum(number**2 for number in numbers)
