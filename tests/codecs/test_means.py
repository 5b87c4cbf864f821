"""Means of keys by position: the average over a block of what RoPE makes of the mean before it."""

from __future__ import annotations

import math

import pytest
import torch
from packed_kv import FORMATS, get_codec
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.rope import spectrum_of_blocks
from packed_kv.codecs.transform import ChannelTransform
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import Rope
from page_codecs import page_codec

CPU = torch.device("cpu")
HEADS = 3


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frequencies(pairs: int, theta: float = 10000.0) -> tuple[float, ...]:
    return tuple(theta ** (-pair / pairs) for pair in range(pairs))


def yarn(pairs: int) -> tuple[float, ...]:
    """Slow pairs are slower by a factor of 4, between them a ramp."""
    plain = frequencies(pairs)
    ramp = [min(1.0, max(0.0, (c - pairs / 3) / (pairs / 3))) for c in range(pairs)]
    return tuple(w * (1 - r) + w / 4 * r for w, r in zip(plain, ramp, strict=True))


ROPES = {
    "all": Rope(frequencies(32)),
    "partial": Rope(frequencies(12)),
    "interleaved": Rope(frequencies(32), interleaved=True),
    "interleaved_partial": Rope(frequencies(8), interleaved=True),
    "yarn": Rope(yarn(32)),
    "still_and_fastest": Rope((math.pi, 0.0, 1e-9, 2 * math.pi / MEAN_BLOCK)),
}
every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def turned(key: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """Turn `key` [heads, head_dim] by RoPE to each of the positions: float64 [positions, heads, head_dim]."""
    found = key.double().repeat(len(positions), 1, 1)
    for pair, frequency in enumerate(rope.frequencies):
        n = len(rope.frequencies)
        i, j = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + n)
        angle = (positions.double() * frequency)[:, None]
        first, second = key[:, i].double(), key[:, j].double()
        found[..., i] = first * angle.cos() - second * angle.sin()
        found[..., j] = second * angle.cos() + first * angle.sin()
    return found


@every_rope
def test_a_block_has_the_average_of_its_positions(rope: Rope) -> None:
    key = gaussian(HEADS, 64)
    transform = ChannelTransform(64, 64, ChannelCalibration(mean=key, rope=rope), CPU)
    for block in (0, 1, 7, 511):
        positions = torch.arange(block * MEAN_BLOCK, (block + 1) * MEAN_BLOCK)
        means = transform.means(positions[1:, None])
        assert torch.equal(means, means[:1].expand(MEAN_BLOCK - 1, -1, -1))
        torch.testing.assert_close(means[0], turned(key, rope, positions).mean(0).float(), rtol=0, atol=2e-6)


@every_rope
def test_the_turned_mean_costs_nothing_to_store(rope: Rope) -> None:
    """Keys that are their block's mean code to zeros, and come back."""
    key = gaussian(HEADS, 64)
    codec = get_codec("tq4", 64, mean=key, rope=rope)
    positions = torch.arange(1, 5000, 97)[:, None]
    means = codec.transform.means(positions)
    packed = codec.encode(means, positions)
    assert not packed[..., -2:].any()  # scales
    assert torch.equal(codec.decode(packed, positions), means)


def test_rounding_is_as_it_is_written() -> None:
    """Both factors rounded once to fp32 from float64, products and sum rounded each: kernels write the same bytes."""
    rope, mean, first = ROPES["yarn"], 20 * gaussian(HEADS, 80), gaussian(HEADS, 80, seed=1)
    channels = ChannelCalibration(mean=mean, first_mean=first, rope=rope)
    transform = ChannelTransform(80, 96, channels, CPU, positions=4 * MEAN_BLOCK - 24)
    assert transform.spectrum.shape == (4, 2, 96) and transform.spectrum.dtype == torch.float32
    rows = transform.mean_rows()
    positions = torch.tensor([0, 1, MEAN_BLOCK - 1, MEAN_BLOCK, 4 * MEAN_BLOCK - 25, 10**6])
    for position, found in zip(positions, transform.means(positions[:, None]), strict=True):
        cosine, sine = transform.spectrum[min(int(position) // MEAN_BLOCK, 3)]
        expected = rows[:, 2] if position == 0 else rows[:, 0] * cosine + rows[:, 1] * sine
        assert torch.equal(found, expected)
    assert torch.equal(rows[:, 0, :80], mean) and torch.equal(rows[:, 2, :80], first)
    padding = transform.means(positions[:, None])[..., 80:]
    assert not padding.any() and not rows[..., 80:].any()


def test_tables_are_made_on_the_cpu() -> None:
    """Whatever PyTorch's default device is: a GPU's sines differ."""
    with torch.device("meta"):
        table = spectrum_of_blocks(Rope((0.5, 0.25)), 64, 3)
    assert table.device.type == "cpu" and table.dtype == torch.float32


def test_layers_of_a_rope_share_a_table() -> None:
    means = (gaussian(64, seed=seed) for seed in (0, 1))
    both = (ChannelCalibration(mean=mean, rope=Rope(frequencies(32))) for mean in means)
    one, other = (ChannelTransform(64, 64, channels, CPU, 4096) for channels in both)
    assert one.spectrum is other.spectrum and one.mean_blocks == 4096 // MEAN_BLOCK and one.block_tokens == MEAN_BLOCK
    plain = ChannelTransform(64, 64, ChannelCalibration(mean=gaussian(64)), CPU, positions=4096)
    assert plain.spectrum.tolist() == [[[1.0] * 64, [0.0] * 64]] and plain.block_tokens == 0


def test_a_table_grows_with_the_positions_that_come() -> None:
    channels = ChannelCalibration(mean=gaussian(64), rope=ROPES["all"])
    growing = ChannelTransform(64, 64, channels, CPU)
    bounded = ChannelTransform(64, 64, channels, CPU, positions=100_000)
    for positions in (torch.tensor([3]), torch.tensor([700]), torch.tensor([99_999, 0])):
        assert torch.equal(growing.means(positions), bounded.means(positions))
    assert torch.equal(bounded.means(torch.tensor([10**6])), bounded.means(torch.tensor([99_999])))


def test_position_0_without_a_mean_of_its_own_has_that_of_its_block() -> None:
    transform = ChannelTransform(64, 64, ChannelCalibration(mean=gaussian(64), rope=ROPES["all"]), CPU)
    assert torch.equal(transform.mean_rows()[0, 2], transform.means(torch.tensor(5)))


@pytest.mark.parametrize("name", FORMATS)
def test_whole_keys_have_the_scores_of_decoded_ones(name: str) -> None:
    """Over blocks of positions, in shuffled slots, scaled, in another order, with a first token."""
    fmt, rope = FORMATS[name], ROPES["interleaved_partial"]
    order = torch.stack([torch.randperm(80, generator=torch.Generator().manual_seed(i)) for i in range(HEADS)])
    channels = (
        {"key_outlier_channels": order[:, :32].sort().values} if fmt.outlier_bits else {"key_channel_order": order}
    )
    codec = page_codec(
        fmt, 80, key_mean=9 * gaussian(HEADS, 80), key_scale=gaussian(HEADS, 80, seed=1).exp2(),
        key_first_mean=gaussian(HEADS, 80, seed=2), key_rope=rope, positions=4000, **channels,
    )  # fmt: skip
    positions = torch.cat((torch.arange(24), torch.arange(250, 260), torch.arange(3000, 3014)))
    positions = positions[torch.randperm(48, generator=torch.Generator().manual_seed(3))]
    key = gaussian(48, HEADS, 80, seed=4) + codec.key.transform.means(positions[:, None])[..., :80]
    cache = torch.full((3, HEADS, 16, codec.slot_bytes), 0xFF, dtype=torch.uint8)
    codec.write(cache, torch.arange(48), key, key, positions)
    decoded = codec.key.decode(codec.key.encode(key, positions[:, None]), positions[:, None])
    query = gaussian(5, HEADS, 2, 80, seed=5)
    whole = codec.read(cache, torch.arange(3), positions)[0]
    scores = torch.einsum("qhgd,hkd->qhgk", codec.rotate_query(query), whole)
    expected = torch.einsum("qhgd,khd->qhgk", query, decoded)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (Rope(frequencies(33)), "rope must have 1 to 32 frequencies for heads of 64, got 33"),
        (Rope(()), "rope must have 1 to 32 frequencies for heads of 64, got 0"),
        (Rope((1.0, math.nan)), "a frequency of rope must be from 0 to pi, got nan"),
        (Rope((1.0, -0.1)), "a frequency of rope must be from 0 to pi, got -0.1"),
        (Rope((3.2,)), "a frequency of rope must be from 0 to pi, got 3.2"),
    ],
)
def test_a_rope_that_heads_cannot_have(rope: Rope, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_codec("tq4", 64, mean=[0.0] * 64, rope=rope)
    with pytest.raises(ValueError, match=words):
        spectrum_of_blocks(rope, 64, 1)


def test_a_rope_needs_a_mean_and_positions() -> None:
    with pytest.raises(ValueError, match="without the mean that it turns"):
        get_codec("tq4", 64, rope=ROPES["all"])
    codec = get_codec("tq4", 64, mean=[1.0] * 64, rope=ROPES["all"])
    with pytest.raises(ValueError, match="pass the tokens' positions"):
        codec.encode(gaussian(3, 64))
