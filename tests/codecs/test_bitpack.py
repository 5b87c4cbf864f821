"""Packing of codes: bit-exact, for any width and shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_kv.codecs import bitpack

BITS = range(1, 9)
shapes = st.tuples(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 17)).map(lambda s: (*s[0], 8 * s[1]))


@settings(max_examples=150, deadline=None)
@given(bits=st.sampled_from(BITS), shape=shapes, seed=st.integers(0, 2**31))
def test_round_trip_is_exact_and_has_the_size_of_the_formula(bits, shape, seed):
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = bitpack.pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*shape[:-1], shape[-1] * bits // 8)
    assert torch.equal(bitpack.unpack(packed, bits), codes)


@settings(max_examples=80, deadline=None)
@given(bits=st.sampled_from(BITS), octets=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_bytes_are_a_little_endian_bit_stream(bits, octets, seed):
    codes = torch.randint(0, 1 << bits, (8 * octets,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    stream = sum(code << i * bits for i, code in enumerate(codes.tolist()))
    assert bytes(bitpack.pack(codes, bits).tolist()) == stream.to_bytes(octets * bits, "little")


@pytest.mark.parametrize("bits", BITS, ids="{}bit".format)
def test_extremes(bits):
    full = torch.full((3, 32), (1 << bits) - 1, dtype=torch.uint8)
    assert (bitpack.pack(full, bits) == 255).all()
    assert torch.equal(bitpack.unpack(bitpack.pack(full, bits), bits), full)


@pytest.mark.parametrize(("count", "dtype"), [(7, torch.uint8), (8, torch.float32), (8, torch.int64)])
def test_bad_codes_are_refused(count, dtype):
    codes = torch.zeros(count, dtype=dtype)
    with pytest.raises(ValueError, match=r"expected uint8 .* multiple of 8, got"):
        bitpack.pack(codes, 3)


def test_bad_packed_bytes_are_refused():
    with pytest.raises(ValueError, match=r"multiple of 3, got torch.uint8 \(4,\)"):
        bitpack.unpack(torch.zeros(4, dtype=torch.uint8), 3)
