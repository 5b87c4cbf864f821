"""Decode attention over pages and rings of latents by Triton's kernels: one launch attends to pages, one merges the
splits, and one adds the recent window."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...codecs.ring import Ring
from ...kernels import power_of_2
from ...kernels.triton.latent_decode import (
    LatentShape,
    bind_decode_latents,
    bind_merge_latents,
    decode_latents_arguments,
    latent_shape,
    merge_latents_arguments,
    merge_latents_grid,
    row_tiles,
    split_count,
)
from ...kernels.triton.latent_ring import (
    attend_latent_ring_arguments,
    attend_latent_ring_grid,
    bind_attend_latent_ring,
)
from ...kernels.triton.launch import Arguments
from .decode import LatentDecode, LatentLayer, LatentStep
from .metadata import LatentDecodeMetadata
from .recent import PageStep, RecentLatents


class TritonLaunches(NamedTuple):
    """Grid and arguments of the launches of a step; `splits`: a power of 2."""

    grid: tuple[int, int, int]
    decode: Arguments
    merge: Arguments
    splits: int


class TritonRecentLatents(RecentLatents):
    """See `RecentLatents`."""

    def prepare(self, ring: Ring, pages: PageStep, launches: TritonLaunches) -> tuple[tuple[int, int, int], Arguments]:
        """The grid, and a step's arguments."""
        assert pages.lse is not None
        starts, seq_lens = pages.metadata.query_start, pages.metadata.seq_lens
        grid = attend_latent_ring_grid(self.shape, self.codec.rank, pages.metadata.max_query_len, len(seq_lens))
        return grid, attend_latent_ring_arguments(ring, starts, seq_lens, pages.lens, pages.output, pages.lse)

    @property
    def shape(self) -> LatentShape:
        """Of all steps: the most query tokens of a decode decide."""
        return latent_shape(self.heads, self.longest_decode, self.scale)

    def add(
        self, step: tuple[tuple[int, int, int], Arguments], ring: torch.Tensor, q_latent: torch.Tensor,
        q_rope: torch.Tensor, output: torch.Tensor,
    ) -> None:  # fmt: skip
        strides = q_latent.stride(), q_rope.stride(), output.stride()
        launch = self.bound.get(
            "ring",
            (ring.data_ptr(), ring.stride(), strides, q_latent.dtype, q_rope.dtype, output.dtype),
            lambda: bind_attend_latent_ring(
                self.codec, self.shape, ring, q_latent, q_rope, output, self.inverse_gain, self.constant
            ),
        )
        grid, arguments = step
        launch(grid, (q_latent, q_rope, output), arguments)


class TritonLatentDecode(LatentDecode):
    """See `LatentDecode`."""

    recent_latents = TritonRecentLatents

    def __init__(self, layer: LatentLayer) -> None:
        super().__init__(layer)
        self.shape = latent_shape(layer.heads, layer.longest_decode, layer.scale)

    def batches_to_compile(self) -> list[tuple[int, int]]:
        batches = {}
        for length in range(self.layer.longest_decode, 0, -1):
            for requests in range(self.layer.max_requests, 0, -1):
                splits = split_count(requests, row_tiles(self.shape, length), self.sm_count)
                batches[power_of_2(splits)] = requests, length
        return list(batches.values())

    def partials(self, metadata: LatentDecodeMetadata, tokens: int) -> tuple[int, ...]:
        tiles = row_tiles(self.shape, metadata.max_query_len)
        return tokens, self.heads, split_count(len(metadata.seq_lens), tiles, self.sm_count)

    def most_partials(self) -> tuple[int, ...]:
        counts, lengths = range(1, self.layer.max_requests + 1), range(1, self.layer.longest_decode + 1)
        rows = max(
            n * length * split_count(n, row_tiles(self.shape, length), self.sm_count)
            for n in counts
            for length in lengths
        )
        return rows, self.heads

    def prepare(self, pages: PageStep) -> TritonLaunches:
        metadata, splits = pages.metadata, pages.partial.shape[2]
        grid = (splits, row_tiles(self.shape, metadata.max_query_len), len(metadata.seq_lens))
        tables = (metadata.block_table, metadata.query_start, pages.lens)
        return TritonLaunches(
            grid,
            decode_latents_arguments(*tables, pages.partial, pages.stats),
            merge_latents_arguments(pages.partial, pages.stats, pages.lse),
            power_of_2(splits),
        )

    def attend(self, step: LatentStep, cache: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor) -> None:
        launches, output = step.launches, step.pages.output
        strides = cache.stride(), q_latent.stride(), q_rope.stride()
        held_for = (cache.data_ptr(), strides, q_latent.dtype, q_rope.dtype)
        decode = self.bound.get(
            "decode",
            held_for,
            lambda: bind_decode_latents(self.codec.layout, self.shape, cache, q_latent, q_rope),
        )
        decode(launches.grid, (q_latent, q_rope), launches.decode)
        merge = self.bound.get(
            ("merge", launches.splits),
            (output.stride(), output.dtype),
            lambda: bind_merge_latents(output, self.constant, launches.splits, has_lse=self.is_part),
        )
        merge(merge_latents_grid(output), (output,), launches.merge)
