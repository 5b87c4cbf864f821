"""Versions of vLLM, and private names of vLLM that packed-kv uses. No other module asks for either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
import vllm.config.cache as cache_config
import vllm.v1.kv_cache_interface as cache_interface

from .formats import Format

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

ScratchSpec: Any = getattr(cache_interface, "CircularBufferSpec", cache_interface.AttentionSpec)
"""Base of the specs of groups that take no part in the prefix cache. 0.28 has none: see `no_scratch_groups`."""


def is_patched() -> bool:
    """True if vLLM has the whole series of vllm_patches/: this function is of the last patch, in all versions."""
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


def no_scratch_groups() -> str:
    """vLLM's version if it knows no groups of layers beside the prefix cache, as 0.28; else ""."""
    return "" if hasattr(cache_interface, "CircularBufferSpec") else vllm.__version__


def no_latents() -> str:
    """vLLM's version if its latent attention has not the seams that packed pages need, as 0.31; else ""."""
    from vllm.model_executor.layers.attention import mla_attention

    needed = ("init_mla_context_partial", "accumulate_mla_context_chunk", "split_kv_b_proj")
    return "" if all(hasattr(mla_attention, name) for name in needed) else vllm.__version__


def groups_stay() -> bool:
    """True if a spec can keep its cache group from KV connectors: a patch that older packages of ours lack."""
    return "__post_init__" in vars(cache_interface.KVCacheGroupSpec)


def cache_layouts(*names: str) -> tuple[KVCacheLayout, ...]:
    """vLLM's layouts of a cache, by name. Not asked of a backend in 0.28."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return tuple(KVCacheLayout[name] for name in names)


class PagesByShape:
    """Methods that a vLLM without `KVCacheLayout`, such as 0.28, asks of a backend. Later ones ask `customize_spec`
    alone."""

    fmt: ClassVar[Format]

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a layer's pages, uint8."""
        return num_blocks, num_kv_heads, block_size, cls.fmt.slot_bytes(head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Order of the dimensions in memory: as in the shape, layers behind blocks."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)


def has_draft_cache(speculative: SpeculativeConfig | None) -> bool:
    """True if a draft has layers with a KV cache of their own."""
    if speculative is None:
        return False
    if hasattr(speculative, "uses_draft_kv_cache"):
        return bool(speculative.uses_draft_kv_cache())
    return bool(  # 0.28
        speculative.use_eagle() or speculative.uses_draft_model() or speculative.uses_extract_hidden_states()
    )


def builds_draft() -> bool:
    """True if vLLM is building a part beside the model, such as a draft, which it marks for its compilation."""
    from vllm.compilation import backends

    return getattr(backends, "model_tag", "backbone") != "backbone"


def lengths_on_host(common: CommonAttentionMetadata) -> torch.Tensor | None:
    """Upper bounds of requests' lengths, int32 [requests], on the host; None: not known there.

    For the chunks of chunked attention, 0.28 has those of whole requests as bounds, and the right ones beside them.
    """
    exact: torch.Tensor | None = getattr(common, "_seq_lens_cpu", None)
    bounds: torch.Tensor | None = common.seq_lens_cpu_upper_bound
    return bounds if exact is None or bounds is None else exact


class TierInternals:
    """Private parts of vLLM's disk tier that `sharing/file_tier.py` works with. A vLLM that lacks one fails here, at
    the start, and not in a thread later."""

    def __init__(self, tier: FileSystemTierManager) -> None:
        self.store_keys: dict[int, list[Any]] = tier._store_job_keys
        self.load_keys: dict[int, list[Any]] = tier._load_job_keys
        self.load_progress: dict[int, int] = tier._load_progress
        """Job -> chunks before the first that failed."""
        self.pool: Any = tier._pool
        self.use_o_direct: bool = tier._use_o_direct


def wrap_adapter_keys(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap` of vLLM's function in its place: the one that makes a request's LoRA keys for block hashes."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_lora_extra_hash_keys = wrap(kv_cache_utils._gen_lora_extra_hash_keys)


def register_cache_spec(spec: type[KVCacheSpec], manager: type[Any]) -> None:
    """Register the spec of a cache group and its manager. vLLM registers its own only while there are none, so they
    come first."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(spec, manager, spec)


def count_chunks(tier: FileSystemTierManager, job: TransferJob) -> None:
    """Tell vLLM's tier how many chunks a job has, for the bytes in its metrics, which 0.28 lacks."""
    if hasattr(tier, "_job_block_counts"):
        tier._job_block_counts[job.job_id] = len(job.keys)


def chunk_ids(job: TransferJob) -> Any:
    """Places of a tier's chunks in host memory, int64 [chunks]: called blocks in 0.28."""
    return job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
