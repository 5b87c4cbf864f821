"""Orthonormal rotations of a head's channels: fixed by the format, the same bits on every device.

Every operation is one correctly rounded fp32 add or multiply in a fixed order (no matmul, no fused multiply-add), so
CPU and GPU agree to the last bit. A kernel that reproduces them must keep the order and turn contraction off; it finds
a rotation's numbers in `constants`, fp32 [size]: signs, (cos, sin) of each pair, or the 4 parts of each quaternion.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


class Hadamard:
    """Walsh-Hadamard transform with fixed signs: `y = H (s * x) / sqrt(n)`.

    A size that is not a power of two is block-diagonal: its largest power of two first, then the largest of the rest
    (96 = 64 + 32). Butterflies run over strides 1, 2, 4, ...; the normalisation is one multiply at the end.
    signs: fp32 [size], each 1 or -1; None: by a hash of a channel's number.
    """

    def __init__(self, size: int, device: torch.device, signs: torch.Tensor | None = None) -> None:
        self.blocks = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
        if signs is None:
            signs = torch.tensor([_hash_sign(i) for i in range(size)], dtype=torch.float32, device=device)
        self.signs = signs
        self.constants = self.signs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` fp32 [..., size] -> rotated, fp32 [..., size]."""
        return self._transform(x * self.signs)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Undo `forward`."""
        return self._transform(y) * self.signs

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([_butterflies(block) for block in x.split(self.blocks, dim=-1)], dim=-1)


class Givens:
    """Rotation of channel pairs (2i, 2i+1) by the angle 2 pi frac(i / golden ratio) + pi / 4.

    `y0 = c x0 - s x1`, `y1 = s x0 + c x1`.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        angles = [2 * math.pi * (i / GOLDEN_RATIO % 1.0) + math.pi / 4 for i in range(size // 2)]
        self.cos = torch.tensor([math.cos(a) for a in angles], dtype=torch.float32, device=device)
        self.sin = torch.tensor([math.sin(a) for a in angles], dtype=torch.float32, device=device)
        self.constants = torch.stack((self.cos, self.sin), dim=-1).flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` fp32 [..., size] -> rotated, fp32 [..., size]."""
        x0, x1 = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((self.cos * x0 - self.sin * x1, self.sin * x0 + self.cos * x1), dim=-1).flatten(-2)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Undo `forward`."""
        y0, y1 = y.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((self.cos * y0 + self.sin * y1, self.cos * y1 - self.sin * y0), dim=-1).flatten(-2)


class Quaternion:
    """Left multiplication of channel quadruples (4i .. 4i+3), read as quaternions, by a unit quaternion.

    Block i's quaternion is `(cos a, sin a * axis)`: the angle a = pi frac(i / golden ratio) + pi / 3, the axis the
    i-th of a golden-angle (Fibonacci) spiral on the sphere. Products are summed left to right.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        blocks = size // 4
        quaternions = []
        for i in range(blocks):
            angle = math.pi * (i / GOLDEN_RATIO % 1.0) + math.pi / 3
            z = 1 - (2 * i + 1) / blocks
            radius, turn = math.sqrt(1 - z * z), 2 * math.pi * (i / GOLDEN_RATIO % 1.0)
            axis = (radius * math.cos(turn), radius * math.sin(turn), z)
            quaternions.append((math.cos(angle), *(math.sin(angle) * part for part in axis)))
        parts = torch.tensor(quaternions, dtype=torch.float32, device=device)
        self.parts = parts.unbind(-1)
        self.constants = parts.flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` fp32 [..., size] -> rotated, fp32 [..., size]."""
        return _hamilton_product(self.parts, x)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Undo `forward`: multiply by the conjugate."""
        w, i, j, k = self.parts
        return _hamilton_product((w, -i, -j, -k), y)


Rotation = Hadamard | Givens | Quaternion

ROTATIONS: dict[str, Callable[[int, torch.device], Rotation]] = {
    "hadamard": Hadamard,
    "givens": Givens,
    "quaternion": Quaternion,
}


def _hash_sign(index: int) -> float:
    """+1 or -1 from the top bit of MurmurHash3's 32-bit finaliser of `index + 1`."""
    value = index + 1
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ value >> shift) * factor & 0xFFFFFFFF
    return -1.0 if value >> 31 else 1.0


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    stride = 1
    while stride < size:
        low, high = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    return x * (1 / math.sqrt(size))


def _hamilton_product(q: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
    a, b, c, d = q
    w, i, j, k = x.unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack(
        (
            a * w - b * i - c * j - d * k,
            a * i + b * w + c * k - d * j,
            a * j - b * k + c * w + d * i,
            a * k + b * j - c * i + d * w,
        ),
        dim=-1,
    ).flatten(-2)
