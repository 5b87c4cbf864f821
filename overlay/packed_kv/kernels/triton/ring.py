"""The ring of recent tokens: functions for the store and decode kernels, and two small kernels of its own.

A token is written by the store kernel, which has its rotated channels (`store_ring`), and read by the decode kernel
(`attend_ring`) or, for prefills, by `gather_ring`. `plan_ring` says once a step where new tokens go and from which
token on a request's ring can be read. The reference of the bytes is `codecs/ring.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...codecs.ring import LARGEST_CODE, OVER_LARGEST, UNIT, Ring
from ...formats import GROUP_SIZE, MAX_SCALE_BYTE
from ...layout import ring_layout, ring_slot_bytes
from .. import power_of_2
from ..checks import check_ring
from ..units import LOG2_E
from .fragments import IS_INTERPRETED, as_key, as_value, from_pairs, load_words, opaque
from .launch import Arguments, Launch, StepLaunch
from .means import add_first_bias, bias_increase, bias_of_block, block_of, store_first_score
from .pages import KEY, VALUE
from .quantize import of, product
from .records import blocks
from .scales import online_softmax_update, over_scores, scale_byte, scale_weights, transpose_weights

_LARGEST_CODE = tl.constexpr(float(LARGEST_CODE))
_OVER_LARGEST = tl.constexpr(OVER_LARGEST)
RING_UNIT = tl.constexpr(UNIT)
_EIGHTHS = tl.constexpr(tuple(8 / (8 + i) for i in range(8)))
_MAX_SCALE_BYTE = tl.constexpr(MAX_SCALE_BYTE)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Added to an fp32 below 2^22, it leaves the nearest integer (ties to even) in the last bits of the sum."""
_LARGEST_HALF = tl.constexpr(65504.0)
_LOG2_E = tl.constexpr(LOG2_E)
TOKENS_A_PROGRAM = 1024
"""Tokens per program of `plan_ring`."""


@triton.jit
def ring_step_size(scale):
    """Scale bytes -> step sizes, fp32: the value of a code of 1."""
    return (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * RING_UNIT


@triton.jit
def inverse_step_size(step_size):
    """fp32(1 / step_size), or 0 for 0. A step size has 4 significant bits, so a table of 8 is enough; a division takes
    a call."""
    bits = step_size.to(tl.int32, bitcast=True)
    inverse = tl.full(step_size.shape, 1.0, tl.float32)
    for i in tl.static_range(1, 8):
        inverse = tl.where(bits >> 20 & 7 == i, of(_EIGHTHS, i), inverse)
    scaled = inverse.to(tl.int32, bitcast=True) - (((bits >> 23) - 127) << 23)
    return tl.where(step_size > 0, scaled.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def ring_scale(top):
    """Scale bytes, int32, for groups whose largest absolute values are `top`."""
    largest = tl.minimum(top * _OVER_LARGEST, _LARGEST_HALF).to(tl.float16)
    return tl.minimum((largest.to(tl.int16, bitcast=True).to(tl.int32) + 127) >> 7, _MAX_SCALE_BYTE)


@triton.jit
def ring_code(x, inverse):
    """x times `inverse_step_size` of its scale, rounded, as a byte in an int32."""
    code = tl.minimum(tl.maximum(product(x, inverse), -_LARGEST_CODE), _LARGEST_CODE)
    return (code + (_ROUND + 128)).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def store_ring(slot, x, group, index, stored, VECTOR: tl.constexpr, RING: tl.constexpr):
    """Write one group of each row: its 32 codes and its scale, to slots of the ring.

    slot: pointers to bytes [lanes]; x: 8 fp32 tensors [lanes], as in quantize.py; lane t of a row (t = index % 4) has
    channels d43 * 8 + 2 * t + d0; group, index: int32 [lanes]; stored: bool [lanes]; VECTOR: KEY or VALUE.
    """
    IS_KEY: tl.constexpr = VECTOR == KEY
    lane = index % 4
    top = tl.abs(x[0])
    for k in tl.static_range(1, 8):
        top = tl.maximum(top, tl.abs(x[k]))
    top = tl.maximum(top, tl.gather(top, index ^ 1, 0))
    top = tl.maximum(top, tl.gather(top, index ^ 2, 0))
    scale = ring_scale(top)
    inverse = inverse_step_size(ring_step_size(scale))
    # The lane's 8 bytes: registers k = d4 d3 d0 in order for K, d0 d4 d3 for V.
    pointer = (slot + group * 32 + 8 * lane + RING.codes[VECTOR]).to(tl.pointer_type(tl.int32))
    for half in tl.static_range(2):
        word = tl.zeros(index.shape, tl.int32)
        for byte in tl.static_range(4):
            word |= ring_code(x[4 * half + byte if IS_KEY else 2 * byte + half], inverse) << (8 * byte)
        tl.store(pointer + half, word, mask=stored)
    tl.store(slot + group + RING.scales[VECTOR], scale.to(tl.uint8), mask=stored & (lane == 0))


# Bytes u = code + 128 of a word as fp16 pairs: below an upper byte 0x64, a byte is 1024 + u; minus 1152 that is the
# code.
_BIASED = "prmt.b32 ${0}, {1}, b, {2}; add.rn.f16x2 ${0}, ${0}, c;"
_HEAD = "{ .reg .b32 b, c, x, y; mov.b32 b, 0x64646464; mov.b32 c, 0xe480e480; "
_KEY_PAIRS = tl.constexpr(_HEAD + _BIASED.format(0, "$2", "0x4140") + _BIASED.format(1, "$2", "0x4342") + " }")
_VALUE_PAIRS = tl.constexpr(
    _HEAD + "prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;"
    + "".join(_BIASED.format(i, "xy"[i // 2], ("0x4140", "0x4342")[i % 2]) for i in range(4)) + " }"
)  # fmt: skip


@triton.jit
def _pair(first, second, byte0: tl.constexpr, byte1: tl.constexpr):
    """Byte `byte0` of `first` and `byte1` of `second`, codes + 128, as two fp16 in an int32."""
    low = ((first >> (8 * byte0) & 0xFF) - 128).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    high = ((second >> (8 * byte1) & 0xFF) - 128).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return low & 0xFFFF | high << 16


@triton.jit
def key_pairs(word):
    """int32 [32, 2], a word of K -> the pairs of d3 = 0 and 1."""
    if IS_INTERPRETED:
        result = (_pair(word, word, 0, 1), _pair(word, word, 2, 3))
    else:
        result = tl.inline_asm_elementwise(_KEY_PAIRS, "=&r,=&r,r", [word], dtype=(tl.int32,) * 2, is_pure=True, pack=1)
    return result


@triton.jit
def _value_pairs(first, second):
    """int32 [32, 2], a word of V of token n0 = 0 and one of n0 = 1 -> the pairs of d4 d3 = 0 .. 3."""
    if IS_INTERPRETED:
        result = (_pair(first, second, 0, 0), _pair(first, second, 1, 1),
                  _pair(first, second, 2, 2), _pair(first, second, 3, 3))  # fmt: skip
    else:
        result = tl.inline_asm_elementwise(
            _VALUE_PAIRS, "=&r,=&r,=&r,=&r,r,r", [first, second], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    return result


@triton.jit
def ring_slots(ring_head, table, token, block_stride, BLOCK: tl.constexpr, SLOT: tl.constexpr):
    """Pointers to the slots of tokens."""
    return ring_head + tl.load(table + token // BLOCK).to(tl.int64) * block_stride + token % BLOCK * SLOT


@triton.jit
def _load(slots, offset, count: tl.constexpr):
    """`load_words` at a byte offset into the slots of a token of either half of a tile."""
    first, second = (slots[0] + offset).to(tl.pointer_type(tl.int32)), (slots[1] + offset).to(tl.pointer_type(tl.int32))
    return load_words(first, second, count)


@triton.jit
def _byte(word, index: tl.constexpr):
    return word >> (8 * index) & 0xFF


@triton.constexpr_function
def min_window(recent, window):
    """Tokens that a query sees in the ring, without tokens before its sliding window (0: no window)."""
    return min(recent, window) if window else recent


@triton.jit
def attend_ring(queries, sums, ring, tokens, limit, soft_cap, biases, DECODE: tl.constexpr):
    """Attention of some columns over tokens of the ring: new outputs, maximum and total.

    As with pages, a lane loads what it feeds to the tensor core: of tokens 16 m + 8 n3 + g (K) or 16 m + 8 n3 + 2 t +
    n0 (V). Past the end a lane loads the last token again.

    Args:
        queries: a tuple of fp16 [32 channels, columns] for each group.
        sums: (outputs, maximum, total): a tuple of fp32 [32 channels, columns], sums of codes times scales (times
            `RING_UNIT` they are values); fp32 [columns] and [8, columns], see `online_softmax_update`.
        ring: (pointer to uint8 [blocks, .., ring_block, ring_slot_bytes] of the head, its stride over blocks, pointer
            to int32 [ring blocks], the request's table).
        tokens: (first, end, seq_len), int32: first .. end - 1 of the seq_len tokens of the request.
        limit: int32 [columns], the token after a column's own. It sees the `recent` tokens before `limit`, or, with
            `has_passes`, all before `seq_len`; and none before its sliding window.
        soft_cap: fp32, times log2 e; read where `has_soft_cap`.
        biases: (query_bias, first_row, count), see `bias_of_block`.
        DECODE: `DecodeConstants` of decode.py.
    """
    BLOCK: tl.constexpr = DECODE.ring_block
    RECENT: tl.constexpr = DECODE.recent
    SLIDING_WINDOW: tl.constexpr = DECODE.sliding_window
    HAS_SOFT_CAP: tl.constexpr = DECODE.has_soft_cap
    COLUMNS: tl.constexpr = DECODE.columns
    LAYOUT: tl.constexpr = DECODE.layout
    GROUPS: tl.constexpr = len(LAYOUT.key_vector.groups)
    TILE_COLUMNS: tl.constexpr = COLUMNS.tile
    MEAN_BLOCKS: tl.constexpr = COLUMNS.mean_blocks
    TILES_A_BLOCK: tl.constexpr = COLUMNS.tiles_a_block
    SLOT: tl.constexpr = LAYOUT.ring.slot_bytes
    KEYS: tl.constexpr = LAYOUT.ring.codes[KEY]
    VALUES: tl.constexpr = LAYOUT.ring.codes[VALUE]
    SCALES: tl.constexpr = LAYOUT.ring.scales[KEY]
    A_TOKEN: tl.constexpr = (2 * GROUPS + 3) // 4 - GROUPS // 4  # words with scales of V
    outputs, maximum, total = sums
    ring_head, block_stride, table = ring
    first, end, seq_len = tokens
    query_bias, first_row, count = biases
    lane = tl.arange(0, 32)[:, None]
    row, column = lane // 4, lane % 4
    for base in range(first, end, 32):
        low_slots, high_slots, slots = (), (), ()
        for m in tl.static_range(2):
            token = base + 16 * m + row
            low_slots += (ring_slots(ring_head, table, tl.minimum(token, seq_len - 1), block_stride, BLOCK, SLOT),)
            high_slots += (ring_slots(ring_head, table, tl.minimum(token + 8, seq_len - 1), block_stride, BLOCK, SLOT),)
        for n in tl.static_range(4):
            token = base + 8 * (n // 2) + 2 * column + n % 2
            slots += (
                (
                    ring_slots(ring_head, table, tl.minimum(token, seq_len - 1), block_stride, BLOCK, SLOT),
                    ring_slots(ring_head, table, tl.minimum(token + 16, seq_len - 1), block_stride, BLOCK, SLOT),
                ),
            )
        scores = tl.zeros([32, TILE_COLUMNS], tl.float32)
        low_scales, high_scales = (), ()
        for i in tl.static_range((GROUPS + 3) // 4):
            low_scales += _load(low_slots, SCALES + 4 * i, 1)
            high_scales += _load(high_slots, SCALES + 4 * i, 1)
        for g in tl.static_range(GROUPS):
            words = _load(low_slots, KEYS + g * 32 + column * 8, 2) + _load(high_slots, KEYS + g * 32 + column * 8, 2)
            pairs = key_pairs(words[0]) + key_pairs(words[1]) + key_pairs(words[2]) + key_pairs(words[3])
            low = scale_byte(low_scales[g // 4], g % 4).to(tl.float32) * RING_UNIT
            high = scale_byte(high_scales[g // 4], g % 4).to(tl.float32) * RING_UNIT
            scores += tl.dot(opaque(as_key(from_pairs(pairs))), queries[g]) * over_scores(low, high, TILE_COLUMNS)
        token = base + tl.arange(0, 32)
        if MEAN_BLOCKS > 0:
            block = block_of(base // 32, TILES_A_BLOCK)
            scores += bias_of_block(query_bias, block, first_row, count, COLUMNS)[None, :]
            if TILES_A_BLOCK > 0:  # a tile begins anywhere, and may end in the next block
                next_block = (block + 1) * (32 * TILES_A_BLOCK)
                if base + 31 >= next_block:
                    further = bias_increase(query_bias, block + 1, first_row, count, COLUMNS)
                    scores += tl.where((token >= next_block)[:, None], further[None, :], 0.0)
            if base == 0:
                scores = add_first_bias(scores, token, query_bias, first_row, count, 1.0, COLUMNS)
        if HAS_SOFT_CAP:
            scores = soft_cap * (1 - 2 / (tl.exp2(scores * (2 * _LOG2_E / soft_cap)) + 1))
        if DECODE.has_passes:
            visible = (token < seq_len)[:, None]
            if SLIDING_WINDOW > 0:
                visible &= token[:, None] >= limit[None, :] - SLIDING_WINDOW
        else:
            window: tl.constexpr = min_window(RECENT, SLIDING_WINDOW)
            visible = (token[:, None] < limit[None, :]) & (token[:, None] >= limit[None, :] - window)
        scores = tl.where(visible, scores, float("-inf"))
        if COLUMNS.biases > 1 + MEAN_BLOCKS and base == 0:
            store_first_score(scores, token, query_bias, first_row, count, COLUMNS)

        scale_words = ()
        for n in tl.static_range(4):
            for i in tl.static_range(GROUPS // 4, (2 * GROUPS + 3) // 4):
                scale_words += _load(slots[n], SCALES + 4 * i, 1)
        value_scales = ()
        for g in tl.static_range(GROUPS):
            word = _byte(scale_words[(GROUPS + g) // 4 - GROUPS // 4], (GROUPS + g) % 4)
            for n in tl.static_range(1, 4):
                of_token: tl.tensor = scale_words[n * A_TOKEN + (GROUPS + g) // 4 - GROUPS // 4]
                word |= _byte(of_token, (GROUPS + g) % 4) << (8 * n)
            value_scales += (word,)
        weights, shrink, maximum, total = online_softmax_update(scores, 1.0, maximum, total, value_scales)
        pair0, pair1 = transpose_weights(weights)
        new_outputs = ()
        for g in tl.static_range(GROUPS):
            words = ()
            for n in tl.static_range(4):
                words += _load(slots[n], VALUES + g * 32 + row * 4, 1)
            even, odd = _value_pairs(words[0], words[1]), _value_pairs(words[2], words[3])
            pairs = (even[0], odd[0], even[1], odd[1], even[2], odd[2], even[3], odd[3])
            value = opaque(as_value(from_pairs(pairs)))
            scaled = scale_weights(pair0, pair1, value_scales[g])
            new_outputs += (tl.dot(value, scaled, outputs[g] * shrink[None, :]),)
        outputs = new_outputs
    return outputs, maximum, total


class PlanConstants(NamedTuple):
    """Constants that `_plan_kernel` is compiled for: tokens of the recent `window` and of a ring's `block`; `blocks` of
    a ring; query tokens of the `longest` decode; table `entries` that hold the window and such a decode, a power of 2;
    and `tokens` at a time."""

    window: int
    block: int
    blocks: int
    longest: int
    entries: int
    tokens: int = TOKENS_A_PROGRAM


@triton.jit(do_not_specialize=["tokens", "table_stride", "requests"])
def _plan_kernel(query_start, seq_lens, table, slots, first, requests, tokens, table_stride, PLAN: tl.constexpr):
    """Grid: requests. int32 `query_start` [requests + 1], `seq_lens` [requests], `table` [requests, blocks]; filled:
    `slots` [tokens], `first` [requests]. PLAN: `PlanConstants`."""
    BLOCK: tl.constexpr = PLAN.block
    TOKENS: tl.constexpr = PLAN.tokens
    request = tl.program_id(0)
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    count, seq_len = end - start, tl.load(seq_lens + request)
    prefix = seq_len - count
    table += request.to(tl.int64) * table_stride

    low = tl.maximum(prefix - PLAN.window + 1, 0)
    newest = tl.where(count <= PLAN.longest, tl.where(count > 0, seq_len, 0), prefix) - 1
    entry = low // BLOCK + tl.arange(0, PLAN.entries)
    entered = tl.load(table + entry, mask=entry * BLOCK <= newest, other=1)
    missing = tl.max(tl.where(entered == 0, entry, -1), 0)
    tl.store(first + request, tl.maximum(low, (missing + 1) * BLOCK))

    kept = (seq_len - 1) // BLOCK - PLAN.blocks + 1  # an earlier block has the place of a newer one
    for base in range(0, count, TOKENS):
        token = base + tl.arange(0, TOKENS)
        position = prefix + token
        block = tl.load(table + position // BLOCK, mask=(token < count) & (position // BLOCK >= kept), other=0)
        slot = tl.where(block > 0, block * BLOCK + position % BLOCK, -1)
        tl.store(slots + start + token, slot, mask=token < count)
    if request == requests - 1:
        for base in range(end, tokens, TOKENS):  # padding
            token = base + tl.arange(0, TOKENS)
            tl.store(slots + token, tl.full([TOKENS], -1, tl.int32), mask=token < tokens)


def plan_ring(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    *,
    block_size: int,
    ring_blocks: int,
    window: int,
    longest_decode: int,
) -> None:
    """`window/slots.fill_slots` in one launch: fills `slots` and `first`. The arguments are the same."""
    requests = len(seq_lens)
    launch = _bind_plan(block_size, ring_blocks, window, longest_decode, slots.device)
    arguments = Arguments(requests, len(slots), block_table.stride(0))
    launch((requests, 1, 1), (query_start, seq_lens, block_table, slots, first), arguments)


@functools.cache
def _bind_plan(block_size: int, ring_blocks: int, window: int, longest_decode: int, device: torch.device) -> Launch:
    """The kernel for rings of these sizes; `device` keeps kernels of several devices apart."""
    entries = power_of_2((window + longest_decode) // block_size + 2)
    constants = PlanConstants(window, block_size, ring_blocks, longest_decode, entries)
    return Launch(_plan_kernel, Arguments(), dict(PLAN=constants), num_warps=4)


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table", "first", "spans", "key", "value"]
)
def _gather_ring_kernel(
    table, first, spans, key, value, table_stride, ring,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Grid: (spans, KV heads). int32 `table` [requests, blocks], `first` [requests] and `spans` [spans, 4]; fp16 `key`
    and `value` [rows, KV_HEADS, HEAD_DIM]; `ring`: `Blocks` [blocks, KV_HEADS, BLOCK, ring_slot_bytes]."""
    HEAD_DIM: tl.constexpr = 32 * GROUPS
    SLOT: tl.constexpr = RING.slot_bytes
    span, head = spans + tl.program_id(0) * 4, tl.program_id(1)
    request, row, low, end = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    table += request.to(tl.int64) * table_stride
    ring_head = ring.pointer + head.to(tl.int64) * ring.head_stride
    position = tl.arange(0, 32)  # of a byte in its group
    key_channel = position // 2 % 4 * 8 + position // 8 * 2 + position % 2
    value_channel = position % 4 * 8 + position // 4
    for base in range(tl.maximum(low, tl.load(first + request)), end, 32):
        token = base + tl.arange(0, 32)
        there = token < end
        slot = ring_slots(ring_head, table, tl.minimum(token, end - 1), ring.block_stride, BLOCK, SLOT)
        target = ((row + token).to(tl.int64) * KV_HEADS + head) * HEAD_DIM
        for vector in tl.static_range(2):
            for g in tl.static_range(GROUPS):
                codes = tl.load(
                    slot[:, None] + RING.codes[vector] + g * 32 + position[None, :], mask=there[:, None], other=0
                )
                step_size = ring_step_size(tl.load(slot + RING.scales[vector] + g, mask=there, other=0))
                x = ((codes.to(tl.float32) - 128) * step_size[:, None]).to(tl.float16)
                if vector == KEY:
                    out = key + target[:, None] + g * 32 + key_channel[None, :]
                else:
                    out = value + target[:, None] + g * 32 + value_channel[None, :]
                tl.store(out, x, mask=there[:, None])


class GatherRingLaunch(Launch):
    """Overwrites the tokens that `GatherLaunch` read from the pages and that a layer's ring has; they stay rotated.
    Called without tensors."""

    def __init__(self, ring: Ring, head_dim: int) -> None:
        cache = ring.cache
        check_ring(cache, cache.shape[1], ring_slot_bytes(head_dim))
        constants = dict(
            KV_HEADS=cache.shape[1], GROUPS=head_dim // GROUP_SIZE, BLOCK=cache.shape[2], RING=ring_layout(head_dim)
        )
        super().__init__(_gather_ring_kernel, Arguments(blocks(cache)), constants, num_warps=4)

    @staticmethod
    def step(ring: Ring, spans: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> StepLaunch:
        """A row of `spans`: request, row of its token 0 (maybe negative), tokens low .. end - 1; tokens before
        `ring.first` are left alone."""
        assert key.is_contiguous() and value.is_contiguous() and spans.is_contiguous(), (key.stride(), spans.stride())
        arguments = Arguments(ring.block_table, ring.first, spans, key, value, ring.block_table.stride(0))
        return StepLaunch((len(spans), key.shape[1], 1), arguments)
