"""vLLM's implementation of one layer's latent attention: store, decode, and the prefix of prompts.

The rest is vLLM's: it multiplies queries by `W_UK_T` and the output of `forward_mqa` by `W_UV`, both folded so that
they take latents as stored (`fold.py`), and attends within prompts by its prefill backend, on latents that were not
stored.

A request's ring is written with the pages, except for prompts that continue: their attention reads the ring's earlier
tokens, so their own tokens are written after it.

Where ranks split the tokens of a request, vLLM gathers the queries of decodes; each rank attends over its tokens, and
`combine` replaces vLLM's sum over the ranks. For a prompt's prefix each rank gathers the tokens of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, reorg_kvcache

from ...codecs.latent import LatentCodec
from ...formats import FORMATS
from ...kernels import served
from ...refusals.facts import Facts, Latents, Parallel
from ...refusals.table import refuse
from ...vllm_compat import has_own_queries
from ...window.layer import add_window_layer, window_tokens_of_model
from ..context_parallel import Ranks
from ..factory import latent_kernels
from ..layouts import LatentLayout
from ..limits import EngineLimits, longest_decode, shard_of
from ..protocols import DecodeBatch
from ..step import StepKey
from ..warmup import block_size_of, warm_up_latents
from .base import PackedLatents
from .in_pytorch import PrefixChunk, RecentContext, ReferenceLatents
from .kernels import LatentKernels
from .metadata import LatentMetadata


class LatentAttentionImpl(PackedLatents, MLACommonImpl[LatentMetadata]):
    """Stores latents into packed pages and attends over these. Raises Refused for what packed pages do not support."""

    supports_dcp = True
    supports_pcp = False
    can_return_lse_for_decode = True
    kernels: LatentKernels | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.device.type == "cpu":
            from ..cpu import compile_ahead

            asked = served.Latents(FORMATS[self.kv_cache_dtype], self.kv_lora_rank, self.qk_rope_head_dim, heads=1)
            attends = self.config.model_config.dtype != torch.float32
            compile_ahead(asked, attends=attends, rope_bits=self.rope_bits)
        self.window_tokens = window_tokens_of_model(self.config)
        self.ranks: Ranks | None = None
        """Ranks that split the layer's tokens, if any do."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.add_window()

    def add_window(self) -> None:
        """Add the window layer, unless it is there."""
        if self.window_tokens:
            self.window_layer = add_window_layer(self, self.window_tokens, longest_decode(self.config), self.config)

    def build(self, layer_name: str, layer: Any) -> None:
        """Make the layer's codec and fold its weights, once: vLLM calls this when they are loaded, before it profiles
        its memory."""
        if self.weights is not None:
            return
        shard = shard_of(self.config)
        ranks = Parallel(dcp=shard.ranks, has_own_queries=has_own_queries(layer))
        refuse(Facts(Latents(is_mla=True), ranks), self.kv_cache_dtype)
        self.add_window()  # a layer may not have called `process_weights_after_loading`
        if shard.ranks > 1:
            self.ranks, layer.dcp_manager.combine = Ranks(shard), self.combine
        codec, weights = self.fold(layer_name, layer, LatentCodec)
        fmt, has_ring = FORMATS[self.kv_cache_dtype], bool(self.window_tokens)
        engine = EngineLimits.of(self.config, self.device, has_ring=has_ring)
        window = 0 if self.window_layer is None else self.window_layer.window
        sizes = self.num_heads * shard.ranks, self.scale, engine.dtype, engine.limits
        layout = LatentLayout(codec, *sizes, weights.constant, window, is_shard=shard.ranks > 1)
        self.kernels = latent_kernels(fmt, layout, engine)

    def reserve_workspace(self) -> None:
        """In vLLM's profiling run, size its workspace for any batch, take the memory that ranks exchange, and begin to
        compile kernels; `wait_for_all` of `kernels/precompile.py` returns once they are compiled."""
        if self.kernels is None:
            return
        self.kernels.decode.reserve()
        if self.device.type == "cuda" and not isinstance(self.kernels.decode, ReferenceLatents):
            warm_up_latents(self.kernels, block_size_of(self.config), self.qk_head_dim, self.window_layer)
        if self.ranks is not None and self.weights is not None and not self.weights.layer.kv_cache.numel():
            requests = self.config.scheduler_config.max_num_seqs
            sizes = requests, self.num_heads, self.kv_lora_rank + self.qk_rope_head_dim
            query = torch.zeros(sizes, dtype=self.config.model_config.dtype, device=self.device)
            self.ranks.reserve(query, self.kv_lora_rank)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend to a batch's prompts by vLLM, then write their tokens into the rings, unless they are written already.

        Arguments are vLLM's: q [tokens, heads, qk_head_dim], kv_c_normed [tokens, rank], k_pe [tokens, 1, rope_dim],
        kv_c_and_k_pe_cache uint8 [blocks, block_size, slot_bytes]; output [tokens, heads * v_head_dim] is filled.
        """
        prompts = (q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
        super().forward_mha(*prompts)
        assert self.kernels is not None
        new = kv_c_normed, k_pe.flatten(1)
        self.kernels.store.store_rest(kv_c_and_k_pe_cache, *new, self._window_step(), attn_metadata)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of a batch's decodes over stored latents.

        Args:
            q: [tokens, heads, rank], times the folded `W_UK_T`, and [tokens, heads, rope_dim]; or both side by side.
                Where ranks split the tokens: queries of all ranks' heads.
            kv_c_and_k_pe_cache: uint8 [blocks, block_size, slot_bytes].

        Returns:
            [tokens, heads, rank] of the queries' dtype, to be multiplied by the folded `W_UV`, and no lse; where ranks
            split the tokens, the arguments of `combine`.
        """
        sizes = [self.kv_lora_rank, self.qk_rope_head_dim]
        q_latent, q_rope = q if isinstance(q, tuple) else q.split(sizes, dim=-1)
        batch, window, kernels = attn_metadata.decode, self._window_step(), self.kernels
        assert batch is not None and kernels is not None
        ring = window.ring(0, attn_metadata.num_decodes) if window else None

        def make() -> Any:
            tables = batch.block_table, batch.query_start, batch.seq_lens
            return kernels.decode.prepare(DecodeBatch(*tables, len(q_latent), batch.max_query_len, ring=ring))

        rings = window.metadata if window else None
        step = attn_metadata.steps.get(StepKey("decode", kernels.decode.kind, window=rings), make)
        return kernels.decode.attend(step, kv_c_and_k_pe_cache, (q_latent, q_rope), ring)

    def combine(
        self, part: torch.Tensor, lse: torch.Tensor, *, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """Combine this rank's attention with the other ranks' results. Replaces `MLADCPManager.combine`, whose Triton
        kernel does not run on CPUs and which rounds each rank's part.

        Args:
            part, lse: of `forward_mqa`: fp32 [tokens, heads of all ranks, rank] and [tokens, heads of all ranks].
            seq_lens, query_start_loc: not needed, as lse is -inf where a rank has no token.

        Returns:
            The result for this rank's heads, [tokens, heads, rank] of the model's dtype, the constant added.
        """
        assert self.ranks is not None and self.weights is not None
        output, _ = self.ranks.combine(part, lse)
        if self.weights.constant is not None:
            output += self.weights.constant
        return output.to(self.config.model_config.dtype)

    def _context_parallel_compute_prefill_context(self, q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Do the same where ranks split the tokens: vLLM then calls this method instead of the one above."""
        cache, metadata = arguments
        return self._compute_prefill_context(q, cache, metadata, options["k_scale"])

    def _gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, context: Any, chunk: Any, recent: RecentContext | None
    ) -> torch.Tensor:
        if self.ranks is None:
            return super()._gather(cache, block_table, context, chunk, recent)
        return self._gather_over_ranks(cache, block_table, context, chunk)

    def _gather_over_ranks(
        self, cache: torch.Tensor, block_table: torch.Tensor, context: Any, chunk: Any
    ) -> torch.Tensor:
        """Rows of a chunk's tokens, ordered by request and then by rank, in new memory.

        Every rank gathers equally many rows of a request, in whole runs of tokens; rows behind a rank's last token are
        left out.
        """
        assert self.kernels is not None and self.ranks is not None
        ranks, count, lens = self.ranks.shard.ranks, chunk.num_local_context_tokens, chunk.padded_local_seq_lens
        room = len(context.workspace) // (ranks + 1)
        own, of_all = context.workspace[:count], context.workspace[room : room + ranks * count]
        span = PrefixChunk(chunk.starts, chunk.padded_local_cu_seq_lens, max(lens), torch.tensor(lens))
        self.kernels.prefix.gather(cache, block_table, span, own)
        context.dcp_manager.kv_gather(of_all, own)
        latent, rope = of_all.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        sizes = lens, chunk.local_context_lens_allranks, chunk.local_starts
        counts = chunk.num_context_tokens, chunk.max_seq_len, count
        return torch.cat(reorg_kvcache(latent, rope, *sizes, *counts), dim=-1)
