"""Attention of decodes over their requests' rings of latents, added to that over their pages, on CUDA.

Pages come first, by either kernel: it gets the number of tokens that are read there for that of the request, and leaves
its output in fp32 with its lse, or parts of it. One launch then adds the ring's tokens, and what V lacks of the mean;
`portable.py` and `hopper.py` have it.
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
class PageStep:
    """What attention over pages reads and fills in a step.

    `metadata`: of the batch's decodes. `lens`: int32 [requests], tokens read there. `partial`, `stats`: fp32 [...,
    rank] and [..., 2], parts of results. `output`: [tokens, heads, rank], filled; `lse`: fp32 [tokens, heads], filled,
    or None. Where the launch for the ring merges parts, it fills `output`.
    """

    metadata: LatentDecodeMetadata
    lens: torch.Tensor
    partial: torch.Tensor
    stats: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor | None


class RecentLatents(ABC):
    """The rings of one layer's decodes. `merges_pages`: whether their launch merges the parts of pages, too.

    Args:
        codec: of the layer, on a CUDA device.
        heads: query heads of this rank.
        scale: of scores.
        longest_decode: query tokens of a request, drafts included.
        max_requests: of a step.
        constant: fp32 [rank], added to outputs, or None.
    """

    merges_pages = False

    def __init__(
        self, codec: LatentCodec, heads: int, scale: float, longest_decode: int, max_requests: int,
        constant: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.codec, self.heads, self.scale, self.longest_decode = codec, heads, scale, longest_decode
        self.constant, self.inverse_gain = constant, 1 / codec.value_gain()
        self.page_lens = torch.zeros(max_requests, dtype=torch.int32, device=codec.device)
        self.bound = Launches()

    def page_lens_of(self, metadata: LatentDecodeMetadata, ring: Ring) -> torch.Tensor:
        """Tokens that a step's decodes read in pages, int32 [requests], in memory that outlives the step."""
        starts, seq_lens = metadata.query_start, metadata.seq_lens
        page_lens = self.page_lens[: len(seq_lens)]
        split_lens(starts, seq_lens, ring.first, ring.window, page_lens)
        return page_lens

    @abstractmethod
    def prepare(self, ring: Ring, pages: PageStep, launches: Any) -> Any:
        """What `add` of the step's layers needs: grid and arguments of the launch.

        Args:
            ring: of the requests.
            pages: attention over these.
            launches: what `LatentDecode.prepare` made for it.
        """

    @abstractmethod
    def add(
        self, step: Any, ring: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Fill `output` [tokens, heads, rank]. `step`: of `prepare`. `ring`: uint8 [blocks, 1, block_size,
        ring_slot_bytes] of the layer. `q_latent`, `q_rope`: fp16 or bf16 [tokens, heads, rank] and [tokens, heads,
        rope_dim]."""
