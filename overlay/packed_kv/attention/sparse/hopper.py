"""Decode attention over picked latent rows by `kernels/cuda`, which reads packed rows itself.

To the kernel each query token is a request; see `kernels/cuda/latent_pick_launch.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...codecs.ring import Ring
from ...kernels.checks import check_int32
from ...kernels.cuda import latent_launch as cuda
from ...kernels.cuda import latent_pick_launch as cuda_picks
from ...kernels.cuda.latent_schedule import LatentScheduler
from ...kernels.served import ANY, CUDA, Latents
from ...kernels.triton.launch import Launches
from ...kernels.triton.sparse_picks import CountPicksLaunch
from ..choice import find_kernel
from ..layouts import SparseLayout
from ..limits import Limits
from ..protocols import DecodeBatch, DecodeKernel
from .metadata import SparseDecodes


class HopperSparseStep(NamedTuple):
    """Arguments and grids of a step's launches; `tensors` keeps tensors alive whose addresses are arguments, besides
    the layer's own."""

    decode: cuda_picks.PickStep
    tensors: tuple[SparseDecodes, cuda.Parts]


class HopperSparse(DecodeKernel[HopperSparseStep, None]):
    """The CUDA kernel over picked rows of a layer of this layout. `most_tokens`: query tokens of a batch's decodes."""

    language, longest = CUDA, ANY

    def __init__(self, layer: SparseLayout, most_tokens: int) -> None:
        self.layer, self.kind, device = layer, layer.kind, layer.codec.device
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self.shape = cuda.latent_grid(layer.heads, sm_count)
        self.scheduler = LatentScheduler(most_tokens, sm_count, device)
        self.numbers = torch.arange(most_tokens + 1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(most_tokens, dtype=torch.int32, device=device)
        self.bound: Launches = Launches()
        rows, fp32 = self.shape.partial_rows(), torch.float32
        self.partial = ((rows, layer.codec.rank), fp32), ((rows, 2), fp32)
        """Shapes and dtypes of partial results, in the workspace."""

    def prepare(self, batch: DecodeBatch) -> HopperSparseStep:
        assert isinstance(batch, SparseDecodes)
        tokens, layer, requests = batch.tokens, self.layer, batch.requests
        assert tokens <= len(self.counts), (tokens, len(self.counts))
        counts = self.counts[:tokens]
        check_int32(requests, batch.query_start, batch.seq_lens)
        launch = self.bound.get("count", None, CountPicksLaunch)
        grid, arguments = CountPicksLaunch.step(tokens, layer.picks)
        launch(grid, (counts, requests, batch.query_start, batch.seq_lens), arguments)
        parts = cuda.Parts(self.shape, self.scheduler(counts, self.shape.partitions), *batch.memory.partial)
        tables = batch.block_table, requests, self.numbers[: tokens + 1], counts
        decode = cuda_picks.make_pick_step(layer.heads, layer.scale, *tables, parts, batch.lse)
        return HopperSparseStep(decode, (batch, parts))

    def attend(
        self, step: HopperSparseStep, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        query, rope_query, picks = queries
        assert output is not None and step.decode.step.requests == len(output), step.decode.step.requests
        assert picks.shape[1] >= self.layer.picks, (picks.shape, self.layer.picks)
        binding_key = (cache.data_ptr(), cache.stride(), query.dtype)
        decode = self.bound.get("decode", binding_key, lambda: self._bind(cache, query.dtype))
        decode(step.decode, query, rope_query, output, picks)

    def _bind(self, cache: torch.Tensor, dtype: torch.dtype) -> cuda_picks.CudaPickDecode:
        layer = self.layer
        decode = cuda_picks.CudaPickDecode(
            layer.codec.rows, cache, layer.heads, dtype, dtype, layer.constant, has_lse=layer.sinks is not None
        )
        decode.compile_variants()
        return decode


def hopper_kernel(layer: SparseLayout, option: str, most_tokens: int, longest_decode: int) -> HopperSparse | None:
    """Return the CUDA kernel where it serves a layer, and log the choice; None: picks are gathered for FlashMLA.

    Args:
        layer: its layout.
        option: `decode_kernel`.
        most_tokens: query tokens of a batch's decodes.
        longest_decode: query tokens of a request, drafts included.
    """
    codec = layer.codec
    asked = Latents(codec.fmt, codec.rank, codec.rope_dim, layer.heads, are_picked=True)
    served = find_kernel(
        codec.device, option, Limits(longest_decode, most_tokens), asked, f"picked latents, {layer.heads} query heads",
        "Triton gathers picked latents to bf16 for FlashMLA, 1.3 to 1.7 times fp8_ds_mla's time on an H200",
    )  # fmt: skip
    return HopperSparse(layer, most_tokens) if served.kernel == CUDA else None
