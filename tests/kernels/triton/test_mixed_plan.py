"""Tables of mixed steps that run as whole CUDA graphs: the kernel against the reference, this against the batch."""

from __future__ import annotations

import random

import pytest
import torch
from packed_kv.attention.passes import most_passes
from packed_kv.kernels.triton.combine import BEHIND, DECODE, NEW, PADDING
from packed_kv.kernels.triton.mixed_plan import MixedTables, plan_in_pytorch, plan_mixed
from test_decode import DEVICE

Requests = list[tuple[int, int]]
"""Query tokens and tokens in the cache of each request; behind these, padding."""


def draw(generator: random.Random, requests: int, tokens: int, longest: int) -> Requests:
    """Return a batch that fits: decodes, then chunks, behind prefixes or new."""
    found: Requests = []
    share = generator.random()
    while len(found) < requests and (room := tokens - sum(count for count, _ in found)) > longest:
        if generator.random() < share:
            count = generator.randint(1, longest)
        else:
            count = generator.randint(longest + 1, min(room, longest + generator.choice([1, 20, 400])))
        prefix = generator.choice([0, 0, 5, 700, 9000]) if count > longest else generator.randint(0, 3000)
        found.append((count, prefix + count))
    return sorted(found, key=lambda request: request[0] > longest)


def tensors(batch: Requests, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch's `query_start` and `seq_lens`, as vLLM pads them."""
    counts = torch.tensor([0, *(count for count, _ in batch), *[0] * (requests - len(batch))])
    lengths = [tokens for _, tokens in batch] + [0] * (requests - len(batch))
    return counts.cumsum(0).to(DEVICE, torch.int32), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def tables(requests: int, tokens: int, longest: int, pass_tokens: int, *, has_ring: bool) -> MixedTables:
    count = most_passes(tokens, requests, longest, pass_tokens)
    made = MixedTables.empty(requests, tokens, count, has_ring=has_ring, device=torch.device(DEVICE))
    for table in made:
        table.fill_(-77)  # of the replay before
    return made


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_equals_the_reference(seed: int) -> None:
    generator = random.Random(seed)
    longest, pass_tokens = generator.choice([1, 1, 4]), generator.choice([16, 8, 21])
    requests, tokens = generator.choice([1, 3, 17]), generator.choice([16, 64, 512])
    slots = torch.arange(100, 100 + tokens, dtype=torch.int32, device=DEVICE) if seed % 2 else None
    found = []
    of_batch = tensors(draw(generator, requests, tokens, longest), requests)
    for plan in (plan_in_pytorch, plan_mixed):
        made = tables(requests, tokens, longest, pass_tokens, has_ring=slots is not None)
        plan(made, *of_batch, slots, longest, pass_tokens)
        found.append(made)
    for name, expected, ours in zip(MixedTables._fields, *found, strict=True):
        assert torch.equal(expected, ours), name


def test_each_row_reads_its_keys_once() -> None:
    """In thousands of batches, a decode reads its request's pages, and a chunk's row its prefix and its own tokens up
    to it; no batch needs more passes than there are."""
    generator, fullest = random.Random(7), 0.0
    for _ in range(3000):
        longest, pass_tokens = generator.choice([1, 1, 4]), generator.choice([16, 8, 4])
        requests, tokens = generator.randint(1, 40), generator.choice([16, 32, 64, 192, 512])
        batch = draw(generator, requests, tokens, longest)
        made = tables(requests, tokens, longest, pass_tokens, has_ring=True)
        slots = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        plan_in_pytorch(made, *tensors(batch, requests), slots, longest, pass_tokens)
        passes = [one for one in made.passes.tolist() if one[2]]
        fullest = max(fullest, len(passes) / len(made.passes))
        over_prefix = {row + i: (request, keys) for request, row, rows, keys in passes for i in range(rows)}
        assert len(over_prefix) == sum(rows for _, _, rows, _ in passes) == (made.row_kinds == BEHIND).sum()
        row, decode_start, chunk_start = 0, made.decode_start.tolist(), made.chunk_start.tolist()
        decode_slots, chunk_slots = made.decode_slots.tolist(), made.chunk_slots.tolist()
        for request, (count, context) in enumerate(batch):
            is_decode = count <= longest
            starts, other = (decode_start, chunk_start) if is_decode else (chunk_start, decode_start)
            assert (starts[request], starts[request + 1]) == (row, row + count) and other[request] == other[request + 1]
            assert made.decode_lens[request] == (context if is_decode else 0)
            for i in range(row, row + count):
                expected = (request, context - count) if not is_decode and context > count else None
                assert over_prefix.get(i) == expected
                assert made.row_kinds[i] == (DECODE if is_decode else BEHIND if expected else NEW)
                assert (decode_slots[i], chunk_slots[i]) == ((i, -1) if is_decode else (-1, i))
            row += count
        assert (made.row_kinds[row:] == PADDING).all()
        assert (made.decode_slots[row:] == -1).all() and (made.chunk_slots[row:] == -1).all()
    assert fullest > 0.95
