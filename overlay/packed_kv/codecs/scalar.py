"""The code of one 32-channel group: sign-magnitude codes and a searched e5m3 scale.

A value is `sign * magnitude * scale`. The scale byte is an unsigned e5m3 number: its fp16 bits are `byte << 7`.

Which scale: with `b0` the byte of absmax * fp32(1 / largest magnitude) (rounded to fp32, then to fp16, then cut to
3 mantissa bits), the bytes `b0 + above` down to `b0 - below` of `Code.search`, kept in [0, 0xF2], are tried in that
order, and the first of least squared error is kept. The error of a candidate is the sum over the group of
`min_m (|x| - s m)^2`, each operation rounded to fp32, the 32 terms added as a tree (0+16, 1+17, ...; then 8, 4, 2, 1).
Which code: the number of thresholds `s * (m_j + m_{j+1}) / 2` below |x|; a tie takes the lower magnitude. Thresholds
are exact in fp32, so no rounding decides a code. The sign bit is set for x < 0.
"""

from __future__ import annotations

import torch

from ..formats import CODES, GROUP_SIZE, MAX_SCALE_BYTE

ONE = 0x78
"""The scale byte of 1."""


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """e5m3 bytes, uint8 -> fp32 of the same shape."""
    return (scale.to(torch.int16) << 7).view(torch.float16).to(torch.float32)


def absmax_scale(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`b0` of the search: the scale byte of absmax / largest magnitude. `x` fp32 [..., 32] -> uint8 [...]."""
    ratio = x.abs().amax(-1) * (1 / CODES[bits].magnitudes[-1])
    return (ratio.to(torch.float16).view(torch.int16) >> 7).clamp(max=MAX_SCALE_BYTE).to(torch.uint8)


def group_error(x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Squared error of coding `x` fp32 [..., 32] with `scale` uint8 [...] -> fp32 [...]."""
    magnitude, step_size = x.abs(), decode_scale(scale).unsqueeze(-1)
    nearest = (magnitude - step_size * CODES[bits].magnitudes[0]).abs_()
    for level in CODES[bits].magnitudes[1:]:
        nearest = torch.minimum(nearest, (magnitude - step_size * level).abs_())
    terms = nearest.mul_(nearest)
    while terms.shape[-1] > 1:  # a fixed tree: torch.sum's order differs between devices
        low, high = terms.chunk(2, dim=-1)
        terms = low + high
    return terms.squeeze(-1)


def search_scale(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The candidate scale byte with the least error. `x` fp32 [..., 32] -> uint8 [...]."""
    start = absmax_scale(x, bits).to(torch.int16)
    above, below = CODES[bits].search
    best = (start + above).clamp(max=MAX_SCALE_BYTE).to(torch.uint8)
    least = group_error(x, best, bits)
    for offset in range(above - 1, -below - 1, -1):
        candidate = (start + offset).clamp(0, MAX_SCALE_BYTE).to(torch.uint8)
        error = group_error(x, candidate, bits)
        better = error < least
        best, least = torch.where(better, candidate, best), torch.where(better, error, least)
    return best


def quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Code groups.

    Args:
        x: finite fp32 [..., 32].
        bits: a width of `CODES`.

    Returns:
        codes [..., 32] below 2^bits, uint8 or, of 16 bits, int32; and scale bytes uint8 [...].
    """
    if not CODES[bits].magnitudes:
        codes = x.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF
        return codes, torch.full_like(codes[..., 0], ONE, dtype=torch.uint8)
    scale = search_scale(x, bits)
    magnitude, step_size = x.abs(), decode_scale(scale).unsqueeze(-1)
    code = (x < 0).to(torch.uint8) << (bits - 1)
    for threshold in CODES[bits].thresholds:
        code += magnitude > step_size * threshold
    return code, scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, bits: int, gain: float = 1.0) -> torch.Tensor:
    """Inverse of `quantize`, times `gain`: codes [..., 32], scale uint8 [...] -> fp32 [..., 32]."""
    assert codes.shape[-1] == GROUP_SIZE
    if not CODES[bits].magnitudes:
        return codes.to(torch.int16).view(torch.float16).to(torch.float32)
    levels = torch.tensor(CODES[bits].magnitudes, dtype=torch.float32, device=codes.device)
    table = torch.cat((levels, -levels))
    return table[codes.int()] * (decode_scale(scale) * gain).unsqueeze(-1)
