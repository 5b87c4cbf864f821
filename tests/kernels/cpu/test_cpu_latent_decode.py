"""Decode attention over latents on a CPU against the reference: `attend` of reference/latent_attention.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from batches import POISON, relative_rms
from cpu_layers import targets
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu.compiler import Target, is_usable, target_of
from packed_kv.kernels.cpu.latent_decode import CpuLatentDecode
from packed_kv.reference.latent_attention import attend
from variants import EVERY

BOUND, SCALE = 3e-4, 0.07
SIZES = ((512, 64, 16), (96, 32, 8), (512, 64, 8))
"""Rank, RoPE channels, bits of these."""
MIXED = ((1, 1), (700, 1), (15, 1), (130, 3), (16, 2), (33, 1))
"""Tokens and query tokens of requests."""


def codec_of(name: str, rank: int, rope_dim: int, rope_bits: int) -> LatentCodec:
    """Centred, scaled and, where it has outliers, with some that were chosen."""
    fmt, random = FORMATS[name], torch.Generator().manual_seed(0)
    mean, scale = torch.randn(2, rank, generator=random)
    outliers = None
    if count := fmt.outlier_channels(rank):
        outliers = torch.randperm(rank, generator=random)[:count].sort().values
    channels = ChannelCalibration(outliers, mean=mean, scale=(0.3 * scale).exp())
    return LatentCodec(fmt, rank, rope_dim, channels=channels, rope_bits=rope_bits)


class Batch:
    """Requests in shuffled blocks of poisoned pages and, with a window, in rings that begin anywhere."""

    def __init__(
        self, codec: LatentCodec, requests: tuple[tuple[int, int], ...], heads: int, window: int = 0, block: int = 32
    ) -> None:
        self.codec, self.heads = codec, heads
        lens, counts = zip(*requests, strict=True)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32)
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        random = torch.Generator().manual_seed(1)
        blocks = [-(-n // block) for n in lens]
        order = torch.randperm(sum(blocks) + 2, generator=random).to(torch.int32)
        self.cache = torch.full((len(order), 2, block, codec.slot_bytes), POISON, dtype=torch.uint8)[:, 0]
        self.table = torch.full((len(lens), max(*blocks, 1)), int(order[-1]), dtype=torch.int32)
        self.ring = None
        if window:
            ring_cache = torch.full((len(lens) * 50, 1, 4, codec.ring_slot_bytes), POISON, dtype=torch.uint8)
            ring_table = torch.zeros(len(lens), max(lens) // 4 + 1, dtype=torch.int32)
            first = torch.tensor([max(0, n - window - own + 1) for n, own in requests], dtype=torch.int32)
            first[::3] = torch.minimum(first[::3] + 9, self.seq_lens[::3] - torch.tensor(counts)[::3])  # behind hits
            first.clamp_(min=0)
            self.ring = Ring(ring_cache, ring_table, first, window)
        used = 0
        for r, length in enumerate(lens):
            self.table[r, : blocks[r]] = order[used : used + blocks[r]]
            used += blocks[r]
            latent = torch.randn(length, codec.rank, generator=random)
            rope = 3 * torch.randn(length, codec.rope_dim, generator=random)
            at = torch.arange(length)
            codec.write(self.cache, self.table[r, at // block].long() * block + at % block, latent, rope)
            if self.ring is not None:
                recent = at[int(self.ring.first[r]) :]
                place = recent // 4 % 50 + 50 * r
                self.ring.block_table[r, recent // 4] = place.int()
                codec.write_ring(self.ring.cache, place * 4 + recent % 4, latent[recent], rope[recent])
        self.query = torch.randn(sum(counts), heads, codec.rank + codec.rope_dim, generator=random)
        self.query[..., ::17] *= 6

    def check(self, target: Target | None = None, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
        """Relative RMS error of outputs, largest of lse; of queries and outputs of a dtype."""
        codec, query = self.codec, self.query.to(dtype)
        parts = query.split([codec.rank, codec.rope_dim], dim=-1)
        constant = torch.randn(codec.rank, generator=torch.Generator().manual_seed(9)) / 10
        output = torch.full((len(query), self.heads, codec.rank), torch.nan, dtype=dtype)
        lse, wanted_lse = torch.full((2, *query.shape[:2]), torch.nan)
        batch = self.cache, self.table, self.starts, self.seq_lens
        kernel = CpuLatentDecode(codec, SCALE, target=target)
        kernel(*batch, *parts, output, constant, self.ring, lse)
        wanted = attend(codec, *batch, *parts, SCALE, constant, self.ring, wanted_lse)
        seen = wanted_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen)
        return relative_rms(output, wanted), (lse - wanted_lse)[seen].abs().max().item()


BEST, *OTHERS = targets()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, BEST) for name in FORMATS),
        *((name, target) for target in OTHERS for name in (FORMATS if EVERY else ("tq4", "turboquant35"))),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_decodes_of_all_dtypes(name: str, target: Target) -> None:
    for sizes in SIZES if target == BEST else SIZES[:1]:
        codec = codec_of(name, *sizes)
        for window in (0, 64):
            error, lse = Batch(codec, MIXED, heads=6, window=window).check(target)
            assert error < BOUND and lse < 2e-3, (sizes, window, error, lse)


@pytest.mark.parametrize("heads", [1, 3, 16, 20, 64])
def test_any_number_of_heads(heads: int) -> None:
    codec = codec_of("turboquant35", 512, 64, 16)
    assert Batch(codec, ((300, 1), (70, 2)), heads, window=32).check()[0] < BOUND


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float16, 5e-4)])
def test_queries_and_outputs_of_16_bits(dtype: torch.dtype, bound: float) -> None:
    assert Batch(codec_of("tq4", 512, 64, 16), MIXED, 16, 64).check(dtype=dtype)[0] < bound


needs_amx = pytest.mark.skipif(
    not is_usable(target_of("amx")), reason="this processor has no AMX, or Linux does not permit it"
)
needs_vbmi = pytest.mark.skipif(
    not is_usable(target_of("avx512_vbmi")), reason="this processor has no AVX-512 with VBMI"
)
EMULATOR = Path(__file__).with_name("emulated_amx.h")


def emulated_amx() -> Target:
    """Tiles in software, for processors without AMX."""
    around, digest = target_of("avx512_vbmi"), hashlib.sha256(EMULATOR.read_bytes()).hexdigest()[:8]
    return Target("amx_emulated", around.features, (*around.flags, f"-DEMULATOR_{digest}", "-include", str(EMULATOR)))


@pytest.mark.parametrize(
    "target",
    [pytest.param(target_of("amx"), marks=needs_amx), pytest.param(emulated_amx(), marks=needs_vbmi)],
    ids=lambda target: target.name,
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, BOUND), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize(("name", "rank", "heads"), [("tq4", 512, 128), ("tq3", 96, 15), ("turboquant25", 512, 17)])
def test_amx_with_columns_that_fill_tiles_or_not(
    name: str, rank: int, heads: int, dtype: torch.dtype, bound: float, target: Target
) -> None:
    codec = codec_of(name, rank, 64, 16)
    error, lse = Batch(codec, ((300, 2), (129, 1), (7, 3)), heads, window=32).check(target, dtype)
    assert error < bound and lse < 2e-3, (error, lse)


@needs_amx
def test_amx_leaves_the_tiles_of_other_kernels_alone() -> None:
    """Products in bf16 of PyTorch's, which are of tiles, have the same bits before and after; and so has a repeated
    call."""
    codec, numbers = codec_of("tq4", 512, 64, 16), torch.Generator().manual_seed(4)
    batch = Batch(codec, ((150, 1),), 16)
    parts = batch.query.bfloat16().split([codec.rank, codec.rope_dim], dim=-1)
    kernel, outputs = CpuLatentDecode(codec, SCALE, target=target_of("amx")), []
    left, right = torch.randn(2, 200, 200, generator=numbers).bfloat16()
    products = [left @ right]
    for _ in range(3):
        outputs.append(torch.empty(1, 16, 512))
        kernel(batch.cache, batch.table, batch.starts, batch.seq_lens, *parts, outputs[-1])
        products.append(left @ right)
    assert all(torch.equal(product, products[0]) for product in products)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_window_longer_than_a_tile_of_the_ring() -> None:
    assert Batch(codec_of("tq4", 96, 32, 16), ((190, 1), (150, 4)), 4, window=140).check()[0] < BOUND


def test_a_rank_without_tokens() -> None:
    """A rank may have none of a request's tokens: 0, and lse of -inf."""
    codec = codec_of("tq4", 96, 32, 16)
    batch = Batch(codec, ((5, 1), (40, 1)), 4)
    batch.seq_lens[0] = 0
    parts = batch.query.split([codec.rank, codec.rope_dim], dim=-1)
    output, lse = torch.full((2, 4, 96), torch.nan), torch.full((2, 4), torch.nan)
    kernel = CpuLatentDecode(codec, SCALE)
    kernel(batch.cache, batch.table, batch.starts, batch.seq_lens, *parts, output, lse=lse)
    assert (output[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert output[1].isfinite().all() and lse[1].isfinite().all()


def test_the_same_bits_with_any_number_of_threads_and_requests() -> None:
    codec = codec_of("turboquant25", 512, 64, 16)
    batch = Batch(codec, ((900, 1), (130, 2), (4, 1)), 16, window=64)
    parts = batch.query.split([codec.rank, codec.rope_dim], dim=-1)
    kernel, results = CpuLatentDecode(codec, SCALE), []
    before = torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        output = torch.empty(len(batch.query), 16, 512)
        kernel(batch.cache, batch.table, batch.starts, batch.seq_lens, *parts, output, ring=batch.ring)
        results.append(output)
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    alone = torch.empty(1, 16, 512)
    ring = Ring(batch.ring.cache, batch.ring.block_table[:1], batch.ring.first[:1], batch.ring.window)
    one = [part[:1] for part in parts]
    kernel(batch.cache, batch.table[:1], batch.starts[:2], batch.seq_lens[:1], *one, alone, ring=ring)
    assert torch.equal(alone[0], results[0][0])
