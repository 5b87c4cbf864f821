"""THE table of KV-cache dtypes: name -> rotation and bits per channel. Imports no torch.

Everything that names a dtype takes the name from `FORMATS`; everything else in the package knows
rotations, bits and offsets only. `docs/formats.md` says the same on one page.

A vector is one head's K or V of one token: `head_dim` channels, padded with zeros to whole groups, rotated,
then cut into groups of `GROUP_SIZE` channels. A group is `bits` bits a channel plus one scale byte:

    group g:  | 32 codes of `bits` bits = 4 * bits bytes | and, behind all codes, 1 scale byte |
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

FORMAT_VERSION = 3
"""Increment when the meaning of stored bytes changes: pages of two versions are never shared."""

GROUP_SIZE = 32
"""Channels that share one scale byte."""
HEAD_DIM_MULTIPLE = 16
"""A head_dim must be a multiple of this."""

CODES_PER_LANE = 16
"""Codes of one group that one of a warp's 32 lanes holds (layout.py draws how)."""


class Code(NamedTuple):
    """A code width: the values of its codes, and the places of a lane's 16 codes of a group in 32-bit words.

    The top bit of a code is its sign, the rest the index of a magnitude. Bit positions are by code e of the lane and
    linear in the bits of e; code e lies in code word e * code_words // 16.
    """

    bits: int
    magnitudes: tuple[float, ...]
    """Ascending, at most 3/2. They have 4 significant bits (5 with 5-bit codes), so that times its scale a value has 8
    or 9, exact in fp16. An empty tuple: a code is an fp16 number, and its scale is 1 (`NULL_CODE`)."""
    search: tuple[int, int]
    """(above, below): scale bytes tried above and below that of absmax. Wider ranges gain less than 0.2 % of the error,
    as `quality/format_error.py` measures. `above` also makes a second round trip exact: if scale byte b is kept for
    a group, the search on the decoded group starts at b - above or later and finds b again (docs/formats.md)."""
    value_gain: float
    """Factor on V when it is read, to offset the quantizer's shrinkage: a code of least squared error returns vectors
    that are shorter along the original, by its error (docs/lab/formats.md, section 8: 0.6, 2.6 and 10.7 %). Attention
    averages V over tokens: noise averages out, a common factor does not. The writer does not scale V, so that one
    stored vector can serve as K and as V; version 3 introduced this."""
    unit: float
    """The number that kernels decode a value of 1 to, before its scale (kernels/units.py)."""
    code_words: int
    """Words of a lane and group, without sign words: a power of 2."""
    magnitude_shift: tuple[int, ...]
    """Bit position of a code's magnitude in its code word."""
    sign_shift: tuple[int, ...]
    """Bit position of a code's sign in its code word. Empty: signs lie in sign words (`layout.SIGN_WORD_SHIFT`)."""

    @property
    def has_sign_words(self) -> bool:
        return not self.sign_shift

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Between neighbouring magnitudes."""
        return tuple((low + high) / 2 for low, high in pairwise(self.magnitudes))


_E = range(CODES_PER_LANE)
NIBBLES = tuple(e & 4 | (e & 1) << 1 | e >> 1 & 1 for e in _E)
"""Number m of code e in layout.py's drawing: its nibble in a word of 3-bit codes and in sign words."""
_SIGNS_OF_2 = tuple(16 * (e & 1) + 15 - (e >> 1 & 3) - 8 * (e >> 3) for e in _E)

CODES: dict[int, Code] = {
    code.bits: code
    for code in (
        Code(
            bits=5,
            magnitudes=tuple((2 * level + 1) / 32 for level in range(16)),
            search=(6, 0),
            value_gain=1.002,
            unit=2.0**-16,
            code_words=2,
            magnitude_shift=tuple(4 * NIBBLES[e & 7] for e in _E),
            sign_shift=(),
        ),
        Code(
            bits=4,
            magnitudes=(9 / 128, 13 / 64, 11 / 32, 1 / 2, 11 / 16, 7 / 8, 9 / 8, 3 / 2),
            search=(4, 2),
            value_gain=1.005,
            unit=2.0**-17,
            code_words=2,
            magnitude_shift=tuple(4 * (e & 7) for e in _E),
            sign_shift=tuple(8 * (e & 3) + (7 if e & 7 < 4 else 3) for e in _E),
        ),
        Code(
            bits=3,
            magnitudes=(5 / 32, 1 / 2, 7 / 8, 3 / 2),
            search=(2, 4),
            value_gain=1.02,
            unit=2.0**-11,
            code_words=1,
            magnitude_shift=tuple(4 * NIBBLES[e] + 2 * (e >> 3) for e in _E),
            sign_shift=(),
        ),
        Code(
            bits=2,
            magnitudes=(1 / 4, 1.0),
            search=(0, 10),
            value_gain=1.06,
            unit=2.0**-12,
            code_words=1,
            magnitude_shift=tuple(shift - 4 for shift in _SIGNS_OF_2),
            sign_shift=_SIGNS_OF_2,
        ),
    )
}
"""bits -> the code of that width. The only definition; `kernels/triton/fragments.py` and `kernels/cuda/codes.cuh` have
a decoder for each, and docs/formats.md has the numbers."""

NULL_CODE = Code(
    bits=16,
    magnitudes=(),
    search=(0, 0),
    value_gain=1.0,
    unit=1.0,
    code_words=8,
    magnitude_shift=tuple(16 * (e & 1) for e in _E),
    sign_shift=tuple(16 * (e & 1) + 15 for e in _E),
)
"""Not in `CODES`: plain fp16 numbers, which hold bf16 numbers of 2^-14 to 32768 exactly. RoPE channels of latent pages
use it. Tests (`tests/support/null_code.py`) send whole vectors through the same store, gather and attention with it:
paging bugs then show without quantisation errors."""


BYTE_CODE = Code(
    bits=8,
    magnitudes=(),
    search=(0, 0),
    value_gain=1.0,
    unit=2.0**-7,
    code_words=4,
    magnitude_shift=tuple(8 * (e & 3) for e in _E),
    sign_shift=tuple(8 * (e & 3) + 7 for e in _E),
)
"""Not in `CODES`: the ring's code (`codecs/ring.py`), a byte of code + 128. RoPE channels of latent pages may use
it."""
ROPE_BITS = (NULL_CODE.bits, BYTE_CODE.bits)
"""Bits that RoPE channels of latent pages may have, the default first."""


def code_of(bits: int) -> Code:
    """The code of a width; for 16 bits `NULL_CODE`, for 8 bits `BYTE_CODE`."""
    return {NULL_CODE.bits: NULL_CODE, BYTE_CODE.bits: BYTE_CODE}.get(bits) or CODES[bits]


MAX_SCALE_BYTE = 0xF2
"""The largest scale written: fp16 bits `byte << 7` = 40960. Times the largest magnitude, 3/2, it is 61440, so every
decoded value is finite in fp16; bytes above it are never written."""
INPUT_LIMIT = 32768.0
"""Bound of the magnitude of inputs, which are clamped to it, and of means: 2^15."""


def fits_value_dim(head_dim: int, value_dim: int) -> bool:
    """True if a head of V with `value_dim` channels can be stored with K's of `head_dim`."""
    return 0 < value_dim <= head_dim and value_dim % HEAD_DIM_MULTIPLE == 0


def stored_dim(head_dim: int) -> int:
    """Stored channels of a head of `head_dim` channels: whole groups. Raises ValueError if it is not a multiple of
    16."""
    if not isinstance(head_dim, int) or head_dim <= 0 or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim must be a positive multiple of {HEAD_DIM_MULTIPLE}, got {head_dim!r}")
    return -(-head_dim // GROUP_SIZE) * GROUP_SIZE


def runs(group_bits: tuple[int, ...]) -> list[tuple[int, int]]:
    """(bits, number of groups) of each run of groups of equal bits, in order."""
    return [(bits, len(list(groups))) for bits, groups in groupby(group_bits)]


@dataclass(frozen=True)
class Format:
    """One KV-cache dtype.

    `bits` is the width of a regular channel. Where `outlier_bits` is set, a quarter of the stored channels (rounded
    half up to a multiple of 32) are outlier channels of that width; they come first and are rotated among themselves.
    """

    name: str
    rotation: str
    bits: int
    outlier_bits: int | None = None

    def outlier_channels(self, head_dim: int) -> int:
        """Number of outlier channels of a head; 0 for a format without an outlier group."""
        if self.outlier_bits is None:
            return 0
        return (stored_dim(head_dim) // 4 + GROUP_SIZE // 2) // GROUP_SIZE * GROUP_SIZE

    def group_bits(self, head_dim: int) -> tuple[int, ...]:
        """Bits a channel of each 32-channel group, in the order in which groups are packed (outliers first).

        Raises ValueError if `head_dim` is not a positive multiple of 16.
        """
        groups = stored_dim(head_dim) // GROUP_SIZE
        outlier_groups = self.outlier_channels(head_dim) // GROUP_SIZE
        regular_groups = groups - outlier_groups
        return (self.outlier_bits or 0,) * outlier_groups + (self.bits,) * regular_groups

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one packed vector: `4 * bits` bytes of codes and one scale byte a group."""
        return sum(GROUP_SIZE * bits // 8 + 1 for bits in self.group_bits(head_dim))

    def slot_bytes(self, head_dim: int) -> int:
        """Bytes of K and V of one token and one KV head."""
        return 2 * self.vector_bytes(head_dim)

    def latent_bytes(self, rank: int, rope_dim: int, rope_bits: int = ROPE_BITS[0]) -> int:
        """Bytes of one token of latent attention: a vector of `rank` channels, and `rope_dim` channels of RoPE at 16
        bits, or at 8 with a scale byte for 32 of them."""
        scales = rope_dim // GROUP_SIZE if rope_bits == BYTE_CODE.bits else 0
        return self.vector_bytes(rank) + rope_bits * rope_dim // 8 + scales

    def compression(self, head_dim: int) -> float:
        """Bytes of a slot in bf16 over the packed slot's."""
        return 2 * head_dim * 2 / self.slot_bytes(head_dim)


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("isoquant3", rotation="quaternion", bits=3),
        Format("isoquant4", rotation="quaternion", bits=4),
        Format("planarquant3", rotation="givens", bits=3),
        Format("planarquant4", rotation="givens", bits=4),
        Format("turboquant25", rotation="hadamard", bits=2, outlier_bits=3),
        Format("turboquant35", rotation="hadamard", bits=3, outlier_bits=4),
        Format("tq3", rotation="hadamard", bits=3),
        Format("tq4", rotation="hadamard", bits=4),
    )
}
