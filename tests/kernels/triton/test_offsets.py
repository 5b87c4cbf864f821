"""The reading kernels reach pages that lie more than 2^31 words, and so bytes, into the cache."""

from __future__ import annotations

import pytest
import torch
from launchers import decode, gather
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM, BLOCK_SIZE, TOKENS = 2, 128, 16, 64
BLOCKS = TOKENS // BLOCK_SIZE


@pytest.fixture(scope="module")
def codec() -> PagedCodec:
    return PagedCodec(FORMATS["tq4"], HEAD_DIM, device=DEVICE)


@pytest.fixture(scope="module")
def pages(codec: PagedCodec) -> torch.Tensor:
    cache = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8, device=DEVICE)
    key, value = torch.randn(2, TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    codec.write(cache, torch.arange(TOKENS, device=DEVICE), key, value)
    return cache


@pytest.fixture(scope="module")
def large(pages: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The same pages at the end of a cache of 9 GiB: on a CPU a sparse file, of which nothing else is touched."""
    blocks = (9 << 30) // pages[0].numel()
    size = blocks * pages[0].numel()
    if DEVICE == "cpu":
        file = tmp_path_factory.mktemp("cache") / "sparse"
        memory = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
        file.unlink()
    else:
        memory = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    cache = memory.view(blocks, *pages.shape[1:])
    cache[-BLOCKS:] = pages
    return cache


def attend(codec: PagedCodec, cache: torch.Tensor, first_block: int) -> torch.Tensor:
    """Return what `decode` leaves for `merge`, for the tokens in the blocks from `first_block` on."""
    query = torch.randn(1, HEADS, 4, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    partial = torch.full((1, HEADS * 4, 2, HEAD_DIM), float("nan"), device=DEVICE)
    stats = torch.full((1, HEADS * 4, 2, 2), float("nan"), device=DEVICE)
    start, seq_lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1], [TOKENS]))
    table = torch.arange(first_block, first_block + BLOCKS, dtype=torch.int32, device=DEVICE)[None]
    decode(codec.layout, query, cache, table, start, seq_lens, partial, stats, max_query_len=1)
    assert not partial.isnan().any()
    return partial


def test_decode(codec: PagedCodec, pages: torch.Tensor, large: torch.Tensor) -> None:
    assert torch.equal(attend(codec, large, len(large) - BLOCKS), attend(codec, pages, 0))


def test_gather(codec: PagedCodec, pages: torch.Tensor, large: torch.Tensor) -> None:
    key, value = torch.full((2, TOKENS, HEADS, HEAD_DIM), float("nan"), dtype=torch.float16, device=DEVICE)
    micro_blocks = torch.arange(BLOCKS, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(0, TOKENS + 1, 16, dtype=torch.int32, device=DEVICE)
    gather(codec.layout, large, micro_blocks + len(large) - BLOCKS, rows, key, value)
    for ours, expected in zip((key, value), codec.read(pages, micro_blocks), strict=True):
        assert torch.equal(ours, expected.transpose(0, 1).half())
