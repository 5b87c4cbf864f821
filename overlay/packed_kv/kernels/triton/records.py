"""Records of arguments that several kernels share: tensors and numbers at the launch, pointers and numbers in the
kernel.

Triton specializes on each number in a record, so none changes from step to step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Blocks(NamedTuple):
    """`pointer`: to uint8 [blocks, heads, tokens, bytes], pages or a ring; its strides in bytes, int32."""

    pointer: Any
    block_stride: Any
    head_stride: Any


def blocks(cache: torch.Tensor) -> Blocks:
    """Pages or a ring as kernels take them: [blocks, heads, tokens, bytes], or without heads."""
    return Blocks(cache, cache.stride(0), stride_of_heads(cache) if cache.ndim == 4 else 0)


def stride_of_heads(x: torch.Tensor) -> int:
    """The stride of dimension 1, the heads; 0 for one head, as Triton 3.6 does not support strides of 1 in a record."""
    return x.stride(1) if x.shape[1] > 1 else 0


class Strides(NamedTuple):
    """Strides of vectors [tokens, heads, channels] over the first two, int32."""

    token: Any
    head: Any


def strides(x: torch.Tensor) -> Strides:
    """Strides of vectors [tokens, heads, channels], whose last one is 1."""
    assert x.ndim == 3 and x.stride(2) == 1, (x.shape, x.stride())
    return Strides(x.stride(0), stride_of_heads(x))


class Partials(NamedTuple):
    """Results of splits, contiguous: `output` fp32 [tokens, query heads, splits, stored_dim], sums of values times
    weights; `stats` fp32 [tokens, query heads, splits, 2], maximum of the scores and sum of the weights."""

    output: Any
    stats: Any
