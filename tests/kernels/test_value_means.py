"""V less its mean, and at position 0 less a mean of its own: on every route, against attention over decoded values."""

from __future__ import annotations

import shutil
from typing import Any

import batches
import pytest
import test_cpu_decode
import test_cpu_gather
import test_cpu_store
import test_cpu_vectors
import test_cuda_prefix
import test_decode
import test_store
import torch
from implementations import attend_pages
from launchers import rotate_query, store_tokens, unrotate
from packed_kv import FORMATS
from packed_kv.codecs.ring import Ring
from packed_kv.kernels.cpu.gather import CpuGather
from packed_kv.kernels.cpu.store import CpuStore
from packed_kv.kernels.cpu.vectors import CpuVectors
from packed_kv.kernels.cuda.grids import Grid
from packed_kv.kernels.triton.means import Means
from packed_kv.kernels.triton.rotate import rotation_matrix
from packed_kv.reference.attention import AttentionOptions
from page_codecs import page_codec
from test_cuda_decode import runs
from test_decode import DEVICE, relative_rms

CUDA = "cuda emulated" if DEVICE == "cpu" else "cuda"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def means(head_dim: int, heads: int) -> dict[str, torch.Tensor]:
    """Means of K that move scores, and of V as large as its values: what is left out or added twice is seen."""
    generator = torch.Generator().manual_seed(head_dim)
    key, first_key, value, first_value = torch.randn(4, heads, head_dim, generator=generator)
    return dict(key_mean=2 * key, key_first_mean=first_key, value_mean=value, value_first_mean=2 * first_value)


DECODES: list[dict[str, Any]] = [
    {"seq_lens": (1, 37, 100)},
    {"seq_lens": (1, 40, 70), "query_lens": (1, 3, 2), "window": 30},
    {"seq_lens": (31, 40, 70), "query_lens": (2, 3, 0), "window": 30, "sinks": torch.float32, "soft_cap": 5.0},
    {"seq_lens": (5, 50), "sinks": torch.bfloat16, "splits": 1},
    {"seq_lens": (5, 50), "soft_cap": 5.0},
    {"seq_lens": (1, 700), "positions": 768, "key_rope": test_decode.rope(32)},
]


@pytest.mark.parametrize("options", DECODES, ids=str)
def test_decodes_by_triton(options: dict[str, Any]) -> None:
    shape = {"head_dim": 64, "kv_heads": 2, "group": 4} | options
    assert relative_rms(*test_decode.run("tq4", **means(64, 2), **shape)) < test_decode.BOUND


CUDA_DECODES: list[tuple[str, dict[str, Any]]] = [
    ("tq4", {"splits": Grid(8, 6, True)}),  # each request alone
    ("tq3", {"head_dim": 128, "splits": Grid(2, 3, True), "seq_lens": (1, 37, 700)}),  # parts, combined
    ("turboquant25", {"splits": Grid(1, 5, False)}),  # merged
    ("tq4", {"splits": Grid(2, 3, True), "seq_lens": (1, 700), "positions": 768, "key_rope": test_decode.rope(32)}),
    ("tq3", {"group": 8, "query_lens": (1, 8, 3), "splits": Grid(2, 4, True), "returns_lse": True}),  # 64 columns
    ("tq4", {"head_dim": 128, "group": 8, "query_lens": (1, 8, 3), "splits": Grid(4, 4, True)}),  # by roles
    (
        "tq4",
        {"head_dim": 128, "group": 8, "query_lens": (1, 20, 3), "splits": Grid(4, 4, True), "seq_lens": (1, 37, 600)},
    ),
    ("tq4", {"head_dim": 256, "group": 6, "splits": Grid(4, 2, True), "seq_lens": (1, 37, 700)}),
    (
        "tq3",
        {"head_dim": 256, "group": 6, "query_lens": (4, 1, 2), "splits": Grid(4, 2, True), "seq_lens": (9, 37, 700)},
    ),
    (
        "tq4",
        {"head_dim": 256, "group": 6, "query_lens": (2, 1, 2), "splits": Grid(2, 2, True), "seq_lens": (9, 37, 700)},
    ),
]


@runs
@pytest.mark.parametrize(("name", "options"), CUDA_DECODES, ids=str)
def test_decodes_by_cuda(name: str, options: dict[str, Any]) -> None:
    shape = {"head_dim": 64, "kv_heads": 2, "group": 4, "kernel": CUDA} | options
    assert relative_rms(*test_decode.run(name, **means(shape["head_dim"], 2), **shape)) < test_decode.BOUND


@runs
@pytest.mark.parametrize("name", ["tq4", "tq3"])
@pytest.mark.parametrize("recent", [0, 40])
def test_passes_over_prefixes(name: str, recent: int) -> None:
    """One prefix has no tokens, one has token 0 alone, one lies in the ring with token 0."""
    chunks, prefixes = (2, 1, 5, 9, 3), (0, 1, 30, 77, 600)
    test_cuda_prefix.check(dict(name=name, chunks=chunks, prefixes=prefixes, recent=recent, **means(128, 1)))


@runs
@pytest.mark.parametrize("kernel", ["triton", CUDA])
def test_token_0_in_the_ring(kernel: str) -> None:
    """Alone there, for some query tokens of a request, and on either side of the window."""
    batch = batches.Batch("tq4", [(1, 1), (5, 5), (20, 5), (90, 1)], heads=(4, 1), window=17, **means(64, 1))
    decoded = attend(kernel, batch)
    assert relative_rms(decoded.cpu(), batch.reference(AttentionOptions(0.125))) < test_decode.BOUND


def attend(kernel: str, batch: batches.Batch) -> torch.Tensor:
    codec = page_codec(FORMATS["tq4"], 64, device=DEVICE, **means(64, 1))
    key_means, value_means = (Means.of(part.transform) for part in codec.codecs)
    assert batch.ring is not None and key_means is not None
    of_ring = (batch.ring.cache, batch.ring.block_table, batch.ring.first)
    ring = Ring(*(x.to(DEVICE) for x in of_ring), batch.ring.window)
    query, lists = batch.query.to(DEVICE), [x.to(DEVICE) for x in (batch.table, batch.query_start, batch.seq_lens)]
    rotated = torch.empty(len(query), 1, 4, 64, dtype=torch.float16, device=DEVICE)
    bias = torch.full((len(query), 4, 3), float("nan"), device=DEVICE)
    positions = torch.zeros(len(query), dtype=torch.int64, device=DEVICE)
    rotate_query(query, rotation_matrix(codec.key, 1), rotated, 0.125, key_means, positions, bias)
    output = torch.full((len(query), 4, 64), float("nan"), device=DEVICE)
    attend_pages(
        kernel, codec.layout, rotated, batch.cache.to(DEVICE), *lists, rotation_matrix(codec.value, 1, inverse=True),
        output, 2, max_query_len=5, query_bias=bias, ring=ring, value_means=value_means,
    )  # fmt: skip
    return output


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_the_store_kernel_writes_the_codecs_bytes(name: str) -> None:
    codec = page_codec(FORMATS[name], 64, device=DEVICE, **means(64, 3))
    cache, positions = torch.zeros(2, 3, 16, codec.slot_bytes, dtype=torch.uint8).to(DEVICE), torch.arange(20) % 6
    slots, positions = torch.arange(20, device=DEVICE), positions.to(DEVICE)
    key, value = test_store.vectors(20, 64).to(DEVICE)
    expected = cache.clone()
    codec.write(expected, slots, key, value, positions)
    store_tokens(codec, cache, slots, key, value, positions)
    assert torch.equal(cache, expected)
    packed = codec.value.encode(value, positions[:, None])
    assert torch.equal(codec.value.encode(codec.value.decode(packed, positions[:, None]), positions[:, None]), packed)


def test_gathered_values_have_their_means_again() -> None:
    codec, positions = page_codec(FORMATS["tq4"], 64, device=DEVICE, **means(64, 2)).value, torch.arange(40) % 17
    x = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    places = positions.to(DEVICE)
    packed = codec.encode(x, places[:, None])
    rotated, matrix = codec.dequantize(*codec.unpack(packed)).half(), rotation_matrix(codec, 2, inverse=True)
    found = unrotate(rotated, matrix, torch.float16, Means.of(codec.transform), places.to(torch.int32)).float()
    expected = codec.decode(packed, places[:, None])
    assert ((found - expected).norm(dim=-1) < 2**-9 * expected.norm(dim=-1)).all()


def test_ranks_without_token_0_have_one_mean() -> None:
    transform = page_codec(FORMATS["tq4"], 64, **means(64, 2)).value.transform
    with_first, without = Means.of(transform), Means.of(transform, has_first=False)
    assert with_first is not None and without is not None
    mean, _, of_first = with_first.rows.unbind(1)
    assert torch.equal(without.rows[:, 2], mean) and not torch.equal(of_first, mean)


def test_means_of_values_need_those_of_keys() -> None:
    given = {name: x for name, x in means(64, 2).items() if name.startswith("value")}
    with pytest.raises(ValueError, match="means of V are given without means of K"):
        page_codec(FORMATS["tq4"], 64, **given)


SINKS = torch.tensor([-1.0, 1.5, 3.0, 6.0, 0.0, -20.0])
CPU_OPTIONS = {
    "plain": AttentionOptions(0.125),
    "window": AttentionOptions(0.125, sliding_window=37),
    "sinks, window and cap": AttentionOptions(0.5, sliding_window=50, logits_soft_cap=2.0, sinks=SINKS),
}


@needs_compiler
@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("options", CPU_OPTIONS.values(), ids=CPU_OPTIONS)
def test_decodes_in_cpp(options: AttentionOptions, window: int) -> None:
    """With drafts, of which one reads token 0 from the ring and the next from pages, and a request of token 0 alone."""
    batch = batches.Batch("tq4", [(1, 1), (5, 5), (40, 4), (66, 6), (800, 1), (0, 0)], window=window, **means(64, 2))
    test_cpu_decode.check(batch, options)


@needs_compiler
@pytest.mark.parametrize("name", ["tq3", "turboquant35"])
def test_stores_gathers_and_vectors_in_cpp(name: str) -> None:
    codec = page_codec(FORMATS[name], 64, **means(64, test_cpu_store.HEADS))
    for batch in (test_cpu_store.CHUNKS, test_cpu_store.DECODES):
        test_cpu_store.check(codec, CpuStore(codec), *test_cpu_store.step(*batch))
    test_cpu_vectors.check(codec, CpuVectors(codec), 2, 9, 4, torch.float32)
    request = test_cpu_gather.Request(page_codec(FORMATS[name], 64, **means(64, test_cpu_gather.HEADS)))
    found = [torch.empty(test_cpu_gather.TOKENS, test_cpu_gather.HEADS, 64) for _ in range(2)]
    CpuGather(request.codec)(request.cache, request.table, 0, len(found[0]), *found, ring=request.ring, ring_from=61)
    for ours, theirs in zip(found, request.expected(61), strict=True):
        assert torch.equal(ours, theirs)
