"""Latent rows: values are those of `LatentCodec`, a token's bytes are its row's alone."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.formats import ROPE_BITS
from packed_kv.layout import LANES, ROPE, ROPE_SCALES, ROW_LANES, latent_slot_bytes, row_layout

every_dtype = pytest.mark.parametrize("name", FORMATS)
every_rope = pytest.mark.parametrize("rope_bits", ROPE_BITS)
ROW_BYTES = {"tq4": (400, 352), "turboquant35": (352, 304), "tq3": (336, 288), "turboquant25": (288, 240)}
"""Bytes of a row with RoPE at 16 bits, and at 8."""


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return gaussian(count, 512, seed=seed), gaussian(count, 64, seed=seed + 1).bfloat16()


@every_rope
@pytest.mark.parametrize("name", ROW_BYTES)
def test_sizes(name: str, rope_bits: int) -> None:
    row_bytes = ROW_BYTES[name][ROPE_BITS.index(rope_bits)]
    assert row_layout(FORMATS[name], 512, 64, rope_bits).row_bytes == row_bytes
    assert latent_slot_bytes(FORMATS[name], 512, 64, rope_bits, rows=True) == row_bytes
    whole = FORMATS[name].latent_bytes(512, 64, rope_bits)
    assert latent_slot_bytes(FORMATS[name], 512, 64, rope_bits, rows=False) == whole <= row_bytes < whole + 16


@every_dtype
@every_rope
def test_values_are_those_of_micro_blocks(name: str, rope_bits: int) -> None:
    """Centred, scaled and with outliers that were chosen; in shuffled slots of poisoned pages with gaps."""
    outliers = None
    if count := FORMATS[name].outlier_channels(512):
        outliers = torch.randperm(512, generator=torch.Generator().manual_seed(4))[:count].sort().values
    channels = ChannelCalibration(outliers, mean=gaussian(512, seed=7), scale=gaussian(512, seed=8).mul(0.5).exp())
    rows, blocks = (
        kind(FORMATS[name], 512, 64, channels=channels, rope_bits=rope_bits) for kind in (LatentRowCodec, LatentCodec)
    )
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:50]
    latent, rope = tokens(50)
    found = []
    for codec in (rows, blocks):
        whole = torch.full((3, 2, 32, codec.slot_bytes), 0xFF, dtype=torch.uint8)
        cache = whole[:, 0]
        for part in (slice(0, 20), slice(20, 50)):
            codec.write(cache, slots[part], latent[part], rope[part])
        assert (whole[:, 1] == 0xFF).all()
        before = cache.clone()
        codec.write(cache, torch.full((50,), -1), latent, rope)
        assert torch.equal(cache, before)
        found.append([x[slots] for x in codec.read(cache, torch.arange(6))])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


@every_dtype
@every_rope
def test_a_row_has_all_of_its_token_and_nothing_of_others(name: str, rope_bits: int) -> None:
    codec = LatentRowCodec(FORMATS[name], 512, 64, rope_bits=rope_bits)
    latent, rope = tokens(16)
    written = FORMATS[name].latent_bytes(512, 64, rope_bits)
    cache = torch.full((1, 16, codec.slot_bytes), 0xA5, dtype=torch.uint8)
    codec.write(cache, torch.arange(16), latent, rope)
    assert (cache[..., written:] == 0xA5).all()
    before = cache.clone()
    codec.write(cache, torch.tensor([5]), latent[6:7], rope[6:7])
    assert torch.equal(cache[0, 5], before[0, 6])
    before[0, 5] = cache[0, 5]
    assert torch.equal(cache, before)


def words(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("name", ["tq4", "isoquant4"])
def test_rows_of_4_bits_are_words_of_micro_blocks(name: str) -> None:
    """A lane's words of token n are 4 n2..n0 + t's there, those of its n3 of each group."""
    rows, blocks = (kind(FORMATS[name], 512, 64) for kind in (LatentRowCodec, LatentCodec))
    latent, rope = tokens(16)
    cache = torch.zeros(1, 16, blocks.slot_bytes, dtype=torch.uint8)
    blocks.write(cache, torch.arange(16), latent, rope)
    page, encoded = cache.flatten(), rows.encode(latent, rope)
    codes = words(page[: 16 * 256]).view(8, LANES, 4).transpose(0, 1).reshape(8, 4, 16, 2)  # g, t, group, n3
    ours = words(encoded[:, :256]).view(16, 4, ROW_LANES, 4).transpose(1, 2).reshape(16, ROW_LANES, 16)
    for n in range(16):
        assert torch.equal(ours[n], codes[n % 8, :, :, n // 8])
    halves = words(page[blocks.layout.plane(0, ROPE).offset :]).view(2, 2, LANES, 4)  # group, n3
    ours = words(encoded[:, rows.rows.offset(ROPE) :]).view(16, 2, ROW_LANES, 4)
    for n in range(16):
        assert torch.equal(ours[n], halves[:, n // 8].unflatten(1, (8, ROW_LANES))[:, n % 8])


def test_the_drawing_at_3_bits() -> None:
    """Two groups of a token in a word, four in a sign word; written from the drawing."""
    codec = LatentRowCodec(FORMATS["tq3"], 512, 64)
    latent, rope = tokens(3)
    codes, scales = codec.latent.quantize(latent)
    encoded = codec.encode(latent, rope)
    lanes = words(encoded[:, : 12 * 16]).view(3, 3, ROW_LANES, 4).transpose(1, 2).reshape(3, ROW_LANES, 12)
    for channel in range(512):
        group, d4, d3, t, d0 = channel >> 5, channel >> 4 & 1, channel >> 3 & 1, channel >> 1 & 3, channel & 1
        e3, e2, e1, e0 = group & 1, d4, d3, d0
        m, code = 4 * e2 + 2 * e0 + e1, codes[:, channel].int()
        assert torch.equal(lanes[:, t, group >> 1] >> (4 * m + 2 * e3) & 3, code & 3)
        parity = group >> 1 & 1
        assert torch.equal(lanes[:, t, 8 + (group >> 2)] >> (4 * m + 3 - 2 * parity - e3) & 1, code >> 2)
    assert torch.equal(encoded[:, 192:208], scales)
    halves = words(encoded[:, 208:]).view(torch.float16).view(3, 2, 4, 4, 2)  # group, t, d4 d3, d0
    assert torch.equal(halves.transpose(2, 3).flatten(1), rope.half())


def test_the_drawing_of_rope_at_8_bits() -> None:
    codec = LatentRowCodec(FORMATS["turboquant25"], 512, 64, rope_bits=8)
    latent, rope = tokens(3)
    expected, scales = codec.quantize_rope(rope)
    encoded, at = codec.encode(latent, rope), codec.rows.offset(ROPE)
    for channel in range(64):
        group, d4, d3, t, d0 = channel >> 5, channel >> 4 & 1, channel >> 3 & 1, channel >> 1 & 3, channel & 1
        assert torch.equal(encoded[:, at + 16 * t + 8 * group + 4 * d4 + 2 * d3 + d0], expected[:, channel])
    assert torch.equal(encoded[:, codec.rows.offset(ROPE_SCALES) :], scales)


@pytest.mark.parametrize(("name", "rank", "rope_dim"), [("tq3", 192, 64), ("turboquant35", 128, 64), ("tq4", 512, 32)])
def test_groups_that_do_not_fill_words(name: str, rank: int, rope_dim: int) -> None:
    with pytest.raises(ValueError, match=r"rows need whole words: groups of (latents|RoPE) in pairs"):
        LatentRowCodec(FORMATS[name], rank, rope_dim)
