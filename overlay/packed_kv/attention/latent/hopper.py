"""Decode attention over pages and rings of latents by the CUDA kernels for Hopper, where they serve a layer: see
`portable.py`, its twin."""

from __future__ import annotations

from functools import cached_property

import torch

from ...codecs.ring import Ring
from ...kernels.cuda import latent_launch as cuda
from ...kernels.cuda import latent_ring_launch as cuda_ring
from ...kernels.cuda.latent_schedule import LatentScheduler
from .decode import LatentDecode, LatentLayer, LatentStep
from .metadata import LatentDecodeMetadata
from .recent import PageStep, RecentLatents


class HopperRecentLatents(RecentLatents):
    """See `RecentLatents`."""

    merges_pages = True

    @cached_property
    def sm_count(self) -> int:
        return torch.cuda.get_device_properties(self.codec.device).multi_processor_count

    def prepare(self, ring: Ring, pages: PageStep, launches: tuple[cuda.Step, cuda.Parts]) -> cuda_ring.Step:
        metadata = pages.metadata
        of_step = metadata.query_start, metadata.seq_lens, pages.lens, launches[1]
        return cuda_ring.make_step(self.heads, metadata.max_query_len, self.scale, self.sm_count, ring, *of_step)

    def add(
        self, step: cuda_ring.Step, ring: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor,
        output: torch.Tensor,
    ) -> None:  # fmt: skip
        held_for = (ring.data_ptr(), ring.stride(), q_latent.dtype, output.dtype)
        attend = self.bound.get("ring", held_for, lambda: self._bind(ring, q_latent.dtype, output.dtype))
        attend(step, q_latent, q_rope, output)

    def _bind(self, ring: torch.Tensor, query: torch.dtype, output: torch.dtype) -> cuda_ring.CudaLatentRing:
        attend = cuda_ring.CudaLatentRing(ring, self.heads, query, output, self.inverse_gain, self.constant)
        attend.compile_variants()
        return attend


class HopperLatentDecode(LatentDecode):
    """See `LatentDecode`."""

    recent_latents = HopperRecentLatents

    def __init__(self, layer: LatentLayer) -> None:
        super().__init__(layer)
        self.scheduler = LatentScheduler(layer.max_requests, self.sm_count, layer.codec.device)

    def _shape(self, query_len: int) -> cuda.Shape:
        return cuda.shape_of(self.heads * query_len, self.sm_count)

    def batches_to_compile(self) -> list[tuple[int, int]]:
        return [(1, 1)]  # what is bound for one has all variants

    def partials(self, metadata: LatentDecodeMetadata, tokens: int) -> tuple[int, ...]:
        return (self._shape(metadata.max_query_len).partial_rows(self._whole(len(metadata.seq_lens))),)

    def most_partials(self) -> tuple[int, ...]:
        shapes = (self._shape(length + 1) for length in range(self.layer.longest_decode))
        return (max(shape.partial_rows(self._whole(self.layer.max_requests)) for shape in shapes),)

    def _whole(self, requests: int) -> int:
        """Of a step's requests, those whose results stay partial even in one part."""
        return requests if self.recent else 0

    def prepare(self, pages: PageStep) -> tuple[cuda.Step, cuda.Parts]:
        """The step, and where its parts lie."""
        metadata = pages.metadata
        shape = self._shape(metadata.max_query_len)
        parts = cuda.Parts(shape, self.scheduler(pages.lens, shape.partitions), pages.partial, pages.stats)
        step = cuda.make_step(
            self.heads, metadata.max_query_len, self.layer.scale, metadata.block_table, metadata.query_start,
            pages.lens, parts, pages.lse,
        )  # fmt: skip
        return step, parts

    def attend(self, step: LatentStep, cache: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor) -> None:
        held_for = (cache.data_ptr(), cache.stride(), q_latent.dtype)
        decode = self.bound.get("decode", held_for, lambda: self._bind(cache, q_latent.dtype))
        decode(step.launches[0], q_latent, q_rope, None if self.recent else step.pages.output)

    def _bind(self, cache: torch.Tensor, dtype: torch.dtype) -> cuda.CudaLatentDecode:
        output = torch.float32 if self.is_part else None if self.recent else self.layer.dtype
        decode = cuda.CudaLatentDecode(
            self.codec.layout, cache, self.heads, dtype, output, self.constant, has_lse=self.is_part
        )  # fmt: skip
        decode.compile_variants(self.layer.longest_decode)
        return decode
