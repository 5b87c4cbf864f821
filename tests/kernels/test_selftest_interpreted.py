"""The self-test's layers of a GPU by Triton's interpreter: all is right, and a kernel that is not is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import emulated
import pytest
import torch
from packed_kv.attention import cpu, factory, prefill
from packed_kv.attention import decode as fused
from packed_kv.attention.latent import decode as latent_decode
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import launch as cuda_launch
from packed_kv.kernels.cuda import prefix_launch
from packed_kv.kernels.precompile import Precompiler
from packed_kv.kernels.triton import launch as triton_launch
from packed_kv.selftest import checks, latents, launches, timing
from packed_kv.selftest.requests import LayerShape
from test_cuda_decode import runs
from test_gather import flash_attention
from test_shares import Workspace
from vllm.v1.worker import workspace

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/selftest has a test for GPUs")
CPU = torch.device("cpu")
STEPS = (
    ("prompt", {0: 5, 1: 37}),
    ("gather", {0: 2, 1: 5}),
    ("decode", {0: 1, 1: 3}),
    ("merge", {1: 1}),
)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Workspace()
    for module in (fused, workspace, latent_decode):
        monkeypatch.setattr(module, "current_workspace_manager", lambda: memory)
    card = SimpleNamespace(multi_processor_count=2, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    flash = prefill.FlashAttention(flash_attention, 64)
    on_cuda = factory.pairs_on_cuda
    monkeypatch.setattr(cpu, "find_kernels", lambda _fmt, layer, engine: on_cuda(layer, engine, flash))
    monkeypatch.setattr(checks, "STEPS", STEPS)
    for module in (checks, latents):
        monkeypatch.setattr(module, "MOST", [11, 46])
        monkeypatch.setattr(module, "REPEATS", {"Triton": 1})
    monkeypatch.setattr(latents, "RANK", 64)
    monkeypatch.setattr(latents, "ROPE_DIM", 32)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Variants that would be compiled ahead."""
    found: list[Any] = []
    monkeypatch.setattr(Precompiler, "_compile", lambda block: found.extend(block.jobs))
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Variants that a step would wait for."""
    found: set[Any] = set()
    monkeypatch.setattr(triton_launch, "wait_for", lambda variant, _kernel: found.add(variant))
    return found


def check_pairs(window: int) -> list[checks.Check]:
    fmt, shape = FORMATS["turboquant25"], LayerShape(64, 1, 2, window, longest=4)
    layer = launches.PairLayer(fmt, shape, CPU, checks.DTYPE, "auto", 2, 64)
    assert layer.kernel == "Triton" and layer.own_is_raw
    layer.compile_ahead()
    return list(checks.check_pairs(fmt, layer, CPU))


def test_pairs(noted: list[Any], launched: set[Any]) -> None:
    found = check_pairs(window=16)
    assert len(noted) > 6 and launched <= {*noted}
    assert {check.part for check in found} == {"store", "gather", "decode", "merge"}
    assert not [check for check in found if not check.is_right]


def test_a_fault_is_found(noted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the merge of splits."""

    class Spoiled(fused.MergeLaunch):
        def __call__(self, grid: Any, tensors: tuple[torch.Tensor, ...], arguments: Any) -> None:
            super().__call__(grid, tensors, arguments)
            tensors[0][-1] *= 1.01

    monkeypatch.setattr(fused, "MergeLaunch", Spoiled)
    assert {check.part for check in check_pairs(window=0) if not check.is_right} >= {"merge"}


@runs
@pytest.mark.parametrize(("factor", "wrong"), [(1.0, set()), (1.01, {"passes"})])
def test_prefixes_in_passes(factor: float, wrong: set[str], noted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CUDA kernel, emulated, in each step of that name and in no other; a fault is found."""
    card = SimpleNamespace(multi_processor_count=2, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(cuda_launch, "CudaDecode", emulated.CudaDecode)
    monkeypatch.setattr(checks, "REPEATS", {"CUDA": 1})
    monkeypatch.setattr(checks, "STEPS", (("prompt", {0: 5, 1: 37}), ("passes", {0: 1, 1: 5})))
    launched = []

    class Counted(emulated.CudaPrefix):
        def __call__(self, items: int, step: bytes, output: torch.Tensor) -> None:
            super().__call__(items, step, output)
            launched.append(items)
            output *= factor

    monkeypatch.setattr(prefix_launch, "CudaPrefix", Counted)
    fmt, shape = FORMATS["turboquant25"], LayerShape(64, 1, 2, 16, has_passes=True)
    layer = launches.PairLayer(fmt, shape, CPU, checks.DTYPE, "auto", 2, 64)
    assert layer.kernel == "CUDA"
    found = list(checks.check_pairs(fmt, layer, CPU))
    assert len(launched) == 2, "the step, and again"
    assert {check.part for check in found} == {"store", "gather", "decode", "passes"}
    assert {check.part for check in found if not check.is_right} == wrong, found


@runs
def test_blackwell_by_request(noted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With "cuda", the CUDA kernel, emulated, in blocks that its SM holds, and no passes over prefixes."""
    card = SimpleNamespace(multi_processor_count=2, major=12, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 0))
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(cuda_launch, "capability_of", lambda _device: (12, 0))
    monkeypatch.setattr(checks, "REPEATS", {"CUDA": 1})
    monkeypatch.setattr(
        checks, "STEPS", (("prompt", {0: 5, 1: 37}), ("decode", {0: 1, 1: 3}), ("passes", {0: 1, 1: 5}))
    )
    launched = []

    class Counted(emulated.CudaDecode):
        def __call__(self, shape: Any, max_query_len: int, *rest: Any) -> None:
            values = self.compilation((shape.warps, shape.is_final, max_query_len))
            launched.append((shape.warps, values.source.architecture, dict(values.constants)["BLOCKS"]))
            super().__call__(shape, max_query_len, *rest)

    monkeypatch.setattr(cuda_launch, "CudaDecode", Counted)
    fmt, shape = FORMATS["turboquant25"], LayerShape(64, 1, 2, 16, longest=4, has_passes=True)
    layers = [launches.PairLayer(fmt, shape, CPU, checks.DTYPE, option, 2, 64) for option in ("auto", "cuda")]
    assert [layer.kernel for layer in layers] == ["Triton", "CUDA"] and not layers[1].read_short_prefixes()
    found = list(checks.check_pairs(fmt, layers[1], CPU))
    assert launched and {*launched} <= {(4, "sm_120", "2"), (1, "sm_120", "8")}, launched
    assert {check.part for check in found} == {"store", "gather", "decode"}
    assert not [check for check in found if not check.is_right]


def test_the_timed_step(noted: list[Any], launched: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noted, and no more is; keys and values that heads share are compared as well."""
    monkeypatch.setattr(timing, "SHAPE", LayerShape(64, 2, 2, 16))
    monkeypatch.setitem(timing.SIZES, "cpu", (2, 40, 16))
    timed = timing.TimedBatch(FORMATS["turboquant25"], CPU, "auto")
    timed.compile_ahead()
    assert not launched
    timed.packed()()
    assert launched == {*noted}
    assert timed.layer.kernel == "Triton" and timed.check().is_right
    timed.output[-1, -1] *= 1.05  # of the last head
    assert not timed.check().is_right


def test_latents(noted: list[Any], launched: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda = factory.latents_on_cuda
    monkeypatch.setattr(launches, "latent_kernels", lambda _fmt, *layer: on_cuda(*layer))
    fmt, shape = FORMATS["turboquant25"], LayerShape(96, 1, 4, 16, longest=4)
    layer = launches.LatentLayer(fmt, latents.RANK, latents.ROPE_DIM, shape, CPU, checks.DTYPE, "auto", 2)
    layer.compile_ahead()
    found = list(latents.check_latents(fmt, layer, CPU))
    assert len(noted) > 4 and launched <= {*noted}
    assert layer.kernel == "Triton" and len(found) > 8
    assert not [check for check in found if not check.is_right]
