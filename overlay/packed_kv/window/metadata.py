"""A batch's ring buffers: block table, slots of new tokens, and where each ring begins, built once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

from ..reference.attention import RecentVectors
from .slots import fill_slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(eq=False)  # an object is a key of what a step makes for its rings: it names itself alone
class WindowMetadata(AttentionMetadata):
    """A batch's rings, on the device.

    `block_table`: int32 [requests, blocks]. `slots`: int32 [tokens], where each token goes, -1: nowhere. `first`: int32
    [requests], the first token that is in the ring. `rows`: cuts of the table and of `first`, by range of requests.
    `lent`: by window layer, the vectors that prefills in PyTorch read, and how many sharing layers have yet to ask for
    them.
    """

    block_table: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    lent: dict[str, tuple[dict[int, RecentVectors], int]] = field(default_factory=dict)

    def of_requests(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`block_table` and `first` of the requests `first` .. `end` - 1; the same tensors for all layers of a step."""
        if (first, end) not in self.rows:
            self.rows[first, end] = self.block_table[first:end], self.first[first:end]
        return self.rows[first, end]

    def lend(self, layer_name: str, tokens: dict[int, RecentVectors], readers: int) -> None:
        """Keep `tokens`, by request, until `readers` other layers have asked; nothing for 0."""
        if readers:
            self.lent[layer_name] = tokens, readers

    def borrow(self, layer_name: str) -> dict[int, RecentVectors]:
        """Return the lent vectors; the last layer that asks removes them. Nothing was lent where the packed layer's
        prefills do not run in PyTorch: then layers that share its cache read only pages."""
        tokens, readers = self.lent.pop(layer_name, ({}, 1))
        self.lend(layer_name, tokens, readers - 1)
        return tokens


class WindowMetadataBuilder(AttentionMetadataBuilder[WindowMetadata]):
    """Fills slots and first tokens in memory that outlives the step, for CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        self.fill, self.sizes = slot_filler(spec, device)
        scheduler = vllm_config.scheduler_config
        tokens = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * spec.slack
        self.slots = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self.first = torch.zeros(tokens, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> WindowMetadata:
        common = common_attn_metadata
        slots, first = self.slots[: common.num_actual_tokens], self.first[: common.num_reqs]
        table = common.block_table_tensor
        self.fill(common.query_start_loc, common.seq_lens[: common.num_reqs], table, slots, first, **self.sizes)
        return WindowMetadata(table, slots, first)


class ChunkedWindowMetadataBuilder(WindowMetadataBuilder):
    """Builder for layers of chunked attention, which see a request as one of each chunk: a ring's table is cut as
    theirs.

    The slots of tokens are decided for the whole request, as its chunks share the ring."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    chunk_size: ClassVar[int]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> WindowMetadata:
        slots = super().build(common_prefix_len, common_attn_metadata, fast_build).slots
        chunks, _ = make_local_attention_virtual_batches(
            self.chunk_size, common_attn_metadata, self.sizes["block_size"]
        )
        first, table = self.first[: chunks.num_reqs], chunks.block_table_tensor
        self.fill(chunks.query_start_loc, chunks.seq_lens, table, torch.empty_like(slots), first, **self.sizes)
        passed = self._passed(common_attn_metadata.query_start_loc_cpu.numpy(), chunks.query_start_loc_cpu.numpy())
        torch.where(passed.to(first.device, non_blocking=True), chunks.seq_lens, first, out=first)
        return WindowMetadata(table, slots, first)

    def _passed(self, starts: np.ndarray, chunk_starts: np.ndarray) -> torch.Tensor:
        """bool [chunks]: chunks with as few new tokens as a decode, in a prefill that continues after them. They would
        read these tokens in the ring, which may not have kept them."""
        ends, longest = chunk_starts[1:], self.sizes["longest_decode"]
        request = np.searchsorted(starts[1:], ends)
        is_short = (np.diff(chunk_starts) <= longest) & (np.diff(starts)[request] > longest)
        return torch.from_numpy(is_short & (ends < starts[1:][request]))


def slot_filler(spec: Any, device: torch.device) -> tuple[Callable[..., None], dict[str, int]]:
    """Return what fills a step's slots on a device, `fill_slots` or its kernel, and its keyword arguments for rings of
    `spec`, a `RingSpec`."""
    sizes = {"block_size": spec.ring_block_size, "ring_blocks": spec.ring_blocks, "window": spec.window}
    sizes["longest_decode"] = spec.slack
    if device.type != "cuda":
        return fill_slots, sizes
    from ..kernels.triton.ring import plan_ring

    return plan_ring, sizes
