"""Assemble the calibration file and write it atomically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from packed_kv.calibration_content import CODEBOOK_VERSION, NEWEST, TRANSFORM_VERSION, VERSION
from packed_kv.calibration_file import load
from packed_kv.private_file import replacing, why_not_replaced

from .choose import LayerChoice
from .errors import UserError
from .ropes import ModelRope
from .statistics import LayerStatistics, Statistics


def file_content(
    statistics: Statistics,
    choices: dict[int, LayerChoice],
    recipe: str,
    model_name: str,
    key_bits: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, Any]:
    """The file as a JSON object; `packed_kv/turboquant_kv.schema.json` describes it. key_bits: of K's groups by dtype.

    `key_channel_rms`, of K less its mean, and `value_channel_rms` are for `show` and `report`; the runtime does not
    read them.
    """
    head_size, value_size = statistics.head_sizes
    has_value_means = any(choice.value.mean is not None for choice in choices.values())
    ropes: list[ModelRope] = []
    for choice in choices.values():
        if choice.rope is not None and choice.rope not in ropes:
            ropes.append(choice.rope)
    layers = {
        f"model.layers.{layer}.self_attn": _layer(statistics.layers[layer], choice, ropes, is_ranked=bool(key_bits))
        for layer, choice in choices.items()
    }
    return {
        "version": NEWEST if key_bits or has_value_means else VERSION,
        "recipe": recipe,
        "head_size": head_size,
        **({} if value_size == head_size else {"value_head_size": value_size}),
        **({} if len(statistics.kv_heads) == 1 else {"kv_heads": statistics.kv_heads}),
        "model_name": model_name,
        "transform_version": TRANSFORM_VERSION,
        "codebook_version": CODEBOOK_VERSION,
        "ropes": [{"parameters": parameters, **rope._asdict()} for rope, parameters, _ in ropes],
        **({"key_group_bits": {name: list(bits) for name, bits in key_bits.items()}} if key_bits else {}),
        "calibration": {**statistics.source, "num_observed_tokens": statistics.tokens},
        "layers": layers,
    }


def _layer(seen: LayerStatistics, choice: LayerChoice, ropes: list[ModelRope], *, is_ranked: bool) -> dict[str, Any]:
    numbers = {
        "key_channel_mean" if choice.rope is None else "key_channel_mean_before_rope": choice.key.mean,
        "key_first_token_mean": choice.key.first_mean,
        "key_channel_scale": choice.key.scale,
        "value_channel_mean": choice.value.mean,
        "value_first_token_mean": choice.value.first_mean,
        "value_channel_scale": choice.value.scale,
    }
    return {
        **({} if choice.rope is None else {"rope": ropes.index(choice.rope)}),
        "key_high_precision_indices": choice.key.outlier_channels.tolist(),
        "value_high_precision_indices": choice.value.outlier_channels.tolist(),
        "key_channel_order": choice.key.channel_order.tolist(),
        "value_channel_order": choice.value.channel_order.tolist(),
        **({"key_channel_ranking": choice.key.ranking.tolist()} if is_ranked else {}),
        **{field: _rounded(found, 5) for field, found in numbers.items() if found is not None},
        "key_channel_rms": _rounded(seen.key_variance.sqrt(), 3),
        "value_channel_rms": _rounded(seen.value_energy.sqrt(), 3),
    }


def write_file(path: Path, content: dict[str, Any], mode: int = 0o666) -> None:
    """Write a file atomically over an existing one, which stays as it is if this raises UserError.

    mode: permissions of the file, less the umask.
    """
    try:
        with replacing(path, mode) as (file, temporary):
            file.write(to_json(content).encode())
            file.flush()
            load(temporary)  # what we write, the runtime reads
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); --out names another place") from error


def check_writable(path: Path) -> None:
    """Raise UserError if `write_file` could not write the file, or its folder is not there."""
    try:
        path.parent.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); --out names another place") from error
    if reason := why_not_replaced(path):
        raise UserError(f"--out: {reason}; name a file elsewhere")


def to_json(content: dict[str, Any]) -> str:
    """JSON with one line per field of a layer, so that a file of 10^5 numbers stays readable."""

    def lines(value: Any, indent: str) -> str:
        if not isinstance(value, dict) or not value:
            return json.dumps(value)
        inner = indent + "  "
        entries = (f"{inner}{json.dumps(name)}: {lines(item, inner)}" for name, item in value.items())
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"

    return lines(content, "") + "\n"


def _rounded(numbers: torch.Tensor, digits: int) -> list[list[float]]:
    """Numbers rounded to `digits` significant digits."""
    return [[float(f"{number:.{digits}g}") for number in head] for head in numbers.tolist()]
