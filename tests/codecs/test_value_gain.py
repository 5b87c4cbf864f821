"""V is stored as K is, and read times its gain."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS, get_codec
from packed_kv.formats import CODES, GROUP_SIZE


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_stored_as_keys_and_read_times_their_gain(name):
    """By the bits of the group, before the rotation is undone."""
    key, value = (get_codec(name, 128, role=role) for role in ("key", "value"))
    x = torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))
    packed = key.encode(x)
    assert torch.equal(packed, value.encode(x))
    of_key, of_value = (codec.dequantize(*codec.unpack(packed)) for codec in (key, value))
    for group, bits in enumerate(value.group_bits):
        channels = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        gained = of_key[:, channels] * CODES[bits].value_gain
        torch.testing.assert_close(of_value[:, channels], gained, rtol=2e-7, atol=0)
    assert not torch.equal(of_key, of_value)
