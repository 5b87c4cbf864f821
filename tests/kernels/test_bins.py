"""The bins of levels hold what the search over all levels finds; here in PyTorch, with the arithmetic of the kernel."""

from __future__ import annotations

import pytest
import torch
from packed_kv.codecs.scalar import decode_scale
from packed_kv.formats import CODES, MAX_SCALE_BYTE
from packed_kv.kernels.bins import BINS, make_bins

WITH_BINS = [bits for bits, code in CODES.items() if make_bins(code.magnitudes).levels]


def numbers(bits: int, step: torch.Tensor) -> torch.Tensor:
    """fp32 [...] from 0 on: next to levels, to thresholds and to edges of bins, far beyond the last, and others."""
    code = CODES[bits]
    special = torch.tensor((*code.magnitudes, *code.thresholds, *(i / 64 for i in range(256)))) * step
    ulps = torch.arange(-3, 4, dtype=torch.int32)
    near = (special.view(torch.int32)[:, None] + ulps).clamp(min=0).view(torch.float32).flatten()
    many = torch.rand(20000, generator=torch.Generator().manual_seed(int(step * 2**20))) * 2 * step
    return torch.cat((near, many, torch.tensor([0.0, 1e-30, 1e-3, 1.0, 1e3, 370727.0])))


def words(table: tuple[int, ...], bin_number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower half of each bin's word, as fp32 and as int32."""
    word = torch.tensor(table, dtype=torch.int32)[bin_number]
    return (word & -0x10000).view(torch.float32), word & 0xFFFF


def test_four_bits_have_bins():
    """Levels of 5 bits are evenly spaced, and need none."""
    assert WITH_BINS == [4]
    assert all(len(make_bins(CODES[bits].magnitudes).levels) == (BINS + 1) * (bits == 4) for bits in CODES)


@pytest.mark.parametrize("bits", WITH_BINS)
@pytest.mark.parametrize("byte", [*range(20), *range(0x70, 0x80), MAX_SCALE_BYTE - 1, MAX_SCALE_BYTE])
def test_the_nearest_level_is_one_of_the_bin(bits, byte):
    code, bins = CODES[bits], make_bins(CODES[bits].magnitudes)
    step = decode_scale(torch.tensor(byte, dtype=torch.uint8))
    x = numbers(bits, step)
    inverse = (bins.magic - step.view(torch.int32)).view(torch.float32) if byte else torch.tensor(float("inf"))
    number = ((x * inverse).nan_to_num(nan=0.0, posinf=1.0).clamp(max=1.0) + 2.0**19).view(torch.int32) & 31
    high, low_bits = words(bins.levels, number)
    low = (low_bits << 16).view(torch.float32)
    nearest = torch.minimum((x - step * low).abs(), (x - step * high).abs())
    of_all = torch.stack([(x - step * level).abs() for level in code.magnitudes]).amin(0)
    assert torch.equal(nearest, of_all)
    threshold, lower = words(bins.thresholds, number)
    index = lower + (x > step * threshold)
    assert torch.equal(index, sum((x > step * threshold).int() for threshold in code.thresholds))
