"""Pages of latent attention: what LatentCodec writes, reads and folds."""

from __future__ import annotations

import pytest
import torch
from packed_kv import FORMATS
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs import ring
from packed_kv.codecs.latent import LatentCodec
from packed_kv.formats import ROPE_BITS
from packed_kv.layout import ROPE, ROPE_SCALES, latent_layout

every_dtype = pytest.mark.parametrize("name", FORMATS)
SLOT_BYTES = {"tq4": (400, 338), "tq3": (336, 274), "turboquant35": (352, 290), "turboquant25": (288, 226)}
"""Bytes of a slot with RoPE at 16 bits, and at 8."""
every_rope = pytest.mark.parametrize("rope_bits", ROPE_BITS)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def centred(name: str, rank: int = 512) -> LatentCodec:
    channels = ChannelCalibration(mean=gaussian(rank, seed=7), scale=gaussian(rank, seed=8).mul(0.5).exp())
    return LatentCodec(FORMATS[name], rank, 64, channels=channels)


@every_dtype
@pytest.mark.parametrize(
    ("rank", "rope_dim", "rope_bits"), [(512, 64, 16), (256, 32, 16), (96, 64, 16), (512, 64, 8), (96, 32, 8)]
)
def test_tokens_come_back_from_shuffled_slots_of_poisoned_pages(name, rank, rope_dim, rope_bits):
    codec = LatentCodec(FORMATS[name], rank, rope_dim, rope_bits=rope_bits)
    cache = torch.full((3, 32, codec.slot_bytes), 0xFF, dtype=torch.uint8)
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:50]
    latent, rope = gaussian(50, rank), gaussian(50, rope_dim, seed=1).bfloat16()
    for part in (slice(0, 20), slice(20, 50)):  # the second finds words that the first has written
        codec.write(cache, slots[part], latent[part], rope[part])
    before = cache.clone()
    codec.write(cache, torch.full((50,), -1), latent, rope)
    assert torch.equal(cache, before)
    stored, stored_rope = codec.read(cache, torch.arange(6))
    assert torch.equal(stored[slots], codec.latent.dequantize(*codec.latent.quantize(latent)))
    expected = rope.float() if rope_bits == 16 else ring.round_trip(rope.float())
    assert torch.equal(stored_rope[slots], expected)


@every_rope
@pytest.mark.parametrize("name", SLOT_BYTES)
def test_sizes(name, rope_bits):
    slot_bytes = SLOT_BYTES[name][ROPE_BITS.index(rope_bits)]
    assert FORMATS[name].latent_bytes(512, 64, rope_bits) == slot_bytes
    assert latent_layout(FORMATS[name], 512, 64, rope_bits).micro_block_bytes == 16 * slot_bytes


def test_the_drawing():
    """Token 10 of a micro-block: n = 1010, so lane 8 + (d2 d1) and the upper half of a lane's codes."""
    codec = LatentCodec(FORMATS["tq4"], 64, 32)
    cache = torch.zeros(1, 16, codec.slot_bytes, dtype=torch.uint8)
    rope = torch.arange(1, 33).float()
    latent = gaussian(1, 64)
    codec.write(cache, torch.tensor([10]), latent, rope[None])
    page = cache.flatten()
    plane = codec.layout.plane(0, ROPE)
    assert plane.offset == 16 * (32 + 2)
    halves = page[plane.offset : plane.offset + plane.bytes].view(torch.float16)
    for channel in range(32):
        d4, d3, t, d0 = channel >> 4, channel >> 3 & 1, channel >> 1 & 3, channel & 1
        code = 8 + 4 * d4 + 2 * d3 + d0
        word, lane = code >> 1, 4 * 2 + t
        assert halves[2 * (word // 4 * 128 + lane * 4 + word % 4) + code % 2] == channel + 1
    assert (halves != 0).sum() == 32
    scales = codec.layout.plane(0, "scales")
    assert plane.offset + plane.bytes == len(page)
    kept = page[scales.offset : plane.offset].view(8, 2, 2)  # [n2 n1 n0][group][n3]
    assert torch.equal(kept[2, :, 1], codec.latent.quantize(latent)[1][0])


def test_the_drawing_of_rope_at_8_bits():
    """Token 10, as above: two groups, whose scales stand side by side."""
    codec = LatentCodec(FORMATS["tq4"], 64, 64, rope_bits=8)
    cache = torch.zeros(1, 16, codec.slot_bytes, dtype=torch.uint8)
    rope = torch.cat((torch.arange(1, 33), torch.arange(-32, 0) / 100))
    codec.write(cache, torch.tensor([10]), gaussian(1, 64), rope[None])
    page, codes, scales = cache.flatten(), codec.layout.plane(0, ROPE), codec.layout.plane(0, ROPE_SCALES)
    assert (codes.offset, scales.offset, len(page)) == (16 * 34, 16 * (34 + 64), 16 * (34 + 66))
    expected, steps = ring.quantize(rope)
    for channel in range(64):
        group, d4, d3, t, d0 = channel >> 5, channel >> 4 & 1, channel >> 3 & 1, channel >> 1 & 3, channel & 1
        code = 8 + 4 * d4 + 2 * d3 + d0
        byte = codes.offset + group * 512 + (4 * 2 + t) * 16 + code
        assert int(page[byte]) - 128 == expected[channel]
    assert torch.equal(page[scales.offset :].view(8, 2, 2)[2, :, 1], steps)


@every_rope
def test_rope_channels_that_are_no_numbers(rope_bits):
    codec = LatentCodec(FORMATS["tq4"], 64, 32, rope_bits=rope_bits)
    cache = torch.zeros(1, 16, codec.slot_bytes, dtype=torch.uint8)
    rope = torch.zeros(1, 32)
    rope[0, :4] = torch.tensor([float("nan"), float("inf"), 1e6, -1e6])
    codec.write(cache, torch.tensor([0]), gaussian(1, 64), rope)
    found = codec.read(cache, torch.tensor([0]))[1][0, :4]
    assert found.tolist() == pytest.approx([0.0, 0.0, 32768.0, -32768.0], rel=1 / 127)


@every_dtype
def test_folded_weights_take_stored_latents(name):
    """Scores but for a constant of each query, and outputs with the constant, as those over whole latents."""
    codec = centred(name)
    latent, query = gaussian(40, 512, seed=1), gaussian(3, 5, 32, seed=2)
    key_up, value_up = gaussian(3, 32, 512, seed=3), gaussian(3, 512, 32, seed=4)
    folded = codec.fold(key_up, value_up)
    folded_key, folded_value = folded[:, :32], folded[:, 32:].transpose(1, 2)
    stored = codec.latent.prepare(latent)  # not quantised, so without V's gain
    scores = torch.einsum("hqp,hpl,tl->hqt", query, key_up, latent)
    difference = scores - torch.einsum("hqp,hpl,tl->hqt", query, folded_key, stored)
    assert (difference - difference[..., :1]).abs().max() < 1e-5 * scores.abs().max()
    mean = codec.stored_mean()
    assert torch.allclose(difference[..., 0], torch.einsum("hqp,hpl,l->hq", query, folded_key, mean), atol=2e-3)
    whole = torch.einsum("hdl,tl->htd", folded, stored) + codec.lacking(folded, 32)[:, None]
    assert torch.allclose(whole[..., :32], torch.einsum("hpl,tl->htp", key_up, latent), atol=1e-3)
    weights = (scores / 100).softmax(-1)
    wanted = torch.einsum("hqt,tl,hlv->hqv", weights, latent, value_up)
    sums = torch.einsum("hqt,tl->hql", weights, stored / codec.value_gain()) + codec.output_constant()
    assert torch.allclose(torch.einsum("hql,hlv->hqv", sums, folded_value), wanted, atol=1e-5 * 100)


def test_folding_allocates():
    """vLLM's absorbed weights are views of kv_b_proj."""
    codec = LatentCodec(FORMATS["turboquant25"], 64, 32)
    whole = gaussian(64, 2, 48)
    key_up, value_up = whole[..., :32].permute(1, 2, 0), whole[..., 32:].transpose(0, 1)
    before = whole.clone()
    folded = codec.fold(key_up, value_up)
    assert folded.shape == (2, 48, 64) and codec.lacking(folded, 32) is None
    assert torch.equal(whole, before)


@pytest.mark.parametrize(("rank", "rope_dim"), [(500, 64), (512, 16), (512, 0)])
def test_sizes_that_cannot_be(rank, rope_dim):
    with pytest.raises(ValueError, match="multiple of 32"):
        LatentCodec(FORMATS["tq4"], rank, rope_dim)
    with pytest.raises(ValueError, match="16 or 8 bits, got 4"):
        LatentCodec(FORMATS["tq4"], 512, 64, rope_bits=4)
