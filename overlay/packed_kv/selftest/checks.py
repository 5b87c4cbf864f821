"""A dtype's layers through the steps of an engine, each held to the reference and launched again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..formats import Format
from ..kernels.cpu import threads
from .launches import CPP, PYTORCH, PairLayer
from .reference import Reference, relative_rms
from .requests import POISON, LayerShape, RequestBatch, Requests

SHAPES = (LayerShape(128, 2, 4, 64, longest=4, has_passes=True), LayerShape(128, 2, 4, 0), LayerShape(64, 3, 3, 64))
"""Few shapes, one with drafts and passes: most of a GPU's first run is compiling some 10 kernels per shape and dtype.
The second shape shares most of the first's kernels. `timing.SHAPE` is one more."""
STEPS: tuple[tuple[str, dict[int, int]], ...] = (
    ("prompt", {0: 5, 1: 70, 2: 150, 3: 700}),
    ("gather", {0: 1, 1: 2, 2: 33, 3: 90}),
    ("decode", {0: 1, 1: 1, 2: 1, 3: 1}),
    ("decode", {0: 3, 1: 4, 2: 1, 3: 2}),
    ("merge", {3: 1}),
    ("passes", {0: 1, 1: 2, 2: 33, 3: 40}),
)
"""Name of a step, and new tokens of its requests: prompts; chunks with decodes; decodes without and with drafts; one
decode whose request is split; and chunks whose prefixes the decode kernel reads in the pages. See `steps`."""
MOST = [sum(new.get(request, 0) for _, new in STEPS) for request in range(4)]
DTYPE = torch.float16
"""Dtype of activations: the finer of the two that engines take."""
DECODE_BOUND = {CPP: 3e-4 + 2.0**-11, PYTORCH: 2.0**-11, "CUDA": 2e-3, "Triton": 2e-3}
"""Bound of decodes' relative RMS error by kernel, as in tests/kernels: on a CPU, of fp32 outputs that are then
rounded."""
PREFILL_BOUND = 4 * torch.finfo(DTYPE).eps
REPEATS = {CPP: 20, PYTORCH: 2, "CUDA": 50, "Triton": 50}
"""Repetitions of each step's launches; on CUDA, decodes are also replayed as often from a graph."""
THREADS = "threads"
BUSY_BYTES = 1 << 27
"""Copied beside every second replay."""


@dataclass
class Check:
    """A comparison: `error` within `bound`, by `part` (threads, store, gather, passes, decode, merge, latents).
    Repeated launches that left other bits than the first: `differ` of `repeats`."""

    part: str
    case: str
    error: float
    bound: float
    repeats: int = 0
    differ: int = 0

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound and not self.differ


def steps(shape: LayerShape) -> list[tuple[str, dict[int, int]]]:
    """Return the `STEPS` that a layer supports: steps with drafts or passes only if the layer has them."""
    drafts = [(name, new) for name, new in STEPS if name != "decode" or max(new.values()) <= shape.longest]
    return drafts if shape.has_passes else [(name, new) for name, new in drafts if name != "passes"]


def vectors(rows: int, heads: int, channels: int, seed: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Random [rows, heads, channels] on the CPU; the first channels are large, as in models."""
    made = torch.randn(rows, heads, channels, generator=torch.Generator().manual_seed(seed))
    made[..., :3] *= 4
    return made.to(dtype)


def share_of_bytes(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of bytes that differ."""
    return float((got.cpu() != wanted).float().mean())


def pair_layers(fmt: Format, device: torch.device, kernel: str) -> list[PairLayer]:
    """Layers of all `SHAPES`, whose kernels are being compiled."""
    layers = [PairLayer(fmt, shape, device, DTYPE, kernel, len(MOST), max(MOST)) for shape in SHAPES]
    for layer in layers:
        layer.compile_ahead()
    return layers


def check_threads() -> Check:
    """Return the check that kernels in C++ run on two threads where two are asked for."""
    found = len(threads.thread_ids(2))
    remedy = "; the log of a server says why, and the remedy" if found < 2 else ""
    return Check(THREADS, f"kernels in C++ run on {found} of 2 threads{remedy}", abs(found - 2), 0.0)


def check_pairs(fmt: Format, layer: PairLayer, device: torch.device) -> Iterator[Check]:
    """Take requests through the steps: bytes of pages and rings, outputs, and the same from repeated launches."""
    shape = layer.shape
    requests = Requests(MOST, shape, device)
    reference = Reference(fmt, shape, requests, own_is_raw=layer.own_is_raw)
    cache, ring = (torch.full_like(x, POISON).to(device) for x in (reference.cache, reference.ring))
    of_ring = ring if shape.window else None
    for number, (name, new) in enumerate(steps(shape)):
        if name == "passes" and not layer.read_short_prefixes():
            continue
        batch = requests.step(new)
        rows, case = batch.starts[-1], f"{shape}: {name} {tuple(new.values())}"
        heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
        query, key, value = (vectors(rows, n, shape.head_dim, 3 * number + i) for i, n in enumerate(heads))
        inputs = (query.to(device), key.to(device), value.to(device))
        output = torch.full_like(inputs[0], float("nan"))
        before = [x.clone() for x in (cache, ring)]
        layer.forward(batch, *inputs, cache, of_ring, output)
        first = reference.store(batch, key, value)
        share = max(share_of_bytes(cache, reference.cache), share_of_bytes(ring, reference.ring))
        yield Check("store", case, share, 0.0)
        for index in range(len(batch.requests)):
            wanted = reference.expected(batch, index, query, int(first[index]))
            error = relative_rms(output[batch.rows(index)].cpu(), wanted)
            is_decode = index < batch.decodes
            part = _part(name, is_decode)
            yield Check(part, case, error, DECODE_BOUND[layer.kernel] if is_decode else PREFILL_BOUND)
        yield _repeated(layer, batch, inputs, (cache, of_ring), before, output, f"{case} again")


def _part(name: str, is_decode: bool) -> str:
    """The part of a step that serves a request."""
    if is_decode:
        return "merge" if name == "merge" else "decode"
    return "passes" if name == "passes" else "gather"


def _repeated(
    layer: PairLayer, batch: RequestBatch, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    memory: tuple[torch.Tensor, torch.Tensor | None], before: list[torch.Tensor], output: torch.Tensor,
    case: str,
) -> Check:  # fmt: skip
    """Repeat a step from the same memory, launch by launch and, if all requests are decodes on CUDA, from a graph."""
    cache, ring = memory
    tensors = [output, cache, *([] if ring is None else [ring])]
    bounds = batch.bounds(cache.device)

    def run() -> None:
        layer.attention.forward(layer.step(batch, *bounds, *inputs, cache, ring, output))

    def restore() -> None:
        output.fill_(float("nan"))
        for x, old in zip(tensors[1:], before, strict=False):
            x.copy_(old)

    part = "decode" if batch.decodes == len(batch.requests) else "gather"
    repeats = REPEATS[layer.kernel]
    expected = [x.clone() for x in tensors]
    differ = rounds_that_differ(run, restore, tensors, expected, repeats)
    if cache.is_cuda and part == "decode":
        differ += _replays_that_differ(run, restore, tensors, expected, repeats)
        repeats *= 2
    return Check(part, case, 0.0, 0.0, repeats, differ)


def rounds_that_differ(
    run: Callable[[], object], restore: Callable[[], object], tensors: list[torch.Tensor], expected: list[torch.Tensor],
    repeats: int, beside: Callable[[int], None] = lambda _: None,
) -> int:  # fmt: skip
    """Count rounds after which some tensor has other than the expected bits."""
    differ = torch.zeros(repeats, dtype=torch.bool, device=tensors[0].device)
    for number in range(repeats):
        restore()
        beside(number)
        run()
        for x, wanted in zip(tensors, expected, strict=True):
            differ[number] |= (x.view(torch.uint8) != wanted.view(torch.uint8)).any()
    return int(differ.sum())


def _replays_that_differ(
    run: Callable[[], object], restore: Callable[[], object], tensors: list[torch.Tensor], expected: list[torch.Tensor],
    repeats: int,
) -> int:  # fmt: skip
    """The same with replays of a graph; beside every second one a copy keeps memory busy."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    source = torch.empty(BUSY_BYTES, dtype=torch.uint8, device=tensors[0].device)
    target = torch.empty_like(source)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()

    def beside(number: int) -> None:
        torch.cuda.synchronize()
        if number % 2:
            with torch.cuda.stream(stream):
                target.copy_(source)

    return rounds_that_differ(graph.replay, restore, tensors, expected, repeats, beside)
