"""Per-batch metadata of latent attention: vLLM's metadata and the query tokens of decodes with drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from ...kernels.precompile import wait_for_all
from ..metadata import check_batch
from ..step import StepCache


@dataclass
class LatentDecodeMetadata(MLACommonDecodeMetadata):
    """Metadata of a batch's decodes, with vLLM's `block_table` and `seq_lens`.

    `query_start`: int32 [requests + 1], on the device; `query_starts`: the same on the host. `max_query_len`: most
    query tokens of a request.
    """

    query_start: torch.Tensor
    query_starts: torch.Tensor
    max_query_len: int


@dataclass
class LatentMetadata(MLACommonMetadata[LatentDecodeMetadata]):
    """vLLM's metadata, for latents of any size. `steps` is the step cache of layers of one kind."""

    steps: StepCache = field(default_factory=StepCache)

    def __post_init__(self) -> None:
        pass  # vLLM's own allows three sizes

    @property
    def has_new_prompts(self) -> bool:
        """True if nothing of the batch's prompts is in the cache before it."""
        return self.prefill is None or self.prefill.chunked_context is None


class LatentMetadataBuilder(MLACommonMetadataBuilder[LatentMetadata]):
    """Builds `LatentMetadata`. Decodes, drafts of any length included, are served by `forward_mqa`; on CUDA, batches of
    decodes alone can be captured into CUDA graphs.

    vLLM makes it after its profiling run and before any step. Its constructor returns once the layers' kernels are
    compiled, and raises what their compilation raises.
    """

    query_len_support = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, LatentMetadata)
        # Parts of a prefix begin at multiples of this number, so at whole blocks of each rank.
        self.page_size *= self.dcp_world_size
        layers = vllm_config.compilation_config.static_forward_context
        layers[layer_names[0]].impl.reserve_workspace()  # 0.32 does not ask for it in its profiling run
        wait_for_all()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Support for batches of decodes, drafts included, where a kernel serves them."""
        if current_platform.is_cuda() and vllm_config.model_config.dtype != torch.float32:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentMetadata:
        check_batch(self.vllm_config, common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> LatentDecodeMetadata:
        return LatentDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start=query_start_loc_device,
            query_starts=query_start_loc_cpu,
            max_query_len=max_query_len,
        )
