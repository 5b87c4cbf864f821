"""The recent window in vLLM's KV-cache planning: a ring of a few blocks a request, claimed from vLLM's own pool.

A group's block table is indexed by position, as any other: entry i says where tokens i * block_size and on are. Here
the same few blocks are repeated. The null block (0) means that tokens are only in their packed pages, not in the ring:
tokens from the prefix cache or another server, and tokens that a long chunk has already passed. So the scheduler
decides which entries are valid, and no tags are needed.

Where the pool's blocks hold much more than a ring, as beside state layers, a block is cut into ring blocks, and rings
of several requests lie in it. Tables then have the numbers of ring blocks: block * ring blocks a block + index within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheSpec, MLAAttentionSpec

from ..layout import choose_ring_block, ring_slot_bytes
from ..vllm_compat import register_cache_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class RingSpec(CircularBufferSpec):
    """A ring that holds the newest `window` tokens of a request.

    `block_size`: tokens that a block of vLLM's pool holds. `ring_block_size`: tokens of a ring block, a divisor of
    `block_size`. `slack`: tokens that a step writes before they are known to stay: the sampled one and its drafts. Like
    its base class, which vLLM's own scratch groups use, it takes no part in the prefix cache.
    """

    window: int
    slack: int
    ring_block_size: int

    enable_kv_transfer: ClassVar[bool] = False
    """A ring belongs to one request of one engine: our patch keeps its group from KV connectors."""

    @property
    def table_entries_per_block(self) -> int:
        """Ring blocks per block of the pool, for KV connectors, which take a table's numbers for the pool's blocks."""
        return self.ring_blocks_a_block

    @property
    def ring_blocks(self) -> int:
        """Ring blocks a request: the window may begin and end inside one."""
        return cdiv(self.window + self.slack, self.ring_block_size) + 1

    @property
    def ring_blocks_a_block(self) -> int:
        return self.block_size // self.ring_block_size

    @property
    def num_warmup_blocks(self) -> int:
        """Blocks that vLLM's warm-up makes up for a request, in tables of its own: none where their numbers would be
        taken for those of ring blocks, in the pages and states of its other requests."""
        return 1 if self.ring_blocks_a_block == 1 else 0

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return cdiv(self.ring_blocks * self.page_size_bytes, self.ring_blocks_a_block)

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        return cdiv(max_len, self.ring_block_size)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, RingSpec) for spec in kv_cache_specs.values())


def ring_spec(packed: AttentionSpec, window: int, slack: int, *, one_size: bool, side_by_side: bool) -> RingSpec:
    """Spec of the ring for a layer with the spec `packed`, in blocks that take no more than its bytes.

    Several ring blocks lie in one where all layers' pages have one size, or pages of any size lie side by side in a
    block (BLHNC). Else vLLM pads or scales pages, to distances that are not known here.
    """
    slot_bytes = ring_slot_bytes(packed.head_size, 1 if isinstance(packed, MLAAttentionSpec) else 2)
    ring_block_size, count = choose_ring_block(
        packed.page_size_bytes, packed.num_kv_heads * slot_bytes, packed.block_size, window + slack,
        is_cut=one_size or side_by_side,
    )  # fmt: skip
    return RingSpec(
        block_size=ring_block_size * count,
        block_stride_alignment=16 * count if side_by_side else None,
        page_size_padded=packed.page_size_bytes if one_size else None,
        num_kv_heads=packed.num_kv_heads,
        head_size=packed.head_size,
        dtype=torch.uint8,  # a second dtype would let vLLM zero all new blocks
        state_content_bytes=slot_bytes,
        window=window,
        slack=slack,
        ring_block_size=ring_block_size,
    )


def cut_into_ring_blocks(cache: torch.Tensor, ring_block_size: int, is_block_outermost: bool) -> torch.Tensor:
    """A layer's cache uint8 [blocks, KV heads, block_size, bytes] as [ring blocks, KV heads, ring_block_size, bytes].

    Ring blocks lie at equal distances. Where a block of the pool holds the pages of all layers one behind the other
    (`is_block_outermost`), all layers' first ring blocks come before all layers' second ones.
    """
    blocks, heads, block_size, slot_bytes = cache.shape
    count = block_size // ring_block_size
    if count == 1:
        return cache
    offset = cache.storage_offset() // count if is_block_outermost else cache.storage_offset()
    distance, rest = divmod(cache.stride(0), count)
    content = heads * ring_block_size * slot_bytes
    assert not rest and not (cache.storage_offset() - offset) % 16 and distance >= content, (cache.stride(), count)
    strides = (distance, ring_block_size * slot_bytes, slot_bytes, 1)
    return cache.as_strided((blocks * count, heads, ring_block_size, slot_bytes), strides, offset)


class RingManager(SingleTypeKVCacheManager):
    """Claims up to `ring_blocks` ring blocks a request and enters them into its table over and over."""

    def __init__(self, kv_cache_spec: RingSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.block_size = kv_cache_spec.ring_block_size
        self.ring_blocks = kv_cache_spec.ring_blocks
        self.a_block = kv_cache_spec.ring_blocks_a_block
        self.rings: dict[str, dict[int, KVCacheBlock]] = {}
        self.first: dict[str, int] = {}
        """Request -> number of its first block of tokens that it computes itself."""
        self.blocks: dict[int, KVCacheBlock] = {}
        """The pool's blocks that are cut into ring blocks, by number."""
        self.free_ring_blocks: dict[int, list[int]] = {}
        """Number of such a block -> its free ring blocks; full blocks are not in it."""

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int, *_args: object, **_kwargs: object,
    ) -> int:  # fmt: skip
        first = self.first.get(request_id, cdiv(total_computed_tokens, self.block_size))
        wanted = min(cdiv(num_tokens, self.block_size) - first, self.ring_blocks)
        missing = wanted - len(self.rings.get(request_id, ()))
        if missing <= 0:
            return 0
        return max(0, cdiv(missing - sum(map(len, self.free_ring_blocks.values())), self.a_block))

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:  # fmt: skip
        computed = num_local_computed_tokens + num_external_computed_tokens
        table = self.req_to_blocks[request_id]
        table.extend([self.block_pool.null_block] * cdiv(computed, self.block_size))
        self.first[request_id] = len(table)

    def allocate_external_computed_blocks(self, *_args: object, **_kwargs: object) -> None:
        """Tokens that another engine computed are in no ring."""

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        table = self.req_to_blocks[request_id]
        self.first.setdefault(request_id, len(table))
        ring = self.rings.setdefault(request_id, {})
        end = cdiv(num_tokens, self.block_size)
        added = []
        for index in range(len(table), end):
            if index < end - self.ring_blocks:  # a long chunk's: out of the window before it is read
                added.append(self.block_pool.null_block)
                continue
            number = index % self.ring_blocks
            if number not in ring:
                ring[number] = self._take()
            added.append(ring[number])
        table.extend(added)
        return added

    def _take(self) -> KVCacheBlock:
        """Take a ring block, from a block that other requests share if there is one."""
        if not self.free_ring_blocks:
            (block,) = self.block_pool.get_new_blocks(1)
            self.blocks[block.block_id] = block
            first = block.block_id * self.a_block
            self.free_ring_blocks[block.block_id] = list(range(first, first + self.a_block))
        number, free = next(iter(self.free_ring_blocks.items()))
        ring_block = free.pop()
        if not free:
            del self.free_ring_blocks[number]
        return KVCacheBlock(ring_block)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.req_to_blocks.pop(request_id, None)
        self.first.pop(request_id, None)
        empty = []
        for ring_block in self.rings.pop(request_id, {}).values():
            number = ring_block.block_id // self.a_block
            free = self.free_ring_blocks.setdefault(number, [])
            free.append(ring_block.block_id)
            if len(free) == self.a_block:
                del self.free_ring_blocks[number]
                empty.append(self.blocks.pop(number))
        return empty

    def cache_blocks(self, *_args: object, **_kwargs: object) -> None:
        """A ring is never shared."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: object, max_length: int, kv_cache_group_ids: Sequence[int], *_args: object, **_kwargs: object
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None: a ring is never shared. vLLM asks before 0.32, for cascade attention."""
        return 0

    def remove_skipped_blocks(self, *_args: object, **_kwargs: object) -> None:
        """Blocks stay with the request until it ends."""


# At import: a scheduler in a process of its own learns of both by unpickling the spec, which imports this module.
register_cache_spec(RingSpec, RingManager)
