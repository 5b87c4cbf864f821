"""Prefill on a CPU against plain attention over what the chunk has raw and what its prefix is in pages and ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packed_kv.attention import cpu_prefill
from packed_kv.attention.cpu_prefill import CpuPrefill
from packed_kv.attention.metadata import Batch as LayerBatch
from packed_kv.attention.metadata import PackedMetadata
from packed_kv.codecs import ring as rings
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.layout import MEAN_BLOCK, ring_slot_bytes
from packed_kv.model.rope import Rope
from packed_kv.reference.attention import AttentionOptions
from packed_kv.vllm_compat import cpu_instructions
from page_codecs import page_codec
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's attention op is that of its CPU platform")
HEADS, KV_HEADS, BLOCK, WINDOW = 6, 2, 32, 64
LENGTHS = ((40, 0), (1, 30), (150, 0), (33, 1100), (70, 47), (5, 640))
"""New tokens of each request, and tokens before them."""
SINKS = torch.tensor([-1.0, 1.5, 3.0, 6.0, 0.0, 2.0])
OPTIONS = {
    "plain": AttentionOptions(0.1),
    "sliding window": AttentionOptions(0.1, sliding_window=37),
    "long window": AttentionOptions(0.1, sliding_window=700),
    "soft cap": AttentionOptions(0.3, logits_soft_cap=5.0),
    "sinks": AttentionOptions(0.1, sinks=SINKS),
}


@pytest.fixture(autouse=True, scope="module")
def vllms_ops() -> None:
    current_platform.import_kernels()


@dataclass
class Request:
    """K and V of all tokens: raw, as pages have them and as a ring does, fp32 [tokens, KV heads, channels]."""

    raw: list[torch.Tensor]
    stored: list[torch.Tensor]
    recent: list[torch.Tensor]
    query: torch.Tensor


class Batch:
    """Requests in shuffled blocks of poisoned pages, and in rings of their last `WINDOW` tokens."""

    def __init__(self, codec: PagedCodec, options: AttentionOptions, dtype: torch.dtype) -> None:
        self.codec, self.options, self.dtype = codec, options, dtype
        dims = codec.key.head_dim, codec.value.head_dim
        random = torch.Generator().manual_seed(0)
        longest = max(map(sum, LENGTHS))
        a_request, a_ring = -(-longest // BLOCK), -(-longest // 4)
        blocks = torch.randperm(a_request * len(LENGTHS), generator=random).to(torch.int32)
        self.table = blocks.view(len(LENGTHS), -1)
        self.cache = torch.full((len(blocks), KV_HEADS, BLOCK, codec.slot_bytes), 255, dtype=torch.uint8)
        ring_blocks = torch.randperm(a_ring * len(LENGTHS), generator=random).to(torch.int32).view(len(LENGTHS), -1)
        first = torch.tensor([max(0, prefix - WINDOW + 11) for _, prefix in LENGTHS], dtype=torch.int32)
        slots = (ring_blocks.numel(), KV_HEADS, 4, ring_slot_bytes(dims[0]))
        self.ring = rings.Ring(torch.full(slots, 255, dtype=torch.uint8), ring_blocks, first, WINDOW)
        self.requests = [self._request(i, random) for i in range(len(LENGTHS))]

    def _request(self, number: int, random: torch.Generator) -> Request:
        count, prefix = LENGTHS[number]
        total, codec, positions = count + prefix, self.codec, torch.arange(count + prefix)
        raw = [
            torch.randn(total, KV_HEADS, dim, generator=random).to(self.dtype).float()
            for dim in (codec.key.head_dim, codec.value.head_dim)
        ]
        table = self.table[number].long()
        codec.write(self.cache, table[positions // BLOCK] * BLOCK + positions % BLOCK, *raw, positions)
        prepared = codec.prepare(*raw, positions)
        micro_blocks = table[positions[::16] // BLOCK] * (BLOCK // 16) + positions[::16] // 16 % (BLOCK // 16)
        stored = [x[:, :total].transpose(0, 1) for x in codec.read(self.cache, micro_blocks)]
        first = int(self.ring.first[number])
        in_ring = positions[first:prefix]
        slots = self.ring.block_table[number].long()[in_ring // 4] * 4 + in_ring % 4
        rings.write(self.ring.cache, slots, *(x[first:prefix] for x in prepared))
        places = (positions[:, None], None)
        stored = [part.restore(x, place) for part, x, place in zip(codec.codecs, stored, places, strict=True)]
        recent = [
            part.restore(rings.round_trip(x), place)
            for part, x, place in zip(codec.codecs, prepared, places, strict=True)
        ]
        query = torch.randn(count, HEADS, codec.key.head_dim, generator=random).to(self.dtype)
        return Request(raw, stored, recent, query)

    def expected(self, *, with_ring: bool, shared: bool) -> torch.Tensor:
        """Textbook attention in fp64, [tokens, query heads, value_dim]."""
        outputs = []
        for number, ((_, prefix), request) in enumerate(zip(LENGTHS, self.requests, strict=True)):
            whole = [x.clone() for x in request.stored]
            if not shared:
                for ours, raw in zip(whole, request.raw, strict=True):
                    ours[prefix:] = raw[prefix:]
            if with_ring:
                start = max(int(self.ring.first[number]), prefix - WINDOW + 1)
                for ours, recent in zip(whole, request.recent, strict=True):
                    ours[start:prefix] = recent[start:prefix]
            outputs.append(naive(request.query, *(x.to(self.dtype) for x in whole), self.options))
        return torch.cat(outputs)

    def metadata(self) -> PackedMetadata:
        starts = [0]
        for count, _ in LENGTHS:
            starts.append(starts[-1] + count)
        lens = torch.tensor([sum(lengths) for lengths in LENGTHS], dtype=torch.int32)
        none = torch.empty(0, dtype=torch.int64)
        return PackedMetadata(
            starts[-1], self.table, none, none, torch.tensor(starts, dtype=torch.int32), lens, starts, lens.tolist(), 0,
            0, 0, lens,
        )  # fmt: skip

    def attend(self, prefill: CpuPrefill, *, with_ring: bool = False, shared: bool = False) -> torch.Tensor:
        rows = [slice(prefix, None) for _, prefix in LENGTHS]
        query = torch.cat([request.query for request in self.requests])
        key, value = (
            torch.cat([request.raw[i][part] for part, request in zip(rows, self.requests, strict=True)]).to(self.dtype)
            for i in (0, 1)
        )
        output = torch.full((len(query), HEADS, self.codec.value.head_dim), torch.nan, dtype=self.dtype)
        own = (None, None) if shared else (key, value)
        ring = self.ring if with_ring else None
        prefill.attend(LayerBatch(query, *own, self.cache, self.metadata(), output), 0, ring)
        return output


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    count, total, group = len(query), len(key), query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * options.scale
    if options.logits_soft_cap:
        scores = options.logits_soft_cap * torch.tanh(scores / options.logits_soft_cap)
    distance = torch.arange(total - count, total)[:, None] - torch.arange(total)
    scores = scores.masked_fill((distance < 0) | (distance >= (options.sliding_window or total)), -torch.inf)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.double()[:, None, None].expand(-1, count, 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], value)


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours.double() - theirs).norm() / theirs.norm()
    assert error < 4 * torch.finfo(ours.dtype).eps, error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_plain_attention(options: AttentionOptions, dtype: torch.dtype) -> None:
    batch = Batch(PagedCodec(FORMATS["tq4"], 64), options, dtype)
    prefill = CpuPrefill(batch.codec, HEADS, KV_HEADS, options, 1300, dtype, engine=1)
    prefill.scratch.cache.fill_(torch.nan)  # of a former request
    for with_ring in (False, True):
        check(batch.attend(prefill, with_ring=with_ring), batch.expected(with_ring=with_ring, shared=False))
    check(batch.attend(prefill, shared=True), batch.expected(with_ring=False, shared=True))


def test_requests_that_do_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(PagedCodec(FORMATS["turboquant25"], 64), OPTIONS["plain"], torch.bfloat16)
    metadata = batch.metadata()
    monkeypatch.setattr(cpu_prefill, "PIECE", 48)
    prefill = CpuPrefill(batch.codec, HEADS, KV_HEADS, OPTIONS["plain"], 1133, torch.bfloat16, engine=2)
    batches = prefill._scratch_batches(metadata, 0, shared=False)
    requests = [span.request for fitting in batches for span in fitting.spans]
    assert len(batches) > 1 and requests == list(range(len(LENGTHS)))
    check(batch.attend(prefill, with_ring=True), batch.expected(with_ring=True, shared=False))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 80), (128, 96), (192, 128)])
def test_heads(head_dim: int, value_dim: int) -> None:
    random = torch.Generator().manual_seed(4)
    calibration: dict[str, Any] = {
        "key_mean": torch.randn(KV_HEADS, head_dim, generator=random),
        "key_scale": torch.randn(KV_HEADS, head_dim, generator=random).exp(),
        "key_rope": Rope(tuple(10000.0 ** (-i / head_dim) for i in range(head_dim // 2))),
        "positions": 3 * MEAN_BLOCK,
    }
    codec = page_codec(FORMATS["turboquant35"], head_dim, value_dim=value_dim, **calibration)
    batch = Batch(codec, OPTIONS["plain"], torch.bfloat16)
    prefill = CpuPrefill(codec, HEADS, KV_HEADS, OPTIONS["plain"], 1300, torch.bfloat16, engine=3)
    check(batch.attend(prefill, with_ring=True), batch.expected(with_ring=True, shared=False))


def test_layers_share_a_scratch_cache() -> None:
    codec = PagedCodec(FORMATS["tq4"], 64)
    layers = [
        CpuPrefill(codec, heads, KV_HEADS, OPTIONS["plain"], 300, torch.bfloat16, engine)
        for heads, engine in ((6, 4), (2, 4), (6, 5))
    ]
    assert layers[0].scratch is layers[1].scratch is not layers[2].scratch


@pytest.mark.parametrize("isa", ["amx", "vec"])
def test_tiles_are_asked_for(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux kills a process that runs vLLM's op on AMX tiles before it asked for them."""
    asked: list[str] = []
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: isa)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append("tiles"))
    assert cpu_instructions(torch.bfloat16, 128, 64) == isa
    assert asked == ["tiles"] * (isa == "amx")
