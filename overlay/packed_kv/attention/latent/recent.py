"""Attention of decodes over their requests' rings of latents, added to that over their pages, on CUDA.

Pages come first, by either kernel: it gets the number of tokens that are read there for that of the request, and leaves
its output in fp32 with its lse. One launch then adds the ring's tokens, and what V lacks of the mean; `portable.py` and
`hopper.py` have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...kernels.triton.latent_ring import split_lens
from ...kernels.triton.launch import Launches
from .metadata import LatentDecodeMetadata


@dataclass(frozen=True)
class RecentStep:
    """Of a step: tokens that its decodes read in pages, int32 [requests]; what attention over these fills, `part` fp32
    [tokens, heads, rank] and `lse` fp32 [tokens, heads]; what the launch that follows needs."""

    page_lens: torch.Tensor
    part: torch.Tensor
    lse: torch.Tensor
    launch: Any


class RecentLatents(ABC):
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
        self.codec, self.heads, self.scale, self.longest_decode = codec, heads, scale, longest_decode
        self.constant, self.inverse_gain = constant, 1 / codec.value_gain()
        self.page_lens = torch.zeros(max_requests, dtype=torch.int32, device=codec.device)
        self.bound = Launches()

    def step(self, metadata: LatentDecodeMetadata, ring: Ring, part: torch.Tensor, lse: torch.Tensor) -> RecentStep:
        """For layers of these heads, in memory that outlives the step."""
        starts, seq_lens = metadata.query_start, metadata.seq_lens
        page_lens = self.page_lens[: len(seq_lens)]
        split_lens(starts, seq_lens, ring.first, ring.window, page_lens)
        launch = self.prepare(metadata.max_query_len, ring, starts, seq_lens, page_lens, part, lse)
        return RecentStep(page_lens, part, lse, launch)

    @abstractmethod
    def prepare(
        self, max_query_len: int, ring: Ring, query_start: torch.Tensor, seq_lens: torch.Tensor,
        page_lens: torch.Tensor, part: torch.Tensor, lse: torch.Tensor,
    ) -> Any:  # fmt: skip
        """What `add` of the step's layers needs: grid and arguments of the launch.

        Args:
            max_query_len: most query tokens of a request.
            ring: of the requests.
            query_start, seq_lens, page_lens: int32 [requests + 1], [requests] and [requests].
            part, lse: fp32 [tokens, heads, rank] and [tokens, heads], of attention over pages.
        """

    @abstractmethod
    def add(
        self, step: RecentStep, ring: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Fill `output` [tokens, heads, rank]. `ring`: uint8 [blocks, 1, block_size, ring_slot_bytes] of the layer.
        `q_latent`, `q_rope`: fp16 or bf16 [tokens, heads, rank] and [tokens, heads, rope_dim]."""
