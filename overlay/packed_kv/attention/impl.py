"""vLLM's attention implementation of one layer: refusals, the codec and kernels, and the call of each step.

`layer.py` has the step: a batch's decodes run on a decode kernel (`decode.py`; on a CPU `cpu.py`) and the rest on the
prefill kernel (`prefill.py`; `cpu_prefill.py`); anything that these do not serve runs in PyTorch
(`reference/attention.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from ..channel_calibration import LayerCalibration
from ..codecs.pages import PagedCodec
from ..formats import FORMATS
from ..kernels.served import Pairs
from ..reference.attention import AttentionOptions
from ..reference.context_shard import UNSHARDED
from ..refusals.facts import Attention, Cache, Drafts, Facts, Layer, Pages, Parallel
from ..refusals.table import refuse
from ..settings.calibration import find_calibration
from ..settings.facts import auto_cache, is_draft
from ..settings.longest import longest_sequence
from ..window.layer import SUFFIX, WindowLayer, add_window_layer, window_tokens_of_model
from ..window.step import WindowStep
from .context_parallel import ContextParallelAttention
from .factory import pair_kernels
from .layer import PairAttention
from .layouts import PairLayout, pairs_of
from .limits import EngineLimits, shard_of
from .metadata import Batch, PackedMetadata
from .warmup import PairWarmup, block_size_of

if TYPE_CHECKING:
    from .prefill import FlashAttention

logger = init_logger("vllm.packed_kv")


class PackedAttentionImpl(AttentionImpl[PackedMetadata]):
    """Stores the new tokens of a batch into packed pages and attends over what is stored.

    Raises Refused for what packed pages do not support.
    """

    supports_dcp = True
    supports_pcp = False
    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        head_size_v: int | None = None,
        **unknown: object,
    ) -> None:
        vllm_config = get_current_vllm_config_or_none()
        facts = Facts(
            Cache(auto=auto_cache(vllm_config) if vllm_config else None),
            Drafts(is_draft=is_draft(vllm_config) if vllm_config else None),
            Attention(
                kind=AttentionType(attn_type).value,
                has_alibi=alibi_slopes is not None,
                sinks=None if sinks is None else tuple(sinks.shape),
                sliding_window=sliding_window,
            ),
            Layer(
                head_size=head_size,
                value_size=head_size_v,
                query_heads=num_heads,
                options=tuple(name for name, value in unknown.items() if value is not None),
            ),
            # vLLM gives a skipped layer the same backend as if it were not skipped
            Pages(skipped_dtype=kv_cache_dtype, is_shared=kv_sharing_target_layer_name is not None),
        )
        refuse(facts, kv_cache_dtype if kv_cache_dtype in FORMATS else "")
        self.is_draft = facts.drafts.is_draft
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.options = AttentionOptions(self.scale, sliding_window, logits_soft_cap or None, sinks)
        self.device = torch.get_default_device()
        config = get_current_vllm_config()
        self.shard = shard_of(config)
        refuse(Facts(*facts.records, Parallel(dcp=self.shard.ranks)), kv_cache_dtype)
        self.dtype = config.model_config.dtype
        self.window_tokens = window_tokens_of_model(config)
        self.config, self.engine = config, EngineLimits.of(config, self.device, has_ring=bool(self.window_tokens))
        self.longest_decode, self.max_requests = self.engine.limits[:2]
        self.group = self.num_heads * self.shard.ranks // self.num_kv_heads
        """Query heads a KV head that the decode kernel serves."""
        self.layers = config.compilation_config.static_forward_context
        self.flash_attention = self._find_flash_attention()
        self.calibration = find_calibration(config, FORMATS[kv_cache_dtype])
        if self.device.type == "cpu":
            from . import cpu

            key_bits = self.calibration.file.key_bits.get(kv_cache_dtype) if self.calibration else None
            cpu.compile_ahead(self.asked(), attends=self.dtype != torch.float32, key_bits=key_bits)
        self.attention: PairAttention | ContextParallelAttention | None = None
        """Attention of the layer's steps; None before `build`."""

    def asked(self) -> Pairs:
        """Return what a decode kernel is asked to serve."""
        return pairs_of(FORMATS[self.kv_cache_dtype], self.head_size, self.group, self.head_size_v, self.options)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Add the window layer."""
        if self.window_tokens and self.kv_sharing_target_layer_name is None:
            window = min(self.window_tokens, self.options.sliding_window or self.window_tokens)
            add_window_layer(self, window, self.longest_decode, self.config)

    def _find_flash_attention(self) -> FlashAttention | None:
        """Return the function that prefill runs on here. To be called while vLLM builds the model: only then its
        settings apply."""
        if self.device.type != "cuda":
            return None
        from .prefill import find_flash_attention

        found = find_flash_attention(self.head_size, self.head_size_v, self.dtype, self.options.logits_soft_cap)
        if found is None:
            logger.warning_once(
                "%s: no FlashAttention for head size %d in %s here; prefill runs in PyTorch, many times slower",
                self.kv_cache_dtype,
                self.head_size,
                self.dtype,
                scope="local",
            )
        return found

    def build(self, layer_name: str) -> None:
        """Make the layer's codec and routes, once, before vLLM profiles its memory, so that the profile includes them.

        The constructor is too early: it does not know the layer's name, and while weights are loaded the default dtype
        is another. Raises CalibrationError for a layer that the calibration file does not fit.
        """
        if self.attention is not None:
            return
        name = self.kv_sharing_target_layer_name or layer_name
        sizes = self.num_kv_heads, self.head_size, self.head_size_v
        known = LayerCalibration() if self.calibration is None else self.calibration.channels(name, *sizes)
        head, positions = (self.head_size, known.key, known.value), longest_sequence(self.config)
        fmt, heads = FORMATS[self.kv_cache_dtype], (self.num_heads * self.shard.ranks, self.num_kv_heads)
        codec = PagedCodec(fmt, *head, self.device, self.head_size_v, positions)
        layer = PairLayout(codec, *heads, self.options, self.engine.limits, self.shard)
        kernels = pair_kernels(fmt, layer, self.engine, self.flash_attention)
        self.attention = PairAttention(kernels) if self.shard == UNSHARDED else ContextParallelAttention(kernels)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PackedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a batch.

        Args:
            layer: may share another layer's cache.
            query, key, value, kv_cache, attn_metadata, output: see `Batch`. Afterwards, padding rows of the output may
                hold anything. Key and value are not read in a layer that shares another's cache. If they are None, the
                layer reads what it stored of this batch before, as in a model that runs its layers in loops. In vLLM's
                profiling run the cache is empty and there are no metadata; steps without requests have no metadata
                either.
            output_scale, output_block_scale: must be None.
        """
        shared = self.kv_sharing_target_layer_name
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        reads_only = shared is not None or key is None
        has_scale = output_scale is not None or output_block_scale is not None
        if has_scale or target != shared or (reads_only and self.shard != UNSHARDED):
            facts = Facts(
                Layer(name=layer.layer_name, has_output_scale=has_scale),
                Pages(owner=None if shared else target, is_shared=reads_only),
                Parallel(dcp=self.shard.ranks),
            )
            refuse(facts, self.kv_cache_dtype)
        attention = self.attention
        assert attention is not None, f"{layer.layer_name}: vLLM shows each layer to `check_layer` before it runs"
        window_layer = self.layers.get((shared or layer.layer_name) + SUFFIX)
        if attn_metadata is None:
            if not kv_cache.numel():  # later ones, of a data-parallel rank without requests, do nothing
                self._profile(attention, query, key, value, None if shared else window_layer)
            return output.zero_()
        own = None if reads_only else key, None if reads_only else value
        window = WindowStep.of(window_layer, reads_only) if self.shard == UNSHARDED else None
        attention.forward(Batch(query, *own, kv_cache, attn_metadata, output, window))
        return output

    def _profile(
        self, attention: PairAttention | ContextParallelAttention, query: torch.Tensor, key: torch.Tensor | None,
        value: torch.Tensor | None, window_layer: WindowLayer | None,
    ) -> None:  # fmt: skip
        """Take the workspace, and begin to compile the kernels. A CPU's kernels do both when they are made."""
        if self.device.type == "cuda":
            block_size = block_size_of(self.config)
            PairWarmup(attention, query, key, value, block_size, window_layer, self.engine.limits).run(
                shares_cache=self.kv_sharing_target_layer_name is not None
            )
