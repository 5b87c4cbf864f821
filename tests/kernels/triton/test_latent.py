"""Latent attention's kernels against their references: `LatentCodec` and `reference/latent_attention.py`."""

from __future__ import annotations

import null_code
import pytest
import torch
from launchers import decode_latents, gather_latents, store_latents
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent import LatentCodec
from packed_kv.formats import FORMATS, Format
from packed_kv.kernels.triton.latent_store import StoreLatentsLaunch
from packed_kv.reference.latent_attention import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((512, 64), (96, 32))
"""Rank and RoPE channels: DeepSeek's, and three groups, whose signs end in a half word."""
SCALE = 0.1


@pytest.fixture(autouse=True)
def null(monkeypatch: pytest.MonkeyPatch) -> None:
    null_code.register(monkeypatch)


def codec_of(fmt: Format, rank: int, rope_dim: int, rope_bits: int = 16, seed: int = 0) -> LatentCodec:
    """Centred, scaled and, where it has outliers, with some that were chosen."""
    random = torch.Generator().manual_seed(seed)
    mean, scale = torch.randn(2, rank, generator=random)
    outliers = None
    if count := fmt.outlier_channels(rank):
        outliers = torch.randperm(rank, generator=random)[:count].sort().values
    channels = ChannelCalibration(outliers, mean=mean, scale=(0.3 * scale).exp())
    return LatentCodec(fmt, rank, rope_dim, DEVICE, channels, rope_bits)


def tokens(codec: LatentCodec, count: int, seed: int, dtype: torch.dtype = torch.bfloat16):
    random = torch.Generator().manual_seed(seed)
    latent, rope = (torch.randn(count, n, generator=random).to(DEVICE, dtype) for n in (codec.rank, codec.rope_dim))
    return latent, rope * 3


def poisoned(codec: LatentCodec, blocks: int, block_size: int) -> torch.Tensor:
    """Blocks with a gap between them, as of other layers."""
    whole = torch.full((blocks, 2, block_size, codec.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    return whole[:, 0]


def filled(codec: LatentCodec, seq_lens: tuple[int, ...], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with the requests' tokens in shuffled blocks, and the block table."""
    counts = [-(-n // block_size) for n in seq_lens]
    cache = poisoned(codec, sum(counts) + 2, block_size)
    order = torch.randperm(len(cache), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    table = torch.full((len(seq_lens), max(counts)), len(cache) + 1000, dtype=torch.int32)
    for i, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[i, :count] = order[sum(counts[:i]) :][:count]
        ids = torch.arange(seq_len)
        slots = table[i, ids // block_size].long() * block_size + ids % block_size
        codec.write(cache, slots.to(DEVICE), *tokens(codec, seq_len, seed=i))
    return cache, table.to(DEVICE)


@pytest.mark.parametrize(
    ("name", "rank", "rope_dim", "rope_bits"),
    [
        *((name, 96, 32, 16) for name in (*FORMATS, "null")),
        ("tq4", 512, 64, 16),
        ("turboquant25", 512, 64, 16),
        ("tq4", 64, 64, 8),
        ("isoquant3", 96, 96, 8),
    ],
)
def test_stored_bytes_equal_the_codecs(name: str, rank: int, rope_dim: int, rope_bits: int) -> None:
    codec = codec_of(FORMATS[name], rank, rope_dim, rope_bits)
    latent, rope = tokens(codec, 9, seed=1)
    latent[3, :5], latent[4, 0], rope[3, 1], rope[5, 2] = float("nan"), float("inf"), float("-inf"), float("nan")
    rope[0], rope[1, :2], rope[6] = 0, 1e6, rope[6] * 1e-6
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:7]
    slots[2] = -1
    slots = slots.to(DEVICE)
    expected, ours = poisoned(codec, 2, 32), poisoned(codec, 2, 32)
    codec.write(expected, slots, latent[:7], rope[:7])
    store_latents(codec, ours, slots, latent, rope)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_inputs(dtype: torch.dtype) -> None:
    """Strided, and neither centred nor scaled."""
    codec = LatentCodec(FORMATS["tq3"], 64, 32, DEVICE)
    wide = torch.cat(tokens(codec, 20, seed=3, dtype=dtype), dim=1)
    latent, rope = wide[:, :64], wide[:, 64:]
    slots = torch.arange(20, device=DEVICE, dtype=torch.int32)
    expected, ours = poisoned(codec, 3, 16), poisoned(codec, 3, 16)
    codec.write(expected, slots, latent, rope)
    store_latents(codec, ours, slots, latent, rope)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("name", "rope_bits"), [("tq4", 16), ("isoquant3", 16), ("turboquant25", 16), ("tq4", 8), ("turboquant35", 8)]
)
@pytest.mark.parametrize(("rank", "rope_dim"), SIZES)
def test_gathered_rows_equal_the_pages(name: str, rank: int, rope_dim: int, rope_bits: int) -> None:
    codec = codec_of(FORMATS[name], rank, rope_dim, rope_bits)
    cache, table = filled(codec, (150, 70, 33), 32)
    starts, counts = (32, 0, 0), (101, 70, 0)  # of the last nothing
    first_rows = torch.tensor([0, 101, 171, 171], dtype=torch.int32, device=DEVICE)
    rows = torch.full((172, rank + rope_dim), float("nan"), dtype=torch.float16, device=DEVICE)
    on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    gather_latents(codec.layout, cache, table, on_device, first_rows, max(counts), rows)
    assert rows[171].isnan().all()
    row = 0
    for request, (start, count) in enumerate(zip(starts, counts, strict=True)):
        blocks = table[request, torch.arange(start // 16, -(-(start + count) // 16), device=DEVICE) // 2].long()
        inside = torch.arange(start // 16, -(-(start + count) // 16), device=DEVICE) % 2
        expected = torch.cat(codec.read(cache, blocks * 2 + inside), dim=-1)[:count]
        assert torch.equal(rows[row : row + count], expected.half())
        row += count


BATCHES = {
    "decodes": ((1, 64, 129), (1, 1, 1)),
    "drafts": ((5, 131, 70), (4, 0, 3)),
    "a rank's part": ((0, 70, 1), (1, 1, 1)),
}
"""Name -> tokens in the cache, and query tokens."""


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("name", "rank", "rope_dim", "heads", "rope_bits"),
    [
        ("tq4", 512, 64, 16, 16),
        ("tq3", 128, 64, 5, 16),
        ("turboquant35", 128, 64, 40, 16),
        ("turboquant25", 96, 32, 3, 16),
        ("tq4", 512, 64, 16, 8),
        ("turboquant35", 128, 96, 3, 8),
    ],
)
def test_decodes_equal_the_reference(name, rank, rope_dim, heads, rope_bits, splits, batch) -> None:
    codec = codec_of(FORMATS[name], rank, rope_dim, rope_bits)
    seq_lens, counts = BATCHES[batch]
    cache, table = filled(codec, seq_lens, 16)
    random = torch.Generator().manual_seed(7)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    q_latent = torch.randn(heads, starts[-1], rank, generator=random).to(DEVICE, torch.bfloat16).transpose(0, 1)
    q_rope = torch.randn(starts[-1], heads, rope_dim, generator=random).to(DEVICE, torch.bfloat16)
    constant = torch.randn(rank, generator=random).to(DEVICE)
    on_device = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, seq_lens)]
    expected_lse = torch.zeros(starts[-1], heads, device=DEVICE)
    expected = attend(codec, cache, table, *on_device, q_latent, q_rope, SCALE, constant, lse=expected_lse)
    lse = torch.full_like(expected_lse, float("nan"))
    output = torch.full((starts[-1], heads, rank), float("nan"), dtype=torch.float32, device=DEVICE)
    decode_latents(
        codec.layout, cache, table, *on_device, q_latent, q_rope, SCALE, output, max_query_len=max(counts),
        splits=splits, constant=constant, lse=lse,
    )  # fmt: skip
    error = (output - expected).norm() / (expected - constant).norm()
    print(f"relative error {error:.1e}")
    assert error < 2e-3
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-2)


def test_lse_of_the_reference() -> None:
    """Against float64, with a request of which a rank has no token; the constant is not in it."""
    codec = codec_of(FORMATS["tq4"], 64, 32)
    cache, table = filled(codec, (37, 0, 5), 16)
    starts, seq_lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((0, 2, 3, 4), (37, 0, 5)))
    random = torch.Generator().manual_seed(3)
    query = torch.randn(4, 3, 96, generator=random).to(DEVICE)
    lse = torch.full((4, 3), float("nan"), device=DEVICE)
    output = attend(codec, cache, table, starts, seq_lens, *query.split([64, 32], -1), SCALE, None, lse=lse)
    for row, (request, seen) in enumerate(((0, 36), (0, 37), (1, 0), (2, 5))):
        numbers = torch.arange(-(-seen // 16), device=DEVICE)
        latent, rope = (x[:seen].double() for x in codec.read(cache, table[request, numbers].long()))
        scores = query[row].double() @ torch.cat((latent, rope), -1).T * SCALE
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
        torch.testing.assert_close(output[row].double(), scores.softmax(-1) @ latent, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_a_launch_owns_no_memory(name: str) -> None:
    """CUDA graphs keep its addresses when another launch has taken its place, so all are of tensors that others own."""
    codec = codec_of(FORMATS[name], 96, 32)
    cache, inputs = poisoned(codec, 2, 16), tokens(codec, 3, seed=1)
    first, second = (StoreLatentsLaunch(codec, cache, *inputs) for _ in range(2))
    assert first.fixed.raw == second.fixed.raw
