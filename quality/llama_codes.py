"""llama.cpp's codes for K and V, by their published definitions: a yardstick of `long_context.py`, not to serve with.

32 neighbouring channels share an fp16 step size d. `q8_0` has 8-bit integers, d the largest magnitude over 127. `q4_0`
and `q5_0` have 4 and 5 bits, d the number of largest magnitude over -8 and -16, so that this number is met and the
integers from -8 to 7, or -16 to 15, are used.
"""

from __future__ import annotations

import torch

BLOCK = 32
BITS = {"q8_0": 8, "q5_0": 5, "q4_0": 4}


def bytes_of(code: str, channels: int) -> int:
    """Bytes of a vector of `channels`, a multiple of 32."""
    return channels // BLOCK * (2 + BLOCK * BITS[code] // 8)


def read_back(code: str, x: torch.Tensor) -> torch.Tensor:
    """Vectors [.., channels] as a code of `BITS` gives them back, fp32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    bits, half = BITS[code], 1 << (BITS[code] - 1)
    step = largest.abs() / (half - 1) if bits == 8 else largest / -half
    scaled = blocks * torch.where(step == 0, 0.0, 1 / step)
    if bits == 8:
        integers = scaled.sign() * (scaled.abs() + 0.5).floor()
    else:
        integers = (scaled + half + 0.5).trunc().clamp_max(2 * half - 1) - half
    return (integers * step.half().float()).flatten(-2)
