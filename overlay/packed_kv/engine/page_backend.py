"""Base of the backends of all packed pages, those of latents included."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec

from ..formats import Format
from ..gpu_generations import LEAST_CAPABILITY
from ..layout import MICRO_BLOCK


class PackedPages:
    """Stands before vLLM's class among the bases of a backend of one format."""

    fmt: ClassVar[Format]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(MICRO_BLOCK)]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype == cls.fmt.name

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        return capability is None or (capability.major, capability.minor) >= LEAST_CAPABILITY

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A checkpoint's KV-cache scales are for fp8. Packed pages ignore them, as they have scales of their own."""
        return True
