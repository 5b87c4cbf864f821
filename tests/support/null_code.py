"""The null code: plain fp16 numbers in packed pages, through the same store, gather and attention as the real dtypes.

Call `register` in a fixture, and the dtype "null" is there for codecs, kernels and, where the plugin is registered
later, for engines. What is wrong with it is wrong with paging, not with quantisation.
"""

from __future__ import annotations

import pytest
import torch
from packed_kv.codecs.rotations import ROTATIONS
from packed_kv.formats import CODES, FORMATS, NULL_CODE, Format

NULL_FORMAT = Format("null", rotation="identity", bits=NULL_CODE.bits)


class Identity:
    """No rotation."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.constants = torch.ones(size, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` fp32 [..., size], as it is."""
        return x

    inverse = forward


def register(patch: pytest.MonkeyPatch) -> str:
    """Add the null code, its rotation and its dtype to the tables, until the patch is undone; the dtype's name."""
    patch.setitem(ROTATIONS, NULL_FORMAT.rotation, Identity)
    patch.setitem(CODES, NULL_CODE.bits, NULL_CODE)
    patch.setitem(FORMATS, NULL_FORMAT.name, NULL_FORMAT)
    return NULL_FORMAT.name
