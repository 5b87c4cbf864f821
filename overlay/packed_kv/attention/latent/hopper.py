"""Decode attention over latents by the CUDA kernel for Hopper, where it serves a layer: see `decode.py`, its portable
twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ...codecs.ring import Ring
from ...kernels.cuda import latent_launch as cuda
from ...kernels.cuda.latent_schedule import LatentScheduler
from ...kernels.triton.launch import Launches
from .decode import LatentLayer, outputs_of, recent_latents
from .metadata import LatentDecodeMetadata
from .recent import RecentStep


@dataclass(frozen=True)
class HopperStep:
    """Grids and arguments of the launches of a step, and the tensors whose addresses these have; `output` [tokens,
    heads, rank] is of all layers, and so is `part`; see `LatentDecodeStep`."""

    launch: cuda.Step
    kept: tuple[torch.Tensor | None, ...]
    part: torch.Tensor
    output: torch.Tensor
    recent: RecentStep | None


class HopperLatentDecode:
    """Decode attention of one layer."""

    def __init__(self, layer: LatentLayer) -> None:
        self.layer, self.codec, self.heads = layer, layer.codec, layer.heads
        self.recent = recent_latents(layer)
        device = layer.codec.device
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self.scheduler = LatentScheduler(layer.max_requests, self.sm_count, device)
        self.bound = Launches()

    def step(self, metadata: LatentDecodeMetadata, tokens: int, ring: Ring | None) -> HopperStep:
        """That of a batch's decodes, which have `tokens` query tokens; made for the first layer of such heads."""
        kind = (self.heads, self.layer.scale, ring and ring.block_table.data_ptr())
        found = metadata.made.get(kind)
        if found is None:
            found = metadata.made[kind] = self._make_step(metadata, tokens, ring)
        return found

    def _make_step(self, metadata: LatentDecodeMetadata, tokens: int, ring: Ring | None) -> HopperStep:
        table, starts = metadata.block_table, metadata.query_start
        shape = cuda.shape_of(self.heads * metadata.max_query_len, self.sm_count)
        partial, stats, output, *of_pages = self._reserve(tokens, shape.partial_rows)
        recent = self.recent.step(metadata, ring, *of_pages) if self.recent and ring else None
        lens, part, lse = (recent.page_lens, recent.part, recent.lse) if recent else (metadata.seq_lens, output, None)
        schedule = self.scheduler(lens, shape.partitions)
        launch = cuda.make_step(
            self.heads, metadata.max_query_len, self.layer.scale, shape, table, starts, lens, schedule, partial, stats,
            lse,
        )  # fmt: skip
        kept = (table, starts, lens, *schedule, partial, stats, lse)
        return HopperStep(launch, kept, part, output, recent)

    def __call__(
        self,
        cache: torch.Tensor,
        metadata: LatentDecodeMetadata,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        ring: Ring | None = None,
    ) -> torch.Tensor:
        """See `LatentDecode`."""
        assert (ring is None) == (self.recent is None)
        step = self.step(metadata, len(q_latent), ring)
        decode = self.bound.get("decode", (cache.data_ptr(), q_latent.dtype), lambda: self._bind(cache, q_latent.dtype))
        decode(step.launch, q_latent, q_rope, step.part)
        if self.recent and step.recent and ring:
            self.recent.add(step.recent, ring.cache, q_latent, q_rope, step.output)
        return step.output

    def _bind(self, cache: torch.Tensor, dtype: torch.dtype) -> cuda.CudaLatentDecode:
        layer, has_ring = self.layer, self.recent is not None
        output, constant = (torch.float32, None) if has_ring else (layer.dtype, layer.constant)
        decode = cuda.CudaLatentDecode(
            self.codec.layout, cache, self.heads, dtype, output, constant, has_lse=has_ring
        )  # fmt: skip
        decode.compile_variants(self.layer.longest_decode)
        return decode

    def reserve_any_batch(self) -> None:
        """Size the workspace for any batch."""
        lengths = range(1, self.layer.longest_decode + 1)
        rows = max(cuda.shape_of(self.heads * length, self.sm_count).partial_rows for length in lengths)
        self._reserve(self.layer.max_requests * self.layer.longest_decode, rows)

    def _reserve(self, tokens: int, partial_rows: int) -> list[torch.Tensor]:
        """See `LatentDecode`."""
        return current_workspace_manager().get_simultaneous(
            ((partial_rows, self.codec.rank), torch.float32),
            ((partial_rows, 2), torch.float32),
            *outputs_of(self.layer, tokens),
        )
