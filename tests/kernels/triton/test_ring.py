"""The ring of recent tokens: its bytes, the slots of a step, and attention and prefill that read it."""

from __future__ import annotations

import pytest
import torch
from implementations import attend_pages
from launchers import gather_ring, rotate_query, store_tokens
from packed_kv.codecs import ring as reference
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.triton.ring import plan_ring
from packed_kv.kernels.triton.rotate import rotation_matrix
from packed_kv.layout import ring_slot_bytes
from packed_kv.window.slots import fill_slots
from page_codecs import page_codec
from test_decode import BOUND, DEVICE, relative_rms, sized


def poisoned_ring(blocks: int, kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    shape = (blocks, kv_heads, block_size, ring_slot_bytes(head_dim))
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "head_dim"), [("isoquant4", 64), ("planarquant3", 96), ("turboquant25", 128), ("tq4", 80)]
)
def test_stored_bytes_equal_the_reference(name: str, head_dim: int) -> None:
    """Values of all sizes, zeros and infinities; slots in any order, some skipped; the pages as without a ring."""
    generator = torch.Generator().manual_seed(head_dim)
    codec = PagedCodec(FORMATS[name], head_dim, device=DEVICE)
    tokens, heads, block_size = 11, 2, 4
    key, value = torch.randn(2, tokens, heads, head_dim, generator=generator)
    key *= 10.0 ** torch.randint(-6, 5, (tokens, heads, 1), generator=generator)
    key[3], value[4, 0, 5], value[4, 1, 6] = 0.0, float("inf"), float("nan")
    key, value = key.to(DEVICE), value.to(DEVICE)
    slots = torch.randperm(48, generator=generator)[:tokens].to(DEVICE)
    ring_slots = torch.randperm(32, generator=generator)[:tokens].to(torch.int32)
    ring_slots[::5] = -1
    pages, plain = torch.zeros(2, 3, heads, 16, codec.slot_bytes, dtype=torch.uint8, device=DEVICE)
    found, expected = poisoned_ring(8, heads, block_size, head_dim), poisoned_ring(8, heads, block_size, head_dim)
    store_tokens(codec, pages, slots, key, value, ring=found, ring_slots=ring_slots[:9].to(DEVICE))
    store_tokens(codec, plain, slots, key, value)
    rotated = [part.prepare(x) for part, x in ((codec.key, key), (codec.value, value))]
    reference.write(expected, ring_slots[:9].to(DEVICE), *(x[:9] for x in rotated))
    assert torch.equal(found, expected)
    assert torch.equal(pages, plain)
    store_tokens(codec, pages, slots, key.flip(0), value.flip(0), ring=found, ring_slots=ring_slots.to(DEVICE),
                 only_ring=True)  # fmt: skip
    reference.write(expected, ring_slots.to(DEVICE), *(x.flip(0) for x in rotated))
    assert torch.equal(found, expected)
    assert torch.equal(pages, plain)


def ring_of(requests: list[tuple[int, int]], window: int, block_size: int, kv_heads: int, head_dim: int, drafts: int):
    """Block table and number of ring blocks for requests (tokens, of them from the prefix cache)."""
    ring_blocks = -(-(window + drafts + 1) // block_size) + 1
    longest = max(tokens for tokens, _ in requests)
    table = torch.zeros(len(requests), -(-longest // block_size) + 3, dtype=torch.int32)
    for i, (tokens, hit) in enumerate(requests):
        for entry in range(-(-hit // block_size), -(-tokens // block_size)):
            table[i, entry] = 1 + i * ring_blocks + entry % ring_blocks
        table[i, -(-tokens // block_size) :] = 10_000_000  # stale
    cache = poisoned_ring(1 + len(requests) * ring_blocks, kv_heads, block_size, head_dim)
    return table.to(DEVICE), cache, ring_blocks


def run(name, *, head_dim=128, kv_heads=2, group=4, requests=((1, 0), (37, 0), (140, 0)), query_lens=None, splits=3,
        recent=32, block_size=8, window=None, soft_cap=None, kernel="triton", size=1.0, **channels):  # fmt: skip
    """Kernel output and the reference in float64. Of `requests` (tokens, from the prefix cache) the newest are decoded.

    All tokens but those of the prefix cache were written to the ring in order, so older ones were overwritten.
    """
    generator = torch.Generator().manual_seed(head_dim + len(requests))
    query_lens = query_lens or (1,) * len(requests)
    codec = page_codec(FORMATS[name], head_dim, device=DEVICE, **channels)
    table, ring_cache, ring_blocks = ring_of(requests, recent, block_size, kv_heads, head_dim, max(query_lens) - 1)
    seq_lens = torch.tensor([tokens for tokens, _ in requests], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(DEVICE)
    slots = torch.full((sum(query_lens) + 3,), 77, dtype=torch.int32, device=DEVICE)
    first = torch.full((len(requests),), -7, dtype=torch.int32, device=DEVICE)
    sizes = dict(block_size=block_size, ring_blocks=ring_blocks, window=recent, longest_decode=max(query_lens))
    plan_ring(start, seq_lens, table, slots, first, **sizes)

    blocks_each = [-(-tokens // 16) for tokens, _ in requests]
    pages = torch.full((sum(blocks_each), kv_heads, 16, codec.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    page_table = torch.zeros(len(requests), max(blocks_each), dtype=torch.int32)
    query = torch.randn(sum(query_lens), kv_heads * group, head_dim, generator=generator).to(DEVICE, torch.float16)
    expected = torch.zeros(query.shape, dtype=torch.float64, device=DEVICE)
    scale = head_dim**-0.5
    for i, (tokens, hit) in enumerate(requests):
        page_table[i, : blocks_each[i]] = torch.arange(blocks_each[i]) + sum(blocks_each[:i])
        key, value = torch.randn(2, tokens, kv_heads, head_dim, generator=generator).to(DEVICE)
        value = sized(value, size)
        ids = torch.arange(tokens)
        codec.write(pages, (page_table[i, ids // 16].long() * 16 + ids % 16).to(DEVICE), key, value)
        rotated = [part.prepare(x) for part, x in ((codec.key, key), (codec.value, value))]
        for at in range(hit, tokens, block_size):  # later tokens take the slots of earlier ones, but not of these
            new = torch.arange(at, min(at + block_size, tokens))
            block = table[i, (new // block_size).to(DEVICE)].long()
            slot = torch.where(block > 0, block * block_size + (new % block_size).to(DEVICE), -1)
            reference.write(ring_cache, slot, *(x[new] for x in rotated))
        from_pages = [part.decode(part.encode(x)).double() for part, x in ((codec.key, key), (codec.value, value))]
        from_ring = [part.restore(reference.round_trip(x)).double()
                     for part, x in zip((codec.key, codec.value), rotated, strict=True)]  # fmt: skip
        known = max(-(-hit // block_size) * block_size, tokens - query_lens[i] - recent + 1, 0)
        assert int(first[i]) == known
        for row in range(query_lens[i]):
            position = tokens - query_lens[i] + row
            in_ring = ((ids >= known) & (ids > position - recent)).to(DEVICE)[:, None, None]
            k, v = (torch.where(in_ring, a, b) for a, b in zip(from_ring, from_pages, strict=True))
            low = max(0, position + 1 - (window or tokens))
            seen = slice(low, position + 1)
            one = int(start[i]) + row
            expected[one] = attention(query[one].double(), k[seen], v[seen], scale, soft_cap)
    rotated = torch.empty(len(query), kv_heads, group, head_dim, dtype=torch.float16, device=DEVICE)
    rotate_query(query, rotation_matrix(codec.key, kv_heads), rotated, scale)
    output = torch.full(query.shape, float("nan"), dtype=torch.float32, device=DEVICE)
    attend_pages(
        kernel, codec.layout, rotated, pages, page_table.to(DEVICE), start, seq_lens,
        rotation_matrix(codec.value, kv_heads, inverse=True), output, splits, max_query_len=max(query_lens),
        sliding_window=window, logits_soft_cap=soft_cap, ring=Ring(ring_cache, table, first, recent),
    )  # fmt: skip
    return output.double(), expected


def attention(query, key, value, scale, soft_cap):
    """[heads, d] over [keys, KV heads, d]."""
    key, value = (x.repeat_interleave(len(query) // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("hd,khd->hk", query, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.einsum("hk,khd->hd", scores.softmax(-1), value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "isoquant4", "head_dim": 64, "splits": 2},
        {"name": "turboquant35", "head_dim": 96, "kv_heads": 1},
        {"name": "turboquant25", "head_dim": 256, "kv_heads": 1, "requests": ((70, 0), (3, 0))},
        {"requests": ((50, 44), (50, 50), (100, 16), (100, 90)), "block_size": 4},  # behind prefix-cache hits
        {"requests": ((90, 0), (60, 50)), "query_lens": (3, 2), "recent": 16},
        {"requests": ((90, 0), (20, 0)), "query_lens": (1, 0)},
        {"requests": ((90, 0), (60, 50)), "query_lens": (4, 1), "head_dim": 64, "kv_heads": 1},  # 16 columns
        {"requests": ((200, 0), (64, 0), (65, 0)), "window": 64},
        {"requests": ((200, 0), (64, 40), (20, 0)), "window": 20},  # the sliding window is the shorter one
        {"soft_cap": 2.0},
        {"recent": 1},
        {"recent": 200, "requests": ((140, 0), (30, 0))},  # longer than the requests: nothing is read from pages
    ],
    ids=str,
)
def test_decode(options) -> None:
    output, expected = run(**{"name": "isoquant3", **options})
    assert relative_rms(output, expected) < BOUND


@pytest.mark.parametrize("seed", range(6))
def test_plan_equals_the_reference(seed: int) -> None:
    """Chunks, decodes, drafts, hits, padding, and a chunk of whose own tokens no block has the newest."""
    generator = torch.Generator().manual_seed(seed)
    window, block_size, drafts = (16, 64, 33)[seed % 3], (1, 4, 8)[seed % 3], (0, 3)[seed % 2]

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lens = [draw(2, 1500) for _ in range(8)]
    requests = [(n, draw(0, n) if i % 2 else 0) for i, n in enumerate(lens)]
    counts = [draw(1, n - hit + 1) if i > 3 else min(n - hit, 1 + draw(0, drafts + 1)) for i, (n, hit) in
              enumerate(requests)]  # fmt: skip
    lens[7], requests[7], counts[7] = 90, (90, 0), drafts + 2
    table, _, ring_blocks = ring_of(requests, window, block_size, 1, 32, drafts)
    table[7, 89 // block_size] = 0
    start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    sizes = dict(block_size=block_size, ring_blocks=ring_blocks, window=window, longest_decode=1 + drafts)
    results = []
    for function in (fill_slots, plan_ring):
        slots = torch.full((sum(counts) + 5,), 77, dtype=torch.int32, device=DEVICE)
        first = torch.full((len(lens),), -7, dtype=torch.int32, device=DEVICE)
        function(start, seq_lens, table, slots, first, **sizes)
        results.append((slots, first))
    (slots, first), (found_slots, found_first) = results
    assert torch.equal(first, found_first)
    assert torch.equal(slots, found_slots)
    kept = slots[slots >= 0]
    assert len(kept.unique()) == len(kept) > 0
    assert (slots[-5:] == -1).all()


@pytest.mark.parametrize("head_dim", [64, 96])
def test_gather_writes_what_the_ring_has(head_dim: int) -> None:
    kv_heads, block_size, window = 2, 4, 16
    requests = [(40, 0), (33, 30), (9, 0)]
    table, cache, _ = ring_of(requests, window, block_size, kv_heads, head_dim, 0)
    generator = torch.Generator().manual_seed(head_dim)
    stored = torch.randn(3, 40, 2, kv_heads, head_dim, generator=generator).to(DEVICE)
    for i, (tokens, hit) in enumerate(requests):
        for token in range(hit, tokens):
            block = int(table[i, token // block_size])
            slot = torch.tensor([block * block_size + token % block_size if block else -1], device=DEVICE)
            reference.write(cache, slot, stored[i, token, 0][None], stored[i, token, 1][None])
    first = torch.tensor([25, 32, 0], dtype=torch.int32, device=DEVICE)
    spans = torch.tensor([[0, -16, 25, 40], [1, 24 - 0, 18, 33], [2, 57, 0, 9]], dtype=torch.int32, device=DEVICE)
    key, value = torch.full((2, 70, kv_heads, head_dim), float("nan"), dtype=torch.float16, device=DEVICE)
    gather_ring(Ring(cache, table, first, window), spans, key, value)
    expected = torch.full((2, 70, kv_heads, head_dim), float("nan"), dtype=torch.float16, device=DEVICE)
    for request, row, low, end in spans.tolist():
        for token in range(max(low, int(first[request])), end):
            expected[:, row + token] = reference.round_trip(stored[request, token]).half()
    assert torch.equal(torch.stack((key, value)).view(torch.int16), expected.view(torch.int16))
