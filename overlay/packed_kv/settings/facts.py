"""Facts about an engine from vLLM's configuration, for the rules of `refusals/table.py`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from ..formats import FORMATS
from ..model.architectures import LATENT_SINKS
from ..model.cache_scheme import asked_cache
from ..model.config_fields import BadInput, all_pick
from ..refusals.facts import Architecture, Cache, Drafts, Engine, Facts, Given, Latents, Layer, Pages, Parallel, Vllm
from ..refusals.table import refuse
from ..vllm_compat import (
    builds_draft,
    groups_stay,
    has_host_cache,
    has_own_queries,
    prefill_ranks,
    sizes_latents_beside_states,
)
from .connectors import connectors
from .options import given_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_facts(config: VllmConfig) -> Facts:
    """Facts of an engine and its model, without facts of a layer."""
    parallel, cache, speculative = config.parallel_config, config.cache_config, config.speculative_config
    model, transfer = config.model_config, config.kv_transfer_config
    text = model.hf_text_config
    draft_dtype = speculative.kv_cache_dtype if speculative else None
    has_draft_cache = speculative is not None and speculative.uses_draft_kv_cache()
    capability = current_platform.get_device_capability()
    return Facts(
        Engine(
            platform=platform_name(),
            capability=(capability.major, capability.minor) if capability else None,
            connector=transfer.kv_connector if transfer else None,
            connectors=tuple(connectors(transfer)),
            has_lora=config.lora_config is not None,
            has_fast_prefill=cache.kv_sharing_fast_prefill,
            has_micro_batches=parallel.use_ubatching,
        ),
        Parallel(
            dcp=parallel.decode_context_parallel_size,
            dcp_backend=parallel.dcp_comm_backend,
            dcp_run=parallel.cp_kv_cache_interleave_size,
            has_own_queries=has_own_queries(parallel),
            pipeline=parallel.pipeline_parallel_size,
            pcp=prefill_ranks(config),
        ),
        Cache(
            block_size=cache.block_size if cache.user_specified_block_size else None,
            auto=auto_cache(config),
            skip_layers=tuple(cache.kv_cache_dtype_skip_layers),
            layer_numbers=_layer_numbers(config),
            has_other_dtypes=bool(cache.kv_cache_dtype_skip_layers)
            or (has_draft_cache and draft_dtype not in (None, cache.cache_dtype)),
            has_one_manager=config.scheduler_config.disable_hybrid_kv_cache_manager,
            has_host_cache=has_host_cache(config),
        ),
        Drafts(
            method=speculative.method if speculative else None,
            has_cache=has_draft_cache,
            is_packed=speculative is not None and draft_dtype in (None, *FORMATS),
            is_draft=is_draft(config),
        ),
        Vllm(groups_stay=groups_stay(), states_fit=sizes_latents_beside_states()),
        Architecture(
            name=model.architecture,
            has_states=model.is_hybrid,
            has_chunks=bool(model.attention_chunk_size),
            has_several_kinds=len({*(getattr(text, "layer_types", None) or ())}) > 1,
        ),
        Latents(
            is_mla=model.use_mla,
            is_sparse=picks_tokens(config),
            has_dense_layers=model.use_mla
            and (model.architecture.startswith(LATENT_SINKS) or bool(getattr(text, "learnable_sink", False)))
            and not (picks_tokens(config) and all_pick(getattr(text, "layer_types", None))),
        ),
    )


def given_facts(config: VllmConfig) -> Given:
    """Facts about options that a model or a device may have no use for. Of an engine, before it is started: where a
    draft is built, the options may be the model's."""
    given, speculative = given_options(config.additional_config), config.speculative_config
    models = [config.model_config, speculative.draft_model_config if speculative else None]
    return Given(
        decode_kernel=given.get("decode_kernel"),
        latent_rope_bits=given.get("latent_rope_bits"),
        is_fp32=str(config.model_config.dtype) == "torch.float32",
        has_latents=any(model.use_mla for model in models if model is not None),
    )


def picks_tokens(config: VllmConfig) -> bool:
    """True if layers of latent attention read picked tokens."""
    model = config.model_config
    return model.use_mla and getattr(model.hf_text_config, "index_topk", None) is not None


def is_draft(config: VllmConfig) -> bool:
    """True if the model that is being built is a draft. Some drafts have a configuration of their own, others the
    engine's."""
    return config.model_config.runner_type == "draft" or (config.speculative_config is not None and builds_draft())


def auto_cache(config: VllmConfig) -> str:
    """The dtype that the checkpoint gives `--kv-cache-dtype auto`; "": the model's own, or it cannot be read."""
    with contextlib.suppress(BadInput):  # describe_cache_scheme says it
        return asked_cache(quantization_of(config))
    return ""


def quantization_of(config: VllmConfig) -> dict[str, Any]:
    """The checkpoint's quantization, by the field that vLLM reads; {}: it has none."""
    model = config.model_config.hf_config
    fields = (getattr(model, name, None) for name in ("quantization_config", "compression_config"))
    return next(filter(None, fields), {})


MORE_CACHES = ("loop_num", "total_ut_steps", "H_cycles", "n_recurrent_loops")
"""Fields of configs whose models have more KV caches than layers; LoopCoder's may lack its own."""


def _layer_numbers(config: VllmConfig) -> frozenset[int] | None:
    """Possible numbers of layers with a KV cache, by the model's config; None: it does not tell."""
    model = config.model_config
    loops = "LoopCoder" in model.architecture or any(hasattr(model.hf_text_config, name) for name in MORE_CACHES)
    if config.speculative_config or loops:
        return None
    return frozenset(range(model.get_total_num_hidden_layers()))


def check_skipped_layers(config: VllmConfig, dtype: str) -> None:
    """Raise Refused for a word of `--kv-cache-dtype-skip-layers` that names no layer, and for layers that share a cache
    and of which one is skipped. To be called when the layers are made.

    A stage of pipeline parallelism has only some of the layers.
    """
    words = tuple(config.cache_config.kv_cache_dtype_skip_layers)
    if not words:
        return
    layers = config.compilation_config.static_forward_context
    attention = {name: layer for name, layer in layers.items() if hasattr(layer, "kv_cache_dtype")}
    if config.parallel_config.pipeline_parallel_size == 1:
        numbers = frozenset(int(part) for name in attention for part in name.split(".") if part.isdecimal())
        slides = any(getattr(layer, "sliding_window", None) is not None for layer in attention.values())
        refuse(Facts(Cache(skip_layers=words, layer_numbers=numbers, slides=slides)), dtype)
    for name, layer in attention.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target in attention and (other := attention[target].kv_cache_dtype) != layer.kv_cache_dtype:
            refuse(Facts(Layer(name=f"{name} ({layer.kv_cache_dtype})"), Pages(owner=target, owner_dtype=other)), dtype)


def platform_name() -> str:
    """Return "cpu", "cuda", or vLLM's name of another platform."""
    if current_platform.is_cpu():
        return "cpu"
    return "cuda" if current_platform.is_cuda() else current_platform.device_name
