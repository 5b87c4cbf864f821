"""Units of decoded codes: before scaling they are fp16 numbers that need no conversion. For both decode kernels.

    5 bits   256 times a magnitude is an integer below 256, of which the lower four bits are always 8: a byte, as with
             4 bits, but computed from its upper four
    4 bits   128 times a magnitude is an integer below 256, a byte; with a zero byte above it, it is a subnormal number,
             its 2^-24 times; the sign goes into the upper byte
    3 bits   magnitudes have 2 bits behind the leading one (e5m2), so times 2^-11 they are fp16 whose lower byte is 0:
             a byte with the sign in it is all that there is to look up
    2 bits   the larger magnitude is 4 times the smaller, both powers of 2: times 2^-12, one bit of the exponent tells
             them apart

A *unit* (`Code.unit`) is the number that a value of 1 decodes to: the smallest power of 2 that gives all magnitudes
this form. Divide by it to get the value. Sums over V of a group are in the group's unit, which is divided out at the
end. Scores are sums over all groups of K, so these need one unit: queries are multiplied by the ratio of the units.
"""

from __future__ import annotations

import math
import struct

from ..formats import CODES, code_of

LOG2_E = math.log2(math.e)
"""Exponentials are powers of 2 on a GPU."""


def score_unit(group_bits: tuple[int, ...]) -> float:
    """Unit of scores over groups of these bits: the unit of all groups, or one between their units. A group's queries
    are multiplied by this unit over the group's unit: by 8 and 1/8 where groups have 4 and 3 bits, so rotated, scaled
    queries up to 8188 stay finite."""
    exponents = [math.frexp(code_of(bits).unit)[1] - 1 for bits in group_bits]
    return 2.0 ** ((min(exponents) + max(exponents)) // 2)


def four_bit_bytes() -> list[int]:
    """Magnitudes times 128."""
    values = [128 * level for level in CODES[4].magnitudes]
    assert all(value == int(value) < 256 for value in values), values
    return [int(value) for value in values]


def five_bit_low() -> int:
    """The lower half of every byte of a magnitude times 256, in all bytes of a word; the upper half is its index."""
    values = [256 * level for level in CODES[5].magnitudes]
    assert values == [16 * index + 8 for index in range(16)] and CODES[5].unit == 2.0**-16, values
    return word([8] * 4)


ZERO_BYTES_3 = 0x0808
"""Bits of a selector of `prmt`, between two codes: the sign of the table's first byte, which is 0, as a byte."""


def three_bit_bytes() -> list[int]:
    """Upper bytes of fp16, by code: the four magnitudes, and the same with the sign."""
    bits = [_fp16_bits(sign * level * CODES[3].unit) for sign in (1, -1) for level in CODES[3].magnitudes]
    assert all(value & 0xFF == 0 for value in bits) and bits[0] >> 15 == 0, bits
    return [value >> 8 for value in bits]


MAGNITUDE_BIT_2 = 0x0800
"""Bit of an fp16 that is set if a 2-bit code's magnitude is the larger one."""
MASK_2 = 0x8000 | MAGNITUDE_BIT_2
"""Bits of an fp16 that a 2-bit code decides; `two_bit_base` has the other bits."""


def two_bit_base() -> int:
    """Bits of the smaller magnitude as fp16."""
    low, high = (_fp16_bits(level * CODES[2].unit) for level in CODES[2].magnitudes)
    assert high == low | MAGNITUDE_BIT_2 != low, (low, high)
    return low


def word(bytes_: list[int]) -> int:
    """Four bytes as a 32-bit word, the first one lowest."""
    return int.from_bytes(bytes(bytes_), "little")


def twice(half: int) -> int:
    """16 bits for both halves of a 32-bit word."""
    return half * 0x10001


def _fp16_bits(value: float) -> int:
    """Bits of a number that fp16 holds exactly."""
    (bits,) = struct.unpack("<H", struct.pack("<e", value))
    assert struct.unpack("<e", struct.pack("<H", bits))[0] == value, value
    return bits
