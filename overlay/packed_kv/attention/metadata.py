"""Per-batch metadata of the packed backend, built once a step for all layers of a KV-cache group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .capacity import check_padding, log_capacity
from .routes import MAX_COLUMNS


@dataclass
class PackedMetadata(AttentionMetadata):
    """What `PackedAttentionImpl` needs to know of a batch.

    On the device: `block_table` int32 [requests, blocks], `slot_mapping` int64 [tokens], `query_start_loc` int32
    [requests + 1] and `seq_lens` int32 [requests], tokens in the cache with the batch's own.
    On the host, lists with an entry a request: `query_starts[i]` .. `query_starts[i + 1]` are request i's rows of the
    batch; `context[i]` is `seq_lens[i]`.
    The first `decodes` requests have `decode_query_len` query tokens or fewer, `decode_tokens` in all.
    """

    num_actual_tokens: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: list[int]
    context: list[int]
    decodes: int
    decode_tokens: int
    decode_query_len: int


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Builds `PackedMetadata`. On CUDA, batches of decodes alone can be captured into CUDA graphs."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if device.type == "cuda":
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        check_padding(vllm_config, kv_cache_spec)
        log_capacity(vllm_config, kv_cache_spec.block_size)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Batches of one query token a request, where the fused route serves them; the other plans on the host."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if not current_platform.is_cuda() or not isinstance(kv_cache_spec, AttentionSpec):
            return AttentionCGSupport.NEVER
        group = model.get_num_attention_heads(parallel) // kv_cache_spec.num_kv_heads
        if model.dtype == torch.float32 or group > MAX_COLUMNS:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        longest = self.reorder_batch_threshold or 0
        decodes = next((i for i, length in enumerate(lengths) if length > longest), len(lengths)) if longest else 0
        # The host's copy is exact unless drafts are in flight; then only the device knows (and we wait for it).
        context = common.seq_lens
        if self.vllm_config.speculative_config is None and common.seq_lens_cpu_upper_bound is not None:
            context = common.seq_lens_cpu_upper_bound
        return PackedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            query_starts=starts,
            context=context.tolist(),
            decodes=decodes,
            decode_tokens=common.num_actual_tokens if decodes == len(lengths) else starts[decodes],
            decode_query_len=longest,
        )
