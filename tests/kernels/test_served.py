"""Who serves: layers take what `kernels/served.py` answers to random questions, and log its reasons."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import DEMO_MODEL
from packed_kv.attention import choice, impl, limits
from packed_kv.attention import cpu as pairs_on_cpu
from packed_kv.attention.decode import CudaPairs, TritonPairs
from packed_kv.attention.factory import latent_kernels, pair_kernels
from packed_kv.attention.impl import PackedAttentionImpl
from packed_kv.attention.latent import cpu as latents_on_cpu
from packed_kv.attention.latent.decode import HopperLatents, TritonLatents
from packed_kv.attention.latent.in_pytorch import ReferenceLatents
from packed_kv.attention.layouts import LatentLayout, PairLayout
from packed_kv.attention.limits import EngineLimits
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS, Format
from packed_kv.gpu_generations import GENERATIONS
from packed_kv.kernels import cuda, served
from packed_kv.kernels.served import (
    CPP,
    CUDA,
    PYTORCH,
    TRITON,
    Engine,
    Latents,
    Pairs,
    Served,
    longest_of,
    who_serves,
)
from packed_kv.reference.attention import AttentionOptions
from packed_kv.refusals.table import Refused
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a card answers for itself alone")
HOPPER = Engine("cuda", (9, 0))
OTHER_CODES = Format("other", rotation="hadamard", bits=4, outlier_bits=6)
OTHER_ROTATION = Format("other", rotation="spun", bits=4)
KERNELS = {
    CudaPairs: CUDA, TritonPairs: TRITON, pairs_on_cpu.CpuPairs: CPP, type(None): PYTORCH,
    HopperLatents: CUDA, TritonLatents: TRITON, latents_on_cpu.CpuLatents: CPP, ReferenceLatents: PYTORCH,
}  # fmt: skip


def random_question(numbers: random.Random) -> tuple[Engine, Pairs | Latents]:
    """A question that one layer in two is served by the fastest kernel, roughly."""

    def usually(value: Any, *others: Any) -> Any:
        return value if numbers.random() < 0.8 else numbers.choice(others)

    capabilities = [(9, 0)] * 12 + [generation.capability for generation in GENERATIONS]
    platform = numbers.choice(("cuda", "cuda", "cpu"))
    engine = Engine(
        platform, None if platform == "cpu" else numbers.choice(capabilities), usually("auto", "triton", "cuda"),
        usually(False, True), usually(1, 4, 8, 21, 64), usually(8, 5461, 6000, 20000),
    )  # fmt: skip
    if engine.is_fp32 and engine.option == "cuda":  # refused before there are layers
        engine = engine._replace(option="auto")
    fmt = FORMATS[numbers.choice([*FORMATS])]
    if numbers.random() < 0.4:
        return engine, Latents(fmt, usually(512, 256), usually(64, 32, 160), usually(16, 5, 64))
    head_dim, value_dim = usually((128, 128), (64, 64), (80, 80), (256, 256), (192, 128), (288, 288))
    options = usually(None, 64, 64, 300), usually(None, 30.0), usually(False, True)
    return engine, Pairs(fmt, head_dim, usually(4, 1, 7, 16, 65), value_dim, *options)


@pytest.fixture(scope="module")
def config() -> Any:
    """Of an engine for the demo model."""
    return EngineArgs(str(DEMO_MODEL), kv_cache_dtype="tq4", max_model_len=512).create_engine_config()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that name kernels; nothing is compiled."""
    found: list[str] = []

    def note(text: str, *words: object, **_options: object) -> None:
        found.append(text % words)

    monkeypatch.setattr(choice.logger, "info_once", note, raising=False)
    monkeypatch.setattr(pairs_on_cpu.logger, "warning_once", note, raising=False)
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(impl, "find_calibration", lambda *_arguments: None)
    monkeypatch.setattr(impl, "window_tokens_of_model", lambda _config: 0)
    for module, names in (
        (pairs_on_cpu, ("wait_for_libraries", "compile_ahead", "CpuPrefill", "prefill_refusal")),
        (pairs_on_cpu.store, ("CpuStore",)), (latents_on_cpu, ("wait_for_libraries",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, lambda *_arguments, **_options: None)
    decode = lambda *_arguments: SimpleNamespace(reserve=lambda *_largest: None)  # noqa: E731
    monkeypatch.setattr(pairs_on_cpu.decode, "CpuDecode", decode)
    monkeypatch.setattr(latents_on_cpu, "CpuLatentDecode", decode)
    pages = lambda codec: SimpleNamespace(codec=codec)  # noqa: E731
    monkeypatch.setattr(latents_on_cpu, "CpuLatentPages", pages)
    return found


def take_kernel(
    config: Any, engine: Engine, layer: Pairs | Latents, monkeypatch: pytest.MonkeyPatch
) -> tuple[type, int, Pairs | None]:
    """Return what an engine's layer takes, the most query tokens that it serves, and what it asked, of pairs."""
    major, minor = engine.capability or (0, 0)
    card = SimpleNamespace(multi_processor_count=4, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    platform = SimpleNamespace(
        is_cuda=lambda: engine.platform == "cuda", get_device_capability=lambda: engine.capability
    )
    monkeypatch.setattr(limits, "current_platform", platform)
    drafts = SimpleNamespace(method="ngram", parallel_drafting=False, num_speculative_tokens=engine.longest_decode - 1)
    monkeypatch.setattr(config, "speculative_config", drafts)
    monkeypatch.setattr(config.scheduler_config, "max_num_seqs", engine.requests)
    monkeypatch.setattr(config.model_config, "dtype", torch.float32 if engine.is_fp32 else torch.bfloat16)
    options = {"decode_kernel": engine.option, "mixed_graphs": True}
    monkeypatch.setattr(config, "additional_config", {"packed_kv": options})
    with set_current_vllm_config(config):
        assert limits.engine_of(config) == engine
        if isinstance(layer, Latents):
            return _take_latents(config, engine, layer)
        return _take_pairs(engine, layer)


def _take_pairs(engine: Engine, layer: Pairs) -> tuple[type, int, Pairs]:
    assert layer.fmt is not None
    sinks = torch.zeros(2 * layer.group) if layer.has_sinks else None
    made = PackedAttentionImpl(
        2 * layer.group, layer.head_dim, 0.1, 2, None, layer.sliding_window, layer.fmt.name, layer.soft_cap,
        sinks=sinks, head_size_v=layer.value_dim,
    )  # fmt: skip
    codec = PagedCodec(layer.fmt, layer.head_dim, value_dim=layer.value_dim)
    here = replace(made.engine, device=SimpleNamespace(type=engine.platform))
    kernels = pair_kernels(layer.fmt, PairLayout(codec, 2 * layer.group, 2, made.options, here.limits), here)
    decode = kernels.decode
    batch = SimpleNamespace(decodes=3, decode_query_len=1)
    if not kernels.count_decodes(batch, made.dtype):
        decode = None
    if engine.platform == "cuda" and decode is not None:
        assert decode.splits.reads_prefixes == served.who_reads_prefixes(engine, layer, mixed_graphs=True)
    return type(decode), 0 if decode is None else decode.longest, made.asked()


def _take_latents(config: Any, engine: Engine, layer: Latents) -> tuple[type, int, None]:
    assert layer.fmt is not None
    codec = LatentCodec(layer.fmt, layer.rank, layer.rope_dim)
    here = EngineLimits.of(config, SimpleNamespace(type=engine.platform))  # type: ignore[arg-type]
    layout = LatentLayout(codec, layer.heads, 0.1, here.dtype, here.limits, None)
    decode = latent_kernels(layer.fmt, layout, here).decode
    return type(decode), decode.longest, None


@pytest.mark.parametrize("seed", range(4))
def test_layers_take_what_is_answered(
    seed: int, config: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, taken, reasons = random.Random(seed), set(), set()
    for _ in range(40):
        engine, layer = random_question(numbers)
        served = who_serves(engine, layer)
        lines.clear()
        if engine.platform == "cuda" and engine.option == "cuda" and served.reason:
            with pytest.raises(Refused, match=re.escape(f": cuda, and {served.reason}; leave decode_kernel out")):
                take_kernel(config, engine, layer, monkeypatch)
            continue
        kernel, longest, asked = take_kernel(config, engine, layer, monkeypatch)
        assert KERNELS[kernel] == served.kernel, (engine, layer, served)
        assert asked in (layer, None)
        if isinstance(layer, Pairs) and served.kernel != PYTORCH:
            assert longest == served.longest, (engine, layer)
        taken.add((engine.platform, type(layer), served.kernel))
        if not engine.is_fp32:
            assert [line.endswith((f"Triton ({served.reason})", f": {served.reason}")) for line in lines] == (
                [True] if served.reason else [False] * (engine.platform == "cuda")
            ), (lines, served)
            reasons.add(served.reason)
    assert len(taken) >= 7 and len(reasons) >= 8, (taken, reasons)


def lacks(layer: Pairs | Latents, **engine: Any) -> str:
    """Return what of a layer the CUDA kernel does not serve, in words."""
    served = who_serves(HOPPER._replace(is_here=False, **engine), layer)
    assert (served.kernel == CUDA) == (served.reason == "")
    return served.reason.removeprefix("the CUDA kernel does not support ")


PAIRS, LATENTS = Pairs(FORMATS["tq4"], 128, 4), Latents(FORMATS["tq4"], 512, 64, 16)


@pytest.mark.parametrize(
    ("layer", "engine", "said"),
    [
        (PAIRS, {}, ""),
        (PAIRS, {"capability": (8, 9)}, "compute capability 8.9 (only 9.0, 10.0 and 12.0)"),
        (PAIRS, {"capability": (11, 0)}, "compute capability 11.0 (only 9.0, 10.0 and 12.0)"),
        (PAIRS, {"capability": (10, 0), "option": "cuda", "longest_decode": 8}, ""),
        (
            PAIRS,
            {"capability": (12, 1), "option": "cuda", "longest_decode": 9},
            "4 query heads per KV head times 9 query tokens (at most 8 tokens)",
        ),
        (
            PAIRS._replace(group=33),
            {"capability": (12, 1), "option": "cuda"},
            "33 query heads per KV head times 1 query tokens (at most 0 tokens)",
        ),
        (PAIRS, {"capability": None}, "a GPU of unknown compute capability"),
        (PAIRS._replace(head_dim=96), {}, "head size 96 (only 64, 128 and 256)"),
        (PAIRS._replace(head_dim=256), {"longest_decode": 2}, ""),
        (PAIRS._replace(head_dim=256), {"longest_decode": 64, "option": "cuda"}, ""),
        (
            PAIRS._replace(head_dim=256, group=6),
            {"longest_decode": 41},
            "6 query heads per KV head times 41 query tokens (at most 40 tokens)",
        ),
        (
            PAIRS._replace(head_dim=256),
            {"capability": (12, 1), "option": "cuda"},
            "head size 256 on compute capability 12.0 (only 9.0)",
        ),
        (PAIRS._replace(head_dim=128, value_dim=64), {}, "value heads of 64 channels beside key heads of 128"),
        (
            PAIRS,
            {"longest_decode": 65},
            "4 query heads per KV head times 65 query tokens (at most 64 tokens)",
        ),
        (
            PAIRS._replace(group=12),
            {"longest_decode": 21},
            "12 query heads per KV head times 21 query tokens (at most 20 tokens)",
        ),
        (PAIRS._replace(group=65), {}, "65 query heads per KV head times 1 query tokens (at most 0 tokens)"),
        (PAIRS._replace(sliding_window=64), {}, "a sliding window"),
        (PAIRS._replace(soft_cap=30.0), {}, "a soft cap"),
        (PAIRS._replace(has_sinks=True), {}, "attention sinks"),
        (PAIRS._replace(fmt=OTHER_CODES), {}, "codes of 6 bits"),
        (PAIRS, {"requests": 16384}, ""),
        (PAIRS, {"requests": 16385}, "16385 requests at once (at most 16384)"),
        (PAIRS._replace(group=16), {"longest_decode": 9, "requests": 5461}, ""),
        (
            PAIRS._replace(group=16),
            {"longest_decode": 9, "requests": 5462},
            "5462 requests at once (at most 5461)",
        ),
        (LATENTS, {}, ""),
        (LATENTS, {"capability": (8, 9)}, "compute capability 8.9 (only 9.0, 10.0 and 12.0)"),
        (LATENTS, {"capability": (10, 0)}, "latents on compute capability 10.0 (only 9.0, for its wgmma)"),
        (LATENTS._replace(rank=256), {}, "latents of 256 channels with 64 of RoPE (only 512 with 64)"),
        (LATENTS._replace(rope_dim=32), {}, "latents of 512 channels with 32 of RoPE (only 512 with 64)"),
        (LATENTS._replace(heads=64), {"longest_decode": 3}, "64 query heads times 3 query tokens (at most 128)"),
        (LATENTS._replace(heads=64, are_picked=True), {"longest_decode": 3}, ""),
        (LATENTS._replace(fmt=OTHER_CODES), {}, "codes of 6 bits"),
    ],
)
def test_sentences_of_the_cuda_kernel(layer: Pairs | Latents, engine: dict[str, Any], said: str) -> None:
    assert lacks(layer, **engine) == said


@pytest.mark.parametrize(
    ("layer", "ranks", "said"),
    [
        (PAIRS._replace(head_dim=288), 1, "heads of 288 channels (at most 256)"),
        (PAIRS._replace(fmt=OTHER_CODES), 1, "codes of 6 bits"),
        (PAIRS._replace(fmt=OTHER_ROTATION), 1, "the rotation spun"),
        (PAIRS, 2, "2 ranks that split the tokens of a request"),
        (LATENTS._replace(rope_dim=160), 1, "160 RoPE channels (at most 128)"),
        (LATENTS._replace(rank=544), 1, "latents of 544 channels (at most 512)"),
        (LATENTS._replace(are_picked=True), 1, "picked latents"),
    ],
)
def test_sentences_of_the_cpu(layer: Pairs | Latents, ranks: int, said: str) -> None:
    engine = Engine("cpu", ranks=ranks, is_here=False)
    assert who_serves(engine, layer) == Served(PYTORCH, 1 << 30, f"the kernels do not serve {said}")


def test_auto_takes_what_was_seen() -> None:
    unseen = HOPPER._replace(capability=(12, 0), is_here=False)
    assert who_serves(unseen, PAIRS) == Served(
        TRITON, 16, "the CUDA kernel compiles for compute capability 12.0, but has not been seen to run there: "
        "decode_kernel=cuda takes it, packed-kv selftest compares and times it",
    )  # fmt: skip
    assert who_serves(unseen._replace(option="cuda"), PAIRS) == Served(CUDA, 8)
    assert who_serves(unseen._replace(option="triton"), PAIRS).reason.endswith("disabled by decode_kernel=triton")


@pytest.mark.parametrize(
    ("layer", "engine", "reader"),
    [
        ({}, {}, CUDA),
        ({"has_sinks": True}, {}, CUDA),
        ({"head_dim": 256}, {}, CUDA),
        ({"sliding_window": served.SHORT_WINDOW}, {}, TRITON),
        ({"sliding_window": 128, "has_sinks": True}, {"option": "cuda"}, TRITON),
        ({"sliding_window": served.SHORT_WINDOW + 1}, {}, None),
        ({"sliding_window": 128, "head_dim": 256}, {}, None),
        ({"sliding_window": 128, "head_dim": 80}, {}, None),
        ({"head_dim": 192, "value_dim": 128}, {}, None),
        ({"soft_cap": 30.0}, {}, None),
        ({"soft_cap": 30.0, "sliding_window": 128}, {}, None),
        ({}, {"option": "triton"}, None),
        ({"sliding_window": 128}, {"option": "triton"}, None),
        ({}, {"is_fp32": True}, None),
        ({"has_sinks": True}, {"ranks": 2}, None),
        ({}, {"capability": (10, 0)}, None),
        ({"sliding_window": 128}, {"capability": (8, 9)}, None),
        ({}, {"capability": None}, None),
    ],
)
def test_readers_of_prefixes(layer: dict[str, Any], engine: dict[str, Any], reader: str | None) -> None:
    asked = Pairs(FORMATS["tq4"], **{"head_dim": 64, "group": 8} | layer)
    asks = HOPPER._replace(**{"is_here": False} | engine)
    assert served.who_reads_prefixes(asks, asked, mixed_graphs=True) == reader
    assert served.who_reads_prefixes(asks, asked, mixed_graphs=False) == (CUDA if reader == CUDA else None)


def test_a_compiler_that_does_not_know_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("packed_kv.kernels.cuda.nvrtc")
    monkeypatch.setattr(nvrtc, "known_architectures", lambda: [90, 100])
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (12, 8))
    assert [cuda.missing.__wrapped__(capability) for capability in ((9, 0), (10, 0))] == [None, None]
    said = "compute capability 10.3 with NVRTC 12.8, which does not know it"
    assert cuda.missing.__wrapped__((10, 3)) == said


def test_longest() -> None:
    assert [longest_of(CUDA, PAIRS._replace(group=group)) for group in (4, 12, 65)] == [64, 20, 1]
    assert [longest_of(TRITON, PAIRS._replace(group=group)) for group in (4, 12, 65)] == [16, 5, 1]
    assert [longest_of(CUDA, PAIRS._replace(head_dim=256, group=group)) for group in (4, 6, 12)] == [64, 40, 20]
    assert longest_of(CUDA, LATENTS) == 8 and longest_of(TRITON, LATENTS) > 1000


def test_a_compiler_is_looked_for_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: "a machine without NVRTC")
    assert who_serves(Engine("cpu"), PAIRS).reason.startswith("CXX=no-such-compiler: there is no such program")
    assert who_serves(HOPPER, PAIRS).reason == "the CUDA kernel does not support a machine without NVRTC"
    assert [who_serves(on._replace(is_here=False), PAIRS).kernel for on in (Engine("cpu"), HOPPER)] == [CPP, CUDA]


def test_a_cpu_asks_with_the_whole_layer(config: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that C++ lacks is refused only if the question has it."""
    lacks = served.cpp_lacks
    monkeypatch.setattr(served, "cpp_lacks", lambda x, ranks=1: "a soft cap" if x.soft_cap else lacks(x, ranks))
    found = []
    for soft_cap in (None, 30.0):
        options = AttentionOptions(1.0, logits_soft_cap=soft_cap)
        here = EngineLimits.of(config, torch.device("cpu"))
        layout = PairLayout(PagedCodec(FORMATS["tq4"], 64), 4, 2, options, here.limits)
        found.append(pairs_on_cpu.find_kernels(FORMATS["tq4"], layout, here)[1])
    assert isinstance(found[0], pairs_on_cpu.CpuPairs) and found[1] is None
    assert any("a soft cap" in line for line in lines)
