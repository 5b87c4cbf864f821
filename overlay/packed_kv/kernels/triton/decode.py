"""Split-KV decode attention over packed pages: the block table is walked, codes are decoded in registers.

One warp serves one (request, KV head, split) for a tile of 8, 16 or 32 columns: query heads of the KV head times query
tokens. K and V are the left operands. Up to 32 columns, each packed byte is read once. Partial results of the splits
are combined, and V's rotation undone, by `merge.py`. The reference is `reference/attention.attend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...codecs.ring import Ring
from ...gpu_generations import Generation
from ...layout import PageLayout, ring_slot_bytes
from ..checks import check_pages, check_ring
from ..kernel_layout import KernelLayout, kernel_layout
from ..units import LOG2_E
from .fragments import hide_from_optimizer
from .launch import Arguments, Launch, StepLaunch
from .means import (
    NO_BIAS,
    ColumnConstants,
    QueryBias,
    add_first_bias,
    bias_increase,
    bias_of_block,
    block_of,
    columns_and_rows,
    store_first_score,
)
from .pages import decode_key, decode_value, load_key, load_value
from .records import Partials, stride_of_heads
from .ring import RING_UNIT, attend_ring
from .scales import key_scales, online_softmax_update, scale_weights, transpose_weights

_LOG2_E = tl.constexpr(LOG2_E)
MAX_REGISTERS = 128
"""32 x 8192 tokens of isoquant4 on an H200 (docs/lab/tried.md) take 88.7 us at 128 registers,
93.5 at 112 (fewer loads under way), 96.3 at 144 and 97.1 at 168 (fewer programs on an SM). 128 leave no spills at
head_dim 128 with 8 columns."""
ROOMY_REGISTERS = 168
"""Register limit where 128 would spill into the loop over pages: 12 programs on an SM instead of 16."""
WIDE_REGISTERS = 255
"""Register limit of wide tiles. 200 would not raise occupancy: a scheduler has 512 registers per lane."""
OUTPUTS = 8 * 128
"""Columns times channels of a tile that fits `MAX_REGISTERS`."""
TILE_TOKENS = 32
COLUMNS = 8, 16, 32
"""Columns of a tile. 8 columns are the right operand of `mma.m16n8k16`; wider tiles unpack once for several
operands."""
WIDE_HEAD_DIM = 128
"""Most channels of a head with tiles of more than 8 columns; more would not fit the registers."""
_MASKED = tl.constexpr(-1.0e30)


class DecodeLayer(NamedTuple):
    """A layer's arguments of `_decode_kernel`: tensors at the launch, pointers in the kernel.

    Attributes:
        cache: uint8 [blocks, kv_heads, block_size, slot_bytes]; `block_stride` and `head_stride` in int32 words.
        ring: uint8 [blocks, kv_heads, ring_block, ring_slot_bytes], with `ring_block_stride` and `ring_head_stride`;
            where `ring_block` is 0 there is none.
        soft_cap: fp32, times log2 e; read where `has_soft_cap`.
    """

    cache: Any
    ring: Any
    block_stride: Any
    head_stride: Any
    ring_block_stride: Any
    ring_head_stride: Any
    soft_cap: Any


class DecodeConstants(NamedTuple):
    """Constants that `_decode_kernel` is compiled for.

    Attributes:
        columns: of a tile.
        sliding_window: tokens that a query sees; 0: all.
        has_soft_cap: of the scores.
        micro_blocks_a_block: block_size / 16.
        ring_block: tokens of a ring's block; 0: there is no ring.
        recent: tokens of the ring that a query sees.
        layout: of a page.
        has_passes: whether requests are passes over prefixes that a table lists.
    """

    columns: ColumnConstants
    sliding_window: int
    has_soft_cap: bool
    micro_blocks_a_block: int
    ring_block: int
    recent: int
    layout: KernelLayout
    has_passes: bool = False


@triton.jit(
    do_not_specialize=["table_stride", "ring_table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start", "seq_lens", "ring_table", "ring_first"],
)
def _decode_kernel(
    query, query_bias, block_table, query_start, seq_lens, partials, ring_table, ring_first, table_stride,
    ring_table_stride, layer, DECODE: tl.constexpr,
):  # fmt: skip
    """Partial attention of a tile of columns over a split of a request's keys.

    Grid: (splits, KV heads times tiles of columns, requests). With DECODE.has_passes, a request is a pass over a
    prefix (`attention/passes.py`): its query tokens follow the prefix, and see its keys as far as the sliding window
    reaches. The chunk's own tokens are not read.

    Args:
        query: fp16 [tokens, kv_heads, group, head_dim], contiguous, rotated and in powers of 2.
        query_bias: fp32 [tokens, kv_heads * group, biases], contiguous, what scores lack: first the correction of
            position 0 to block 0's bias, then the bias of each block of `tiles_a_block` tiles (0: there is one block).
            Not read where `mean_blocks` is 0: scores lack nothing. A last column gets the score of token 0.
        block_table: int32 [requests, blocks], with `table_stride`.
        query_start, seq_lens: int32 [requests + 1] and [requests]. With DECODE.has_passes, int32 [passes, 4], a
            `PrefixPass` each, and [requests], the first query token of each chunk.
        partials: `Partials`, filled.
        ring_table, ring_first: int32 [requests, ring blocks], with `ring_table_stride`, and [requests].
        layer: `DecodeLayer`. DECODE: `DecodeConstants`.
    """
    COLUMNS: tl.constexpr = DECODE.columns
    KV_HEADS: tl.constexpr = COLUMNS.kv_heads
    QUERY_GROUP: tl.constexpr = COLUMNS.group
    TILE_COLUMNS: tl.constexpr = COLUMNS.tile
    MEAN_BLOCKS: tl.constexpr = COLUMNS.mean_blocks
    TILES_A_BLOCK: tl.constexpr = COLUMNS.tiles_a_block
    SLIDING_WINDOW: tl.constexpr = DECODE.sliding_window
    HAS_SOFT_CAP: tl.constexpr = DECODE.has_soft_cap
    MICRO_BLOCKS_A_BLOCK: tl.constexpr = DECODE.micro_blocks_a_block
    RING_BLOCK: tl.constexpr = DECODE.ring_block
    RECENT: tl.constexpr = DECODE.recent
    LAYOUT: tl.constexpr = DECODE.layout
    HAS_PASSES: tl.constexpr = DECODE.has_passes
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    GROUPS: tl.constexpr = len(LAYOUT.key_vector.groups)
    SCORE_UNIT: tl.constexpr = LAYOUT.score_unit
    INVERSE_SCORE_UNIT: tl.constexpr = 1 / SCORE_UNIT
    KEEPS_FIRST: tl.constexpr = COLUMNS.biases > 1 + MEAN_BLOCKS
    MICRO_BLOCK_WORDS: tl.constexpr = LAYOUT.micro_block_bytes // 4
    splits = tl.num_programs(0)
    split, head = tl.program_id(0), tl.program_id(1) % KV_HEADS
    if HAS_PASSES:
        entry = query_start + 4 * tl.program_id(2)
        request, start, count, seq_len = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    else:
        request = tl.program_id(2)
        start = tl.load(query_start + request)
        count = tl.load(query_start + request + 1) - start
        seq_len = tl.load(seq_lens + request)
    columns, rows = columns_and_rows(tl.program_id(1) // KV_HEADS, COLUMNS)
    if tl.program_id(1) // KV_HEADS * TILE_COLUMNS >= count * QUERY_GROUP:
        return

    first_visible = 0
    position = seq_len - count  # of the first query token
    if HAS_PASSES:
        position = seq_len + start - tl.load(seq_lens + request)
    if SLIDING_WINDOW > 0:
        first_visible = tl.maximum(0, position - SLIDING_WINDOW + 1)
    first_tile = first_visible // 32
    # The ring's tiles follow the pages' tiles. The ring has the last RECENT tokens that a query sees, from token
    # `recent` on. All splits get equally many tiles: were the ring a split of its own, programs beyond the first wave
    # would begin only after a ring split, and the kernel would take longer by that time.
    recent = seq_len
    if RING_BLOCK > 0:
        recent = tl.maximum(tl.load(ring_first + request), first_visible)
    low, high, page_tiles = _split_tiles(split, splits, seq_len, recent, first_tile, RING_BLOCK, RECENT)
    low, high = first_tile + low, first_tile + tl.minimum(high, page_tiles)

    first_row = (start * KV_HEADS + head) * QUERY_GROUP
    outputs = ()
    for _ in tl.static_range(GROUPS):
        outputs = outputs + (tl.zeros([32, TILE_COLUMNS], tl.float32),)
    # Maxima of the tiles of a block of positions, less the bias that their scores lack: adding it to each score would
    # take registers.
    maximum = tl.full([TILE_COLUMNS], _MASKED, tl.float32)
    total = tl.zeros([8, TILE_COLUMNS], tl.float32)  # of each lane's own tokens, so that no tile needs a sum over lanes

    lanes = tl.arange(0, 32)[:, None]
    zero = tl.broadcast_to((lanes + seq_len) >> 31, [32, 2])  # unknown to the compiler; see `decode_codes`
    last_micro_block = (seq_len - 1) // 16
    table = block_table + request.to(tl.int64) * table_stride
    cache_head = layer.cache.to(tl.pointer_type(tl.int32)) + head.to(tl.int64) * layer.head_stride

    if low < high:
        base0, base1 = _tile_bases(cache_head, table, low, last_micro_block, layer.block_stride,
                                   MICRO_BLOCKS_A_BLOCK, MICRO_BLOCK_WORDS)  # fmt: skip
        key_words, key_scale_words = load_key(base0, base1, lanes, LAYOUT)
        value_words, value_scales = load_value(base0, base1, lanes, LAYOUT)
        queries = _load_queries(query + first_row.to(tl.int64) * HEAD_DIM, rows, columns < count * QUERY_GROUP, GROUPS)
        queries = _in_score_unit(queries, LAYOUT)
        for tile in range(low, high):
            base0, base1 = _tile_bases(cache_head, table, tl.minimum(tile + 1, high - 1), last_micro_block,
                                       layer.block_stride, MICRO_BLOCKS_A_BLOCK, MICRO_BLOCK_WORDS)  # fmt: skip
            scores = tl.zeros([32, TILE_COLUMNS], tl.float32)
            for g in tl.static_range(GROUPS):
                key = decode_key(key_words, zero, g, LAYOUT)
                scores += tl.dot(key, queries[g]) * key_scales(key_scale_words, g, GROUPS, TILE_COLUMNS)
            if HAS_SOFT_CAP and MEAN_BLOCKS > 0:
                bias = bias_of_block(query_bias, block_of(tile, TILES_A_BLOCK), first_row, count, COLUMNS)
                scores += bias[None, :] / INVERSE_SCORE_UNIT
                if tile == 0:
                    scores = add_first_bias(scores, tl.arange(0, 32), query_bias, first_row, count, INVERSE_SCORE_UNIT,
                                            COLUMNS)  # fmt: skip
            if TILES_A_BLOCK > 0 and not HAS_SOFT_CAP and tile % TILES_A_BLOCK == 0:
                own = tile // TILES_A_BLOCK  # no harm before the first tile: what is masked stays so
                maximum -= bias_increase(query_bias, own, first_row, count, COLUMNS)
            # The next tile's K is loaded while this tile's V is used, and a tile's V while its K is used: a word's
            # registers are free again when its successor is loaded.
            key_words, key_scale_words = load_key(base0, base1, lanes, LAYOUT)
            # Scores are in units of their own up to the subtraction of the maximum: fused with it, the multiplication
            # is free.
            unit: tl.constexpr = 1.0 if HAS_SOFT_CAP else INVERSE_SCORE_UNIT
            if HAS_SOFT_CAP:  # in units of log2 e; tanh(x) = 1 - 2 / (exp(2 x) + 1)
                cap = layer.soft_cap
                scores = cap * (1 - 2 / (tl.exp2(scores * (INVERSE_SCORE_UNIT * 2 * _LOG2_E / cap)) + 1))

            # Only the tiles at the ends hold tokens that some query does not see, or undefined bytes: a scale of 0
            # makes these 0, not NaN. Only tile 0 holds a key with a mean of its own.
            at_end = tile * 32 + 32 > _page_limit(seq_len - count + 1, recent, RING_BLOCK, RECENT)
            if SLIDING_WINDOW > 0:
                at_end = at_end | (tile * 32 < (position + count if HAS_PASSES else seq_len) - SLIDING_WINDOW)
            if MEAN_BLOCKS > 0 and (KEEPS_FIRST or not HAS_SOFT_CAP):
                at_end = at_end | (tile == 0)
            if at_end:
                tokens = tile * 32 + tl.arange(0, 32)
                if MEAN_BLOCKS > 0 and not HAS_SOFT_CAP:
                    scores = add_first_bias(scores, tokens, query_bias, first_row, count, INVERSE_SCORE_UNIT,
                                            COLUMNS)  # fmt: skip
                column = hide_from_optimizer(tl.program_id(1)) // KV_HEADS * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
                # A query sees tokens limit - SLIDING_WINDOW .. limit - 1.
                limit = position + column // QUERY_GROUP + 1
                end = column * 0 + seq_len if HAS_PASSES else limit
                visible = tokens[:, None] < _page_limit(end, recent, RING_BLOCK, RECENT)[None, :]
                if SLIDING_WINDOW > 0:
                    visible = visible & (tokens[:, None] >= limit[None, :] - SLIDING_WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
                if KEEPS_FIRST and tile == 0:
                    whole = scores * unit
                    if not HAS_SOFT_CAP:
                        whole += bias_of_block(query_bias, 0, first_row, count, COLUMNS)[None, :]
                    store_first_score(whole, tokens, query_bias, first_row, count, COLUMNS)
                lane_tokens = tile * 32 + tl.arange(0, 2)[None, :] * 16 + hide_from_optimizer(lanes) % 4 * 2
                stored = tl.zeros([32, 2], tl.int32)
                for byte in tl.static_range(4):
                    token = lane_tokens + (byte // 2 * 8 + byte % 2)
                    known = (token < seq_len) & (token >= first_visible)
                    stored = stored | tl.where(known, 0xFF << (8 * byte) if byte < 3 else -0x1000000, 0)
                known_scales = ()
                for g in tl.static_range(GROUPS):
                    known_scales = known_scales + (value_scales[g] & stored,)
                value_scales = known_scales

            weights, shrink, maximum, total = online_softmax_update(scores, unit, maximum, total, value_scales)
            pair0, pair1 = transpose_weights(weights)

            new_outputs = ()
            for g in tl.static_range(GROUPS):
                value = decode_value(value_words, zero, g, LAYOUT)
                scaled = scale_weights(pair0, pair1, value_scales[g])
                new_outputs = new_outputs + (tl.dot(value, scaled, outputs[g] * shrink[None, :]),)
            outputs = new_outputs
            value_words, value_scales = load_value(base0, base1, lanes, LAYOUT)
        if MEAN_BLOCKS > 0 and not HAS_SOFT_CAP:
            maximum += bias_of_block(query_bias, block_of(high - 1, TILES_A_BLOCK), first_row, count, COLUMNS)

    columns, rows = columns_and_rows(hide_from_optimizer(tl.program_id(1)) // KV_HEADS, COLUMNS)
    valid = columns < count * QUERY_GROUP
    output_unit: tl.constexpr = RING_UNIT if RING_BLOCK > 0 else 1.0
    outputs = _in_unit(outputs, output_unit, LAYOUT)
    if RING_BLOCK > 0:
        # Recomputed, so that the loop takes as few registers as possible.
        ring_low, ring_high, page_tiles = _split_tiles(
            hide_from_optimizer(tl.program_id(0)), splits, seq_len, recent, first_visible // 32, RING_BLOCK, RECENT
        )
        ring_low = recent + 32 * tl.maximum(ring_low - page_tiles, 0)
        ring_high = tl.minimum(recent + 32 * (ring_high - page_tiles), seq_len)
        if ring_low < ring_high:
            outputs, maximum, total = attend_ring(
                _load_queries(query + first_row.to(tl.int64) * HEAD_DIM, rows, valid, GROUPS),
                (outputs, maximum, total),
                (
                    layer.ring + head.to(tl.int64) * layer.ring_head_stride,
                    layer.ring_block_stride,
                    ring_table + request.to(tl.int64) * ring_table_stride,
                ),
                (ring_low, ring_high, seq_len),
                position + columns // QUERY_GROUP + 1, layer.soft_cap, (query_bias, first_row, count), DECODE,
            )  # fmt: skip
    _store_partial(partials.output, partials.stats, outputs, maximum, total, first_row.to(tl.int64) * splits + split,
                   rows * splits, valid, output_unit, GROUPS)  # fmt: skip


@triton.jit
def _split_tiles(split, splits, seq_len, recent, first_tile, RING_BLOCK: tl.constexpr, RECENT: tl.constexpr):
    """Return (low, high, page_tiles): the split attends to tiles low .. high - 1; pages' tiles are numbered before the
    ring's."""
    page_tiles = tl.cdiv(_page_limit(seq_len, recent, RING_BLOCK, RECENT), 32) - first_tile
    tiles = page_tiles
    if RING_BLOCK > 0:
        page_tiles = tl.maximum(page_tiles, 0)
        tiles = page_tiles + tl.cdiv(tl.maximum(seq_len - recent, 0), 32)
    a_split = tl.cdiv(tiles, splits)
    return split * a_split, tl.minimum(split * a_split + a_split, tiles), page_tiles


@triton.jit
def _in_unit(outputs, UNIT: tl.constexpr, LAYOUT: tl.constexpr):
    """Outputs of pages in one unit for all groups."""
    result = ()
    for g in tl.static_range(len(LAYOUT.key_vector.groups)):
        result = result + (outputs[g] * (LAYOUT.value_vector.groups[g].factor / UNIT),)
    return result


@triton.jit
def _in_score_unit(queries, LAYOUT: tl.constexpr):
    """Scale queries by powers of 2 so that scores over all groups have one unit; by 1 where all groups have the same
    bits."""
    result = ()
    SCORE_UNIT: tl.constexpr = LAYOUT.score_unit
    for g in tl.static_range(len(LAYOUT.key_vector.groups)):
        result = result + ((queries[g] * (LAYOUT.key_vector.groups[g].factor * SCORE_UNIT)).to(tl.float16),)
    return result


@triton.jit
def _store_partial(
    partial_output, partial_stats, outputs, maximum, total, slot, rows, valid, unit, GROUPS: tl.constexpr
):  # fmt: skip
    """Write the columns' sums and outputs, these times `unit`, at `slot` plus `rows` [columns]."""
    channels = tl.arange(0, 32)
    partial_output += slot * (32 * GROUPS)
    partial_stats += slot * 2
    for g in tl.static_range(GROUPS):
        pointers = partial_output + rows[None, :] * (32 * GROUPS) + g * 32 + channels[:, None]
        tl.store(pointers, outputs[g] * unit, mask=valid[None, :])
    tl.store(partial_stats + rows * 2, maximum, mask=valid)
    tl.store(partial_stats + rows * 2 + 1, tl.sum(total, 0), mask=valid)


@triton.jit
def _load_queries(query, rows, valid, GROUPS: tl.constexpr):
    """fp16 [32 channels, columns] of each group."""
    channels = tl.arange(0, 32)
    queries = ()
    for g in tl.static_range(GROUPS):
        pointers = query + rows[None, :] * (32 * GROUPS) + g * 32 + channels[:, None]
        queries = queries + (tl.load(pointers, mask=valid[None, :], other=0.0),)
    return queries


@triton.jit
def _page_limit(limit, recent, RING_BLOCK: tl.constexpr, RECENT: tl.constexpr):
    """End of the tokens that a query reads from pages, if it sees the tokens below `limit`. It reads the rest from the
    ring, which begins at `recent`."""
    if RING_BLOCK > 0:
        limit = tl.minimum(limit, tl.maximum(limit - RECENT, recent))
    return limit


@triton.jit
def _tile_bases(
    cache_head, table, tile, last_micro_block, block_stride,
    MICRO_BLOCKS_A_BLOCK: tl.constexpr, MICRO_BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Pointers to the 2 micro-blocks of a tile; the second is the first again where the sequence has ended."""
    first = tile * 2
    second = tl.minimum(first + 1, last_micro_block)
    block0 = tl.load(table + first // MICRO_BLOCKS_A_BLOCK).to(tl.int64)
    block1 = tl.load(table + second // MICRO_BLOCKS_A_BLOCK).to(tl.int64)
    base0 = cache_head + block0 * block_stride + first % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS
    base1 = cache_head + block1 * block_stride + second % MICRO_BLOCKS_A_BLOCK * MICRO_BLOCK_WORDS
    return base0, base1


def most_registers(page: PageLayout, generation: Generation, *, has_bias: bool) -> int:
    """Return the registers of a thread for tiles of 8 columns, so that the loop over pages does not spill.

    From sm_100 on ptxas needs more registers: there, biases together with sign words of several groups do not fit 128.
    """
    signed = max(vector.signed_groups for vector in page.vectors)
    return ROOMY_REGISTERS if generation.capability >= (10, 0) and has_bias and signed > 1 else MAX_REGISTERS


@dataclass(frozen=True)
class DecodeShape:
    """Shape and options that, with the cache, decide the variant of the kernel.

    `sliding_window`: tokens that a query sees, itself included, or None; `logits_soft_cap`: of the scores before the
    softmax, or None; `bias`: of queries (`RotateQueryLaunch`); `max_registers`: of a thread, at head_dim up to
    `WIDE_HEAD_DIM` and up to `OUTPUTS` outputs or 8 columns.
    """

    kv_heads: int
    group: int
    head_dim: int
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    bias: QueryBias = NO_BIAS
    max_registers: int = MAX_REGISTERS

    def tiles(self, max_query_len: int) -> tuple[int, int]:
        """Columns of a tile and tiles of a KV head, for requests with at most `max_query_len` query tokens."""
        columns = self.group * max_query_len
        known = COLUMNS if self.head_dim <= WIDE_HEAD_DIM else COLUMNS[:1]
        tile = next((count for count in known if count >= columns), known[-1])
        return tile, -(-columns // tile)

    def is_wide(self, columns: int) -> bool:
        """True if tiles of this many columns take `WIDE_REGISTERS`."""
        return columns > COLUMNS[0] and columns * self.head_dim > OUTPUTS

    def register_limit(self, columns: int) -> int | None:
        """Limit of registers per thread with tiles of this many columns; None: no limit."""
        if self.is_wide(columns):
            return WIDE_REGISTERS
        return self.max_registers if self.head_dim <= WIDE_HEAD_DIM else None

    def programs(self, columns: int, generation: Generation) -> int:
        """Programs with tiles of this many columns that an SM holds at once; a program is one warp."""
        queries = 2 * columns * self.head_dim  # bytes of shared memory: fp16
        return generation.resident_blocks(self.register_limit(columns) or WIDE_REGISTERS, queries)

    def splits(self, requests: int, max_query_len: int, sm_count: int, generation: Generation) -> int:
        """Splits of each request: a wave of programs, at most 128.

        It knows no sequence length, so that a CUDA graph can hold the launch.
        """
        columns, tiles = self.tiles(max_query_len)
        programs = self.programs(columns, generation) * sm_count
        return max(1, min(128, programs // (requests * self.kv_heads * tiles)))


class DecodeLaunch(Launch):
    """The decode kernel for tiles of `columns` columns, over a layer's `cache` and, for the recent tokens, its `ring`.
    `has_passes`: for steps of `passes`. Called without tensors."""

    def __init__(
        self, page: PageLayout, shape: DecodeShape, columns: int, cache: torch.Tensor, ring: Ring | None,
        *, has_passes: bool = False,
    ) -> None:  # fmt: skip
        check_pages(cache)
        if ring is not None:
            check_ring(ring.cache, shape.kv_heads, ring_slot_bytes(shape.head_dim))
        of_ring = cache if ring is None else ring.cache
        soft_cap, bias = shape.logits_soft_cap or 0.0, shape.bias
        registers = shape.register_limit(columns)
        layer = DecodeLayer(
            cache, of_ring, cache.stride(0) // 4, stride_of_heads(cache) // 4, of_ring.stride(0),
            stride_of_heads(of_ring), soft_cap * LOG2_E,
        )  # fmt: skip
        decode = DecodeConstants(
            ColumnConstants(shape.kv_heads, shape.group, columns, bias.blocks, bias.tiles_a_block, bias.columns),
            shape.sliding_window or 0, bool(soft_cap), cache.shape[2] // 16, ring.cache.shape[2] if ring else 0,
            ring.window if ring else 0, kernel_layout(page), has_passes,
        )  # fmt: skip
        super().__init__(
            _decode_kernel, Arguments(layer), dict(DECODE=decode),
            num_warps=1, num_stages=1, enable_fp_fusion=True, **({"maxnreg": registers} if registers else {}),
        )  # fmt: skip

    @staticmethod
    def step(
        shape: DecodeShape, max_query_len: int, query: torch.Tensor, block_table: torch.Tensor,
        query_start: torch.Tensor, seq_lens: torch.Tensor, partial_output: torch.Tensor, partial_stats: torch.Tensor,
        query_bias: torch.Tensor | None, ring: Ring | None,
    ) -> StepLaunch:  # fmt: skip
        """`max_query_len`: most query tokens of a request, known on the host, so that a CUDA graph can hold the
        launch. `query_bias`: of `RotateQueryLaunch`, or None. `ring`: the step's block table and first tokens."""
        assert query.is_contiguous(), query.stride()
        table, first = (block_table, seq_lens) if ring is None else (ring.block_table, ring.first)
        arguments = Arguments(
            query, partial_stats if query_bias is None else query_bias, block_table, query_start, seq_lens,
            Partials(partial_output, partial_stats), table, first, block_table.stride(0), table.stride(0),
        )  # fmt: skip
        tiles = shape.kv_heads * shape.tiles(max_query_len)[1]
        return StepLaunch((partial_output.shape[2], tiles, len(seq_lens)), arguments)

    @staticmethod
    def passes(
        shape: DecodeShape, pass_tokens: int, query: torch.Tensor, block_table: torch.Tensor, table: torch.Tensor,
        first_rows: torch.Tensor, partial_output: torch.Tensor, partial_stats: torch.Tensor,
        query_bias: torch.Tensor | None, ring: Ring | None,
    ) -> StepLaunch:  # fmt: skip
        """The launch over passes of up to `pass_tokens` query tokens. `table`: int32 [passes, 4]. `first_rows`: int32
        [requests or more], first query token of each chunk. `ring`: before it has the chunks' own tokens. The other
        arguments are as in `step`."""
        of_requests = block_table, table, first_rows, partial_output, partial_stats, query_bias, ring
        (splits, tiles, _), arguments = DecodeLaunch.step(shape, pass_tokens, query, *of_requests)
        return StepLaunch((splits, tiles, len(table)), arguments)
