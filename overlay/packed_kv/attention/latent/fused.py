"""Pages of one layer's latents on CUDA: Triton stores and gathers; it or the CUDA kernel attends."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger

from ...kernels.cuda import latent_refusal
from ...kernels.triton.latent_gather import bind_gather_latents, gather_latents
from ...kernels.triton.latent_store import bind_store_latents, store_latents_arguments, store_latents_grid
from ...kernels.triton.launch import Launches
from .decode import LatentDecode, LatentLayer
from .hopper import HopperLatentDecode
from .metadata import LatentDecodeMetadata

logger = init_logger("vllm.packed_kv")


def latent_decode(kernel: str, layer: LatentLayer) -> LatentDecode | HopperLatentDecode:
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
    return LatentDecode(layer) if reason else HopperLatentDecode(layer)


class FusedLatents:
    """See `PlainLatents`; without host syncs."""

    def __init__(self, decode: LatentDecode | HopperLatentDecode) -> None:
        self.codec, self.decode = decode.codec, decode
        self.bound = Launches()

    def store(self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        if not len(slots):
            return
        launch = self.bound.get(
            "store",
            (cache.data_ptr(), latent.stride(), rope.stride(), latent.dtype, rope.dtype),
            lambda: bind_store_latents(self.codec, cache, latent, rope),
        )
        launch(store_latents_grid(self.codec, len(slots)), (latent, rope), store_latents_arguments(slots))

    def gather(self, cache: torch.Tensor, block_table: torch.Tensor, chunk: Any, rows: torch.Tensor) -> None:
        launch = self.bound.get("gather", cache.data_ptr(), lambda: bind_gather_latents(self.codec.layout, cache))
        layout, spans = self.codec.layout, (chunk.starts, chunk.cu_seq_lens, chunk.max_seq_len)
        gather_latents(layout, cache, block_table, *spans, rows, launch)

    def attend(
        self, cache: torch.Tensor, metadata: LatentDecodeMetadata, q_latent: torch.Tensor, q_rope: torch.Tensor
    ) -> torch.Tensor:
        return self.decode(cache, metadata, q_latent, q_rope)

    def reserve_any_batch(self) -> None:
        self.decode.reserve_any_batch()
