"""Decode attention over latents on CUDA: a kernel attends over pages, and a launch adds the recent window.

No host sync, and no allocation once vLLM's profiling run has sized the workspace. What a step decides is worked out for
its first layer; the others only launch. Where ranks split the tokens of a request, a layer attends over its rank's, for
the heads of all ranks, and returns its lse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...kernels.triton.launch import Launches
from .metadata import LatentDecodeMetadata
from .recent import PageStep, RecentLatents


@dataclass(frozen=True)
class LatentLayer:
    """What decode attention of a layer has to know.

    `codec`: on a CUDA device. `heads`: query heads of this rank, or of all that split its tokens. `scale`: of scores.
    `dtype`: of queries and outputs, fp16 or bf16. `longest_decode`: query tokens of a request, drafts included.
    `max_requests`: of a step. `constant`: fp32 [rank], added to outputs, or None. `window`: tokens that a query reads
    in its request's ring, 0: there is none. `is_shard`: whether the pages hold a rank's part of the tokens.
    """

    codec: LatentCodec
    heads: int
    scale: float
    dtype: torch.dtype
    longest_decode: int
    max_requests: int
    constant: torch.Tensor | None
    window: int = 0
    is_shard: bool = False


@dataclass(frozen=True)
class LatentStep:
    """What the layers of a step share: attention over pages, what the kernel made for it and for the recent window,
    what layers return, which the next one overwrites, and the block table of the rings, or None."""

    pages: PageStep
    launches: Any
    recent: Any
    output: torch.Tensor
    ring_table: torch.Tensor | None


class LatentDecode(ABC):
    """Decode attention of one layer."""

    recent_latents: type[RecentLatents]
    """What adds the recent window."""

    def __init__(self, layer: LatentLayer) -> None:
        assert not (layer.window and layer.is_shard), "ranks that split tokens have no recent window"
        self.layer, self.codec, self.heads = layer, layer.codec, layer.heads
        self.recent: RecentLatents | None = None
        if layer.window:
            requests = layer.longest_decode, layer.max_requests
            self.recent = self.recent_latents(layer.codec, layer.heads, layer.scale, *requests, layer.constant)
        self.is_part = layer.is_shard or (self.recent is not None and not self.recent.merges_pages)
        """Whether attention over pages is a part, in fp32 and with its lse."""
        self.constant = None if layer.is_shard or self.recent else layer.constant
        """Added by attention over pages."""
        self.sm_count = torch.cuda.get_device_properties(layer.codec.device).multi_processor_count
        self.bound = Launches()

    def step(self, metadata: LatentDecodeMetadata, tokens: int, ring: Ring | None) -> LatentStep:
        """That of a batch's decodes, which have `tokens` query tokens; made for the first layer of such heads."""
        # The step keeps the table, so its address names no other one as long as the step is found by it.
        kind = (self.heads, self.layer.scale, ring and ring.block_table.data_ptr())
        found = metadata.made.get(kind)
        if found is None:
            found = metadata.made[kind] = self._make_step(metadata, tokens, ring)
        return found

    def _make_step(self, metadata: LatentDecodeMetadata, tokens: int, ring: Ring | None) -> LatentStep:
        partial, stats, *outputs = self._reserve(self.partials(metadata, tokens), tokens)
        lens, recent = metadata.seq_lens, None
        if self.recent and ring:
            lens = self.recent.page_lens_of(metadata, ring)
        pages = PageStep(metadata, lens, partial, stats, outputs[0], outputs[1] if self.is_part else None)
        launches = self.prepare(pages)
        if self.recent and ring:
            recent = self.recent.prepare(ring, pages, launches)
        ring_table = None if ring is None else ring.block_table
        return LatentStep(pages, launches, recent, outputs[0] if self.layer.is_shard else outputs[-1], ring_table)

    def __call__(
        self,
        cache: torch.Tensor,
        metadata: LatentDecodeMetadata,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        ring: Ring | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over all of the requests' tokens, the new ones included; see `PlainLatents.attend`. The results are in
        memory that the next layer overwrites. `ring` is there where the layer has a window."""
        assert (ring is None) == (self.recent is None)
        step = self.step(metadata, len(q_latent), ring)
        self.attend(step, cache, q_latent, q_rope)
        if self.recent and ring:
            self.recent.add(step.recent, ring.cache, q_latent, q_rope, step.output)
            return step.output, None
        return step.output, step.pages.lse

    def reserve_any_batch(self) -> None:
        """Size the workspace for any batch."""
        self._reserve(self.most_partials(), self.layer.max_requests * self.layer.longest_decode)

    def _reserve(self, partials: tuple[int, ...], tokens: int) -> list[torch.Tensor]:
        """Workspace for parts of results of this shape, their softmax state, and outputs of `tokens` query tokens: that
        of pages and its lse, if it is a part; and that of the layer, unless it is this part."""
        shape, layer = (tokens, self.heads, self.codec.rank), self.layer
        outputs: list[tuple[tuple[int, ...], torch.dtype]] = []
        if self.is_part:
            outputs += [(shape, torch.float32), (shape[:2], torch.float32)]
        if not layer.is_shard:
            outputs.append((shape, layer.dtype))
        return current_workspace_manager().get_simultaneous(
            ((*partials, self.codec.rank), torch.float32), ((*partials, 2), torch.float32), *outputs
        )

    @abstractmethod
    def batches_to_compile(self) -> list[tuple[int, int]]:
        """Requests and their query tokens, of steps that launch all variants of the kernels between them."""

    @abstractmethod
    def partials(self, metadata: LatentDecodeMetadata, tokens: int) -> tuple[int, ...]:
        """Parts of results in a step, without their channels."""

    @abstractmethod
    def most_partials(self) -> tuple[int, ...]:
        """The same for the step that has most."""

    @abstractmethod
    def prepare(self, pages: PageStep) -> Any:
        """What `attend` of the step's layers needs: grids and arguments of launches."""

    @abstractmethod
    def attend(self, step: LatentStep, cache: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor) -> None:
        """Attention over pages: fill `step.pages.output` and `step.pages.lse`, or leave parts."""
