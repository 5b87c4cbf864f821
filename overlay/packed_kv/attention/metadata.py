"""Per-batch metadata of the packed backend, built once a step for all layers of a KV-cache group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .capacity import check_padding, log_capacity


@dataclass
class PackedMetadata(AttentionMetadata):
    """What `PackedAttentionImpl` needs to know of a batch.

    The lists have an entry a request: `query_starts[i]` .. `query_starts[i + 1]` are request i's rows of the batch,
    `seq_lens[i]` its tokens in the cache, those rows included. `block_table` is int32 [requests, blocks] and
    `slot_mapping` int64 [tokens], both on the device.
    """

    num_actual_tokens: int
    query_starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Builds `PackedMetadata`. The PyTorch path plans on the host, so it stays out of CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_padding(vllm_config, kv_cache_spec)
        log_capacity(vllm_config, kv_cache_spec.block_size)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        common = common_attn_metadata
        return PackedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_starts=common.query_start_loc_cpu.tolist(),
            seq_lens=common.seq_lens.tolist(),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )
