"""vLLM's own attention on a CPU, for layers that keep dense pages beside packed ones.

vLLM's registry names `CPUBackend` of this module, which vLLM looks up for each kind of layer: engines without a packed
dtype get vLLM's own class.
"""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..formats import FORMATS


def __getattr__(name: str) -> type[CPUAttentionBackend]:
    """Return the backend `CPUBackend` of the engine whose config is vLLM's current one."""
    if name != "CPUBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    if config is None:
        return CPUAttentionBackend
    layers = config.compilation_config.static_forward_context.values()  # from a draft's config, the model's too
    dtypes = {config.cache_config.cache_dtype, *(getattr(layer, "kv_cache_dtype", None) for layer in layers)}
    return DenseCPUBackend if dtypes & {*FORMATS} else CPUAttentionBackend


class DenseCPUBackend(CPUAttentionBackend):
    """Adds the layout in which a block has the pages of all layers one behind the other.

    vLLM's kernels take the stride over blocks from the tensor, and so serve it. Pages of several sizes lie so beside a
    recent window (`window/layer.py`); other engines keep their layout, which comes first.
    """

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return DenseCPUImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


class DenseCPUImpl(CPUAttentionBackendImpl):
    """Clears a block when its first token is stored, where pages lie side by side.

    There a block may have belonged to a ring or another layer, and its bytes may be NaN in this layer's dtype. vLLM's
    kernel reads a request's last block to its end, times 0, and vLLM clears blocks only of groups whose layers have one
    dtype.
    """

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:  # fmt: skip
        block_size = kv_cache.shape[2]
        if kv_cache.stride(0) != kv_cache[0].numel():
            kv_cache.index_fill_(0, slot_mapping[slot_mapping % block_size == 0] // block_size, 0)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
