"""experiments/table_free_codes.py: it finds format version 2's code of 2 bits, with the error that the format has."""

from __future__ import annotations

import pytest
import torch
from packed_kv.codecs import scalar
from packed_kv.formats import CODES
from packed_kv.kernels.units import MAGNITUDE_BIT_2, two_bit_base
from table_free_codes import best, codes, gaussian_groups, of_a_mask, relative_mse


def test_version_2_is_the_best_with_the_code_bit_it_has() -> None:
    place = MAGNITUDE_BIT_2.bit_length() - 1
    found = best((code for code in of_a_mask(1) if code.places == (place,)), gaussian_groups(500, 0))
    assert (found.levels, found.base) == (CODES[2].magnitudes, two_bit_base())


@pytest.mark.parametrize("bits", [3, 2])
def test_the_best_of_all_scales_is_a_little_better_than_the_format(bits: int) -> None:
    x = gaussian_groups(1000, 0)
    decoded = scalar.dequantize(*scalar.quantize(x, bits), bits)
    error = float((decoded - x).square().sum() / x.square().sum())
    assert 0.98 * error < relative_mse(x, CODES[bits].magnitudes) <= error * (1 + 1e-6)


def test_magnitudes_of_a_product() -> None:
    """Places 8 and 9 are steps of 1/4; from 1 on, the least would be 0."""
    assert not [*codes((8, 9), range(0x3C00, 0x3C01), True)]
    (code,) = codes((8, 9), range(0x3C80, 0x3C81), True)
    x = torch.tensor([1.125, 1.375, 1.625, 1.875]).double()
    assert code.levels == tuple(((x * x - x) / (x[-1] * x[-1] - x[-1])).tolist())
