"""The start-up line that says how much the packed cache holds."""

from __future__ import annotations

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import get_dtype_size

from ..formats import FORMATS

logger = init_logger("vllm.packed_kv")


def bytes_per_token(vllm_config: VllmConfig) -> tuple[int, int]:
    """KV bytes of a token in all attention layers of this rank: as stored, and in bf16."""
    stored = dense = 0
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
        if not hasattr(layer, "kv_cache_dtype") or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        channels = layer.num_kv_heads * (layer.head_size + layer.head_size_v)
        dense += 2 * channels
        fmt = FORMATS.get(layer.kv_cache_dtype)
        if fmt is not None:
            stored += layer.num_kv_heads * fmt.slot_bytes(layer.head_size)
        else:
            stored += channels * get_dtype_size(layer.kv_cache_torch_dtype)
    return stored, dense


def log_capacity(vllm_config: VllmConfig, block_size: int) -> None:
    """Log dtype, bytes per token, KV tokens and ratio to bf16, once a process, when the cache has its real size."""
    blocks = vllm_config.cache_config.num_gpu_blocks
    if not blocks:
        return
    stored, dense = bytes_per_token(vllm_config)
    logger.info_once(
        "KV cache dtype %s: %d bytes per token (bf16: %d), %s KV tokens, %.2f times the tokens of bf16",
        vllm_config.cache_config.cache_dtype,
        stored,
        dense,
        f"{blocks * block_size:,}",
        dense / stored,
        scope="local",
    )
