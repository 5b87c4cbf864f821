"""Calibration files for tests: random channels, or the ones that are taken without a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUTLIERS = ("key_high_precision_indices", "value_high_precision_indices")
ORDERS = ("key_channel_order", "value_channel_order")
MEANS = ("key_channel_mean", "key_first_token_mean")
VALUE_MEANS = ("value_channel_mean", "value_first_token_mean")
BEFORE_ROPE = "key_channel_mean_before_rope"
SCALES = ("key_channel_scale", "value_channel_scale")


def content(
    layers: int = 2,
    kv_heads: int = 2,
    head_size: int = 64,
    count: int = 32,
    *,
    first: bool = False,
    version: int = 1,
    mean: float = 1.0,
    value_mean: float | None = None,
    theta: float = 10000.0,
) -> dict:
    """A file of random channels, different for each layer, role and head; or of the first ones, in their order.

    In version 2 with random means, of that standard deviation, and random scales; in version 3 these means are before
    RoPE of all channels with `theta`. `value_mean`: standard deviation of means of V, which version 4 has; None: none.
    """
    source = random.Random(0)
    transforms, of_values = random.Random(1), random.Random(2)

    def channels() -> list[int]:
        return list(range(head_size)) if first else source.sample(range(head_size), head_size)

    def numbers(draw: Callable[[], float]) -> list[list[float]]:
        return [[float(f"{draw():.5g}") for _ in range(head_size)] for _ in range(kv_heads)]

    def layer() -> dict[str, list]:
        entry: dict[str, list] = {field: [sorted(channels()[:count]) for _ in range(kv_heads)] for field in OUTLIERS}
        entry |= {field: [channels() for _ in range(kv_heads)] for field in ORDERS}
        if version > 1:
            entry |= {field: numbers(lambda: transforms.gauss(0, mean)) for field in MEANS}
            entry |= {field: numbers(lambda: transforms.lognormvariate(0, 0.5)) for field in SCALES}
        if version > 2:
            entry |= {BEFORE_ROPE: entry.pop(MEANS[0]), "rope": 0}
        if value_mean is not None:
            entry |= {field: numbers(lambda: of_values.gauss(0, value_mean)) for field in VALUE_MEANS}
        return entry

    rope = {
        "parameters": {"rope_type": "default", "rope_theta": theta},
        "interleaved": False,
        "frequencies": [theta ** (-2 * pair / head_size) for pair in range(head_size // 2)],
    }
    return {
        **({"ropes": [rope]} if version > 2 else {}),
        "version": version,
        "recipe": "turboquant35",
        "head_size": head_size,
        "model_name": "a model",
        "transform_version": "structured_hadamard_v1",
        "codebook_version": "lloyd_beta_v1",
        "layers": {f"model.layers.{i}.self_attn": layer() for i in range(layers)},
        "calibration": {"method": "activation_energy_v1", "num_prompts": 4},
    }


def write(folder: Path, file: Any) -> Path:
    """Write `turboquant_kv.json` into a folder."""
    path = folder / "turboquant_kv.json"
    path.write_text(file if isinstance(file, str) else json.dumps(file))
    return path
