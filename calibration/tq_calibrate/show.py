"""`tq-calibrate show`: a calibration file in one screen."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from packed_kv.outliers import Calibration, load

ROLES = ("key", "value")


def read(path: str) -> tuple[Calibration, dict[str, Any]]:
    """A file, checked, and all of its content. Raises CalibrationError."""
    return load(path), json.loads(Path(path).read_text(encoding="utf-8"))


def summary(path: str) -> str:
    """What a file holds, and how its layers' channels differ in size. Raises CalibrationError."""
    calibration, content = read(path)
    outliers = len(next(iter(calibration.layers.values())).key_outliers[0])
    orders = any(layer.key_order or layer.value_order for layer in calibration.layers.values())
    lines = [
        f"{path}: {content.get('model_name') or 'unnamed model'}, made for {calibration.recipe}",
        f"{len(calibration.layers)} layers, {calibration.kv_heads} KV heads of {calibration.head_size} channels, "
        f"{outliers} of them outliers; {'with' if orders else 'without'} channel orders for isoquant and planarquant",
        *(f"  {name}: {value}" for name, value in (content.get("calibration") or {}).items()),
    ]
    entries = [entry for entry in content["layers"].values() if all(f"{role}_channel_rms" in entry for role in ROLES)]
    if len(entries) == len(content["layers"]):
        lines.append(
            "\n       largest / median rms    energy in the outliers\nlayer       K       V             K       V"
        )
        lines += [_row(layer, entry) for layer, entry in zip(calibration.layers, entries, strict=True)]
    return "\n".join(lines)


def _row(layer: int, entry: dict[str, Any]) -> str:
    """A layer: mean over its heads of the spread of channels, and of the part of energy that is in its outliers."""
    spread, part = [], []
    for role in ROLES:
        heads = entry[f"{role}_channel_rms"]
        chosen = entry[f"{role}_high_precision_indices"]
        spread.append(statistics.mean(max(rms) / (statistics.median(rms) or 1) for rms in heads))
        part.append(
            statistics.mean(
                sum(rms[channel] ** 2 for channel in outliers) / (sum(value**2 for value in rms) or 1)
                for rms, outliers in zip(heads, chosen, strict=True)
            )
        )
    return f"{layer:5d}  {spread[0]:6.1f}  {spread[1]:6.1f}        {part[0]:6.1%}  {part[1]:6.1%}"
