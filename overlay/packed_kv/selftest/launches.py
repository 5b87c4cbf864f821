"""Layers of attention as an engine makes them. The one module of the self-test that knows `attention/`."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import init_workspace_manager

from ..attention import cpu
from ..attention.active_blocks import AttentionOptions
from ..attention.latent.metadata import LatentDecodeMetadata
from ..attention.latent.plain import PlainLatents, RecentContext, Span
from ..attention.metadata import PackedMetadata
from ..attention.plain import PlainAttention
from ..attention.protocols import DecodeRoute, PrefillRoute
from ..codecs.latent import LatentCodec
from ..codecs.pages import PagedCodec
from ..codecs.ring import Ring
from ..formats import Format
from ..window.layer import SUFFIX, WindowLayer
from ..window.metadata import WindowMetadata, slot_filler
from ..window.step import WindowStep
from .requests import BLOCK, LONGEST_DECODE, RING_BLOCK, Batch, Shape

HEAD_DIMS = (64, 128)
PYTORCH = "PyTorch"
"""The route of layers that no kernel serves."""


def prepare(device: torch.device, formats: Iterable[Format]) -> None:
    """What vLLM's workers do before they make layers: its workspace; on a CPU its ops, and the compilation of ours."""
    if device.type == "cuda":
        init_workspace_manager(device)
        return
    current_platform.import_kernels()
    for fmt in formats:
        for head_dim in HEAD_DIMS:
            cpu.compile_ahead(fmt, head_dim, attends=True)


class PairLayer:
    """Attention of one layer of keys and values.

    Args:
        fmt, shape: of the layer.
        device: "cuda" or "cpu".
        dtype: of queries and outputs.
        kernel: of decodes on CUDA, "auto" or "triton".
        max_requests, max_tokens: of a batch, and of a request.
    """

    def __init__(
        self, fmt: Format, shape: Shape, device: torch.device, dtype: torch.dtype, kernel: str, max_requests: int,
        max_tokens: int,
    ) -> None:  # fmt: skip
        self.shape, self.dtype = shape, dtype
        self.codec = PagedCodec(fmt, shape.head_dim, device=device)
        layer = (self.codec, shape.query_heads, shape.kv_heads, AttentionOptions(shape.head_dim**-0.5))
        sizes = (dtype, max_requests, max_tokens)
        routes = cuda_routes(layer, kernel, *sizes) if device.type == "cuda" else cpu_routes(fmt, layer, *sizes)
        decode, prefill, self.kernel = routes
        self.attention = PlainAttention(*layer, decode, prefill)
        self.own_is_raw = prefill is not None
        """Whether a prompt's rows read the step's own tokens before quantisation."""
        self.window = _window_layer(shape.window) if shape.window else None

    def compile_ahead(self) -> None:
        """Have all kernels of the layer compiled in other threads, as vLLM's profiling run does."""
        shape, device = self.shape, self.codec.key.device
        query, key, value = (
            torch.zeros(BLOCK, heads, shape.head_dim, dtype=self.dtype, device=device)
            for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
        )
        self.attention.profile(query, key, value, BLOCK, self.window)

    def forward(
        self, batch: Batch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor,
        ring: torch.Tensor | None, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """Store a step's tokens and attend, with metadata made anew, as an engine's step does.

        Args:
            query, key, value: [rows, heads, head_dim].
            cache, ring: uint8 [blocks, KV heads, block_size, slot bytes].
            output: [rows, query heads, head_dim], filled.
        """
        device = cache.device
        starts = torch.tensor(batch.starts, dtype=torch.int32, device=device)
        lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=device)
        self.launch(batch, starts, lengths, query, key, value, cache, ring, output)

    def launch(
        self, batch: Batch, starts: torch.Tensor, lengths: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, cache: torch.Tensor, ring: torch.Tensor | None, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """The same with int32 `starts` and `lengths` on the device: decodes alone can be captured into a graph."""
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
        self.attention.forward(query, key, value, cache, metadata, output, window)


class LatentLayer:
    """Attention of one layer of latents; see `PairLayer`. `shape`: query heads in `group`, and `window`."""

    def __init__(
        self, fmt: Format, rank: int, rope_dim: int, shape: Shape, device: torch.device, dtype: torch.dtype,
        kernel: str, max_requests: int,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.scale = shape, dtype, shape.head_dim**-0.5
        self.codec = LatentCodec(fmt, rank, rope_dim, device)
        self.window = _window_layer(shape.window) if shape.window else None
        self.pages: Any = PlainLatents(self.codec, self.scale, None)
        self.kernel = PYTORCH
        if device.type == "cuda":
            self.pages, self.kernel = cuda_latents(self.codec, shape, dtype, kernel, max_requests)

    def compile_ahead(self) -> None:
        """Have all kernels of the layer compiled in other threads, and take the workspace."""
        if self.kernel == PYTORCH:
            return
        from ..attention.latent.compile_ahead import compile_ahead

        self.pages.reserve_any_batch()
        compile_ahead(self.pages, BLOCK, self.shape.head_dim, self.window)

    def store(
        self, batch: Batch, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, ring: torch.Tensor | None
    ) -> Ring | None:
        """Store a step's latents [rows, rank] and RoPE channels [rows, rope_dim], and return the requests' ring."""
        if self.window is None or ring is None:
            self.pages.store(cache, batch.slots, latent, rope)
            return None
        slots, first = _fill_slots(self.window, batch, *self._bounds(batch))
        self.pages.store(cache, batch.slots, latent, rope, ring, slots)
        return Ring(ring, batch.ring_table, first, self.shape.window)

    def gather(self, batch: Batch, cache: torch.Tensor, ring: Ring | None, rows: torch.Tensor) -> None:
        """Fill rows [tokens of all requests, rank + rope_dim], as behind these a chunk would read them."""
        lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=cache.device)
        ends = torch.tensor([0, *batch.lengths], device=cache.device).cumsum(0).to(torch.int32)
        chunk = Span(torch.zeros_like(lengths), ends, max(batch.lengths), lengths)
        recent = None if ring is None else RecentContext(ring, lengths)
        self.pages.gather(cache, batch.block_table, chunk, rows, recent)

    def decode(
        self, batch: Batch, q_latent: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor, ring: Ring | None
    ) -> torch.Tensor:
        """Attend: queries [rows, heads, rank] and [rows, heads, rope_dim] -> [rows, heads, rank], overwritten later."""
        starts, lengths = self._bounds(batch)
        metadata = LatentDecodeMetadata(
            block_table=batch.block_table, seq_lens=lengths, dcp_tot_seq_lens=None, query_start=starts,
            query_starts=starts.cpu(), max_query_len=batch.longest,
        )  # fmt: skip
        output, _ = self.pages.attend(cache, metadata, q_latent, q_rope, ring)
        return output

    def _bounds(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in (batch.starts, batch.lengths))
        return starts.to(self.codec.device), lengths.to(self.codec.device)


Routes = tuple[DecodeRoute | None, PrefillRoute | None, str]
"""Of decodes and of prefills, and the name of the decode kernel."""


def cuda_routes(
    layer: tuple[PagedCodec, int, int, AttentionOptions], kernel: str, dtype: torch.dtype, max_requests: int,
    max_tokens: int,
) -> Routes:  # fmt: skip
    """As `PackedAttentionImpl` makes them on a GPU."""
    from ..attention.decode import FusedDecode  # imports Triton, which the CPU platform may lack
    from ..attention.prefill import FlashPrefill, find_flash_attention

    head_dim = layer[0].key.head_dim
    decode = FusedDecode(*layer, LONGEST_DECODE, max_requests, kernel)
    flash = find_flash_attention(head_dim, head_dim, dtype, None)
    prefill = None if flash is None else FlashPrefill(*layer, max_tokens, max_requests, flash)
    return decode, prefill, "Triton" if decode.of_cuda is None else "CUDA"


def cpu_routes(
    fmt: Format, layer: tuple[PagedCodec, int, int, AttentionOptions], dtype: torch.dtype, max_requests: int,
    max_tokens: int,
) -> Routes:  # fmt: skip
    """As `PackedAttentionImpl` makes them on a CPU; none without a C++ compiler."""
    sizes = cpu.Sizes(max_tokens, dtype, engine=0)
    decode, prefill = cpu.find_routes(fmt, layer[0].key.head_dim, *layer, sizes)
    return decode, prefill, PYTORCH if decode is None else "C++"


def cuda_latents(
    codec: LatentCodec, shape: Shape, dtype: torch.dtype, kernel: str, max_requests: int
) -> tuple[Any, str]:
    """`FusedLatents` as an engine makes them, and the name of the decode kernel."""
    from ..attention.latent import decode
    from ..attention.latent.fused import FusedLatents, latent_decode
    from ..attention.latent.hopper import HopperLatentDecode

    sizes = (shape.group, shape.head_dim**-0.5, dtype, LONGEST_DECODE, max_requests)
    attends = latent_decode(kernel, decode.LatentLayer(codec, *sizes, None, shape.window))
    return FusedLatents(attends), "CUDA" if isinstance(attends, HopperLatentDecode) else "Triton"


def _window_layer(window: int) -> WindowLayer:
    """A window layer whose ring blocks are those of `Requests`."""
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    layer = WindowLayer(f"selftest{SUFFIX}", window, LONGEST_DECODE, config)
    ring_blocks = -(-(window + LONGEST_DECODE) // RING_BLOCK) + 1
    sizes = {"window": window, "slack": LONGEST_DECODE, "ring_block_size": RING_BLOCK}
    layer.spec = cast(Any, SimpleNamespace(**sizes, ring_blocks=ring_blocks))
    return layer


def _fill_slots(
    window: WindowLayer, batch: Batch, starts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row goes in its ring, and the first token that each ring has; int32 [rows] and [requests]."""
    slots = torch.zeros(batch.starts[-1], dtype=torch.int32, device=starts.device)
    first = torch.zeros(len(lengths), dtype=torch.int32, device=starts.device)
    fill, sizes = slot_filler(window.spec, starts.device)
    fill(starts, lengths, batch.ring_table, slots, first, **sizes)
    return slots, first
