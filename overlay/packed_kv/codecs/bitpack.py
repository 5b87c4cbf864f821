"""Codes of one group as bytes: a little-endian bit stream, code i at bits [i * bits, (i + 1) * bits)."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., n] below 2^bits, n a multiple of 8 -> uint8 [..., n * bits / 8]."""
    _check(codes, 8, "codes")
    octets = codes.unflatten(-1, (-1, 8)).to(torch.int64)
    words = (octets << _shifts(8, bits, codes.device)).sum(-1)
    return (words.unsqueeze(-1) >> _shifts(bits, 8, codes.device) & 0xFF).to(torch.uint8).flatten(-2)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `pack`: uint8 [..., n * bits / 8] -> uint8 codes [..., n]."""
    _check(packed, bits, "packed bytes")
    words = (packed.unflatten(-1, (-1, bits)).to(torch.int64) << _shifts(bits, 8, packed.device)).sum(-1)
    return (words.unsqueeze(-1) >> _shifts(8, bits, packed.device) & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def _shifts(count: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count * step, step, device=device)


def _check(x: torch.Tensor, multiple: int, what: str) -> None:
    if x.dtype != torch.uint8 or x.shape[-1] % multiple:
        raise ValueError(
            f"{what}: expected uint8 with a last dimension that is a multiple of {multiple}, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
