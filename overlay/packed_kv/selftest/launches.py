"""Layers of attention as an engine makes them. The one module of the self-test that knows `attention/`."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import init_workspace_manager

from ..attention import cpu
from ..attention.factory import latent_kernels, pair_kernels
from ..attention.latent.in_pytorch import PrefixChunk, RecentContext
from ..attention.layer import PairAttention
from ..attention.layouts import LatentLayout, PairLayout
from ..attention.limits import EngineLimits, Limits
from ..attention.metadata import Batch, PackedMetadata
from ..attention.protocols import DecodeBatch, NewTokens
from ..attention.warmup import PairWarmup, release, warm_up_latents
from ..codecs.latent import LatentCodec
from ..codecs.pages import PagedCodec
from ..codecs.ring import Ring
from ..formats import Format
from ..kernels.precompile import Precompiler
from ..kernels.served import CPP, PYTORCH, Latents, Pairs
from ..reference.attention import AttentionOptions
from ..window.layer import SUFFIX, WindowLayer
from ..window.metadata import WindowMetadata, slot_filler
from ..window.step import WindowStep
from .requests import BLOCK, RING_BLOCK, LayerShape, RequestBatch, ring_blocks

HEAD_DIMS = (64, 128)
"""The route of layers that no kernel serves."""
RANK, ROPE_DIM = 512, 64
"""Channels of latents, and of RoPE beside them."""


def prepare(device: torch.device, formats: Iterable[Format]) -> None:
    """Do what vLLM's workers do before they make layers: its workspace; on a CPU its ops, and our compilation."""
    if device.type == "cuda":
        init_workspace_manager(device)
        return
    current_platform.import_kernels()
    for fmt in formats:
        for head_dim in HEAD_DIMS:
            cpu.compile_ahead(Pairs(fmt, head_dim, group=1), attends=True)
        cpu.compile_ahead(Latents(fmt, RANK, ROPE_DIM, heads=1), attends=True)


class PairLayer:
    """Attention of one layer of keys and values.

    Args:
        fmt, shape: of the layer.
        device: "cuda" or "cpu".
        dtype: of queries and outputs.
        kernel: of decodes on CUDA, `decode_kernel`.
        max_requests, max_tokens: of a batch, and of a request.
    """

    def __init__(
        self, fmt: Format, shape: LayerShape, device: torch.device, dtype: torch.dtype, kernel: str, max_requests: int,
        max_tokens: int,
    ) -> None:  # fmt: skip
        self.shape, self.dtype = shape, dtype
        self.codec = PagedCodec(fmt, shape.head_dim, device=device)
        flash, options = None, AttentionOptions(shape.head_dim**-0.5)
        if device.type == "cuda":
            from ..attention.prefill import find_flash_attention  # imports Triton, which the CPU platform may lack

            flash = find_flash_attention(shape.head_dim, shape.head_dim, dtype, None)
        limits = self.limits = Limits(shape.longest, max_requests, max_tokens)
        engine = EngineLimits(device, dtype, limits, max_tokens, kernel, has_ring=True)
        if not shape.has_passes:
            limits = limits._replace(max_tokens=0)
        layout = PairLayout(self.codec, shape.query_heads, shape.kv_heads, options, limits)
        kernels = pair_kernels(fmt, layout, engine, flash)
        self.kernel = PYTORCH if kernels.decode is None else kernels.decode.language
        self.attention = PairAttention(kernels)
        self.own_is_raw = kernels.prefill is not None
        """True if a prompt's rows read the step's own tokens before quantisation."""
        self.window = _window_layer(shape) if shape.window else None

    def read_short_prefixes(self) -> bool:
        """Have steps from now on read prefixes in the pages, in passes, however short they are. Returns False if the
        layer has no kernel for that."""
        decode = self.attention.kernels.decode
        if decode is None or decode.pass_limits is None:
            return False
        decode.pass_limits = decode.pass_limits._replace(keys=0)
        return True

    def compile_ahead(self) -> None:
        """Have all kernels of the layer compiled in other threads, as vLLM's profiling run does."""
        if self.kernel in (PYTORCH, CPP):
            return
        shape, device = self.shape, self.codec.key.device
        query, key, value = (
            torch.zeros(BLOCK, heads, shape.head_dim, dtype=self.dtype, device=device)
            for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
        )
        PairWarmup(self.attention, query, key, value, BLOCK, self.window, self.limits).run(shares_cache=False)

    def compile_step(self, batch: RequestBatch, *tensors: torch.Tensor) -> None:
        """Have the kernels of a step of decodes compiled in other threads. tensors: query, key, value, cache, ring and
        output, see `forward`; a block of cache and ring will do."""
        if self.kernel in (PYTORCH, CPP):
            return
        kernels = self.attention.kernels
        with Precompiler():
            self.forward(batch, *tensors)
            release(kernels.store.kernel, kernels.decode)

    def forward(
        self, batch: RequestBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor,
        ring: torch.Tensor | None, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Store a step's tokens and attend, with new metadata, as in an engine's step.

        Args:
            query, key, value: [rows, heads, head_dim].
            cache, ring: uint8 [blocks, KV heads, block_size, slot bytes].
            output: [rows, query heads, head_dim], filled.
        """
        bounds = batch.bounds(cache.device)
        self.attention.forward(self.step(batch, *bounds, query, key, value, cache, ring, output))

    def step(
        self, batch: RequestBatch, starts: torch.Tensor, lengths: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, cache: torch.Tensor, ring: torch.Tensor | None, output: torch.Tensor,
    ) -> Batch:  # fmt: skip
        """Return what `attention.forward` takes. The layers of an engine share its metadata.

        A CUDA graph can capture this and `attention.forward`, if all of the batch are decodes. `starts` and `lengths`:
        int32, on the device; the other tensors as `forward` has them.
        """
        metadata = PackedMetadata(
            num_actual_tokens=batch.starts[-1], block_table=batch.block_table, slot_mapping=batch.slots,
            positions=batch.positions, query_start_loc=starts, seq_lens=lengths, query_starts=batch.starts,
            context=batch.lengths, decodes=batch.decodes, decode_tokens=batch.starts[batch.decodes],
            decode_query_len=batch.longest, stored_lens=lengths,
        )  # fmt: skip
        window = None
        if self.window is not None and ring is not None:
            slots, first = _fill_slots(self.window, batch, starts, lengths)
            self.window.kv_cache = ring
            window = WindowStep(self.window, WindowMetadata(batch.ring_table, slots, first), is_shared=False)
        return Batch(query, key, value, cache, metadata, output, window)


class LatentLayer:
    """Attention of one layer of latents; see `PairLayer`. `shape`: query heads in `group`, and `window`."""

    def __init__(
        self, fmt: Format, rank: int, rope_dim: int, shape: LayerShape, device: torch.device, dtype: torch.dtype,
        kernel: str, max_requests: int,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.scale = shape, dtype, shape.head_dim**-0.5
        self.codec = LatentCodec(fmt, rank, rope_dim, device)
        self.window = _window_layer(shape) if shape.window else None
        # No tokens: on a CPU the workspace grows with the batches.
        engine = EngineLimits(device, dtype, Limits(shape.longest, max_requests), 0, kernel)
        layout = LatentLayout(self.codec, shape.group, self.scale, dtype, engine.limits, None, shape.window)
        self.kernels = latent_kernels(fmt, layout, engine)
        self.kernel = self.kernels.decode.language

    def compile_ahead(self) -> None:
        """Have all kernels of the layer compiled in other threads, and take the workspace."""
        if self.kernel not in (PYTORCH, CPP):
            self.kernels.decode.reserve()
            warm_up_latents(self.kernels, BLOCK, self.shape.head_dim, self.window)

    def store(
        self, batch: RequestBatch, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor,
        ring: torch.Tensor | None,
    ) -> Ring | None:  # fmt: skip
        """Store a step's latents [rows, rank] and RoPE channels [rows, rope_dim], and return the requests' ring."""
        kernel, slots, held = self.kernels.store.kernel, None, None
        if self.window is not None and ring is not None:
            slots, first = _fill_slots(self.window, batch, *batch.bounds(self.codec.device))
            held = Ring(ring, batch.ring_table, first, self.shape.window)
        kernel.write(kernel.prepare(NewTokens(batch.slots, ring_slots=slots)), cache, latent, rope, ring)
        return held

    def gather(self, batch: RequestBatch, cache: torch.Tensor, ring: Ring | None, rows: torch.Tensor) -> None:
        """Fill rows [tokens of all requests, rank + rope_dim] as a chunk behind these tokens would read them."""
        lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=cache.device)
        ends = torch.tensor([0, *batch.lengths], device=cache.device).cumsum(0).to(torch.int32)
        chunk = PrefixChunk(torch.zeros_like(lengths), ends, max(batch.lengths), lengths)
        recent = None if ring is None else RecentContext(ring, lengths)
        self.kernels.prefix.gather(cache, batch.block_table, chunk, rows, recent)

    def decode(
        self, batch: RequestBatch, q_latent: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor, ring: Ring | None
    ) -> torch.Tensor:
        """Attend: queries [rows, heads, rank] and [rows, heads, rope_dim] -> [rows, heads, rank], overwritten later."""
        starts, lengths = batch.bounds(self.codec.device)
        decodes = DecodeBatch(batch.block_table, starts, lengths, batch.starts[-1], batch.longest, ring=ring)
        kernel = self.kernels.decode
        output, _ = kernel.attend(kernel.prepare(decodes), cache, (q_latent, q_rope), ring)
        return output


def _window_layer(shape: LayerShape) -> WindowLayer:
    """A window layer with the ring blocks of `Requests`."""
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    layer = WindowLayer(f"selftest{SUFFIX}", shape.window, shape.longest, config)
    sizes = {"window": shape.window, "slack": shape.longest, "ring_block_size": RING_BLOCK}
    layer.spec = cast(Any, SimpleNamespace(**sizes, ring_blocks=ring_blocks(shape)))
    return layer


def _fill_slots(
    window: WindowLayer, batch: RequestBatch, starts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each row goes in its ring, and the first token that each ring has; int32 [rows] and [requests]."""
    slots = torch.zeros(batch.starts[-1], dtype=torch.int32, device=starts.device)
    first = torch.zeros(len(lengths), dtype=torch.int32, device=starts.device)
    fill, sizes = slot_filler(window.spec, starts.device)
    fill(starts, lengths, batch.ring_table, slots, first, **sizes)
    return slots, first
