"""Checks, by assertions, of the tensors that kernels are given; and `head_stride`."""

from __future__ import annotations

import torch

from ..layout import MICRO_BLOCK


def check_int32(*tensors: torch.Tensor | None) -> None:
    """Assert the form of a step's tables and lengths that kernels assume: int32, unit stride."""
    for x in tensors:
        assert x is None or (x.dtype == torch.int32 and x.stride(-1) == 1), (x.dtype, x.stride())


def check_pages(cache: torch.Tensor, align: int = 16) -> None:
    """Assert the layout of a cache: uint8 [blocks, ..., block_size, slot_bytes], its last two dimensions contiguous.
    `align`: bytes of which the address and the other strides are multiples."""
    *outer, token, byte = cache.stride()
    assert cache.dtype == torch.uint8 and (token, byte) == (cache.shape[-1], 1), (cache.dtype, cache.stride())
    assert not any(n % align for n in (cache.data_ptr(), *outer)), (cache.data_ptr(), outer)


def check_stored_pages(cache: torch.Tensor, slot_bytes: int) -> None:
    """Assert the layout of a cache that the store kernels write words of 4 bytes to, in micro-blocks."""
    check_pages(cache, 4)
    assert cache.shape[-1] == slot_bytes and cache.shape[-2] % MICRO_BLOCK == 0, (cache.shape, slot_bytes)


def check_ring(cache: torch.Tensor, kv_heads: int, slot_bytes: int, align: int = 2) -> None:
    """Assert the layout of a ring: uint8 [blocks, kv_heads, block_size, slot_bytes], as `check_pages` says."""
    check_pages(cache, align)
    assert cache.shape[1] == kv_heads and cache.shape[3] == slot_bytes, (cache.shape, kv_heads, slot_bytes)


def check_slots(slots: torch.Tensor, ring_slots: torch.Tensor) -> None:
    """Assert the form of slots that the store kernels assume: integers; for a ring, slots of the first tokens."""
    assert slots.ndim == 1 and slots.is_contiguous() and not slots.is_floating_point(), (slots.dtype, slots.shape)
    assert ring_slots.is_contiguous() and len(ring_slots) <= len(slots), (ring_slots.shape, slots.shape)


def head_stride(of_heads: torch.Tensor) -> int:
    """Stride over heads; 0 where all heads share one."""
    return 0 if len(of_heads) == 1 else of_heads.stride(0)
