"""Decode attention over latents on CUDA: one launch attends, one merges the splits.

No host sync, and no allocation once vLLM's profiling run has sized the workspace. What a step decides is worked out for
its first layer; the others only launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ...codecs.latent import LatentCodec
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


@dataclass(frozen=True)
class LatentDecodeStep:
    """Grid and arguments of the launches of a step; `output` [tokens, heads, rank] is of all layers."""

    grid: tuple[int, int, int]
    arguments: Arguments
    merge: Arguments
    splits: int
    output: torch.Tensor


@dataclass(frozen=True)
class LatentLayer:
    """What decode attention of a layer has to know.

    `codec`: on a CUDA device. `heads`: query heads of this rank. `scale`: of scores. `dtype`: of queries and outputs,
    fp16 or bf16. `longest_decode`: query tokens of a request, drafts included. `max_requests`: of a step. `constant`:
    fp32 [rank], added to outputs, or None.
    """

    codec: LatentCodec
    heads: int
    scale: float
    dtype: torch.dtype
    longest_decode: int
    max_requests: int
    constant: torch.Tensor | None


class LatentDecode:
    """Decode attention of one layer."""

    def __init__(self, layer: LatentLayer) -> None:
        self.layer, self.codec, self.heads, self.constant = layer, layer.codec, layer.heads, layer.constant
        self.shape = latent_shape(layer.heads, layer.longest_decode, layer.scale)
        self.sm_count = torch.cuda.get_device_properties(layer.codec.device).multi_processor_count
        self.bound = Launches()

    def step(self, metadata: LatentDecodeMetadata, tokens: int) -> LatentDecodeStep:
        """That of a batch's decodes, which have `tokens` query tokens; made for the first layer of such heads."""
        found = metadata.made.get(self.shape)
        if found is None:
            found = metadata.made[self.shape] = self._make_step(metadata, tokens)
        return found

    def _make_step(self, metadata: LatentDecodeMetadata, tokens: int) -> LatentDecodeStep:
        requests, tiles = len(metadata.seq_lens), row_tiles(self.shape, metadata.max_query_len)
        splits = split_count(requests, tiles, self.sm_count)
        partial, stats, output = self._reserve(tokens, splits)
        table, lens = metadata.block_table, metadata.seq_lens
        arguments = decode_latents_arguments(table, metadata.query_start, lens, partial, stats)
        merge = merge_latents_arguments(partial, stats)
        return LatentDecodeStep((splits, tiles, requests), arguments, merge, power_of_2(splits), output)

    def __call__(
        self, cache: torch.Tensor, metadata: LatentDecodeMetadata, q_latent: torch.Tensor, q_rope: torch.Tensor
    ) -> torch.Tensor:
        """Attend over all of the requests' tokens, the new ones included.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes].
            metadata: of the batch's decodes.
            q_latent, q_rope: [tokens, heads, rank], which meets stored latents, and [tokens, heads, rope_dim].

        Returns:
            [tokens, heads, rank], in memory that the next layer overwrites.
        """
        step = self.step(metadata, len(q_latent))
        held_for = (cache.data_ptr(), q_latent.stride(), q_rope.stride(), q_latent.dtype, q_rope.dtype)
        decode = self.bound.get(
            "decode",
            held_for,
            lambda: bind_decode_latents(self.codec.layout, self.shape, cache, q_latent, q_rope),
        )
        decode(step.grid, (q_latent, q_rope), step.arguments)
        merge = self.bound.get(
            ("merge", step.splits), None, lambda: bind_merge_latents(step.output, self.constant, step.splits)
        )
        merge(merge_latents_grid(step.output), (step.output,), step.merge)
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
        """Workspace for partial outputs, their softmax state, and outputs."""
        shape = tokens, self.heads, splits
        return current_workspace_manager().get_simultaneous(
            ((*shape, self.codec.rank), torch.float32),
            ((*shape, 2), torch.float32),
            ((tokens, self.heads, self.codec.rank), self.layer.dtype),
        )
