"""Per-batch metadata of sparse attention over latents: vLLM's, with the prompts whose tokens read picks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from ...kernels.precompile import wait_for_all
from ...vllm_compat import sparse_workspace_contexts
from ..metadata import check_batch
from ..protocols import DecodeBatch
from ..step import StepCache

Latents = tuple[torch.Tensor, torch.Tensor]
"""Latents and RoPE channels as the model has them, [tokens, rank] and [tokens, rope_dim]."""
Queries = tuple[torch.Tensor, torch.Tensor]
"""[tokens, heads, rank], which meet stored latents, and [tokens, heads, rope_dim]."""
WORKSPACE_CONTEXTS = 2
"""Requests of full context length that the workspace holds if vLLM does not say
(`sparse_mla_prefill_workspace_factor`)."""


@dataclass(frozen=True)
class PromptPart:
    """Neighbouring prompts of a batch, whose tokens before the batch fit the workspace together.

    `first`, `last`: their tokens in the batch, the last one not included. `stored_rows`: tokens before the batch.
    `requests`, `positions`: int32 [stored_rows], the stored tokens' rows of the batch's block table and their
    positions, in order. `first_own`, `stored_offset`, `own_offset`: int32 [last - first]; see
    `reference.sparse_latents.split_picks`. Rows of the prompts' own tokens are counted from the first prompt of the
    batch.
    """

    first: int
    last: int
    stored_rows: int
    requests: torch.Tensor
    positions: torch.Tensor
    first_own: torch.Tensor
    stored_offset: torch.Tensor
    own_offset: torch.Tensor


@dataclass(kw_only=True)
class SparseLatentMetadata(SparseMLACommonMetadata):
    """vLLM's metadata. `prompts`: all requests but the decodes, whether they read picks or all tokens. `steps` is the
    step cache of layers of one kind. `new_latents`: latents of the batch's tokens, set between a layer's store and its
    attention."""

    prompts: tuple[PromptPart, ...] = ()
    steps: StepCache = field(default_factory=StepCache)
    new_latents: Latents | None = None

    def __post_init__(self) -> None:
        pass  # vLLM's own allows three sizes


@dataclass(frozen=True, kw_only=True)
class SparseDecodes(DecodeBatch):
    """The decodes of a step, with `requests`, int32 [tokens], the request of each query token, and `memory`, the step's
    `SparseMemory`."""

    requests: torch.Tensor
    memory: Any


@dataclass(frozen=True)
class SparseBatch:
    """Rows of a batch that a layer attends for: its decodes, or decodes and prompts.

    `cache`: uint8 [blocks, block_size, slot_bytes]. `queries`: queries of these rows, decodes first. `picks`: int32
    [tokens, picks], positions in requests; negative: no pick. `new`: latents of these tokens; read where there are
    prompts. `memory`: the step's `SparseMemory`, on a GPU. `output` [tokens, heads, rank] and, unless None, `lse` fp32
    [tokens, heads], natural, are to be filled.
    """

    metadata: SparseLatentMetadata
    cache: torch.Tensor
    queries: Queries
    picks: torch.Tensor
    new: Latents | None
    memory: Any
    output: torch.Tensor
    lse: torch.Tensor | None

    def queries_of(self, part: slice) -> Queries:
        """Queries of some tokens."""
        return self.queries[0][part], self.queries[1][part]

    def new_of_prompts(self) -> Latents:
        """Latents of the prompts' tokens."""
        assert self.new is not None
        part = slice(self.metadata.num_decode_tokens, len(self.picks))
        return self.new[0][part], self.new[1][part]


def workspace_rows(config: VllmConfig) -> int:
    """Return the rows of the workspace: a few times the model's context, as in vLLM's own sparse attention over fp8."""
    factor = sparse_workspace_contexts(config) or WORKSPACE_CONTEXTS
    return config.model_config.max_model_len * factor


class SparseLatentBuilder(SparseMLACommonMetadataBuilder[SparseLatentMetadata]):
    """Builds `SparseLatentMetadata`. On CUDA, batches of decodes alone can be captured into CUDA graphs.

    Its constructor returns once the layers' kernels are compiled, and raises what their compilation raises.
    """

    metadata_cls = SparseLatentMetadata
    supports_draft_decode_metadata_update = False
    """The step cache keeps counts that depend on `seq_lens`, so each step of drafts needs metadata of its own."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.most_rows = workspace_rows(vllm_config)
        wait_for_all()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Batches of decodes, drafts included."""
        return AttentionCGSupport.UNIFORM_BATCH if current_platform.is_cuda() else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseLatentMetadata:
        check_batch(self.vllm_config, common_attn_metadata)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.num_prefills:
            metadata.prompts = prompt_parts(metadata, common_attn_metadata, self.most_rows)
        return metadata


def prompt_parts(
    metadata: SparseLatentMetadata, common: CommonAttentionMetadata, most_rows: int
) -> tuple[PromptPart, ...]:
    """The prompts of a batch, in parts of at most `most_rows` stored tokens, without a host sync."""
    first = metadata.num_decodes
    on_host = common.seq_lens_cpu_upper_bound  # exact for prompts
    assert on_host is not None
    query_starts = common.query_start_loc_cpu[first:].tolist()
    contexts = [
        max(0, seq_len - (stop - start))  # a dummy batch may have a smaller value
        for seq_len, (start, stop) in zip(on_host[first:].tolist(), pairwise(query_starts), strict=True)
    ]
    bounds, stored = [0], 0
    for request, context in enumerate(contexts):
        assert context <= most_rows, (context, most_rows)
        if stored + context > most_rows:
            bounds.append(request)
            stored = 0
        stored += context
    bounds.append(len(contexts))
    return tuple(
        _part(metadata, common, first, low, high, sum(contexts[low:high]), query_starts)
        for low, high in pairwise(bounds)
    )


def _part(
    metadata: SparseLatentMetadata, common: CommonAttentionMetadata, first: int, low: int, high: int, stored_rows: int,
    query_starts: list[int],
) -> PromptPart:  # fmt: skip
    """Return the part with the prompts `low` .. `high` - 1, counted from the first prompt; `query_starts`: first rows
    of prompts, on the host."""
    starts = common.query_start_loc[first + low : first + high + 1]
    context = common.seq_lens[first + low : first + high] - starts.diff()
    context = context.clamp_min(0)
    ends = context.cumsum(0, dtype=torch.int32)
    row_starts, own_offsets = ends - context, starts[:-1] - query_starts[0] - context
    rows = torch.arange(stored_rows, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(ends, rows, right=True, out_int32=True)
    tokens = slice(query_starts[low], query_starts[high])
    of_token = metadata.req_id_per_token[tokens].long() - (first + low)
    return PromptPart(
        first=tokens.start,
        last=tokens.stop,
        stored_rows=stored_rows,
        requests=request + (first + low),
        positions=rows - row_starts[request.long()],
        first_own=context[of_token],
        stored_offset=row_starts[of_token],
        own_offset=own_offsets[of_token],
    )
