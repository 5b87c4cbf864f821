"""Tokens of the longest sequence that an engine can come to serve, for tables by position that are made before vLLM has
fitted `--max-model-len auto` to its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import get_dtype_size, kv_cache_dtype_str_to_dtype

from ..formats import FORMATS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def longest_sequence(config: VllmConfig) -> int:
    """`max_model_len`; if vLLM has yet to fit it, at most the tokens whose pages would fill a rank's memory.

    Pages of layers that attend to everything count, as they grow with a sequence. Layers must be there.
    """
    model = config.model_config
    if getattr(model, "original_max_model_len", None) != -1 or config.cache_config.num_gpu_blocks_override:
        return model.max_model_len
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    a_token = sum(_bytes_per_token(layer, config) for layer in layers)
    if not a_token:
        return model.max_model_len
    memory = config.cache_config.kv_cache_memory_bytes or current_platform.get_device_total_memory()
    ranks = config.parallel_config.decode_context_parallel_size  # each has a share of a sequence's tokens
    return min(model.max_model_len, ranks * (memory // a_token + 1))


def _bytes_per_token(layer: Any, config: VllmConfig) -> int:
    """Bytes per token of a layer with pages of its own and no window or chunks; else 0."""
    reads_another = getattr(layer, "kv_sharing_target_layer_name", None)
    is_bounded = getattr(layer, "sliding_window", None) or config.model_config.attention_chunk_size
    if not hasattr(layer, "kv_cache_dtype") or not hasattr(layer, "num_kv_heads") or reads_another or is_bounded:
        return 0
    if layer.kv_cache_dtype in FORMATS:
        return layer.num_kv_heads * FORMATS[layer.kv_cache_dtype].slot_bytes(layer.head_size)
    size = get_dtype_size(kv_cache_dtype_str_to_dtype(layer.kv_cache_dtype, config.model_config))
    return layer.num_kv_heads * (layer.head_size + layer.head_size_v) * size
