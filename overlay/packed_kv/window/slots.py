"""Slots of a batch's tokens in their requests' rings, and the first token that can be read in each ring."""

from __future__ import annotations

import numpy as np
import torch


def fill_slots(
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
    """Fill `slots` and `first`; the reference of `kernels.triton.ring.plan_ring`. A CPU's steps wait for it, so it is
    in NumPy, whose calls take less time than PyTorch's over so few numbers.

    Args:
        query_start: int32 [requests + 1], the batch's first token of each request; the last one may be below `slots`'
            length: what follows is padding.
        seq_lens: int32 [requests], tokens of each request, the batch's included.
        block_table: int32 [requests, blocks]; entry i has tokens i * block_size and on, 0: none has them. Entries past
            a request's end may hold anything.
        slots: int32 [tokens]; filled with block * block_size + offset, or -1: not kept. A ring keeps the newest
            `ring_blocks` blocks of a request.
        first: int32 [requests]; filled with the first token from which on all tokens are in the ring, limited to the
            tokens that queries of the batch read: up to `window` - 1 tokens before the batch's. Requests of up to
            `longest_decode` tokens read their own tokens there too, others (prefills) only those before.
    """
    starts, lengths, table = (x.cpu().numpy() for x in (query_start, seq_lens, block_table))
    counts = np.diff(starts)
    prefix = lengths - counts
    low = np.maximum(prefix - window + 1, 0)
    end = np.where(counts <= longest_decode, lengths, prefix)
    entry = low[:, None] // block_size + np.arange((window + longest_decode) // block_size + 2)
    is_read = (entry * block_size < end[:, None]) & (counts > 0)[:, None]
    is_missing = is_read & (np.take_along_axis(table, np.minimum(entry, table.shape[1] - 1), axis=1) == 0)
    first.copy_(torch.from_numpy(np.maximum(low, ((entry + 1) * block_size * is_missing).max(axis=1))))

    request = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(starts[0], starts[-1]) + (prefix - starts[:-1])[request]
    number = position // block_size
    is_kept = number > ((lengths - 1) // block_size - ring_blocks)[request]
    block = table[request, number] * is_kept
    slot = np.where(block > 0, block * block_size + position % block_size, -1)
    slots.fill_(-1)
    slots[starts[0] : starts[-1]] = torch.from_numpy(slot)
