"""llama.cpp's codes, number by number as its definitions have them."""

from __future__ import annotations

import math

import llama_codes
import numpy
import pytest
import torch
import trellis_code
from torch.testing import assert_close

CODES = list(llama_codes.BITS)


def by_definition(code: str, block: list[float]) -> list[float]:
    """32 numbers, coded and decoded in fp32 by loops."""
    numbers = [numpy.float32(x) for x in block]
    largest = max(numbers, key=abs)
    if code == "q8_0":
        step = numpy.float32(abs(largest) / numpy.float32(127))
    else:
        step = numpy.float32(largest / numpy.float32({"q5_0": -16, "q4_0": -8}[code]))
    inverse = numpy.float32(1) / step if step else numpy.float32(0)
    stored = numpy.float32(numpy.float16(step))
    found = []
    for x in numbers:
        scaled = float(numpy.float32(x * inverse))
        if code == "q8_0":
            integer = math.copysign(math.floor(abs(scaled) + 0.5), scaled)
        else:
            offset, most = {"q5_0": (16, 31), "q4_0": (8, 15)}[code]
            integer = min(most, int(numpy.float32(scaled + offset + 0.5))) - offset
        found.append(float(numpy.float32(integer) * stored))
    return found


@pytest.mark.parametrize("code", CODES)
def test_each_number_is_that_of_the_definition(code: str) -> None:
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)) * 10 ** torch.arange(-2.0, 3)[:, None]
    x[0, 0, :32] = 0
    blocks = torch.tensor([by_definition(code, block) for block in x.view(-1, 32).tolist()])
    assert torch.equal(llama_codes.read_back(code, x), blocks.view(x.shape))


@pytest.mark.parametrize(("code", "lowest"), [("q5_0", -15 / 16), ("q4_0", -7 / 8)])
def test_the_number_of_largest_magnitude_is_met_and_its_opposite_is_not(code: str, lowest: float) -> None:
    block = torch.zeros(32)
    block[3], block[4] = 1, -1
    found = llama_codes.read_back(code, block)
    assert found[[3, 4]].tolist() == [1, lowest] and not found[5:].any()


def test_a_spike_is_spread_over_64_channels_and_met() -> None:
    """Rotated, 8 in one channel is 1 or -1 in all 64, of which q4_0 stores all but the sign that is not its first."""
    spike = torch.zeros(1, 1, 128)
    spike[0, 0, 64] = 8.0  # the first of its 64 channels: all are 1, and a block's d is -1/8
    key, value = llama_codes.read_back_pair("q4_0_rotated", spike, -spike)
    assert_close(key, spike, rtol=0, atol=1e-6)
    assert_close(value, -spike, rtol=0, atol=1e-6)
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1))
    x[..., 5] += 30  # such a channel costs its neighbours their bits, unless it is spread
    plain, spread = (llama_codes.read_back_pair(code, x, x) for code in ("q4_0", "q4_0_rotated"))
    for without, rotated in zip(plain, spread, strict=True):
        assert torch.equal(without, llama_codes.read_back("q4_0", x))
        assert (rotated - x).square().sum() < 0.8 * (without - x).square().sum()


def test_interleaved_halves_of_k_share_blocks() -> None:
    """Channels 0 to 15 and 32 to 47 of a head of 64 are a block, so 100 in channel 40 takes 1 from channel 3 only."""
    x = torch.zeros(1, 1, 64)
    x[..., 40], x[..., [3, 20]] = 100, 1
    key, value = llama_codes.read_back_pair("q4_0_interleaved", x, x)
    assert key[0, 0, [40, 3, 20]].tolist() == [100, 0, 1] and key.count_nonzero() == 2
    assert torch.equal(value, llama_codes.read_back("q4_0", x)) and value[0, 0, [40, 3, 20]].tolist() == [100, 1, 1]


def test_trellis_of_values_has_its_gain() -> None:
    x = torch.randn(50, 1, 64, generator=torch.Generator().manual_seed(1))
    for code, channels in llama_codes.TRELLIS.items():
        key, value = llama_codes.read_back_pair(code, x, x)
        assert torch.equal(key, trellis_code.read_back(x, channels))
        assert_close(value, key * trellis_code.value_gain(50))


def test_bytes() -> None:
    found = {code: [llama_codes.bytes_of(code, channels) for channels in (64, 128)] for code in llama_codes.CODES}
    assert [found[code] for code in CODES] == [[68, 136], [44, 88], [36, 72]]
    assert all(found[code] == found[plain] for code, plain in (llama_codes.ROTATED | llama_codes.INTERLEAVED).items())
    assert found["turbo2_tcq"] == [36, 36] and found["turbo2_tcq_64"] == [19, 38]
