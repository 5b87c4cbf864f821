"""The kernels of sparse attention against their references: latent rows stored and gathered, picks split and merged."""

from __future__ import annotations

import pytest
import torch
from launchers import gather_rows, run, store_latents
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.triton.sparse_picks import MergePicksLaunch, PickSinksLaunch, SplitPicksLaunch
from packed_kv.reference.sparse_latents import attend_picks, gather_tokens, merge, share_with_sinks, split_picks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [*((name, 16) for name in FORMATS), ("tq4", 8), ("tq3", 8), ("turboquant25", 8), ("turboquant35", 8)]
BLOCK_SIZE = 64


def codec_of(name: str, rope_bits: int) -> LatentRowCodec:
    """Centred, scaled and, where it has outliers, with some that were chosen."""
    random, fmt = torch.Generator().manual_seed(0), FORMATS[name]
    mean, scale = torch.randn(2, 512, generator=random)
    outliers = None
    if count := fmt.outlier_channels(512):
        outliers = torch.randperm(512, generator=random)[:count].sort().values
    channels = ChannelCalibration(outliers, mean=mean, scale=(0.3 * scale).exp())
    return LatentRowCodec(fmt, 512, 64, DEVICE, channels, rope_bits)


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    latent, rope = (torch.randn(count, n, generator=random).to(DEVICE, torch.bfloat16) for n in (512, 64))
    return latent, rope * 3


def poisoned(codec: LatentRowCodec, blocks: int) -> torch.Tensor:
    """Blocks with index pages of 132 bytes a token between them."""
    a_block = BLOCK_SIZE * codec.slot_bytes
    whole = torch.full((blocks, a_block + BLOCK_SIZE * 132 + 128), 0xFF, dtype=torch.uint8, device=DEVICE)
    return whole[:, :a_block].unflatten(1, (BLOCK_SIZE, codec.slot_bytes))


@pytest.mark.parametrize(("name", "rope_bits"), KINDS)
def test_stored_bytes_equal_the_codecs(name: str, rope_bits: int) -> None:
    """Padding and neighbours stay as they are; padded slots store nothing."""
    codec = codec_of(name, rope_bits)
    latent, rope = tokens(12)
    latent[3, :5], latent[4, 0], rope[3, 1], rope[5, 2] = float("nan"), float("inf"), float("-inf"), float("nan")
    rope[0], rope[1, :2], rope[6] = 0, 1e6, rope[6] * 1e-6
    slots = torch.randperm(2 * BLOCK_SIZE, generator=torch.Generator().manual_seed(2))[:10]
    slots[2] = -1
    slots = slots.to(DEVICE)
    expected, ours = poisoned(codec, 2), poisoned(codec, 2)
    for part in (slice(0, 6), slice(6, 10)):
        codec.write(expected, slots[part], latent[part], rope[part])
        store_latents(codec, ours, slots[part], latent[part], rope[part])
    assert torch.equal(ours, expected)


def filled(codec: LatentRowCodec) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with requests of 150 and 70 tokens in shuffled blocks, and the block table."""
    cache = poisoned(codec, 7)
    table = torch.tensor([[6, 2, 4], [1, 5, 1000]], dtype=torch.int32)
    for i, seq_len in enumerate((150, 70)):
        at = torch.arange(seq_len)
        slots = table[i, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        codec.write(cache, slots.to(DEVICE), *tokens(seq_len, seed=i + 1))
    return cache, table.to(DEVICE)


@pytest.mark.parametrize(("name", "rope_bits"), KINDS)
def test_gathered_rows_equal_the_pages(name: str, rope_bits: int) -> None:
    """Picks in any order, twice, none among them, and none at all."""
    codec = codec_of(name, rope_bits)
    cache, table = filled(codec)
    positions = torch.tensor(
        [[149, 0, -1, 63, 64, 149, 17, 128, 3], [-1] * 9, [69, -1, 1, 2, 68, -1, 0, 64, -1]], dtype=torch.int32
    ).to(DEVICE)
    requests = torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE)
    rows = torch.full((28, 576), float("nan"), dtype=torch.float16, device=DEVICE)
    gather_rows(codec, cache, table, requests, positions.flatten(), rows[:27])
    expected = gather_tokens(codec, cache, table, requests.repeat_interleave(9), positions.flatten())
    assert torch.equal(rows[:27], expected.half()) and rows[27].isnan().all()
    assert (rows[:27][positions.flatten() < 0] == 0).all()
    in_bf16 = torch.empty(27, 576, dtype=torch.bfloat16, device=DEVICE)
    gather_rows(codec, cache, table, requests, positions.flatten(), in_bf16)
    error = (in_bf16.float() - expected).abs() / expected.abs().clamp(min=1e-6)
    assert error.max() <= (2**-8 if DEVICE == "cuda" else 2**-7)  # the interpreter truncates


@pytest.mark.parametrize("count", [24, 64, 130])
def test_picks_are_split(count: int) -> None:
    random = torch.Generator().manual_seed(1)
    picks = torch.stack([torch.randperm(200, generator=random)[:count] for _ in range(7)]).to(torch.int32)
    picks[1, 5:], picks[2], picks[3, ::3] = -1, -1, -1
    first_own = torch.tensor([0, 100, 100, 50, 200, 199, 1], dtype=torch.int32)
    stored_offset, own_offset = torch.arange(7, dtype=torch.int32) * 1000, 17 - first_own
    picks, first_own, *offsets = (x.to(DEVICE) for x in (picks, first_own, stored_offset, own_offset))
    stored, own = (torch.full((9, count), 7777, dtype=torch.int32, device=DEVICE) for _ in range(2))
    counts = [torch.full((9,), 7777, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    step = SplitPicksLaunch.step(7, stored, counts[0], own, counts[1])
    run(SplitPicksLaunch(count), step, picks, first_own, *offsets)
    for ours, number, expected in zip(
        (stored, own), counts, split_picks(picks, first_own, *offsets), strict=True
    ):  # fmt: skip
        assert torch.equal(ours[:7], expected) and (ours[7:] == 7777).all()
        assert torch.equal(number[:7], (expected >= 0).sum(1).clamp(min=1).to(torch.int32))
        assert (number[7:] == 7777).all()
    assert torch.equal((stored[:7] >= 0).sum(1) + (own[:7] >= 0).sum(1), (picks >= 0).sum(1))


@pytest.mark.parametrize("has_stored", [True, False])
@pytest.mark.parametrize("has_constant", [True, False])
def test_kinds_are_merged(has_stored: bool, has_constant: bool) -> None:
    """Padded heads and what kernels leave of tokens without picks are NaN."""
    random = torch.Generator().manual_seed(3)
    heads, padded, rank = 3, 8, 512
    parts = torch.full((2, 6, padded, rank), float("nan"))
    lse = torch.full((2, 6, padded), float("nan"))
    parts[:, :, :heads] = torch.randn(2, 6, heads, rank, generator=random)
    lse[:, :, :heads] = 5 * torch.randn(2, 6, heads, generator=random)
    counts = torch.tensor([[4, 0, 9, 0, 1, 2], [1, 3, 0, 0, 5, 7]])
    picks = torch.where(counts > 0, 5, -1).to(torch.int32)[..., None].repeat(1, 1, 4)
    parts[counts == 0], lse[counts == 0] = float("nan"), float("inf")
    gain, constant = 1 + torch.rand(rank, generator=random), torch.randn(rank, generator=random)
    parts, lse, counts, picks, gain, constant = (x.to(DEVICE) for x in (parts, lse, counts, picks, gain, constant))
    clean = [
        (torch.where(counts[i][:, None, None] > 0, parts[i, :, :heads], 0.0),
         torch.where(counts[i][:, None] > 0, lse[i, :, :heads], float("-inf")))
        for i in range(2)
    ]  # fmt: skip
    expected = merge(clean[0] if has_stored else None, clean[1], gain, constant if has_constant else None)
    output = torch.full((6, heads, rank), float("nan"), device=DEVICE)
    launch = MergePicksLaunch(
        1 / gain, constant if has_constant else None, heads, padded, has_stored=has_stored, has_lse=has_constant
    )
    whole = torch.full((6, heads), float("nan"), device=DEVICE)
    step = MergePicksLaunch.step(6, heads, (lse[0], picks[0]), (lse[1], picks[1]))
    run(launch, step, output, parts[0] if has_stored else parts[1], parts[1], whole)
    assert torch.allclose(output, expected, atol=1e-5)
    assert torch.equal(output[3], torch.zeros_like(output[3]) + (constant if has_constant else 0))
    of_both = torch.logaddexp(clean[0][1], clean[1][1]) if has_stored else clean[1][1]
    assert torch.allclose(whole, of_both, atol=1e-5) if has_constant else whole.isnan().all()


@pytest.mark.parametrize("has_mean", [True, False])
def test_sinks_share_the_weights(has_mean: bool) -> None:
    """Against one softmax over keys and sinks. A row without keys is 0 where its head has a sink."""
    random = torch.Generator().manual_seed(6)
    tokens, heads, rank, scale = 5, 3, 512, 0.07
    keys, values = torch.randn(2, 40, rank, generator=random)
    query = torch.randn(tokens, heads, 2 * rank, generator=random)[..., :rank]
    mean, sinks = torch.randn(rank, generator=random), torch.tensor([-float("inf"), 2.0, 7.0])
    scores = query @ keys.T * scale
    true = scores + (query @ mean * scale)[..., None] if has_mean else scores
    expected = torch.cat((true, sinks[:, None].expand(tokens, heads, 1)), dim=-1).softmax(-1)[..., :-1] @ values
    output, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    output[4], lse[4], expected[4] = 1, float("-inf"), torch.tensor([1.0, 0, 0])[:, None]
    query, mean, sinks, output, lse, expected = (x.to(DEVICE) for x in (query, mean, sinks, output, lse, expected))
    reference = share_with_sinks(output, lse, sinks, query @ mean * scale if has_mean else None)
    assert torch.allclose(reference, expected, atol=1e-5)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        of_dtype, of_query = output.to(dtype), query.to(dtype)
        lacking = of_query.float() @ mean * scale if has_mean else None
        of_rounded = share_with_sinks(of_dtype, lse, sinks, lacking)
        launch = PickSinksLaunch(sinks, mean if has_mean else None, scale, of_query)
        run(launch, PickSinksLaunch.step(tokens, heads), of_dtype, of_query, lse)
        assert torch.allclose(of_dtype.float(), of_rounded, rtol=bound, atol=bound / 10)


def test_both_kinds_are_attention_over_all_picks() -> None:
    """With no gain, disjoint picks merge to what one call over all of them gives."""
    random = torch.Generator().manual_seed(5)
    rows, q_latent, q_rope = torch.randn(90, 576, generator=random), *torch.randn(2, 4, 2, 512, generator=random)
    q_rope = q_rope[..., :64]
    picks = torch.stack([torch.randperm(90, generator=random)[:40] for _ in range(4)]).to(torch.int32)
    picks[1, 30:], picks[3] = -1, -1
    whole, _ = attend_picks(rows, picks, q_latent, q_rope, 0.05)
    zero = torch.zeros(4, dtype=torch.int32)
    stored, own = split_picks(picks, zero + 50, zero, zero)
    parts = [attend_picks(rows, part, q_latent, q_rope, 0.05) for part in (stored, own)]
    assert torch.allclose(merge(parts[0], parts[1], torch.ones(512), None), whole, atol=1e-5)
