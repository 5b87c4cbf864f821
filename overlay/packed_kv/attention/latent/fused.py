"""Pages of one layer's latents on CUDA: Triton stores and gathers; it or the CUDA kernel attends."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger

from ...codecs.ring import Ring
from ...kernels.cuda import latent_refusal
from ...kernels.triton.latent_gather import bind_gather_latents, gather_latents
from ...kernels.triton.latent_ring import bind_gather_latent_ring, gather_latent_ring
from ...kernels.triton.latent_store import bind_store_latents, store_latents_arguments, store_latents_grid
from ...kernels.triton.launch import Launches
from .decode import LatentDecode, LatentLayer
from .hopper import HopperLatentDecode
from .metadata import LatentDecodeMetadata
from .plain import RecentContext
from .portable import TritonLatentDecode

logger = init_logger("vllm.packed_kv")


def latent_decode(kernel: str, layer: LatentLayer) -> LatentDecode:
    """Decode attention by the kernel that serves the layer.

    Args:
        kernel: "triton", or "auto": the CUDA kernel where it serves.
        layer: of a CUDA device.
    """
    codec = layer.codec
    capability, widths = torch.cuda.get_device_capability(codec.device), codec.layout.vector.group_bits
    refused = latent_refusal(capability, codec.rank, codec.rope_dim, layer.heads, layer.longest_decode, widths)
    reason = f"does not serve {refused}" if refused else None
    if kernel == "triton":
        reason = "is disabled by decode_kernel=triton"
    logger.info_once(
        "KV cache: decodes of latents are served by the %s",
        "CUDA kernel" if reason is None else f"Triton kernel (the CUDA kernel {reason})",
        scope="local",
    )
    return TritonLatentDecode(layer) if reason else HopperLatentDecode(layer)


class FusedLatents:
    """See `PlainLatents`; without host syncs."""

    def __init__(self, decode: LatentDecode) -> None:
        self.codec, self.decode = decode.codec, decode
        self.inverse_gain = 1 / decode.codec.value_gain()
        self.bound = Launches()

    def store(
        self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor,
        ring: torch.Tensor | None = None, ring_slots: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._store(cache, slots, latent, rope, ring, ring_slots, only_ring=False)

    def store_in_ring(
        self, cache: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, ring: torch.Tensor,
        ring_slots: torch.Tensor,
    ) -> None:  # fmt: skip
        self._store(cache, ring_slots, latent, rope, ring, ring_slots, only_ring=True)

    def _store(
        self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor,
        ring: torch.Tensor | None, ring_slots: torch.Tensor | None, *, only_ring: bool,
    ) -> None:  # fmt: skip
        if not len(slots):
            return
        of_ring = None if ring is None else (ring.data_ptr(), ring.stride())
        launch = self.bound.get(
            ("store", ring is None, only_ring),
            (cache.data_ptr(), cache.stride(), of_ring, latent.stride(), rope.stride(), latent.dtype, rope.dtype),
            lambda: bind_store_latents(self.codec, cache, latent, rope, ring, only_ring=only_ring),
        )
        step = store_latents_arguments(self.codec, slots, ring_slots)
        launch(store_latents_grid(self.codec, len(slots)), (latent, rope), step)

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, chunk: Any, rows: torch.Tensor,
        recent: RecentContext | None = None,
    ) -> None:  # fmt: skip
        held_for = (cache.data_ptr(), cache.stride(), rows.dtype)
        launch = self.bound.get("gather", held_for, lambda: bind_gather_latents(self.codec.layout, cache))
        layout, spans = self.codec.layout, (chunk.starts, chunk.cu_seq_lens, chunk.max_seq_len)
        gather_latents(layout, cache, block_table, *spans, rows, launch)
        if recent is not None:
            self._gather_ring(chunk, rows, recent, as_values=False)

    def gather_values(self, chunk: Any, rows: torch.Tensor, recent: RecentContext) -> None:
        self._gather_ring(chunk, rows, recent, as_values=True)

    def _gather_ring(self, chunk: Any, rows: torch.Tensor, recent: RecentContext, *, as_values: bool) -> None:
        codec, ring = self.codec, recent.ring
        launch = self.bound.get(
            ("ring", as_values),
            (ring.cache.data_ptr(), ring.cache.stride(), ring.window, rows.dtype),
            lambda: bind_gather_latent_ring(codec, ring, self.inverse_gain, as_values=as_values),
        )
        spans = (chunk.starts, chunk.cu_seq_lens, recent.context_lens)
        gather_latent_ring(codec, ring, *spans, rows, launch, as_values=as_values)

    def attend(
        self,
        cache: torch.Tensor,
        metadata: LatentDecodeMetadata,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        ring: Ring | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.decode(cache, metadata, q_latent, q_rope, ring)

    def reserve_any_batch(self) -> None:
        self.decode.reserve_any_batch()

    def forget_launches(self) -> None:
        """Forget what is bound to pages and rings that go, before others may come to lie at the same addresses."""
        self.bound.clear()
        self.decode.bound.clear()
        if self.decode.recent is not None:
            self.decode.recent.bound.clear()
