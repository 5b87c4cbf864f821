"""The constants and arguments of `decode.cu`, and its launch; `grids.py` cuts batches."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...codecs.ring import Ring
from ...gpu_generations import generation_of
from ...layout import MICRO_BLOCK, PageLayout, ring_slot_bytes
from ..checks import check_int32, check_pages, check_ring, head_stride
from ..kernel_layout import KernelLayout, kernel_layout
from ..triton.means import Means
from . import pass_tokens
from .code_constants import decoder_constants, group_constants
from .grids import (
    HOPPER,
    NARROW,
    UNPACKERS,
    Grid,
    block_kinds,
    column_count,
    grid_inputs,
    has_unpackers,
    is_wide,
    pass_count,
)
from .kernel import Compilation, CudaKernel
from .schedule import CUT_TILES, PART_SHIFT, SLOT_SHIFT
from .source import DECODE, UNPACKED, Source

OUTPUTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
STAGES, UNPACKER_STAGES = 2, 3
"""Tiles that a warp has in flight. In `roles_unpack.cuh` a warp that only unpacks needs three: a ring tile takes the
room of two."""
TILE_BLOCKS = 2
"""Micro-blocks of a warp's tile. Warps that only unpack, variants of 32 columns, and teams of 8 warps have one."""


class PairVariant(NamedTuple):
    """The constants of the kernel that depend on the batch and the layer.

    columns is one of `COLUMN_COUNTS`; ring_block is the tokens of a ring's block, or 0 without a ring; recent is the
    tokens of the recent window; output is the output's dtype; has_lse says whether blocks that write the output write
    log-sum-exps too; tiles_a_block is how many tiles of pages one block of means serves, or 0 if there is one block;
    passes is how many passes over the keys of a request its query tokens take; has_pass_table says whether requests are
    passes over prefixes that a table lists (`prefix_launch.py`); capability is the GPU's; has_value_means says whether
    values are centred.
    """

    warps: int
    is_final: bool
    columns: int
    block_size: int
    ring_block: int
    recent: int
    has_bias: bool
    output: torch.dtype
    has_lse: bool = False
    tiles_a_block: int = 0
    passes: int = 1
    has_pass_table: bool = False
    capability: tuple[int, int] = HOPPER.capability
    has_value_means: bool = False


def constants(page: PageLayout, kv_heads: int, group: int, variant: PairVariant) -> dict[str, str]:
    """Return the definitions that `decode.cu` is compiled with.

    Args:
        page: layout of the cache.
        kv_heads: KV heads of this rank.
        group: query heads per KV head.
        variant: what else the kernel depends on.
    """
    layout, warps, columns = kernel_layout(page), variant.warps, variant.columns
    unpackers = UNPACKERS if has_unpackers(page) and columns > NARROW else 0
    shares = is_wide(columns, layout.head_dim)
    tile_blocks = 1 if unpackers or columns == 32 or (shares and warps == 8) else TILE_BLOCKS
    stages = UNPACKER_STAGES if unpackers else STAGES
    smaller = TILE_BLOCKS // tile_blocks  # tiles than the schedule and blocks of means count
    values: dict[str, object] = {
        **_layout_constants(layout),
        **group_constants(layout),
        **decoder_constants(),
        "KV_HEADS": kv_heads,
        "QUERY_GROUP": group,
        "COLUMNS": columns,
        "PASSES": variant.passes,
        "PASS_TOKENS": pass_tokens(group),
        "HAS_PASS_TABLE": int(variant.has_pass_table),
        "MICRO_BLOCKS": variant.block_size // MICRO_BLOCK,
        "TILE_BLOCKS": tile_blocks,
        "CUT_TILES": CUT_TILES * smaller,
        "SLOT_SHIFT": SLOT_SHIFT,
        "PART_SHIFT": PART_SHIFT,
        "RING_BLOCK": variant.ring_block,
        "RECENT": variant.recent,
        "HAS_BIAS": int(variant.has_bias),
        "TILES_A_BLOCK": variant.tiles_a_block * smaller,
        "OUTPUT": OUTPUTS[variant.output],
        "WARPS": warps,
        "IS_WIDE": int(shares),
        "UNPACKERS": unpackers,
        "STAGES": stages,
        "BLOCKS": grid_inputs(page, kv_heads, 1, generation_of(variant.capability)).warps_per_sm(columns) // warps,
        "IS_FINAL": int(variant.is_final),
        "HAS_LSE": int(variant.has_lse),
        "HAS_VALUE_MEANS": int(variant.has_value_means),
    }
    return {name: str(value) for name, value in values.items()}


def source_of(constants: Mapping[str, str], capability: tuple[int, int] = HOPPER.capability) -> Source:
    """Return the source of a variant for a GPU."""
    return UNPACKED if int(constants["UNPACKERS"]) else DECODE._replace(architecture="sm_{}{}".format(*capability))


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; of a CPU, where nothing is launched, Hopper's."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER.capability


def _layout_constants(layout: KernelLayout) -> dict[str, object]:
    """Return where `layout` has the planes of K and V, as C++ constants."""
    ring = layout.ring
    constants: dict[str, object] = {"RING_SLOT_BYTES": ring.slot_bytes, "SCORE_UNIT": f"{layout.score_unit}f"}
    vectors = (layout.key_vector, layout.value_vector)
    for name, vector, codes, scales in zip(("KEY", "VALUE"), vectors, ring.codes, ring.scales, strict=True):
        constants |= {
            f"{name}_WORDS_AT": vector.words_at,
            f"{name}_HALF_WORDS_AT": vector.half_words_at,
            f"{name}_SCALES_AT": vector.scales_at,
            f"RING_{name}S_AT": codes,
            f"RING_{name}_SCALES_AT": scales,
        }
    return constants


def pack_matrix(matrix: torch.Tensor, means: Means | None = None) -> torch.Tensor:
    """Return a rotation matrix in the order in which lanes load it, as left operands of mma.m16n8k8.

    Args:
        matrix: fp16 [1 or KV heads, head_dim, head_dim], of `rotation_matrix(..., inverse=True)`.
        means: of V, or None.

    Returns:
        fp16 [1 or KV heads, head_dim / 16, head_dim / 16, 32, 8], where a lane's 8 elements belong to two products.
        With means [1 or KV heads, elements]: behind the matrix of a head are fp32 numbers [head_dim, 2]: the mean, and
        the mean of position 0 minus it.
    """
    heads, head_dim, _ = matrix.shape
    # Output channel = tile, upper, row; summed channel = fragment, product, right, column.
    x = matrix.transpose(1, 2).reshape(heads, head_dim // 16, 2, 8, head_dim // 16, 2, 2, 4)
    x = x.permute(0, 1, 4, 3, 7, 5, 6, 2)  # tile, fragment, row, column, product, right, upper
    packed = x.reshape(heads, head_dim // 16, head_dim // 16, 32, 8).contiguous()
    if means is None:
        return packed
    mean, _, of_first = means.rows.unbind(1)
    behind = torch.stack((mean, of_first - mean), dim=-1).contiguous().view(torch.float16).flatten(1)
    heads = max(heads, len(behind))
    return torch.cat((packed.flatten(1).expand(heads, -1), behind.expand(heads, -1)), dim=1).contiguous()


def has_means(packed: torch.Tensor) -> bool:
    """Return whether a matrix of `pack_matrix` has means behind it."""
    return packed.dim() == 2


CALL_ARGUMENTS, STEP_ARGUMENTS = struct.Struct("=Q"), struct.Struct("=11Q3I4x")
LAYER_ARGUMENTS = struct.Struct("=4Q7I4x")
"""The three parts of `Arguments` in decode.cu, in order."""


def step_arguments(
    query: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    query_bias: torch.Tensor | None,
    ring: Ring | None,
    lse: torch.Tensor | None = None,
    schedule: torch.Tensor | None = None,
) -> bytes:
    """Return the arguments that are the same for all layers of a step. They are addresses: keep the tensors.

    Args:
        query: fp16 [tokens, KV heads, queries per KV head, head_dim], contiguous, rotated and scaled (`rotate_query`).
        block_table: int32 [requests, blocks].
        query_start: int32 [requests + 1], first query token of each request, and their number.
        seq_lens: int32 [requests], tokens in the cache, query tokens included.
        partial_output: fp32, filled by blocks that do not write the output: [tokens, query heads, splits, head_dim], or
            with a schedule [items, KV heads, columns, head_dim].
        partial_stats: fp32 [..., 2], the maximum of the scores and the sum of the weights of each partial output.
        query_bias: fp32 [tokens, query heads, 1 + blocks of means], contiguous, in log2 units: the correction of token
            0, and the scores' bias from each block's mean; one more column, -inf, where values are centred; None: keys
            are not centred.
        ring: block table int32 [requests, blocks] and first tokens int32 [requests] are read; None: there is none.
        lse: fp32 [tokens, query heads], contiguous: filled with the natural log-sum-exps of the scores where blocks
            write the output; None: not wanted.
        schedule: int32 [items, 4] of `Scheduler`; None: the grid is not final.
    """
    assert query.is_contiguous() and query.dtype == torch.float16, (query.dtype, query.stride())
    assert lse is None or lse.is_contiguous(), lse.stride()
    assert query_bias is None or (query_bias.is_contiguous() and query_bias.dtype == torch.float32), query_bias.stride()
    assert query_bias is None or query_bias.numel() <= 1 << 32, query_bias.shape  # `Biases.rows` are u32
    ring_table, ring_first = (None, None) if ring is None else (ring.block_table, ring.first)
    check_int32(block_table, query_start, seq_lens, ring_table, ring_first, schedule)
    tensors = (
        query, block_table, query_start, seq_lens, query_bias, ring_table, ring_first, schedule, partial_output,
        partial_stats, lse,
    )  # fmt: skip
    strides = (
        block_table.stride(0), 0 if ring_table is None else ring_table.stride(0),
        0 if query_bias is None else query_bias.shape[2],
    )  # fmt: skip
    return STEP_ARGUMENTS.pack(*(0 if x is None else x.data_ptr() for x in tensors), *strides)


def layer_arguments(
    cache: torch.Tensor, ring: Ring | None, output: torch.Tensor, matrix: torch.Tensor, counters: torch.Tensor
) -> bytes:
    """Return the arguments that are fixed for a layer. They are addresses: keep the tensors.

    Args:
        cache: uint8 [blocks, KV heads, block_size, slot_bytes]; its address and strides are multiples of 16 bytes.
        ring: cache uint8 [blocks, KV heads, ring block, ring slot bytes], likewise aligned; None: there is none.
        output: fp16, bf16 or fp32 [tokens, KV heads, queries per KV head, head_dim], unit stride over channels.
        matrix: of `pack_matrix`, with V's means where these are subtracted from stored values.
        counters: int32 zeros [items * KV heads], of `make_counters`.
    """
    check_pages(cache)
    assert output.stride(3) == 1, output.stride()
    strides: tuple[int, ...] = (0, 0)
    if ring is not None:
        strides = ring.cache.stride()[:2]
        check_ring(ring.cache, cache.shape[1], ring_slot_bytes(output.shape[3]), 16)
        piece = math.gcd(MICRO_BLOCK, ring.cache.shape[2]) * ring.cache.shape[3]  # bytes of one bulk copy
        assert piece % 16 == 0, piece
    return LAYER_ARGUMENTS.pack(
        cache.data_ptr(), 0 if ring is None else ring.cache.data_ptr(), matrix.data_ptr(), counters.data_ptr(),
        *cache.stride()[:2], *strides, head_stride(matrix) // 8, output.stride(0), output.stride(2),
    )  # fmt: skip


class CudaDecode(CudaKernel[tuple[int, bool, int]]):
    """Decode attention over one layer's cache and ring. Keys of variants are the grid's warps and `is_final`, and the
    most query tokens of a request.

    Args:
        page: layout of the cache.
        matrix: of `pack_matrix`.
        counters: int32 zeros [items * KV heads], of `make_counters`.
        cache: uint8 [blocks, KV heads, block_size, slot_bytes]; its address and strides are multiples of 16 bytes.
        ring: cache uint8 [blocks, KV heads, ring block, ring slot bytes], likewise aligned; None: there is none.
        output: fp16, bf16 or fp32 [tokens, KV heads, queries per KV head, head_dim], unit stride over channels; calls
            have its dtype and strides.
        tiles_a_block: tiles of pages that one block of means serves, 0: there is one block; None: keys are not centred,
            and steps have no query bias.
        has_lse: whether steps whose grid is final have log-sum-exps to fill.
    """

    def __init__(
        self, page: PageLayout, matrix: torch.Tensor, counters: torch.Tensor, cache: torch.Tensor, ring: Ring | None,
        output: torch.Tensor, tiles_a_block: int | None, has_lse: bool = False,
    ) -> None:  # fmt: skip
        _, self.kv_heads, self.group, _ = output.shape
        self.page, self.tiles_a_block, self.has_lse, self.output = page, tiles_a_block, has_lse, output.dtype
        self.has_value_means = has_means(matrix)
        self.keep_alive = matrix, counters
        self.block_size, self.capability = cache.shape[2], capability_of(cache.device)
        self.ring_block, self.recent = (ring.cache.shape[2], ring.window) if ring else (0, 0)
        layer = layer_arguments(cache, ring, output, matrix, counters)
        super().__init__(CALL_ARGUMENTS.size + STEP_ARGUMENTS.size, layer, cache.device.index)

    def __call__(self, grid: Grid, max_query_len: int, requests: int, step: bytes, output: torch.Tensor) -> None:
        """Launch on the current stream; in a `Precompiler` block, do nothing.

        Args:
            grid: of `grids.grid`. If it is final, `output` is filled, otherwise the partial results of `step`.
            max_query_len: most query tokens of a request, known on the host.
            requests: of the step.
            step: of `step_arguments`.
            output: as in the constructor, of any number of tokens.
        """
        key = (grid.warps, grid.is_final, max_query_len)
        functions = self.functions.get(key) or self.functions_of(key)
        if functions is None:
            return
        launch, kernel, threads, shared_bytes = functions[0]
        x, z = (1, grid.blocks) if grid.is_final else (grid.blocks, requests * pass_count(self.group, max_query_len))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self.lock:
            self.arguments[: self.layer_at] = CALL_ARGUMENTS.pack(output.data_ptr()) + step
            launch(kernel, (x, self.kv_heads, z), threads, shared_bytes, stream, self.address)

    def compile_variants(self, longest_decode: int) -> None:
        """Compile and load every variant that a step may need, so that no step waits for one. In a `Precompiler` block,
        note them.

        Args:
            longest_decode: most query tokens of a request, drafts included.
        """
        inputs = grid_inputs(self.page, self.kv_heads, 1, generation_of(self.capability))
        lengths = {
            (self._columns(length), pass_count(self.group, length)): length for length in range(1, longest_decode + 1)
        }
        keys = []
        for (columns, _), length in lengths.items():
            few, many = block_kinds(inputs, columns)
            final = [Grid(warps, 1, True) for warps in {few.warps, many.warps}]
            for grid in (*final, Grid(few.warps if is_wide(columns, inputs.head_dim) else 1, 1, False)):
                keys.append((grid.warps, grid.is_final, length))
        self.compile(keys)

    def _columns(self, query_len: int) -> int:
        return column_count(self.group, query_len, unpackers=has_unpackers(self.page))

    def compilation(self, key: tuple[int, bool, int]) -> Compilation:
        """Return what a variant is compiled from."""
        warps, is_final, max_query_len = key
        variant = PairVariant(
            warps, is_final, self._columns(max_query_len), self.block_size, self.ring_block,
            self.recent, self.tiles_a_block is not None, self.output, self.has_lse and is_final,
            self.tiles_a_block or 0, pass_count(self.group, max_query_len), capability=self.capability,
            has_value_means=self.has_value_means,
        )  # fmt: skip
        values = constants(self.page, self.kv_heads, self.group, variant)
        return Compilation.of(source_of(values, self.capability), values)
