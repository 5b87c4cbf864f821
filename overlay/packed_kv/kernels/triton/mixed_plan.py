"""The tables of a mixed step that runs as one CUDA graph, made on the device from vLLM's tensors of the batch.

A graph outlives the batch that it was captured with: its launches have fixed addresses and the largest sizes. They read
these tables: which requests decode, which chunks follow, and which passes over prefixes the chunks take.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import power_of_2
from .combine import BEHIND, DECODE, NEW, PADDING
from .launch import Arguments, Launch

_PADDING, _DECODE, _NEW, _BEHIND = (tl.constexpr(kind) for kind in (PADDING, DECODE, NEW, BEHIND))
LANES = 1024
"""Rows, and passes, that a program writes at a time."""


class MixedTables(NamedTuple):
    """Tables of a step of up to a number of requests and tokens, int32 on the device.

    Decodes are the requests before the first one with more query tokens than a decode; from that one on, all are
    chunks. `decode_start` [requests + 1] and `chunk_start` [requests + 1]: first row of each decode, and of each chunk;
    the other requests have no rows there. `decode_lens` [requests]: tokens in the cache, 0 of chunks. `passes` [passes,
    4]: a request, its first row, rows and tokens of its prefix (`attention/passes.py`), for all rows of chunks that
    have a prefix; unused entries are 0. `row_kinds` [tokens]: PADDING, DECODE, NEW or BEHIND of `combine.py`.
    `decode_slots` and `chunk_slots` [tokens]: slots in the rings, -1 for rows of the others; empty where there is no
    recent window.
    """

    decode_start: torch.Tensor
    decode_lens: torch.Tensor
    chunk_start: torch.Tensor
    passes: torch.Tensor
    row_kinds: torch.Tensor
    decode_slots: torch.Tensor
    chunk_slots: torch.Tensor

    @classmethod
    def empty(cls, requests: int, tokens: int, passes: int, *, has_ring: bool, device: torch.device) -> MixedTables:
        """Return memory for the tables."""
        slots = tokens if has_ring else 0
        shapes = (requests + 1,), (requests,), (requests + 1,), (passes, 4), (tokens,), (slots,), (slots,)
        return cls(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


def plan_in_pytorch(
    tables: MixedTables, query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor | None,
    longest_decode: int, pass_tokens: int,
) -> None:  # fmt: skip
    """Fill the tables; the reference of `plan_mixed`, which has the arguments."""
    starts, context = query_start.tolist(), seq_lens.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    first = next((i for i, count in enumerate(counts) if count > longest_decode), len(counts))
    tables.decode_start.copy_(query_start.clamp(max=starts[first]))
    tables.chunk_start.copy_(query_start.clamp(min=starts[first]))
    tables.decode_lens.zero_()[:first] = seq_lens[:first]
    passes = []
    tables.row_kinds.fill_(DECODE)[starts[first] :] = NEW
    tables.row_kinds[starts[-1] :] = PADDING
    for request in range(first, len(counts)):
        start, count = starts[request], counts[request]
        keys = context[request] - count
        if count > 0 and keys > 0:
            tables.row_kinds[start : start + count] = BEHIND
            passes += [[request, start + i, min(pass_tokens, count - i), keys] for i in range(0, count, pass_tokens)]
    tables.passes.zero_()[: len(passes)] = torch.tensor(passes, dtype=torch.int32).view(-1, 4)
    if slots is not None:
        row = torch.arange(len(slots), device=slots.device)
        tables.decode_slots.copy_(torch.where(row < starts[first], slots, -1))
        tables.chunk_slots.copy_(torch.where((row >= starts[first]) & (row < starts[-1]), slots, -1))


@triton.jit(do_not_specialize=["tokens", "most"])
def _plan_mixed_kernel(
    query_start, seq_lens, slots, tables, tokens, most,
    PADDED: tl.constexpr, LONGEST: tl.constexpr, PASS_TOKENS: tl.constexpr, HAS_RING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid: requests. `tables`: `MixedTables` of `tokens` tokens and `most` passes. Each program reads all requests,
    and writes the entries of its own."""
    own, requests = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, PADDED)
    there = index < requests
    start = tl.load(query_start + index, mask=there, other=0)
    count = tl.load(query_start + index + 1, mask=there, other=0) - start
    first = tl.min(tl.where(there & (count > LONGEST), index, requests))
    split = tl.load(query_start + first)  # rows of decodes
    prefix = tl.load(seq_lens + index, mask=there, other=0) - count
    prefix = tl.where((index >= first) & (count > 0), prefix, 0)
    number = tl.where(prefix > 0, (count + PASS_TOKENS - 1) // PASS_TOKENS, 0)
    total, before = tl.sum(number), tl.sum(tl.where(index < own, number, 0))

    own_start, own_end = tl.load(query_start + own), tl.load(query_start + own + 1)
    own_count, own_len = own_end - own_start, tl.load(seq_lens + own)
    is_decode = own < first
    own_prefix = tl.where(is_decode | (own_count == 0), 0, own_len - own_count)
    tl.store(tables.decode_start + own, tl.minimum(own_start, split))
    tl.store(tables.chunk_start + own, tl.maximum(own_start, split))
    tl.store(tables.decode_lens + own, tl.where(is_decode, own_len, 0))
    if own == requests - 1:
        tl.store(tables.decode_start + requests, tl.minimum(own_end, split))
        tl.store(tables.chunk_start + requests, tl.maximum(own_end, split))
        for base in range(total, most, LANES):
            unused = base + tl.arange(0, LANES)
            for word in tl.static_range(4):
                tl.store(tables.passes + 4 * unused + word, unused * 0, mask=unused < most)
        for base in range(own_end, tokens, LANES):  # padding
            row = base + tl.arange(0, LANES)
            tl.store(tables.row_kinds + row, row * 0 + _PADDING, mask=row < tokens)
            if HAS_RING:
                tl.store(tables.decode_slots + row, row * 0 - 1, mask=row < tokens)
                tl.store(tables.chunk_slots + row, row * 0 - 1, mask=row < tokens)
    if own_prefix > 0:
        for base in range(0, own_count, LANES * PASS_TOKENS):
            row = base + tl.arange(0, LANES) * PASS_TOKENS
            entry, is_pass = tables.passes + 4 * (before + row // PASS_TOKENS), row < own_count
            tl.store(entry, row * 0 + own, mask=is_pass)
            tl.store(entry + 1, own_start + row, mask=is_pass)
            tl.store(entry + 2, tl.minimum(own_count - row, PASS_TOKENS), mask=is_pass)
            tl.store(entry + 3, row * 0 + own_prefix, mask=is_pass)
    for base in range(own_start, own_end, LANES):
        row = base + tl.arange(0, LANES)
        kind = tl.where(is_decode, _DECODE, tl.where(own_prefix > 0, _BEHIND, _NEW))
        tl.store(tables.row_kinds + row, row * 0 + kind, mask=row < own_end)
        if HAS_RING:
            slot = tl.load(slots + row, mask=row < own_end, other=-1)
            tl.store(tables.decode_slots + row, tl.where(is_decode, slot, -1), mask=row < own_end)
            tl.store(tables.chunk_slots + row, tl.where(is_decode, -1, slot), mask=row < own_end)


def plan_mixed(
    tables: MixedTables, query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor | None,
    longest_decode: int, pass_tokens: int,
) -> None:  # fmt: skip
    """Fill the tables in one launch.

    Args:
        tables: of `MixedTables.empty`, with as many passes as such a batch can have (`attention.passes.most_passes`).
        query_start: int32 [requests + 1], first row of each request. Rows behind the last request's are padding.
        seq_lens: int32 [requests], tokens in the cache, the batch's included; 0 of padding.
        slots: int32 [tokens], in the rings (`window/slots.py`), or None.
        longest_decode: the most query tokens of a decode.
        pass_tokens: query tokens of a pass.
    """
    padded = max(256, power_of_2(len(seq_lens)))  # one variant for most
    launch = _bind(padded, longest_decode, pass_tokens, slots is not None, query_start.device)
    tensors = query_start, seq_lens, query_start if slots is None else slots
    launch((len(seq_lens), 1, 1), tensors, Arguments(tables, len(tables.row_kinds), len(tables.passes)))


@functools.cache
def _bind(padded: int, longest_decode: int, pass_tokens: int, has_ring: bool, device: torch.device) -> Launch:
    """Return the kernel for this many requests; `device` keeps kernels of several devices apart."""
    constants = dict(
        PADDED=padded, LONGEST=longest_decode, PASS_TOKENS=pass_tokens, HAS_RING=has_ring, LANES=LANES,
    )  # fmt: skip
    return Launch(_plan_mixed_kernel, Arguments(), constants, num_warps=4)
