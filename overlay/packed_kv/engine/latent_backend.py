"""Backends of latent attention (MLA): one per KV-cache dtype and size of latents."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.kv_cache_interface import AttentionSpec

from ..attention.latent.impl import LatentAttentionImpl
from ..attention.latent.metadata import LatentMetadataBuilder
from ..facts import Facts
from ..formats import FORMATS
from ..refusals import refuse
from .capacity import log_capacity, log_match_unit
from .names import latent_registry_name
from .page_backend import PackedPages

SLIDING_SPEC = "SlidingWindowMLASpec"
"""KV-cache spec of latent layers with a sliding window, which vLLM does not mention when it selects a backend."""


class ReportingLatentBuilder(LatentMetadataBuilder):
    """Reports the cache's capacity when vLLM makes it: the cache has its real size by then."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        log_capacity(vllm_config, kv_cache_spec.block_size)
        log_match_unit(vllm_config)


class PackedLatentBackend(PackedPages, MLACommonBackend):
    """Base of the backends; `latent_backend_of` makes one per format and size (vLLM asks the class for a page's size,
    and tells it neither dtype nor rank)."""

    rank: ClassVar[int]
    rope_dim: ClassVar[int]
    rope_bits: ClassVar[int]

    @classmethod
    def get_name(cls) -> str:
        return latent_registry_name(cls.fmt)

    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        return LatentAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return ReportingLatentBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [cls.rank + cls.rope_dim]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give packed layers (dtype uint8) their true size of a token. Raises Refused for layers that say only here
        that they have a sliding window, and for other latents than the model's."""
        if spec.dtype != torch.uint8:
            return spec
        facts = Facts(
            is_mla=True,
            sliding_window=getattr(spec, "sliding_window", None) or 0 if type(spec).__name__ == SLIDING_SPEC else None,
            latent_size=spec.head_size,
            built_latent_size=cls.rank + cls.rope_dim,
        )
        refuse(facts, cls.fmt.name)
        return replace(spec, state_content_bytes=cls.fmt.latent_bytes(cls.rank, cls.rope_dim, cls.rope_bits))


@functools.cache
def latent_backend_of(name: str, rank: int, rope_dim: int, rope_bits: int) -> type[PackedLatentBackend]:
    """The backend class of a dtype for latents of `rank` channels beside `rope_dim` of RoPE, of `rope_bits`."""
    sizes = {"rank": rank, "rope_dim": rope_dim, "rope_bits": rope_bits}
    members = {"fmt": FORMATS[name], **sizes, "__module__": __name__}
    return type(f"{name.capitalize()}LatentBackend", (PackedLatentBackend,), members)
