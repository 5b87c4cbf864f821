"""The content of a calibration file: its fields, and the faults of their values, in words. Imports no torch and no
vLLM.

`turboquant_kv.schema.json` beside this describes the file; the checks here are stricter (counts, order, duplicates).
"""

from __future__ import annotations

import json
import math
import re
from difflib import get_close_matches
from typing import Any, NamedTuple

from .channel_calibration import SCALE_BOUNDS, ChannelCalibration, LayerCalibration
from .formats import FORMATS, GROUP_SIZE, HEAD_DIM_MULTIPLE, INPUT_LIMIT, fits_value_dim
from .json_file import shown
from .layout import key_vector
from .model.rope import Parameters, Rope, normalised

VERSION = 3
"""Version of written files without widths of K's groups and without means of V. Versions 1 and 2 are read too: 1 has no
means and scales of channels, 2 has no means before RoPE."""
FIRST_WITH_ROPES = 3
FIRST_WITH_KEY_BITS = FIRST_WITH_VALUE_MEANS = NEWEST = 4
"""Version of the files that have widths of K's groups or means of V."""
LARGEST_HEAD_SIZE = 4096
LARGEST_SIZE = 1e38
"""Bound of a channel's root mean square, so that its square is a float, too."""
TRANSFORM_VERSION = "structured_hadamard_v1"
CODEBOOK_VERSION = "lloyd_beta_v1"
"""Names that files made for other TurboQuant caches carry. The file describes channels, whatever code stores them, so
they are written and accepted unchanged; a file with other names is refused."""
RECIPES = tuple(name for name, fmt in FORMATS.items() if fmt.outlier_bits)
FIELDS = {
    "the file": {
        "version", "recipe", "head_size", "value_head_size", "kv_heads", "ropes", "layers", "transform_version",
        "codebook_version", "model_name", "calibration", "key_group_bits",
    },
    "a layer": {
        "key_high_precision_indices", "value_high_precision_indices", "key_channel_order", "value_channel_order",
        "rope", "key_channel_mean_before_rope", "key_channel_mean", "key_first_token_mean", "key_channel_scale",
        "value_channel_scale", "key_channel_rms", "value_channel_rms", "codebook", "key_channel_ranking",
        "value_channel_mean", "value_first_token_mean",
    },
    "ropes": {"parameters", "interleaved", "frequencies"},
}  # fmt: skip
"""Fields by the object that has them, for all versions. A file of an older version may have fields of a newer one; they
are ignored. Engines ignore `model_name` and `calibration` (for people), the `*_rms` (for `tq-calibrate show`), and
`codebook` (of another tool). `calibration` and a rope's `parameters` may have any field."""

_LAYER_NAME = re.compile(r"(?:\w+\.)*layers\.([0-9]{1,5})\.self_attn(?:\.attn)?")


class FaultError(ValueError):
    """A fault in a file's content, in words."""


class Content(NamedTuple):
    """Content of a file: the fields of `Calibration` behind its path."""

    recipe: str
    head_size: int
    value_head_size: int
    layers: dict[int, LayerCalibration]
    version: int
    ropes: tuple[Parameters, ...]
    key_bits: dict[str, tuple[int, ...]]


def parse(content: Any) -> Content:
    """Check a file's content, as JSON gives it, and return it as `Content`. Raises FaultError."""
    if not isinstance(content, dict):
        raise FaultError(f"expected a JSON object, got {shown(content)}")
    _check_version(content.get("version"))
    _check_fields(content, "the file")
    for field, expected in (
        ("recipe", RECIPES),
        ("transform_version", (TRANSFORM_VERSION,)),
        ("codebook_version", (CODEBOOK_VERSION,)),
    ):
        value = content.get(field)
        if value is None and field.endswith("_version"):
            continue
        if isinstance(value, bool) or value not in expected:
            known = " or ".join(map(json.dumps, expected))
            raise FaultError(f"{field} {shown(value)} is not supported ({known} is)")
    for field, kind, words in (("model_name", str, "a text"), ("calibration", dict, "an object")):
        if not isinstance(content.get(field), kind | None):
            raise FaultError(f"{field} must be {words}, got {shown(content[field])}")
    recipe: str = content["recipe"]
    head_size: Any = content.get("head_size")
    if type(head_size) is not int or not 0 < head_size <= LARGEST_HEAD_SIZE or head_size % HEAD_DIM_MULTIPLE:
        rule = f"head_size must be a positive multiple of {HEAD_DIM_MULTIPLE}, at most {LARGEST_HEAD_SIZE}"
        raise FaultError(f"{rule}, got {shown(head_size)}")
    if not FORMATS[recipe].outlier_channels(head_size):
        raise FaultError(f"heads of {head_size} channels have no outlier channels")
    value_size: Any = content.get("value_head_size", head_size)
    if type(value_size) is not int or not fits_value_dim(head_size, value_size):
        rule = f"value_head_size must be a positive multiple of {HEAD_DIM_MULTIPLE}, at most head_size"
        raise FaultError(f"{rule}, got {shown(value_size)}")
    listed = content.get("layers")
    if not isinstance(listed, dict) or not listed:
        raise FaultError(f"layers must be an object with an entry per layer, got {shown(listed)}")
    numbers_of_heads: Any = content.get("kv_heads")
    if numbers_of_heads is not None and not (
        isinstance(numbers_of_heads, list)
        and numbers_of_heads
        and all(type(number) is int and number > 0 for number in numbers_of_heads)
    ):
        raise FaultError(f"kv_heads must be a list of the numbers that layers have, got {shown(numbers_of_heads)}")
    version: int = content["version"]
    ropes = _ropes(content.get("ropes"), head_size) if version >= FIRST_WITH_ROPES else []
    key_bits = _key_bits(content.get("key_group_bits"), head_size) if version >= FIRST_WITH_KEY_BITS else {}
    layers: dict[int, LayerCalibration] = {}
    for name, entry in listed.items():
        number = _LAYER_NAME.fullmatch(name)
        if number is None:
            raise FaultError(f"layer name {shown(name)} is not model.layers.NUMBER.self_attn")
        layer = int(number[1])
        if layer in layers:
            raise FaultError(f"layer {layer} is listed twice")
        try:
            layers[layer] = _layer(entry, version, recipe, (head_size, value_size), [rope for rope, _ in ropes])
        except FaultError as fault:
            raise FaultError(f"layer {layer}: {fault}") from None
        if key_bits and layers[layer].key.ranking is None:
            raise FaultError(f"layer {layer}: key_channel_ranking is missing, by which key_group_bits are given")
        heads, first_heads = layers[layer].kv_heads, next(iter(layers.values())).kv_heads
        if heads not in (numbers_of_heads or [first_heads]):
            other = (
                f"kv_heads says {shown(numbers_of_heads)}"
                if numbers_of_heads
                else f"the first one listed {first_heads}"
            )
            raise FaultError(f"layer {layer} lists {heads} heads, {other}")
    parameters = tuple(parameters for _, parameters in ropes)
    return Content(recipe, head_size, value_size, layers, version, parameters, key_bits)


def _check_version(version: Any) -> None:
    number = isinstance(version, int | float) and not isinstance(version, bool)
    if number and version > NEWEST:
        raise FaultError(
            f"version {shown(version)} is newer than this packed-kv reads (1 to {NEWEST}), so update packed-kv"
        )
    if not number or version not in range(1, NEWEST + 1):
        raise FaultError(f"version {shown(version)} is not supported (1 to {NEWEST} are)")


def _check_fields(found: dict[str, Any], where: str) -> None:
    for name in found:
        if name not in FIELDS[where]:
            near = get_close_matches(name, FIELDS[where], 1)
            raise FaultError(f"{shown(name)} is no field of {where}{f' ({near[0]} is)' if near else ''}")


def _layer(entry: Any, version: int, recipe: str, sizes: tuple[int, int], ropes: list[Rope]) -> LayerCalibration:
    """`sizes`: channels of a head in K and in V."""
    if not isinstance(entry, dict):
        raise FaultError(f"expected an object, got {shown(entry)}")
    _check_fields(entry, "a layer")
    count = FORMATS[recipe].outlier_channels(sizes[0])
    roles = tuple(zip(("key", "value"), sizes, strict=True))
    outliers = [_outliers(entry, f"{role}_high_precision_indices", recipe, size, count) for role, size in roles]
    if len(outliers[0]) != len(outliers[1]):
        raise FaultError(f"lists {len(outliers[0])} heads of keys and {len(outliers[1])} of values")
    shapes = tuple((len(outliers[0]), size) for size in sizes)
    orders = [_order(entry, f"{role}_channel_order", shape) for (role, _), shape in zip(roles, shapes, strict=True)]
    for (role, _), shape in zip(roles, shapes, strict=True):
        _numbers(entry, f"{role}_channel_rms", shape, 0.0, LARGEST_SIZE)
    if version == 1:
        return LayerCalibration(*map(ChannelCalibration, outliers, orders))
    before = {"key_channel_mean_before_rope", "rope"} & {name for name, value in entry.items() if value is not None}
    name = "key_channel_mean"
    if version < FIRST_WITH_ROPES:
        before = set()
    if before:
        if len(before) == 1:
            there, missing = *before, *{"key_channel_mean_before_rope", "rope"} - before
            raise FaultError(f"{there} is there without {missing}")
        if entry.get(name) is not None:
            raise FaultError(f"has both {name} and {name}_before_rope, and may have one")
        name += "_before_rope"
    key = ChannelCalibration(
        outliers[0],
        orders[0],
        mean=_numbers(entry, name, shapes[0], -INPUT_LIMIT, INPUT_LIMIT),
        first_mean=_numbers(entry, "key_first_token_mean", shapes[0], -INPUT_LIMIT, INPUT_LIMIT),
        scale=_numbers(entry, "key_channel_scale", shapes[0], *SCALE_BOUNDS),
        rope=_rope_of_layer(entry["rope"], ropes) if before else None,
        ranking=_order(entry, "key_channel_ranking", shapes[0]) if version >= FIRST_WITH_KEY_BITS else None,
    )
    if key.first_mean is not None and key.mean is None:
        raise FaultError("key_first_token_mean is there without key_channel_mean")
    value_mean, value_first_mean = (
        _numbers(entry, field, shapes[1], -INPUT_LIMIT, INPUT_LIMIT) if version >= FIRST_WITH_VALUE_MEANS else None
        for field in ("value_channel_mean", "value_first_token_mean")
    )
    if value_first_mean is not None and value_mean is None:
        raise FaultError("value_first_token_mean is there without value_channel_mean")
    if value_mean is not None and key.mean is None:
        raise FaultError("value_channel_mean is there without a mean of keys")
    value_scale = _numbers(entry, "value_channel_scale", shapes[1], *SCALE_BOUNDS)
    value = ChannelCalibration(outliers[1], orders[1], value_mean, value_first_mean, value_scale)
    return LayerCalibration(key, value)


def _key_bits(listed: Any, head_size: int) -> dict[str, tuple[int, ...]]:
    """Bits of K's groups by dtype."""
    if listed is None:
        return {}
    if not isinstance(listed, dict):
        raise FaultError(f"key_group_bits must be an object with a list of bits per dtype, got {shown(listed)}")
    found = {}
    for name, bits in listed.items():
        if name not in FORMATS or FORMATS[name].rotation != "hadamard":
            known = ", ".join(fmt.name for fmt in FORMATS.values() if fmt.rotation == "hadamard")
            raise FaultError(f"key_group_bits: {shown(name)} is none of the dtypes that can have them ({known})")
        if not isinstance(bits, list) or not all(type(number) is int for number in bits):
            raise FaultError(f"key_group_bits: {name} must have a list of bits, got {shown(bits)}")
        if head_size % GROUP_SIZE:
            raise FaultError(f"key_group_bits: heads of {head_size} channels are no groups of {GROUP_SIZE}")
        try:
            key_vector(FORMATS[name], head_size, tuple(bits))
        except ValueError as error:
            raise FaultError(f"key_group_bits: {error}") from None
        found[name] = tuple(bits)
    return found


def _ropes(listed: Any, head_size: int) -> list[tuple[Rope, Parameters]]:
    """The RoPEs that a file lists, each with the parameters of the model's config."""
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(isinstance(rope, dict) for rope in listed):
        raise FaultError(f"ropes must be a list of objects, got {shown(listed)}")
    found = []
    for number, rope in enumerate(listed):
        _check_fields(rope, "ropes")
        parameters, interleaved = rope.get("parameters"), rope.get("interleaved")
        if not isinstance(parameters, dict):
            raise FaultError(f"ropes: parameters of entry {number} must be an object, got {shown(parameters)}")
        if not isinstance(interleaved, bool):
            raise FaultError(f"ropes: interleaved of entry {number} must be true or false, got {shown(interleaved)}")
        frequencies = rope.get("frequencies")
        if not isinstance(frequencies, list) or not 1 <= len(frequencies) <= head_size // 2:
            count = f"{len(frequencies)}" if isinstance(frequencies, list) else shown(frequencies)
            raise FaultError(
                f"ropes: frequencies of entry {number} must be a list of 1 to {head_size // 2} numbers, as heads have "
                f"{head_size} channels, got {count}"
            )
        for pair, frequency in enumerate(frequencies):
            if type(frequency) not in (int, float) or not 0 <= frequency <= math.pi:  # NaN compares as false
                rule = f"ropes: frequency {pair} of entry {number} must be a number from 0 to pi"
                raise FaultError(f"{rule}, got {shown(frequency)}")
        found.append((Rope(tuple(map(float, frequencies)), interleaved), normalised(parameters, {})))
    return found


def _rope_of_layer(index: Any, ropes: list[Rope]) -> Rope:
    if type(index) is not int or not 0 <= index < len(ropes):
        raise FaultError(f"rope must be an index of the {len(ropes)} entries of ropes, got {shown(index)}")
    return ropes[index]


def _outliers(entry: dict, field: str, recipe: str, head_size: int, count: int) -> list[list[int]]:
    heads = _integers(entry.get(field), field)
    for head, channels in enumerate(heads):
        if len(channels) != count:
            raise FaultError(
                f"{field}: head {head} lists {len(channels)} channels, {recipe} here takes {count} of {head_size}"
            )
        if list(channels) != sorted(set(channels)) or channels[0] < 0 or channels[-1] >= head_size:
            raise FaultError(f"{field}: head {head} must be strictly ascending within 0 to {head_size - 1}")
    return heads


def _order(entry: dict, field: str, shape: tuple[int, int]) -> list[list[int]] | None:
    if entry.get(field) is None:
        return None
    heads, head_size = _integers(entry[field], field), shape[1]
    _check_heads(heads, field, shape[0])
    for head, channels in enumerate(heads):
        if sorted(channels) != list(range(head_size)):
            raise FaultError(f"{field}: head {head} must have each channel from 0 to {head_size - 1} once")
    return heads


def _numbers(entry: dict, field: str, shape: tuple[int, int], least: float, largest: float) -> list[list[float]] | None:
    """Numbers by head and channel, each from `least` to `largest`."""
    heads = entry.get(field)
    if heads is None:
        return None
    if not isinstance(heads, list):
        raise FaultError(f"{field} must be a list with a list of numbers per KV head, got {shown(heads)}")
    _check_heads(heads, field, shape[0])
    for head, numbers in enumerate(heads):
        if not isinstance(numbers, list) or len(numbers) != shape[1]:
            found = f"{len(numbers)}" if isinstance(numbers, list) else shown(numbers)
            raise FaultError(f"{field}: head {head} must be a list of {shape[1]} numbers, got {found}")
        for channel, number in enumerate(numbers):
            if type(number) not in (int, float) or not least <= number <= largest:  # NaN compares as false
                raise FaultError(
                    f"{field}: head {head}, channel {channel} must be a number from {least:g} to {largest:g}, got "
                    f"{shown(number)}"
                )
    return heads


def _check_heads(heads: list, field: str, expected: int) -> None:
    if len(heads) != expected:
        raise FaultError(f"{field} lists {len(heads)} heads, key_high_precision_indices {expected}")


def _integers(value: Any, field: str) -> list[list[int]]:
    if not isinstance(value, list) or not value:
        raise FaultError(f"{field} must be a list with a list of channels per KV head, got {shown(value)}")
    for head, channels in enumerate(value):
        if not isinstance(channels, list) or not all(type(channel) is int for channel in channels):
            raise FaultError(f"{field}: head {head} must be a list of integers, got {shown(channels)}")
    return value
