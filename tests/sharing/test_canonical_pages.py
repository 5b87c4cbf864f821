"""Offloaded pages in vLLM's canonical layout are the same bytes whatever the number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packed_kv.formats import FORMATS
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef
from vllm.v1.kv_offload.cpu.gpu_worker import _build_copy_plan

HEADS, BLOCKS, BLOCK, HEAD_DIM = 8, 3, 32, 64


def derive(pages: torch.Tensor, ranks: int, rank: int, dtype: str, dcp: int = 1) -> Any:
    """vLLM's mapping of one rank's pages uint8 [blocks, its heads, tokens, bytes] of a layer."""
    make = SlidingWindowSpec if dtype == "tq4" else FullAttentionSpec
    window = {"sliding_window": 40} if dtype == "tq4" else {}
    spec = make(
        block_size=BLOCK, num_kv_heads=pages.shape[1], head_size=HEAD_DIM, dtype=torch.uint8,
        state_content_bytes=FORMATS[dtype].slot_bytes(HEAD_DIM), **window,
    )  # fmt: skip
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks, prefill_context_parallel_size=1, decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=1, world_size=ranks, rank=rank,
    )  # fmt: skip
    model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    groups = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return derive_canonical_mappings(config, groups, {"layer": pages})["layer"]


def canonical(pages: torch.Tensor, ranks: int, dtype: str) -> bytes:
    """Write a layer's pages uint8 [blocks, all heads, tokens, bytes] as `ranks` ranks together do; each page is written
    once by one rank, and read back whole by each."""
    shards = [pages[:, first : first + max(1, HEADS // ranks)].clone() for first in shard_starts(ranks)]
    size = pages[0].numel()
    written = np.full((BLOCKS, size), 0xFF, np.uint8)
    for rank, shard in enumerate(shards):
        mapping = derive(shard, ranks, rank, dtype)
        assert mapping.parallelism_agnostic
        assert mapping.canonical_page_size_bytes == size
        for block in filter(mapping.is_writer, range(BLOCKS)):
            copy(mapping, shard[block].numpy().reshape(-1), written[block], store=True)
    for rank, shard in enumerate(shards):
        for block in range(BLOCKS):
            back = np.zeros(shard[block].numel(), np.uint8)
            copy(derive(shard, ranks, rank, dtype), back, written[block], store=False)
            assert (back == shard[block].numpy().reshape(-1)).all()
    return written.tobytes()


def shard_starts(ranks: int) -> list[int]:
    """Each rank's first KV head; more ranks than heads hold copies."""
    return [rank * HEADS // ranks for rank in range(ranks)]


def copy(mapping: Any, local: np.ndarray, page: np.ndarray, store: bool) -> None:
    """Copy a page as vLLM's worker does, by its plan."""
    plan = _build_copy_plan(CanonicalKVCacheRef(0, mapping.local_page_size_bytes, mapping), gpu_to_cpu=store)
    source, target = (local, page) if store else (page, local)
    for start, end, size in zip(plan.frag_offsets_src, plan.frag_offsets_dst, plan.frag_sizes, strict=True):
        target[int(end) : int(end) + size] = source[int(start) : int(start) + size]


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_same_bytes_whatever_the_ranks(dtype: str) -> None:
    slot_bytes = FORMATS[dtype].slot_bytes(HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (BLOCKS, HEADS, BLOCK, slot_bytes), dtype=torch.uint8, generator=generator)
    assert {canonical(pages, ranks, dtype) for ranks in (1, 2, 4, 8, 16)} == {pages.numpy().tobytes()}


def test_one_copy_a_page_and_rank() -> None:
    """A rank's heads lie together in a canonical page, which so costs no more copies than a page of the rank's own."""
    for ranks in (1, 2, 4, 8):
        pages = torch.zeros(BLOCKS, HEADS // ranks, BLOCK, FORMATS["isoquant4"].slot_bytes(HEAD_DIM), dtype=torch.uint8)
        assert len(derive(pages, ranks, ranks - 1, "isoquant4").runs) == 1


def test_tokens_of_a_head_are_not_dealt_out() -> None:
    """Decode context parallelism deals tokens one by one, and ours share bytes in sixteens."""
    pages = torch.zeros(BLOCKS, 1, BLOCK, FORMATS["isoquant4"].slot_bytes(HEAD_DIM), dtype=torch.uint8)
    assert not derive(pages, 16, 0, "isoquant4", dcp=2).parallelism_agnostic
