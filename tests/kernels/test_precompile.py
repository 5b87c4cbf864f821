"""Launches of steps are compiled before them, side by side, while vLLM goes on."""

from __future__ import annotations

import itertools
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv import FORMATS
from packed_kv.attention.decode import TritonPairs, rotation_of
from packed_kv.attention.latent import decode as latent_decode
from packed_kv.attention.latent.decode import HopperLatents, TritonLatents
from packed_kv.attention.latent.in_pytorch import PrefixChunk, RecentContext
from packed_kv.attention.latent.kernels import LatentKernels
from packed_kv.attention.latent.metadata import LatentMetadataBuilder
from packed_kv.attention.latent.prefix import TritonLatentPrefix
from packed_kv.attention.layouts import LatentLayout, PairLayout
from packed_kv.attention.limits import Limits
from packed_kv.attention.metadata import Batch, PackedMetadataBuilder
from packed_kv.attention.protocols import DecodeBatch, NewTokens
from packed_kv.attention.store import LatentStore
from packed_kv.attention.triton_store import TritonLatentStore
from packed_kv.attention.warmup import PairWarmup, warm_up_latents
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import Ring
from packed_kv.kernels import precompile
from packed_kv.kernels.cuda import kernel as cuda_kernel
from packed_kv.kernels.cuda import latent_launch, latent_ring_launch, prefix_launch
from packed_kv.kernels.cuda import launch as cuda
from packed_kv.kernels.cuda.source import LATENT
from packed_kv.kernels.precompile import Precompiler, current, wait_for, wait_for_all
from packed_kv.kernels.served import TRITON, longest_of
from packed_kv.kernels.triton.launch import Arguments, Launch
from packed_kv.kernels.triton.merge import merge_tile
from packed_kv.reference.attention import AttentionOptions
from packed_kv.reference.context_shard import ContextShard
from packed_kv.window.layer import WindowLayer
from packed_kv.window.metadata import WindowMetadata
from packed_kv.window.step import WindowStep
from test_fused_prefix import padded
from test_latent import codec_of
from test_shares import BLOCK, DEVICE, HEAD_DIM, HEADS, Workspace, _machine, batch, layer
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backend import AttentionMetadataBuilder

__all__ = ["_machine"]  # a fixture
RING_BLOCK, WINDOW = 4, 8


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "_compilations", {})
    monkeypatch.setattr(precompile, "_unforeseen", set())
    monkeypatch.setattr(precompile.logger, "propagate", True)
    precompile._pool.cache_clear()
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda _process: {0, 1})


def test_two_variants_compile_at_a_time() -> None:
    both = threading.Barrier(2, timeout=30)
    done: list[int] = []
    with Precompiler() as block:
        assert current() is block
        for number in (0, 1, 0):
            block.note(number, lambda number=number: (both.wait(), done.append(number)))
        assert not done
    assert current() is None
    wait_for_all()
    assert sorted(done) == [0, 1]


def test_a_variant_is_compiled_once() -> None:
    done: list[str] = []
    for _ in range(2):
        with Precompiler() as block:
            block.note("variant", lambda: done.append("compiled"))
    wait_for_all()
    assert done == ["compiled"]


def test_who_needs_one_variant_waits_for_no_other() -> None:
    go, done = threading.Event(), []
    with Precompiler() as block:
        block.note("slow", lambda: (go.wait(30), done.append("slow")))
        block.note("quick", lambda: done.append("quick"))
    wait_for("quick")
    wait_for("never noted")
    assert done == ["quick"]
    go.set()
    wait_for_all()
    assert done == ["quick", "slow"]


def test_errors_are_raised_where_one_waits() -> None:
    with Precompiler() as block:
        block.note("bad", lambda: (_ for _ in ()).throw(RuntimeError("ptxas")))
    assert current() is None
    for wait in (lambda: wait_for("bad"), wait_for_all):
        with pytest.raises(RuntimeError, match="ptxas"):
            wait()


def test_an_engine_with_a_kernel_that_does_not_compile_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionMetadataBuilder, "__init__", lambda *_: None)
    monkeypatch.setattr(MLACommonMetadataBuilder, "__init__", lambda self, *_: setattr(self, "page_size", 16))
    monkeypatch.setattr(LatentMetadataBuilder, "dcp_world_size", 1, raising=False)
    with Precompiler() as block:
        block.note("bad", lambda: (_ for _ in ()).throw(RuntimeError("ptxas")))
    with pytest.raises(RuntimeError, match="ptxas"):
        PackedMetadataBuilder(None, [], None, torch.device("cpu"))
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(reserve_workspace=lambda: None))}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    with pytest.raises(RuntimeError, match="ptxas"):
        LatentMetadataBuilder(None, ["layer"], config, torch.device("cpu"))


def test_nothing_is_compiled_for_a_block_that_fails() -> None:
    done: list[str] = []
    with pytest.raises(ValueError, match="elsewhere"), Precompiler() as block:  # noqa: PT012
        block.note("good", lambda: done.append("compiled"))
        raise ValueError("elsewhere")
    wait_for("good")
    assert current() is None and not done


def test_a_launch_is_noted_and_not_run() -> None:
    asked: list[dict] = []
    launchers: list[str] = []

    class Kernel:
        arg_names = ("x", "SIZE")
        params = ()
        do_not_specialize = do_not_specialize_on_alignment = ()

        def warmup(self, *values: object, **options: object) -> Compiled:
            asked.append({"values": values, **options})
            return Compiled()

        def __getitem__(self, grid: object) -> None:
            raise AssertionError("launched")

    class Compiled:
        @property
        def run(self) -> None:
            launchers.append("made")

    x, kernel = torch.zeros(16), Kernel()
    with Precompiler():
        for start in (0, 4, 1):  # the last one is not aligned
            Launch(kernel, Arguments(), {"SIZE": 32}, num_warps=2)((5, 1, 1), (x[start:],), Arguments())
    wait_for_all()
    assert launchers == ["made"] * 2
    given = [call.pop("values")[0] for call in asked]
    assert all(call == {"grid": (5, 1, 1), "SIZE": 32, "num_warps": 2} for call in asked)
    assert sorted(tensor.data_ptr() % 16 == 0 for tensor in given) == [False, True]
    assert all(tensor.dtype == x.dtype for tensor in given)
    of_batch = x.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() != of_batch for tensor in given), "memory of the batch is kept"


@pytest.mark.parametrize("noted_start", [0, 1], ids=["aligned", "unaligned"])
def test_a_launch_waits_for_its_compilation(noted_start: int) -> None:
    """And not for that of another variant: of tensors that are aligned, of others."""
    go, compiled, launched = threading.Event(), [], []

    class Kernel:
        __name__ = "kernel"
        arg_names = ("x",)
        params = ()
        do_not_specialize = do_not_specialize_on_alignment = ()

        def warmup(self, *_values: object, **_options: object) -> None:
            go.wait(30)
            compiled.append("ahead")

        def __getitem__(self, grid: object) -> object:
            return lambda *_values, **_options: launched.append(list(compiled))

    x, kernel = torch.zeros(16), Kernel()

    def launch(start: int) -> None:
        Launch(kernel, Arguments(), {})((1, 1, 1), (x[start:],), Arguments())

    with Precompiler():
        launch(noted_start)
    launch(1 - noted_start)
    assert launched == [[]]
    threading.Timer(0.2, go.set).start()
    launch(noted_start)
    assert launched == [[], ["ahead"]]


def test_the_cuda_kernel_waits_for_its_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    go, compiled = threading.Event(), []
    wanted = cuda_kernel.Compilation(LATENT, ())
    nvrtc, launch = SimpleNamespace(load=lambda *_: list(compiled)), SimpleNamespace(launch_kernel=None)
    monkeypatch.setattr("packed_kv.kernels.cuda.nvrtc", nvrtc, raising=False)
    monkeypatch.setitem(sys.modules, "packed_kv.kernels.cuda.nvrtc", nvrtc)
    monkeypatch.setitem(sys.modules, "packed_kv.kernels.cuda.early_launch", launch)
    monkeypatch.setattr(cuda_kernel, "machine_code", lambda _wanted: b"")
    monkeypatch.setattr(cuda_kernel, "block_of", lambda *_: (32, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _index: nullcontext())
    with Precompiler() as block:
        block.note(wanted, lambda: (go.wait(30), compiled.append("ahead")))
    threading.Timer(0.2, go.set).start()
    assert [function.kernel for function in cuda_kernel.load.__wrapped__(wanted, 0)] == [["ahead"]] * 2


def window_layer() -> WindowLayer:
    made = object.__new__(WindowLayer)
    made.window = WINDOW
    made.spec = SimpleNamespace(ring_block_size=RING_BLOCK, ring_blocks=4, window=WINDOW, slack=1)
    return made


@pytest.mark.parametrize(
    ("has_ring", "shares_cache"), [(True, False), (False, False), (False, True)], ids=["ring", "no_ring", "shared"]
)
@pytest.mark.parametrize(
    ("major", "options", "mixed_graphs"),
    [
        (8, {}, False),
        (9, {}, False),
        (9, {}, True),
        (9, {"sinks": torch.zeros(HEADS, device=DEVICE)}, True),
        (9, {"sinks": torch.zeros(HEADS, device=DEVICE), "sliding_window": 24}, False),
        (9, {"sinks": torch.zeros(HEADS, device=DEVICE), "sliding_window": 24}, True),
    ],
    ids=["ampere", "hopper", "hopper in graphs", "sinks in graphs", "window", "window in graphs"],
)
def test_profiling_compiles_what_steps_launch(
    major: int, options: dict[str, Any], mixed_graphs: bool, has_ring: bool, shares_cache: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Steps of new prompts, decodes of any number, and mixed steps, graphs too, launch no variant that was not noted.

    On a GPU the card is its own: Triton keeps the architecture that a kernel is first noted for, in the whole process.
    """
    if DEVICE != "cpu" and torch.cuda.get_device_capability() != (major, 0):
        pytest.skip("another card than this one")
    noted, launched = set(), set()

    monkeypatch.setattr(Precompiler, "_compile", lambda self: noted.update(self.jobs))
    keep = lambda self, _grid, tensors, step: launched.add(self.variant(tensors, step))  # noqa: E731
    monkeypatch.setattr(Launch, "_first", keep)
    monkeypatch.setattr(cuda_kernel, "load", lambda wanted, _device: launched.add(wanted))

    def of_cuda(self, grid, length, *_) -> None:
        launched.add(self.compilation((grid.warps, grid.is_final, length)))

    def of_prefixes(self, *_) -> None:
        if not current():
            launched.add(self.compilation(None))

    monkeypatch.setattr(cuda.CudaDecode, "__call__", lambda *a: None if current() else of_cuda(*a))
    monkeypatch.setattr(prefix_launch.CudaPrefix, "__call__", of_prefixes)
    monkeypatch.setattr(prefix_launch, "PAYS", dict.fromkeys(prefix_launch.PAYS, prefix_launch.Pays(2, 1)))
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    card = SimpleNamespace(multi_processor_count=1, major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    codec = PagedCodec(FORMATS["tq4"], HEAD_DIM, device=DEVICE)
    shard = ContextShard()
    attention = AttentionOptions(HEAD_DIM**-0.5, **options)
    served = layer(codec, shard, None, attention, in_pytorch=False, max_tokens=64, mixed_graphs=mixed_graphs)
    window = window_layer() if has_ring else None

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.zeros(tokens, HEADS + 2, HEAD_DIM, dtype=torch.float16, device=DEVICE)
        return rows[:, :HEADS], rows[:, HEADS : HEADS + 1], rows[:, HEADS + 1 :]

    limits = Limits(1, 8, 64, mixed_graphs)
    PairWarmup(served, *inputs(64), BLOCK, window, limits).run(shares_cache=False)
    if shares_cache:  # another layer, to which vLLM gives queries alone
        PairWarmup(served, inputs(64)[0], None, None, BLOCK, None, limits).run(shares_cache=True)
    assert not launched and len(noted) >= 6
    for lengths in (
        [(20, 20), (3, 3)], [(40, 3)], [(40, 1), (40, 3)], [(40, 1), (3, 3)], [(64, 40)], [(40, 3)] * 9,
        *([(9, 1)] * n for n in range(1, 9)),
    ):  # fmt: skip
        metadata, _ = batch(shard, lengths)
        metadata.decode_query_len = 1
        step = None
        if window is not None:
            ring = window.ring_of_one_request(64, 1, HEAD_DIM, DEVICE)
            window.fill_slots_of_one_request(ring)  # as the step's metadata do
            window.kv_cache = ring.cache
            table = ring.block_table.repeat(len(lengths), 1)
            first = torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE)
            slots = metadata.slot_mapping.to(torch.int32)
            step = WindowStep(window, WindowMetadata(table, slots, first), is_shared=False)
        cache = torch.zeros(metadata.block_table.numel(), 1, BLOCK, codec.slot_bytes, dtype=torch.uint8, device=DEVICE)
        query, key, value = inputs(metadata.num_actual_tokens)
        of_step = Batch(query, key, value, cache, metadata, torch.zeros_like(query), step)
        served.forward(of_step)
        if mixed_graphs and len(lengths) < 7:  # 8 are the most
            with monkeypatch.context() as patches:
                lse = torch.empty(HEADS, metadata.num_actual_tokens + 5, device=DEVICE)
                in_graph = SimpleNamespace(function=lambda *_args, lse=lse, **_options: (None, lse))
                patches.setattr(served.kernels.prefill, "flash_attention", in_graph)
                served.forward(padded(of_step, requests=2, tokens=5))
        if shares_cache:
            served.forward(Batch(query, None, None, cache, metadata, torch.zeros_like(query)))
    assert launched <= noted, [variant[0] for variant in launched - noted]
    assert noted <= launched, [variant[0] for variant in noted - launched]


@pytest.mark.parametrize("has_ring", [True, False], ids=["ring", "no_ring"])
@pytest.mark.parametrize(
    ("kernel", "rank", "rope_dim"),
    [
        pytest.param(TritonLatents, 96, 32, id="triton"),
        pytest.param(HopperLatents, 512, 64, id="cuda"),
    ],
)
def test_profiling_compiles_what_steps_over_latents_launch(
    kernel: type[TritonLatents | HopperLatents],
    rank: int,
    rope_dim: int,
    has_ring: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stores, prefixes and decodes of any number, with drafts, launch no variant that was not noted."""
    noted, launched = set(), set()
    monkeypatch.setattr(Precompiler, "_compile", lambda self: noted.update(self.jobs))
    keep = lambda self, _grid, tensors, step: launched.add(self.variant(tensors, step))  # noqa: E731
    monkeypatch.setattr(Launch, "_first", keep)
    monkeypatch.setattr(cuda_kernel, "load", lambda wanted, _device: launched.add(wanted))
    for of_cuda, key in (
        (latent_launch.CudaLatentDecode, lambda step: step.grid.rows),
        (latent_ring_launch.CudaLatentRing, lambda step: step.grid[2]),
    ):

        def run(self, step, *_, key=key) -> None:
            if not current():
                launched.add(self.compilation(key(step)))

        monkeypatch.setattr(of_cuda, "__call__", run)
    workspace = Workspace()
    monkeypatch.setattr(latent_decode, "current_workspace_manager", lambda: workspace)
    if DEVICE == "cpu":
        card = SimpleNamespace(multi_processor_count=4, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    codec, heads, requests, longest = codec_of(FORMATS["tq4"], rank, rope_dim), 12, 9, 3
    constant, window = torch.ones(rank, device=DEVICE), window_layer() if has_ring else None
    sizes = heads, 1.0, torch.float16, Limits(longest, requests)
    decode = kernel(LatentLayout(codec, *sizes, constant, WINDOW if has_ring else 0))
    store, prefix = TritonLatentStore(codec), TritonLatentPrefix(codec)
    warm_up_latents(LatentKernels(LatentStore(store, decode.kind), decode, prefix), BLOCK, 128 + rope_dim, window)
    assert not launched and len(noted) >= 5 and not any(x.bound.held for x in (store, decode, prefix))

    cache = torch.zeros(4, BLOCK, codec.slot_bytes, dtype=torch.uint8, device=DEVICE)
    counts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
    table, ring = counts[:requests, None].contiguous(), None
    if window is not None:
        of_ring = torch.zeros(4, 1, RING_BLOCK, codec.ring_slot_bytes, dtype=torch.uint8, device=DEVICE)
        ring = Ring(of_ring, table, counts[:requests], WINDOW)
        window.fill_slots_of_one_request(ring)  # as the step's metadata do
    for count, length in itertools.product(range(1, requests + 1), range(1, longest + 1)):
        query = torch.zeros(count * length, heads, 128 + rope_dim, dtype=torch.float16, device=DEVICE)
        latent = query.new_zeros(count * length, heads, rank)
        tables = table[:count], counts[: count + 1] * length, counts[:count]
        of_batch = ring and Ring(ring.cache, table[:count], counts[:count], WINDOW)
        step = decode.prepare(DecodeBatch(*tables, len(query), length, ring=of_batch))
        decode.attend(step, cache, (latent, query[..., 128:]), of_batch)
    rows = query.new_zeros(40, rank + rope_dim)
    new, slots = (rows[:, :rank].contiguous(), rows[:, rank:]), torch.arange(40, device=DEVICE)
    chunk, recent = PrefixChunk(counts[:2], counts[:3], 1, counts[:2]), None
    if ring is not None:
        store.write(store.prepare(NewTokens(slots, ring_slots=slots[:7].int())), cache, *new, ring.cache)
        rest = NewTokens(slots[3:].int(), ring_slots=slots[3:].int(), only_ring=True)
        store.write(store.prepare(rest), cache, *(x[3:] for x in new), ring.cache)
        recent = RecentContext(ring, counts[:2])
        prefix.gather_values(chunk, rows, recent)
    else:
        store.write(store.prepare(NewTokens(slots)), cache, *new)
    prefix.gather(cache, table, chunk, rows, recent)
    assert launched <= noted, [variant[0] for variant in launched - noted]
    assert noted <= launched, [variant[0] for variant in noted - launched]


@pytest.mark.parametrize("foreseen", [True, False])
def test_the_log_says_once_that_a_step_waits(foreseen: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where anything was compiled ahead: in an engine, not in a script that launches a kernel."""
    wait_for("a", "store_kernel")
    with Precompiler() as block:
        block.note("a" if foreseen else "b", lambda: None)
    with caplog.at_level("WARNING", logger="vllm.packed_kv"):
        for _ in range(2):
            wait_for("a", "store_kernel")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([] if foreseen else [
        "the kernel store_kernel was not compiled ahead in this variant: a step waits for that now"
    ])  # fmt: skip


@pytest.mark.parametrize(("group", "longest", "tiles"), [(4, 9, {8, 16, 32}), (12, 3, {16, 32}), (1, 8, {8})])
def test_steps_with_drafts_launch_what_was_compiled_and_fit_the_workspace(
    group: int, longest: int, tiles: set[int]
) -> None:
    """Of the Triton kernel, for up to 40 requests: tiles of 8, 16 and 32 columns, with every number of splits."""
    codec = PagedCodec(FORMATS["tq4"], HEAD_DIM, device=DEVICE)
    layer = PairLayout(codec, 2 * group, 2, AttentionOptions(1.0), Limits(longest, max_requests=40))
    kernel = TritonPairs(layer, rotation_of(layer), longest_of(TRITON, layer.asked()))
    kernel.splits.sm_count = 132
    taken: list[tuple[int, int]] = []

    def reserve(tokens: int, partial: tuple[int, int, int]) -> list[torch.Tensor]:
        taken.append((tokens, partial[0] * partial[1] * partial[2]))
        return []

    kernel.splits.take = reserve
    kernel.reserve()
    (most,) = taken
    variants = {}
    for requests in range(1, 41):
        for query_len in range(1, longest + 1):
            splits = kernel.splits.count(requests, query_len)
            variants[requests, query_len] = kernel.shape.tiles(query_len)[0], merge_tile(splits)
            assert requests * query_len <= most[0]
            assert requests * query_len * 2 * group * splits <= most[1]
    assert {columns for columns, _ in variants.values()} == tiles
    compiled = [variants[batch] for batch in kernel.batches_to_compile()]
    assert sorted(compiled) == sorted(set(variants.values()))
