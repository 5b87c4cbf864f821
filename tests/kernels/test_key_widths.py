"""K's groups of other widths than V's, as a calibration file may choose them: on every route."""

from __future__ import annotations

import shutil

import batches
import pytest
import test_cpu_decode
import test_cpu_gather
import test_cpu_store
import test_cpu_vectors
import test_decode
import test_gather
import test_ring
import test_store
import torch
from launchers import gather, store_tokens
from packed_kv import FORMATS
from packed_kv.codecs.pages import PagedCodec
from packed_kv.kernels.cpu.compiler import TARGETS, Target, processor
from packed_kv.kernels.cpu.gather import CpuGather
from packed_kv.kernels.cpu.store import CpuStore
from packed_kv.kernels.cpu.vectors import CpuVectors
from packed_kv.kernels.triton import store_section
from page_codecs import page_codec
from test_decode import DEVICE, relative_rms

CUDA = "cuda emulated" if DEVICE == "cpu" else "cuda"
WIDTHS = [
    ("tq3", 64, (4, 2)), ("tq3", 128, (4, 3, 3, 2)), ("turboquant35", 128, (4, 4, 3, 2)), ("tq3", 96, (4, 3, 2)),
    ("tq3", 256, (4, 4, 4, 3, 3, 2, 2, 2)), ("tq4", 64, (5, 3)), ("tq4", 128, (5, 4, 4, 3)),
    ("turboquant35", 64, (5, 2)),
]  # fmt: skip
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
every_width = pytest.mark.parametrize(("name", "head_dim", "bits"), WIDTHS)


@pytest.fixture(autouse=True)
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays for operations, not for lanes."""
    if DEVICE == "cpu":
        monkeypatch.setattr(store_section, "ROWS", 1024)


def channels(head_dim: int, heads: int) -> dict[str, torch.Tensor]:
    """Rankings and scales of heads, and V's outlier channels for the formats that have them."""
    generator = torch.Generator().manual_seed(head_dim)
    ranking = torch.stack([torch.randperm(head_dim, generator=generator) for _ in range(heads)])
    return {"key_ranking": ranking, "key_scale": (0.5 * torch.randn(heads, head_dim, generator=generator)).exp()}


def codec_of(name: str, head_dim: int, bits: tuple[int, ...], heads: int) -> PagedCodec:
    return page_codec(FORMATS[name], head_dim, key_group_bits=bits, **channels(head_dim, heads))


@every_width
def test_pages(name: str, head_dim: int, bits: tuple[int, ...]) -> None:
    codec, today = codec_of(name, head_dim, bits, 3), PagedCodec(FORMATS[name], head_dim)
    assert codec.layout.planes == today.layout.planes and codec.slot_bytes == today.slot_bytes
    x = torch.randn(40, 3, head_dim, generator=torch.Generator().manual_seed(1))
    packed = codec.key.encode(x)
    assert torch.equal(codec.key.encode(codec.key.decode(packed)), packed)
    cache = torch.randint(0, 256, (2, 3, 32, codec.slot_bytes), dtype=torch.uint8)
    codec.write(cache, torch.arange(40), x, x)
    key, _ = codec.read(cache, torch.arange(2))
    expected = codec.key.dequantize(*codec.key.unpack(packed[:32])).transpose(0, 1)
    assert torch.equal(key, expected)


@every_width
def test_the_store_kernel_writes_the_codecs_bytes(name: str, head_dim: int, bits: tuple[int, ...]) -> None:
    codec = page_codec(FORMATS[name], head_dim, device=DEVICE, key_group_bits=bits, **channels(head_dim, 3))
    cache = torch.randint(0, 256, (3, 3, 16, codec.slot_bytes), dtype=torch.uint8).to(DEVICE)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(2))[:13].to(DEVICE)
    slots[5] = -1
    key, value = test_store.vectors(13, head_dim).to(DEVICE)
    expected = cache.clone()
    codec.write(expected, slots, key, value)
    store_tokens(codec, cache, slots, key, value)
    assert torch.equal(cache, expected)


@every_width
def test_queries_are_rotated_in_the_launch_that_stores(name: str, head_dim: int, bits: tuple[int, ...]) -> None:
    codec = page_codec(
        FORMATS[name], head_dim, device=DEVICE, key_group_bits=bits, **channels(head_dim, test_store.HEADS)
    )
    test_store.check_rotated_queries(codec, 7)


@every_width
@pytest.mark.parametrize("kernel", ["triton", CUDA])
def test_decodes_equal_the_reference(name: str, head_dim: int, bits: tuple[int, ...], kernel: str) -> None:
    if kernel != "triton" and head_dim == 96:
        pytest.skip("the CUDA kernel has no heads of 96 channels")
    shape = {"seq_lens": (1, 70), "kv_heads": 1, "head_dim": head_dim}
    options = {"kernel": kernel, "key_group_bits": bits, **channels(head_dim, 1), **shape}
    assert relative_rms(*test_decode.run(name, **options)) < test_decode.BOUND


@every_width
def test_gathered_tokens_equal_the_pages(name: str, head_dim: int, bits: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    codec = page_codec(FORMATS[name], head_dim, device=DEVICE, key_group_bits=bits, **channels(head_dim, 2))
    cache, table, _ = test_gather.pages(codec, 2, (27,), 16, generator)
    rows = torch.tensor([0, 16, 27], dtype=torch.int32, device=DEVICE)
    key, value = torch.full((2, 27, 2, head_dim), float("nan"), dtype=torch.float16, device=DEVICE)
    gather(codec.layout, cache, table[0], rows, key, value)
    for ours, reference in zip((key, value), codec.read(cache, table[0]), strict=True):
        assert torch.equal(ours, reference.transpose(0, 1)[:27].half())


@pytest.mark.parametrize(("name", "head_dim", "bits"), [WIDTHS[0], WIDTHS[2], WIDTHS[5], WIDTHS[7]])
@needs_compiler
def test_cpp(name: str, head_dim: int, bits: tuple[int, ...]) -> None:
    """Stores, gathers, decodes and vectors outside of pages, in C++."""
    heads = test_cpu_store.HEADS
    codec = codec_of(name, head_dim, bits, heads)
    for batch in (test_cpu_store.CHUNKS, test_cpu_store.DECODES):
        test_cpu_store.check(codec, CpuStore(codec), *test_cpu_store.step(*batch))
    test_cpu_vectors.check(codec, CpuVectors(codec), 2, 9, 4, torch.float32)
    request = test_cpu_gather.Request(codec_of(name, head_dim, bits, test_cpu_gather.HEADS))
    found = [torch.empty(test_cpu_gather.TOKENS, test_cpu_gather.HEADS, head_dim) for _ in range(2)]
    CpuGather(request.codec)(request.cache, request.table, 0, len(found[0]), *found, ring=request.ring, ring_from=61)
    for ours, theirs in zip(found, request.expected(61), strict=True):
        assert torch.equal(ours, theirs)
    test_cpu_decode.check(
        batches.Batch(name, [1, 100, (300, 3)], head_dim, window=16, key_group_bits=bits, **channels(head_dim, 2))
    )


@needs_compiler
@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_five_bits_in_every_build_for_this_processor(target: Target) -> None:
    if not processor()[1].issuperset(target.features):
        pytest.skip(f"this processor is not of {target.name}")
    for name, bits in (("tq4", (5, 3)), ("turboquant35", (5, 2))):  # signs in a word, and in half of one
        batch = batches.Batch(name, [1, 100, (300, 3)], 64, window=16, key_group_bits=bits, **channels(64, 2))
        test_cpu_decode.check(batch, target=target)


@pytest.mark.parametrize("recent", [0, 64])
def test_warps_that_only_unpack(recent: int) -> None:
    """They lift each group of K by a power of its own."""
    options = {"kernel": CUDA, "key_group_bits": (5, 4, 4, 3), **channels(128, 1), "kv_heads": 1}
    shape = {"group": 16, "query_lens": (4, 3)}
    if recent:
        error = relative_rms(*test_ring.run("tq4", recent=recent, requests=((150, 0), (70, 40)), **shape, **options))
    else:
        error = relative_rms(*test_decode.run("tq4", seq_lens=(150, 70), **shape, **options))
    assert error < test_decode.BOUND
