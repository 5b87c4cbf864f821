"""Launch of `latent.cu` over latent rows: each query token reads the rows that were picked for it.

What the dense kernel calls a request is a query token, and its tokens are its picks; its blocks have the token's heads
as rows, so drafts do not share a tile. Schedule, partial results and merge are the dense kernel's.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from ...layout import RowLayout
from ..checks import check_int32
from .latent_launch import CudaLatentDecode, Parts, Step, call_arguments, latent_grid, make_step

MAX_BYTES = (1 << 32) * 16
"""Upper bound of the bytes that a layer's blocks span: the kernel numbers rows in units of 16 bytes with 32 bits."""
PICK_ARGUMENTS = struct.Struct("=2Q2I")
"""The part of `Arguments` in latent.cu about picks, between the step's and the layer's arguments."""


class PickStep(NamedTuple):
    """The step's half of the launches, which its layers share. `requests`: the address of the constructor's tensor."""

    step: Step
    requests: int
    columns: int


def make_pick_step(
    heads: int, scale: float, block_table: torch.Tensor, requests: torch.Tensor, numbers: torch.Tensor,
    counts: torch.Tensor, parts: Parts, lse: torch.Tensor | None = None,
) -> PickStep:  # fmt: skip
    """Return a step. It has addresses: keep the tensors.

    Args:
        heads, scale, parts, lse: see `make_step`; the grid is `latent_grid(heads, ...)`.
        block_table: int32 [requests, blocks].
        requests: int32 [tokens], row of the block table of each query token.
        numbers: int32 [tokens + 1], 0 to `tokens`.
        counts: int32 [tokens], how many of a token's picks are read, from the first on; 0: none, and the output is the
            constant.
    """
    check_int32(requests, numbers)
    assert len(numbers) == len(counts) + 1 and len(requests) == len(counts), (len(numbers), len(requests), len(counts))
    step = make_step(heads, 1, scale, block_table, numbers, counts, parts, lse)
    return PickStep(step, requests.data_ptr(), block_table.shape[1])


def pick_arguments(step: PickStep, picks: torch.Tensor) -> bytes:
    """Return the arguments of picks; see `CudaPickDecode`."""
    assert picks.dtype == torch.int32 and picks.stride(1) == 1, (picks.dtype, picks.stride())
    return PICK_ARGUMENTS.pack(picks.data_ptr(), step.requests, picks.stride(0), step.columns)


def check_span(cache: torch.Tensor) -> None:
    """Assert that the kernel can number a layer's rows: uint8 [blocks, block_size, row bytes], whose blocks may lie
    apart, as where each block of the cache holds all layers."""
    span = cache.shape[0] * cache.stride(0)
    assert span < MAX_BYTES, (
        f"a layer's {cache.shape[0]:,} blocks span {span:,} bytes of the KV cache, not {MAX_BYTES:,}"
    )


class CudaPickDecode(CudaLatentDecode):
    """Decode attention over picked latent rows of one layer's cache, uint8 [blocks, block_size, row bytes]; see
    `CudaLatentDecode` for the arguments, with `page` from `row_layout(fmt, 512, 64)`."""

    step_bytes = CudaLatentDecode.step_bytes + PICK_ARGUMENTS.size

    def __init__(
        self, page: RowLayout, cache: torch.Tensor, heads: int, query: torch.dtype, output: torch.dtype,
        constant: torch.Tensor | None = None, *, has_lse: bool = False,
    ) -> None:  # fmt: skip
        check_span(cache)
        super().__init__(page, cache, heads, query, output, constant, has_lse=has_lse)

    def __call__(  # type: ignore[override]
        self, step: PickStep, query: torch.Tensor, rope_query: torch.Tensor, output: torch.Tensor, picks: torch.Tensor
    ) -> None:
        """Launch on the current stream; in a `Precompiler` block, do nothing.

        Args:
            step: of `make_pick_step`.
            query, rope_query, output: see `CudaLatentDecode`; for a token without picks the output is the constant.
            picks: int32 [tokens, counts or more], unit stride: positions in requests, in any order; negative: no pick,
                in any place. Rows that are not picked are not used.
        """
        assert query.dtype is self.query and output.dtype is self.output, (query.dtype, output.dtype)
        assert isinstance(self.page, RowLayout) and len(picks) >= step.step.requests, len(picks)
        of_call = call_arguments(output, query, rope_query)
        self._launch(step.step, of_call + step.step.arguments + pick_arguments(step, picks))

    def compile_variants(self, longest_decode: int = 1) -> None:
        """Compile and load the variant; see `CudaLatentDecode.compile_variants`. A request is one query token."""
        self.compile({latent_grid(self.heads, 1).rows})
