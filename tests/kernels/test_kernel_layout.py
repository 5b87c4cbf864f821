"""K and V have groups of their own, of any number of widths in any order."""

from __future__ import annotations

import pytest
import torch
from packed_kv.codecs.pages import pack_codes, unpack_codes
from packed_kv.formats import CODES, runs
from packed_kv.kernels.cuda.code_constants import group_constants
from packed_kv.kernels.kernel_layout import PackedVector, kernel_layout
from packed_kv.layout import VectorLayout, pages_of

KEY, VALUE = (4, 3, 3, 2, 4), (3, 2, 2, 4, 4)


def test_runs_of_more_than_two_widths() -> None:
    assert runs((4, 4, 3, 2, 2)) == [(4, 2), (3, 1), (2, 2)]
    assert runs(KEY) == [(4, 1), (3, 2), (2, 1), (4, 1)]


def check(vector: PackedVector, group_bits: tuple[int, ...]) -> None:
    """A group's words follow the words of the groups before it, and so do a section's."""
    assert tuple(group.code.bits for group in vector.groups) == group_bits
    before = [sum(CODES[bits].code_words for bits in group_bits[:i]) for i in range(len(group_bits) + 1)]
    assert [group.word for group in vector.groups] == before[:-1]
    assert [(section.code.bits, section.groups) for section in vector.sections] == runs(group_bits)
    for section in vector.sections:
        assert section.word == before[section.first_group]
        assert section.signed_groups == group_bits[: section.first_group].count(3)
    signed = [group for group in vector.groups if group.code.bits == 3]
    assert [(group.sign_word, group.parity) for group in signed] == [
        (before[-1] + i // 2, i % 2) for i in range(len(signed))
    ]


def test_keys_and_values_have_their_own_groups() -> None:
    layout = kernel_layout(pages_of((VectorLayout(KEY), VectorLayout(VALUE))))
    check(layout.key_vector, KEY)
    check(layout.value_vector, VALUE)
    for group in layout.key_vector.groups:
        assert group.factor == 1 / group.code.unit
    for group in layout.value_vector.groups:
        assert group.factor == group.code.value_gain / group.code.unit
    assert layout.key_vector.words_at == 0
    assert (
        layout.key_vector.half_words_at == 128 * layout.key_vector.words
    )  # K's signs are in whole words: two groups have 3 bits
    assert layout.value_vector.words_at == layout.key_vector.half_words_at
    assert layout.key_vector.scales_at == layout.value_vector.half_words_at + 64  # one group of V has 3 bits
    constants = group_constants(layout)
    assert (constants["KEY_HAS_HALF"], constants["VALUE_HAS_HALF"]) == (0, 1)
    assert [str(constants[f"{name}_GROUPS"]).count("{") for name in ("KEY", "VALUE")] == [5, 5]
    assert constants["KEY_GROUPS"] != constants["VALUE_GROUPS"]


@pytest.mark.parametrize("role", ["key", "value"])
def test_codes_of_more_than_two_widths_are_packed(role: str) -> None:
    vector = VectorLayout(KEY)
    codes = torch.cat([torch.randint(1 << bits, (3, 16, 32), dtype=torch.uint8) for bits in KEY], dim=-1)
    assert torch.equal(unpack_codes(pack_codes(codes, vector, role), vector, role), codes)
