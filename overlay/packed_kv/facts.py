"""Facts about an engine, its model and one of its layers, read by the rules of `refusals.py`. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Connector(NamedTuple):
    """A KV connector: its name, with its module's path in front if one is given, and its `kv_connector_extra_config`;
    what is changed there, vLLM sees."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about an engine, its model and one of its layers; None: not known.

    Of the engine:
        capability: compute capability of the GPU.
        dcp, dcp_backend: `--decode-context-parallel-size`, `--dcp-comm-backend`.
        dcp_run: tokens in a row of a rank, `--cp-kv-cache-interleave-size`.
        has_own_queries: each rank computes the queries of all, `--dcp-q-replicate`.
        has_mean_blocks: whether a calibration file has means of keys by position.
        pipeline: `--pipeline-parallel-size`.
        connector, connectors: its KV connector, and the same or those within a MultiConnector.
        auto_cache: the dtype that `--kv-cache-dtype auto` would be by the checkpoint; "": the model's own.
        skip_layers: `--kv-cache-dtype-skip-layers`; `layer_numbers`: of layers with a KV cache, and `slides`: whether
        some of these have a sliding window.
        has_other_dtypes: layers, or a draft's, have another KV-cache dtype.
        has_draft_cache: a draft has layers with a cache of their own.
        is_draft: these are facts of the draft and its layers; `packs_draft`: a draft's layers have a packed dtype, too.
        has_several_kinds: the model's layers differ in what they attend to, as sliding and full ones.
        backend_reasons: what vLLM says against the backend.
        version_without_latents: version of a vLLM whose latent attention has not what packed pages need;
        version_without_rows: the same of sparse attention over latents, on CUDA.
        pcp: `--prefill-context-parallel-size`. has_host_cache: `hisparse_config` of `--attention-config`.
        has_lora: `--enable-lora`.
        groups_stay: a spec can keep its cache group from KV connectors.
        states_fit: blocks beside state layers are sized by latents as they are stored.

    Of a layer:
        layer: what to call it, where its backend, its size of V or the cache that it reads is wrong.
        attention: vLLM's type: "decoder", "encoder", "encoder_only" or "encoder_decoder".
        own_backend: name of the backend that the model chose for it.
        layer_options: arguments that no implementation here knows.
        built_value_size: V's head size that its implementation was told.
        sinks: shape of its attention sinks.
        cache_of: name of the layer whose cache it reads, in a draft; `shares_cache`: it reads another's, in the model.
        is_causal: False: a batch, or a layer's cache, in which tokens attend to later ones.
        cache_kind: class of its KV-cache spec, where packed pages do not serve such.
        unlike_its_cache: the dtype of the pages of `cache_of`, where the layer's own is another.
        latent_rank, rope_size: channels of a latent vector, and of RoPE beside it.
        latent_layer: class of a layer of latent attention that is none of vLLM's `MLAAttention`.
        latent_size, built_latent_size: both together, and those that its backend was made for.
        page: bytes of a packed page, and bytes of it that are used.
        skipped_dtype: its KV-cache dtype, where its backend is that of packed layers.
    """

    # The engine
    platform: str | None = None
    capability: tuple[int, int] | None = None
    block_size: int | None = None
    dcp: int | None = None
    dcp_backend: str | None = None
    dcp_run: int | None = None
    has_own_queries: bool | None = None
    has_mean_blocks: bool | None = None
    pipeline: int | None = None
    connector: str | None = None
    connectors: tuple[Connector, ...] | None = None
    speculative_method: str | None = None
    auto_cache: str | None = None
    skip_layers: tuple[str, ...] | None = None
    layer_numbers: frozenset[int] | None = None
    slides: bool | None = None
    has_other_dtypes: bool | None = None
    has_draft_cache: bool | None = None
    is_draft: bool | None = None
    packs_draft: bool | None = None
    has_one_cache_manager: bool | None = None
    version_without_latents: str | None = None
    version_without_rows: str | None = None
    pcp: int | None = None
    has_host_cache: bool | None = None
    has_lora: bool | None = None
    groups_stay: bool | None = None
    states_fit: bool | None = None
    has_fast_prefill: bool | None = None
    has_micro_batches: bool | None = None
    backend_reasons: tuple[str, ...] | None = None

    # The model
    architecture: str | None = None
    is_mla: bool | None = None
    is_sparse: bool | None = None
    has_latent_sinks: bool | None = None
    has_alibi: bool | None = None
    has_static_sinks: bool | None = None
    has_image_prefix: bool | None = None
    has_states: bool | None = None
    has_chunks: bool | None = None
    has_several_kinds: bool | None = None

    # A layer
    layer: str | None = None
    attention: str | None = None
    own_backend: str | None = None
    is_causal: bool | None = None
    cache_kind: str | None = None
    layer_options: tuple[str, ...] | None = None
    head_size: int | None = None
    value_size: int | None = None
    built_value_size: int | None = None
    query_heads: int | None = None
    latent_rank: int | None = None
    rope_size: int | None = None
    latent_layer: str | None = None
    latent_size: int | None = None
    built_latent_size: int | None = None
    sinks: tuple[int, ...] | None = None
    sliding_window: int | None = None
    cache_of: str | None = None
    shares_cache: bool | None = None
    unlike_its_cache: str | None = None
    page: tuple[int, int] | None = None
    skipped_dtype: str | None = None
    has_output_scale: bool | None = None
