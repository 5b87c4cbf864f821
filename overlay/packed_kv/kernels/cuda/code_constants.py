"""Constants that `codes.cuh` is compiled with."""

from __future__ import annotations

from .. import units
from ..kernel_layout import KernelLayout, PackedVector


def group_constants(layout: KernelLayout) -> dict[str, object]:
    """Return the layout of K and V for `codes.cuh`, as C++ constants; lists are without their outer braces."""
    return {
        "HEAD_DIM": layout.head_dim,
        **_vector_constants("KEY", layout.key_vector),
        **_vector_constants("VALUE", layout.value_vector),
        "MICRO_BLOCK_BYTES": layout.micro_block_bytes,
    }


def _vector_constants(name: str, vector: PackedVector) -> dict[str, object]:
    groups = (
        f"{{{group.code.bits},{group.word},{group.sign_word},{group.parity},{group.factor}f}}"
        for group in vector.groups
    )
    return {
        f"{name}_GROUPS": ",".join(groups),
        f"{name}_WORDS": vector.words,
        f"{name}_CHUNKS": ",".join(map(str, vector.chunks)),
        f"{name}_HAS_HALF": int(vector.has_half),
    }


def decoder_constants() -> dict[str, object]:
    """Return the constants of the decoders of `codes.cuh`."""
    return {
        "TABLE_4_LOW": f"{units.word(units.four_bit_bytes()[:4])}u",
        "TABLE_4_HIGH": f"{units.word(units.four_bit_bytes()[4:])}u",
        "TABLE_3_POSITIVE": f"{units.word(units.three_bit_bytes()[:4])}u",
        "TABLE_3_NEGATIVE": f"{units.word(units.three_bit_bytes()[4:])}u",
        "LOW_5": f"{units.five_bit_low()}u",
        "ZEROS_3": f"{units.twice(units.ZERO_BYTES_3)}u",
        "BASE_2": f"{units.twice(units.two_bit_base())}u",
        "MASK_2": f"{units.twice(units.MASK_2)}u",
    }
