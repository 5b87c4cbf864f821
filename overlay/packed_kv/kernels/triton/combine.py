"""Attention over some keys and over further ones, combined by their log-sum-exps (as in FlashDecoding).

An attention sink is one more key without a value, so it only makes the result smaller (`SinksLaunch`). Where ranks
split the keys, each rank weighs its result before the sum over ranks (`WeighByLseLaunch`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import power_of_2
from .launch import Arguments, Launch

PADDING, DECODE, NEW, BEHIND = -1, 0, 1, 2
"""Kinds of a step's rows: padding, rows of decodes, of chunks without a prefix, and of chunks behind one."""
_PADDING, _DECODE, _BEHIND = tl.constexpr(PADDING), tl.constexpr(DECODE), tl.constexpr(BEHIND)
SHARE_ELEMENTS = 8192
"""Elements of an output that a program weighs: 64 per thread."""


class OutputConstants(NamedTuple):
    """Query heads of an output and their channels, and both padded to powers of 2; `padded_heads` may cover only some
    of the heads."""

    heads: int
    padded_heads: int
    head_dim: int
    padded_dim: int


class PartConstants(NamedTuple):
    """Channels of a head of the part, and whether all rows have a part."""

    dim: int
    are_all: bool


@triton.jit(
    do_not_specialize=["lse_stride", "part_lse_head_stride", "part_lse_token_stride"],
    do_not_specialize_on_alignment=["lse", "part_lse", "row_kinds"],
)
def _combine_kernel(
    output, lse, part_lse, part, row_kinds, lse_stride, part_lse_head_stride, part_lse_token_stride,
    output_token_stride, output_head_stride, OUTPUT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. `output` [tokens, heads, head_dim] and `part` [tokens, heads, PART.dim], fp16, bf16 or fp32; `lse`
    and `part_lse` fp32 [heads, tokens]; `row_kinds` int32 [tokens], unless PART.are_all: padding becomes 0, and only
    rows behind a prefix have a part. OUTPUT: `OutputConstants`; PART: `PartConstants`."""
    HEADS: tl.constexpr = OUTPUT.heads
    PART_DIM: tl.constexpr = PART.dim
    ARE_ALL: tl.constexpr = PART.are_all
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, OUTPUT.padded_heads), tl.arange(0, OUTPUT.padded_dim)
    there = head < HEADS
    if not ARE_ALL:
        kind = tl.load(row_kinds + token)
        there &= (kind == _PADDING) | (kind == _BEHIND)
    a = tl.load(lse + head * lse_stride + token, mask=there, other=0.0)
    b = tl.load(part_lse + head * part_lse_head_stride + token * part_lse_token_stride, mask=there, other=0.0)
    b = tl.where(b == float("inf"), float("-inf"), b)  # FlashAttention 2 of no keys
    top = tl.maximum(a, b)
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    known = there[:, None] & (channel < OUTPUT.head_dim)[None, :]
    target = output + token * output_token_stride + head[:, None] * output_head_stride + channel[None, :]
    x = tl.load(target, mask=known, other=0.0).to(tl.float32)
    y = tl.load(part + (token * HEADS + head[:, None]) * PART_DIM + channel[None, :],
                mask=known & (weight_b > 0)[:, None], other=0.0).to(tl.float32)  # fmt: skip
    result = x * (weight_a / total)[:, None] + y * (weight_b / total)[:, None]
    if not ARE_ALL:
        result = tl.where(kind == _PADDING, 0.0, result)
    tl.store(target, result.to(output.dtype.element_ty), mask=known)
    tl.store(lse + head * lse_stride + token, top + tl.log(total), mask=there)


def _constants(output: torch.Tensor) -> OutputConstants:
    """The kernels' constants for outputs [tokens, query heads, head_dim]."""
    _, heads, head_dim = output.shape
    assert output.stride(2) == 1, output.stride()
    return OutputConstants(heads, power_of_2(heads), head_dim, power_of_2(head_dim))


class CombineLaunch(Launch):
    """Adds attention over further keys to a given attention, for outputs of the dtype and strides of `output` and parts
    [tokens, query heads, part_dim]. `are_all`: whether all rows have a part."""

    def __init__(self, output: torch.Tensor, part_dim: int, *, are_all: bool = True) -> None:
        constants = dict(OUTPUT=_constants(output), PART=PartConstants(part_dim, are_all))
        super().__init__(_combine_kernel, Arguments(*output.stride()[:2]), constants, num_warps=4)

    def combine(
        self, output: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor,
        row_kinds: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add `part` to `output`, and to `lse`, in place, by their log-sum-exps.

        Args:
            output: [tokens, query heads, head_dim]; each row has seen a key.
            lse: fp32 [query heads, tokens], unit stride over tokens: natural log-sum-exp of the scores.
            part: [tokens, query heads, head_dim or more], contiguous; channels beyond the output's are not read.
            part_lse: fp32 [query heads, tokens] of any strides; infinite (of either sign) where a row saw
                none of the further keys.
            row_kinds: int32 [tokens], of PADDING, DECODE, NEW and BEHIND: where it is PADDING, `output` becomes 0; rows
                of DECODE and NEW have no part, and stay unchanged. None: all rows have a part, as given to the
                constructor.
        """
        assert lse.stride(1) == 1 and part.is_contiguous(), (lse.stride(), part.stride())
        assert self.constants["PART"].are_all == (row_kinds is None)
        arguments = Arguments(part, lse if row_kinds is None else row_kinds, lse.stride(0), *part_lse.stride())
        self((len(part), 1, 1), (output, lse, part_lse), arguments)


@triton.jit(do_not_specialize=["lse_stride"], do_not_specialize_on_alignment=["lse", "row_kinds"])
def _sinks_kernel(
    output, lse, row_kinds, lse_stride, sinks, output_token_stride, output_head_stride,
    OUTPUT: tl.constexpr, ARE_ALL: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. `output` fp16 or bf16 [tokens, heads, head_dim]; `lse` fp32 [heads, tokens]; `row_kinds` int32
    [tokens], unless ARE_ALL; `sinks` fp16, bf16 or fp32 [heads]. OUTPUT: `OutputConstants`."""
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, OUTPUT.padded_heads), tl.arange(0, OUTPUT.padded_dim)
    there = head < OUTPUT.heads
    if not ARE_ALL:
        there &= tl.load(row_kinds + token) > _DECODE
    sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
    weight = 1 / (1 + tl.exp(sink - tl.load(lse + head * lse_stride + token, mask=there, other=0.0)))
    known = there[:, None] & (channel < OUTPUT.head_dim)[None, :]
    target = output + token * output_token_stride + head[:, None] * output_head_stride + channel[None, :]
    result = tl.load(target, mask=known, other=0.0).to(tl.float32) * weight[:, None]
    tl.store(target, result.to(output.dtype.element_ty), mask=known)


class SinksLaunch(Launch):
    """Lets attention over all keys share its weights with the heads' `sinks`, which are logarithms of weights; for
    outputs of the dtype and strides of `output`. `are_all`: whether all rows do so."""

    def __init__(self, output: torch.Tensor, sinks: torch.Tensor, *, are_all: bool = True) -> None:
        assert sinks.is_contiguous(), sinks.stride()
        constants = dict(OUTPUT=_constants(output), ARE_ALL=are_all)
        super().__init__(_sinks_kernel, Arguments(sinks, *output.stride()[:2]), constants, num_warps=4)

    def apply(self, output: torch.Tensor, lse: torch.Tensor, row_kinds: torch.Tensor | None = None) -> None:
        """Change `output` in place.

        Args:
            output: [tokens, query heads, head_dim].
            lse: fp32 [query heads, tokens], unit stride over tokens, of the scores.
            row_kinds: int32 [tokens], of PADDING, DECODE, NEW and BEHIND: the first two stay unchanged. None: no row
                does, as given to the constructor.
        """
        assert lse.stride(1) == 1, lse.stride()
        assert self.constants["ARE_ALL"] == (row_kinds is None)
        self((len(output), 1, 1), (output, lse, lse if row_kinds is None else row_kinds), Arguments(lse.stride(0)))


@triton.jit
def _share_kernel(output, lse, rank_lse, RANK: tl.constexpr, RANKS: tl.constexpr, OUTPUT: tl.constexpr):
    """Grid: (tokens, blocks of `padded_heads` heads). `output` fp16, bf16 or fp32 [tokens, heads, head_dim]; `lse` fp32
    [tokens, heads]; `rank_lse` fp32 [RANKS, tokens, heads]. OUTPUT: `OutputConstants`."""
    HEADS: tl.constexpr = OUTPUT.heads
    PADDED_HEADS: tl.constexpr = OUTPUT.padded_heads
    HEAD_DIM: tl.constexpr = OUTPUT.head_dim
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    head = tl.program_id(1) * PADDED_HEADS + tl.arange(0, PADDED_HEADS)
    channel = tl.arange(0, OUTPUT.padded_dim)
    there, nothing = head < HEADS, float("-inf")
    top = tl.full([PADDED_HEADS], nothing, tl.float32)
    for rank in tl.static_range(RANKS):
        top = tl.maximum(top, tl.load(rank_lse + (rank * tokens + token) * HEADS + head, mask=there, other=nothing))
    top = tl.where(top == nothing, 0.0, top)
    total = tl.zeros([PADDED_HEADS], tl.float32)
    for rank in tl.static_range(RANKS):
        own = tl.load(rank_lse + (rank * tokens + token) * HEADS + head, mask=there, other=nothing)
        total += tl.exp(own - top)
    own = tl.load(rank_lse + (RANK * tokens + token) * HEADS + head, mask=there, other=nothing)
    weight = tl.where(total > 0, tl.exp(own - top) / total, 0.0)
    known = there[:, None] & (channel < HEAD_DIM)[None, :]
    target = output + (token * HEADS + head[:, None]) * HEAD_DIM + channel[None, :]
    result = tl.load(target, mask=known & (weight > 0)[:, None], other=0.0).to(tl.float32) * weight[:, None]
    tl.store(target, result.to(output.dtype.element_ty), mask=known)
    tl.store(lse + token * HEADS + head, top + tl.log(total), mask=there)


class WeighByLseLaunch(Launch):
    """Weighs the attention of rank `rank` of `ranks` over its share of the keys, so that the sum over ranks is
    attention over all keys; for outputs of the dtype and heads of `output`."""

    def __init__(self, output: torch.Tensor, ranks: int, rank: int) -> None:
        whole = _constants(output)
        heads = max(1, SHARE_ELEMENTS // whole.padded_dim)  # whose channels a program keeps in registers
        constants = dict(RANK=rank, RANKS=ranks, OUTPUT=whole._replace(padded_heads=min(whole.padded_heads, heads)))
        self.blocks = -(-whole.heads // heads)
        """Programs of a token."""
        super().__init__(_share_kernel, Arguments(), constants, num_warps=4)

    def weigh(self, output: torch.Tensor, rank_lse: torch.Tensor) -> torch.Tensor:
        """Change `output` in place, contiguous; rows that saw no key are not read.

        Args:
            output: [tokens, query heads, head_dim].
            rank_lse: fp32 [ranks, tokens, query heads], contiguous: each rank's natural log-sum-exp of its scores,
                -inf where a row saw no key.

        Returns:
            fp32 [tokens, query heads], the log-sum-exp over all ranks; -inf where no rank has a key.
        """
        assert output.is_contiguous() and rank_lse.is_contiguous(), (output.stride(), rank_lse.stride())
        lse = torch.empty_like(rank_lse[0])
        self((len(output), self.blocks, 1), (output, lse, rank_lse), Arguments())
        return lse
