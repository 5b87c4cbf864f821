"""Latent rows gathered from pages on CUDA."""

from __future__ import annotations

import torch

from ...codecs.latent_rows import LatentRowCodec
from ...kernels.triton.latent_rows import GatherRowsLaunch
from ...kernels.triton.launch import Launches
from ..latent.in_pytorch import PrefixChunk, RecentContext
from ..protocols import LayerKernel


class RowGather(LayerKernel):
    """Reads latent rows of one layer: picked tokens, and prefixes of prompts that read all tokens."""

    def __init__(self, codec: LatentRowCodec) -> None:
        self.codec = codec
        self.bound: Launches = Launches()

    def gather_tokens(
        self, cache: torch.Tensor, block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill `rows` [tokens, rank + rope_dim]: `requests` int32 [tokens / n] are those of n neighbours each in
        `positions`, int32 [tokens]; negative: none."""
        count, a_request = len(positions), len(positions) // len(requests)
        assert len(rows) == count and rows.is_contiguous(), (rows.shape, count)
        launch = self.bound.get(
            ("gather", a_request),
            (cache.data_ptr(), cache.stride()),
            lambda: GatherRowsLaunch(self.codec.rows, cache, a_request),
        )
        grid, arguments = GatherRowsLaunch.step(count, block_table, requests)
        launch(grid, (rows, positions), arguments)

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, chunk: PrefixChunk, rows: torch.Tensor,
        recent: RecentContext | None = None,
    ) -> None:  # fmt: skip
        """See `ReferenceLatentPrefix.gather`. There is no ring."""
        assert recent is None
        numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        ends = chunk.cu_seq_lens[1:]
        requests = torch.searchsorted(ends, numbers, right=True, out_int32=True)
        positions = numbers - (chunk.cu_seq_lens[:-1] - chunk.starts)[requests.long()]
        self.gather_tokens(cache, block_table, requests, positions, rows)
