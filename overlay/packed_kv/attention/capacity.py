"""How much the packed cache holds: the start-up line that says it, and a refusal where it would not be more."""

from __future__ import annotations

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import AttentionSpec

from ..formats import FORMATS
from .fingerprint import fingerprint

logger = init_logger("vllm.packed_kv")

MAX_PADDING = 1.5
"""Times its content that a packed page may take beside skipped layers, whose bf16 pages are 3.8 times and more."""


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
    """Log dtype, bytes per token, KV tokens, ratio and fingerprint, once a process, when the cache has its real size.

    KV tokens are those that the engine counts. A worker in a process of its own is not told: it knows the blocks, and
    that is the same where all layers attend to everything; layers of several kinds share the blocks, and so do rings.
    """
    cache = vllm_config.cache_config
    if not cache.num_gpu_blocks:
        return
    stored, dense = bytes_per_token(vllm_config)
    tokens = f"{cache.kv_cache_size_tokens or cache.num_gpu_blocks * block_size:,}"
    if not cache.kv_cache_size_tokens and not _all_layers_attend_to_everything(vllm_config):
        tokens = f"up to {tokens}"
    fmt = FORMATS.get(cache.cache_dtype)  # None where only a draft's layers are packed
    logger.info_once(
        "KV cache dtype %s: %d bytes per token (bf16: %d), %s KV tokens, %.2f times the tokens of bf16%s",
        cache.cache_dtype,
        stored,
        dense,
        tokens,
        dense / stored,
        f", page format {fingerprint(vllm_config, fmt)}" if fmt else "",
        scope="local",
    )


def _all_layers_attend_to_everything(vllm_config: VllmConfig) -> bool:
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    if vllm_config.model_config.attention_chunk_size:
        return False
    return all(getattr(layer, "sliding_window", 0) is None for layer in layers)


def check_padding(vllm_config: VllmConfig, spec: AttentionSpec) -> None:
    """Raise ValueError if skipped layers make vLLM pad the packed pages to much more than they hold.

    Layers of several kinds (sliding and full) take blocks from one pool, so their pages get the size of the largest.
    """
    cache = vllm_config.cache_config
    content = spec.real_page_size_bytes
    if cache.kv_cache_dtype_skip_layers and spec.page_size_bytes > MAX_PADDING * content:
        raise ValueError(
            f"--kv-cache-dtype {cache.cache_dtype} cannot skip layers {', '.join(cache.kv_cache_dtype_skip_layers)} "
            "of this model: its sliding and full layers share pages of one size, so that a packed page of "
            f"{content} bytes would take {spec.page_size_bytes}; leave out --kv-cache-dtype-skip-layers"
        )
