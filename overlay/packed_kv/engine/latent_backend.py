"""Backends of latent attention (MLA): one per KV-cache dtype and size of latents, dense and sparse."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.platforms import current_platform
from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported
from vllm.v1.kv_cache_interface import AttentionSpec

from ..attention.latent.impl import LatentAttentionImpl
from ..attention.latent.metadata import LatentMetadataBuilder
from ..attention.sparse.impl import SparseLatentImpl
from ..attention.sparse.metadata import SparseLatentBuilder
from ..formats import FORMATS
from ..layout import latent_slot_bytes
from ..refusals.facts import Attention, Facts, Latents
from ..refusals.table import refuse
from .capacity import CheckedCache
from .names import LATENT, SPARSE, registry_name
from .page_backend import PackedPages

PICKS_MULTIPLE = 128
"""The number of a query token's picks is a multiple of this, as FlashMLA needs it."""
SLIDING_SPEC = "SlidingWindowMLASpec"
"""KV-cache spec of latent layers with a sliding window. vLLM does not mention the window when it selects a backend."""


class CheckedLatentBuilder(CheckedCache, LatentMetadataBuilder):
    """Makes the metadata of layers of latents."""


class PackedLatentBackend(PackedPages, MLACommonBackend):
    """Base of the backends; `latent_backend_of` makes one per format and size (vLLM asks the class for a page's size,
    and tells it neither dtype nor rank)."""

    rank: ClassVar[int]
    rope_dim: ClassVar[int]
    rope_bits: ClassVar[int]

    @classmethod
    def get_name(cls) -> str:
        return registry_name(cls.fmt, LATENT)

    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        return LatentAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return CheckedLatentBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [cls.rank + cls.rope_dim]

    @classmethod
    def supports_sink(cls) -> bool:
        """True for dense attention, too, though its implementation refuses sinks: if the backend said False, Hy4's
        layers (vLLM's models/hy_v4) would run without their sinks."""
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give packed layers (dtype uint8) their true size of a token. Raises Refused for layers that only here show
        that they have a sliding window, and for latents of other sizes than the model's."""
        if spec.dtype != torch.uint8:
            return spec
        slides = type(spec).__name__ == SLIDING_SPEC
        facts = Facts(
            Latents(is_mla=True, size=spec.head_size, built_size=cls.rank + cls.rope_dim),
            Attention(sliding_window=getattr(spec, "sliding_window", None) or 0 if slides else None),
        )
        refuse(facts, cls.fmt.name)
        sizes = cls.rank, cls.rope_dim, cls.rope_bits
        return replace(spec, state_content_bytes=latent_slot_bytes(cls.fmt, *sizes, rows=cls.is_sparse()))


class CheckedSparseBuilder(CheckedCache, SparseLatentBuilder):
    """Makes the metadata of layers of latents that read picked tokens."""


class PackedSparseBackend(PackedLatentBackend):
    """Base of the backends of sparse attention over latents; `sparse_latent_backend_of` makes them."""

    @classmethod
    def get_name(cls) -> str:
        return registry_name(cls.fmt, SPARSE)

    @staticmethod
    def get_impl_cls() -> type[SparseLatentImpl]:
        return SparseLatentImpl

    @staticmethod
    def get_builder_cls() -> type[SparseLatentBuilder]:
        return CheckedSparseBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_combination(cls, *_arguments: Any, **_options: Any) -> str | None:
        """Say why FlashMLA, which attends on CUDA, does not serve it."""
        if not current_platform.is_cuda():
            return None
        is_served, reason = is_flashmla_sparse_supported()
        if not is_served:
            return reason
        picks = int(get_current_vllm_config().model_config.hf_text_config.index_topk)
        if picks % PICKS_MULTIPLE:
            return f"index_topk {picks}, and FlashMLA needs a multiple of {PICKS_MULTIPLE}"
        return None


@functools.cache
def latent_backend_of(name: str, rank: int, rope_dim: int, rope_bits: int) -> type[PackedLatentBackend]:
    """The backend class of a dtype for latents of `rank` channels with `rope_dim` RoPE channels of `rope_bits` bits."""
    return _derive(PackedLatentBackend, "LatentBackend", name, rank, rope_dim, rope_bits)


@functools.cache
def sparse_latent_backend_of(name: str, rank: int, rope_dim: int, rope_bits: int) -> type[PackedSparseBackend]:
    """The same for sparse attention: on CUDA only in bf16, as FlashMLA's kernel."""
    made = _derive(PackedSparseBackend, "SparseLatentBackend", name, rank, rope_dim, rope_bits)
    if current_platform.is_cuda():
        made.supported_dtypes = [torch.bfloat16]
    return made


Backend = TypeVar("Backend", bound=PackedLatentBackend)


def _derive(base: type[Backend], suffix: str, name: str, rank: int, rope_dim: int, rope_bits: int) -> type[Backend]:
    sizes = {"rank": rank, "rope_dim": rope_dim, "rope_bits": rope_bits}
    return type(f"{name.capitalize()}{suffix}", (base,), {"fmt": FORMATS[name], **sizes, "__module__": __name__})
