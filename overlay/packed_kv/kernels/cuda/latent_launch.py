"""The constants, grid and arguments of `latent.cu`, and its launch."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from ...layout import MICRO_BLOCK, PageLayout, RowLayout
from ..checks import check_int32, check_pages
from ..kernel_layout import kernel_layout, latent_row_layout, rope_layout
from ..units import LOG2_E
from . import LATENT, LATENT_ROWS
from .code_constants import decoder_constants, group_constants
from .kernel import Compilation, CudaKernel
from .latent_schedule import TILE_TOKENS
from .launch import OUTPUTS
from .source import LATENT as LATENT_SOURCE

RANK, ROPE_DIM = LATENT
BLOCK_ROWS = (16, 24, 32, 48, 64)
"""Rows of a thread block."""
QUERY_FACTOR, LATENT_DIVISOR = 16, 128
"""Factor of queries and divisor of latents, so that both are fp16 in the kernel."""
MOST_SHARES = 8
"""Shares of a row's parts for which a block of the merge has threads and shared memory."""


class LatentGrid(NamedTuple):
    """Cut of a batch: `row_blocks` blocks of `rows` rows each, and `partitions` runs of tiles for each of these."""

    rows: int
    row_blocks: int
    partitions: int

    def partial_rows(self, requests: int = 0) -> int:
        """Rows of partial results that the blocks may write: two requests per partition and, where they stay partial,
        `requests` requests with a single part."""
        return (self.partitions * 2 + requests) * self.row_blocks * self.rows


def latent_grid(rows: int, sm_count: int) -> LatentGrid:
    """Return the grid for the most rows of a request. It depends on no length, so a CUDA graph can hold it.

    Args:
        rows: query heads times query tokens of a request, at most `LATENT_ROWS`.
        sm_count: of the card.
    """
    assert 0 < rows <= LATENT_ROWS, rows
    row_blocks = -(-rows // BLOCK_ROWS[-1])
    own = next(n for n in BLOCK_ROWS if n * row_blocks >= rows)
    return LatentGrid(own, row_blocks, max(sm_count // row_blocks, 1))


class LatentVariant(NamedTuple):
    """Variant that the kernel is compiled for, besides the page's layout; `rows`: rows of a thread block. `output`
    None: all results stay partial."""

    heads: int
    rows: int
    block_size: int
    query: torch.dtype
    output: torch.dtype | None
    has_constant: bool
    has_lse: bool


def constants(page: PageLayout | RowLayout, variant: LatentVariant) -> dict[str, str]:
    """Return the definitions that `latent.cu` is compiled with, for pages of micro-blocks or of latent rows."""
    if isinstance(page, RowLayout):
        rows = latent_row_layout(page)
        layout, rope, scales_at = rows.half, rows.rope, rows.scales_at
    else:
        layout, rope, scales_at = kernel_layout(page), rope_layout(page), page.plane(0, "scales").offset
    values: dict[str, object] = {
        **group_constants(layout),
        **decoder_constants(),
        "ROWS": variant.rows,
        "TILE_TOKENS": TILE_TOKENS,
        "QUERY_FACTOR": f"{float(QUERY_FACTOR)}f",
        "LATENT_DIVISOR": f"{float(LATENT_DIVISOR)}f",
        "HEADS": variant.heads,
        "SCALES_AT": scales_at,
        "ROPE_AT": rope.at,
        "ROPE_BITS": 8 if rope.scales_at else 16,
        "ROPE_SCALES_AT": rope.scales_at,
        "MICRO_BLOCKS": variant.block_size // MICRO_BLOCK,
        "QUERY": OUTPUTS[variant.query],
        "OUTPUT": OUTPUTS[variant.output or torch.float32],
        "LEAVES_PARTS": int(variant.output is None),
        "HAS_PICKS": int(isinstance(page, RowLayout)),
        "MOST_SHARES": MOST_SHARES,
        "HAS_LSE": int(variant.has_lse),
        "HAS_CONSTANT": int(variant.has_constant),
    }
    if isinstance(page, RowLayout):
        values["ROW_BYTES"] = page.row_bytes
    return {name: str(value) for name, value in values.items()}


CALL_ARGUMENTS, STEP_ARGUMENTS = struct.Struct("=3Q6I"), struct.Struct("=8Q2IfI")
LAYER_ARGUMENTS = struct.Struct("=2QI4x")
"""The three parts of `Arguments` in latent.cu, in order."""


def merge_shares(partitions: int, requests: int) -> int:
    """Return how many shares of a row's parts the merge combines in parallel: 8 where few requests have many parts
    each."""
    parts = partitions // max(requests, 1)
    return min(1 << max(parts // 4, 1).bit_length() - 1, MOST_SHARES)


class Step(NamedTuple):
    """The step's half of the launches, which its layers share: arguments, and the grids of both launches."""

    arguments: bytes
    grid: LatentGrid
    max_query_len: int
    requests: int
    merge_shares: int


class Parts(NamedTuple):
    """Memory of a step's partial results.

    `schedule`: of `LatentScheduler`, for `grid.partitions`. `output`, `stats`: fp32 with room for
    [grid.partial_rows(..), 512] and [.., 2], contiguous.
    """

    grid: LatentGrid
    schedule: tuple[torch.Tensor, torch.Tensor]
    output: torch.Tensor
    stats: torch.Tensor


def make_step(
    heads: int, max_query_len: int, scale: float, block_table: torch.Tensor, query_start: torch.Tensor,
    seq_lens: torch.Tensor, parts: Parts, lse: torch.Tensor | None = None,
) -> Step:  # fmt: skip
    """Return a step. It has addresses: keep the tensors.

    Args:
        heads: query heads of this rank.
        max_query_len: most query tokens of a request, known on the host.
        scale: of the scores.
        block_table: int32 [requests, blocks].
        query_start: int32 [requests + 1], first query token of each request, and their number.
        seq_lens: int32 [requests], tokens in the cache, query tokens included; 0: the request is left out.
        parts: memory for the batch, with the grid of `latent_grid(heads * max_query_len, ...)`.
        lse: fp32 [tokens, heads], contiguous: filled with the natural log-sum-exps of the scores; None: not wanted.
    """
    grid, partial_rows = parts.grid, parts.grid.partial_rows()
    check_int32(block_table, query_start, seq_lens, *parts.schedule)
    assert parts.output.dtype == parts.stats.dtype == torch.float32
    assert parts.output.numel() >= partial_rows * RANK and parts.stats.numel() >= partial_rows * 2
    assert parts.schedule[0].shape == (grid.partitions + 1, 2), parts.schedule[0].shape
    assert lse is None or lse.is_contiguous(), lse.stride()
    tensors = (block_table, query_start, seq_lens, *parts.schedule, parts.output, parts.stats, lse)
    rows = heads * max_query_len
    factor = scale * LOG2_E * LATENT_DIVISOR / QUERY_FACTOR
    addresses = (0 if x is None else x.data_ptr() for x in tensors)
    shares = merge_shares(grid.partitions, len(seq_lens))
    arguments = STEP_ARGUMENTS.pack(*addresses, block_table.stride(0), rows, factor, shares)
    return Step(arguments, grid, max_query_len, len(seq_lens), shares)


def call_arguments(output: torch.Tensor | None, query: torch.Tensor, rope_query: torch.Tensor) -> bytes:
    """Return the arguments that differ from call to call; see `CudaLatentDecode`. The kernels load and store up to 16
    bytes at a time: all rows begin at a multiple of 16 bytes."""
    of_query, of_rope, at_query, at_rope = query.stride(), rope_query.stride(), query.data_ptr(), rope_query.data_ptr()
    elements = of_query[0] | of_query[1] | of_rope[0] | of_rope[1]  # below 8 no bit is set
    assert query.dtype is rope_query.dtype and of_query[2] == of_rope[2] == 1, (query.dtype, rope_query.dtype, of_query)
    assert not (elements % 8 or (at_query | at_rope) % 16), (of_query, of_rope, at_query, at_rope)
    if output is None:
        return CALL_ARGUMENTS.pack(0, at_query, at_rope, 0, 0, *of_query[:2], *of_rope[:2])
    of_output, at_output = output.stride(), output.data_ptr()
    assert not ((of_output[0] | of_output[1]) % 8 or at_output % 16) and of_output[2] == 1, (of_output, at_output)
    return CALL_ARGUMENTS.pack(at_output, at_query, at_rope, *of_output[:2], *of_query[:2], *of_rope[:2])


def layer_arguments(cache: torch.Tensor, constant: torch.Tensor | None) -> bytes:
    """Return the arguments that are fixed for a layer; see `CudaLatentDecode`."""
    check_pages(cache)
    assert cache.shape[1] % MICRO_BLOCK == 0, cache.shape
    assert constant is None or (constant.dtype == torch.float32 and constant.is_contiguous()), constant.dtype
    return LAYER_ARGUMENTS.pack(cache.data_ptr(), 0 if constant is None else constant.data_ptr(), cache.stride(0))


class CudaLatentDecode(CudaKernel[int]):
    """Decode attention over one layer's cache of latents of 512 channels with 64 channels of RoPE. Keys of variants are
    rows of a block.

    Args:
        page: layout of the cache, of `latent_layout(fmt, 512, 64)`; for `CudaPickDecode` of `row_layout`.
        cache: uint8 [blocks, block_size, slot_bytes], its last two dimensions contiguous; its address and stride over
            blocks are multiples of 16 bytes.
        heads: query heads of this rank.
        query, output: dtypes of queries (bf16 or fp16) and outputs (the same, or fp32). None: there are none, and
            partial results are left to `CudaLatentRing`.
        constant: fp32 [512], added to each output; None: nothing is.
        has_lse: whether steps have log-sum-exps to fill.
    """

    step_bytes: int = CALL_ARGUMENTS.size + STEP_ARGUMENTS.size
    """Bytes of the arguments before the layer's."""

    def __init__(
        self, page: PageLayout | RowLayout, cache: torch.Tensor, heads: int, query: torch.dtype,
        output: torch.dtype | None, constant: torch.Tensor | None = None, *, has_lse: bool = False,
    ) -> None:  # fmt: skip
        self.page, self.heads, self.query, self.output, self.has_lse = page, heads, query, output, has_lse
        self.constant, self.block_size = constant, cache.shape[1]
        super().__init__(self.step_bytes, layer_arguments(cache, constant), cache.device.index)

    def __call__(self, step: Step, query: torch.Tensor, rope_query: torch.Tensor, output: torch.Tensor | None) -> None:
        """Launch on the current stream; in a `Precompiler` block, do nothing.

        Args:
            step: of `make_step`.
            query: bf16 or fp16 [tokens, heads, 512] for latents as stored (`LatentCodec.fold`), of the constructor's
                dtype, unit stride over channels; address and other strides are multiples of 16 bytes.
            rope_query: likewise [tokens, heads, 64].
            output: [tokens, heads, 512], likewise (strides are multiples of 8 channels); filled with weighted means of
                stored latents plus the constant; None where partial results are left.
        """
        assert query.dtype is self.query and (output is None or output.dtype is self.output), (query.dtype, self.query)
        assert (output is None) is (self.output is None), self.output
        self._launch(step, call_arguments(output, query, rope_query) + step.arguments)

    def _launch(self, step: Step, arguments: bytes) -> None:
        """Launch with these arguments before the layer's."""
        rows, row_blocks, partitions = step.grid
        functions = self.functions_of(rows)
        if functions is None:
            return
        decode, merge = functions
        stream, shares = torch.cuda.current_stream(self.device).cuda_stream, step.merge_shares
        with self.lock:
            self.arguments[: self.layer_at] = arguments
            # Neither launch is early: early_launch.py says why.
            grid = row_blocks, partitions, 1
            decode.launch(decode.kernel, grid, decode.threads, decode.shared_bytes, stream, self.address)
            if self.output is not None:
                grid = self.heads * step.max_query_len, step.requests, 1
                threads, size = merge.threads * shares // MOST_SHARES, merge.shared_bytes * shares // MOST_SHARES
                merge.launch(merge.kernel, grid, threads, size, stream, self.address)

    def compile_variants(self, longest_decode: int) -> None:
        """Compile and load every variant that a step may need, so that no step waits for one. In a `Precompiler` block,
        note them.

        Args:
            longest_decode: most query tokens of a request, drafts included.
        """
        self.compile({latent_grid(self.heads * length, 1).rows for length in range(1, longest_decode + 1)})

    def compilation(self, key: int) -> Compilation:
        """Return what a variant is compiled from."""
        has_constant = self.constant is not None
        variant = LatentVariant(self.heads, key, self.block_size, self.query, self.output, has_constant, self.has_lse)
        return Compilation.of(LATENT_SOURCE, constants(self.page, variant))
