"""Prefixes of prompts: latents gathered from pages, and from the rings of the recent window."""

from __future__ import annotations

from typing import Any

import torch

from ...codecs.latent import LatentCodec
from ...kernels.triton.latent_gather import GatherLatentsLaunch
from ...kernels.triton.latent_ring import GatherLatentRingLaunch
from ...kernels.triton.launch import Launches
from .in_pytorch import RecentContext


class TritonLatentPrefix:
    """See `ReferenceLatentPrefix`; without host syncs."""

    def __init__(self, codec: LatentCodec) -> None:
        self.codec, self.inverse_gain = codec, 1 / codec.value_gain()
        self.bound = Launches()

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, chunk: Any, rows: torch.Tensor,
        recent: RecentContext | None = None,
    ) -> None:  # fmt: skip
        """See `ReferenceLatentPrefix`."""
        binding_key = (cache.data_ptr(), cache.stride(), rows.dtype)
        launch = self.bound.get("gather", binding_key, lambda: GatherLatentsLaunch(self.codec.layout, cache))
        spans = chunk.starts, chunk.cu_seq_lens, chunk.max_seq_len
        grid, arguments = GatherLatentsLaunch.step(rows, block_table, *spans)
        launch(grid, (rows,), arguments)
        if recent is not None:
            self._gather_ring(chunk, rows, recent, as_values=False)

    def gather_values(self, chunk: Any, rows: torch.Tensor, recent: RecentContext) -> None:
        """See `ReferenceLatentPrefix`."""
        self._gather_ring(chunk, rows, recent, as_values=True)

    def _gather_ring(self, chunk: Any, rows: torch.Tensor, recent: RecentContext, *, as_values: bool) -> None:
        codec, ring = self.codec, recent.ring
        launch = self.bound.get(
            ("ring", as_values),
            (ring.cache.data_ptr(), ring.cache.stride(), ring.window, rows.dtype),
            lambda: GatherLatentRingLaunch(codec, ring, self.inverse_gain, as_values=as_values),
        )
        spans = (chunk.starts, chunk.cu_seq_lens, recent.context_lens)
        grid, arguments = GatherLatentRingLaunch.step(codec, rows, ring, *spans, as_values=as_values)
        launch(grid, (rows,), arguments)
