"""Attention over some keys and over further ones, combined by their log-sum-exps (as in FlashDecoding).

An attention sink is one more key without a value, so it only makes the result smaller (`apply_sinks`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import power_of_2
from .launch import Arguments, Launch


@triton.jit(do_not_specialize=["sums_stride", "part_sums_stride"], do_not_specialize_on_alignment=["sums", "part_sums"])
def _combine_kernel(
    output, sums, part_sums, part, sums_stride, part_sums_stride, output_token_stride, output_head_stride,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_DIM)
    there = head < HEADS
    a = tl.load(sums + head * sums_stride + token, mask=there, other=0.0)
    b = tl.load(part_sums + head * part_sums_stride + token, mask=there, other=0.0)
    b = tl.where(b == float("inf"), float("-inf"), b)  # FlashAttention 2 of no keys
    top = tl.maximum(a, b)
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    known = there[:, None] & (channel < HEAD_DIM)[None, :]
    target = output + token * output_token_stride + head[:, None] * output_head_stride + channel[None, :]
    x = tl.load(target, mask=known, other=0.0).to(tl.float32)
    y = tl.load(part + (token * HEADS + head[:, None]) * HEAD_DIM + channel[None, :],
                mask=known & (weight_b > 0)[:, None], other=0.0).to(tl.float32)  # fmt: skip
    result = x * (weight_a / total)[:, None] + y * (weight_b / total)[:, None]
    tl.store(target, result.to(output.dtype.element_ty), mask=known)
    tl.store(sums + head * sums_stride + token, top + tl.log(total), mask=there)


def bind_combine(output: torch.Tensor) -> Launch:
    """The kernel for outputs of these strides; see `combine`."""
    return Launch(_combine_kernel, Arguments(*output.stride()[:2]), _shape(output), num_warps=4)


def _shape(output: torch.Tensor) -> dict[str, int]:
    """The kernels' constants for outputs [tokens, query heads, head_dim]."""
    _, heads, head_dim = output.shape
    assert output.stride(2) == 1, output.stride()
    return dict(HEADS=heads, PADDED_HEADS=power_of_2(heads), HEAD_DIM=head_dim, PADDED_DIM=power_of_2(head_dim))


def combine(
    output: torch.Tensor,
    sums: torch.Tensor,
    part: torch.Tensor,
    part_sums: torch.Tensor,
    launch: Launch | None = None,
) -> None:
    """Add the attention over further keys to that over some, in place, by their log-sum-exps.

    Args:
        output: fp16 or bf16 [tokens, query heads, head_dim], unit stride over channels; each row has seen a key.
        sums: fp32 [query heads, tokens], unit stride over tokens: natural logarithms of the sums of weights.
        part: [tokens, query heads, head_dim], contiguous, attention over the further keys.
        part_sums: fp32 [query heads, tokens], unit stride over tokens; infinite (of either sign) where a row saw none.
        launch: of `bind_combine` for such outputs; None: made here.
    """
    assert sums.stride(1) == part_sums.stride(1) == 1 and part.is_contiguous(), part.stride()
    if launch is None:
        launch = bind_combine(output)
    step = Arguments(part, sums.stride(0), part_sums.stride(0))
    launch((len(part), 1, 1), (output, sums, part_sums), step)


@triton.jit(do_not_specialize=["sums_stride"], do_not_specialize_on_alignment=["sums"])
def _sinks_kernel(
    output, sums, sums_stride, sinks, output_token_stride, output_head_stride,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_DIM)
    there = head < HEADS
    sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
    weight = 1 / (1 + tl.exp(sink - tl.load(sums + head * sums_stride + token, mask=there, other=0.0)))
    known = there[:, None] & (channel < HEAD_DIM)[None, :]
    target = output + token * output_token_stride + head[:, None] * output_head_stride + channel[None, :]
    result = tl.load(target, mask=known, other=0.0).to(tl.float32) * weight[:, None]
    tl.store(target, result.to(output.dtype.element_ty), mask=known)


def bind_sinks(output: torch.Tensor, sinks: torch.Tensor) -> Launch:
    """The kernel for outputs of these strides and these sinks; see `apply_sinks`."""
    assert sinks.is_contiguous(), sinks.stride()
    return Launch(_sinks_kernel, Arguments(sinks, *output.stride()[:2]), _shape(output), num_warps=4)


def apply_sinks(output: torch.Tensor, sums: torch.Tensor, launch: Launch) -> None:
    """Let attention over all keys share its weights with the heads' sinks, in place.

    Args:
        output: fp16 or bf16 [tokens, query heads, head_dim], unit stride over channels.
        sums: fp32 [query heads, tokens], unit stride over tokens: natural logarithms of the sums of weights.
        launch: of `bind_sinks` for such outputs, with sinks fp16, bf16 or fp32 [query heads], contiguous: what the
            logarithm of a sink's weight is.
    """
    assert sums.stride(1) == 1, sums.stride()
    launch((len(output), 1, 1), (output, sums), Arguments(sums.stride(0)))
