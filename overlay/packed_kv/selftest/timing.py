"""Time of a decode step of one layer, beside bf16's and fp8's with the installed vLLM's own attention."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..codecs import ring as rings
from ..codecs.pages import PagedCodec
from ..formats import Format
from ..layout import MICRO_BLOCK, ring_slot_bytes
from ..vllm_compat import cpu_has_fp8, cpu_instructions, cpu_ops
from .checks import Check, vectors
from .launches import CPP, PYTORCH, PairLayer
from .reference import Source, attention, relative_rms
from .requests import RING_BLOCK, LayerShape, Requests

SHAPE = LayerShape(128, 8, 4, 64)
"""A layer of an 8B model, with the recent window that engines have by default."""
SIZES = {"cuda": (32, 8192, 16), "cpu": (8, 2048, 128)}
"""Requests of a batch, tokens of each (more than a GPU's caches hold), and tokens of a block, as vLLM's default."""
DISTINCT_TOKENS = 512
"""Tokens that are stored, of one KV head: their blocks repeat, and the other heads have the same."""
SWEEP_BYTES, TURNS = 1 << 26, 7
COPIED_BYTES = {"cuda": 1 << 29, "cpu": 1 << 27}
"""Bytes that a copy reads and writes: several times what the caches of a GPU hold."""
FP8_VERSION = 3
"""Version of FlashAttention that reads pages of fp8, which is Hopper's."""
BOUND = {CPP: 3e-4 + 2.0**-8, PYTORCH: 2.0**-8, "CUDA": 6e-3, "Triton": 6e-3}
"""Relative RMS error in bf16, whose outputs are rounded to 2^-8, as in `checks.DECODE_BOUND`."""


class Times(NamedTuple):
    """Microseconds a layer and step: of the packed dtype, of bf16 and of fp8 (None: vLLM's attention that the self-test
    calls does not serve it here)."""

    packed: float
    bf16: float | None
    fp8: float | None


class TimedBatch:
    """A batch of decodes whose pages and rings are full, and its tensors in bf16."""

    def __init__(self, fmt: Format, device: torch.device, kernel: str) -> None:
        count, tokens, self.block_size = SIZES[device.type]
        self.fmt, self.device, self.tokens = fmt, device, tokens
        self.layer = PairLayer(fmt, SHAPE, device, torch.bfloat16, kernel, count, tokens)
        self.requests = Requests([tokens] * count, SHAPE, device, self.block_size)
        self.requests.lengths = [tokens - 1] * count
        self.batch = self.requests.step(dict.fromkeys(range(count), 1))
        heads = (SHAPE.query_heads, SHAPE.kv_heads, SHAPE.kv_heads)
        made = (vectors(count, n, SHAPE.head_dim, i, torch.bfloat16) for i, n in enumerate(heads))
        self.query, self.key, self.value = (x.to(device) for x in made)
        self.output = torch.full_like(self.query, float("nan"))

    def compile_ahead(self) -> None:
        """Have the kernels of the step compiled in other threads."""
        sizes = (self.block_size, self.layer.codec.slot_bytes), (RING_BLOCK, ring_slot_bytes(SHAPE.head_dim))
        memory = (torch.zeros(1, SHAPE.kv_heads, *size, dtype=torch.uint8, device=self.device) for size in sizes)
        self.layer.compile_step(self.batch, self.query, self.key, self.value, *memory, self.output)

    def packed(self) -> Callable[[], None]:
        """Store and attention over pages and rings. A CPU's metadata are made before, as those of bf16's op are."""
        codec = PagedCodec(self.fmt, SHAPE.head_dim)
        blocks, block_size = DISTINCT_TOKENS // self.block_size, self.block_size
        some = torch.zeros(blocks, 1, block_size, codec.slot_bytes, dtype=torch.uint8)
        codec.write(some, torch.arange(DISTINCT_TOKENS), *_of_one_head(DISTINCT_TOKENS, 7))
        some = some.to(self.device)
        repeats = -(-self.requests.blocks // blocks), SHAPE.kv_heads, 1, 1
        self.cache = some.repeat(repeats)[: self.requests.blocks].contiguous()
        blocks = 1 + self.requests.ring_blocks * len(self.batch.requests)
        ring = torch.zeros(blocks, 1, RING_BLOCK, ring_slot_bytes(SHAPE.head_dim), dtype=torch.uint8)
        held = codec.prepare(*_of_one_head(blocks * RING_BLOCK, 9))
        rings.write(ring, torch.arange(len(held[0])), *held)
        self.ring = ring.to(self.device).repeat(1, SHAPE.kv_heads, 1, 1)
        bounds = self.batch.bounds(self.device)
        tensors = (*bounds, self.query, self.key, self.value, self.cache, self.ring, self.output)
        layer = self.layer
        if self.device.type == "cpu":
            return functools.partial(layer.attention.forward, layer.step(self.batch, *tensors))
        return lambda: layer.attention.forward(layer.step(self.batch, *tensors))

    def check(self) -> Check:
        """Compare the last request's output with attention in fp64 over its pages and its ring."""
        codec, end, row = PagedCodec(self.fmt, SHAPE.head_dim), self.tokens, len(self.query) - 1
        blocks = self.requests.table[row, : -(-end // self.block_size)].long()
        cache, token = self.cache[blocks.to(self.device), :1].cpu(), torch.arange(end)
        numbers = torch.arange(-(-end // MICRO_BLOCK))
        pages = [x[:, :end].transpose(0, 1) for x in codec.read(cache, numbers)]
        first = end - SHAPE.window
        slots = self.requests.ring_table[row].long()[token[first:] // RING_BLOCK] * RING_BLOCK
        recent = rings.read(self.ring.cpu(), slots + token[first:] % RING_BLOCK)
        sources = []
        for held, seen in ((pages, token < first), (recent, torch.ones(SHAPE.window, dtype=torch.bool))):
            key, value = (
                one.restore(x).expand(-1, SHAPE.kv_heads, -1) for one, x in zip(codec.codecs, held, strict=True)
            )
            sources.append(Source(key, value, seen[None]))
        wanted = attention(self.query[row:].cpu(), sources, SHAPE.head_dim**-0.5)
        error = relative_rms(self.output[row:].cpu(), wanted)
        return Check("decode", f"{SHAPE}: {len(self.query)} x {end} in bf16", error, BOUND[self.layer.kernel])


def _of_one_head(tokens: int, seed: int) -> list[torch.Tensor]:
    """Keys and values, fp32 [tokens, 1, channels]."""
    return [vectors(tokens, 1, SHAPE.head_dim, seed + i).float() for i in range(2)]


def dense_on_cuda(timed: TimedBatch, dtype: str) -> Callable[[], None] | None:
    """Return the same step in "bf16" or "fp8" by vLLM's FlashAttention, in the version that it takes on this card.

    None: it does not serve the dtype. fp8's queries are coded before, as vLLM codes them in the layer.
    """
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        reshape_and_cache_flash,
    )

    version, is_fp8 = get_flash_attn_version(head_size=SHAPE.head_dim), dtype == "fp8"
    if version is None or (is_fp8 and version != FP8_VERSION):
        return None
    batch, query = timed.batch, timed.query
    device, one, output = query.device, torch.ones(1, device=query.device), torch.empty_like(query)
    some = torch.randn(2, DISTINCT_TOKENS, SHAPE.kv_heads, SHAPE.head_dim, dtype=torch.bfloat16, device=device)
    stored = some.to(torch.float8_e4m3fn).view(torch.uint8) if is_fp8 else some
    pages = stored.unflatten(1, (-1, timed.block_size))
    repeats = 1, -(-timed.requests.blocks // pages.shape[1]), 1, 1, 1
    key, value = pages.repeat(repeats)[:, : timed.requests.blocks]
    read, scales = (key, value), {}
    if is_fp8:
        query, read = query.to(torch.float8_e4m3fn), (key.view(torch.float8_e4m3fn), value.view(torch.float8_e4m3fn))
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), one.expand(len(query), SHAPE.kv_heads))
    starts, lengths = batch.bounds(device)

    def run() -> None:
        reshape_and_cache_flash(timed.key, timed.value, key, value, batch.slots, "fp8" if is_fp8 else "auto", one, one)
        flash_attn_varlen_func(
            query, *read, out=output, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lengths,
            max_seqlen_k=max(batch.lengths), softmax_scale=SHAPE.head_dim**-0.5, causal=True,
            block_table=batch.block_table, fa_version=version, **scales,
        )  # fmt: skip

    return run


def dense_on_cpu(timed: TimedBatch, dtype: str) -> Callable[[], None] | None:
    """Return the same step in "bf16" or "fp8" by the op of vLLM's CPU platform; None: it has no fp8 here."""
    is_fp8, batch, query = dtype == "fp8", timed.batch, timed.query
    if is_fp8 and not cpu_has_fp8():
        return None
    coding = {"kv_cache_dtype": "fp8"} if is_fp8 else {}  # vLLM 0.31's op has no such argument
    ops, isa = cpu_ops(), cpu_instructions(torch.bfloat16, timed.block_size, SHAPE.head_dim)
    starts, lengths = batch.bounds()
    some = torch.randn(1, SHAPE.kv_heads, 2 * timed.block_size, SHAPE.head_dim).bfloat16()
    stored = some.to(torch.float8_e4m3fn).view(torch.uint8) if is_fp8 else some
    key, value = stored.repeat(timed.requests.blocks, 1, 1, 1).chunk(2, dim=2)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(batch.requests), num_heads=SHAPE.query_heads, num_kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim, seq_lens=lengths, dtype=torch.bfloat16, query_start_loc=starts, causal=True,
        sliding_window_size=-1, isa=isa, enable_kv_split=True, **coding,
    )  # fmt: skip
    output = torch.empty_like(query)

    def run() -> None:
        ops.cpu_attn_reshape_and_cache(timed.key, timed.value, key, value, batch.slots, isa, **coding)
        ops.cpu_attention_with_kv_cache(
            query=query, key_cache=key, value_cache=value, output=output, query_start_loc=starts, seq_lens=lengths,
            scale=SHAPE.head_dim**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=batch.block_table, softcap=0, scheduler_metadata=schedule, s_aux=None, **coding,
        )  # fmt: skip

    return run


def time_step(timed: TimedBatch) -> Iterator[Check | Times]:
    """Compare a step with the reference; then, if it is right, time it beside bf16's and fp8's, in turns."""
    packed = timed.packed()
    packed()
    check = timed.check()
    yield check
    if not check.is_right:
        return
    is_cuda = timed.device.type == "cuda"
    dense = dense_on_cuda if is_cuda else dense_on_cpu
    sides = {dtype: side for dtype in ("bf16", "fp8") if (side := dense(timed, dtype)) is not None}
    seconds = (_on_cuda if is_cuda else _on_cpu)([packed, *sides.values()])
    found = dict(zip(sides, seconds[1:], strict=True))
    yield Times(seconds[0] * 1e6, *(found[dtype] * 1e6 if dtype in found else None for dtype in ("bf16", "fp8")))


def copy_rate(device: torch.device) -> float:
    """Return the bytes a second that a copy within the device's memory moves, read and written: of a GPU its median, of
    a CPU its fastest."""
    source = torch.zeros(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        if device.type == "cuda":  # a kernel: in a graph, `copy_` may be left to the copy engine
            torch.neg(source, out=target)
        else:
            target.copy_(source)

    (seconds,) = (_on_cuda if device.type == "cuda" else _on_cpu)([run])
    return 2 * source.nbytes / seconds


def describe_timed(device: torch.device) -> dict[str, float]:
    """Return the layer and the batch that are timed on a device, and the rate of a copy there, in bytes a second."""
    requests, tokens, block_size = SIZES[device.type]
    return {
        "requests": requests, "context": tokens, "block_size": block_size, "query_heads": SHAPE.query_heads,
        "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim, "window": SHAPE.window, "copy_rate": copy_rate(device),
    }  # fmt: skip


def _on_cpu(sides: list[Callable[[], None]]) -> list[float]:
    """Least seconds of each, after a sweep through the caches."""
    sweep, found = torch.zeros(SWEEP_BYTES, dtype=torch.uint8), [[] for _ in sides]  # type: ignore[var-annotated]
    for turn in range(TURNS + 1):
        for run, times in zip(sides, found, strict=True):
            sweep.add_(1)
            start = time.perf_counter()
            run()
            if turn:
                times.append(time.perf_counter() - start)
    return [min(times) for times in found]


def _on_cuda(sides: list[Callable[[], None]]) -> list[float]:
    """Median seconds of each, in replays of a graph."""
    graphs, found = [], [[] for _ in sides]  # type: ignore[var-annotated]
    for run in sides:
        run()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            run()
    for _ in range(TURNS):
        for graph, times in zip(graphs, found, strict=True):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
            graph.replay()
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            times += [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]
    return [statistics.median(times) for times in found]
