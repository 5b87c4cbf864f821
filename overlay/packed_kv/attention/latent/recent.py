"""Attention of decodes over their requests' rings of latents, added to that over their pages, on CUDA.

Pages come first, by either kernel: it gets the number of tokens that are read there for that of the request, and leaves
its output in fp32 with its lse. One launch then adds the ring's tokens, and what V lacks of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...kernels.triton.latent_decode import latent_shape
from ...kernels.triton.latent_ring import (
    attend_latent_ring_arguments,
    attend_latent_ring_grid,
    bind_attend_latent_ring,
    split_lens,
)
from ...kernels.triton.launch import Arguments, Launches
from .metadata import LatentDecodeMetadata


@dataclass(frozen=True)
class RecentStep:
    """Of a step: tokens that its decodes read in pages, int32 [requests]; what attention over these fills, `part` fp32
    [tokens, heads, rank] and `lse` fp32 [tokens, heads]; grid and arguments of the launch that follows."""

    page_lens: torch.Tensor
    part: torch.Tensor
    lse: torch.Tensor
    grid: tuple[int, int, int]
    arguments: Arguments


class RecentLatents:
    """The rings of one layer's decodes.

    Args:
        codec: of the layer, on a CUDA device.
        heads: query heads of this rank.
        scale: of scores.
        longest_decode: query tokens of a request, drafts included.
        max_requests: of a step.
        constant: fp32 [rank], added to outputs, or None.
    """

    def __init__(
        self, codec: LatentCodec, heads: int, scale: float, longest_decode: int, max_requests: int,
        constant: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.codec, self.constant = codec, constant
        self.shape = latent_shape(heads, longest_decode, scale)
        self.inverse_gain = 1 / codec.value_gain()
        self.page_lens = torch.zeros(max_requests, dtype=torch.int32, device=codec.device)
        self.bound = Launches()

    def step(self, metadata: LatentDecodeMetadata, ring: Ring, part: torch.Tensor, lse: torch.Tensor) -> RecentStep:
        """For layers of these heads, in memory that outlives the step."""
        starts, seq_lens = metadata.query_start, metadata.seq_lens
        requests, page_lens = len(seq_lens), self.page_lens[: len(seq_lens)]
        split_lens(starts, seq_lens, ring.first, ring.window, page_lens)
        grid = attend_latent_ring_grid(self.shape, self.codec.rank, metadata.max_query_len, requests)
        arguments = attend_latent_ring_arguments(ring, starts, seq_lens, page_lens, part, lse)
        return RecentStep(page_lens, part, lse, grid, arguments)

    def add(
        self, step: RecentStep, ring: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Fill `output` [tokens, heads, rank]. `ring`: uint8 [blocks, 1, block_size, ring_slot_bytes] of the layer."""
        strides = q_latent.stride(), q_rope.stride(), output.stride()
        launch = self.bound.get(
            "ring",
            (ring.data_ptr(), strides, q_latent.dtype, q_rope.dtype, output.dtype),
            lambda: bind_attend_latent_ring(
                self.codec, self.shape, ring, q_latent, q_rope, output, self.inverse_gain, self.constant
            ),
        )
        launch(step.grid, (q_latent, q_rope, output), step.arguments)
