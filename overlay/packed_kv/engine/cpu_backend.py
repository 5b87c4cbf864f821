"""vLLM's own attention on a CPU, for layers that keep dense pages beside packed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from ..vllm_compat import cache_layouts

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout


class DenseCPUBackend(CPUAttentionBackend):
    """Names the layout in which a block has the pages of all layers one behind the other, too.

    Its kernels take a block's distance from the tensor, and so serve it. Pages of several sizes lie so beside a recent
    window (`window/layer.py`); other engines get the layout that they had, which comes first.
    """

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return cache_layouts("LBHNC", "BLHNC")
