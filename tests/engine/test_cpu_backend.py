"""Which class serves layers with dense pages on a CPU."""

from __future__ import annotations

import pytest
import torch
from packed_kv.engine.cpu_backend import DenseCPUBackend
from packed_kv.engine.registration import register_formats
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="of vLLM's CPU platform")


def test_engines_without_a_packed_dtype_keep_vllms_class() -> None:
    """Whatever engines the process had before: a layer asks with "auto" in both."""
    register_formats()
    for dtype, backend in (
        ("auto", CPUAttentionBackend), ("tq4", DenseCPUBackend), ("auto", CPUAttentionBackend),
        ("fp8", CPUAttentionBackend), ("turboquant25", DenseCPUBackend),
    ):  # fmt: skip
        with set_current_vllm_config(VllmConfig(cache_config=CacheConfig(cache_dtype=dtype))):
            assert get_attn_backend(64, torch.bfloat16, "auto") is backend, dtype
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
