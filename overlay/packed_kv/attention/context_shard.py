"""The part of a request's tokens that this process keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..reference.context_shard import UNSHARDED, ContextShard

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shard_of(config: VllmConfig) -> ContextShard:
    """Return the shard of this process."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return UNSHARDED
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    return ContextShard(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)
