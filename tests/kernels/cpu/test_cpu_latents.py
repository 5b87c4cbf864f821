"""Latents by the CPU's kernels: stored bytes equal the reference's, attention is within the bound of other kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from batches import relative_rms
from cpu_layers import targets
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu.compiler import Target
from packed_kv.kernels.cpu.latent import CpuLatentPages
from packed_kv.kernels.cpu.latent_decode import CpuLatentDecode
from packed_kv.reference.latent_attention import attend
from packed_kv.window.slots import fill_slots

SCALE, BOUND = 0.07, 3e-4
SIZES = ((512, 64), (96, 32), (448, 128))
"""Channels of latents and of RoPE."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def codec_of(name: str, rank: int = 512, rope_dim: int = 64, rope_bits: int = 16) -> LatentCodec:
    """Centred and scaled, and with outliers that were chosen where the format has some."""
    random = torch.Generator().manual_seed(rank)
    mean, scale = torch.randn(2, rank, generator=random)
    outliers = None
    if count := FORMATS[name].outlier_channels(rank):
        outliers = torch.randperm(rank, generator=random)[:count].sort().values
    channels = ChannelCalibration(outliers, mean=mean, scale=(0.3 * scale).exp())
    return LatentCodec(FORMATS[name], rank, rope_dim, channels=channels, rope_bits=rope_bits)


def tokens(codec: LatentCodec, count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    """Latents and RoPE channels: views of one tensor, as vLLM's are."""
    random = torch.Generator().manual_seed(seed)
    both = torch.randn(count, codec.rank + codec.rope_dim, generator=random)
    return list(both.to(dtype).split([codec.rank, codec.rope_dim], dim=-1))


CASES = [(name, (16, 8)[i % 2], SIZES[0], targets()[0]) for i, name in enumerate(FORMATS)]
CASES += [("turboquant35", bits, size, target) for size in SIZES for bits in (16, 8) for target in targets()]


@pytest.mark.parametrize(("name", "rope_bits", "size", "target"), dict.fromkeys(CASES))
def test_stored_bytes_equal_the_codecs(name: str, rope_bits: int, size: tuple[int, int], target: Target) -> None:
    rank, codec = size[0], codec_of(name, *size, rope_bits)
    new, rope = tokens(codec, 77, (torch.bfloat16, torch.float16, torch.float32)[rank % 5 % 3])
    rope *= 10.0 ** torch.linspace(-6, 6, 77)[:, None].to(rope.dtype)
    new[3, 5], new[4, 7], rope[5, 1], rope[6, 2] = float("nan"), float("inf"), float("nan"), float("-inf")
    new[7], rope[8] = 0, -0.0
    slots = torch.randperm(8, generator=torch.Generator().manual_seed(1))[torch.arange(77) // 16] * 16
    slots += torch.arange(77) % 16
    slots[[9, 40]] = -1
    slots[76] = 8 * 16 + 5  # alone in its micro-block
    ring_slots = torch.randperm(96, generator=torch.Generator().manual_seed(2))[:60].to(torch.int32)
    ring_slots[::7] = -1
    caches = [torch.full((5, 2, 32, codec.slot_bytes), 0xFF, dtype=torch.uint8)[:, 1] for _ in range(2)]
    rings = [torch.full((24, 2, 4, codec.ring_slot_bytes), 0xFF, dtype=torch.uint8)[:, :1] for _ in range(2)]
    codec.write(caches[0], slots, new, rope)
    codec.write_ring(rings[0], ring_slots, new[:60], rope[:60])
    kernel = CpuLatentPages(codec, target=target)
    kernel.store(caches[1], slots, new, rope, rings[1], ring_slots)
    assert torch.equal(*caches), "the pages differ"
    assert torch.equal(*rings), "the rings differ"
    rings[1].fill_(0xFF)
    kernel.store(None, slots[:60], new, rope, rings[1], ring_slots)
    assert torch.equal(*rings) and torch.equal(*caches), "the ring alone"


class Batch:
    """Requests of tokens, of which some are from the prefix cache and the newest are queries, in pages and rings."""

    def __init__(self, codec: LatentCodec, requests: tuple, counts: tuple, window: int = 0) -> None:
        self.codec = codec
        blocks = [-(-n // 32) for n, _ in requests]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(5)).to(torch.int32)
        self.cache = torch.full((len(order), 2, 32, codec.slot_bytes), 0xFF, dtype=torch.uint8)[:, 0]
        self.table = torch.full((len(requests), max(blocks)), len(order) + 1000, dtype=torch.int32)
        self.seq_lens = torch.tensor([n for n, _ in requests], dtype=torch.int32)
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        ring_blocks = -(-(window + max(counts)) // 4) + 1
        ring = torch.full((1 + len(requests) * ring_blocks, 1, 4, codec.ring_slot_bytes), 0xFF, dtype=torch.uint8)
        ring_table = torch.zeros(len(requests), max(n for n, _ in requests) // 4 + 3, dtype=torch.int32)
        for i, (count, hit) in enumerate(requests):
            self.table[i, : blocks[i]], order = order[: blocks[i]], order[blocks[i] :]
            new, ids = tokens(codec, count, seed=i), torch.arange(count)
            codec.write(self.cache, self.table[i, ids // 32].long() * 32 + ids % 32, *new)
            for entry in range(-(-hit // 4), -(-count // 4)):
                ring_table[i, entry] = 1 + i * ring_blocks + entry % ring_blocks
            ids = ids[hit:][-(4 * ring_blocks - 4 + (count - 1) % 4 + 1) :]  # not overwritten
            at = ring_table[i, ids // 4].long()
            codec.write_ring(ring, torch.where(at > 0, at * 4 + ids % 4, -1), new[0][ids], new[1][ids])
        self.ring = None
        if window:
            first, slots = torch.zeros(len(requests), dtype=torch.int32), torch.empty(sum(counts), dtype=torch.int32)
            sizes = {"block_size": 4, "ring_blocks": ring_blocks, "window": window, "longest_decode": max(counts)}
            fill_slots(self.starts, self.seq_lens, ring_table, slots, first, **sizes)
            self.ring = Ring(ring, ring_table, first, window)
        random = torch.Generator().manual_seed(3)
        query = torch.randn(sum(counts), 5, codec.rank + codec.rope_dim, generator=random).bfloat16()
        self.query = query.split([codec.rank, codec.rope_dim], dim=-1)

    def check(self, target: Target | None = None) -> None:
        lse, wanted_lse = (torch.full(self.query[0].shape[:2], -torch.inf) for _ in range(2))
        tables = self.cache, self.table, self.starts, self.seq_lens, *self.query, SCALE
        wanted = attend(self.codec, *tables, None, self.ring, wanted_lse)
        kernel, found = CpuLatentDecode(self.codec, SCALE, target=target), torch.zeros_like(wanted)
        kernel(*tables[:-1], found, None, self.ring, lse)
        assert found.isfinite().all() and relative_rms(found, wanted) < BOUND
        torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-3)


BATCHES = {
    "decodes": (((1, 0), (64, 0), (129, 0), (0, 0)), (1, 1, 1, 0)),
    "behind hits": (((70, 64), (50, 48), (51, 48), (100, 88)), (1, 1, 1, 1)),
    "drafts": (((5, 0), (131, 0), (70, 0), (22, 0)), (4, 2, 0, 3)),
    "drafts behind hits": (((60, 56), (60, 40), (90, 80), (41, 36)), (4, 3, 4, 4)),
}
"""Name -> tokens of each request, of them from the prefix cache; and query tokens."""


@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_decodes_equal_the_reference(batch: str, window: int) -> None:
    Batch(codec_of("tq4", 96, 32), *BATCHES[batch], window).check()


def test_what_is_read_does_not_depend_on_the_threads() -> None:
    batch, found = Batch(codec_of("turboquant35"), ((900, 0), (33, 0)), (1, 2), 64), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        kernel = CpuLatentPages(batch.codec)
        rows = torch.full((900, 576), torch.nan)
        kernel.read(batch.cache, batch.table[0], 0, rows)
        found.append(rows)
    assert found[0].isfinite().all() and all(torch.equal(rows, found[0]) for rows in found)


def test_a_codec_that_is_not_served() -> None:
    with pytest.raises(ValueError, match=r"tq4: the CPU's kernels do not serve latents of 544 channels"):
        CpuLatentPages(LatentCodec(FORMATS["tq4"], 544, 64))
    with pytest.raises(ValueError, match=r"160 RoPE channels \(at most 128\)"):
        CpuLatentPages(LatentCodec(FORMATS["tq4"], 512, 160))
