"""Launches assert layouts of their tensors, and are bound to some: kernels read addresses and numbers, no tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention import decode, fused_prefix, prefill, triton_store, window_prefix
from packed_kv.attention.latent import prefix as latents
from packed_kv.attention.layer import PairKernels
from packed_kv.attention.step import StepCache
from packed_kv.codecs.ring import Ring
from packed_kv.kernels.cuda import grids, latent_launch, latent_ring_launch, launch, prefix_launch
from packed_kv.kernels.cuda.kernel import CudaKernel, Function
from packed_kv.kernels.triton.launch import Arguments, Launches, StepLaunch
from packed_kv.kernels.triton.means import NO_BIAS
from packed_kv.window.metadata import WindowMetadata
from packed_kv.window.step import WindowStep

TOKENS, HEADS, RANK, ROPE = 6, 4, 512, 64


def vectors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Output, queries and their RoPE channels, the latter side by side as vLLM gathers them of ranks."""
    queries = torch.zeros(TOKENS, HEADS, RANK + ROPE, dtype=dtype)
    return [torch.zeros(TOKENS, HEADS, RANK, dtype=dtype), *queries.split([RANK, ROPE], dim=-1)]


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same, 2 bytes off."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "address": unaligned,
    "row": lambda x: torch.zeros(*x.shape[:2], x.shape[2] + 4, dtype=x.dtype)[..., : x.shape[2]],
    "channel": lambda x: torch.zeros(*x.shape[:2], 2 * x.shape[2], dtype=x.dtype)[..., ::2],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("which", range(3), ids=["output", "query", "rope_query"])
def test_rows_of_latents_begin_at_multiples_of_16_bytes(which: int, wrong: str) -> None:
    """The kernel loads and stores 16 bytes at a time, and would fault or mix channels."""
    given = vectors()
    latent_launch.call_arguments(*given)
    latent_launch.call_arguments(None, *given[1:])
    given[which] = WRONG[wrong](given[which])
    with pytest.raises(AssertionError):
        latent_launch.call_arguments(*given)


@pytest.mark.parametrize("which", range(3), ids=["output", "query", "rope_query"])
@pytest.mark.parametrize("is_ring", [False, True], ids=["pages", "ring"])
def test_latents_are_launched_for_the_dtypes_they_were_compiled_for_and_the_ring_alone_early(
    is_ring: bool, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes fp32 and fp16 words for bf16 ones."""
    launched: list[bool] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0))
    run = lambda *_, is_early=False: launched.append(is_early)  # noqa: E731
    if is_ring:
        attend: Any = object.__new__(latent_ring_launch.CudaLatentRing)
        attend.widest = latent_ring_launch.LatentRingVariant(HEADS, 1, 16, torch.bfloat16, torch.bfloat16, False)
        step: Any = latent_ring_launch.Step(bytes(latent_ring_launch.STEP_ARGUMENTS.size), (1, 1, 1))
        attend.functions = {1: (Function(run, None, 256, 0),)}
        attend.layer_at = latent_launch.CALL_ARGUMENTS.size + latent_ring_launch.STEP_ARGUMENTS.size
    else:
        attend = object.__new__(latent_launch.CudaLatentDecode)
        attend.heads, attend.query, attend.output = HEADS, torch.bfloat16, torch.bfloat16
        shape = latent_launch.LatentGrid(16, 1, 1)
        step = latent_launch.Step(bytes(latent_launch.STEP_ARGUMENTS.size), shape, 1, 1, 1)
        attend.functions = {16: (Function(run, None, 384, 0), Function(run, None, 512, 0))}
        attend.layer_at = latent_launch.CALL_ARGUMENTS.size + latent_launch.STEP_ARGUMENTS.size
    attend.arguments, attend.device, attend.address, attend.lock = bytearray(256), 0, 0, threading.Lock()
    output, query, rope_query = vectors()
    attend(step, query, rope_query, output)
    # Only the ring's kernel may begin early, behind that of pages: before that one may be any kernel of vLLM.
    assert launched == ([True] if is_ring else [False, False])
    given = vectors()
    given[which] = given[which].float() if which else given[which].half()
    with pytest.raises(AssertionError):
        attend(step, given[1], given[2], given[0])
    assert len(launched) == (1 if is_ring else 2), "launched for other dtypes"


@pytest.mark.parametrize("which", range(3), ids=["block_table", "query_start", "seq_lens"])
@pytest.mark.parametrize("wrong", ["dtype", "stride"])
@pytest.mark.parametrize("of_latents", [False, True], ids=["pairs", "latents"])
def test_tables_and_lengths_of_a_step_are_int32_side_by_side(of_latents: bool, wrong: str, which: int) -> None:
    given = [torch.zeros(3, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)]
    floats = torch.zeros(1 << 16)

    def make() -> object:
        if not of_latents:
            return launch.step_arguments(floats[:64].half().view(1, 1, 2, 32), *given, floats, floats, None, None)
        shape = latent_launch.LatentGrid(16, 1, 2)
        begins, spans = (torch.zeros(3, 2, dtype=torch.int32) for _ in range(2))
        parts = latent_launch.Parts(shape, (begins, spans), floats.view(-1, 512), floats)
        return latent_launch.make_step(HEADS, 1, 1.0, *given, parts)

    make()
    x = given[which]
    given[which] = x.long() if wrong == "dtype" else x.repeat_interleave(2, dim=-1)[..., ::2]
    with pytest.raises(AssertionError):
        make()


def test_threads_launch_with_grids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two engines in a process, one launches while the other does."""
    pytest.importorskip("cuda.bindings")
    from packed_kv.kernels.cuda import early_launch

    seen, both = {}, threading.Barrier(2, timeout=20)

    def launch(config: Any, kernel: str, _address: int, _extra: int) -> tuple[int]:
        both.wait()  # the other thread has described its launch, too
        seen[kernel] = config.gridDimX, config.gridDimY, config.gridDimZ, config.hStream, config.numAttrs
        both.wait()
        return (0,)

    monkeypatch.setattr(early_launch.driver, "cuLaunchKernelEx", launch)
    threads = [
        threading.Thread(
            target=early_launch.launch_kernel, args=(name, (n, n + 1, n + 2), 32, 0, n, 0), kwargs={"is_early": True}
        )
        for name, n in (("a", 1), ("b", 7))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {name: tuple(int(x) for x in of) for name, of in seen.items()}
    assert found == {"a": (1, 2, 3, 1, 1), "b": (7, 8, 9, 7, 1)}


@pytest.mark.parametrize("of", ["pairs", "prefixes", "latents", "ring"])
def test_threads_do_not_launch_with_each_others_arguments(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer keeps for its launches is read by the driver while a call of another thread waits."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0))
    torn: list[bool] = []

    def run(*_arguments: object, **_options: object) -> None:
        before = bytes(attend.arguments)
        time.sleep(0.02)
        torn.append(bytes(attend.arguments) != before)

    attend: Any
    numbers, shape = (1, 2), latent_launch.LatentGrid(16, 1, 1)
    steps: list[Any]
    if of == "pairs":
        attend, module, key, kernels = object.__new__(launch.CudaDecode), launch, (1, True, 1), 1
        steps = [bytes([n]) * launch.STEP_ARGUMENTS.size for n in numbers]
        calls = [partial(attend, grids.Grid(1, 1, True), 1, 1, step, vectors()[0]) for step in steps]
        attend.kv_heads = attend.group = 1
    elif of == "prefixes":
        attend, module, key, kernels = object.__new__(prefix_launch.CudaPrefix), prefix_launch, None, 1
        steps = [bytes([n]) * launch.STEP_ARGUMENTS.size for n in numbers]
        calls = [partial(attend, 1, step, vectors()[0]) for step in steps]
        attend.kv_heads = 1
    elif of == "latents":
        attend, module, key, kernels = object.__new__(latent_launch.CudaLatentDecode), latent_launch, 16, 2
        steps = [latent_launch.Step(bytes([n]) * module.STEP_ARGUMENTS.size, shape, 1, 1, 1) for n in numbers]
        attend.heads, attend.query, attend.output = HEADS, torch.bfloat16, torch.bfloat16
    else:
        attend, module, key, kernels = object.__new__(latent_ring_launch.CudaLatentRing), latent_ring_launch, 1, 1
        steps = [latent_ring_launch.Step(bytes([n]) * module.STEP_ARGUMENTS.size, (1, 1, 1)) for n in numbers]
        attend.widest = latent_ring_launch.LatentRingVariant(HEADS, 1, 16, torch.bfloat16, torch.bfloat16, False)
    if of not in ("pairs", "prefixes"):
        output, query, rope_query = vectors()
        calls = [partial(attend, step, query, rope_query, output) for step in steps]
    CudaKernel.__init__(attend, module.CALL_ARGUMENTS.size + module.STEP_ARGUMENTS.size, bytes(8), 0)
    attend.functions = {key: (Function(run, None, 32, 0),) * kernels}
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == [False] * (2 * kernels)


def test_biases_have_32_bits() -> None:
    """`Biases.rows` of columns.cuh."""
    numbers = torch.zeros(4, dtype=torch.int32)
    floats = torch.zeros(1 << 10)

    def make(tokens: int) -> bytes:
        bias = torch.empty(tokens, 4, 1 << 10, device="meta")
        query = floats[:64].half().view(1, 1, 2, 32)
        return launch.step_arguments(query, numbers[None], numbers, numbers, floats, floats, bias, None)

    make(1 << 20)
    with pytest.raises(AssertionError):
        make((1 << 20) + 1)


# ---- what a launch is bound to


class Binder:
    """Stands for the class of a kernel: counts the launches that it makes, which do nothing."""

    def __init__(self) -> None:
        self.calls = 0

    @staticmethod
    def step(*_arguments: object, **_options: object) -> StepLaunch:
        return StepLaunch((1, 1, 1), Arguments())

    def __call__(self, *_arguments: object, **_options: object) -> Callable[..., None]:
        self.calls += 1
        return lambda *_arguments, **_options: None


def cache_of(slot: int = 64, *, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Pages uint8 [2, 2, 16, slot], in this memory."""
    memory = torch.zeros(1 << 14, dtype=torch.uint8) if memory is None else memory
    return memory[: 2 * 2 * 16 * slot].view(2, 2, 16, slot)


def heads(count: int, dtype: torch.dtype = torch.float16, tokens: int = TOKENS) -> torch.Tensor:
    return torch.zeros(tokens, count, 32, dtype=dtype)


def other_strides(x: torch.Tensor) -> torch.Tensor:
    """A view of the same address."""
    return x.as_strided(x.shape, (x.stride(0) // 2, *x.stride()[1:]))


def of_store(monkeypatch: pytest.MonkeyPatch) -> tuple[Binder, Callable[..., None], dict[str, torch.Tensor]]:
    binder = Binder()
    monkeypatch.setattr(triton_store, "StoreLaunch", binder)
    layer: Any = object.__new__(triton_store.TritonPairStore)
    layer.bound, layer.codec, layer.rotation = Launches(), None, None
    step: Any = triton_store.StoreStep(StepLaunch((1, 1, 1), Arguments()), only_ring=False, rotates=True)

    def store(cache: torch.Tensor, ring: torch.Tensor, key: Any, value: Any, query: Any) -> None:
        layer.write(step, cache, key, value, ring, query)

    new = {"key": heads(2), "value": heads(2), "query": heads(4)}
    return binder, store, {"cache": cache_of(), "ring": cache_of(), **new}


def of_decode(monkeypatch: pytest.MonkeyPatch) -> tuple[Binder, Callable[..., None], dict[str, torch.Tensor]]:
    layer: Any = object.__new__(decode.CudaPairs)
    binder = Binder()
    layer.bound, layer.splits = Launches(), object.__new__(decode.PairWorkspace)
    layer.splits.layer = SimpleNamespace(options=SimpleNamespace(sinks=None))
    layer._bind = binder
    step: Any = decode.CudaPairStep(None, None, None, grids.Grid(1, 1, True), 1, 1, b"", ())

    def attend(cache: torch.Tensor, ring: torch.Tensor, output: torch.Tensor) -> None:
        layer.attend(step, cache, (), Ring(ring, ring, ring, 8), output)

    return binder, attend, {"cache": cache_of(), "ring": cache_of(), "output": heads(4)}


def of_prefixes(monkeypatch: pytest.MonkeyPatch) -> tuple[Binder, Callable[..., None], dict[str, torch.Tensor]]:
    binder, bound = Binder(), Launches()
    layer: Any = object.__new__(fused_prefix.FusedPrefix)
    layer._bind, layer.shape = binder, SimpleNamespace(kv_heads=2, group=2)

    def attend(cache: torch.Tensor, ring: torch.Tensor, output: torch.Tensor) -> None:
        results: Any = SimpleNamespace(output=output)
        layer.attend(fused_prefix.FusedStep(results, (), 1, b""), bound, cache, Ring(ring, ring, ring, 8))

    return binder, attend, {"cache": cache_of(), "ring": cache_of(), "output": heads(4)}


def of_windows(monkeypatch: pytest.MonkeyPatch) -> tuple[Binder, Callable[..., None], dict[str, torch.Tensor]]:
    binder, bound = Binder(), Launches()
    for name in ("DecodeLaunch", "MergeLaunch"):
        monkeypatch.setattr(window_prefix, name, binder)
    layer: Any = object.__new__(window_prefix.WindowPrefix)
    layer.shape, layer.limits = decode.DecodeShape(2, 2, 32), SimpleNamespace(tokens=1)
    layer.page = layer.from_rotated = layer.means = None
    step = StepLaunch((1, 1, 1), Arguments())

    def attend(cache: torch.Tensor, ring: torch.Tensor, output: torch.Tensor) -> None:
        results: Any = SimpleNamespace(output=output)
        layer.attend(window_prefix.WindowPrefixStep(results, (), step, step), bound, cache, Ring(ring, ring, ring, 8))

    return binder, attend, {"cache": cache_of(), "ring": cache_of(), "output": heads(4)}


def of_gather(monkeypatch: pytest.MonkeyPatch) -> tuple[Binder, Callable[..., None], dict[str, torch.Tensor]]:
    binder = Binder()
    for name in ("GatherLaunch", "GatherRingLaunch", "UnrotateLaunch"):
        monkeypatch.setattr(prefill, name, binder)
    layer: Any = object.__new__(prefill.FlashPrefill)
    codec = SimpleNamespace(layout=None, key=SimpleNamespace(stored_dim=32, head_dim=32))
    layer.bound, layer.codec, layer.kv_heads, layer.matrices = Launches(), codec, 2, (None, None)
    layer.means = [None, None]
    layer.flash_attention = SimpleNamespace(value_dim=32)
    step = StepLaunch((1, 1, 1), Arguments())

    def read(cache: torch.Tensor, ring: torch.Tensor, key: torch.Tensor) -> None:
        layer._read(cache, prefill.PartRead(None, key, key, step, step, (step, step)), Ring(ring, ring, ring, 8))

    return binder, read, {"cache": cache_of(), "ring": cache_of(), "key": heads(2)}


def of_latents(monkeypatch: pytest.MonkeyPatch) -> tuple[Binder, Callable[..., None], dict[str, torch.Tensor]]:
    binder = Binder()
    for name in ("GatherLatentsLaunch", "GatherLatentRingLaunch"):
        monkeypatch.setattr(latents, name, binder)
    layer: Any = object.__new__(latents.TritonLatentPrefix)
    layer.bound, layer.codec, layer.inverse_gain = Launches(), SimpleNamespace(layout=None), None
    chunk = SimpleNamespace(starts=None, cu_seq_lens=None, max_seq_len=0)

    def gather(cache: torch.Tensor, ring: torch.Tensor, rows: torch.Tensor) -> None:
        recent: Any = SimpleNamespace(ring=Ring(ring, ring, ring, 8), context_lens=None)
        layer.gather(cache, None, chunk, rows, recent)

    return binder, gather, {"cache": cache_of(), "ring": cache_of(), "rows": heads(1)}


BOUND = (of_store, of_decode, of_prefixes, of_windows, of_gather, of_latents)


@pytest.mark.parametrize("make", BOUND, ids=lambda make: make.__name__.removeprefix("of_"))
def test_a_launch_is_bound_anew_for_tensors_of_another_kind(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another dtype, of other strides at the same address, of another address where the kernel keeps that; and for
    no more tokens."""
    binder, launch, tensors = make(monkeypatch)
    launch(**tensors)
    first, before = binder.calls, binder.calls
    launch(**tensors)
    new = {name: x for name, x in tensors.items() if x.dtype != torch.uint8}
    launch(**tensors | {name: heads(x.shape[1], x.dtype, 2 * TOKENS) for name, x in new.items()})
    assert binder.calls == first > 0
    for name, x in tensors.items():
        others = [other_strides(x)] if name not in ("key", "rows") or make is of_store else []
        others.append(x.clone() if x.dtype == torch.uint8 else x.bfloat16())
        for other in others:
            launch(**{**tensors, name: other})
            assert binder.calls > before, f"{name}: what was bound for {x.dtype} {x.stride()} was launched for another"
            launch(**tensors)
            before = binder.calls


@pytest.mark.parametrize("is_capturing", [False, True])
def test_counters_begin_at_0_where_a_layer_is_bound(is_capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran before on the memory of an engine that gets another cache; but by no launch that a graph holds."""
    layer: Any = object.__new__(decode.CudaPairs)
    resets: list[str] = []
    counters = SimpleNamespace(is_cuda=True, zero_=lambda: resets.append("reset"))
    layer.matrix, layer.counters = None, counters
    layer.shape = SimpleNamespace(bias=NO_BIAS)
    layer.layer = SimpleNamespace(codec=SimpleNamespace(layout=None), limits=SimpleNamespace(longest_decode=1))
    layer.splits = SimpleNamespace(heads_apart=lambda output: output, has_lse=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    bound = SimpleNamespace(compile_variants=lambda _longest: None)
    monkeypatch.setattr(decode.cuda, "CudaDecode", lambda *_: bound)
    assert layer._bind(cache_of(), None, heads(4)) is bound
    assert resets == ([] if is_capturing else ["reset"])


def test_a_step_of_other_rings_is_made_anew() -> None:
    """An object of the same `id` as one before is another."""
    made: list[int] = []
    decode_kernel = SimpleNamespace(kind="decode", prepare=lambda batch: made.append(len(made)) or len(made))
    kernels: Any = object.__new__(PairKernels)
    kernels.decode = decode_kernel
    table = torch.zeros(1, 1, dtype=torch.int32)
    tables = {"block_table": table, "query_start_loc": table[0], "stored_lens": table[0], "positions": table[0]}
    metadata: Any = SimpleNamespace(**tables, context=[], decode_tokens=0, decode_query_len=1, steps=StepCache())
    for number in range(20):
        rings = WindowMetadata(table, table, table[0])  # those before are gone
        window: Any = WindowStep(SimpleNamespace(kv_cache=table, window=8), rings, is_shared=False)
        for _ in range(2):
            assert kernels.prepare_decodes(metadata, 0, window) == number + 1
    assert made == list(range(20))
