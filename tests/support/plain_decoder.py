"""A decoder of packed vectors in plain Python and numpy, written from docs/formats.md alone.

It shares no code with packed_kv. numpy's float32 arithmetic rounds each operation once, as the document demands.
"""

from __future__ import annotations

import math

import numpy as np

# dtype: rotation, bits of a regular channel, bits of an outlier channel or 0 (docs/formats.md, "The eight dtypes")
DTYPES: dict[str, tuple[str, int, int]] = {
    "isoquant3": ("quaternion", 3, 0),
    "isoquant4": ("quaternion", 4, 0),
    "planarquant3": ("givens", 3, 0),
    "planarquant4": ("givens", 4, 0),
    "turboquant25": ("hadamard", 2, 3),
    "turboquant35": ("hadamard", 3, 4),
    "tq3": ("hadamard", 3, 0),
    "tq4": ("hadamard", 4, 0),
}
TABLES = {
    2: [0.25, 1.0],
    3: [0.15625, 0.5, 0.875, 1.5],
    4: [0.0703125, 0.203125, 0.34375, 0.5, 0.6875, 0.875, 1.125, 1.5],
}
PHI = (1 + math.sqrt(5)) / 2


def decode(dtype: str, head_dim: int, packed: bytes, outliers: list[int] | None = None) -> np.ndarray:
    """One packed vector -> float32 [head_dim]."""
    assert dtype in DTYPES, f"tests/support/plain_decoder.py has no row of {dtype} in DTYPES"
    rotation, regular_bits, outlier_bits = DTYPES[dtype]
    channels, head_dim = head_dim, -(-head_dim // 32) * 32
    quarter = 32 * math.floor(head_dim / 4 / 32 + 0.5) if outlier_bits else 0
    bits = [outlier_bits] * (quarter // 32) + [regular_bits] * ((head_dim - quarter) // 32)
    stream, scales = packed[: -len(bits)], packed[-len(bits) :]
    assert len(stream) == sum(4 * b for b in bits)

    values, at = [], 0
    for group_bits, scale_byte in zip(bits, scales, strict=True):
        number = int.from_bytes(stream[at : at + 4 * group_bits], "little")
        at += 4 * group_bits
        exponent, mantissa = scale_byte >> 3, scale_byte & 7
        scale = (8 + mantissa) * 2.0 ** (exponent - 18) if exponent else mantissa * 2.0**-17
        for i in range(32):
            code = number >> group_bits * i & (1 << group_bits) - 1
            negative, index = code >> (group_bits - 1), code & (1 << (group_bits - 1)) - 1
            values.append((-1.0 if negative else 1.0) * TABLES[group_bits][index] * scale)
    y = np.array(values, dtype=np.float32)

    unrotate = {"quaternion": _quaternion, "givens": _givens, "hadamard": _hadamard}[rotation]
    x = np.concatenate([unrotate(part) for part in (y[:quarter], y[quarter:]) if len(part)])
    if outliers is None:
        return x[:channels]
    order = [*outliers, *(c for c in range(head_dim) if c not in outliers)]
    result = np.empty_like(x)
    result[order] = x
    return result[:channels]


def _givens(y: np.ndarray) -> np.ndarray:
    x = np.empty_like(y)
    for i in range(len(y) // 2):
        angle = 2 * math.pi * (i / PHI % 1.0) + math.pi / 4
        c, s = np.float32(math.cos(angle)), np.float32(math.sin(angle))
        y0, y1 = y[2 * i], y[2 * i + 1]
        x[2 * i], x[2 * i + 1] = c * y0 + s * y1, c * y1 - s * y0
    return x


def _quaternion(y: np.ndarray) -> np.ndarray:
    x = np.empty_like(y)
    blocks = len(y) // 4
    for i in range(blocks):
        fraction = i / PHI % 1.0
        angle = math.pi * fraction + math.pi / 3
        z = 1 - (2 * i + 1) / blocks
        radius, turn = math.sqrt(1 - z * z), 2 * math.pi * fraction
        axis = (radius * math.cos(turn), radius * math.sin(turn), z)
        a = np.float32(math.cos(angle))
        b, c, d = (np.float32(-math.sin(angle) * part) for part in axis)
        p, q, r, s = y[4 * i : 4 * i + 4]
        x[4 * i] = a * p - b * q - c * r - d * s
        x[4 * i + 1] = a * q + b * p + c * s - d * r
        x[4 * i + 2] = a * r - b * s + c * p + d * q
        x[4 * i + 3] = a * s + b * r - c * q + d * p
    return x


def _hadamard(y: np.ndarray) -> np.ndarray:
    x, start = y.copy(), 0
    while start < len(y):
        size = 1 << (len(y) - start).bit_length() - 1
        block = x[start : start + size]
        stride = 1
        while stride < size:
            for low in range(size):
                if not low & stride:
                    a, b = block[low], block[low + stride]
                    block[low], block[low + stride] = a + b, a - b
            stride *= 2
        block *= np.float32(1 / math.sqrt(size))
        start += size
    signs = [_sign(i) for i in range(len(y))]
    return x * np.array(signs, dtype=np.float32)


def _sign(index: int) -> int:
    h = index + 1
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    h = h ^ h >> 16
    return -1 if h & 1 << 31 else 1
