"""Reads and checks a calibration file, `turboquant_kv.json`: what is known about the channels of a model's K and V.

`turboquant_kv.schema.json` beside this describes the file; the checks here are stricter (counts, order, duplicates) and
say in one line what is wrong. Imports no torch and no vLLM.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from .channel_calibration import SCALE_BOUNDS, UNCALIBRATED, ChannelCalibration
from .formats import FORMATS, GROUP_SIZE, HEAD_DIM_MULTIPLE, INPUT_LIMIT, Format, fits_value_dim
from .json_file import printable, read_json, shown
from .model.config_fields import EXPANDED_LATENTS, word
from .model.rope import Parameters, Rope, normalised, rope_in_words
from .model.shape import Model

FILE_NAME = "turboquant_kv.json"
"""Name of the file in a model's folder."""
VERSION = 3
"""Version of the files that are written; 1 and 2 are read too: 1 has no means and scales of channels, 2 none before
RoPE."""
FIRST_WITH_ROPES = 3
LARGEST_HEAD_SIZE = 4096
LARGEST_SIZE = 1e38
"""Bound of a channel's root mean square, so that its square is a float, too."""
TRANSFORM_VERSION = "structured_hadamard_v1"
CODEBOOK_VERSION = "lloyd_beta_v1"
"""Names that files made for other TurboQuant caches carry. The file describes channels, whatever code stores them, so
they are written and accepted as they are; other names mean a file that we do not know."""
RECIPES = tuple(name for name, fmt in FORMATS.items() if fmt.outlier_bits)
FIELDS = {
    "the file": {
        "version", "recipe", "head_size", "value_head_size", "kv_heads", "ropes", "layers", "transform_version",
        "codebook_version", "model_name", "calibration",
    },
    "a layer": {
        "key_high_precision_indices", "value_high_precision_indices", "key_channel_order", "value_channel_order",
        "rope", "key_channel_mean_before_rope", "key_channel_mean", "key_first_token_mean", "key_channel_scale",
        "value_channel_scale", "key_channel_rms", "value_channel_rms", "codebook",
    },
    "ropes": {"parameters", "interleaved", "frequencies"},
}  # fmt: skip
"""Fields by the object that has them, of all versions; a file of an older version may have a newer one's, which it
ignores. No engine reads `model_name` and `calibration`, which are for people, the `*_rms`, which `tq-calibrate show`
reads, and `codebook`, which another tool writes. `calibration` and a rope's `parameters` may have any field."""

Row = TypeVar("Row")

_LAYER_NAME = re.compile(r"(?:\w+\.)*layers\.([0-9]{1,5})\.self_attn(?:\.attn)?")


class CalibrationError(ValueError):
    """A calibration file that cannot be used; the message is one line that names file, fault and remedy."""


@dataclass(frozen=True)
class LayerCalibration:
    """A layer's channels of K and V, by KV head of the whole model: rows are `[KV heads][channels]`.

    Both have `outlier_channels`. A `first_mean` is never without a `mean`; V has no means.
    """

    key: ChannelCalibration = UNCALIBRATED
    value: ChannelCalibration = UNCALIBRATED

    @property
    def kv_heads(self) -> int:
        return len(self.key.outlier_channels)

    def taken_by(self, fmt: Format) -> LayerCalibration:
        """The parts that a format stores K and V with."""
        return LayerCalibration(self.key.taken_by(fmt, "key"), self.value.taken_by(fmt, "value"))

    def map_rows(self, change: Callable[[Any], Any]) -> LayerCalibration:
        """The same with `change` of every part that has rows."""
        return LayerCalibration(self.key.map_rows(change), self.value.map_rows(change))

    def known(self) -> dict[str, Any]:
        """The parts that are not None: "key_mean", "value_scale" and so on. Fingerprints hold these names."""
        roles = (("key", self.key), ("value", self.value))
        return {f"{role}_{name}": part for role, channels in roles for name, part in channels.known().items()}


@dataclass(frozen=True)
class Calibration:
    """A checked file; `layers` maps the number of a layer to its channels. Heads have `head_size` channels of K and
    `value_head_size` of V. `ropes`: the parameters of the RoPEs that its layers have, as `rope_parameters` gives
    them."""

    path: str
    recipe: str
    head_size: int
    value_head_size: int
    layers: dict[int, LayerCalibration]
    version: int = VERSION
    ropes: tuple[Parameters, ...] = ()

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Numbers of KV heads that a layer has; several where layers differ."""
        return tuple(sorted({layer.kv_heads for layer in self.layers.values()}))

    @property
    def heads(self) -> str:
        """Numbers and sizes of KV heads, in words."""
        return heads_in_words(self.kv_heads, self.head_size, self.value_head_size)

    def check_model(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_size: int,
        value_head_size: int | None = None,
        every_layer: bool = True,
    ) -> None:
        """Raise CalibrationError if the file was made for another model.

        `layers` counts all of the model's layers, `kv_heads` those of the whole model, in layers of one kind where they
        differ. `value_head_size`: None if it is not known. `every_layer`: whether each layer has a KV cache of its own,
        so that the file must list it.
        """
        if self.head_size != head_size:
            self.refuse(f"made for another model: head_size {self.head_size}, this model has {head_size}")
        if value_head_size not in (None, self.value_head_size):
            fault = f"value_head_size {self.value_head_size}, this model has {value_head_size}"
            self.refuse(f"made for another model: {fault}")
        if kv_heads not in self.kv_heads:
            ours = " or ".join(map(str, self.kv_heads))
            self.refuse(f"made for another model: KV heads {ours}, this model has {kv_heads}")
        beyond = [layer for layer in self.layers if layer >= layers]
        missing = [layer for layer in range(layers) if layer not in self.layers] if every_layer else []
        if beyond or missing:
            fault = f"lists layer {max(beyond)}" if beyond else f"layer {missing[0]} is missing"
            self.refuse(f"made for another model: {fault}, this model has layers 0 to {layers - 1}")

    def check_rope(self, of_model: Mapping[str, Parameters]) -> None:
        """Raise CalibrationError if keys were calibrated under another RoPE than the model's, `rope_parameters`."""
        for ours in self.ropes:
            if ours not in of_model.values():
                words = " or ".join(dict.fromkeys(map(rope_in_words, of_model.values()))) or "none"
                self.refuse(f"made for another RoPE: {rope_in_words(ours)}; this model has {words}")

    def refuse(self, fault: str) -> NoReturn:
        """Raise CalibrationError about this file."""
        _refuse(self.path, fault)


def heads_of_rank(heads: Sequence[Row], kv_heads: int, tp_size: int, tp_rank: int) -> list[Row]:
    """Rows of the `kv_heads` heads that a tensor-parallel rank has: a run, or one head that several ranks share.

    vLLM deals heads out so: rank r has heads r * kv_heads onwards; with more ranks than heads, ranks in a row have the
    same one. A layer that is not split has all.
    """
    if kv_heads == len(heads):
        return list(heads)
    first = tp_rank // max(1, tp_size // len(heads)) * kv_heads
    return list(heads[first : first + kv_heads])


def layer_number(name: str) -> int | None:
    """The number of the layer that a module of vLLM belongs to, by its name: the only part that is a number, if any."""
    numbers = [int(part) for part in name.split(".") if re.fullmatch(r"[0-9]+", part)]
    return numbers[0] if len(numbers) == 1 else None


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read and check a file, once per state of the file. Raises CalibrationError."""
    path = os.path.abspath(path)
    try:
        state = os.stat(path)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        _refuse(path, f"cannot be read ({getattr(error, 'strerror', error)})")
    return _load(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=4)
def _load(path: str, _mtime_ns: int, _size: int) -> Calibration:
    try:
        content = read_json(path, once=True)
    except ValueError as error:
        _refuse(path, str(error))
    try:
        return _calibration(path, content)
    except _FaultError as fault:
        _refuse(path, str(fault))


class _FaultError(Exception):
    """A fault in a file's content."""


def _refuse(path: str, fault: str) -> NoReturn:
    raise CalibrationError(f"{printable(path)}: {fault}; make a new file with: tq-calibrate model MODEL")


def _calibration(path: str, content: Any) -> Calibration:
    if not isinstance(content, dict):
        raise _FaultError(f"expected a JSON object, got {shown(content)}")
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
            raise _FaultError(f"{field} {shown(value)} is not supported ({known} is)")
    for field, kind, words in (("model_name", str, "a text"), ("calibration", dict, "an object")):
        if not isinstance(content.get(field), kind | None):
            raise _FaultError(f"{field} must be {words}, got {shown(content[field])}")
    recipe: str = content["recipe"]
    head_size: Any = content.get("head_size")
    if type(head_size) is not int or not 0 < head_size <= LARGEST_HEAD_SIZE or head_size % HEAD_DIM_MULTIPLE:
        rule = f"head_size must be a positive multiple of {HEAD_DIM_MULTIPLE}, at most {LARGEST_HEAD_SIZE}"
        raise _FaultError(f"{rule}, got {shown(head_size)}")
    if not FORMATS[recipe].outlier_channels(head_size):
        raise _FaultError(f"heads of {head_size} channels have no outlier channels")
    value_size: Any = content.get("value_head_size", head_size)
    if type(value_size) is not int or not fits_value_dim(head_size, value_size):
        rule = f"value_head_size must be a positive multiple of {HEAD_DIM_MULTIPLE}, at most head_size"
        raise _FaultError(f"{rule}, got {shown(value_size)}")
    listed = content.get("layers")
    if not isinstance(listed, dict) or not listed:
        raise _FaultError(f"layers must be an object with an entry per layer, got {shown(listed)}")
    numbers_of_heads: Any = content.get("kv_heads")
    if numbers_of_heads is not None and not (
        isinstance(numbers_of_heads, list)
        and numbers_of_heads
        and all(type(number) is int and number > 0 for number in numbers_of_heads)
    ):
        raise _FaultError(f"kv_heads must be a list of the numbers that layers have, got {shown(numbers_of_heads)}")
    version: int = content["version"]
    ropes = _ropes(content.get("ropes"), head_size) if version >= FIRST_WITH_ROPES else []
    layers: dict[int, LayerCalibration] = {}
    for name, entry in listed.items():
        number = _LAYER_NAME.fullmatch(name)
        if number is None:
            raise _FaultError(f"layer name {shown(name)} is not model.layers.NUMBER.self_attn")
        layer = int(number[1])
        if layer in layers:
            raise _FaultError(f"layer {layer} is listed twice")
        try:
            layers[layer] = _layer(entry, version, recipe, (head_size, value_size), [rope for rope, _ in ropes])
        except _FaultError as fault:
            raise _FaultError(f"layer {layer}: {fault}") from None
        heads, first_heads = layers[layer].kv_heads, next(iter(layers.values())).kv_heads
        if heads not in (numbers_of_heads or [first_heads]):
            other = (
                f"kv_heads says {shown(numbers_of_heads)}"
                if numbers_of_heads
                else f"the first one listed {first_heads}"
            )
            raise _FaultError(f"layer {layer} lists {heads} heads, {other}")
    parameters = tuple(parameters for _, parameters in ropes)
    return Calibration(path, recipe, head_size, value_size, layers, version, parameters)


def why_no_file(model: Model) -> str:
    """Say why tq-calibrate makes no file for a model; "": it makes one."""
    layers = [layer for layer in model.attention if not layer.is_shared]
    sizes = {(layer.head_size, layer.value_size or layer.head_size): layer for layer in reversed(layers)}
    if len(sizes) > 1:
        found = ", ".join(
            f"layer {layer.number}: {heads_in_words([layer.kv_heads * model.ranks], *size)}"
            for size, layer in reversed(sizes.items())
        )
        return f"layers differ in shape ({found}); a calibration file holds one size"
    ((size, value_size),) = sizes
    if any(channels % GROUP_SIZE or channels <= GROUP_SIZE for channels in (size, value_size)):
        return (
            f"heads of {min(size, value_size)} channels, and channels are chosen for two or more groups of {GROUP_SIZE}"
        )
    if value_size > size or value_size <= FORMATS[RECIPES[0]].outlier_channels(size):
        return f"heads of {size} channels of K and {value_size} of V"
    kind = word(model.config, "model_type")
    return f"keys of {kind} in another order of channels" if kind in ("llama4_text", *EXPANDED_LATENTS) else ""


def heads_in_words(numbers: Iterable[int], head_size: int, value_head_size: int) -> str:
    """Numbers of KV heads, of which one is right, and their sizes."""
    sizes = f"{head_size} channels"
    if value_head_size != head_size:
        sizes += f" of K and {value_head_size} of V"
    return f"{' or '.join(map(str, numbers))} KV heads of {sizes}"


def _check_version(version: Any) -> None:
    number = isinstance(version, int | float) and not isinstance(version, bool)
    if number and version > VERSION:
        raise _FaultError(
            f"version {shown(version)} is newer than this packed-kv reads (1 to {VERSION}), so update packed-kv"
        )
    if not number or version not in range(1, VERSION + 1):
        raise _FaultError(f"version {shown(version)} is not supported (1 to {VERSION} are)")


def _check_fields(found: dict[str, Any], where: str) -> None:
    for name in found:
        if name not in FIELDS[where]:
            near = get_close_matches(name, FIELDS[where], 1)
            raise _FaultError(f"{shown(name)} is no field of {where}{f' ({near[0]} is)' if near else ''}")


def _layer(entry: Any, version: int, recipe: str, sizes: tuple[int, int], ropes: list[Rope]) -> LayerCalibration:
    """`sizes`: channels of a head of K and of V."""
    if not isinstance(entry, dict):
        raise _FaultError(f"expected an object, got {shown(entry)}")
    _check_fields(entry, "a layer")
    count = FORMATS[recipe].outlier_channels(sizes[0])
    roles = tuple(zip(("key", "value"), sizes, strict=True))
    outliers = [_outliers(entry, f"{role}_high_precision_indices", recipe, size, count) for role, size in roles]
    if len(outliers[0]) != len(outliers[1]):
        raise _FaultError(f"lists {len(outliers[0])} heads of keys and {len(outliers[1])} of values")
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
            raise _FaultError(f"{there} is there without {missing}")
        if entry.get(name) is not None:
            raise _FaultError(f"has both {name} and {name}_before_rope, and may have one")
        name += "_before_rope"
    key = ChannelCalibration(
        outliers[0],
        orders[0],
        mean=_numbers(entry, name, shapes[0], -INPUT_LIMIT, INPUT_LIMIT),
        first_mean=_numbers(entry, "key_first_token_mean", shapes[0], -INPUT_LIMIT, INPUT_LIMIT),
        scale=_numbers(entry, "key_channel_scale", shapes[0], *SCALE_BOUNDS),
        rope=_rope_of_layer(entry["rope"], ropes) if before else None,
    )
    if key.first_mean is not None and key.mean is None:
        raise _FaultError("key_first_token_mean is there without key_channel_mean")
    value_scale = _numbers(entry, "value_channel_scale", shapes[1], *SCALE_BOUNDS)
    return LayerCalibration(key, ChannelCalibration(outliers[1], orders[1], scale=value_scale))


def _ropes(listed: Any, head_size: int) -> list[tuple[Rope, Parameters]]:
    """The RoPEs that a file lists, each with the parameters of the model's config."""
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(isinstance(rope, dict) for rope in listed):
        raise _FaultError(f"ropes must be a list of objects, got {shown(listed)}")
    found = []
    for number, rope in enumerate(listed):
        _check_fields(rope, "ropes")
        parameters, interleaved = rope.get("parameters"), rope.get("interleaved")
        if not isinstance(parameters, dict):
            raise _FaultError(f"ropes: parameters of entry {number} must be an object, got {shown(parameters)}")
        if not isinstance(interleaved, bool):
            raise _FaultError(f"ropes: interleaved of entry {number} must be true or false, got {shown(interleaved)}")
        frequencies = rope.get("frequencies")
        if not isinstance(frequencies, list) or not 1 <= len(frequencies) <= head_size // 2:
            count = f"{len(frequencies)}" if isinstance(frequencies, list) else shown(frequencies)
            raise _FaultError(
                f"ropes: frequencies of entry {number} must be a list of 1 to {head_size // 2} numbers, as heads have "
                f"{head_size} channels, got {count}"
            )
        for pair, frequency in enumerate(frequencies):
            if type(frequency) not in (int, float) or not 0 <= frequency <= math.pi:  # NaN compares as false
                rule = f"ropes: frequency {pair} of entry {number} must be a number from 0 to pi"
                raise _FaultError(f"{rule}, got {shown(frequency)}")
        found.append((Rope(tuple(map(float, frequencies)), interleaved), normalised(parameters, {})))
    return found


def _rope_of_layer(index: Any, ropes: list[Rope]) -> Rope:
    if type(index) is not int or not 0 <= index < len(ropes):
        raise _FaultError(f"rope must be an index of the {len(ropes)} entries of ropes, got {shown(index)}")
    return ropes[index]


def _outliers(entry: dict, field: str, recipe: str, head_size: int, count: int) -> list[list[int]]:
    heads = _integers(entry.get(field), field)
    for head, channels in enumerate(heads):
        if len(channels) != count:
            raise _FaultError(
                f"{field}: head {head} lists {len(channels)} channels, {recipe} here takes {count} of {head_size}"
            )
        if list(channels) != sorted(set(channels)) or channels[0] < 0 or channels[-1] >= head_size:
            raise _FaultError(f"{field}: head {head} must be strictly ascending within 0 to {head_size - 1}")
    return heads


def _order(entry: dict, field: str, shape: tuple[int, int]) -> list[list[int]] | None:
    if entry.get(field) is None:
        return None
    heads, head_size = _integers(entry[field], field), shape[1]
    _check_heads(heads, field, shape[0])
    for head, channels in enumerate(heads):
        if sorted(channels) != list(range(head_size)):
            raise _FaultError(f"{field}: head {head} must have each channel from 0 to {head_size - 1} once")
    return heads


def _numbers(entry: dict, field: str, shape: tuple[int, int], least: float, largest: float) -> list[list[float]] | None:
    """Numbers by head and channel, each from `least` to `largest`."""
    heads = entry.get(field)
    if heads is None:
        return None
    if not isinstance(heads, list):
        raise _FaultError(f"{field} must be a list with a list of numbers per KV head, got {shown(heads)}")
    _check_heads(heads, field, shape[0])
    for head, numbers in enumerate(heads):
        if not isinstance(numbers, list) or len(numbers) != shape[1]:
            found = f"{len(numbers)}" if isinstance(numbers, list) else shown(numbers)
            raise _FaultError(f"{field}: head {head} must be a list of {shape[1]} numbers, got {found}")
        for channel, number in enumerate(numbers):
            if type(number) not in (int, float) or not least <= number <= largest:  # NaN compares as false
                raise _FaultError(
                    f"{field}: head {head}, channel {channel} must be a number from {least:g} to {largest:g}, got "
                    f"{shown(number)}"
                )
    return heads


def _check_heads(heads: list, field: str, expected: int) -> None:
    if len(heads) != expected:
        raise _FaultError(f"{field} lists {len(heads)} heads, key_high_precision_indices {expected}")


def _integers(value: Any, field: str) -> list[list[int]]:
    if not isinstance(value, list) or not value:
        raise _FaultError(f"{field} must be a list with a list of channels per KV head, got {shown(value)}")
    for head, channels in enumerate(value):
        if not isinstance(channels, list) or not all(type(channel) is int for channel in channels):
            raise _FaultError(f"{field}: head {head} must be a list of integers, got {shown(channels)}")
    return value
