"""Constants, grid and arguments of `decode.cu`."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from typing import Any, NamedTuple

import torch

from ...codecs.ring import Ring
from ...layout import MICRO_BLOCK, PageLayout, ring_slot_bytes
from .. import units
from ..triton.launch import head_stride
from ..triton.ring import check_ring
from . import COLUMNS
from .jobs import CUT_TILES, SHARE_WARPS, JobPlanner, job_count

OUTPUTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
WARPS_A_MULTIPROCESSOR = 16
"""Of 128 registers."""
FINAL_WARPS = (SHARE_WARPS, 4)
"""Of a block that writes the output: up to `most_requests`, and beyond, where smaller ones leave less of the card idle
(128 x 2048: 81 us for 88)."""
FEW = 8
"""Where there are more places than these for each pair, blocks of a warp and a merge come in: with all the card for a
few requests a warp has a few tiles, and there combining several warps costs more than a second launch."""
MAX_SPLITS = 128
"""Of `merge`."""
STAGES = 2
"""Tiles that a warp has under way."""
TILE_BLOCKS = 2
"""Micro-blocks of a tile."""


class Grid(NamedTuple):
    """Blocks of `warps` warps. `is_final`: they write the output, and `blocks` of each KV head do jobs (`jobs.py`).
    Else there are `blocks` for each (request, KV head) pair, of partial results, as splits are."""

    warps: int
    blocks: int
    is_final: bool


def grid(requests: int, kv_heads: int, multiprocessors: int) -> Grid:
    """The grid for a number of requests. No sequence length counts: a CUDA graph can hold it."""
    pairs, warps = requests * kv_heads, multiprocessors * WARPS_A_MULTIPROCESSOR
    final = final_warps(requests, kv_heads, multiprocessors)
    if warps // final // pairs <= FEW:
        return Grid(final, job_count(requests, job_places(final, kv_heads, multiprocessors)), True)
    return Grid(1, min(MAX_SPLITS, warps // pairs), False)


def final_warps(requests: int, kv_heads: int, multiprocessors: int) -> int:
    """Of a block that writes the output."""
    return FINAL_WARPS[requests > most_requests(kv_heads, multiprocessors)]


def most_requests(kv_heads: int, multiprocessors: int) -> int:
    """Of a batch that the larger blocks serve: two a place."""
    return 2 * job_places(FINAL_WARPS[0], kv_heads, multiprocessors)


def job_places(warps: int, kv_heads: int, multiprocessors: int) -> int:
    """Blocks of so many warps that a card works on at a time, of each KV head."""
    return max(1, multiprocessors * WARPS_A_MULTIPROCESSOR // warps // kv_heads)


class Variant(NamedTuple):
    """What a batch decides of the kernel's constants. columns: 4 or 8; ring_block: tokens of a ring's block, or 0."""

    warps: int
    is_final: bool
    columns: int
    block_size: int
    ring_block: int
    recent: int
    has_bias: bool
    output: torch.dtype
    has_sums: bool = False


def constants(page: PageLayout, kv_heads: int, group: int, variant: Variant) -> dict[str, str]:
    """What `decode.cu` is compiled with."""
    warps, columns = variant.warps, variant.columns
    bits = page.vector.group_bits
    head_dim = 32 * len(bits)
    ring_tile = MICRO_BLOCK * ring_slot_bytes(head_dim) if variant.ring_block else 0
    stage = max(TILE_BLOCKS * page.micro_block_bytes, ring_tile)
    combine = 4 * (warps * columns * (head_dim + 6) + columns * (head_dim + 4) + 4) if warps > 1 else 0
    values: dict[str, object] = {
        "HEAD_DIM": head_dim,
        "GROUP_BITS": ",".join(map(str, bits)),
        "TABLE_4_LOW": f"{units.word(units.four_bit_bytes()[:4])}u",
        "TABLE_4_HIGH": f"{units.word(units.four_bit_bytes()[4:])}u",
        "TABLE_3_POSITIVE": f"{units.word(units.three_bit_bytes()[:4])}u",
        "TABLE_3_NEGATIVE": f"{units.word(units.three_bit_bytes()[4:])}u",
        "ZEROS_3": f"{units.twice(units.ZERO_BYTES_3)}u",
        "BASE_2": f"{units.twice(units.two_bit_base())}u",
        "MASK_2": f"{units.twice(units.MASK_2)}u",
        **{f"UNIT_{width}": f"{unit}f" for width, unit in units.VALUE_UNITS.items()},
        "SCORE_UNIT": f"{units.score_unit(bits)}f",
        "KV_HEADS": kv_heads,
        "QUERY_GROUP": group,
        "COLUMNS": columns,
        "MICRO_BLOCKS": variant.block_size // MICRO_BLOCK,
        "TILE_BLOCKS": TILE_BLOCKS,
        "CUT_TILES": CUT_TILES,
        "RING_BLOCK": variant.ring_block,
        "RECENT": variant.recent,
        "HAS_BIAS": int(variant.has_bias),
        "OUTPUT": OUTPUTS[variant.output],
        "WARPS": warps,
        "STAGES": STAGES,
        "BLOCKS": WARPS_A_MULTIPROCESSOR // warps,
        "IS_FINAL": int(variant.is_final),
        "HAS_SUMS": int(variant.has_sums),
        "STAGE_BYTES": stage,
        "SHARED_BYTES": max(warps * (STAGES * (stage + 8) + 16), combine),
    }
    return {name: str(value) for name, value in values.items()}


def pack_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """`rotation_matrix(..., inverse=True)` in the order in which the lanes need it: as the left operands of
    mma.m16n8k8, two products' a lane, fp16 [1 or KV heads, head_dim / 16, head_dim / 16, 32, 8]."""
    heads, head_dim, _ = matrix.shape
    # Output channel = tile, upper, row; summed channel = fragment, product, right, column.
    x = matrix.transpose(1, 2).reshape(heads, head_dim // 16, 2, 8, head_dim // 16, 2, 2, 4)
    x = x.permute(0, 1, 4, 3, 7, 5, 6, 2)  # tile, fragment, row, column, product, right, upper
    return x.reshape(heads, head_dim // 16, head_dim // 16, 32, 8).contiguous()


def make_counters(requests: int, kv_heads: int, multiprocessors: int, device: torch.device) -> torch.Tensor:
    """How many parts of a (request, KV head) pair are done, for batches of up to so many requests. Launches leave them
    0; layers may share them, as one stream's launches are one after the other."""
    places = job_places(min(FINAL_WARPS), kv_heads, multiprocessors)
    return torch.zeros(job_count(requests, places) * kv_heads, dtype=torch.int32, device=device)


def make_planners(requests: int, kv_heads: int, multiprocessors: int, device: torch.device) -> dict[int, JobPlanner]:
    """Of jobs, for batches of up to so many requests, by the warps of a block."""
    few = min(requests, most_requests(kv_heads, multiprocessors))
    return {
        warps: JobPlanner(most, job_places(warps, kv_heads, multiprocessors), warps, device)
        for warps, most in zip(FINAL_WARPS, (few, requests), strict=True)
    }


OF_CALL, OF_STEP, OF_LAYER = struct.Struct("=Q"), struct.Struct("=11Q2I"), struct.Struct("=4Q7I4x")
"""`Arguments` of decode.cu, one part behind the other."""


def step_arguments(
    query: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    query_bias: torch.Tensor | None,
    ring: Ring | None,
    sums: torch.Tensor | None = None,
    jobs: torch.Tensor | None = None,
) -> bytes:
    """What a step decides; see `kernels.decode.decode`, and `merge` for `sums`. Of `ring`, the table and the first
    tokens count. With a final grid's `jobs`, int32 [jobs, 4], partial results are fp32 [jobs, KV heads, columns,
    head_dim] and [jobs, KV heads, columns, 2]."""
    assert query.is_contiguous() and query.dtype == torch.float16, (query.dtype, query.stride())
    assert sums is None or sums.is_contiguous(), sums.stride()
    table, first = (0, 0) if ring is None else (ring.block_table.data_ptr(), ring.first.data_ptr())
    return OF_STEP.pack(
        query.data_ptr(), block_table.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        0 if query_bias is None else query_bias.data_ptr(), table, first,
        0 if jobs is None else jobs.data_ptr(), partial_output.data_ptr(), partial_stats.data_ptr(),
        0 if sums is None else sums.data_ptr(),
        block_table.stride(0), 0 if ring is None else ring.block_table.stride(0),
    )  # fmt: skip


def layer_arguments(
    cache: torch.Tensor, ring: Ring | None, output: torch.Tensor, matrix: torch.Tensor, counters: torch.Tensor
) -> bytes:
    """What a layer decides. Of `ring`, the cache counts; of `output` [tokens, KV heads, queries a KV head, head_dim]
    the strides; matrix: of `pack_matrix`."""
    assert cache.stride()[2:] == (cache.shape[3], 1) and output.stride(3) == 1, (cache.stride(), output.stride())
    assert cache.data_ptr() % 16 == 0 and not any(stride % 16 for stride in cache.stride()[:2]), cache.stride()
    strides = (0, 0)
    if ring is not None:
        strides = ring.cache.stride()[:2]
        check_ring(ring, cache.shape[1], output.shape[3])
        piece = math.gcd(MICRO_BLOCK, ring.cache.shape[2]) * ring.cache.shape[3]  # copied at a time
        assert ring.cache.data_ptr() % 16 == 0 and not any(n % 16 for n in (piece, *strides)), (piece, strides)
    return OF_LAYER.pack(
        cache.data_ptr(), 0 if ring is None else ring.cache.data_ptr(), matrix.data_ptr(), counters.data_ptr(),
        *cache.stride()[:2], *strides, head_stride(matrix) // 8,
        output.stride(0), output.stride(2),
    )  # fmt: skip


class CudaDecode:
    """Decode attention over one layer's cache and ring.

    Args:
        page: layout of the cache.
        matrix: of `pack_matrix`.
        counters: of `make_counters`.
        cache: uint8 [blocks, KV heads, block_size, slot_bytes].
        ring: of the layer; None: there is none.
        output: [tokens, KV heads, queries a KV head, head_dim]: its dtype and strides are those of the calls.
        has_bias: whether queries come with a bias.
        has_sums: whether steps come with sums to fill, where the grid is final.
    """

    def __init__(
        self, page: PageLayout, matrix: torch.Tensor, counters: torch.Tensor, cache: torch.Tensor, ring: Ring | None,
        output: torch.Tensor, has_bias: bool, has_sums: bool = False,
    ) -> None:  # fmt: skip
        _, self.kv_heads, self.group, _ = output.shape
        self.page, self.has_bias, self.output, self.kept = page, has_bias, output.dtype, (matrix, counters)
        self.has_sums = has_sums
        self.block_size = cache.shape[2]
        self.ring_block, self.recent = (ring.cache.shape[2], ring.window) if ring else (0, 0)
        layer = layer_arguments(cache, ring, output, matrix, counters)
        self.arguments = bytearray(OF_CALL.size + OF_STEP.size) + layer
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_char.from_buffer(self.arguments)))
        self.address = ctypes.addressof(self.parameters)
        self.device = cache.device.index
        self.launches: dict[tuple[int, bool, int], _Function] = {}

    def __call__(self, shape: Grid, max_query_len: int, requests: int, step: bytes, output: torch.Tensor) -> None:
        """Launch on the current stream.

        Args:
            shape: of `grid`. Where it is final, `output` is filled, else the partial results of `step` are.
            max_query_len: known on the host.
            requests: of the step.
            step: of `step_arguments`.
            output: see above.
        """
        variant = (shape.warps, shape.is_final, max_query_len)
        function = self.launches.get(variant)
        if function is None:
            function = self.launches[variant] = self._function(shape, max_query_len)
        OF_CALL.pack_into(self.arguments, 0, output.data_ptr())
        self.arguments[OF_CALL.size : OF_CALL.size + OF_STEP.size] = step
        stream = torch.cuda.current_stream(self.device).cuda_stream
        across, deep = (1, shape.blocks) if shape.is_final else (shape.blocks, requests)
        (status,) = function.launch(
            function.kernel, across, self.kv_heads, deep, 32 * shape.warps, 1, 1, function.shared_bytes,
            stream, self.address, 0,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"the decode kernel was not launched: {status.name}")

    def prepare(self, longest_decode: int) -> None:
        """Compile and load what any step may ask for, so that none waits; longest_decode: query tokens of a request."""
        for query_len in (1, longest_decode):
            for shape in (*(Grid(warps, 1, True) for warps in FINAL_WARPS), Grid(1, 1, False)):
                self._function(shape, query_len)

    def _function(self, shape: Grid, max_query_len: int) -> _Function:
        variant = Variant(
            shape.warps, shape.is_final, columns_of(self.group, max_query_len), self.block_size, self.ring_block,
            self.recent, self.has_bias, self.output, self.has_sums and shape.is_final,
        )  # fmt: skip
        return _load(tuple(constants(self.page, self.kv_heads, self.group, variant).items()), self.device)


def columns_of(group: int, max_query_len: int) -> int:
    """Columns that the kernel is compiled for."""
    assert group * max_query_len <= COLUMNS, (group, max_query_len)
    return 4 if group * max_query_len <= 4 else COLUMNS


class _Function(NamedTuple):
    launch: Any  # of the driver
    kernel: Any
    shared_bytes: int


@functools.cache
def _load(constants: tuple[tuple[str, str], ...], device: int) -> _Function:
    """The kernel with its constants, for all layers of a process."""
    from cuda.bindings import driver

    from .nvrtc import cubin, load

    values = dict(constants)
    shared_bytes = int(values["SHARED_BYTES"])
    with torch.cuda.device(device):
        return _Function(driver.cuLaunchKernel, load(cubin(values), "decode", shared_bytes), shared_bytes)
