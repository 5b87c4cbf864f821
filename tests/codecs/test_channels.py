"""Outlier channels of a head, and the order in which codecs pack the others."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS, get_codec

WITH_OUTLIERS = [name for name, fmt in FORMATS.items() if fmt.outlier_bits]
WITHOUT_OUTLIERS = [name for name in FORMATS if name not in WITH_OUTLIERS]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# --- outliers ---


@pytest.mark.parametrize("name", WITH_OUTLIERS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids="d{}".format)
def test_outliers_are_the_first_channels_by_default(name, head_dim):
    count = FORMATS[name].outlier_channels(head_dim)
    x = gaussian(20, head_dim)
    assert torch.equal(
        get_codec(name, head_dim).encode(x), get_codec(name, head_dim, outliers=list(range(count))).encode(x)
    )


@pytest.mark.parametrize("name", WITH_OUTLIERS)
def test_outlier_channels_get_the_wider_code(name):
    chosen = torch.randperm(128, generator=torch.Generator().manual_seed(3))[:32].sort().values
    x = gaussian(2000, 128)
    codec = get_codec(name, 128, outliers=chosen)
    error = (codec.decode(codec.encode(x)) - x).square().mean(0)
    regular = torch.ones(128, dtype=torch.bool).index_fill_(0, chosen, False)
    assert error[chosen].mean() < 0.5 * error[regular].mean()
    shuffled = torch.cat((chosen, regular.nonzero().flatten()))
    assert torch.equal(codec.encode(x), get_codec(name, 128).encode(x[:, shuffled]))


@pytest.mark.parametrize("name", WITH_OUTLIERS)
def test_outliers_per_head(name):
    heads = torch.stack([torch.arange(start, start + 32) for start in (0, 96, 17)])
    x = gaussian(7, 3, 128)
    together = get_codec(name, 128, outliers=heads)
    for head, outliers in enumerate(heads.tolist()):
        alone = get_codec(name, 128, outliers=outliers)
        packed = together.encode(x)
        assert torch.equal(packed[:, head], alone.encode(x[:, head]))
        assert torch.equal(together.decode(packed)[:, head], alone.decode(packed[:, head]))
        assert torch.allclose(together.rotate(x)[:, head], alone.rotate(x[:, head]))


BAD_OUTLIERS = {
    "too few": list(range(31)),
    "too many": list(range(33)),
    "empty": [],
    "scalar": 5,
    "three dimensions": torch.arange(32).view(1, 1, 32),
    "no heads": torch.zeros(0, 32, dtype=torch.int64),
    "ragged": [[1, 2], [3]],
    "text": "first",
    "fractions": torch.arange(32) + 0.5,
    "a mask": torch.ones(32, dtype=torch.bool),
    "descending": list(range(31, -1, -1)),
    "repeated": [0, 0, *range(2, 32)],
    "negative": [-1, *range(31)],
    "too large": list(range(97, 129)),
    "one bad head": [list(range(32)), [*range(31), 128]],
}


@pytest.mark.parametrize("name", WITH_OUTLIERS)
@pytest.mark.parametrize("outliers", BAD_OUTLIERS.values(), ids=BAD_OUTLIERS)
def test_bad_outliers_are_refused(name, outliers):
    with pytest.raises(ValueError, match=r"outliers .*got"):
        get_codec(name, 128, outliers=outliers)


@pytest.mark.parametrize("name", WITHOUT_OUTLIERS)
def test_outliers_of_a_format_without_them_are_refused(name):
    with pytest.raises(ValueError, match="has no outlier channels"):
        get_codec(name, 128, outliers=list(range(32)))


# --- channel orders ---


def shuffled_heads(heads: int, head_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(head_dim, generator=generator) for _ in range(heads)])


@pytest.mark.parametrize("name", WITHOUT_OUTLIERS)
def test_channels_are_packed_in_the_given_order(name):
    orders, x = shuffled_heads(3, 96), gaussian(7, 3, 96)
    together, plain = get_codec(name, 96, channel_order=orders), get_codec(name, 96)
    packed = together.encode(x)
    assert torch.equal(packed, plain.encode(x.gather(-1, orders.expand(x.shape))))
    assert torch.equal(together.decode(packed).gather(-1, orders.expand(x.shape)), plain.decode(packed))
    for head, order in enumerate(orders.tolist()):
        assert torch.equal(get_codec(name, 96, channel_order=order).encode(x[:, head]), packed[:, head])


def test_an_order_by_size_gives_small_channels_scales_of_their_own():
    large = torch.arange(128) % 4 == 0
    x = gaussian(500, 128) * torch.where(large, 50.0, 1.0)
    codecs = [get_codec("isoquant4", 128, channel_order=order) for order in (None, x.std(0).argsort())]
    plain, ordered = ((codec.decode(codec.encode(x)) - x)[:, ~large].square().mean() for codec in codecs)
    assert ordered < plain / 100


BAD_ORDERS = {
    "too few": list(range(127)),
    "scalar": 5,
    "fractions": torch.arange(128) + 0.5,
    "repeated": [0, *range(127)],
    "too large": list(range(1, 129)),
    "one bad head": [list(range(128)), [0, *range(127)]],
}


@pytest.mark.parametrize("name", WITHOUT_OUTLIERS)
@pytest.mark.parametrize("order", BAD_ORDERS.values(), ids=BAD_ORDERS)
def test_bad_channel_orders_are_refused(name, order):
    with pytest.raises(ValueError, match=r"channel_order .*got"):
        get_codec(name, 128, channel_order=order)


@pytest.mark.parametrize("name", WITH_OUTLIERS)
def test_an_order_for_a_format_with_outliers_is_refused(name):
    with pytest.raises(ValueError, match="pass them as outliers"):
        get_codec(name, 128, channel_order=list(range(128)))


@pytest.mark.parametrize("name", WITH_OUTLIERS)
@pytest.mark.parametrize("shape", [(128,), (5, 128), (2, 1, 128)], ids=str)
def test_vectors_must_have_the_heads_of_the_outliers(name, shape):
    codec = get_codec(name, 128, outliers=torch.arange(32).repeat(2, 1))
    with pytest.raises(ValueError, match=r"for 2 heads; expected \[..., 2, 128\], got"):
        codec.encode(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"for 2 heads; expected .*got"):
        codec.decode(torch.zeros((*shape[:-1], codec.vector_bytes), dtype=torch.uint8))
