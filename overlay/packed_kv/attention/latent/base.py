"""Base of the implementations of latent attention over packed pages: codec, folded weights, writes, and attention of
prompts over their prefixes. `impl.py` has dense attention, `sparse/impl.py` attention over picked tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import accumulate_mla_context_chunk, init_mla_context_partial

from ...channel_calibration import UNCALIBRATED, ChannelCalibration
from ...codecs.latent import LatentCodec
from ...formats import FORMATS
from ...refusals.facts import Attention, Cache, Drafts, Facts, Latents, Layer, Pages
from ...refusals.table import refuse
from ...settings.calibration import find_calibration
from ...settings.facts import auto_cache, is_draft
from ...settings.options import read_options
from ...window.layer import WindowLayer
from ...window.step import WindowStep
from .fold import FoldedWeights
from .in_pytorch import RecentContext


def check_arguments(
    kv_cache_dtype: str, rank: int, rope_dim: int, sliding_window: int | None, unknown: dict[str, object]
) -> None:
    """Raise Refused for a layer of latents that cannot be packed. `unknown`: arguments of its implementation that ours
    do not know."""
    vllm_config = get_current_vllm_config_or_none()
    facts = Facts(
        Cache(auto=auto_cache(vllm_config) if vllm_config else None),
        Drafts(is_draft=is_draft(vllm_config) if vllm_config else None),
        Attention(sliding_window=sliding_window),
        Latents(is_mla=True, rank=rank, rope_size=rope_dim),
        Layer(options=tuple(name for name, value in unknown.items() if value is not None)),
        Pages(skipped_dtype=kv_cache_dtype),
    )
    refuse(facts, kv_cache_dtype if kv_cache_dtype in FORMATS else "")


class PackedLatents:
    """Stands before vLLM's class among the bases of an implementation."""

    kv_cache_dtype: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    num_heads: int
    device: torch.device
    config: VllmConfig
    layer_name: str = ""
    window_layer: WindowLayer | None = None
    weights: FoldedWeights | None = None
    kernels: Any = None
    """Both are None before `build`."""
    _concat_k_nope_k_pe: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        **unknown: object,
    ) -> None:
        """Take a layer's arguments from vLLM, and facts about the engine from vLLM's configuration. Raises Refused and
        CalibrationError."""
        check_arguments(kv_cache_dtype, kv_lora_rank, qk_rope_head_dim, sliding_window, unknown)
        super().__init__(  # type: ignore[call-arg]  # of vLLM's class, which stands behind this one
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, q_lora_rank=q_lora_rank, kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim, qk_head_dim=qk_head_dim,
            v_head_dim=v_head_dim, kv_b_proj=kv_b_proj, indexer=indexer,
        )  # fmt: skip
        self.supports_quant_query_input = False
        self.device = torch.get_default_device()
        self.config = get_current_vllm_config()
        self.rope_bits = read_options(self.config.additional_config).latent_rope_bits
        self.calibration = find_calibration(self.config, FORMATS[self.kv_cache_dtype])

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        return False

    def fold(self, layer_name: str, layer: Any, kind: type[LatentCodec]) -> tuple[LatentCodec, FoldedWeights]:
        """Make the layer's codec, of this class, and fold its weights. Raises CalibrationError."""
        self.layer_name, fmt = layer_name, FORMATS[self.kv_cache_dtype]
        sizes = self.kv_lora_rank, self.qk_rope_head_dim
        codec = kind(fmt, *sizes, self.device, self._channels(layer_name), self.rope_bits)
        self.weights = FoldedWeights(codec, layer)
        return codec, self.weights

    def _channels(self, layer_name: str) -> ChannelCalibration:
        """Return the calibration file's entry for a layer's latents, which are one KV head. Raises CalibrationError."""
        if self.calibration is None:
            return UNCALIBRATED
        found = self.calibration.channels(layer_name, 1, self.kv_lora_rank, self.kv_lora_rank)
        return replace(found.key.map_rows(lambda rows: rows[0]), first_mean=None, rope=None)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store a batch.

        Args:
            kv_c_normed, k_pe: fp16, bf16 or fp32 [tokens or more, rank] and [tokens or more, 1, rope_dim].
            kv_cache: uint8 [blocks, block_size, slot_bytes]; empty in vLLM's profiling run.
            slot_mapping: int64 [tokens], block * block_size + offset; negative ones are skipped.
        """
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        tokens = len(slots)
        new = kv_c_normed[:tokens], k_pe[:tokens].flatten(1)
        metadata = self._metadata()
        window = None if metadata is None else self._window_step()
        assert self.kernels is not None
        self.kernels.store.store(kv_cache, slots, *new, window, metadata)

    def _metadata(self) -> Any:
        """Return the batch's metadata, which vLLM does not pass to the store; None: the step has no requests."""
        of_layers: Any = get_forward_context().attn_metadata
        return None if of_layers is None else of_layers[self.layer_name]

    def _window_step(self) -> WindowStep | None:
        return WindowStep.of(self.window_layer, is_shared=False)

    def _compute_prefill_context(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Attention of prompts' new tokens over their prefixes, as many tokens at a time as vLLM's workspace holds.
        vLLM's own method knows only dtypes of plain rows.

        q: [tokens, heads, nope_dim + rope_dim]. Returns outputs [tokens, heads, value_dim] and lse [heads, tokens].
        """
        prefill = attn_metadata.prefill
        assert self.kernels is not None
        assert prefill is not None and prefill.prefill_backend is not None and prefill.chunked_context is not None
        context, window = prefill.chunked_context, self._window_step()
        output = output_lse = None
        for chunk in context.chunks:
            requests, recent = chunk.request_slice, None
            if window is not None:
                ring = window.ring(*(attn_metadata.num_decodes + n for n in (requests.start, requests.stop)))
                recent = RecentContext(ring, context.context_lens[requests])
            rows = self._gather(kv_c_and_k_pe_cache, prefill.block_table[requests], context, chunk, recent)
            key = self._expand(rows, 0)
            key = self._concat_k_nope_k_pe(key, rows[:, self.kv_lora_rank :].unsqueeze(1))
            if recent is not None:
                self.kernels.prefix.gather_values(chunk, rows, recent)
            value = self._expand(rows, 1)
            chunk_output, chunk_lse = prefill.prefill_backend.run_prefill_context_chunk(
                chunk=chunk, q=q[chunk.token_slice], k=key, v=value
            )
            if output is None:
                if len(context.chunks) == 1 and not context.empty_token_slices:
                    return chunk_output, chunk_lse
                output, output_lse = init_mla_context_partial(context, chunk_output, chunk_lse, num_tokens=len(q))
            accumulate_mla_context_chunk(chunk, chunk_output, chunk_lse, output, output_lse)
        return output, output_lse

    def _gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, context: Any, chunk: Any, recent: RecentContext | None
    ) -> torch.Tensor:
        """Gather the tokens of a chunk of prefixes as rows [tokens, rank + rope_dim] in vLLM's workspace.

        block_table: rows of the chunk's requests. context: vLLM's `ChunkedContextMetadata`."""
        rows = context.workspace[: chunk.num_context_tokens]
        self.kernels.prefix.gather(cache, block_table, chunk, rows, recent)
        return rows

    def _expand(self, rows: torch.Tensor, which: int) -> torch.Tensor:
        """K without RoPE (`which` 0) or V (1) of stored latents: rows [tokens, rank + rope_dim] -> [tokens, heads,
        nope_dim or value_dim]."""
        weights = self.weights
        assert weights is not None
        lacking = None if weights.lacking is None else weights.lacking[which]
        expanded = torch.nn.functional.linear(rows[:, : self.kv_lora_rank], weights.up[which], lacking)
        return expanded.view(len(rows), self.num_heads, -1)
