"""Facts about an engine, its model and one of its layers, read by the rules of `refusals/table.py`. No torch.

Each record has the facts of one subject; None: not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar


class Connector(NamedTuple):
    """A KV connector: its name, with its module's path in front if one is given, and its `kv_connector_extra_config`;
    vLLM sees changes to it."""

    name: str
    options: dict[str, Any]


class Record:
    """Facts of one subject."""


@dataclass(frozen=True, kw_only=True)
class Engine(Record):
    """An engine's device and options.

    capability: compute capability of the GPU.
    connector, connectors: its KV connector, and a list: that connector or, for a MultiConnector, its parts.
    has_lora, has_fast_prefill: `--enable-lora`, `--kv-sharing-fast-prefill`.
    has_micro_batches: `--enable-dbo` or `--ubatch-size`.
    """

    platform: str | None = None
    capability: tuple[int, int] | None = None
    connector: str | None = None
    connectors: tuple[Connector, ...] | None = None
    has_lora: bool | None = None
    has_fast_prefill: bool | None = None
    has_micro_batches: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Given(Record):
    """Options of `--additional-config` that are given, and whether they apply to the model.

    not_cuda: why the CUDA kernel does not serve a layer, or "".
    is_fp32: the model computes in float32.
    has_latents: the model or a draft has latent attention (MLA).
    """

    decode_kernel: str | None = None
    not_cuda: str | None = None
    latent_rope_bits: int | None = None
    is_fp32: bool | None = None
    has_latents: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Parallel(Record):
    """Ranks of an engine.

    dcp, dcp_backend: `--decode-context-parallel-size`, `--dcp-comm-backend`.
    dcp_run: tokens in a row of a rank, `--cp-kv-cache-interleave-size`.
    has_own_queries: each rank computes the queries of all ranks, `--dcp-q-replicate`.
    has_mean_blocks: a calibration file has means of keys by position, in blocks that ranks may cut.
    pipeline, pcp: `--pipeline-parallel-size`, `--prefill-context-parallel-size`.
    """

    dcp: int | None = None
    dcp_backend: str | None = None
    dcp_run: int | None = None
    has_own_queries: bool | None = None
    has_mean_blocks: bool | None = None
    pipeline: int | None = None
    pcp: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cache(Record):
    """An engine's KV cache.

    block_size: `--block-size`, where it is given.
    auto: the dtype that the checkpoint gives `--kv-cache-dtype auto`; "": the model's own.
    skip_layers: `--kv-cache-dtype-skip-layers`.
    layer_numbers, slides: numbers of the layers with a KV cache; some of these have a sliding window.
    has_other_dtypes: layers, or a draft's, have another KV-cache dtype.
    has_one_manager: `--disable-hybrid-kv-cache-manager`.
    has_host_cache: `hisparse_config` of `--attention-config`.
    """

    block_size: int | None = None
    auto: str | None = None
    skip_layers: tuple[str, ...] | None = None
    layer_numbers: frozenset[int] | None = None
    slides: bool | None = None
    has_other_dtypes: bool | None = None
    has_one_manager: bool | None = None
    has_host_cache: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Drafts(Record):
    """Speculative decoding.

    method: that of `--speculative-config`.
    has_cache: a draft has layers with a cache of their own; is_packed: these have a packed dtype, too.
    is_draft: the other facts are of the draft and its layers.
    """

    method: str | None = None
    has_cache: bool | None = None
    is_packed: bool | None = None
    is_draft: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Vllm(Record):
    """Abilities of the vLLM that is installed.

    version_without_latents: its version, if its latent attention lacks features that packed pages need.
    version_without_rows: the same of sparse attention over latents, on CUDA.
    groups_stay: a spec can keep its cache group from KV connectors.
    states_fit: blocks beside state layers are sized by latents as they are stored.
    backend_reasons: vLLM's objections to the backend.
    """

    version_without_latents: str | None = None
    version_without_rows: str | None = None
    groups_stay: bool | None = None
    states_fit: bool | None = None
    backend_reasons: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture(Record):
    """A model's architecture.

    name: the first of its config's `architectures`.
    has_states, has_chunks: it has state layers, or layers of chunked attention.
    has_several_kinds: its layers differ in what they attend to, as sliding and full ones.
    """

    name: str | None = None
    has_states: bool | None = None
    has_chunks: bool | None = None
    has_several_kinds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Attention(Record):
    """Attention of a model or of a layer.

    kind: vLLM's type: "decoder", "encoder", "encoder_only" or "encoder_decoder".
    is_causal: False: a batch, or a layer's cache, in which tokens attend to later ones.
    has_image_prefix: tokens of an image attend to each other in both directions.
    has_static_sinks: keys and values stand before each request's; sinks: shape of a layer's attention sinks.
    sliding_window: of a layer, in tokens.
    """

    kind: str | None = None
    is_causal: bool | None = None
    has_alibi: bool | None = None
    has_image_prefix: bool | None = None
    has_static_sinks: bool | None = None
    sinks: tuple[int, ...] | None = None
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Latents(Record):
    """Latent attention (MLA) of a model or of a layer.

    is_mla, is_sparse: it has latent attention, and layers that read picked tokens.
    has_dense_layers: of a model with attention sinks, some layers read all tokens.
    rank, rope_size: channels of a latent vector, and of RoPE beside it.
    size, built_size: the sum of both, and the sum that its backend was made for.
    layer_class: class of a layer that is none of vLLM's `MLAAttention`.
    """

    is_mla: bool | None = None
    is_sparse: bool | None = None
    has_dense_layers: bool | None = None
    rank: int | None = None
    rope_size: int | None = None
    size: int | None = None
    built_size: int | None = None
    layer_class: str | None = None


@dataclass(frozen=True, kw_only=True)
class Layer(Record):
    """A layer and its heads.

    name: its name in messages about its backend, its size of V or the cache that it reads.
    own_backend: name of the backend that the model chose for it.
    options: arguments that no implementation here knows.
    has_output_scale: its output is to be quantized.
    value_size, built_value_size: V's head size, and the head size that its implementation was given.
    """

    name: str | None = None
    own_backend: str | None = None
    options: tuple[str, ...] | None = None
    has_output_scale: bool | None = None
    head_size: int | None = None
    value_size: int | None = None
    built_value_size: int | None = None
    query_heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pages(Record):
    """Pages that a layer reads.

    kind: class of its KV-cache spec, where packed pages do not serve this class.
    size: bytes of a packed page, and bytes of it that are used.
    skipped_dtype: its KV-cache dtype, where its backend is that of packed layers.
    owner: name of the layer whose cache it reads, in a draft; is_shared: it reads another's, in the model.
    owner_dtype: the dtype of the owner's pages, where its own is another.
    """

    kind: str | None = None
    size: tuple[int, int] | None = None
    skipped_dtype: str | None = None
    owner: str | None = None
    is_shared: bool | None = None
    owner_dtype: str | None = None


class Facts:
    """Facts by subject. A subject without a record is unknown; with several records of a subject, the last one that
    knows a fact counts."""

    def __init__(self, *records: Record) -> None:
        self.records = records
        self.engine = _merge(records, Engine)
        self.given = _merge(records, Given)
        self.parallel = _merge(records, Parallel)
        self.cache = _merge(records, Cache)
        self.drafts = _merge(records, Drafts)
        self.vllm = _merge(records, Vllm)
        self.architecture = _merge(records, Architecture)
        self.attention = _merge(records, Attention)
        self.latents = _merge(records, Latents)
        self.layer = _merge(records, Layer)
        self.pages = _merge(records, Pages)


R = TypeVar("R", bound=Record)


def _merge(records: tuple[Record, ...], subject: type[R]) -> R:
    of_subject = (record for record in records if isinstance(record, subject))
    return subject(**{name: fact for record in of_subject for name, fact in vars(record).items() if fact is not None})
