"""Constants, grid and arguments of `decode.cu`."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...codecs.ring import Ring
from ...formats import MAGNITUDES
from ...layout import MICRO_BLOCK, PageLayout
from ..ring import check_ring
from . import COLUMNS

if TYPE_CHECKING:
    from cuda.bindings import driver

OUTPUTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
WARPS_A_MULTIPROCESSOR = 16
"""Of 128 registers."""
FUSED_WARPS = 8
STAGES = 2
"""Tiles of 32 tokens that a warp has under way."""
MAX_SPLITS = 128
"""Of `merge`."""
FULL_ENOUGH = 0.85
"""Where fewer of a wave's places are taken by blocks of 8 warps, blocks of 1 and a merge take their place."""


@dataclass(frozen=True)
class Grid:
    """`blocks` a (request, KV head) pair, of `warps` warps; with one warp the results are partial, one a block."""

    warps: int
    blocks: int

    @property
    def is_final(self) -> bool:
        """Whether the output is written, so that no merge follows."""
        return self.warps > 1


def _places(multiprocessors: int) -> int:
    """Blocks of `FUSED_WARPS` that run at once."""
    return multiprocessors * WARPS_A_MULTIPROCESSOR // FUSED_WARPS


def grid(pairs: int, multiprocessors: int) -> Grid:
    """The grid for a number of (request, KV head) pairs. No sequence length counts: a CUDA graph can hold it."""
    places = _places(multiprocessors)
    blocks = max(1, places // pairs)
    waves = -(-pairs * blocks // places)
    if blocks <= FUSED_WARPS and pairs * blocks >= FULL_ENOUGH * waves * places:
        return Grid(FUSED_WARPS, blocks)
    return Grid(1, max(1, min(MAX_SPLITS, multiprocessors * WARPS_A_MULTIPROCESSOR // pairs)))


class Variant(NamedTuple):
    """What a batch decides of the kernel's constants. columns: 4 or 8; ring_block: tokens of a ring's block, or 0."""

    warps: int
    columns: int
    block_size: int
    ring_block: int
    recent: int
    has_bias: bool
    output: torch.dtype


def constants(page: PageLayout, kv_heads: int, group: int, variant: Variant, stages: int = STAGES) -> dict[str, str]:
    """What `decode.cu` is compiled with."""
    warps, columns = variant.warps, variant.columns
    bits = page.vector.group_bits
    head_dim = 32 * len(bits)
    unit = 32 if 2 in bits else 128  # `codes.cuh` has the reason
    two = [unit + sign * unit * level for sign in (1, -1) for level in MAGNITUDES[2]] if 2 in bits else [0.0] * 4
    pages = warps * stages * (2 * page.micro_block_bytes + 8)
    combine = 4 * (warps * columns * (head_dim + 6) + columns * (head_dim + 4) + 4) if warps > 1 else 0
    values: dict[str, object] = {
        "HEAD_DIM": head_dim,
        "GROUP_BITS": ",".join(map(str, bits)),
        "TABLE_4_LOW": _word([128 * level for level in MAGNITUDES[4][:4]]),
        "TABLE_4_HIGH": _word([128 * level for level in MAGNITUDES[4][4:]]),
        "TABLE_3": _word([unit * level for level in MAGNITUDES[3]]),
        "TABLE_2": _word(two),
        "KV_HEADS": kv_heads,
        "QUERY_GROUP": group,
        "COLUMNS": columns,
        "MICRO_BLOCKS": variant.block_size // MICRO_BLOCK,
        "RING_BLOCK": variant.ring_block,
        "RECENT": variant.recent,
        "HAS_BIAS": int(variant.has_bias),
        "OUTPUT": OUTPUTS[variant.output],
        "WARPS": warps,
        "STAGES": stages,
        "BLOCKS": WARPS_A_MULTIPROCESSOR // warps,
        "SHARED_BYTES": max(pages, combine),
    }
    return {name: str(value) for name, value in values.items()}


def _word(levels: list[float]) -> str:
    """Four bytes as a constant of C."""
    values = [round(level) for level in levels]
    assert all(value == level and 0 <= value < 256 for value, level in zip(values, levels, strict=True)), levels
    return f"0x{sum(value << 8 * i for i, value in enumerate(values)):08x}u"


def pack_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """`rotation_matrix(..., inverse=True)` in the order in which the lanes need it: as the left operands of
    mma.m16n8k8, two products' a lane, fp16 [1 or KV heads, head_dim / 16, head_dim / 16, 32, 8]."""
    heads, head_dim, _ = matrix.shape
    # Output channel = tile, upper, row; summed channel = fragment, product, right, column.
    x = matrix.transpose(1, 2).reshape(heads, head_dim // 16, 2, 8, head_dim // 16, 2, 2, 4)
    x = x.permute(0, 1, 4, 3, 7, 5, 6, 2)  # tile, fragment, row, column, product, right, upper
    return x.reshape(heads, head_dim // 16, head_dim // 16, 32, 8).contiguous()


ARGUMENTS = struct.Struct("14Q9I4x")
"""`Arguments` of decode.cu."""


def pack_arguments(
    buffer: bytearray,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    query_bias: torch.Tensor | None,
    ring: Ring | None,
    matrix: torch.Tensor,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Fill `buffer` with the kernel's arguments; those of `CudaDecode.__call__`."""
    block_stride, head_stride, *_ = cache.stride()
    ring_pointers, ring_strides = (0, 0, 0), (0, 0, 0)
    if ring is not None:
        ring_pointers = (ring.cache.data_ptr(), ring.block_table.data_ptr(), ring.first.data_ptr())
        ring_strides = (ring.block_table.stride(0), ring.cache.stride(0), ring.cache.stride(1))
    ARGUMENTS.pack_into(
        buffer, 0, query.data_ptr(), cache.data_ptr(), block_table.data_ptr(), query_start.data_ptr(),
        seq_lens.data_ptr(), 0 if query_bias is None else query_bias.data_ptr(), *ring_pointers,
        matrix.data_ptr(), output.data_ptr(), partial_output.data_ptr(), partial_stats.data_ptr(),
        counters.data_ptr(),
        block_table.stride(0), block_stride, head_stride, *ring_strides,
        0 if len(matrix) == 1 else matrix.stride(0) // 8, output.stride(0), output.stride(2),
    )  # fmt: skip


class CudaDecode:
    """Decode attention of the layers of one format and model.

    Args:
        page: layout of the cache.
        matrix: `rotation_matrix(..., inverse=True)` of the V codec.
        kv_heads, group: KV heads, and query heads of each.
    """

    def __init__(self, page: PageLayout, matrix: torch.Tensor, kv_heads: int, group: int) -> None:
        self.page, self.kv_heads, self.group = page, kv_heads, group
        self.matrix = pack_matrix(matrix)
        self.multiprocessors = torch.cuda.get_device_properties(matrix.device).multi_processor_count
        # Of pairs that have several blocks: fewer than there are places for blocks.
        self.counters = torch.zeros(_places(self.multiprocessors), dtype=torch.int32, device=matrix.device)
        self.arguments = bytearray(ARGUMENTS.size)
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_char.from_buffer(self.arguments)))
        self.functions: dict[Variant, tuple[driver.CUfunction, int]] = {}

    def grid(self, requests: int) -> Grid:
        return grid(requests * self.kv_heads, self.multiprocessors)

    def __call__(
        self,
        shape: Grid,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        partial_output: torch.Tensor,
        partial_stats: torch.Tensor,
        output: torch.Tensor,
        *,
        max_query_len: int,
        query_bias: torch.Tensor | None = None,
        ring: Ring | None = None,
    ) -> None:
        """Launch on the current stream. `shape`: of `grid`. The others are those of `decode` and `merge`: where
        `shape.is_final`, `output` is filled, else the partial results are."""
        from cuda.bindings import driver

        variant = Variant(
            shape.warps, 4 if self.group * max_query_len <= 4 else COLUMNS, cache.shape[2],
            ring.cache.shape[2] if ring else 0, ring.window if ring else 0, query_bias is not None, output.dtype,
        )  # fmt: skip
        function, shared_bytes = self.functions.get(variant) or self._prepare(variant, query, cache, ring)
        pack_arguments(
            self.arguments, query, cache, block_table, query_start, seq_lens, query_bias, ring, self.matrix, output,
            partial_output, partial_stats, self.counters,
        )  # fmt: skip
        stream = torch.cuda.current_stream().cuda_stream
        (status,) = driver.cuLaunchKernel(
            function, shape.blocks, self.kv_heads, len(seq_lens), 32 * shape.warps, 1, 1, shared_bytes, stream,
            ctypes.addressof(self.parameters), 0,
        )  # fmt: skip
        if int(status):
            raise RuntimeError(f"the decode kernel was not launched: {status.name}")

    def _prepare(
        self, variant: Variant, query: torch.Tensor, cache: torch.Tensor, ring: Ring | None
    ) -> tuple[driver.CUfunction, int]:
        """Check what the kernel takes for granted of a variant's tensors, compile the variant and load it."""
        assert query.is_contiguous() and query.dtype == torch.float16, (query.dtype, query.stride())
        assert cache.stride()[2:] == (cache.shape[3], 1), cache.stride()
        assert cache.data_ptr() % 16 == 0 and not any(stride % 16 for stride in cache.stride()[:2]), cache.stride()
        if ring is not None:
            check_ring(ring, self.kv_heads, query.shape[-1])
            assert ring.cache.data_ptr() % 4 == 0 and not any(n % 4 for n in ring.cache.stride()[:2]), (
                ring.cache.stride()
            )
        values = constants(self.page, self.kv_heads, self.group, variant)
        shared_bytes = int(values["SHARED_BYTES"])
        self.functions[variant] = _function(tuple(values.items()), shared_bytes, cache.device.index), shared_bytes
        return self.functions[variant]


@functools.cache
def _function(constants: tuple[tuple[str, str], ...], shared_bytes: int, device: int) -> driver.CUfunction:
    """The kernel with its constants, for all layers of a process."""
    from .nvrtc import cubin, load

    with torch.cuda.device(device):
        return load(cubin(dict(constants)), "decode", shared_bytes)
