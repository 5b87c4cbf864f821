"""The ring of recent tokens: what the store and decode kernels do with it, and two small kernels of its own.

A token is written by the store kernel, which has its rotated channels (`store_ring`), and read by one more split of the
decode kernel (`attend_ring`) or, for prefills, by `gather_ring`. `plan_ring` says once a step where new tokens go and
from which token on a request's ring can be read. The reference of the bytes is `codecs/ring.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..codecs.ring import LARGEST_CODE, OVER_LARGEST, UNIT, Ring
from ..formats import GROUP_SIZE, MAX_SCALE_BYTE
from ..layout import ring_slot_bytes
from . import power_of_2
from .fragments import VALUE_UNIT

_LARGEST_CODE = tl.constexpr(float(LARGEST_CODE))
_OVER_LARGEST = tl.constexpr(OVER_LARGEST)
_UNIT = tl.constexpr(UNIT)
_VALUE_UNIT = tl.constexpr(VALUE_UNIT)
_MAX_SCALE_BYTE = tl.constexpr(MAX_SCALE_BYTE)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Added to an fp32 below 2^22 and taken off again, it leaves the nearest integer, a tie the even one."""
_LARGEST_HALF = tl.constexpr(65504.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
TOKENS_A_PROGRAM = 1024
"""Of `plan_ring`, at a time."""


@triton.jit
def _step(scale):
    """Scale bytes -> fp32, what a code of 1 is worth."""
    return (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * _UNIT


@triton.jit
def store_ring(vector, scale_at, x, group, index, stored):
    """Write one group of each row: 32 codes behind `vector`, its scale at `scale_at`, pointers to bytes [lanes].

    x: 8 fp32 tensors [lanes], as in quantize.py; lane t of a row (t = index % 4) has channels d43 * 8 + 2 * t + d0.
    """
    lane = index % 4
    top = tl.abs(x[0])
    for k in tl.static_range(1, 8):
        top = tl.maximum(top, tl.abs(x[k]))
    top = tl.maximum(top, tl.gather(top, index ^ 1, 0))
    top = tl.maximum(top, tl.gather(top, index ^ 2, 0))
    largest = tl.minimum(top * _OVER_LARGEST, _LARGEST_HALF).to(tl.float16)
    scale = tl.minimum((largest.to(tl.int16, bitcast=True).to(tl.int32) + 127) >> 7, _MAX_SCALE_BYTE)
    step = _step(scale)
    divisor = tl.where(step > 0, step, 1.0)  # where the step is 0, so is every channel
    for d43 in tl.static_range(4):
        codes = tl.zeros(index.shape, tl.int32)
        for d0 in tl.static_range(2):
            code = tl.div_rn(x[2 * d43 + d0], divisor)
            code = tl.minimum(tl.maximum((code + _ROUND) - _ROUND, -_LARGEST_CODE), _LARGEST_CODE)
            codes |= (code.to(tl.int32) & 0xFF) << (8 * d0)
        pointer = (vector + group * 32 + d43 * 8 + 2 * lane).to(tl.pointer_type(tl.int16))
        tl.store(pointer, codes.to(tl.int16), mask=stored)
    tl.store(scale_at + group, scale.to(tl.uint8), mask=stored & (lane == 0))


@triton.jit
def attend_ring(
    queries, outputs, maximum, total, ring_head, table, block_stride, first, seq_len, limit, soft_cap,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attention of 8 columns over tokens first .. seq_len - 1 of the ring: new outputs, maximum and total.

    The arguments are those of `decode.py`; `ring_head` points to bytes, `limit` [8] is a column's last token and one,
    of which it sees WINDOW tokens here. The few tokens are worth no layout of their own: codes pass through shared
    memory. V is multiplied in tf32, which has room for every scale.
    """
    HEAD_DIM: tl.constexpr = 32 * GROUPS
    channel = tl.arange(0, 32)
    for base in range(first, seq_len, 32):
        token = base + tl.arange(0, 32)
        there = token < seq_len
        block = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
        slot = ring_head + block * block_stride + token % BLOCK * (66 * GROUPS)
        scores = tl.zeros([32, 8], tl.float32)
        for g in tl.static_range(GROUPS):
            codes = tl.load(slot[:, None] + g * 32 + channel[None, :], mask=there[:, None], other=0)
            step = _step(tl.load(slot + 2 * HEAD_DIM + g, mask=there, other=0))
            scores += tl.dot(codes.to(tl.int8, bitcast=True).to(tl.float16), queries[g]) * step[:, None]
        if HAS_SOFT_CAP:
            scores = soft_cap * (1 - 2 / (tl.exp2(scores * (2 * _LOG2_E / soft_cap)) + 1))
        visible = (token[:, None] < limit[None, :]) & (token[:, None] >= limit[None, :] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        weights = tl.exp2(scores - new_maximum[None, :])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink[None, :] + tl.sum(tl.reshape(weights, [4, 8, 8]), 0)
        maximum = new_maximum
        new_outputs = ()
        for g in tl.static_range(GROUPS):
            codes = tl.load(slot[None, :] + HEAD_DIM + g * 32 + channel[:, None], mask=there[None, :], other=0)
            step = _step(tl.load(slot + 2 * HEAD_DIM + GROUPS + g, mask=there, other=0)) * _VALUE_UNIT
            value = codes.to(tl.int8, bitcast=True).to(tl.float32) * step[None, :]
            part = tl.dot(value, weights, input_precision="tf32")
            new_outputs = new_outputs + (outputs[g] * shrink[None, :] + part,)
        outputs = new_outputs
    return outputs, maximum, total


@triton.jit(do_not_specialize=["tokens", "table_stride", "requests"])
def _plan_kernel(
    query_start, seq_lens, table, slots, first, requests, tokens, table_stride,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, RING_BLOCKS: tl.constexpr, LONGEST: tl.constexpr,
    ENTRIES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: requests."""
    request = tl.program_id(0)
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    count, seq_len = end - start, tl.load(seq_lens + request)
    prefix = seq_len - count
    table += request.to(tl.int64) * table_stride

    low = tl.maximum(prefix - WINDOW + 1, 0)
    newest = tl.where(count <= LONGEST, tl.where(count > 0, seq_len, 0), prefix) - 1
    entry = low // BLOCK + tl.arange(0, ENTRIES)
    block = tl.load(table + entry, mask=entry * BLOCK <= newest, other=1)
    missing = tl.max(tl.where(block == 0, entry, -1), 0)
    tl.store(first + request, tl.maximum(low, (missing + 1) * BLOCK))

    kept = (seq_len - 1) // BLOCK - RING_BLOCKS + 1  # a block before it has the place of a newer one
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
    """`attention/recent_metadata.plan` in one launch: fills `slots` and `first`. The arguments are the same."""
    requests = len(seq_lens)
    _plan_kernel[(requests,)](
        query_start, seq_lens, block_table, slots, first, requests, len(slots), block_table.stride(0),
        WINDOW=window, BLOCK=block_size, RING_BLOCKS=ring_blocks, LONGEST=longest_decode,
        ENTRIES=power_of_2((window + longest_decode) // block_size + 2), TOKENS=TOKENS_A_PROGRAM, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["spans"])
def _gather_ring_kernel(
    ring, table, first, spans, key, value, table_stride, block_stride, head_stride,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (spans, KV heads)."""
    HEAD_DIM: tl.constexpr = 32 * GROUPS
    span, head = spans + tl.program_id(0) * 4, tl.program_id(1)
    request, row, low, end = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    table += request.to(tl.int64) * table_stride
    channel = tl.arange(0, 32)
    for base in range(tl.maximum(low, tl.load(first + request)), end, 32):
        token = base + tl.arange(0, 32)
        there = token < end
        block = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
        slot = ring + block * block_stride + head.to(tl.int64) * head_stride + token % BLOCK * (66 * GROUPS)
        target = ((row + token).to(tl.int64) * KV_HEADS + head) * HEAD_DIM
        for g in tl.static_range(2 * GROUPS):
            codes = tl.load(slot[:, None] + g * 32 + channel[None, :], mask=there[:, None], other=0)
            step = _step(tl.load(slot + 2 * HEAD_DIM + g, mask=there, other=0))
            x = (codes.to(tl.int8, bitcast=True).to(tl.float32) * step[:, None]).to(tl.float16)
            out = key if g < GROUPS else value
            tl.store(out + target[:, None] + g % GROUPS * 32 + channel[None, :], x, mask=there[:, None])


def gather_ring(ring: Ring, spans: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write the tokens that the ring has over those that `gather` read from the pages, still rotated.

    Args:
        ring: of the layer; `spans` count its requests.
        spans: int32 [n, 4], contiguous: request, row of its token 0 (maybe negative), tokens low .. end - 1; those
            before `ring.first` are left alone.
        key, value: fp16 [rows, KV heads, head_dim], contiguous.
    """
    _, kv_heads, head_dim = key.shape
    check_ring(ring, kv_heads, head_dim)
    assert key.is_contiguous() and value.is_contiguous() and spans.is_contiguous(), (key.stride(), spans.stride())
    _gather_ring_kernel[(len(spans), kv_heads)](
        ring.cache, ring.block_table, ring.first, spans, key, value,
        ring.block_table.stride(0), ring.cache.stride(0), ring.cache.stride(1),
        KV_HEADS=kv_heads, GROUPS=head_dim // GROUP_SIZE, BLOCK=ring.cache.shape[2], num_warps=4,
    )  # fmt: skip


def check_ring(ring: Ring, kv_heads: int, head_dim: int) -> None:
    """Assert the layout that the kernels need."""
    cache = ring.cache
    assert cache.dtype == torch.uint8 and cache.shape[1] == kv_heads, (cache.dtype, cache.shape)
    assert cache.shape[3] == ring_slot_bytes(head_dim) and cache.stride()[2:] == (cache.shape[3], 1), cache.stride()
    assert cache.stride(0) % 2 == cache.stride(1) % 2 == 0, cache.stride()
