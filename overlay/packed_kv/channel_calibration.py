"""Calibrated channels of K and V, in the shapes that codecs take. Imports no torch and no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from .formats import Format
from .model.rope import Rope

MIXES_NEIGHBOURS = ("quaternion", "givens")
"""Rotations of a few channels at a time, for which it matters which channels share a scale."""

SCALE_BOUNDS = (1 / 1024, 1024.0)
"""Least and largest scale of a channel: the kernels' fp16 matrices hold the rotation times 1 / scale."""

Rows = Any
"""Lists or a tensor; the type is loose because torch is not imported here."""


@dataclass(frozen=True)
class ChannelCalibration:
    """Calibration of the channels of a layer's K or V. A part that is None is not known and changes nothing.

    Rows are `[channels]` for all heads or `[heads, channels]`, in the model's order of channels.

    Attributes:
        outlier_channels: ascending indices of the outlier channels, for formats that have them.
        channel_order: all channels in packing order, for formats without outlier channels; 32 in a row share a scale.
        mean: is subtracted before a vector is stored. With `rope` it is the mean before RoPE, and RoPE turns it to the
            vector's position before it is subtracted.
        first_mean: is subtracted in place of `mean` at position 0 of a sequence.
        scale: multiplies a vector, after its mean is subtracted.
        rope: turns the vectors with their position; one for all heads.
        ranking: all channels, those whose errors cost most first; the packing order where `group_bits` are known.
        group_bits: bits of each group of 32 channels in packing order, instead of the format's; each group is rotated
            on its own.
    """

    outlier_channels: Rows = None
    channel_order: Rows = None
    mean: Rows = None
    first_mean: Rows = None
    scale: Rows = None
    rope: Rope | None = None
    ranking: Rows = None
    group_bits: tuple[int, ...] | None = None

    def known(self) -> dict[str, Any]:
        """The parts that are not None, by name."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if part is not None}

    def map_rows(self, change: Callable[[Rows], Rows]) -> ChannelCalibration:
        """The same with `change` of every part that has rows."""
        rows = {name: part for name, part in self.known().items() if name not in ("rope", "group_bits")}
        return replace(self, **{name: change(part) for name, part in rows.items()})

    def taken_by(self, fmt: Format, role: str, group_bits: tuple[int, ...] | None = None) -> ChannelCalibration:
        """The parts with which a format stores vectors; role: "key" or "value"; group_bits: bits of K's groups, from
        the file."""
        if group_bits is not None:
            return replace(self, outlier_channels=None, channel_order=None, group_bits=group_bits)
        has_outliers = bool(fmt.outlier_bits)
        return replace(
            self,
            outlier_channels=self.outlier_channels if has_outliers else None,
            channel_order=self.channel_order if not has_outliers and fmt.rotation in MIXES_NEIGHBOURS else None,
            scale=self.scale if role == "key" or has_outliers else None,
            ranking=None,
        )


UNCALIBRATED = ChannelCalibration()


@dataclass(frozen=True)
class LayerCalibration:
    """Calibration of a layer's channels of K and V, by KV head of the whole model: rows are `[KV heads][channels]`.

    Both have `outlier_channels`. A `first_mean` is never without a `mean`; V has means only where K has them, and no
    RoPE.
    """

    key: ChannelCalibration = UNCALIBRATED
    value: ChannelCalibration = UNCALIBRATED

    @property
    def kv_heads(self) -> int:
        return len(self.key.outlier_channels)

    def taken_by(self, fmt: Format, key_bits: tuple[int, ...] | None = None) -> LayerCalibration:
        """The parts with which a format stores K and V; key_bits: bits of K's groups, where the file has some for the
        format."""
        return LayerCalibration(self.key.taken_by(fmt, "key", key_bits), self.value.taken_by(fmt, "value"))

    def map_rows(self, change: Callable[[Any], Any]) -> LayerCalibration:
        """The same with `change` of every part that has rows."""
        return LayerCalibration(self.key.map_rows(change), self.value.map_rows(change))

    def known(self) -> dict[str, Any]:
        """The parts that are not None: "key_mean", "value_scale" and so on. Fingerprints hold these names."""
        roles = (("key", self.key), ("value", self.value))
        return {f"{role}_{name}": part for role, channels in roles for name, part in channels.known().items()}
