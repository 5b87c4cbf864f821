"""A calibration file of random numbers for a model with dummy weights: the time of a step does not depend on them."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from packed_kv.calibration_content import RECIPES, VERSION
from packed_kv.calibration_file import FILE_NAME
from packed_kv.formats import FORMATS
from packed_kv.model.rope import rope_parameters

KINDS = ("one", "blocks")
"""Kinds of means of keys: one for all positions, or before RoPE, so that blocks of positions have theirs."""
NONE = "none"
"""No file, said in the rows."""


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments (by default the command's), with `--means` of `KINDS`, `NONE` or None."""
    what = "of keys, from a made-up calibration file of the 8B-shaped model (default: none)"
    parser.add_argument("--means", choices=(*KINDS, NONE), help=what)
    options = parser.parse_args(arguments)
    if options.means in KINDS and options.model:
        parser.error("--means is for the 8B-shaped model; put a calibration file into the folder of --model")
    return options


def columns(options: argparse.Namespace) -> dict[str, str]:
    """Return further columns of rows that were measured with `--means`; rows without have none."""
    return {"means": options.means} if options.means else {}


def write(folder: str, means: str) -> Path:
    """Write a file beside the config.json of a Llama, with means of keys of a kind of `KINDS`; returns its path."""
    config = json.loads(Path(folder, "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    count = FORMATS[RECIPES[0]].outlier_channels(size)
    source = random.Random(0)

    def numbers(low: float, high: float) -> list[list[float]]:
        return [[round(source.uniform(low, high), 4) for _ in range(size)] for _ in range(heads)]

    outliers = [[*range(count)]] * heads
    mean = "key_channel_mean" if means == "one" else "key_channel_mean_before_rope"
    ropes = {}
    if means == "blocks":
        parameters = rope_parameters(config)[""]
        frequencies = [parameters["rope_theta"] ** (-2 * pair / size) for pair in range(size // 2)]
        ropes = {"ropes": [{"parameters": parameters, "interleaved": False, "frequencies": frequencies}]}

    def layer() -> dict[str, object]:
        return {
            **{f"{role}_high_precision_indices": outliers for role in ("key", "value")},
            mean: numbers(-2, 2),
            "key_first_token_mean": numbers(-2, 2),
            **{f"{role}_channel_scale": numbers(0.5, 2) for role in ("key", "value")},
            **({"rope": 0} if ropes else {}),
        }

    layers = {f"model.layers.{number}.self_attn": layer() for number in range(config["num_hidden_layers"])}
    content = {"version": VERSION, "recipe": RECIPES[0], "head_size": size, **ropes, "layers": layers}
    path = Path(folder, FILE_NAME)
    path.write_text(json.dumps(content))
    return path
