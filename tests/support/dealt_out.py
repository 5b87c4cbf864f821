"""Decode context parallelism on vLLM's CPU platform, which lacks it, in PyTorch: an extension of workers, by name."""

from __future__ import annotations

from typing import Any

import cpu_ranks
import torch
from packed_kv.refusals import table as refusals
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.block_table import BlockTable


class Extension:
    """Nothing of it is called: a worker imports this module before it builds a model."""


def compute_slot_mapping(self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
    """Compute slots as `ComputeSlotMappingKernel` of `block_table.py` does."""
    run, ranks_, block = self.cp_kv_cache_interleave_size, self.dcp_world_size, self.block_size
    starts = query_start_loc[: num_reqs + 1].long()
    request = torch.repeat_interleave(torch.arange(num_reqs), starts.diff())
    places = positions[: len(request)]
    within = places % (block * ranks_)
    blocks = self.block_table.gpu[request, places // (block * ranks_)].long()
    slots = blocks * block + within // (ranks_ * run) * run + within % run
    self.slot_mapping.gpu.fill_(PAD_SLOT_ID)
    self.slot_mapping.gpu[: len(request)] = torch.where(within // run % ranks_ == self.dcp_rank, slots, PAD_SLOT_ID)


def small_workspace(_config: Any) -> int:
    """Rows for a prefix of latents: fewer than tests' prompts have tokens, and no whole blocks of two ranks."""
    return 48


MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size = staticmethod(small_workspace)
BlockTable.compute_slot_mapping = compute_slot_mapping
refusals.RULES = cpu_ranks.rules()
