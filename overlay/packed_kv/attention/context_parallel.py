"""Decode context parallelism: the ranks that replicate a KV head split its tokens (`--decode-context-parallel-size`).

Each rank attends over its own tokens for the query heads of all ranks, and gets its heads' results from the others,
weighted by their log-sum-exp (lse), as in vLLM's FlashAttention backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import get_dcp_group

from ..reference.context_shard import ContextShard
from .layer import PairKernels
from .metadata import Batch

if TYPE_CHECKING:
    from ..kernels.triton.combine import WeighByLseLaunch
    from .prefill import FlashPrefill


class Ranks:
    """The ranks that split a layer's tokens."""

    def __init__(self, shard: ContextShard) -> None:
        self.shard, self.group = shard, get_dcp_group()
        self.launch: WeighByLseLaunch | None = None

    def gather(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries of all ranks' heads, contiguous, from this rank's [tokens, query heads, head_dim]. All ranks
        have the same tokens."""
        return self.group.all_gather(query.contiguous(), dim=1).contiguous()

    def reserve(self, query: torch.Tensor, value_dim: int) -> None:
        """Take the memory of `gather` and `combine`, so that vLLM's memory profile counts it.

        query: [tokens, query heads, head_dim] of this rank; tokens: the most of a batch.
        """
        queries = self.gather(query)
        output = queries.new_zeros((*queries.shape[:2], value_dim), dtype=torch.float32)
        self.combine(output, output[..., 0].contiguous())

    def combine(self, output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Combine this rank's attention over its own tokens with the other ranks' results.

        Args:
            output: fp32 [tokens, query heads of all ranks, value_dim], contiguous; overwritten. In fp32, so that the
                result is rounded once, like the output of one rank.
            lse: fp32 [tokens, query heads of all ranks], contiguous: natural log-sum-exp of the scores, -inf or below
                -1e29 where this rank has no token for a row.

        Returns:
            The result for this rank's query heads, fp32 [tokens, query heads, value_dim], and lse [tokens, query
            heads].
        """
        rank_lse = self.group.all_gather(lse, dim=0).view(self.shard.ranks, *lse.shape)
        total_lse = self._weigh(output, rank_lse)
        heads = output.shape[1] // self.shard.ranks
        own = slice(self.shard.rank * heads, (self.shard.rank + 1) * heads)
        return self._reduce_scatter(output), total_lse[:, own]

    def _reduce_scatter(self, output: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, for this rank's query heads alone."""
        communicator = self.group.device_communicator
        if getattr(getattr(communicator, "pynccl_comm", None), "disabled", False):
            # Without an NCCL library of its own, vLLM's `reduce_scatter` returns uninitialized memory (its `all_gather`
            # checks): use the base class's method, by PyTorch.
            return DeviceCommunicatorBase.reduce_scatter(communicator, output, dim=1)
        return self.group.reduce_scatter(output, dim=1)

    def _weigh(self, output: torch.Tensor, rank_lse: torch.Tensor) -> torch.Tensor:
        """Multiply `output` by this rank's weight in each row; returns the lse over all ranks' tokens."""
        if output.device.type == "cpu":
            total_lse = rank_lse.logsumexp(0)
            weights = (rank_lse[self.shard.rank] - total_lse).exp().nan_to_num(0.0)
            output.mul_(weights.unsqueeze(-1))
            return total_lse
        from ..kernels.triton.combine import WeighByLseLaunch

        if self.launch is None:
            self.launch = WeighByLseLaunch(output, self.shard.ranks, self.shard.rank)
        return self.launch.weigh(output, rank_lse)


class ContextParallelAttention:
    """Attention of a layer whose tokens several ranks split."""

    def __init__(self, kernels: PairKernels) -> None:
        self.kernels, self.ranks = kernels, Ranks(kernels.shard)

    def forward(self, batch: Batch) -> None:
        """Store a batch and attend.

        First all ranks serve the rows that read pages, then each adds what a prefill reads raw. All ranks decide alike
        whether they communicate.
        """
        kernels, metadata, query = self.kernels, batch.metadata, batch.query
        tokens, decodes = metadata.num_actual_tokens, kernels.count_decodes(metadata, query.dtype)
        decode_rows = tokens if decodes == len(metadata.context) else metadata.query_starts[decodes]
        has_prefixes = kernels.prefill is None or not metadata.has_new_prompts(decodes)
        page_rows = tokens if has_prefixes else decode_rows
        flash = cast("FlashPrefill", kernels.prefill)
        if not page_rows:
            kernels.store.store(batch, 0, None)
            flash.attend(batch, 0)
            return
        queries = self.ranks.gather(query[:page_rows])
        over_shard = queries.new_empty((*queries.shape[:2], kernels.codec.value.head_dim), dtype=torch.float32)
        assert metadata.lse is not None
        lse = metadata.lse[: page_rows * queries.shape[1]].view(page_rows, -1)
        of_shard = batch._replace(query=queries, output=over_shard)
        decode_step = kernels.prepare_decodes(metadata, decodes, None, lse[:decode_rows]) if decodes else None
        kernels.store.store(of_shard, decodes, decode_step)
        if decode_step is not None:
            assert kernels.decode is not None
            kernels.decode.attend(decode_step, batch.cache, (queries,), None, over_shard)
        if kernels.prefill is None:
            kernels.attend_in_pytorch(of_shard, decodes, lse)
        elif page_rows > decode_rows:
            flash.attend_shard(of_shard, decodes, lse)
        over_ranks = self.ranks.combine(over_shard, lse)
        done = decode_rows if kernels.prefill is not None else tokens
        batch.output[:done] = over_ranks[0][:done]
        if done == tokens:
            return
        if has_prefixes:
            flash.attend_rest(batch, decodes, over_ranks)
        else:
            flash.attend(batch, decodes)
