"""Kernels around sparse attention over picks: counting a decode's picks, splitting a prompt's picks into stored ones
and the chunk's, the merge of both kinds, and sinks.

The reference is `reference/sparse_latents.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import power_of_2
from ..checks import check_int32
from .launch import Arguments, Launch, StepLaunch

NO_LSE = tl.constexpr(float("-inf"))
COUNTED_TOKENS = 128
"""Query tokens of a program of `_count_picks_kernel`."""


@triton.jit(
    do_not_specialize=["tokens", "picks"],
    do_not_specialize_on_alignment=["counts", "requests", "query_start", "seq_lens"],
)
def _count_picks_kernel(counts, requests, query_start, seq_lens, tokens, picks, TOKENS: tl.constexpr):
    """Grid: (blocks of TOKENS tokens). For the arguments see `count_picks`; counts: int32 [tokens], filled."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    request = tl.load(requests + token, mask=exists, other=0)
    end = tl.load(query_start + request + 1, mask=exists, other=0)
    seen = tl.load(seq_lens + request, mask=exists, other=0) - end + token + 1
    seen = tl.minimum(tl.maximum(seen, 0), picks)
    tl.store(counts + token, tl.where(token < end, seen, 0), mask=exists)


class CountPicksLaunch(Launch):
    """`count_picks` of a batch's decodes. Called with counts, requests, query_start and seq_lens, int32."""

    def __init__(self) -> None:
        super().__init__(_count_picks_kernel, Arguments(), {"TOKENS": COUNTED_TOKENS}, num_warps=4)

    @staticmethod
    def step(tokens: int, picks: int) -> StepLaunch:
        """`picks`: width of the table, the most picks that a token may have."""
        return StepLaunch((-(-tokens // COUNTED_TOKENS), 1, 1), Arguments(tokens, picks))


@triton.jit(do_not_specialize_on_alignment=["picks", "first_own", "stored_offset", "own_offset"])
def _split_picks_kernel(
    picks, first_own, stored_offset, own_offset, stored, stored_counts, own, own_counts,
    PICKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Deal a token's picks out to both kinds.

    Grid: (tokens).

    Args:
        picks: int32 [tokens, PICKS], contiguous.
        first_own, stored_offset, own_offset: int32 [tokens].
        stored, own: int32 [tokens or more, PICKS], contiguous; rows, in the order of the picks, then -1.
        stored_counts, own_counts: int32 [tokens or more], their numbers, but at least 1: attention then reads a -1.
    """
    token, index = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    pick = tl.load(picks + token * PICKS + index, mask=index < PICKS, other=-1)
    first = tl.load(first_own + token)
    is_own = pick >= first
    is_stored = (pick >= 0) & (pick < first)
    _store_kept(stored + token * PICKS, stored_counts + token, pick + tl.load(stored_offset + token), is_stored, PICKS)
    _store_kept(own + token * PICKS, own_counts + token, pick + tl.load(own_offset + token), is_own, PICKS)


@triton.jit
def _store_kept(target, count, values, kept, PICKS: tl.constexpr):
    """Store the kept values first in the PICKS at `target`, -1 behind them, and their number at `count`."""
    index = tl.arange(0, values.shape[0])
    place, number = tl.cumsum(kept.to(tl.int32), 0) - 1, tl.sum(kept.to(tl.int32), 0)
    tl.store(target + place, values, mask=kept)
    tl.store(target + index, -1, mask=(index >= number) & (index < PICKS))
    tl.store(count, tl.maximum(number, 1))


class SplitPicksLaunch(Launch):
    """`split_picks` of tokens with `picks` picks each. Called with picks, first_own, stored_offset and own_offset."""

    def __init__(self, picks: int) -> None:
        constants = {"PICKS": picks, "PADDED": power_of_2(picks)}
        super().__init__(_split_picks_kernel, Arguments(), constants, num_warps=8)

    @staticmethod
    def step(
        tokens: int, stored: torch.Tensor, stored_counts: torch.Tensor, own: torch.Tensor, own_counts: torch.Tensor
    ) -> StepLaunch:
        """`stored`, `own`: int32 [tokens or more, picks]; `stored_counts`, `own_counts`: int32 [tokens or more]."""
        check_int32(stored, stored_counts, own, own_counts)
        assert stored.is_contiguous() and own.is_contiguous(), (stored.stride(), own.stride())
        return StepLaunch((tokens, 1, 1), Arguments(stored, stored_counts, own, own_counts))


class Picked(NamedTuple):
    """Statistics of attention over one kind of picks. `lse`: fp32 [tokens, heads or more], natural; `picks`: int32
    [tokens, picks] of `_split_picks_kernel`."""

    lse: Any
    picks: Any


class MergePicksConstants(NamedTuple):
    """Constants that `_merge_picks_kernel` is compiled for: heads, their rank, whether there may be stored picks, and
    whether a constant is added and the lse filled."""

    heads: int
    rank: int
    has_stored: bool
    has_constant: bool
    has_lse: bool


@triton.jit(do_not_specialize=["lse_stride", "picks"], do_not_specialize_on_alignment=["lse"])
def _merge_picks_kernel(
    output, stored, own, lse, of_stored, of_own, lse_stride, picks, inverse_gain, constant, token_stride,
    MERGE: tl.constexpr,
):  # fmt: skip
    """Combine both kinds of a row.

    Grid: (tokens times heads).

    Args:
        output: fp16, bf16 or fp32 [tokens, heads, rank], contiguous; filled.
        stored, own: of the same dtype, [tokens, heads or more, rank], with `token_stride` (int32); anything for tokens
            without such picks. `stored` is read where `has_stored`.
        lse: fp32 [tokens, heads], contiguous; filled where `has_lse`.
        of_stored, of_own: `Picked`, with `lse_stride` and rows of `picks` (int32); likewise.
        inverse_gain: fp32 [rank]; constant: fp32 [rank], added where `has_constant`.
        MERGE: `MergePicksConstants`.
    """
    HEADS: tl.constexpr = MERGE.heads
    RANK: tl.constexpr = MERGE.rank
    HAS_STORED: tl.constexpr = MERGE.has_stored
    HAS_LSE: tl.constexpr = MERGE.has_lse
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, RANK)
    token, head = row // HEADS, row % HEADS
    at = token * token_stride + head * RANK + channel
    has_own = tl.load(of_own.picks + token * picks) >= 0
    result = tl.where(has_own, tl.load(own + at).to(tl.float32), 0.0) * tl.load(inverse_gain + channel)
    if HAS_STORED or HAS_LSE:
        whole = tl.where(has_own, tl.load(of_own.lse + token * lse_stride + head), NO_LSE)
    if HAS_STORED:
        has_stored = tl.load(of_stored.picks + token * picks) >= 0
        other_lse = tl.where(has_stored, tl.load(of_stored.lse + token * lse_stride + head), NO_LSE)
        maximum = tl.maximum(tl.maximum(whole, other_lse), -1.0e30)
        weight, other_weight = tl.exp(whole - maximum), tl.exp(other_lse - maximum)
        other = tl.where(has_stored, tl.load(stored + at).to(tl.float32), 0.0)
        result = (result * weight + other * other_weight) / tl.maximum(weight + other_weight, 1.0e-30)
        whole = maximum + tl.log(weight + other_weight)
    if HAS_LSE:
        tl.store(lse + row, whole)
    if MERGE.has_constant:
        result += tl.load(constant + channel)
    tl.store(output + row * RANK + channel, result.to(output.dtype.element_ty))


class MergePicksLaunch(Launch):
    """`merge` for layers with this `inverse_gain` and `constant`, fp32 [rank] or None.

    Called with the output [tokens, heads, rank]; attention over stored rows and over the chunk, each [tokens, padded
    heads, rank], contiguous (without `has_stored` the first is not read: pass the chunk's twice); and the lse to fill,
    fp32 [tokens, heads] (without `has_lse` it is not written: pass any fp32 tensor).
    """

    def __init__(
        self,
        inverse_gain: torch.Tensor,
        constant: torch.Tensor | None,
        heads: int,
        padded_heads: int,
        *,
        has_stored: bool,
        has_lse: bool = False,
    ) -> None:
        rank = len(inverse_gain)
        fixed = Arguments(inverse_gain, inverse_gain if constant is None else constant, padded_heads * rank)
        merge = MergePicksConstants(heads, rank, has_stored, constant is not None, has_lse)
        super().__init__(_merge_picks_kernel, fixed, dict(MERGE=merge), num_warps=2)

    @staticmethod
    def step(
        tokens: int, heads: int, stored: tuple[torch.Tensor, torch.Tensor], own: tuple[torch.Tensor, torch.Tensor]
    ) -> StepLaunch:
        """`stored`, `own`: lse fp32 [tokens, padded heads], and rows of `SplitPicksLaunch`, int32 [tokens, picks]."""
        for mine, other in zip(stored, own, strict=True):
            assert mine.stride() == other.stride() and other.stride(1) == 1, (mine.stride(), other.stride())
        strides = (x.stride(0) for x in own)
        return StepLaunch((tokens * heads, 1, 1), Arguments(Picked(*stored), Picked(*own), *strides))


@triton.jit
def _pick_sinks_kernel(
    output, query, lse, sinks, mean, scale, query_token_stride, query_head_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """Let a row share its weights with the sink of its head.

    Grid: (tokens times HEADS).

    Args:
        output: fp16, bf16 or fp32 [tokens, HEADS, RANK], contiguous; changed in place.
        query: fp16, bf16 or fp32 [tokens, HEADS, RANK], with `query_token_stride` and `query_head_stride` (int32); read
            where HAS_MEAN.
        lse: fp32 [tokens, HEADS], contiguous, natural, of scores that lack `scale` times `query` times `mean`.
        sinks: fp16, bf16 or fp32 [HEADS]; mean: fp32 [RANK]; scale: fp32.
    """
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, RANK)
    token, head = row // HEADS, row % HEADS
    whole = tl.load(lse + row)
    if HAS_MEAN:
        q = tl.load(query + token * query_token_stride + head * query_head_stride + channel).to(tl.float32)
        whole += tl.sum(q * tl.load(mean + channel), 0) * scale
    sink = tl.load(sinks + head).to(tl.float32)
    weight = 1 / (1 + tl.exp(sink - tl.maximum(whole, -1.0e30)))
    at = output + row * RANK + channel
    tl.store(at, (tl.load(at).to(tl.float32) * weight).to(output.dtype.element_ty))


class PickSinksLaunch(Launch):
    """`share_with_sinks` for layers with these `sinks`, float [heads], and `mean`, fp32 [rank], which stored latents
    lack, or None; for queries of the dtype and strides of `query`. Called with the output and queries, [tokens, heads,
    rank], and lse, fp32 [tokens, heads]."""

    def __init__(self, sinks: torch.Tensor, mean: torch.Tensor | None, scale: float, query: torch.Tensor) -> None:
        _, heads, rank = query.shape
        assert sinks.shape == (heads,) and sinks.is_contiguous() and query.stride(2) == 1, (sinks.shape, query.stride())
        super().__init__(
            _pick_sinks_kernel,
            Arguments(sinks, sinks if mean is None else mean, scale, *query.stride()[:2]),
            dict(HEADS=heads, RANK=rank, HAS_MEAN=mean is not None),
            num_warps=2,
        )

    @staticmethod
    def step(tokens: int, heads: int) -> StepLaunch:
        return StepLaunch((tokens * heads, 1, 1), Arguments())
