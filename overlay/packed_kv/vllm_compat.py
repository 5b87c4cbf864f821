"""What differs between the versions of vLLM that are served. No other module asks which version it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import vllm.config.cache as cache_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec


def is_patched() -> bool:
    """Whether vLLM has the whole series of vllm_patches/: this function is of the last patch, in all versions."""
    return hasattr(cache_config, "prepare_kv_cache_dtype")


def get_kv_cache_groups(config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """vLLM's groups of layers that share a block table.

    The function moved from `kv_cache_utils` (0.32) to `kv_cache_planning` (0.33).
    """
    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups as find  # type: ignore[import-not-found]
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups as find
    return find(config, dict(specs))
