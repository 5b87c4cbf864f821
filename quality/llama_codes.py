"""llama.cpp's codes for K and V, by their published definitions: a yardstick of `long_context.py`, not to serve with.

32 neighbouring channels share an fp16 step size d. `q8_0` has 8-bit integers, d the largest magnitude over 127. `q4_0`
and `q5_0` have 4 and 5 bits, d the number of largest magnitude over -8 and -16, so that this number is met and the
integers from -8 to 7, or -16 to 15, are used.

Since commit 744c0c73 of April 2026 (pull request 21038) llama.cpp rotates each 64 channels by a Hadamard matrix before
these codes (K of larger heads more channels at once), unless LLAMA_ATTN_ROT_DISABLE is set: `q4_0_rotated`.
Its files of Llama models have the two halves of K's heads interleaved, so other channels share a block:
`q4_0_interleaved`, without the rotation.
`turbo2_tcq` is a fork's (`trellis_code.py`), which fills up heads of 64 to 128; `turbo2_tcq_64` is no fork's, but the
same trellis over 64 channels.
"""

from __future__ import annotations

import torch
import trellis_code

BLOCK, ROTATED_AT_ONCE = 32, 64
BITS = {"q8_0": 8, "q5_0": 5, "q4_0": 4}
ROTATED = {f"{code}_rotated": code for code in BITS}
INTERLEAVED = {f"{code}_interleaved": code for code in BITS}
TRELLIS = {"turbo2_tcq": trellis_code.CHANNELS, "turbo2_tcq_64": 64}
CODES = (*BITS, *ROTATED, *INTERLEAVED, *TRELLIS)


def bytes_of(code: str, channels: int) -> int:
    """Bytes of a vector of `channels`, a multiple of 32; one byte of a trellis's 36 is not used."""
    if size := TRELLIS.get(code):
        vectors = -(-channels // size)
        return vectors * (trellis_code.BYTES if size == trellis_code.CHANNELS else 2 + (6 + 2 * size + 7) // 8)
    return channels // BLOCK * (2 + BLOCK * BITS[(ROTATED | INTERLEAVED).get(code, code)] // 8)


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


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Vectors [.., channels], each 64 channels rotated; rotated again, they are what they were."""
    return (x.unflatten(-1, (-1, ROTATED_AT_ONCE)) @ trellis_code.hadamard(ROTATED_AT_ONCE)).flatten(-2)


def read_back_pair(code: str, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [tokens, heads, channels] of a context as a code of `CODES` gives them back, fp32."""
    if size := TRELLIS.get(code):
        gain = trellis_code.value_gain(len(value))
        return trellis_code.read_back(key, size), gain * trellis_code.read_back(value, size)
    if plain := ROTATED.get(code):
        return rotated(read_back(plain, rotated(key))), rotated(read_back(plain, rotated(value)))
    if plain := INTERLEAVED.get(code):
        halves = key.unflatten(-1, (2, -1)).transpose(-1, -2)
        coded = read_back(plain, halves.flatten(-2)).view(halves.shape)
        return coded.transpose(-1, -2).flatten(-2), read_back(plain, value)
    return read_back(code, key), read_back(code, value)
