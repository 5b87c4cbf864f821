"""Records of a layer and the function that store kernels share: it rotates, quantises, packs and writes the groups of
one section of new vectors.

The bytes equal those of `PagedCodec.write`. The rounding rule, which makes them equal: everything is fp32; each add,
subtract and multiply is rounded to nearest even on its own (no fused multiply-add, no flushing of denormals), in the
order that `codecs/rotations.py` and `codecs/scalar.py` state; a tie between two codes takes the lower magnitude, a tie
between two scales the one tried first. NaN and infinities become 0; other numbers are centred, scaled and clamped to
+-INPUT_LIMIT.

A program takes `ROWS` groups of 32 channels, one a row, of one section (outlier or regular channels) of K or of V. A
channel's index in its group, d4..d0, is split between lanes and registers:

    tensor [ROWS * 4]   lanes: row * 4 + t, t = d2 d1
    tuple of 8 tensors  registers: k = d4 d3 d0

so that a lane holds all codes of one word of K (see layout.py), the error tree's levels 16, 8 and 1 stay inside a lane,
and rotations exchange lanes only for strides 2, 4, 32, 64, ... (lane ^ 1, 2, 4, 8, ...).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import power_of_2
from ..kernel_layout import KernelLayout, LatentRowLayout
from .pages import KEY, VALUE
from .quantize import Transform, hadamard, load_rotated, quantize, round_to_half, search_scale
from .ring import store_ring
from .words import store_codes

ROWS = 8
"""Groups of a program: one for every 4 lanes of its one warp."""


class Vectors(NamedTuple):
    """Tensors and strides by which a store kernel reads new vectors of K or V.

    Attributes:
        token_stride, head_stride: of the new vectors, int32.
        channels: int64 [1 or heads, stored_dim], the channels in packing order; read where `Transform.ordered`.
        channels_stride: over heads, int32.
        table: fp32 [1 or heads, 4, stored_dim] of `ChannelTransform.table`; read where `Transform.has_table`.
        table_stride: over heads, int32.
    """

    token_stride: Any
    head_stride: Any
    channels: Any
    channels_stride: Any
    table: Any
    table_stride: Any


class StoreLayer(NamedTuple):
    """Arguments of a store kernel that stay: tensors at the launch, pointers in the kernel.

    Attributes:
        cache: `Blocks`, the pages.
        key, value: `Vectors`; latents are K, and `value` is not read.
        constants: fp32 [stored_dim], the rotations' constants by packed channel.
        spectrum: fp32 [mean_blocks, 2, stored_dim]; read where `Transform.mean_block_tokens` is not 0.
        ring: `Blocks`, written where `StoreConstants.block_sizes` is not 0.
    """

    cache: Any
    key: Any
    value: Any
    constants: Any
    spectrum: Any
    ring: Any


class StoreConstants(NamedTuple):
    """Constants that a store kernel is compiled for.

    Attributes:
        heads: KV heads.
        block_sizes: tokens of a page, and of a ring's block; 0: nothing is written there.
        transform: of channels.
        dims: channels of a head of K and of V, as they come.
        layout: of a page.
        rows: of a program, each a group of 32 channels.
        latent_rows: layout of latent rows, where pages have them, else None.
        parts: of a program's rows; see `store_section`.
    """

    heads: int
    block_sizes: tuple[int, int]
    transform: Transform
    dims: tuple[int, int]
    layout: KernelLayout
    rows: int
    latent_rows: LatentRowLayout | None = None
    parts: int = 1


def rows_of(layout: KernelLayout) -> int:
    """Rows of a program, enough for a vector's section."""
    sections = (*layout.key_vector.sections, *layout.value_vector.sections)
    return max(ROWS, *(power_of_2(section.groups) for section in sections))


padded_groups = triton.constexpr_function(power_of_2)
"""Rows that a vector's section takes: a power of two, so that a rotation exchanges row and row ^ 2^i."""


@triton.jit
def store_section(
    source, slots_ptr, tokens, positions_ptr, ring_slots_ptr, ring_tokens, layer, is_key, programs,
    NUMBER: tl.constexpr, OF_KEY: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Store the groups of section NUMBER of some vectors (token, head). `programs` is (program, split): with a split of
    1 the rows belong to the program alone; else `split` programs share them: all rotate whole vectors, and each
    quantises parts / split of the rows' parts, one after the other.

    `source`: pointer to the new vectors of K, with `is_key`, or of V, and the fields of their `Vectors`. OF_KEY:
    whether the section is in K's `PackedVector`; arbitrary where K's and V's sections are the same. The other arguments
    are `store_kernel`'s.
    """
    LAYOUT: tl.constexpr = STORE.layout
    HEADS: tl.constexpr = STORE.heads
    ROWS: tl.constexpr = STORE.rows
    PARTS: tl.constexpr = STORE.parts
    RING_BLOCK: tl.constexpr = STORE.block_sizes[1]
    TRANSFORM: tl.constexpr = STORE.transform
    VECTOR: tl.constexpr = LAYOUT.key_vector if OF_KEY else LAYOUT.value_vector
    SECTION: tl.constexpr = VECTOR.sections[NUMBER]
    GROUPS: tl.constexpr = SECTION.groups
    FIRST_GROUP: tl.constexpr = SECTION.first_group
    HEAD_GROUPS: tl.constexpr = len(LAYOUT.key_vector.groups)
    x_ptr, token_stride, head_stride, channels_ptr, channels_stride, table_ptr, table_stride = source
    program, split = programs
    index = tl.arange(0, 4 * ROWS)
    block = program // split if PARTS > 1 else program
    group, vector, exists = _own_groups(index, block, tokens, HEADS, ROWS, GROUPS)
    token, head = (vector // HEADS).to(tl.int64), (vector % HEADS).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
    ring_slot = slot
    if RING_BLOCK > 0:
        ring_slot = tl.load(ring_slots_ptr + token, mask=exists & (token < ring_tokens), other=-1).to(tl.int64)

    x_row = x_ptr + token * token_stride + head * head_stride
    channels_row = channels_ptr + head * channels_stride
    table_row = table_ptr + head * table_stride
    mean_row, turn_row, turned = table_row, layer.spectrum, tl.where(is_key, exists, False)
    if TRANSFORM.has_positions:
        position = tl.load(positions_ptr + token, mask=exists, other=1)
        mean_row += tl.where(position == 0, 2 * HEAD_GROUPS * 32, 0)
        if TRANSFORM.mean_block_tokens > 0:
            MEAN_BLOCKS: tl.constexpr = TRANSFORM.mean_blocks
            MEAN_BLOCK_TOKENS: tl.constexpr = TRANSFORM.mean_block_tokens
            mean_block = tl.minimum(tl.maximum(position, 0) // MEAN_BLOCK_TOKENS, MEAN_BLOCKS - 1).to(tl.int32)
            turn_row += mean_block * (2 * HEAD_GROUPS * 32)
            turned = turned & (position != 0)
    scale_row = table_row + 3 * HEAD_GROUPS * 32
    KEY_DIM: tl.constexpr = STORE.dims[KEY]
    VALUE_DIM: tl.constexpr = STORE.dims[VALUE]
    dim = KEY_DIM if is_key else VALUE_DIM
    x = load_rotated(
        x_row, channels_row, layer.constants, FIRST_GROUP + group, exists, index,
        (mean_row, scale_row, turn_row, turned), dim, HEAD_GROUPS * 32, KEY_DIM % 32 != 0 or VALUE_DIM != KEY_DIM,
        TRANSFORM,
    )  # fmt: skip
    if TRANSFORM.rotation == "hadamard":
        x = hadamard(x, group, index, GROUPS)
    if PARTS == 1:
        _store_groups(x, group, head, slot, ring_slot, layer, is_key, NUMBER, VECTOR, STORE)
    else:
        first = program % split * (PARTS // split)
        for part in range(first, first + PARTS // split):
            own = part * (4 * ROWS // PARTS) + tl.arange(0, 4 * ROWS // PARTS)
            y = ()
            for k in tl.static_range(8):
                y += (tl.gather(x[k], own, 0),)
            own_group, own_vector, _ = _own_groups(own, block, tokens, HEADS, ROWS, GROUPS)
            _store_groups(
                y, own_group, (own_vector % HEADS).to(tl.int64), tl.gather(slot, own, 0), tl.gather(ring_slot, own, 0),
                layer, is_key, NUMBER, VECTOR, STORE,
            )  # fmt: skip


@triton.jit
def _own_groups(index, block, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Group in the section, vector (token, head), and whether it exists, for the lanes `index` of a block of ROWS
    rows."""
    A_VECTOR: tl.constexpr = padded_groups(GROUPS)
    row = index // 4
    vector, group = block * (ROWS // A_VECTOR) + row // A_VECTOR, row % A_VECTOR
    return group, vector, (group < GROUPS) & (vector < tokens * HEADS)


@triton.jit
def _store_groups(
    x, group, head, slot, ring_slot, layer, is_key, NUMBER: tl.constexpr, VECTOR: tl.constexpr, STORE: tl.constexpr
):  # fmt: skip
    """Quantise rotated groups and write them to the ring and to pages.

    x: 8 fp32 tensors [lanes]; group, in the section, int32; head, slot and ring_slot, int64 [lanes]. The other
    arguments are `store_section`'s.
    """
    LAYOUT: tl.constexpr = STORE.layout
    BLOCK_SIZE: tl.constexpr = STORE.block_sizes[0]
    RING_BLOCK: tl.constexpr = STORE.block_sizes[1]
    ROW: tl.constexpr = STORE.latent_rows
    SECTION: tl.constexpr = VECTOR.sections[NUMBER]
    CODE: tl.constexpr = SECTION.code
    BINS: tl.constexpr = SECTION.bins
    FIRST_GROUP: tl.constexpr = SECTION.first_group
    HEAD_GROUPS: tl.constexpr = len(LAYOUT.key_vector.groups)
    index = tl.arange(0, group.shape[0])
    lane = index % 4
    stored = slot >= 0
    slot = tl.where(stored, slot, 0)
    inside, page = slot, layer.cache.pointer
    if BLOCK_SIZE > 0:
        inside = slot % BLOCK_SIZE
        page = page + slot // BLOCK_SIZE * layer.cache.block_stride + head * layer.cache.head_stride
    RING: tl.constexpr = LAYOUT.ring
    if RING_BLOCK > 0:
        in_ring = ring_slot >= 0
        ring_slot = tl.where(in_ring, ring_slot, 0)
        entry = layer.ring.pointer + ring_slot // RING_BLOCK * layer.ring.block_stride + head * layer.ring.head_stride
        entry += ring_slot % RING_BLOCK * RING.slot_bytes
        if is_key:
            store_ring(entry, x, FIRST_GROUP + group, index, in_ring, KEY, RING)
        else:
            store_ring(entry, x, FIRST_GROUP + group, index, in_ring, VALUE, RING)
    if BLOCK_SIZE > 0:
        if len(CODE.magnitudes) == 0:
            magnitudes, signs, scale = round_to_half(x)
        else:
            scale = search_scale(x, index, CODE, BINS)
            magnitudes, signs = quantize(x, scale, CODE, BINS)
        if ROW is not None:
            HALF: tl.constexpr = ROW.half.key_vector
            HALF_SECTION: tl.constexpr = HALF.sections[NUMBER]
            place, n, number = page + inside * ROW.row_bytes, group % 2 * 8, group // 2
            store_codes(place, n, number, lane, stored, magnitudes, signs, True, HALF_SECTION, HALF, 4)
            scale_at = ROW.scales_at + FIRST_GROUP + group
        else:
            place, n = page + inside // 16 * LAYOUT.micro_block_bytes, (inside % 16).to(tl.int32)
            if is_key:
                KEYS: tl.constexpr = LAYOUT.key_vector
                words_at = place + KEYS.words_at
                store_codes(words_at, n, group, lane, stored, magnitudes, signs, True, SECTION, KEYS, 32)
                scale_at = n % 8 * (2 * HEAD_GROUPS) + 2 * (FIRST_GROUP + group) + n // 8 + KEYS.scales_at
            else:
                VALUES: tl.constexpr = LAYOUT.value_vector
                words_at = place + VALUES.words_at
                store_codes(words_at, n, group, lane, stored, magnitudes, signs, False, SECTION, VALUES, 32)
                scale_at = n % 8 // 2 * (4 * HEAD_GROUPS) + 4 * (FIRST_GROUP + group) + n // 8 * 2 + n % 2
                scale_at += VALUES.scales_at
        tl.store(place + scale_at, scale.to(tl.uint8), mask=stored & (lane == 0))
