"""Page codecs from calibration by name: `key_mean`, `value_scale` and so on, as tests draw them."""

from __future__ import annotations

from typing import Any

import torch
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import Format


def page_codec(
    fmt: Format,
    head_dim: int,
    *,
    device: torch.device | str = "cpu",
    value_dim: int | None = None,
    positions: int | None = None,
    kind: type[PagedCodec] = PagedCodec,
    **parts: Any,
) -> PagedCodec:
    """A codec of `kind`; parts: those of the two `ChannelCalibration`s, behind `key_` and `value_`."""
    key, value = (
        ChannelCalibration(**{name.removeprefix(role): part for name, part in parts.items() if name.startswith(role)})
        for role in ("key_", "value_")
    )
    assert len(key.known()) + len(value.known()) == sum(part is not None for part in parts.values()), [*parts]
    return kind(fmt, head_dim, key, value, device, value_dim, positions)
