"""Decode attention over latents on CUDA: one launch attends, one merges the splits, and one adds the recent window.

No host sync, and no allocation once vLLM's profiling run has sized the workspace. What a step decides is worked out for
its first layer; the others only launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...kernels import power_of_2
from ...kernels.triton.latent_decode import (
    bind_decode_latents,
    bind_merge_latents,
    decode_latents_arguments,
    latent_shape,
    merge_latents_arguments,
    merge_latents_grid,
    row_tiles,
    split_count,
)
from ...kernels.triton.launch import Arguments, Launches
from .metadata import LatentDecodeMetadata
from .recent import RecentLatents, RecentStep


@dataclass(frozen=True)
class LatentDecodeStep:
    """Grid and arguments of the launches of a step; `output` [tokens, heads, rank] is of all layers, and so is `part`,
    which the merge fills: that of `recent`, or `output` where there are no rings."""

    grid: tuple[int, int, int]
    arguments: Arguments
    merge: Arguments
    splits: int
    part: torch.Tensor
    output: torch.Tensor
    recent: RecentStep | None


@dataclass(frozen=True)
class LatentLayer:
    """What decode attention of a layer has to know.

    `codec`: on a CUDA device. `heads`: query heads of this rank. `scale`: of scores. `dtype`: of queries and outputs,
    fp16 or bf16. `longest_decode`: query tokens of a request, drafts included. `max_requests`: of a step. `constant`:
    fp32 [rank], added to outputs, or None. `window`: tokens that a query reads in its request's ring, 0: there is none.
    """

    codec: LatentCodec
    heads: int
    scale: float
    dtype: torch.dtype
    longest_decode: int
    max_requests: int
    constant: torch.Tensor | None
    window: int = 0


class LatentDecode:
    """Decode attention of one layer."""

    def __init__(self, layer: LatentLayer) -> None:
        self.layer, self.codec, self.heads = layer, layer.codec, layer.heads
        self.recent = recent_latents(layer)
        self.constant = None if layer.window else layer.constant
        """Added by the merge."""
        self.shape = latent_shape(layer.heads, layer.longest_decode, layer.scale)
        self.sm_count = torch.cuda.get_device_properties(layer.codec.device).multi_processor_count
        self.bound = Launches()

    def step(self, metadata: LatentDecodeMetadata, tokens: int, ring: Ring | None) -> LatentDecodeStep:
        """That of a batch's decodes, which have `tokens` query tokens; made for the first layer of such heads."""
        kind = self.shape, ring and ring.block_table.data_ptr()
        found = metadata.made.get(kind)
        if found is None:
            found = metadata.made[kind] = self._make_step(metadata, tokens, ring)
        return found

    def _make_step(self, metadata: LatentDecodeMetadata, tokens: int, ring: Ring | None) -> LatentDecodeStep:
        requests, tiles = len(metadata.seq_lens), row_tiles(self.shape, metadata.max_query_len)
        splits = split_count(requests, tiles, self.sm_count)
        partial, stats, output, *of_pages = self._reserve(tokens, splits)
        recent = self.recent.step(metadata, ring, *of_pages) if self.recent and ring else None
        lens, part, lse = (recent.page_lens, recent.part, recent.lse) if recent else (metadata.seq_lens, output, None)
        arguments = decode_latents_arguments(metadata.block_table, metadata.query_start, lens, partial, stats)
        merge = merge_latents_arguments(partial, stats, lse)
        return LatentDecodeStep((splits, tiles, requests), arguments, merge, power_of_2(splits), part, output, recent)

    def __call__(
        self,
        cache: torch.Tensor,
        metadata: LatentDecodeMetadata,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        ring: Ring | None = None,
    ) -> torch.Tensor:
        """Attend over all of the requests' tokens, the new ones included.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes].
            metadata: of the batch's decodes.
            q_latent, q_rope: [tokens, heads, rank], which meets stored latents, and [tokens, heads, rope_dim].
            ring: of the decodes' recent tokens, the new ones included, where the layer has a window.

        Returns:
            [tokens, heads, rank], in memory that the next layer overwrites.
        """
        assert (ring is None) == (self.recent is None)
        step = self.step(metadata, len(q_latent), ring)
        held_for = (cache.data_ptr(), q_latent.stride(), q_rope.stride(), q_latent.dtype, q_rope.dtype)
        decode = self.bound.get(
            "decode",
            held_for,
            lambda: bind_decode_latents(self.codec.layout, self.shape, cache, q_latent, q_rope),
        )
        decode(step.grid, (q_latent, q_rope), step.arguments)
        merge = self.bound.get(
            ("merge", step.splits),
            None,
            lambda: bind_merge_latents(step.part, self.constant, step.splits, has_lse=ring is not None),
        )
        merge(merge_latents_grid(step.part), (step.part,), step.merge)
        if self.recent and step.recent and ring:
            self.recent.add(step.recent, ring.cache, q_latent, q_rope, step.output)
        return step.output

    def reserve_any_batch(self) -> None:
        """Size the workspace for any batch."""
        counts, lengths = range(1, self.layer.max_requests + 1), range(1, self.layer.longest_decode + 1)
        rows = max(
            n * length * split_count(n, row_tiles(self.shape, length), self.sm_count)
            for n in counts
            for length in lengths
        )
        self._reserve(rows, 1)

    def _reserve(self, tokens: int, splits: int) -> list[torch.Tensor]:
        """Workspace for partial outputs, their softmax state, and `outputs_of`."""
        shape = tokens, self.heads, splits
        return current_workspace_manager().get_simultaneous(
            ((*shape, self.codec.rank), torch.float32),
            ((*shape, 2), torch.float32),
            *outputs_of(self.layer, tokens),
        )


def recent_latents(layer: LatentLayer) -> RecentLatents | None:
    """What adds a layer's rings; None: it has none."""
    if not layer.window:
        return None
    requests = layer.longest_decode, layer.max_requests
    return RecentLatents(layer.codec, layer.heads, layer.scale, *requests, layer.constant)


def outputs_of(layer: LatentLayer, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the outputs of `tokens` query tokens and, with a window, of the outputs and lse of pages."""
    shape = tokens, layer.heads, layer.codec.rank
    of_pages = [(shape, torch.float32), (shape[:2], torch.float32)] if layer.window else []
    return [(shape, layer.dtype), *of_pages]
