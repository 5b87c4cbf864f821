"""Times that the self-test takes beside a packed dtype's: bf16, fp8, and a copy. Stubs stand for a GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from packed_kv.formats import FORMATS
from packed_kv.selftest import __main__ as process
from packed_kv.selftest import launches, timing
from packed_kv.selftest.reference import relative_rms
from packed_kv.vllm_compat import cpu_has_fp8, cpu_ops

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(not vllm.platforms.current_platform.is_cpu(), reason="needs vLLM's CPU platform")
FA = "vllm.v1.attention.backends.fa_utils"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> timing.TimedBatch:
    """A small batch on a CPU, whose pages have the blocks that a GPU's have."""
    monkeypatch.setitem(timing.SIZES, "cpu", (2, 640, 32))
    launches.prepare(CPU, [])
    return timing.TimedBatch(FORMATS["tq4"], CPU, "auto")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments that FlashAttention is called with, and the version that it says it is."""
    found: dict[str, Any] = {"version": 3}
    module = SimpleNamespace(
        get_flash_attn_version=lambda head_size: found["version"],
        reshape_and_cache_flash=lambda *arguments: found.update(stored=arguments),
        flash_attn_varlen_func=lambda *arguments, **options: found.update(read=arguments, options=options),
    )
    monkeypatch.setitem(sys.modules, FA, module)
    return found


@on_cpu
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_flash_attention_reads_pages_of_the_dtype(dtype: str, timed: timing.TimedBatch, calls: dict[str, Any]) -> None:
    run = timing.dense_on_cuda(timed, dtype)
    run()
    query, key, value = calls["read"]
    read = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    assert {x.dtype for x in (query, key, value)} == {read}
    shape = (timed.requests.blocks, timed.block_size, timing.SHAPE.kv_heads, timing.SHAPE.head_dim)
    assert key.shape == value.shape == shape and key.is_contiguous() and value.is_contiguous()
    assert int(timed.batch.block_table.max()) < timed.requests.blocks
    stored_key, stored_value, coding = calls["stored"][2], calls["stored"][3], calls["stored"][5]
    assert (stored_key.data_ptr(), stored_value.data_ptr()) == (key.data_ptr(), value.data_ptr())
    assert (stored_key.dtype, coding) == ((torch.uint8, "fp8") if dtype == "fp8" else (torch.bfloat16, "auto"))
    scales = {name: x.shape for name, x in calls["options"].items() if name.endswith("descale")}
    of_fp8 = dict.fromkeys(("q_descale", "k_descale", "v_descale"), (len(query), timing.SHAPE.kv_heads))
    assert scales == (of_fp8 if dtype == "fp8" else {})
    assert calls["options"]["fa_version"] == 3 and calls["options"]["out"].dtype == torch.bfloat16


@on_cpu
@pytest.mark.parametrize(("version", "served"), [(None, []), (2, ["bf16"]), (3, ["bf16", "fp8"]), (4, ["bf16"])])
def test_dtypes_of_each_flash_attention(
    version: int | None, served: list[str], timed: timing.TimedBatch, calls: dict[str, Any]
) -> None:
    calls["version"] = version
    assert [dtype for dtype in ("bf16", "fp8") if timing.dense_on_cuda(timed, dtype)] == served


@on_cpu
def test_fp8_on_a_cpu_is_bf16_but_for_its_rounding(timed: timing.TimedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_has_fp8():
        pytest.skip("vLLM's attention has no fp8 on this CPU")
    outputs, ops = [], cpu_ops()
    attend = ops.cpu_attention_with_kv_cache

    @functools.wraps(attend)
    def kept(**options: Any) -> None:
        attend(**options)
        outputs.append(options["output"])

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", kept)
    for dtype in ("bf16", "fp8"):
        torch.manual_seed(1)
        timing.dense_on_cpu(timed, dtype)()
    error = relative_rms(outputs[1].float(), outputs[0].double())
    assert 1e-3 < error < 0.1


@on_cpu
@pytest.mark.parametrize("lacks", ["argument", "instructions"])
def test_without_fp8(lacks: str, timed: timing.TimedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "argument":
        monkeypatch.setattr(cpu_ops(), "cpu_attention_with_kv_cache", lambda query: None)
    else:
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert timing.dense_on_cpu(timed, "fp8") is None


class Card:
    """CUDA's events and graphs, and the order of what is asked of them: an event is recorded every `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.said: list[str] = []
        self.now, self.seconds = 0.0, seconds
        for name, value in {"Event": self.event, "CUDAGraph": self.graph, "graph": Capture}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.said.append("wait"))

    def graph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.said.append("replay"))

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(at=0.0)

        def record() -> None:
            self.said.append("record")
            self.now += self.seconds
            made.at = self.now

        made.record, made.elapsed_time = record, lambda end: (end.at - made.at) * 1e3
        return made


class Capture:
    def __init__(self, _graph: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_the_host_waits_for_no_timed_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first event and the last there are replays and events alone."""
    card, runs = Card(monkeypatch, 0.25), []
    assert timing._on_cuda([lambda: runs.append(1), lambda: runs.append(2)]) == [0.25, 0.25]
    assert runs == [1, 1, 2, 2], "once before its graph, and in it"
    turn = ["replay", "record", *["replay", "record"] * 5, "wait"]
    assert card.said == ["wait", "wait"] + turn * 2 * timing.TURNS


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_copy_is_counted_read_and_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], None]] = []
    for name in ("_on_cpu", "_on_cuda"):
        seconds = 0.5 if name.endswith(kind) else 9e9
        monkeypatch.setattr(timing, name, lambda sides, seconds=seconds: asked.extend(sides) or [seconds])
    monkeypatch.setitem(timing.COPIED_BYTES, kind, 1 << 20)
    device = SimpleNamespace(type=kind)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    assert timing.copy_rate(device) == 2 * (1 << 20) / 0.5  # type: ignore[arg-type]
    asked[0]()
    assert timing.describe_timed(device)["copy_rate"] == 2 * (1 << 20) / 0.5  # type: ignore[arg-type]


@on_cpu
@pytest.mark.parametrize(("done", "times"), [([], 1), ([("tq3", "auto")], 0)])
def test_a_process_that_goes_on_copies_nothing(done: list, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "describe_timed", lambda _device: {"copy_rate": 1.0})
    monkeypatch.setattr(process, "Row", lambda *_: SimpleNamespace(name="tq4", kernel="auto", run=dict))
    said: list[dict[str, Any]] = []
    process.run(said.append, ["tq4"], "auto", done)
    assert [what for what in said if "timed" in what] == [{"timed": {"copy_rate": 1.0}}] * times
