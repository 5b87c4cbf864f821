"""One attention backend per KV-cache dtype: what it supports, and how large its pages are."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..attention.impl import PackedAttentionImpl
from ..attention.metadata import PackedMetadataBuilder
from ..formats import FORMATS, HEAD_DIM_MULTIPLE
from ..refusals.facts import Attention, Facts, Layer, Pages
from ..refusals.table import refuse
from .capacity import CheckedCache
from .names import class_name, registry_name
from .page_backend import PackedPages

SINK_SPEC = "SinkFullAttentionSpec"
"""KV-cache spec of layers with static sinks. vLLM does not mention these sinks when it selects a backend."""
SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""Classes of the KV-cache specs that packed pages serve."""
WRAPPERS = ("vllm.model_executor.layers.attention.chunked_local_attention",)
"""Modules whose layers derive a backend from ours, with a metadata builder that calls ours; our builder supports
them."""


class CheckedPairBuilder(CheckedCache, PackedMetadataBuilder):
    """Makes the metadata of layers of pairs."""


class PackedAttentionBackend(PackedPages, AttentionBackend):
    """Base of the backends; `backend_of` makes one per format (vLLM asks the class, and gives it no dtype)."""

    forward_includes_kv_cache_update = True

    @classmethod
    def get_name(cls) -> str:
        return registry_name(cls.fmt)

    @classmethod
    def get_impl_cls(cls) -> type[PackedAttentionImpl]:
        """Raises Refused, while the layer is made, for a class derived from ours that may change a batch's metadata."""
        refuse(Facts(Layer(name="a layer", own_backend=unknown_wrapper(cls))), cls.fmt.name)
        return PackedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PackedMetadataBuilder]:
        return CheckedPairBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size > 0 and head_size % HEAD_DIM_MULTIPLE == 0

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give packed layers (dtype uint8) their true slot size; bf16 layers beside them keep their spec.

        V may have fewer channels than K; in a slot it then takes K's size. Raises Refused where V has more, and for
        layers that only here show that they have static sinks, are not causal or cache something else.
        """
        if spec.dtype != torch.uint8:
            return spec
        kind = type(spec).__name__
        facts = Facts(
            Attention(has_static_sinks=kind == SINK_SPEC, is_causal=not getattr(spec, "non_causal", False)),
            Pages(kind=None if kind in (SINK_SPEC, *SPECS) else kind),
            Layer(head_size=spec.head_size, value_size=spec.head_size_v),
        )
        refuse(facts, cls.fmt.name)
        return replace(spec, state_content_bytes=cls.fmt.slot_bytes(spec.head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


def unknown_wrapper(backend: type[AttentionBackend]) -> str | None:
    """Name of a foreign backend: not ours, and not derived from ours by `WRAPPERS`. None: the backend is ours or
    derived."""
    name = backend.get_name()
    if not issubclass(backend, PackedAttentionBackend):
        return name
    for derived in backend.__mro__:
        changes = {attribute: value for attribute, value in vars(derived).items() if not attribute.startswith("_")}
        if "fmt" in changes:
            break
        if [*changes] != ["get_builder_cls"] or changes["get_builder_cls"]().__module__ not in WRAPPERS:
            return f"{derived.__name__}, made from {name}"
    return None


@functools.cache
def backend_of(name: str) -> type[PackedAttentionBackend]:
    """The backend class of a dtype, made on first use."""
    fmt = FORMATS[name]
    return type(class_name(fmt), (PackedAttentionBackend,), {"fmt": fmt, "__module__": __name__})


def __getattr__(name: str) -> type[PackedAttentionBackend]:
    """The backend class of this name; vLLM's registry looks it up here."""
    for fmt in FORMATS.values():
        if class_name(fmt) == name:
            return backend_of(fmt.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
