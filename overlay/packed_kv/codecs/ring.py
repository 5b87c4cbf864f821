"""Reference of the ring: the recent tokens of a request, once more, rotated as in their pages, at 8 bits a channel.

A value is `code * scale / 128`: the code a signed byte of -127 .. 127, the scale an unsigned e5m3 byte for 32 channels
(`scalar.decode_scale`), the least that reaches absmax. Each operation is one correctly rounded fp32 operation:

    scale  byte of fp16(absmax * fp32(128 / 127)), its 3 mantissa bits rounded up, at most MAX_SCALE_BYTE
    code   x * fp32(1 / (scale / 128)), rounded half to even, clamped to +-127; 0 where the scale is 0

`layout.py` draws a slot. On real keys and values 8 such bits cost as much as 16 (docs/lab/tried.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats import GROUP_SIZE, MAX_SCALE_BYTE
from ..layout import PAIR, ring_layout
from .scalar import decode_scale

LARGEST_CODE = 127
OVER_LARGEST = 128 / LARGEST_CODE
"""absmax times this number is the scale that gives absmax the largest code."""
UNIT = 2.0**-7
"""A code of 1, in scales."""


@dataclass(frozen=True)
class Ring:
    """One layer's ring, as attention reads it.

    `cache`: uint8 [blocks, KV heads, block_size, ring_slot_bytes], the last two dimensions contiguous. `block_table`:
    int32 [requests, blocks of the longest request], entry i for tokens i * block_size and on. `first`: int32
    [requests], the first token in the ring; all tokens from there to the newest are in it. `window`: tokens that a
    query reads in the ring, its own included; it reads earlier tokens from the packed pages.
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    first: torch.Tensor
    window: int


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., head_dim] -> codes int8 [..., head_dim], scale bytes uint8 [..., head_dim / 32]."""
    groups = x.unflatten(-1, (-1, GROUP_SIZE))
    largest = (groups.abs().amax(-1) * OVER_LARGEST).clamp(max=torch.finfo(torch.float16).max)
    bits = largest.to(torch.float16).view(torch.int16).to(torch.int32)
    scale = (bits + 127 >> 7).clamp(max=MAX_SCALE_BYTE).to(torch.uint8)
    step_size = (decode_scale(scale) * UNIT).unsqueeze(-1)
    codes = (groups * torch.where(step_size > 0, 1 / step_size, 0.0)).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8).flatten(-2), scale


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantize`: -> fp32 [..., head_dim]."""
    step_size = (decode_scale(scales) * UNIT).unsqueeze(-1)
    return (codes.to(torch.float32).unflatten(-1, (-1, GROUP_SIZE)) * step_size).flatten(-2)


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """The rotated vectors `x` as read back from a ring, fp32 [..., head_dim]."""
    return dequantize(*quantize(x))


def write(cache: torch.Tensor, slots: torch.Tensor, *vectors: torch.Tensor) -> None:
    """Store rotated tokens.

    Args:
        cache: see `Ring`.
        slots: int [tokens], block * block_size + offset; negative ones are skipped, the others are distinct.
        vectors: K and V, fp32 [tokens, KV heads, head_dim], rotated; or one vector, of latents and RoPE channels.
    """
    stored = slots >= 0
    slots = slots[stored].long()
    coded = [quantize(x[stored]) for x in vectors]
    codes = [_to_bytes(of_vector, order) for (of_vector, _), order in zip(coded, PAIR, strict=False)]
    packed = torch.cat((*codes, *(scales for _, scales in coded)), dim=-1)
    cache[slots // cache.shape[2], :, slots % cache.shape[2], : packed.shape[-1]] = packed


def read(cache: torch.Tensor, slots: torch.Tensor, vectors: int = len(PAIR)) -> tuple[torch.Tensor, ...]:
    """K and V of tokens, rotated, fp32 [tokens, KV heads, head_dim]; or one vector. `slots`: int [tokens], none
    negative."""
    slots = slots.long()
    groups = cache.shape[-1] // (vectors * (GROUP_SIZE + 1))
    head_dim = groups * GROUP_SIZE
    layout = ring_layout(head_dim, vectors)
    packed = cache[slots // cache.shape[2], :, slots % cache.shape[2]]
    return tuple(
        dequantize(_from_bytes(packed[..., at : at + head_dim], order), packed[..., scales_at : scales_at + groups])
        for order, at, scales_at in zip(PAIR, layout.codes, layout.scales, strict=False)
    )


# Axes of a group's channels [d4 d3, d2 d1, d0] in the order of their bytes (layout.py).
_TO_BYTES = {"key": (1, 0, 2), "value": (1, 2, 0)}


def _to_bytes(codes: torch.Tensor, role: str) -> torch.Tensor:
    """int8 [..., head_dim] -> uint8, in the order of the ring."""
    axes = (codes.to(torch.int16) + 128).to(torch.uint8).unflatten(-1, (-1, 4, 4, 2))
    order = [axis - 3 for axis in _TO_BYTES[role]]
    return axes.movedim(order, (-3, -2, -1)).flatten(-4)


def _from_bytes(packed: torch.Tensor, role: str) -> torch.Tensor:
    """Inverse of `_to_bytes`."""
    order = [axis - 3 for axis in _TO_BYTES[role]]
    sizes = [(4, 4, 2)[axis] for axis in _TO_BYTES[role]]
    axes = packed.unflatten(-1, (-1, *sizes)).movedim((-3, -2, -1), order)
    return (axes.flatten(-4).to(torch.int16) - 128).to(torch.int8)
