"""The constants, grid and arguments of `latent_ring.cu`, and its launch."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from ...codecs.ring import Ring
from ...layout import ring_layout, ring_slot_bytes
from ..checks import check_int32, check_ring
from ..units import LOG2_E
from . import LATENT
from .kernel import Compilation, CudaKernel
from .latent_launch import CALL_ARGUMENTS, LATENT_DIVISOR, Parts, call_arguments
from .launch import OUTPUTS
from .source import LATENT_RING

RANK, ROPE_DIM = LATENT
TILE_ROWS, TILE_TOKENS = 16, 64
CHANNEL_SHARES = (1, 2, 4, 8)
"""Blocks that a tile of rows may have: each computes all scores of the tile, and the outputs of a share of the
channels."""


class LatentRingVariant(NamedTuple):
    """Variant that the kernel is compiled for."""

    heads: int
    channel_shares: int
    block_size: int
    query: torch.dtype
    output: torch.dtype
    has_constant: bool


def constants(variant: LatentRingVariant) -> dict[str, str]:
    """Return the definitions that `latent_ring.cu` is compiled with."""
    ring = ring_layout(RANK + ROPE_DIM, 1)
    values: dict[str, object] = {
        "RANK": RANK,
        "ROPE_DIM": ROPE_DIM,
        "SLOT_BYTES": ring.slot_bytes,
        "SCALES_AT": ring.scales[0],
        "HEADS": variant.heads,
        "SHARES": variant.channel_shares,
        "RING_BLOCK": variant.block_size,
        "QUERY": OUTPUTS[variant.query],
        "OUTPUT": OUTPUTS[variant.output],
        "HAS_CONSTANT": int(variant.has_constant),
        "LATENT_DIVISOR": f"{float(LATENT_DIVISOR)}f",
    }
    return {name: str(value) for name, value in values.items()}


STEP_ARGUMENTS, LAYER_ARGUMENTS = struct.Struct("=8Q3If"), struct.Struct("=3QI4x")
"""Parts of `Arguments` in latent_ring.cu behind those of the call, in order."""


def channel_shares(rows: int, sm_count: int) -> int:
    """Return how many blocks share a tile of rows: the fewest with which each SM has more than 14 rows of the batch."""
    return next((n for n in CHANNEL_SHARES if rows * n > 14 * sm_count), CHANNEL_SHARES[-1])


class Step(NamedTuple):
    """The step's half of the launch, which its layers share: arguments, and the grid."""

    arguments: bytes
    grid: tuple[int, int, int]


def make_step(
    heads: int, max_query_len: int, scale: float, sm_count: int, ring: Ring, query_start: torch.Tensor,
    seq_lens: torch.Tensor, page_lens: torch.Tensor, parts: Parts,
) -> Step:  # fmt: skip
    """Return a step. It has addresses: keep the tensors.

    Args:
        heads: query heads of this rank.
        max_query_len: most query tokens of a request, known on the host.
        scale: of the scores.
        sm_count: of the card.
        ring: its table int32 [requests, ring blocks].
        query_start, seq_lens, page_lens: int32 [requests + 1], [requests] and [requests]: first query token of each
            request, its tokens, and its tokens that are read in pages.
        parts: partial results over pages, with room for requests with a single part.
    """
    table, requests = ring.block_table, len(seq_lens)
    check_int32(table, query_start, seq_lens, page_lens)
    assert parts.output.numel() >= parts.grid.partial_rows(requests) * RANK, parts.output.shape
    tiles = -(-heads * max_query_len // TILE_ROWS)
    tensors = (table, query_start, seq_lens, page_lens, parts.output, parts.stats, *parts.schedule)
    sizes = table.stride(0), parts.grid.partitions, parts.grid.row_blocks * parts.grid.rows
    arguments = STEP_ARGUMENTS.pack(*(x.data_ptr() for x in tensors), *sizes, scale * LOG2_E)
    return Step(arguments, (tiles, requests, channel_shares(heads * max_query_len * requests, sm_count)))


def layer_arguments(ring: torch.Tensor, inverse_gain: torch.Tensor, constant: torch.Tensor | None) -> bytes:
    """Return the arguments that are fixed for a layer; see `CudaLatentRing`."""
    check_ring(ring, 1, ring_slot_bytes(RANK + ROPE_DIM, 1), 8)
    for x in (inverse_gain, constant):
        assert x is None or (x.dtype == torch.float32 and x.is_contiguous() and x.data_ptr() % 16 == 0), x.dtype
    of_constant = 0 if constant is None else constant.data_ptr()
    return LAYER_ARGUMENTS.pack(ring.data_ptr(), inverse_gain.data_ptr(), of_constant, ring.stride(0))


class CudaLatentRing(CudaKernel[int]):
    """Attention over one layer's ring of latents of 512 channels with 64 channels of RoPE, merged with the partial
    results over pages that `CudaLatentDecode` has left. The launch begins early, so it directly follows the decode's
    launch, with nothing between them (`early_launch.py`). Keys of variants are shares.

    Args:
        ring: uint8 [blocks, 1, block_size, ring_slot_bytes], its last two dimensions contiguous.
        heads: query heads of this rank.
        query, output: dtypes of queries (bf16 or fp16) and outputs (those or fp32).
        inverse_gain: fp32 [512], 1 over V's gain.
        constant: fp32 [512], added to each output; None: nothing is.
    """

    def __init__(
        self, ring: torch.Tensor, heads: int, query: torch.dtype, output: torch.dtype, inverse_gain: torch.Tensor,
        constant: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.widest = LatentRingVariant(heads, CHANNEL_SHARES[0], ring.shape[2], query, output, constant is not None)
        self.layer, self.kept = layer_arguments(ring, inverse_gain, constant), (inverse_gain, constant)
        super().__init__(CALL_ARGUMENTS.size + STEP_ARGUMENTS.size, self.layer, ring.device.index)

    def __call__(self, step: Step, query: torch.Tensor, rope_query: torch.Tensor, output: torch.Tensor) -> None:
        """Launch on the current stream; in a `Precompiler` block, do nothing.

        Args:
            step: of `make_step`.
            query, rope_query, output: see `CudaLatentDecode`; of the constructor's dtypes.
        """
        kind = self.widest
        assert query.dtype is kind.query and output.dtype is kind.output, (query.dtype, output.dtype, kind)
        functions = self.functions_of(step.grid[2])
        if functions is None:
            return
        (attend,) = functions
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self.lock:
            self.arguments[: self.layer_at] = call_arguments(output, query, rope_query) + step.arguments
            attend.launch(
                attend.kernel, step.grid, attend.threads, attend.shared_bytes, stream, self.address, is_early=True
            )

    def compile_variants(self) -> None:
        """Compile and load every variant that a step may need, so that no step waits for one. In a `Precompiler` block,
        note them."""
        self.compile(CHANNEL_SHARES)

    def variant(self, shares: int) -> LatentRingVariant:
        """Return the variant for blocks with this number of shares."""
        return self.widest._replace(channel_shares=shares)

    def compilation(self, key: int) -> Compilation:
        """Return what a variant is compiled from."""
        return Compilation.of(LATENT_RING, constants(self.variant(key)))
