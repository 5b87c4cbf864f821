"""vLLM's implementation of a layer's sparse attention over latents (DeepSeek V3.2, GLM-5, Hy4): store, picks, prompts.

vLLM's indexer picks the tokens. Prompts of up to `index_topk` tokens are attended to densely, by vLLM's prefill
backend, which knows no sinks: in a layer with sinks, all tokens read picks. Prefixes of dense prompts are gathered as
in dense latent attention. Modelled on `SparseMLACommonImpl` of vLLM 0.33.0
(model_executor/layers/attention/sparse_mla_attention.py), sinks on its `HYV4FlashMLASparseImpl`
(models/hy_v4/nvidia/flashmla_sparse.py; both Apache-2.0).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl

from ...codecs.latent_rows import LatentRowCodec
from ...refusals.facts import Attention, Facts, Layer
from ...refusals.table import refuse
from ..factory import sparse_kernels
from ..latent.base import PackedLatents
from ..layouts import SparseLayout
from ..limits import EngineLimits
from ..warmup import block_size_of, warm_up_sparse
from .layer import SparseKernels
from .metadata import Latents, SparseLatentMetadata, workspace_rows


class SparseLatentImpl(PackedLatents, SparseMLACommonImpl[SparseLatentMetadata]):
    """Stores latent rows and attends over the picked ones. Raises Refused for what packed pages do not support."""

    supports_dcp = False
    supports_pcp = False
    can_return_lse_for_decode = False
    stores_latents = True
    """Flag that vLLM's patched layer reads; the layer then calls the store and hands over `new_latents`."""
    kernels: SparseKernels | None = None

    def __init__(
        self,
        *arguments: Any,
        indexer: object | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: object | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        # Without the buffer, vLLM's class makes no index group: rows are found by positions, in the gather kernel.
        super().__init__(*arguments, **options)
        if sinks is not None:
            refuse(Facts(Attention(sinks=tuple(sinks.shape)), Layer(query_heads=self.num_heads)), self.kv_cache_dtype)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        self.masked_mha_available = False  # on Blackwell; it reads plain rows
        self.sinks = sinks
        self.supports_dense_mha_prefill = sinks is None
        self.is_handed_latents = False

    def build(self, layer_name: str, layer: Any) -> None:
        """Make the layer's codec and fold its weights, once: vLLM calls this when they are loaded, before it profiles
        its memory."""
        if self.weights is not None:
            return
        self.is_handed_latents = hasattr(layer, "hands_over_latents")
        codec, weights = self.fold(layer_name, layer, LatentRowCodec)
        assert isinstance(codec, LatentRowCodec)
        picks = int(self.config.model_config.hf_text_config.index_topk)
        layer = SparseLayout(codec, self.num_heads, self.scale, weights.constant, picks, self.sinks)
        self.kernels = sparse_kernels(layer, EngineLimits.of(self.config, self.device), workspace_rows(self.config))
        if self.device.type == "cuda":
            warm_up_sparse(self.kernels, block_size_of(self.config))

    def _hand_over(self, new: Latents) -> None:
        metadata = self._metadata()
        if metadata is not None:
            metadata.new_latents = new

    new_latents = property(None, _hand_over)
    """Latents of a batch. The caller sets them before attention, as vLLM's patched layer does. The batch's metadata
    keep them, so that a failed step leaves nothing behind."""

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, *arguments: Any, **options: Any
    ) -> None:
        """Store a batch; see `PackedLatents`. A layer that does not hand over its latents attends right after its
        store, so this method keeps them. Where the store is in a CUDA graph, later steps do not run this method."""
        super().do_kv_cache_update(kv_c_normed, k_pe, *arguments, **options)
        if not self.is_handed_latents:
            self.new_latents = kv_c_normed, k_pe.flatten(1)

    def forward_mha(self, *arguments: Any, **options: Any) -> None:
        """Attend to a batch's prompts densely, by vLLM."""
        assert self.sinks is None, "dense attention of prompts would leave the sinks out"
        self.new_latents = None
        super().forward_mha(*arguments, **options)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseLatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of a batch's decodes, or of all its tokens, over picked latents.

        Args:
            q: [tokens, heads, rank], times the folded `W_UK_T`, and [tokens, heads, rope_dim]; or both side by side.
            kv_c_and_k_pe_cache: uint8 [blocks, block_size, slot_bytes].

        Returns:
            [tokens, heads, rank] of the queries' dtype, to be multiplied by the folded `W_UV`, and no lse.
        """
        q_latent, q_rope = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        new, attn_metadata.new_latents = attn_metadata.new_latents, None
        buffer = self.topk_indices_buffer  # for drafts vLLM replaces it by another
        assert buffer is not None and self.kernels is not None
        picks = buffer[: len(q_latent)]
        return self.kernels.attend(attn_metadata, kv_c_and_k_pe_cache, (q_latent, q_rope), picks, new), None
