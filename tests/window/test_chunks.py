"""Ring buffers of chunked attention: layers see a request as one of each chunk, and these share its ring buffer."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.window.layer import WindowBackend, _of_chunks
from vllm.v1.attention.backend import CommonAttentionMetadata

CHUNK, BLOCK, RING_BLOCKS, WINDOW = 32, 4, 6, 16


def build(contexts: list[int], counts: list[int], table: torch.Tensor, slack: int) -> Any:
    """Metadata of requests with `contexts` tokens, the last `counts` of which are in the batch."""
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(contexts, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens, num_reqs=len(counts),
        num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=max(contexts), block_table_tensor=table,
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
    )  # fmt: skip
    spec = SimpleNamespace(ring_block_size=BLOCK, ring_blocks=RING_BLOCKS, window=WINDOW, slack=slack)
    sizes = SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8)
    config: Any = SimpleNamespace(scheduler_config=sizes)
    builder: Any = _of_chunks(WindowBackend, CHUNK).get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    return builder.build(0, common)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_of_a_ring_is_there(seed: int) -> None:
    """And is of the query's chunk. A ring is played for each request."""
    rng = random.Random(seed)
    slack = rng.choice([1, 4])
    counts = sorted(rng.choice([1, slack, 5, 30, 70]) for _ in range(4))
    prefixes = [rng.randrange(60) for _ in counts]
    contexts = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
    width = -(-max(contexts) // BLOCK)
    table = torch.zeros(4, width, dtype=torch.int32)
    for request, context in enumerate(contexts):
        hit = rng.choice([0, prefixes[request] // BLOCK])
        for entry in range(hit, -(-context // BLOCK)):
            table[request, entry] = 1 + request * RING_BLOCKS + entry % RING_BLOCKS
    made = build(contexts, counts, table, slack)
    held = {  # slot -> request and position, before the batch
        int(table[request, position // BLOCK]) * BLOCK + position % BLOCK: (request, position)
        for request, prefix in enumerate(prefixes)
        for position in range(prefix)
        if table[request, position // BLOCK]
    }
    rows = [
        (request, position)
        for request, context in enumerate(contexts)
        for position in range(context - counts[request], context)
    ]
    written = held | {slot: row for slot, row in zip(made.slots.tolist(), rows, strict=True) if slot >= 0}
    assert len({slot for slot in made.slots.tolist() if slot >= 0}) == sum(slot >= 0 for slot in made.slots.tolist())
    index = 0
    for request, (prefix, context) in enumerate(zip(prefixes, contexts, strict=True)):
        for start in range(prefix // CHUNK * CHUNK, context, CHUNK):
            begin, end = max(prefix, start), min(context, start + CHUNK)
            is_decode = end - begin <= slack
            found = written if is_decode else held
            for position in range(start + int(made.first[index]), end if is_decode else begin):
                slot = int(made.block_table[index, (position - start) // BLOCK]) * BLOCK + position % BLOCK
                assert found[slot] == (request, position)
            index += 1
    assert index == len(made.first)
