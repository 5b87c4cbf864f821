"""Per-batch metadata of the packed backend, built once a step for all layers of a KV-cache group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from ..formats import FORMATS
from ..kernels.precompile import wait_for_all
from ..kernels.served import who_serves
from ..reference.context_shard import UNSHARDED, ContextShard
from ..refusals.facts import Attention, Facts
from ..refusals.table import refuse
from .limits import engine_of, longest_decode, shard_of
from .mixed import mixed_shapes, packed_layers
from .step import StepCache, StepKey

if TYPE_CHECKING:
    from ..window.step import WindowStep

logger = init_logger("vllm.packed_kv")


@dataclass
class PackedMetadata(AttentionMetadata):
    """Metadata of a batch, which `PackedAttentionImpl` reads.

    On the device: `block_table` int32 [requests, blocks], `slot_mapping` int64 [tokens], `positions` int64 [tokens],
    positions in the request, `query_start_loc` int32 [requests + 1] and `seq_lens` int32 [requests], tokens in
    the cache with the batch's own.
    On the host, lists with an entry a request: `query_starts[i]` .. `query_starts[i + 1]` are request i's rows of the
    batch; `context[i]` is `seq_lens[i]` (or more, for requests that the decode kernel serves).
    The first `decodes` requests have up to `decode_query_len` query tokens, `decode_tokens` in all.
    `steps` is the step cache of layers of one kind.
    `shard` says which tokens are in this rank's pages, and `stored_lens`, int32 [requests] on the device, how many
    (`seq_lens` with one rank); `slot_mapping` of the other tokens is -1. `lse`, fp32, is memory for the lse of each
    token and query head of all ranks; None with one rank.
    With `is_mixed_graph`, a CUDA graph is captured that any batch of up to this many requests and tokens will replay:
    then the host's lists do not count, and `decode_query_len` is the most query tokens of a decode.
    """

    num_actual_tokens: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: list[int]
    context: list[int]
    decodes: int
    decode_tokens: int
    decode_query_len: int
    stored_lens: torch.Tensor
    shard: ContextShard = UNSHARDED
    lse: torch.Tensor | None = None
    steps: StepCache = field(default_factory=StepCache)
    is_mixed_graph: bool = False

    def has_new_prompts(self, first: int) -> bool:
        """Return whether all requests from `first` on are new: nothing of them is in the cache before this batch."""
        new_tokens = self.query_starts[-1] - self.query_starts[first]
        return self.steps.get(StepKey("new prompts", first=first), lambda: new_tokens == sum(self.context[first:]))


class Batch(NamedTuple):
    """Input and output of a layer of pairs in a step.

    `query`: [tokens, query heads, head_dim], fp16, bf16 or fp32. `key`, `value`: [tokens, KV heads, head_dim] and
    [tokens, KV heads, value_dim], of the same dtype; None in a layer that reads another layer's cache. `cache`: uint8
    [blocks, KV heads, block_size, slot_bytes]. `metadata`: of the batch, its decodes first. `output`: [tokens, query
    heads, value_dim], filled. `window`: the layer's ring in this step; None: there is none.
    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    cache: torch.Tensor
    metadata: PackedMetadata
    output: torch.Tensor
    window: WindowStep | None = None


class PackedMetadataBuilder(AttentionMetadataBuilder[PackedMetadata]):
    """Builds `PackedMetadata`. On CUDA, batches of decodes alone can be captured into CUDA graphs.

    vLLM makes it after its profiling run and before any step. Its constructor waits for the kernels that the profiling
    run has noted, and raises the error of their compilation.
    """

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        wait_for_all()
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.decodes_fused = _fused_serves(vllm_config, kv_cache_spec, self.reorder_batch_threshold or 1)
        if device.type == "cuda" and not self.decodes_fused:
            most, group = _longest_fused(vllm_config)
            logger.warning_once(
                "KV cache dtype %s: steps with %d query tokens per request use the slower prefill route, without CUDA "
                "graphs; the decode kernel takes fp16 and bf16, and up to %d tokens at GQA group %d. Set "
                "num_speculative_tokens to at most %d",
                vllm_config.cache_config.cache_dtype,
                self.reorder_batch_threshold or 1,
                most,
                group,
                most - 1,
                scope="local",
            )
        scheduler = vllm_config.scheduler_config
        largest = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * longest_decode(vllm_config)
        self.rows = torch.arange(largest, dtype=torch.int32, device=device)
        self.positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self.shard = shard_of(vllm_config)
        self.lse: torch.Tensor | None = None
        if self.shard != UNSHARDED:  # not allocated in a step: a CUDA graph outlives the steps before its capture
            self.stored_lens = torch.zeros(largest, dtype=torch.int32, device=device)
            heads = max(impl.num_heads * self.shard.ranks for impl in packed_layers(vllm_config))
            self.lse = torch.empty(largest * heads, dtype=torch.float32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Return UNIFORM_BATCH where the decode kernel serves decodes with their drafts; other batches need the
        host."""
        if _fused_serves(vllm_config, kv_cache_spec, longest_decode(vllm_config)):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    @classmethod
    def get_mixed_cudagraph_shapes(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> list[tuple[int, int]] | None:
        """Return tokens and requests of CUDA graphs for steps with prompts; None: there are none. The patched model
        runner asks, before it captures."""
        dtype, (shapes, reason) = vllm_config.cache_config.cache_dtype, mixed_shapes(vllm_config)
        if shapes:
            logger.info_once(
                "KV cache dtype %s: steps with prompts, of up to %d tokens, run as whole CUDA graphs (%d of them)",
                dtype, max(shapes)[0], len(shapes), scope="local",
            )  # fmt: skip
        else:
            logger.info_once(
                "KV cache dtype %s: steps with prompts run as CUDA graphs piece by piece: %s",
                dtype, reason, scope="local",
            )  # fmt: skip
        return shapes or None

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PackedMetadata:
        """Return metadata to capture a graph with: a graph of decodes or, where one request may have all tokens, of a
        mixed step."""
        metadata, longest = self.build(0, common_attn_metadata), self.reorder_batch_threshold or 1
        if common_attn_metadata.max_query_len <= longest:
            return metadata
        return replace(metadata, is_mixed_graph=True, decode_query_len=longest)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        common = common_attn_metadata
        check_batch(self.vllm_config, common)
        starts = common.query_start_loc_cpu.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        longest = self.reorder_batch_threshold or 0
        decodes = next((i for i, length in enumerate(lengths) if length > longest), len(lengths)) if longest else 0
        # The host's copy is exact unless drafts are in flight. Then only the device knows; we wait for it unless these
        # requests' attention runs only there. A draft model's queries may be longer than a decode's here.
        context = common.seq_lens
        speculative = self.vllm_config.speculative_config
        stays = self.decodes_fused and not (speculative and speculative.uses_draft_model())
        bounds = common.seq_lens_cpu_upper_bound
        if bounds is not None and (speculative is None or stays):
            context = bounds
        return PackedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            positions=self._positions(common),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            query_starts=starts,
            context=context.tolist(),
            decodes=decodes,
            decode_tokens=common.num_actual_tokens if decodes == len(lengths) else starts[decodes],
            decode_query_len=max(lengths[:decodes], default=0),
            stored_lens=self._stored_lens(common.seq_lens),
            shard=self.shard,
            lse=self.lse,
        )

    def _stored_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Return `PackedMetadata.stored_lens`, in memory that outlives the step, for CUDA graphs."""
        if self.shard == UNSHARDED:
            return seq_lens
        return self.stored_lens[: len(seq_lens)].copy_(self.shard.count(seq_lens))

    def _positions(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """int64 [tokens], in memory that outlives the step, for CUDA graphs.

        They are vLLM's where it passes them. vLLM does not update them for drafts, so where there may be a draft they
        are computed on the device: a request's last token is at `seq_lens` - 1.
        """
        tokens = common.num_actual_tokens
        if common.positions is not None and self.vllm_config.speculative_config is None:
            return common.positions[:tokens]
        rows, ends = self.rows[:tokens], common.query_start_loc[1:]
        request = torch.searchsorted(ends[:-1], rows, right=True)  # padding counts as the last request's
        return torch.add(rows, (common.seq_lens - ends)[request], out=self.positions[:tokens])


def check_batch(vllm_config: VllmConfig, common: CommonAttentionMetadata) -> None:
    """Raise Refused for a batch in which tokens attend to later ones, in case no earlier check refused its layers."""
    if common.causal is not True or getattr(common, "mm_req_doc_ranges", None):
        dtype = vllm_config.cache_config.cache_dtype
        refuse(Facts(Attention(is_causal=False)), dtype if dtype in FORMATS else "")


def _fused_serves(vllm_config: VllmConfig, spec: AttentionSpec, query_len: int) -> bool:
    """Return whether the decode kernel serves all packed layers, `spec`'s among them, with this number of query
    tokens."""
    engine = engine_of(vllm_config)
    if engine.platform != "cuda" or engine.is_fp32 or not isinstance(spec, AttentionSpec):
        return False
    return query_len <= _longest_fused(vllm_config)[0]


def _longest_fused(vllm_config: VllmConfig) -> tuple[int, int]:
    """Return the most query tokens of a request that the decode kernel serves in all packed layers, in fp16 and bf16,
    and the GQA group of the layer that sets this limit. Sliding layers may have more heads than the model says
    (Step-3.5), and the CUDA kernel does not serve them."""
    engine = engine_of(vllm_config)._replace(is_fp32=False)
    limits = []
    for impl in packed_layers(vllm_config):
        of_layer = engine._replace(longest_decode=impl.longest_decode, requests=impl.max_requests)
        limits.append((who_serves(of_layer, impl.asked()).longest, impl.group))
    return min(limits)
