"""Decode attention over picked latent rows by `kernels/cuda`, which reads packed rows itself.

Each query token is to the kernel what a request is to dense attention; see `kernels/cuda/latent_pick_launch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.checks import check_int32
from ...kernels.cuda import latent_launch as cuda
from ...kernels.cuda import latent_pick_launch as cuda_picks
from ...kernels.cuda.latent_schedule import LatentScheduler
from ...kernels.served import CUDA, Latents
from ...kernels.triton.launch import Launches
from ...kernels.triton.sparse_picks import CountPicksLaunch
from ..choice import Limits, find_kernel
from ..step import StepKey
from .picks import PickLayout
from .sparse_metadata import SparseLatentMetadata


class PickKind(NamedTuple):
    """Key of the layers that share a step."""

    heads: int
    scale: float
    picks: int
    has_sinks: bool


class HopperPickStep(NamedTuple):
    """Arguments and grids of a step's launches. The arguments are addresses of `parts`, of the layer's own tensors and
    of the metadata's, whose cache keeps the step."""

    decode: cuda_picks.PickStep
    parts: cuda.Parts
    lse: torch.Tensor | None


class HopperPicks:
    """The CUDA kernel over picked rows of a layer of this layout. `most_tokens`: query tokens of a batch's decodes."""

    def __init__(self, layer: PickLayout, most_tokens: int) -> None:
        self.layer, device = layer, layer.codec.device
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self.kind = PickKind(layer.heads, layer.scale, layer.picks, layer.sinks is not None)
        self.shape = cuda.shape_of(layer.heads, sm_count)
        self.scheduler = LatentScheduler(most_tokens, sm_count, device)
        self.numbers = torch.arange(most_tokens + 1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(most_tokens, dtype=torch.int32, device=device)
        self.bound: Launches = Launches()
        rows, fp32 = self.shape.partial_rows(), torch.float32
        self.specs = ((rows, layer.codec.rank), fp32), ((rows, 2), fp32)
        """Shapes and dtypes of partial results, in the workspace."""

    def prepare(
        self, metadata: SparseLatentMetadata, tokens: int, partial: tuple[torch.Tensor, ...], lse: torch.Tensor | None
    ) -> HopperPickStep:
        """Return the step of a batch's decodes, of so many query tokens. `partial`: of the shapes in `specs`;
        `lse`: see `PickKernels.decode`."""
        assert tokens <= len(self.counts), (tokens, len(self.counts))
        layer, counts = self.layer, self.counts[:tokens]
        requests, query_start = metadata.req_id_per_token[:tokens], metadata.query_start_loc
        seq_lens = metadata.seq_lens
        assert seq_lens is not None
        check_int32(requests, query_start, seq_lens)
        launch = self.bound.get("count", None, CountPicksLaunch)
        grid, arguments = CountPicksLaunch.step(tokens, layer.picks)
        launch(grid, (counts, requests, query_start, seq_lens), arguments)
        parts = cuda.Parts(self.shape, self.scheduler(counts, self.shape.partitions), *partial)
        tables = metadata.block_table, requests, self.numbers[: tokens + 1], counts
        return HopperPickStep(cuda_picks.make_pick_step(layer.heads, layer.scale, *tables, parts, lse), parts, lse)

    def attend(
        self, metadata: SparseLatentMetadata, cache: torch.Tensor, queries: tuple[torch.Tensor, torch.Tensor],
        picks: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
        take_partial: Callable[[], tuple[torch.Tensor, ...]],
    ) -> None:  # fmt: skip
        """See `PickKernels.decode`. `take_partial`: returns memory of the shapes in `specs`, which the layers of a step
        share, as they do `lse`; asked by the first."""
        tokens, (query, rope_query) = len(output), queries
        key = StepKey("picks", self.kind)
        step = metadata.steps.get(key, lambda: self.prepare(metadata, tokens, take_partial(), lse))
        assert step.decode.step.requests == tokens, (step.decode.step.requests, tokens)
        assert picks.shape[1] >= self.layer.picks, (picks.shape, self.layer.picks)
        assert step.lse is lse or (step.lse is not None and lse is not None and step.lse.data_ptr() == lse.data_ptr())
        held_for = (cache.data_ptr(), cache.stride(), query.dtype)
        decode = self.bound.get("decode", held_for, lambda: self._bind(cache, query.dtype))
        decode(step.decode, query, rope_query, output, picks)

    def _bind(self, cache: torch.Tensor, dtype: torch.dtype) -> cuda_picks.CudaPickDecode:
        layer = self.layer
        decode = cuda_picks.CudaPickDecode(
            layer.codec.rows, cache, layer.heads, dtype, dtype, layer.constant, has_lse=layer.sinks is not None
        )
        decode.compile_variants()
        return decode


def pick_decode(layer: PickLayout, option: str, most_tokens: int, longest_decode: int) -> HopperPicks | None:
    """Choose the decode kernel of a layer; None: its picks are gathered for FlashMLA.

    Args:
        layer: its layout.
        option: "triton", or "auto": the CUDA kernel where it serves.
        most_tokens: query tokens of a batch's decodes.
        longest_decode: query tokens of a request, drafts included.
    """
    codec = layer.codec
    asked = Latents(codec.fmt, codec.rank, codec.rope_dim, layer.heads, are_picked=True)
    served = find_kernel(
        codec.device, option, Limits(longest_decode, most_tokens), asked, f"picked latents, {layer.heads} query heads",
        "Triton gathers picked latents to bf16 for FlashMLA, 1.3 to 1.7 times fp8_ds_mla's time on an H200",
    )  # fmt: skip
    return HopperPicks(layer, most_tokens) if served.kernel == CUDA else None
