"""Sparse attention over latents (DeepSeek V3.2) on vLLM's CPU platform, which has no indexer for it.

One in PyTorch, whose picks are exact, takes the place of vLLM's. Its keys are fp32, beside pages of 132 bytes a token
as on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf


@dataclass
class IndexMetadata:
    """`slots` int64 [tokens], `table` int32 [requests, blocks], `seq_lens` int32 [requests], `starts` int32 [requests +
    1]."""

    slots: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor


class IndexBuilder(AttentionMetadataBuilder[IndexMetadata]):
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> IndexMetadata:
        return IndexMetadata(
            common.slot_mapping, common.block_table_tensor, common.seq_lens, common.query_start_loc_cpu
        )


class IndexBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "TEST_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        return None

    @staticmethod
    def get_builder_cls() -> type[IndexBuilder]:
        return IndexBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


def pick(
    self: Any, hidden: torch.Tensor, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """vLLM's `SparseAttnIndexer.forward_cpu`: fill the buffer of picks. query: fp32 [tokens, index heads, 128]; key:
    [tokens, 128]; weights: [tokens, index heads]."""
    metadata = get_forward_context().attn_metadata
    buffer = self.topk_indices_buffer
    if not isinstance(metadata, dict):
        return buffer
    found, cache = metadata[self.k_cache.prefix], self.k_cache.kv_cache
    block_size = cache.shape[1]
    if not hasattr(self, "keys"):
        self.keys = torch.full((cache.shape[0], block_size, 128), float("nan"))
    stored = found.slots >= 0
    slots = found.slots[stored]
    self.keys[slots // block_size, slots % block_size] = key[: len(found.slots)][stored].float()
    cache[slots // block_size, slots % block_size] = 0xFF  # whoever reads the neighbours' pages sees it
    buffer[: len(hidden)] = -1
    for request, seq_len in enumerate(found.seq_lens.tolist()):
        start, end = found.starts[request].item(), found.starts[request + 1].item()
        at = torch.arange(seq_len)
        keys = self.keys[found.table[request][at // block_size].long(), at % block_size]
        for token in range(start, end):
            seen = seq_len - (end - token) + 1
            scores = torch.relu(query[token].float() @ keys[:seen].T) * weights[token].float()[:, None]
            count = min(self.topk_tokens, seen)
            buffer[token, :count] = scores.sum(0).topk(count).indices.int()
    return buffer


def requests_of_tokens(starts: torch.Tensor, out: torch.Tensor, _mapped: int, tokens: int) -> torch.Tensor:
    """vLLM's `compute_token_to_req_indices`, whose kernel is Triton's."""
    out[:tokens] = 0
    requests = torch.arange(len(starts) - 1, dtype=torch.int32).repeat_interleave(starts.diff().long())
    out[: len(requests)] = requests
    return out[:tokens]


def install(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's CPU platform run the model, with `custom_ops: ["none"]`."""
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    import vllm.model_executor.models.deepseek_v2 as deepseek
    import vllm.v1.attention.ops.metadata as metadata

    patch.setattr(metadata, "compute_token_to_req_indices", requests_of_tokens)
    patch.setattr(deepseek, "per_token_group_quant_fp8", lambda x, *_args, **_options: (x, torch.ones(len(x), 1)))
    patch.setattr(deepseek.DeepseekV32IndexerCache, "get_attn_backend", lambda _self: IndexBackend)
    patch.setattr(indexer.SparseAttnIndexer, "forward_cpu", pick)
