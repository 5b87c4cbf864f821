"""Pages of one layer's latents on CUDA: Triton stores and gathers, `decode.py` attends."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.triton.latent_gather import bind_gather_latents, gather_latents
from ...kernels.triton.latent_store import bind_store_latents, store_latents_arguments, store_latents_grid
from ...kernels.triton.launch import Launches
from .decode import LatentDecode
from .metadata import LatentDecodeMetadata


class FusedLatents:
    """See `PlainLatents`; without host syncs."""

    def __init__(self, decode: LatentDecode) -> None:
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
        return self.decode(cache, self.decode.step(metadata, len(q_latent)), q_latent, q_rope)

    def reserve_any_batch(self) -> None:
        self.decode.reserve_any_batch()
