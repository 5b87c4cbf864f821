"""The store of the CPU writes the bytes of the reference, into pages and ring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_layers import cases, codec_of, pages, ring, vectors
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import write as write_ring
from packed_kv.formats import Format
from packed_kv.kernels.cpu.compiler import Target
from packed_kv.kernels.cpu.store import CpuStore

HEADS, BLOCK = 3, 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(
    codec: PagedCodec, store: CpuStore, slots: torch.Tensor, positions: torch.Tensor, ring_slots: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Store tokens into equal caches by the reference and by the kernel."""
    head_dim, value_dim = codec.key.head_dim, codec.value.head_dim
    key, value = vectors(len(slots), HEADS, head_dim, value_dim, dtype)
    blocks = int(slots.max()) // BLOCK + 1
    caches = [pages(codec.key.fmt.name, blocks, HEADS, BLOCK, head_dim) for _ in range(2)]
    rings = [ring(40, HEADS, 4, head_dim) for _ in range(2)]
    codec.write(caches[0], slots, key, value, positions)
    rows = slice(0, len(ring_slots))
    write_ring(rings[0], ring_slots, *codec.prepare(key[rows], value[rows], positions[rows]))
    store(caches[1], key, value, slots, positions, rings[1], ring_slots)
    assert torch.equal(*caches), "the pages differ"
    # The last bytes of a slot are padding, which neither writes.
    assert torch.equal(*rings), "the rings differ"
    rings[1].fill_(255)
    store(None, key, value, slots, positions, rings[1], ring_slots)
    assert torch.equal(*rings) and torch.equal(*caches), "the ring alone"


def step(lengths: list[int], starts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, positions and ring slots of requests with `lengths` new tokens behind `starts`, in blocks out of order.

    Some tokens are in no page, some of the last 32 in no ring.
    """
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    a_request = max(start + n for start, n in zip(starts, lengths, strict=True)) // BLOCK + 1
    blocks = torch.randperm(len(lengths) * a_request, generator=torch.Generator().manual_seed(5))
    slots = blocks[request * a_request + positions // BLOCK] * BLOCK + positions % BLOCK
    slots[torch.arange(len(slots)) % 11 == 7] = -1
    ring_slots = torch.full((len(slots),), -1, dtype=torch.int32)
    newest = torch.arange(len(slots))[-32:]
    ring_slots[newest] = torch.randperm(160, generator=torch.Generator().manual_seed(6))[: len(newest)].int()
    ring_slots[torch.arange(len(slots)) % 5 == 0] = -1
    return slots, positions, ring_slots


PROMPT, CHUNKS, DECODES, DRAFTS = ([70], [0]), ([1, 19, 33], [0, 500, 21]), ([1] * 6, [0, 1, 511, 512, 9, 1600]), (
    [3, 2, 3], [14, 0, 1023])  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "target"), cases())
def test_bytes_equal_the_reference(name: str, shape: tuple[int, int], target: Target) -> None:
    for calibrated in (False, True):
        codec = codec_of(name, *shape, HEADS, calibrated=calibrated)
        store = CpuStore(codec, target=target)
        for batch in (PROMPT, CHUNKS, DECODES, DRAFTS) if shape[0] in (80, 128) else (CHUNKS, DECODES):
            check(codec, store, *step(*batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_models_dtypes(dtype: torch.dtype) -> None:
    for name in ("tq4", "turboquant25"):
        codec = codec_of(name, 80, 48, HEADS, calibrated=True)
        check(codec, CpuStore(codec), *step(*CHUNKS), dtype=dtype)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    for name in ("tq4", "turboquant35", "turboquant25"):
        codec = codec_of(name, 128, 96, HEADS, calibrated=False)
        for batch in (PROMPT, DECODES):
            check(codec, CpuStore(codec), *step(*batch))


def test_threads_share_no_word_beside_tokens_of_the_ring_alone() -> None:
    """Tokens of a micro-block share words, and between them are tokens that go to no page."""
    torch.set_num_threads(4)
    codec, positions = codec_of("turboquant25", 128, 96, HEADS, calibrated=False), torch.arange(320)
    slots = torch.where(positions % 2 == 0, positions // 2, -1)
    for _ in range(30):
        check(codec, CpuStore(codec), slots, positions, torch.randperm(160).int())


def test_a_prompt_whose_every_token_is_stored() -> None:
    """Whole micro-blocks of 16, whose codes are packed where they lie."""
    codec = codec_of("turboquant35", 128, 128, HEADS, calibrated=False)
    positions = torch.arange(160)
    check(codec, CpuStore(codec), positions + 5, positions, torch.arange(128, dtype=torch.int32))


def test_nothing_to_store() -> None:
    codec = codec_of("tq4", 128, 128, HEADS, calibrated=False)
    store, cache = CpuStore(codec), pages("tq4", 2, HEADS, BLOCK, 128)
    before, (key, value) = cache.clone(), vectors(4, HEADS, 128, 128, torch.bfloat16)
    store(cache, key, value, torch.full((4,), -1))
    store(cache, key, value, torch.arange(0))
    assert torch.equal(cache, before)


def test_what_is_not_served() -> None:
    wide = Format("wide", rotation="hadamard", bits=4)
    with pytest.raises(ValueError, match=r"wide: the CPU's kernels do not serve heads of 512 channels \(at most 256\)"):
        CpuStore(PagedCodec(wide, 512))
