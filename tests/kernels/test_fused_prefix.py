"""Attention of a layer whose chunks' prefixes the CUDA kernel reads in the pages: steps of decodes, new prompts, and
chunks of few and many passes. On a Hopper GPU, else with the kernel emulated by g++."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import emulated
import pytest
import torch
from packed_kv.attention import decode as pairs
from packed_kv.attention.layer import PairAttention, PairKernels
from packed_kv.attention.layouts import PairLayout
from packed_kv.attention.limits import Limits
from packed_kv.attention.metadata import Batch, PackedMetadata
from packed_kv.attention.passes import (
    GRAPH_TOKENS,
    OverPrefixes,
    PassLimits,
    PrefixPass,
    PrefixPasses,
    plan_passes,
    prefix_passes,
)
from packed_kv.attention.prefill import FlashAttention, FlashPrefill
from packed_kv.attention.store import PairStore
from packed_kv.attention.triton_store import TritonPairStore
from packed_kv.codecs import ring as ring_codec
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import launch as cuda
from packed_kv.kernels.cuda import prefix_launch
from packed_kv.kernels.triton.combine import BEHIND, DECODE, NEW, PADDING
from packed_kv.kernels.triton.launch import Launch
from packed_kv.layout import page_layout
from packed_kv.reference.attention import AttentionOptions
from packed_kv.window.metadata import WindowMetadata
from packed_kv.window.slots import fill_slots
from packed_kv.window.step import WindowStep
from page_codecs import page_codec
from test_cuda_decode import runs
from test_decode import DEVICE, relative_rms
from test_gather import flash_attention
from test_ring import poisoned_ring
from test_shares import Workspace
from vllm.v1.worker import workspace

GROUP, BLOCK, WINDOW, RING_BLOCK, RING_BLOCKS = 16, 16, 24, 8, 5
MOST_PASSES = 2
DECODES, CHUNKS = [(40, 1), (17, 1)], [(50, 6), (9, 9), (66, 3), (45, 13), (38, 8), (21, 5)]
"""(tokens, new tokens) of requests: of chunks, one is a new prompt, and one has too many passes."""


class Case(NamedTuple):
    """A batch of requests (tokens, new tokens), and all tokens' K and V of each, float [2, tokens, 1, head_dim]."""

    lengths: list[tuple[int, int]]
    codec: PagedCodec
    vectors: list[torch.Tensor]
    query: torch.Tensor
    has_ring: bool

    @classmethod
    def of(
        cls, name: str, head_dim: int, lengths: list[tuple[int, int]], *, has_ring: bool, **channels: torch.Tensor
    ) -> Case:
        generator = torch.Generator().manual_seed(3)
        codec = page_codec(FORMATS[name], head_dim, device=DEVICE, **channels)
        vectors = [torch.randn(2, tokens, 1, head_dim, generator=generator).to(DEVICE).half() for tokens, _ in lengths]
        query = torch.randn(sum(new for _, new in lengths), GROUP, head_dim, generator=generator).to(DEVICE).half()
        return cls(lengths, codec, vectors, query, has_ring)

    def batch(self) -> Batch:
        """Return the step, with pages and rings that hold what came before it."""
        starts = torch.tensor([0, *(new for _, new in self.lengths)]).cumsum(0)
        seq_lens = torch.tensor([tokens for tokens, _ in self.lengths], dtype=torch.int32)
        table = torch.arange(len(self.lengths) * 5).flip(0).view(-1, 5).to(torch.int32)
        cache = torch.full((table.numel(), 1, BLOCK, self.codec.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
        ring_table = (
            torch.arange(len(self.lengths) * RING_BLOCKS).view(-1, RING_BLOCKS).repeat(1, 2).to(torch.int32) + 1
        )
        ring = poisoned_ring(ring_table.numel() // 2 + 1, 1, RING_BLOCK, self.codec.key.head_dim)
        slots = torch.empty(int(starts[-1]), dtype=torch.int32)
        first = torch.empty(len(self.lengths), dtype=torch.int32)
        sizes = dict(block_size=RING_BLOCK, ring_blocks=RING_BLOCKS, window=WINDOW, longest_decode=1)
        fill_slots(starts.to(torch.int32), seq_lens, ring_table, slots, first, **sizes)
        new_slots, positions = [], []
        for request, ((tokens, new), (key, value)) in enumerate(zip(self.lengths, self.vectors, strict=True)):
            ids = torch.arange(tokens, device=DEVICE)
            where = table.to(DEVICE)[request, ids // BLOCK].long() * BLOCK + ids % BLOCK
            old = slice(0, tokens - new)
            self.codec.write(cache, where[old], key[old], value[old], ids[old])
            held = ids[int(first[request]) : tokens - new]
            places = ring_table.to(DEVICE)[request, held // RING_BLOCK].long() * RING_BLOCK + held % RING_BLOCK
            ring_codec.write(ring, places, *(x[held] for x in self.codec.prepare(key, value, ids)))
            new_slots.append(where[tokens - new :]), positions.append(ids[tokens - new :])
        decodes = sum(new == 1 for _, new in self.lengths)
        metadata = PackedMetadata(
            int(starts[-1]), table.to(DEVICE), torch.cat(new_slots), torch.cat(positions),
            starts.to(DEVICE, torch.int32), seq_lens.to(DEVICE), starts.tolist(), seq_lens.tolist(), decodes, decodes,
            1, seq_lens.to(DEVICE),
        )  # fmt: skip
        window = None
        if self.has_ring:
            layer: Any = SimpleNamespace(kv_cache=ring, window=WINDOW, layer_name="ring", sharers=0)
            window = WindowStep(layer, WindowMetadata(ring_table.to(DEVICE), slots.to(DEVICE), first.to(DEVICE)), False)
        key, value = (
            torch.cat([x[i][-new:] for x, (_, new) in zip(self.vectors, self.lengths, strict=True)]) for i in (0, 1)
        )
        output = torch.full_like(self.query, float("nan"))
        return Batch(self.query, key, value, cache, metadata, output, window)

    def attend(self, attention: PairAttention) -> torch.Tensor:
        """Return the layer's output."""
        batch = self.batch()
        attention.forward(batch)
        return batch.output

    def expected(self, window: int | None = None, sinks: torch.Tensor | None = None) -> list[torch.Tensor | None]:
        """Return each chunk's attention over its prefix as it is stored and its own tokens as they are, float64; None
        of decodes. `window`, `sinks`: of the layer's options."""
        found: list[torch.Tensor | None] = []
        row = 0
        for (tokens, new), vectors in zip(self.lengths, self.vectors, strict=True):
            rows, row, ids = slice(row, row + new), row + new, torch.arange(tokens, device=DEVICE)
            whole = []
            for part, x, rotated in zip(
                (self.codec.key, self.codec.value), vectors, self.codec.prepare(*vectors, ids), strict=True
            ):
                stored = part.decode(part.encode(x.float(), ids[:, None]), ids[:, None]).double()
                if self.has_ring:
                    recent = (ids >= max(tokens - new - WINDOW + 1, 0))[:, None, None]
                    stored = torch.where(
                        recent, part.restore(ring_codec.round_trip(rotated), ids[:, None]).double(), stored
                    )
                whole.append(torch.cat((stored[: tokens - new], x[tokens - new :].double()))[:, 0])
            if new == 1:
                found.append(None)
                continue
            scores = self.query[rows].double() @ whole[0].T * self.codec.key.head_dim**-0.5
            own = torch.arange(tokens - new, tokens, device=DEVICE)[:, None]
            hidden = (ids > own) | (ids <= own - (window or tokens))
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().expand(new, GROUP)[..., None]), -1)
            found.append(scores.softmax(-1)[..., :tokens] @ whole[1])
        return found


def padded(batch: Batch, requests: int, tokens: int) -> Batch:
    """Return a batch as a CUDA graph of so many more requests and tokens is captured with it."""
    metadata, window, longest = batch.metadata, batch.window, batch.metadata.decode_query_len

    def more(x: torch.Tensor, rows: int, value: float) -> torch.Tensor:
        return torch.cat((x, torch.full((rows, *x.shape[1:]), value, dtype=x.dtype, device=x.device)))

    of_graph = replace(
        metadata, num_actual_tokens=metadata.num_actual_tokens + tokens, query_starts=[], context=[], decodes=-1,
        decode_tokens=-1, is_mixed_graph=True, decode_query_len=longest,
        block_table=more(metadata.block_table, requests, 0), slot_mapping=more(metadata.slot_mapping, tokens, -1),
        positions=more(metadata.positions, tokens, 0), seq_lens=more(metadata.seq_lens, requests, 0),
        query_start_loc=more(metadata.query_start_loc, requests, metadata.num_actual_tokens),
    )  # fmt: skip
    if window is not None:
        rings = window.metadata
        of_rings = WindowMetadata(
            more(rings.block_table, requests, 0), more(rings.slots, tokens, -1), more(rings.first, requests, 9)
        )
        window = WindowStep(window.layer, of_rings, False)
    assert batch.key is not None and batch.value is not None
    rows = [more(x, tokens, float("nan")) for x in (batch.query, batch.key, batch.value, batch.output)]
    return Batch(*rows[:3], batch.cache, of_graph, rows[3], window)


def layer(codec: PagedCodec, most_tokens: int, **options: Any) -> PairAttention:
    """Return a layer with these `AttentionOptions`."""
    shape = (codec, GROUP, 1, AttentionOptions(codec.key.head_dim**-0.5, **options))
    layout = PairLayout(*shape, Limits(1, 12, most_tokens, mixed_graphs=True))
    decode = pairs.pair_kernel(layout, pairs.rotation_of(layout), "auto")
    assert isinstance(decode, pairs.TritonPairs if options else pairs.CudaPairs)
    store = PairStore(TritonPairStore(codec, 1, decode.splits.rotation), decode.kind)
    prefill = FlashPrefill(*shape, 64, 8, FlashAttention(flash_attention, codec.value.head_dim))
    return PairAttention(PairKernels(*shape, store, decode, prefill))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Workspace()
    monkeypatch.setattr(pairs, "current_workspace_manager", lambda: memory)
    monkeypatch.setattr(workspace, "current_workspace_manager", lambda: memory)
    pays = prefix_launch.Pays(MOST_PASSES, 100 * 64)
    monkeypatch.setattr(prefix_launch, "PAYS", dict.fromkeys(prefix_launch.PAYS, pays))
    if DEVICE == "cpu":
        card = SimpleNamespace(multi_processor_count=4, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
        monkeypatch.setattr(cuda, "CudaDecode", emulated.CudaDecode)
        monkeypatch.setattr(prefix_launch, "CudaPrefix", emulated.CudaPrefix)


@runs
@pytest.mark.parametrize("has_ring", [False, True], ids=["", "ring"])
@pytest.mark.parametrize(("name", "head_dim"), [("tq4", 128), ("turboquant25", 64), ("turboquant25", 256)])
@pytest.mark.parametrize("decodes", [DECODES, []], ids=["decodes", ""])
def test_steps(
    decodes: list[tuple[int, int]], name: str, head_dim: int, has_ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are as in float64; decodes, to the bit as without passes. Passes have the chunks with
    a prefix and few passes."""
    if DEVICE == "cpu" and head_dim > 64 and not (decodes and has_ring):
        pytest.skip("the emulator takes minutes for each; a GPU runs all, and this one has decodes and the ring")
    case = Case.of(name, head_dim, decodes + CHUNKS, has_ring=has_ring)
    gathered: list[list[int]] = []
    parts = FlashPrefill._attend_prefixes
    monkeypatch.setattr(
        FlashPrefill,
        "_attend_prefixes",
        lambda *args: (gathered.append([read.part.tokens for read in args[3].parts]), parts(*args))[1],
    )
    output = case.attend(layer(case.codec, 64))
    plain = case.attend(layer(case.codec, 0))
    assert gathered == [[32], [44 + 63 + 32 + 30 + 16]]
    rows = [0, *torch.tensor([new for _, new in case.lengths]).cumsum(0).tolist()]
    for (start, end), expected in zip(pairwise(rows), case.expected(), strict=True):
        if expected is None:
            assert torch.equal(output[start:end], plain[start:end])
        else:
            assert relative_rms(output[start:end].double(), expected) < 2e-3
            assert relative_rms(plain[start:end].double(), expected) < 2e-3


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over a window are for graphs alone, up to the rows of the largest; other passes are limited by the kernel
    that reads them and by their partial results. Layers whose prefixes are read in another way share no step."""
    windows, sinks = (
        layer(PagedCodec(FORMATS["tq4"], 64, device=DEVICE), 8192, **options).kernels.decode
        for options in ({"sliding_window": 33}, {"sinks": torch.ones(GROUP, device=DEVICE)})
    )
    assert windows is not None and sinks is not None and windows.pass_limits is not None
    assert windows.pass_limits.each == 0 and windows.pass_limits.rows == GRAPH_TOKENS and windows.kind != sinks.kind
    passes = PrefixPasses(torch.zeros(3, 4, dtype=torch.int32, device=DEVICE), frozenset(), (slice(0, 9),))
    for decode in (windows, sinks):
        assert isinstance(decode, pairs.TritonPairs) and decode.splits.prefix is not None
        output, lse = (shape for shape, _ in decode.splits.prefix.memory(passes, torch.float16)[2:])
        assert output == (9, GROUP, 64) and lse == (9, GROUP), "a row each, up to the last of the passes"
    for head_dim, total in ((128, 2048), (256, 1024)):
        made = layer(PagedCodec(FORMATS["tq4"], head_dim, device=DEVICE), 8192).kernels.decode
        assert made is not None and made.pass_limits is not None and made.pass_limits.total == total
    monkeypatch.setattr(prefix_launch, "PAYS", {"unpackers": 1, "team": 2, "large": 3})
    found = [
        prefix_launch.pays(page_layout(FORMATS[name], dim)) for name, dim in (("tq4", 128), ("tq3", 128), ("tq4", 256))
    ]
    assert found == [1, 2, 3]


def test_plan() -> None:
    """A request has all passes or none: with a prefix, within the limits, behind the decodes."""
    starts, context = [0, 1, 2, 12, 20, 24, 30, 31, 50], [9, 9, 30, 8, 4, 106, 3, 119]
    limits = PassLimits(each=3, total=5, tokens=4, rows=50)
    assert plan_passes(starts, context, 2, limits) == [
        PrefixPass(2, 2, 4, 20), PrefixPass(2, 6, 4, 20), PrefixPass(2, 10, 2, 20), PrefixPass(5, 24, 4, 100),
        PrefixPass(5, 28, 2, 100),
    ]  # fmt: skip
    assert [one.request for one in plan_passes(starts, context, 2, limits._replace(total=4))] == [2, 2, 2, 6]
    assert [one.request for one in plan_passes(starts, context, 2, limits._replace(rows=30))] == [2, 2, 2, 5, 5]
    assert [one.request for one in plan_passes(starts, context, 2, limits._replace(each=2))] == [5, 5, 6]
    assert len(plan_passes(starts, context, 2, limits._replace(keys=120))) == 5
    assert not plan_passes(starts, context, 2, limits._replace(keys=121)), "too few keys in all"
    made = prefix_passes(plan_passes(starts, context, 2, limits._replace(total=6)), starts, torch.device("cpu"))
    assert made.table.dtype == torch.int32 and made.table[-1].tolist() == [6, 30, 1, 2]
    assert made.runs == (slice(2, 12), slice(24, 31)) and made.rows == 31 and made.requests == {2, 5, 6}


def check(case: Case, output: torch.Tensor, plain: torch.Tensor | None = None, **options: Any) -> None:
    """Check chunks against float64, and decodes against the output `plain` of a step without passes. `options`: see
    `Case.expected`."""
    rows = [0, *torch.tensor([new for _, new in case.lengths]).cumsum(0).tolist()]
    for (start, end), expected in zip(pairwise(rows), case.expected(**options), strict=True):
        if expected is not None:
            assert relative_rms(output[start:end].double(), expected) < 2e-3
        elif plain is not None:
            assert relative_rms(output[start:end].double(), plain[start:end].double()) < 2e-3


@runs
@pytest.mark.parametrize("has_ring", [False, True], ids=["", "ring"])
@pytest.mark.parametrize(("name", "head_dim"), [("tq4", 128), ("turboquant25", 64)])
@pytest.mark.parametrize("decodes", [DECODES, []], ids=["decodes", ""])
def test_graphs(decodes: list[tuple[int, int]], name: str, head_dim: int, has_ring: bool) -> None:
    """As a graph of more requests and tokens has it, all chunks behind a prefix take passes, however many."""
    if DEVICE == "cpu" and not (name == "turboquant25" and decodes and has_ring):
        pytest.skip("the emulator takes a minute or more for each; a GPU runs all")
    case = Case.of(name, head_dim, decodes + CHUNKS, has_ring=has_ring)
    batch = padded(case.batch(), requests=3, tokens=9)
    layer(case.codec, 64).forward(batch)
    check(case, batch.output, case.attend(layer(case.codec, 0)))
    assert (batch.output[len(case.query) :] == 0).all()


@runs
@pytest.mark.parametrize("is_graph", [False, True], ids=["step", "graph"])
def test_values_less_their_means(is_graph: bool) -> None:
    """Decodes read token 0 from the ring and from pages; some chunks have it in their prefix, one in its ring."""
    means = dict(zip(("key_mean", "key_first_mean", "value_mean", "value_first_mean"), torch.randn(4, 64), strict=True))
    case = Case.of("turboquant25", 64, DECODES + CHUNKS, has_ring=True, **means)
    batch = padded(case.batch(), requests=3, tokens=9) if is_graph else case.batch()
    layer(case.codec, 64).forward(batch)
    check(case, batch.output, case.attend(layer(case.codec, 0)))


@runs
@pytest.mark.parametrize("is_graph", [False, True], ids=["step", "graph"])
@pytest.mark.parametrize("has_ring", [False, True], ids=["", "ring"])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (7, False), (37, True), (256, False)])
def test_windows_and_sinks(window: int | None, has_sinks: bool, has_ring: bool, is_graph: bool) -> None:
    """A window of 7 tokens ends within some chunks, so that later rows see nothing of the prefix, and begins in the
    ring; one of 37 begins in the pages, of the last chunk in a tile that some of its rows see whole; one of 256 reaches
    beyond token 0. In a graph they are read in passes."""
    if DEVICE == "cpu" and window is None and not has_ring:
        pytest.skip("the emulator takes half a minute for each; a GPU runs all")
    means = dict(zip(("key_mean", "key_first_mean", "value_mean", "value_first_mean"), torch.randn(4, 64), strict=True))
    case = Case.of("turboquant25", 64, [*DECODES, *CHUNKS, (80, 12)], has_ring=has_ring, **means)
    sinks = torch.linspace(-2, 3, GROUP, device=DEVICE) if has_sinks else None
    options: dict[str, Any] = {"sliding_window": window, "sinks": sinks}
    batch = padded(case.batch(), requests=3, tokens=9) if is_graph else case.batch()
    made = layer(case.codec, 64, **options)
    made.forward(batch)
    plain = case.attend(layer(case.codec, 0, **options))
    check(case, batch.output, plain, window=window, sinks=sinks)
    check(case, plain, window=window, sinks=sinks)
    assert not is_graph or (batch.output[len(case.query) :] == 0).all()
    of_prefixes = [step for step in batch.metadata.steps.made.values() if getattr(step, "prefixes", None) is not None]
    assert is_graph or len(of_prefixes) == (window is None), "what a window leaves is gathered outside of graphs"


@runs
def test_sinks_without_decodes() -> None:
    """A step of chunks alone, whose decodes have no query tokens, is rotated and read by the CUDA kernel."""
    case = Case.of("turboquant25", 64, CHUNKS, has_ring=False)
    sinks = torch.linspace(-2, 3, GROUP, device=DEVICE)
    batch = case.batch()
    batch.metadata.decode_query_len = 0
    layer(case.codec, 64, sinks=sinks).forward(batch)
    check(case, batch.output, sinks=sinks)
    assert sum(getattr(step, "prefixes", None) is not None for step in batch.metadata.steps.made.values()) == 1


REPLAYED = [
    [(40, 1), (17, 1), (3, 3), (45, 13)],
    [(50, 20)],
    [(9, 1), (70, 1), (33, 1), (12, 1)],
    [(21, 5), (30, 12)],
    [(18, 18)],
]
"""Batches of one graph: decodes with chunks; a chunk alone, whose last tokens take the places in the ring of tokens
that its rows read there; decodes alone; chunks alone; and a new prompt."""


def tiled_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    """As FlashAttention 3 reads V: in tiles, of which one may go on past the end of a sequence, with weights of 0."""
    result = flash_attention(query, key, value, **options)
    for start, end in pairwise(options["cu_seqlens_q"].tolist()):
        if start < end:
            past = value[end : start + -(-(end - start) // 8) * 8]
            options["out"][start:end] += (0 * past.double().sum((0, 1))).to(value.dtype)
    return result


@runs
def test_padding_of_a_graph() -> None:
    """It becomes 0, whatever was there, so that V of the next layer is finite."""
    shape, codec = (13, GROUP, 64), PagedCodec(FORMATS["turboquant25"], 64, device=DEVICE)
    query, key, value = torch.randn(3, 13, GROUP, 64, device=DEVICE, dtype=torch.float16)
    key, value, output = key[:, :1], value[:, :1], torch.full(shape, float("nan"), device=DEVICE, dtype=torch.float16)
    output[:2], own = 7, slice(2, 9)
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    metadata = PackedMetadata(13, one, one, one, one, one, [], [], -1, -1, 1, one, is_mixed_graph=True)
    kinds = torch.tensor([DECODE] * 2 + [NEW] * 2 + [BEHIND] * 5 + [PADDING] * 4, dtype=torch.int32, device=DEVICE)
    part, lse = torch.full_like(output, float("nan")), torch.full(shape[:2], float("nan"), device=DEVICE)
    part[4:9], lse[4:9] = 1, 0
    over = OverPrefixes(PrefixPasses.of_graph(torch.zeros(1, 4, device=DEVICE), kinds, 4), part, lse)
    options = AttentionOptions(64**-0.5)
    prefill = FlashPrefill(codec, GROUP, 1, options, 64, 8, FlashAttention(tiled_attention, 64))
    starts = torch.tensor([2, 2, 2, 4, 9, 9], dtype=torch.int32, device=DEVICE)
    prefill.attend_in_graph(Batch(query, key, value, one, metadata, output), starts, over)
    assert (output[:2] == 7).all() and (output[9:] == 0).all() and output[own].isfinite().all()


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return what vLLM fills anew for each replay, and the cache, the ring and the output."""
    metadata, window = batch.metadata, batch.window
    assert window is not None and batch.key is not None and batch.value is not None
    of_rings = window.layer.kv_cache, window.metadata.block_table, window.metadata.slots, window.metadata.first
    of_step = metadata.block_table, metadata.slot_mapping, metadata.positions, metadata.query_start_loc
    vectors = batch.query, batch.key, batch.value, batch.output
    return [*vectors, *of_step, metadata.seq_lens, batch.cache, *of_rings]


@runs
def test_a_graph_replays_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of the first batch, repeated with the same arguments, serve the other batches."""
    calls: list[Any] = []

    def record(patches: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            calls.append((call, arguments, options, result))
            return result

        patches.setattr(owner, name, recorded)

    cases = [Case.of("turboquant25", 64, lengths, has_ring=True) for lengths in REPLAYED]
    batches = [padded(case.batch(), 5 - len(case.lengths), 24 - len(case.query)) for case in cases]
    graph, attention = batches[0], layer(cases[0].codec, 64)
    attention.forward(graph)  # as vLLM's warm-up before a capture, in which kernels are bound
    flash: Any = attention.kernels.prefill
    flash.flash_attention = SimpleNamespace(function=flash_attention, value_dim=64)
    graph.metadata.steps.made.clear()
    kernels = (Launch, "__call__"), (cuda.CudaDecode, "__call__"), (prefix_launch.CudaPrefix, "__call__")
    with monkeypatch.context() as patches:
        for owner, name in (*kernels, (flash.flash_attention, "function")):
            record(patches, owner, name)
        attention.forward(graph)
    assert len(calls) == 9  # tables, two schedules, stores, decode, passes, FlashAttention, combine
    for case, batch in zip(cases, batches, strict=True):
        for ours, theirs in zip(tensors_of(graph), tensors_of(batch), strict=True):
            ours[: len(theirs)].copy_(theirs)  # the first has the most pages and rings
        graph.output.fill_(float("nan"))
        for call, arguments, options, result in calls:
            again = call(*arguments, **options)
            if result is not None:  # a graph leaves FlashAttention's log-sum-exps where they were
                result[1].copy_(again[1])
        check(case, graph.output, case.attend(layer(case.codec, 0)))
        assert (graph.output[len(case.query) :] == 0).all()
