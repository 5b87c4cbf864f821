"""Decode context parallelism: the ranks that replicate a KV head share its tokens (`--decode-context-parallel-size`).

Each attends for the query heads of all of them over the tokens that it has, and gets its own heads' results of the
others, weighed by their log-sum-exps, as vLLM's FlashAttention backend does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import get_dcp_group
from vllm.platforms import current_platform

from .context_shard import WHOLE, Share

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..kernels.triton.launch import Launch


def share_of(config: VllmConfig) -> Share:
    """That of this process."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return WHOLE
    group = get_dcp_group()
    return Share(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)


def refuse(config: VllmConfig, kv_cache_dtype: str) -> None:
    """Raise ValueError if this engine cannot have the decode context parallelism that it asks for."""
    size = config.parallel_config.decode_context_parallel_size
    if size > 1 and (reason := _reason(config)):
        raise ValueError(
            f"--kv-cache-dtype {kv_cache_dtype} cannot serve --decode-context-parallel-size {size} with {reason}; "
            "use --decode-context-parallel-size 1"
        )


def _reason(config: VllmConfig) -> str | None:
    if current_platform.is_cpu():
        return "vLLM's CPU platform, which cannot place tokens by rank"
    if config.parallel_config.dcp_comm_backend == "a2a":
        return "--dcp-comm-backend a2a (ag_rs can)"
    if config.speculative_config:
        return "drafts, which need a causal mask over the tokens of several ranks"
    if config.kv_transfer_config and config.kv_transfer_config.kv_connector:
        return f"KV connector {config.kv_transfer_config.kv_connector}"
    if config.model_config.is_hybrid:
        return "state layers, which each rank has whole"
    if config.model_config.attention_chunk_size:
        return "chunked attention, whose layers see a request as one of each chunk"
    return None


def refuse_layer(
    share: Share, kv_cache_dtype: str, sliding_window: int | None, has_sinks: bool, shares_cache: bool
) -> None:
    """Raise ValueError for a layer whose tokens cannot be dealt out to ranks."""
    kinds = {"a sliding window": sliding_window, "attention sinks": has_sinks, "another layer's KV cache": shares_cache}
    found = [kind for kind, has in kinds.items() if has]
    if share.ranks > 1 and found:
        raise ValueError(
            f"--kv-cache-dtype {kv_cache_dtype} cannot serve --decode-context-parallel-size {share.ranks} with layers "
            f"that have {', '.join(found)}; use --decode-context-parallel-size 1"
        )


class Ranks:
    """The ranks that share a layer's tokens."""

    def __init__(self, share: Share) -> None:
        self.share, self.group = share, get_dcp_group()
        self.launch: Launch | None = None

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """[tokens, query heads, head_dim] of this rank -> those of all ranks' heads, contiguous. All ranks have the
        same tokens."""
        return self.group.all_gather(query.contiguous(), dim=1).contiguous()

    def reserve(self, query: torch.Tensor, value_dim: int) -> None:
        """Take the memory of `gather` and `combine` for such queries, so that vLLM's memory profile counts it."""
        queries = self.gather(query)
        output = queries.new_zeros((*queries.shape[:2], value_dim), dtype=torch.float32)
        self.combine(output, output[..., 0].contiguous())

    def combine(self, output: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over all ranks' tokens from that over this one's.

        Args:
            output: fp32 [tokens, query heads of all ranks, value_dim], contiguous; overwritten. In fp32, so that the
                result is rounded once, like the output of one rank.
            sums: fp32 [tokens, query heads of all ranks], contiguous: natural logarithms of the sums of weights, -inf
                or below -1e29 where this rank has no token for a row.

        Returns:
            Of this rank's query heads, fp32 [tokens, query heads, value_dim] and [tokens, query heads].
        """
        of_ranks = self.group.all_gather(sums, dim=0).view(self.share.ranks, *sums.shape)
        all_sums = self._weigh(output, of_ranks)
        heads = output.shape[1] // self.share.ranks
        own = slice(self.share.rank * heads, (self.share.rank + 1) * heads)
        return self._reduce_scatter(output), all_sums[:, own]

    def _reduce_scatter(self, output: torch.Tensor) -> torch.Tensor:
        """Of the ranks' sum, this one's query heads."""
        communicator = self.group.device_communicator
        if getattr(getattr(communicator, "pynccl_comm", None), "disabled", False):
            # Where vLLM finds no NCCL library of its own, its `reduce_scatter` returns memory that nobody wrote (its
            # `all_gather` looks): so that of its base class, by PyTorch.
            return DeviceCommunicatorBase.reduce_scatter(communicator, output, dim=1)
        return self.group.reduce_scatter(output, dim=1)

    def _weigh(self, output: torch.Tensor, of_ranks: torch.Tensor) -> torch.Tensor:
        if output.device.type == "cpu":
            all_sums = of_ranks.logsumexp(0)
            weights = (of_ranks[self.share.rank] - all_sums).exp().nan_to_num(0.0)
            output.mul_(weights.unsqueeze(-1))
            return all_sums
        from ..kernels.triton.combine import bind_weigh_share, weigh_share

        if self.launch is None:
            self.launch = bind_weigh_share(output, self.share.ranks, self.share.rank)
        return weigh_share(output, of_ranks, self.share.rank, self.launch)
