"""The ring's bookkeeping in the scheduler, on its own: any order of hits, chunks, decodes, drafts and frees."""

from __future__ import annotations

import random

import pytest
import torch
from packed_kv.attention.ring_cache import RingManager, RingSpec
from vllm.v1.core.block_pool import BlockPool


@pytest.mark.parametrize("seed", range(60))
def test_what_a_step_reads_is_what_was_written(seed: int) -> None:
    """A worker is played that writes each token where the table says, of a long chunk the last blocks only; before, its
    queries must find each token of their windows, or the null block."""
    rng = random.Random(seed)
    window, drafts, block = rng.choice([16, 64, 100]), rng.choice([0, 4]), rng.choice([1, 2, 4, 8, 32])
    spec = RingSpec(
        block_size=block, num_kv_heads=2, head_size=64, dtype=torch.uint8, state_content_bytes=136, window=window,
        slack=1 + drafts, ring_block_size=block,
    )  # fmt: skip
    pool = BlockPool(num_gpu_blocks=4000, enable_caching=True, hash_block_size=16)
    manager = RingManager(spec, block_pool=pool, enable_caching=True, kv_cache_group_id=1, scheduler_block_size=32)
    free = pool.get_num_free_blocks()
    for request in map(str, range(6)):
        local, external = 16 * rng.randrange(20), rng.choice([0, 0, rng.randrange(100)])
        hit = local + external
        written: dict[int, int] = {}  # block id -> index of the block of tokens that it holds
        worker, first_step = hit, True
        while worker < 700:
            count = rng.choice([1, 1, 1, 1, 7, 40, 300]) if not drafts or rng.random() < 0.2 else 1 + drafts
            tokens = worker + count + rng.choice([0, drafts])
            before = pool.get_num_free_blocks()
            need = manager.get_num_blocks_to_allocate(request, tokens, [], hit, local, tokens)
            if first_step and hit:
                manager.add_local_computed_blocks(request, [], local, external)
                manager.allocate_external_computed_blocks(request, local, external)
            first_step = False
            manager.allocate_new_blocks(request, tokens, tokens)
            assert before - pool.get_num_free_blocks() == need
            table = [entry.block_id for entry in manager.req_to_blocks[request]]
            assert len(table) >= -(-tokens // block)
            for position in range(max(0, worker - window + 1), worker):
                entry = table[position // block]
                assert entry or position < -(-hit // block) * block, "a miss inside the window"
                assert not entry or written[entry] == position // block, "overwritten too early"
            last = (worker + count - 1) // block
            for index in range(worker // block, last + 1):
                if index > last - spec.ring_blocks and table[index]:
                    written[table[index]] = index
            worker += count - (rng.randrange(min(drafts, count - 1) + 1) if drafts and count == 1 + drafts else 0)
        manager.free(request)
        assert pool.get_num_free_blocks() == free
