"""Capacity of the packed cache: its start-up line, and a refusal if it holds no more than bf16."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import get_dtype_size, kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from ..formats import FORMATS
from ..layout import MICRO_BLOCK
from ..model import shape as model_shape
from ..model.config_fields import BadInput
from ..model.shape import DENSE, FP8
from ..planning.cache import Serving, packed_pages
from ..refusals.facts import Cache, Facts, Pages
from ..refusals.rules import SLIDING
from ..refusals.table import refuse
from ..settings.options import read_options
from ..sharing.fingerprint import fingerprint
from ..vllm_compat import get_kv_cache_groups
from ..window.cache_group import RingSpec
from ..window.layer import WindowLayer

logger = init_logger("vllm.packed_kv")

LARGE_BLOCK = 128
"""Tokens of a block on the CPU platform by default. Also the step by which vLLM enlarges blocks of latents beside
states."""


def bytes_per_token(vllm_config: VllmConfig) -> tuple[int, int]:
    """KV bytes of a token in all attention layers of this rank: packed, and in bf16."""
    layers, options = [], read_options(vllm_config.additional_config)
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
        if not hasattr(layer, "kv_cache_dtype") or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        if rank := getattr(layer, "kv_lora_rank", None):
            rope = {"rope_size": layer.qk_rope_head_dim, "rope_bits": options.latent_rope_bits}
            indexer = getattr(layer, "indexer", None)
            index_bytes = indexer.k_cache.head_dim if indexer is not None else 0
            is_sparse = layer.get_attn_backend().is_sparse()
            shape = model_shape.ModelLayer(0, "full", 1, rank, is_sparse=is_sparse, index_bytes=index_bytes, **rope)
        else:
            shape = model_shape.ModelLayer(0, "full", layer.num_kv_heads, layer.head_size, value_size=layer.head_size_v)
        is_fp8 = get_dtype_size(kv_cache_dtype_str_to_dtype(layer.kv_cache_dtype, vllm_config.model_config)) == 1
        layers.append((shape, layer.kv_cache_dtype if layer.kv_cache_dtype in FORMATS else FP8 if is_fp8 else DENSE))
    stored = model_shape.bytes_per_token(layers, get_dtype_size(vllm_config.model_config.dtype))
    return stored, model_shape.bytes_per_token((layer, DENSE) for layer, _ in layers)


class RequestBlocks(NamedTuple):
    """The blocks that vLLM allocates for a request as long as the model's context.

    `blocks`: their number. `size`: their bytes on this rank, `ring_bytes` for the recent window's blocks included, in
    whole blocks as vLLM counts them. `dense_size`: bytes of the same request in bf16. Blocks of full-attention layers
    grow with the context; blocks of windows, rings and states do not.
    """

    blocks: int
    size: int
    ring_bytes: int
    dense_size: int


def longest_request(vllm_config: VllmConfig) -> RequestBlocks:
    specs, rings, dense = {}, {}, {}
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        if isinstance(layer, WindowLayer):
            if ring := layer.find_spec(vllm_config):
                rings[name] = ring
        elif spec := layer.get_kv_cache_spec(vllm_config):
            is_packed = getattr(layer, "kv_cache_dtype", None) in FORMATS
            specs[name] = layer.get_attn_backend().customize_spec(spec) if isinstance(spec, AttentionSpec) else spec
            dense[name] = replace(spec, dtype=torch.bfloat16) if is_packed else spec
    blocks, ring_blocks, size = _blocks(vllm_config, specs | rings)
    dense_blocks, _, dense_size = _blocks(vllm_config, _with_aligned_states(dense))
    return RequestBlocks(blocks, blocks * size, ring_blocks * size, dense_blocks * dense_size)


def _blocks(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> tuple[int, int, int]:
    """Blocks of a request by vLLM's own grouping of these layers: all blocks, ring blocks, and the bytes of a block,
    which are equal in all groups."""
    blocks, ring_blocks, widths = 0, 0, []
    for group in get_kv_cache_groups(vllm_config, specs):
        spec = group.kv_cache_spec
        number = cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
        blocks += number
        ring_blocks += number if isinstance(specs[group.layer_names[0]], RingSpec) else 0
        widths.append(
            spec.page_size_bytes * (1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names))
        )
    return blocks, ring_blocks, max(widths)


def _with_aligned_states(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Attention blocks enlarged to the size of the states beside them, as vLLM's platforms do it."""
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    attending = [spec for spec in specs.values() if isinstance(spec, AttentionSpec)]
    if not states or not attending:
        return specs
    token = max(spec.real_page_size_bytes // spec.block_size for spec in attending)
    state = max(replace(spec, page_size_padded=None).page_size_bytes for spec in states)
    has_latents = any(isinstance(spec, MLAAttentionSpec) for spec in attending)
    multiple = LARGE_BLOCK if has_latents or current_platform.is_cpu() else MICRO_BLOCK
    block = multiple * cdiv(state, multiple * token)
    return {
        name: replace(spec, page_size_padded=block * token)
        if isinstance(spec, MambaSpec)
        else replace(spec, block_size=block)
        for name, spec in specs.items()
    }


def log_capacity(vllm_config: VllmConfig, block_size: int) -> None:
    """Log dtype, bytes per token, KV tokens, ratio and fingerprint, once a process, when the cache has its real size.

    `block_size`: of the attention layers.
    KV tokens are counted as vLLM does: in requests as long as the model's context, each with its states and rings. The
    ratio compares them with the tokens that the same bytes hold in bf16, so it is less than the ratio of bytes per
    token.
    """
    cache = vllm_config.cache_config
    if not cache.num_gpu_blocks:
        return
    stored, dense = bytes_per_token(vllm_config)
    # By now vLLM's block size is the smallest of all groups; a state's is the context's length.
    if vllm_config.model_config.is_hybrid:
        vllm_config, cache = copy.copy(vllm_config), copy.copy(cache)
        vllm_config.cache_config, cache.block_size = cache, block_size
    context, request = vllm_config.model_config.max_model_len, longest_request(vllm_config)
    tokens = int(cache.num_gpu_blocks / request.blocks * context)
    window = f" (recent window: {request.ring_bytes:,} bytes per request)" if request.ring_bytes else ""
    fmt = FORMATS.get(cache.cache_dtype)  # None where only a draft's layers are packed
    logger.info_once(
        "KV cache dtype %s: %d bytes per token (bf16: %d), %s KV tokens, %.2f x bf16 capacity at %s tokens "
        "per request%s%s",
        cache.cache_dtype,
        stored,
        dense,
        f"{tokens:,}",
        request.dense_size / request.size,
        f"{context:,}",
        window,
        f", page format {fingerprint(vllm_config, fmt)}" if fmt else "",
        scope="local",
    )


class CheckedCache:
    """Mixin of metadata builders: refuses a padded cache and logs a good one when vLLM makes the builder, as the cache
    has its real size by then. It comes before the builder among a class's bases."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        check_padding(vllm_config, kv_cache_spec)
        log_capacity(vllm_config, kv_cache_spec.block_size)
        log_match_unit(vllm_config)


def log_match_unit(vllm_config: VllmConfig) -> None:
    """Log the granularity of prefix hits in hybrid models: state layers enlarge blocks in proportion to the
    compression."""
    cache = vllm_config.cache_config
    is_coarse = vllm_config.model_config.is_hybrid and cache.block_size > MICRO_BLOCK
    if is_coarse and cache.enable_prefix_caching and cache.prefix_match_unit is None:
        logger.info_once(
            "KV cache: prefix-cache hits are whole blocks of %d tokens; --prefix-match-unit %d allows partial hits",
            cache.block_size,
            MICRO_BLOCK,
            scope="local",
        )


def check_planned_padding(vllm_config: VllmConfig) -> None:
    """Raise Refused before the model is loaded if skipped layers make vLLM pad the packed pages to much more than they
    hold, as `packed-kv plan` counts pages. Where vLLM counts them otherwise, `check_padding` refuses later."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    words = tuple(cache.kv_cache_dtype_skip_layers)
    has_other_parts = parallel.pipeline_parallel_size > 1 or vllm_config.speculative_config is not None
    if not words or has_other_parts or vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    try:
        shape = model_shape.parse(model.hf_config.to_dict(), model.model, parallel.tensor_parallel_size)
        pages = _planned_pages(shape, vllm_config)
    except BadInput:
        return
    for page in pages:
        refuse(Facts(Cache(skip_layers=words), page), cache.cache_dtype)


def _planned_pages(shape: model_shape.Model, vllm_config: VllmConfig) -> list[Pages]:
    """Return the pages that `packed-kv plan` counts; []: vLLM counts other pages. Raises BadInput."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    words = cache.kv_cache_dtype_skip_layers
    is_chunked = any(layer.kind == "chunked" for layer in shape.attention)  # refused when the layers are made
    if is_chunked or len({(layer.kv_heads, layer.head_size, layer.value_size) for layer in shape.attention}) > 1:
        return []
    serving = Serving(
        model.max_model_len,
        read_options(vllm_config.additional_config).recent_tokens,
        skip_layers=frozenset(
            layer.number for layer in shape.attention if {str(layer.number), _sliding_word(layer)} & {*words}
        ),
        block_size=cache.block_size or MICRO_BLOCK,
        on_gpu=not current_platform.is_cpu(),
    )
    return list(packed_pages(shape, cache.cache_dtype, serving))


def _sliding_word(layer: model_shape.ModelLayer) -> str:
    return SLIDING if layer.kind == "sliding" else ""


def check_padding(vllm_config: VllmConfig, spec: AttentionSpec) -> None:
    """Raise Refused if skipped layers make vLLM pad the packed pages to much more than they hold.

    Layers of several kinds (sliding and full, or with states) take blocks from one pool, so their pages get the size of
    the largest. vLLM knows this size once the model is loaded: then it settles the tokens of a block and, after that,
    the layout of pages, by which it groups layers. `check_planned_padding` counts the size before.
    """
    cache = vllm_config.cache_config
    page = spec.page_size_bytes, spec.real_page_size_bytes
    refuse(Facts(Cache(skip_layers=tuple(cache.kv_cache_dtype_skip_layers)), Pages(size=page)), cache.cache_dtype)
