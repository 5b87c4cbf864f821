"""Attention of Kimi K3's and Kimi-Linear's layer. Its class is not vLLM's `MLAAttention`: it writes its cache by
kernels of its own, and so knows only dtypes of plain rows.

`attend_latents` takes the place of the layer's `_attention`; all else of the layer stays. Modelled on that method, and
on `MLAAttention.forward_impl`, of vLLM 0.33.0 (models/kimi_k3/nvidia/mla.py and
model_executor/layers/attention/mla_attention.py; Apache-2.0).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

NO_SCALE = None
"""A checkpoint's scale of an fp8 cache, which packed pages do not read."""
LAYER = "vllm.models.kimi_k3.nvidia.mla.MultiHeadLatentAttention"


def is_kimi_layer(layer: Any) -> bool:
    """True for a layer of this class without RoPE. A layer with RoPE belongs to a draft that writes its context
    itself."""
    kind = type(layer)
    return f"{kind.__module__}.{kind.__qualname__}" == LAYER and layer.rotary_emb is None


def adopt(layer: Any) -> None:
    """Let a layer attend over packed pages."""

    def attention(
        positions: torch.Tensor, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, attn_out: torch.Tensor
    ) -> None:
        attend_latents(layer, q, kv_c_normed, k_pe, attn_out)

    layer._attention = eager_break_during_capture(attention)


def attend_latents(
    layer: Any, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, attn_out: torch.Tensor
) -> None:
    """Store a batch's latents and attend: decodes first, then prompts. No ranks split the tokens, as the model has
    state layers too.

    Args:
        q: [tokens or more, heads, nope_dim + rope_dim].
        kv_c_normed, k_pe: [tokens or more, rank] and [tokens or more, 1, rope_dim].
        attn_out: [tokens or more, heads * value_dim], written; zeros in vLLM's profiling run.
    """
    impl, context = layer.impl, get_forward_context()
    if context.attn_metadata is None:
        size = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(impl.config)
        q.new_empty(size, layer.num_local_heads, layer.qk_nope_head_dim + layer.v_head_dim)  # K and V of a prefix
        impl.reserve_workspace()
        attn_out.zero_()
        return
    metadata = context.attn_metadata[layer.layer_name]
    tokens, decodes = metadata.num_actual_tokens, metadata.num_decode_tokens
    q, kv_c_normed, k_pe, attn_out = q[:tokens], kv_c_normed[:tokens], k_pe[:tokens], attn_out[:tokens]
    slots = context.slot_mapping[layer.layer_name][:tokens]
    impl.do_kv_cache_update(kv_c_normed, k_pe, layer.kv_cache, slots, layer.kv_cache_dtype, NO_SCALE)
    if decodes < tokens:
        prompts = q[decodes:], kv_c_normed[decodes:], k_pe[decodes:]
        impl.forward_mha(*prompts, layer.kv_cache, metadata, NO_SCALE, output=attn_out[decodes:])
    if decodes:
        q_nope, q_rope = q[:decodes].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        q_latent = q.new_empty(decodes, layer.num_local_heads, layer.kv_lora_rank)
        torch.bmm(q_nope.transpose(0, 1), layer.W_UK_T, out=q_latent.transpose(0, 1))
        attended, _ = impl.forward_mqa((q_latent, q_rope), layer.kv_cache, metadata, layer)
        output = attn_out[:decodes].view(decodes, layer.num_local_heads, layer.v_head_dim)
        torch.bmm(attended.transpose(0, 1), layer.W_UV, out=output.transpose(0, 1))
