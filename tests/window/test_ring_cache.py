"""The ring's bookkeeping in the scheduler, on its own: any order of hits, chunks, decodes, drafts and frees."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from packed_kv.window.cache_group import RingManager, RingSpec, cut_into_ring_blocks
from vllm.v1.core.block_pool import BlockPool


@dataclass
class Request:
    """`local`, `external`: tokens of a hit. `computed`: those in the cache, rejected drafts not counted."""

    name: str
    local: int
    external: int
    computed: int = field(init=False)
    is_new: bool = True

    def __post_init__(self) -> None:
        self.computed = self.hit = self.local + self.external


@pytest.mark.parametrize("seed", range(60))
def test_what_a_step_reads_is_what_was_written(seed: int) -> None:
    """A worker is played that writes each token where the table says, of a long chunk the last blocks only; before, its
    queries must find each token of their windows, or the null block. Four requests take turns."""
    rng = random.Random(seed)
    window, drafts, block = rng.choice([16, 64, 100]), rng.choice([0, 4]), rng.choice([1, 2, 4, 8, 32])
    spec = RingSpec(
        block_size=block * rng.choice([1, 1, 2, 5, 40]), num_kv_heads=2, head_size=64, dtype=torch.uint8,
        state_content_bytes=136, window=window, slack=1 + drafts, ring_block_size=block,
    )  # fmt: skip
    pool = BlockPool(num_gpu_blocks=4000, enable_caching=True, hash_block_size=16)
    manager = RingManager(spec, block_pool=pool, enable_caching=True, kv_cache_group_id=1, scheduler_block_size=32)
    free = pool.get_num_free_blocks()
    written: dict[int, tuple[str, int]] = {}  # ring block -> request and number of the block of tokens that it holds
    names = map(str, range(12))
    live: list[Request] = []
    while live or (name := next(names, None)):
        while len(live) < 4 and name:
            live.append(Request(name, 16 * rng.randrange(20), rng.choice([0, 0, rng.randrange(100)])))
            name = next(names, None)
        request = rng.choice(live)
        count = rng.choice([1, 1, 1, 1, 7, 40, 300]) if not drafts or rng.random() < 0.2 else 1 + drafts
        tokens = request.computed + count + rng.choice([0, drafts])
        before = pool.get_num_free_blocks()
        need = manager.get_num_blocks_to_allocate(request.name, tokens, [], request.hit, request.local, tokens)
        if request.is_new and request.hit:
            manager.add_local_computed_blocks(request.name, [], request.local, request.external)
            manager.allocate_external_computed_blocks(request.name, request.local, request.external)
        request.is_new = False
        manager.allocate_new_blocks(request.name, tokens, tokens)
        assert before - pool.get_num_free_blocks() == need
        table = [entry.block_id for entry in manager.req_to_blocks[request.name]]
        assert len(table) >= -(-tokens // block)
        for position in range(max(0, request.computed - window + 1), request.computed):
            entry = table[position // block]
            assert entry or position < -(-request.hit // block) * block, "a miss inside the window"
            assert not entry or written[entry] == (request.name, position // block), "overwritten too early"
        last = (request.computed + count - 1) // block
        for index in range(request.computed // block, last + 1):
            if index > last - spec.ring_blocks and table[index]:
                written[table[index]] = request.name, index
        rejected = rng.randrange(min(drafts, count - 1) + 1) if drafts and count == 1 + drafts else 0
        request.computed += count - rejected
        if request.computed > 700 or rng.random() < 0.02:  # done, or preempted
            manager.free(request.name)
            live.remove(request)
    assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize("is_block_outermost", [False, True], ids=["LBHNC", "BLHNC"])
def test_ring_blocks_of_all_layers_are_apart(is_block_outermost: bool) -> None:
    """Three layers' caches in one pool, in blocks cut in five; no byte belongs to two ring blocks, and all of a block's
    ring blocks are in that block."""
    layers, blocks, heads, count, tokens, slot_bytes = 3, 4, 2, 5, 8, 24
    page = heads * count * tokens * slot_bytes
    block_bytes = layers * page + 80  # another group's pages may be larger
    pool = torch.full((blocks * (block_bytes if is_block_outermost else layers * page),), -1)
    strides = (block_bytes if is_block_outermost else page, count * tokens * slot_bytes, slot_bytes, 1)
    for layer in range(layers):
        offset = layer * (page if is_block_outermost else blocks * page)
        cache = pool.as_strided((blocks, heads, count * tokens, slot_bytes), strides, offset)
        cut = cut_into_ring_blocks(cache, tokens, is_block_outermost)
        assert cut.shape == (blocks * count, heads, tokens, slot_bytes)
        for number in range(len(cut)):
            assert (cut[number] == -1).all(), "taken by another"
            cut[number] = number // count
    owners = pool.view(-1, block_bytes) if is_block_outermost else pool.view(layers, blocks, page).movedim(0, 1)
    for block, owned in enumerate(owners.flatten(1)):
        assert set(owned.tolist()) <= {block, -1}
        assert int((owned == block).sum()) == layers * page


@pytest.mark.parametrize("count", [1, 5])
def test_the_warm_up_writes_in_no_block_of_another(count: int) -> None:
    """Its tables have blocks' numbers, one after the other over requests and groups; read as those of ring blocks, they
    must lie in blocks of the ring's own. (Beside state layers on a GPU, the engine did not start.)"""
    from vllm.v1.worker.gpu.warmup import _reserved_block_count

    spec = RingSpec(
        block_size=8 * count, num_kv_heads=2, head_size=64, dtype=torch.uint8, state_content_bytes=136, window=64,
        slack=1, ring_block_size=8,
    )  # fmt: skip
    reserve = {"num_lookahead_tokens": 0, "max_model_len": 4096, "max_encoder_len": 0}
    numbers = iter(range(1, 1000))
    rings, others = set(), set()
    for _request in range(16):
        others.add(next(numbers))  # its state
        rings |= {next(numbers) // count for _ in range(_reserved_block_count(2, spec, **reserve))}
    assert not rings & others
