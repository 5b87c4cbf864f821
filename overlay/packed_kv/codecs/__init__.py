"""PyTorch reference codecs: the ground truth that kernels must equal."""

from __future__ import annotations

import torch

from ..channel_calibration import ChannelCalibration
from ..formats import FORMATS, Format
from ..json_file import printable
from ..model.rope import Rope
from .codec import Channels, Codec
from .transform import Numbers

__all__ = ["Codec", "format_named", "get_codec"]


def get_codec(
    name: str,
    head_dim: int,
    role: str = "key",
    outliers: Channels | None = None,
    device: torch.device | str = "cpu",
    channel_order: Channels | None = None,
    mean: Numbers | None = None,
    scale: Numbers | None = None,
    first_mean: Numbers | None = None,
    layout_dim: int | None = None,
    rope: Rope | None = None,
    positions: int | None = None,
) -> Codec:
    """The codec of a KV-cache dtype.

    `outliers`, `channel_order`, `mean`, `scale`, `first_mean` and `rope` are the parts of a `ChannelCalibration`; see
    `Codec` for the other arguments. Raises ValueError for an unknown name.
    """
    channels = ChannelCalibration(outliers, channel_order, mean, first_mean, scale, rope)
    return Codec(format_named(name), head_dim, role, channels, device, layout_dim, positions)


def format_named(name: str) -> Format:
    """The format of a KV-cache dtype. Raises ValueError for an unknown name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"unknown KV-cache dtype {printable(repr(name), 60)}; known: {', '.join(FORMATS)}")
    return FORMATS[name]
