"""Versions of vLLM: probes of a version's features, fields of its configuration that other versions lack, and private
names of vLLM, which no other module imports or reads (`tests/test_imports.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import vllm
import vllm.config.cache as cache_config
import vllm.v1.kv_cache_interface as cache_interface

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager


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


def version_without_latents() -> str:
    """vLLM's version if its latent attention lacks the hooks that packed pages need, as 0.31 does; else ""."""
    from vllm.model_executor.layers.attention import mla_attention

    needed = ("init_mla_context_partial", "accumulate_mla_context_chunk", "split_kv_b_proj")
    return "" if all(hasattr(mla_attention, name) for name in needed) else vllm.__version__


def version_without_rows() -> str:
    """vLLM's version if its layers of sparse attention over latents, those of CUDA, do not let an implementation write
    the cache, as 0.32 and patches of older packages of ours; else ""."""
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    return "" if hasattr(DeepseekV32Attention, "hands_over_latents") else vllm.__version__


def groups_stay() -> bool:
    """True if a spec can keep its cache group from KV connectors: a patch that older packages of ours lack."""
    return "__post_init__" in vars(cache_interface.KVCacheGroupSpec)


def sizes_latents_beside_states() -> bool:
    """True if vLLM asks a backend for the size of its latents beside state layers: a patch that older packages of ours
    lack, and 0.31, which has no packed latents."""
    from vllm.platforms.interface import Platform

    return hasattr(Platform, "_customized_page_size")


def has_own_queries(of: Any) -> bool | None:
    """True if ranks that split a context keep copies of all query heads, by `dcp_q_replicate` of the configuration of
    parallelism or of a layer of latent attention; None: it has no such field."""
    return getattr(of, "dcp_q_replicate", None)


def prefill_ranks(config: VllmConfig) -> int | None:
    """Ranks that split prompts; None: this vLLM does not split them."""
    return getattr(config.parallel_config, "prefill_context_parallel_size", None)


def has_host_cache(config: VllmConfig) -> bool:
    """True if sparse attention keeps its rows on the host (HiSparse)."""
    return getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None


def sparse_workspace_contexts(config: VllmConfig) -> int | None:
    """Contexts of the model that the workspace of sparse attention holds; None: vLLM does not say."""
    return getattr(config.attention_config, "sparse_mla_prefill_workspace_factor", None)


def keep_rope_from_store(config: VllmConfig) -> None:
    """Have vLLM not fuse RoPE with the store of latents: that writes plain rows and asks no implementation."""
    if hasattr(passes := config.compilation_config.pass_config, "fuse_rope_kvcache_cat_mla"):
        passes.fuse_rope_kvcache_cat_mla = False


def cpu_ops() -> Any:
    """vLLM's module of ops, attention on a CPU among them."""
    from vllm import _custom_ops

    return _custom_ops


def cpu_instructions(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """Name of the instructions that vLLM's attention on a CPU uses, which its ops are given as `isa`. The process may
    use them afterwards."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block_size, head_dim)
    if isa == "amx":
        torch.cpu._init_amx()  # Linux kills a process that has not asked for tiles; vLLM leaves it to oneDNN's products
    return isa


def cpu_has_fp8() -> bool:
    """Return True if vLLM's attention on this CPU reads pages of fp8."""
    if "kv_cache_dtype" not in inspect.signature(cpu_ops().cpu_attention_with_kv_cache).parameters:
        return False
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()  # as vLLM's `_get_attn_isa` asks


def unknown_architecture(names: list[str], *, has_code: bool) -> str:
    """Say that vLLM serves none of a config's architectures; "": it may. `has_code`: the model brings its own."""
    import transformers
    from vllm.model_executor.models import registry

    known = {*registry.ModelRegistry.get_supported_archs(), *dir(transformers)}  # vLLM falls back on the latter
    if not names or known & {*names}:
        return ""
    for name in names:
        if last := registry._PREVIOUSLY_SUPPORTED_MODELS.get(name):
            return f"vLLM served {name} up to {last}, and no longer does; use another model"
    said = f"vLLM does not know {', '.join(names)}; correct architectures in config.json, or use another model"
    return "" if has_code else said


def forget_backends() -> None:
    """Have vLLM look up the backend of each kind of layer again: backends cached from an engine without packed layers
    do not fit dense layers beside packed ones."""
    from vllm.v1.attention import selector

    if (kept := getattr(selector, "_cached_get_attn_backend", None)) is not None:
        kept.cache_clear()


def builds_draft() -> bool:
    """True if vLLM is building a part beside the model, such as a draft, which it marks for its compilation."""
    from vllm.compilation import backends

    return getattr(backends, "model_tag", "backbone") != "backbone"


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
    """Replace vLLM's function that makes a request's LoRA keys for block hashes by `wrap` of it."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_lora_extra_hash_keys = wrap(kv_cache_utils._gen_lora_extra_hash_keys)


def register_cache_spec(spec: type[KVCacheSpec], manager: type[Any]) -> None:
    """Register the spec of a cache group and its manager. vLLM registers its own only while there are none, so they
    come first."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(spec, manager, spec)


def count_chunks(tier: FileSystemTierManager, job: TransferJob) -> None:
    """Tell vLLM's tier how many chunks a job has, for the bytes in its metrics."""
    tier._job_block_counts[job.job_id] = len(job.keys)
