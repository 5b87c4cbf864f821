"""The ring of recent latents: bytes that are stored, what decodes read there, and what prompts gather."""

from __future__ import annotations

import math

import pytest
import torch
from launchers import decode_latents, run, store_latents
from packed_kv.attention.latent.in_pytorch import RecentContext, ReferenceLatentPrefix
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import latent_launch, latent_ring_launch
from packed_kv.kernels.triton import latent_store
from packed_kv.kernels.triton.latent_decode import latent_shape
from packed_kv.kernels.triton.latent_ring import (
    AttendLatentRingLaunch,
    GatherLatentRingLaunch,
    split_lens,
)
from packed_kv.reference.latent_attention import attend, page_lens
from packed_kv.window.slots import fill_slots
from test_latent import DEVICE, SCALE, codec_of, filled, poisoned, tokens
from test_ring import ring_of

SIZES = (("tq4", 512, 64, 16), ("turboquant25", 96, 32, 8))
"""Name, rank, RoPE channels, and bits of these in pages."""


def poisoned_ring(codec: LatentCodec, blocks: int, block_size: int) -> torch.Tensor:
    """Blocks with a gap between them; the null block holds what the others do before they are written."""
    shape = (blocks, 2, block_size, codec.ring_slot_bytes)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)[:, :1]


@pytest.mark.parametrize("split_tokens", [0, 256])
@pytest.mark.parametrize(("name", "rank", "rope_dim", "rope_bits"), SIZES)
def test_stored_bytes_equal_the_codecs(name, rank, rope_dim, rope_bits, split_tokens, monkeypatch) -> None:
    """Pages as without a ring; then the ring alone. Of all sizes, zeros and what is no number; some are skipped. By
    programs that quantise all of their rows, or a part."""
    monkeypatch.setattr(latent_store, "SPLIT_TOKENS", split_tokens)
    codec = codec_of(FORMATS[name], rank, rope_dim, rope_bits)
    assert codec.ring_slot_bytes == {576: 600, 128: 136}[rank + rope_dim]
    latent, rope = tokens(codec, 11, seed=1, dtype=torch.float32)
    rope *= 10.0 ** torch.arange(-5, 6, device=DEVICE)[:, None]
    rope[3], rope[4, 1], rope[5, 2], latent[6, 0] = 0.0, float("inf"), float("nan"), float("inf")
    random = torch.Generator().manual_seed(2)
    slots = torch.randperm(64, generator=random)[:11].to(DEVICE)
    ring_slots = torch.randperm(32, generator=random)[:9].to(DEVICE, torch.int32)
    ring_slots[::4] = -1
    pages, expected_pages = poisoned(codec, 4, 16), poisoned(codec, 4, 16)
    ring, expected = poisoned_ring(codec, 8, 4), poisoned_ring(codec, 8, 4)
    codec.write(expected_pages, slots, latent, rope)
    codec.write_ring(expected, ring_slots, latent[:9], rope[:9])
    store_latents(codec, pages, slots, latent, rope, ring, ring_slots)
    assert torch.equal(ring, expected)
    assert torch.equal(pages, expected_pages)
    codec.write_ring(expected, ring_slots, latent[2:], rope[2:])
    store_latents(codec, pages, ring_slots, latent[2:], rope[2:], ring, ring_slots, only_ring=True)
    assert torch.equal(ring, expected)
    assert torch.equal(pages, expected_pages)


BATCHES = {
    "decodes": (((1, 0), (64, 0), (129, 0), (0, 0)), (1, 1, 1, 0)),
    "behind hits": (((70, 64), (50, 50), (51, 50), (100, 90)), (1, 1, 1, 1)),
    "drafts": (((5, 0), (131, 0), (70, 0), (22, 0)), (4, 2, 0, 3)),
    "drafts behind hits": (((60, 56), (60, 40), (90, 80), (41, 37)), (4, 3, 4, 4)),
    "two tiles": (((300, 0), (110, 60), (40, 0)), (2, 1, 1)),
}
"""Name -> tokens of each request, of them from the prefix cache; and query tokens."""


SHARES_OF = {
    "decodes": (132, 8), "behind hits": (5, 2), "drafts": (50, 4), "drafts behind hits": (25, 2), "two tiles": (1, 1),
}  # fmt: skip
"""Name -> SMs of a card, and blocks that then share a tile of 16 heads."""


class Batch:
    """Requests whose tokens are in pages and, but those of hits, in their rings."""

    def __init__(self, codec: LatentCodec, requests, counts, window: int, block_size: int = 4) -> None:
        lens = tuple(n for n, _ in requests)
        longest = max(counts)
        self.codec, self.counts = codec, counts
        self.cache, self.table = filled(codec, lens, 16)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
        ring_table, _, ring_blocks = ring_of(list(requests), window, block_size, 1, 32, longest - 1)
        ring_cache = poisoned_ring(codec, 1 + len(lens) * ring_blocks, block_size)
        for i, (seq_len, hit) in enumerate(requests):
            latent, rope = tokens(codec, seq_len, seed=i)
            ids = torch.arange(hit, seq_len, device=DEVICE)
            ids = ids[-(ring_blocks * block_size - block_size + (seq_len - 1) % block_size + 1) :]  # not overwritten
            blocks = ring_table[i, ids // block_size].long()
            slots = torch.where(blocks > 0, blocks * block_size + ids % block_size, -1)
            codec.write_ring(ring_cache, slots, latent[ids], rope[ids])
        first = torch.zeros(len(lens), dtype=torch.int32, device=DEVICE)
        fill_slots(
            self.starts, self.seq_lens, ring_table, torch.empty(sum(counts), dtype=torch.int32, device=DEVICE), first,
            block_size=block_size, ring_blocks=ring_blocks, window=window, longest_decode=longest,
        )  # fmt: skip
        self.ring = Ring(ring_cache, ring_table, first, window)

    def page_lens(self) -> torch.Tensor:
        found = torch.full_like(self.seq_lens, -7)
        split_lens(self.starts, self.seq_lens, self.ring.first, self.ring.window, found)
        return found


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [1, 16, 200])
def test_tokens_of_pages_and_rings(window: int, batch: str) -> None:
    """Of each query: the ring's are the last of its window, all are in the ring, and no token is read twice or
    not at all; but behind hits, all tokens of a request that has none in the ring yet are in pages."""
    made = Batch(codec_of(FORMATS["tq4"], 96, 32), *BATCHES[batch], window)
    found = made.page_lens()
    assert torch.equal(found, page_lens(made.starts, made.seq_lens, made.ring.first, window))
    for request, count in enumerate(made.counts):
        seq_len, first = int(made.seq_lens[request]), int(made.ring.first[request])
        for row in range(count):
            position, low = seq_len - count + row, int(found[request]) - count + row + 1
            from_ring = range(max(low, 0), position + 1)
            assert len(from_ring) <= window
            assert not from_ring or from_ring[0] >= first
            if not row or first == 0:
                assert list(from_ring) == list(range(max(first, position - window + 1, 0), position + 1))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "rank", "rope_dim", "rope_bits", "heads"), [("tq4", 512, 64, 16, 16), ("turboquant25", 96, 32, 8, 40)]
)
@pytest.mark.parametrize("kernel", ["triton", "cuda"])
def test_decodes_equal_the_reference(name, rank, rope_dim, rope_bits, heads, batch, kernel) -> None:
    codec = codec_of(FORMATS[name], rank, rope_dim, rope_bits)
    made = Batch(codec, *BATCHES[batch], window=100 if batch == "two tiles" else 32)
    total, longest = sum(made.counts), max(made.counts)
    random = torch.Generator().manual_seed(7)
    q_latent = torch.randn(heads, total, rank, generator=random).to(DEVICE, torch.bfloat16).transpose(0, 1)
    q_rope = torch.randn(total, heads, rope_dim, generator=random).to(DEVICE, torch.bfloat16)
    constant = torch.randn(rank, generator=random).to(DEVICE)
    queries = (q_latent, q_rope)
    batch_of = (made.cache, made.table, made.starts, made.seq_lens)
    expected = attend(codec, *batch_of, *queries, SCALE, constant, made.ring)
    assert not torch.allclose(expected, attend(codec, *batch_of, *queries, SCALE, constant), rtol=1e-2)

    part = torch.full((total, heads, rank), float("nan"), dtype=torch.float32, device=DEVICE)
    lse, output = part[..., 0].clone(), torch.full_like(part, float("nan"))
    lens = made.page_lens()
    decode_latents(
        codec.layout, made.cache, made.table, made.starts, lens, *queries, SCALE, part, max_query_len=longest, splits=2,
        lse=lse,
    )  # fmt: skip
    bound = (1 / codec.value_gain(), constant)
    if kernel == "cuda":
        if (rank, rope_dim) != latent_ring_launch.LATENT:
            pytest.skip("the kernel serves one size")
        of_step = made.starts, made.seq_lens, lens, cut_into_parts(part, lse, made.starts, lens)
        sm_count, shares = SHARES_OF[batch]
        cuda_step = latent_ring_launch.make_step(heads, longest, SCALE, sm_count, made.ring, *of_step)
        assert cuda_step.grid[2] == shares
        attend_ring = cuda_ring()(made.ring.cache, heads, torch.bfloat16, torch.float32, *bound)
        attend_ring(cuda_step, *queries, output)
    else:
        shape = latent_shape(heads, longest, SCALE)
        launch = AttendLatentRingLaunch(codec, shape, made.ring.cache, (*queries, output), *bound)
        step = AttendLatentRingLaunch.step(shape, longest, made.ring, made.starts, made.seq_lens, lens, part, lse)
        run(launch, step, *queries, output)
    error = (output - expected).norm() / (expected - constant).norm()
    print(f"relative error {error:.1e}")
    assert error < 2e-3


def cut_into_parts(
    part: torch.Tensor, lse: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor
) -> latent_launch.Parts:
    """Results [tokens, heads, 512] in parts that make them when merged, in places of poison: one part or many, none of
    requests without tokens, and the first one behind another request's or not."""
    random = torch.Generator().manual_seed(3)
    heads, counts = part.shape[1], starts.diff().tolist()
    shape = latent_launch.LatentGrid(16, -(-max(counts) * heads // 16), 100)
    slots = torch.full((2 * shape.partitions + len(lens), shape.row_blocks * 16, 512), float("nan"))
    stats, begins, spans = slots[..., :2].clone(), [(-1, -1)] * (shape.partitions + 1), []
    for i, (number, count) in enumerate(zip((3, 1, 40, 18), counts, strict=False)):
        first, number = sum(n for _, n in spans), number if lens[i] else 0
        spans.append((first, number))
        begins[first] = (i - i % 2, 1)
        places = [2 * shape.partitions + i] if number == 1 else [2 * (first + n) for n in range(number)]
        if number > 1:
            places[0] += i % 2
        own = slice(int(starts[i]), int(starts[i]) + count)
        share = torch.rand(number, count * heads, generator=random)
        share /= share.sum(0)
        maxima = torch.randn(number, count * heads, generator=random) * 3
        off = torch.randn(number, count * heads, 512, generator=random)
        off -= (share[..., None] * off).sum(0)
        sees = lse[own].flatten().cpu() > -torch.inf
        totals = share * (lse[own].flatten().cpu() / math.log(2) - maxima).exp2()
        sums = totals[..., None] * (part[own].reshape(-1, 512).cpu() + off) / latent_launch.LATENT_DIVISOR
        slots[places, : count * heads] = torch.where(sees[:, None], sums, 0)
        stats[places, : count * heads] = torch.stack([torch.where(sees, maxima, -1e30), totals], -1)
    schedule = tuple(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (begins, spans))
    return latent_launch.Parts(shape, schedule, slots.to(DEVICE), stats.to(DEVICE))


def cuda_ring() -> type[latent_ring_launch.CudaLatentRing]:
    """The kernel, or its emulation where there is no GPU."""
    if DEVICE == "cuda":
        return latent_ring_launch.CudaLatentRing
    import emulated

    return emulated.CudaLatentRing


class Chunk:
    """Stand-in for vLLM's chunk: tokens `starts` and on of each request's prefix."""

    def __init__(self, starts: tuple[int, ...], counts: tuple[int, ...]) -> None:
        self.starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.tensor(counts, dtype=torch.int32)
        self.cu_seq_lens = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)


@pytest.mark.parametrize(("name", "rank", "rope_dim", "rope_bits"), SIZES)
def test_gathered_rows_equal_the_reference(name: str, rank: int, rope_dim: int, rope_bits: int) -> None:
    """Of a prefix that is cut, of one from the prefix cache in part, and of a short one; for K, then for V."""
    codec = codec_of(FORMATS[name], rank, rope_dim, rope_bits)
    made = Batch(codec, ((150, 0), (70, 60), (33, 0)), (1, 1, 1), window=32)
    context = made.seq_lens - 1
    chunk, recent = Chunk((112, 0, 0), (20, 69, 32)), RecentContext(made.ring, context)
    plain = ReferenceLatentPrefix(codec)
    rows = torch.full((121, rank + rope_dim), 3.0, dtype=torch.float32, device=DEVICE)
    expected, gain = rows.clone(), 1 / codec.value_gain()
    for as_values in (False, True):
        launch = GatherLatentRingLaunch(codec, made.ring, gain, as_values=as_values)
        spans = (chunk.starts, chunk.cu_seq_lens, context)
        step = GatherLatentRingLaunch.step(codec, rows, made.ring, *spans, as_values=as_values)
        run(launch, step, rows)
        plain.read_ring(chunk, expected, recent, codec.value_gain() if as_values else 1.0)
        changed = (rows != 3).any(-1)
        assert changed.tolist() == [118 <= 112 + i < 132 or 20 + 60 <= i < 89 or i >= 90 for i in range(121)]
        torch.testing.assert_close(rows, expected, rtol=1e-6 if as_values else 0, atol=0)
