"""Reads and checks a calibration file, `turboquant_kv.json`: what is known about the channels of a model's K and V.

`calibration_content.py` has the fields and their checks. A file that cannot be used is refused in one line. Imports no
torch and no vLLM.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from .calibration_content import RECIPES, VERSION, FaultError, parse
from .channel_calibration import LayerCalibration
from .formats import FORMATS, GROUP_SIZE, Format
from .json_file import printable, read_json
from .model.config_fields import EXPANDED_LATENTS, word
from .model.rope import Parameters, rope_in_words
from .model.shape import Model

FILE_NAME = "turboquant_kv.json"
"""Name of the file in a model's folder."""
COMMAND = "tq-calibrate model MODEL"
"""Makes a file."""
Row = TypeVar("Row")


class CalibrationError(ValueError):
    """A calibration file that cannot be used; the message is one line that names file, fault and remedy."""


@dataclass(frozen=True)
class Calibration:
    """A checked file; `layers` maps the number of a layer to its channels. Heads have `head_size` channels of K and
    `value_head_size` of V. `ropes`: the parameters of the RoPEs that its layers have, as `rope_parameters` gives
    them. `key_bits`: bits of K's groups of 32 channels, for dtypes whose own bits the file replaces."""

    path: str
    recipe: str
    head_size: int
    value_head_size: int
    layers: dict[int, LayerCalibration]
    version: int = VERSION
    ropes: tuple[Parameters, ...] = ()
    key_bits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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

        `layers` counts all of the model's layers. `kv_heads` counts heads of the whole model, by kind of layer where
        kinds differ. `value_head_size`: None if it is not known. `every_layer`: whether each layer has a KV cache of
        its own, so that the file must list it.
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

    def check_rope(self, of_model: Mapping[str, Parameters], command: str = COMMAND) -> None:
        """Raise CalibrationError if keys were calibrated under another RoPE than the model's (`rope_parameters`).

        command: a command that makes a file for the model.
        """
        if fault := self.other_rope(of_model):
            _refuse(self.path, fault, command)

    def other_rope(self, of_model: Mapping[str, Parameters]) -> str:
        """Say which other RoPE the file was made for; "": it was made for the model's, or does not say."""
        for ours in self.ropes:
            if ours not in of_model.values():
                words = " or ".join(dict.fromkeys(map(rope_in_words, of_model.values()))) or "none"
                return f"made for another RoPE: {rope_in_words(ours)}; this model has {words}"
        return ""

    def taken_by(self, fmt: Format, layer: LayerCalibration) -> LayerCalibration:
        """The parts of this file with which a format stores K and V of a layer."""
        return layer.taken_by(fmt, self.key_bits.get(fmt.name))

    def refuse(self, fault: str) -> NoReturn:
        """Raise CalibrationError about this file."""
        _refuse(self.path, fault)


def heads_of_rank(heads: Sequence[Row], kv_heads: int, tp_size: int, tp_rank: int) -> list[Row]:
    """Rows of the `kv_heads` heads that a tensor-parallel rank has: a run, or one head that several ranks share.

    vLLM distributes heads in this way: rank r has heads r * kv_heads onwards; with more ranks than heads, consecutive
    ranks have the same head. A layer that is not split has all.
    """
    if kv_heads == len(heads):
        return list(heads)
    first = tp_rank // max(1, tp_size // len(heads)) * kv_heads
    return list(heads[first : first + kv_heads])


def layer_number(name: str) -> int | None:
    """The layer number of a module of vLLM: the only part of its name that is a number, if any."""
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
        return Calibration(path, *parse(content))
    except FaultError as fault:
        _refuse(path, str(fault))


def _refuse(path: str, fault: str, command: str = COMMAND) -> NoReturn:
    raise CalibrationError(f"{printable(path)}: {fault}; make a new file with: {command}")


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
    """The possible numbers of KV heads, and the head sizes."""
    sizes = f"{head_size} channels"
    if value_head_size != head_size:
        sizes += f" of K and {value_head_size} of V"
    return f"{' or '.join(map(str, numbers))} KV heads of {sizes}"
