"""Limits of an engine's steps, and its other settings that decide the kernels of its layers. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.platforms import current_platform

from ..kernels.cpu.jobs import Largest
from ..kernels.served import Engine
from ..reference.context_shard import UNSHARDED, ContextShard
from ..settings.options import read_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig


DRAFTERS = ("ngram", "ngram_gpu", "suffix")
"""Methods of drafting without layers."""


class Limits(NamedTuple):
    """The largest step that a decode kernel has to serve: query tokens of a request, drafts included; requests; and
    tokens of a batch with prompts, whose prefixes the kernel may read (0: it reads none). `mixed_graphs`: whether
    steps with prompts are whole CUDA graphs if all layers serve them."""

    longest_decode: int
    max_requests: int
    max_tokens: int = 0
    mixed_graphs: bool = False


def limits_of(vllm_config: VllmConfig) -> Limits:
    """Return the limits of an engine's steps."""
    scheduler = vllm_config.scheduler_config
    # vLLM makes two requests of a decode whose drafts begin a chunk.
    requests = scheduler.max_num_seqs * (2 if vllm_config.model_config.attention_chunk_size else 1)
    mixed_graphs = not (vllm_config.model_config.enforce_eager or lacks_mixed_graphs(vllm_config))
    return Limits(longest_decode(vllm_config), requests, scheduler.max_num_batched_tokens, mixed_graphs)


def lacks_mixed_graphs(config: VllmConfig) -> str:
    """Return why no step with prompts of such an engine is a whole CUDA graph, whatever its layers, or ""."""
    speculative = config.speculative_config
    if not read_options(config.additional_config).mixed_graphs:
        return "packed_kv.mixed_graphs is false"
    if config.lora_config is not None:
        return "an engine with LoRA would have them once for each number of adapters"
    if speculative is not None and speculative.method not in DRAFTERS:
        return f"layers of drafts ({speculative.method}) run outside of graphs with the steps' metadata"
    if config.parallel_config.pipeline_parallel_size > 1:
        return "stages of a pipeline would have to agree on the graphs"
    return ""


def longest_decode(vllm_config: VllmConfig) -> int:
    """Query tokens of a decode with its drafts, as in vLLM's `_init_reorder_batch_threshold`."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return 1
    return 1 + (2 if speculative.parallel_drafting else 1) * (speculative.num_speculative_tokens or 0)


def engine_of(vllm_config: VllmConfig) -> Engine:
    """Return the facts that decide which kernel serves the engine's decodes."""
    limits, found = limits_of(vllm_config), current_platform.get_device_capability()
    return Engine(
        "cuda" if current_platform.is_cuda() else "cpu",
        None if found is None else (found[0], found[1]),
        read_options(vllm_config.additional_config).decode_kernel,
        is_fp32=vllm_config.model_config.dtype == torch.float32,
        longest_decode=limits.longest_decode,
        requests=limits.max_requests,
        ranks=vllm_config.parallel_config.decode_context_parallel_size,
    )


def shard_of(config: VllmConfig) -> ContextShard:
    """Return the shard of a request's tokens that this process keeps."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return UNSHARDED
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    return ContextShard(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)


@dataclass(frozen=True)
class EngineLimits:
    """Limits and options of an engine that decide the kernels of its layers.

    `device`: where they run. `dtype`: of the model. `limits`: of steps. `request_tokens`: the most of a request.
    `option`: `decode_kernel` of `--additional-config`. `number`: the engine's own. `has_ring`: whether the engine has a
    recent window.
    """

    device: torch.device
    dtype: torch.dtype
    limits: Limits
    request_tokens: int
    option: str
    number: int = 0
    has_ring: bool = False

    @property
    def largest(self) -> Largest:
        """The largest step of decodes."""
        return Largest(self.limits.max_requests, self.limits.longest_decode, self.request_tokens, self.has_ring)

    @property
    def decode_tokens(self) -> int:
        """The most query tokens of a batch's decodes, drafts included."""
        return min(self.limits.max_requests * self.limits.longest_decode, self.limits.max_tokens)

    @classmethod
    def of(cls, config: VllmConfig, device: torch.device, *, has_ring: bool = False) -> EngineLimits:
        model = config.model_config
        return cls(
            device=device,
            dtype=model.dtype,
            limits=limits_of(config),
            request_tokens=model.max_model_len,
            option=read_options(config.additional_config).decode_kernel,
            number=id(config.compilation_config.static_forward_context),
            has_ring=has_ring,
        )
