"""Slots of a batch's tokens in their requests' rings, and the first token that can be read in each ring."""

from __future__ import annotations

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
    """Fill `slots` and `first`; the reference of `kernels.triton.ring.plan_ring`.

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
    slots.fill_(-1)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for request, seq_len in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        count = rows.stop - rows.start
        prefix = seq_len - count
        low = max(0, prefix - window + 1)
        newest = (seq_len if count <= longest_decode else prefix) - 1
        entries = range(low // block_size, newest // block_size + 1 if count else 0)
        missing = [entry for entry in entries if not block_table[request, entry]]
        first[request] = max([low, *((entry + 1) * block_size for entry in missing)])

        positions = torch.arange(prefix, seq_len, device=slots.device)
        number = positions // block_size
        kept = number > (seq_len - 1) // block_size - ring_blocks
        block = torch.where(kept, block_table[request, number], 0)
        slots[rows] = torch.where(block > 0, block * block_size + positions % block_size, -1).to(torch.int32)
