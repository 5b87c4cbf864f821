"""Heads that are no multiple of 32 channels: stored as heads with zeros behind."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS, get_codec
from packed_kv.formats import stored_dim
from packed_kv.layout import page_layout, ring_slot_bytes
from page_codecs import page_codec

HEADS = 2
every_dtype = pytest.mark.parametrize("name", FORMATS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def channels_of(name: str, head_dim: int, padded: bool) -> dict:
    """Arguments of a codec: outliers or an order, means and scales of 80 channels; `padded`, those of 96."""
    more = 96 - head_dim if padded else 0
    order = torch.stack([torch.randperm(head_dim, generator=torch.Generator().manual_seed(i)) for i in range(HEADS)])
    if FORMATS[name].outlier_bits:
        given = {"outliers": order[:, :32].sort().values}
    else:
        behind = torch.arange(head_dim, head_dim + more).expand(HEADS, -1)
        given = {"channel_order": torch.cat((order, behind), dim=-1)}
    numbers = {"mean": random(HEADS, head_dim), "first_mean": random(HEADS, head_dim, seed=1)}
    given |= {field: torch.nn.functional.pad(x, (0, more)) for field, x in numbers.items()}
    scale = random(HEADS, head_dim, seed=2).exp2()
    return given | {"scale": torch.nn.functional.pad(scale, (0, more), value=1.0)}


@pytest.mark.parametrize(("head_dim", "stored"), [(16, 32), (48, 64), (80, 96), (112, 128), (128, 128), (176, 192)])
@every_dtype
def test_bytes_are_those_of_the_next_multiple_of_32(name: str, head_dim: int, stored: int) -> None:
    fmt = FORMATS[name]
    assert stored_dim(head_dim) == stored
    assert fmt.slot_bytes(head_dim) == fmt.slot_bytes(stored)
    assert page_layout(fmt, head_dim) == page_layout(fmt, stored)
    assert ring_slot_bytes(head_dim) == ring_slot_bytes(stored)
    assert fmt.compression(head_dim) == pytest.approx(fmt.compression(stored) * head_dim / stored)


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
@every_dtype
def test_a_head_of_80_is_one_of_96_with_zeros_behind(name: str, calibrated: bool) -> None:
    given, padded = (channels_of(name, 80, more) if calibrated else {} for more in (False, True))
    ours, whole = get_codec(name, 80, **given), get_codec(name, 96, **padded)
    x, positions = random(50, HEADS, 80, seed=3), torch.arange(50)[:, None] % 7
    x[3, 1, 5], x[4, 0, 6] = float("nan"), float("inf")
    packed = ours.encode(x, positions)
    assert torch.equal(packed, whole.encode(torch.nn.functional.pad(x, (0, 16)), positions))
    assert torch.equal(ours.decode(packed, positions), whole.decode(packed, positions)[..., :80])


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_scores_and_outputs_are_those_of_the_decoded_vectors(name: str) -> None:
    given = channels_of(name, 80, False)
    arguments = {f"key_{field}".replace("outliers", "outlier_channels"): x for field, x in given.items()}
    codec = page_codec(FORMATS[name], 80, **arguments, value_scale=given["scale"])
    key, value = random(2, 32, HEADS, 80, seed=3)
    cache = torch.full((2, HEADS, 16, codec.slot_bytes), 0xFF, dtype=torch.uint8)
    tokens = torch.arange(32)
    codec.write(cache, tokens, key, value, tokens)
    stored_key, stored_value = codec.read(cache, torch.arange(2), tokens)
    query = random(5, HEADS, 4, 80, seed=4)
    scores = torch.einsum("qhgd,hkd->qhgk", codec.rotate_query(query), stored_key)
    output = codec.unrotate_output(torch.einsum("qhgk,hkd->qhgd", scores, stored_value))

    positions = tokens[:, None]
    key = codec.key.decode(codec.key.encode(key, positions), positions)
    value = codec.value.decode(codec.value.encode(value))
    expected = torch.einsum("qhgd,khd->qhgk", query, key)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(output, torch.einsum("qhgk,khd->qhgd", expected, value), rtol=1e-4, atol=1e-2)
