"""V is coded a little longer than it is, which its code makes up for."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS, get_codec
from packed_kv.codecs import scalar
from packed_kv.formats import CODES, GROUP_SIZE


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_coded_times_their_gain(name):
    """Behind the rotation, and by the bits of the group: so much longer comes back of V than of K."""
    key, value = (get_codec(name, 128, role=role) for role in ("key", "value"))
    x = torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))
    rotated = key.prepare(x)
    assert torch.equal(rotated, value.prepare(x))
    codes, scales = value.quantize(x)
    lengths = [rotated.mul(codec.dequantize(*codec.quantize(x))).unflatten(-1, (4, -1)) for codec in (key, value)]
    for group, bits in enumerate(value.group_bits):
        channels = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        expected = scalar.quantize(rotated[:, channels] * CODES[bits].value_gain, bits)
        assert torch.equal(codes[:, channels], expected[0]) and torch.equal(scales[:, group], expected[1])
        ratio = lengths[1][:, group].sum() / lengths[0][:, group].sum()
        assert float(ratio) == pytest.approx(CODES[bits].value_gain, abs=2e-3)
