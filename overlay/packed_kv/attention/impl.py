"""The attention of one layer. `forward` alone chooses the route.

On CUDA: `fused` for the batch's decodes, `prefill` for the rest. On the CPU, and for what these two do not serve:
`active_blocks`, in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from ..codecs.pages import PagedCodec
from ..codecs.ring import write as write_ring
from ..formats import FORMATS, refused_value_dim
from ..layout import MICRO_BLOCK
from ..settings.calibration import find_calibration
from ..settings.options import read_options
from ..window.layer import SUFFIX, WindowLayer
from ..window.metadata import RecentTokens
from ..window.size import recent_tokens
from ..window.step import WindowStep
from .active_blocks import AttentionOptions, attend
from .context_parallel import Ranks, refuse_layer, share_of
from .metadata import PackedMetadata, longest_decode
from .routes import fused_serves

if TYPE_CHECKING:
    from .decode import DecodePlan, StorePlan
    from .prefill import FlashAttention

logger = init_logger("vllm.packed_kv")


class PackedAttentionImpl(AttentionImpl[PackedMetadata]):
    """Stores the new tokens of a batch into packed pages and attends over what is stored.

    Raises ValueError for a dtype that is not packed, and for what packed pages do not support: ALiBi, sinks of another
    shape than [query heads], attention other than causal decoder attention, and any layer option that this class does
    not know.
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
        if kv_cache_dtype not in FORMATS:  # vLLM gives such a layer the backend that it would have unskipped
            raise ValueError(
                "--kv-cache-dtype-skip-layers names a layer of chunked attention, which cannot keep "
                f"{kv_cache_dtype} pages beside packed ones; name others"
            )
        refused = [name for name, value in unknown.items() if value is not None]
        if alibi_slopes is not None:
            refused.append("ALiBi")
        if attn_type != AttentionType.DECODER:
            refused.append(f"{attn_type} attention")
        if sinks is not None and sinks.shape != (num_heads,):
            refused.append(f"attention sinks of shape {list(sinks.shape)} (a number for each of {num_heads} heads is)")
        if head_size_v is not None and (reason := refused_value_dim(head_size, head_size_v)):
            refused.append(reason)
        if refused:
            raise ValueError(
                f"--kv-cache-dtype {kv_cache_dtype} does not support {', '.join(refused)}; "
                "use --kv-cache-dtype auto for this model"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.options = AttentionOptions(self.scale, sliding_window, logits_soft_cap or None, sinks)
        self.device = torch.get_default_device()
        config = get_current_vllm_config()
        self.dtype = config.model_config.dtype
        self.longest_decode = longest_decode(config)
        self.config = config
        self.share = share_of(config)
        refuse_layer(
            self.share, kv_cache_dtype, sliding_window, sinks is not None, kv_sharing_target_layer_name is not None
        )
        self.ranks = Ranks(self.share) if self.share.ranks > 1 else None
        """Those that share this layer's tokens, where there are several."""
        self.group = self.num_heads * self.share.ranks // self.num_kv_heads
        """Query heads a KV head that the decode kernel serves."""
        self.recent_tokens = recent_tokens(config)
        self.decode_kernel = read_options(config.additional_config).decode_kernel
        self.layers = config.compilation_config.static_forward_context
        if any(isinstance(layer, WindowLayer) for layer in self.layers.values()):
            self.recent_tokens = 0  # of a draft: the target's layers have their window layers by now
        self.max_requests = config.scheduler_config.max_num_seqs
        if config.model_config.attention_chunk_size:
            self.max_requests *= 2  # vLLM makes two of a decode whose drafts begin a chunk
        self.max_tokens = config.scheduler_config.max_num_batched_tokens
        self.flash_attention = self._find_flash_attention()
        self.calibration = find_calibration(config, FORMATS[kv_cache_dtype])
        if self.calibration is None:
            self._build_codec({})

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer its window layer: by now vLLM has named all layers, and has not yet asked for their caches."""
        if self.recent_tokens and self.kv_sharing_target_layer_name is None:
            name = next(name for name, layer in self.layers.items() if getattr(layer, "impl", None) is self)
            window = min(self.recent_tokens, self.options.sliding_window or self.recent_tokens)
            if name + SUFFIX not in self.layers:  # weights may be loaded again
                self.layers[name + SUFFIX] = WindowLayer(name + SUFFIX, window, self.longest_decode, self.config)

    def _find_flash_attention(self) -> FlashAttention | None:
        """What prefill runs on here. vLLM says it only while it builds the model, as its settings count."""
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

    def _build_codec(self, channels: dict[str, Any]) -> None:
        """Make the codec, with its `channels` from the calibration file, and what depends on it."""
        fmt, value_dim = FORMATS[self.kv_cache_dtype], self.head_size_v
        self.codec = PagedCodec(fmt, self.head_size, device=self.device, value_dim=value_dim, **channels)
        self.fused = self.prefill = None
        if self.device.type == "cuda":
            from .decode import FusedDecode  # imports Triton, which the CPU platform may lack
            from .prefill import FlashPrefill

            shape = (self.codec, self.num_heads * self.share.ranks, self.num_kv_heads, self.options)
            self.fused = FusedDecode(*shape, self.longest_decode, self.max_requests, self.decode_kernel, self.share)
            if self.flash_attention is not None:
                batch = (self.max_tokens, self.max_requests)
                self.prefill = FlashPrefill(*shape, *batch, self.flash_attention, self.share)

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
            layer: its name says which channels are its outliers, and it may share another layer's cache; the formats
                carry their own scales.
            query: [tokens, query heads, head_dim], fp16, bf16 or fp32.
            key, value: [tokens, KV heads, head_dim] and [tokens, KV heads, value_dim], same dtype; not looked at in a
                layer that shares another's cache.
            kv_cache: uint8 [blocks, KV heads, block_size, slot_bytes]; empty in vLLM's profiling run.
            attn_metadata: None in the profiling run, and in steps without requests.
            output: [tokens, query heads, value_dim], filled; rows of padding may hold anything afterwards.
            output_scale, output_block_scale: must be None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{self.kv_cache_dtype}: fused output quantization is not supported")
        shared = self.kv_sharing_target_layer_name
        if shared is None and (target := getattr(layer, "kv_sharing_target_layer_name", None)) is not None:
            raise NotImplementedError(
                f"{self.kv_cache_dtype}: draft layer {layer.layer_name} shares the KV cache of {target}, which is not "
                "supported; use another speculative method, or none"
            )
        if self.calibration is not None:  # in the profiling run: the constructor is not told the layer's name
            name = shared or layer.layer_name
            self._build_codec(self.calibration.channels(name, self.num_kv_heads, self.head_size, self.head_size_v))
            self.calibration = None
        if attn_metadata is None:
            if not kv_cache.numel():  # later such steps, of a data-parallel rank without requests, compute nothing
                self._profile(layer.layer_name, query, key, value)
            return output.zero_()
        if self.ranks is not None:
            self._forward_of_share(query, key, value, kv_cache, attn_metadata, self.ranks, output)
            return output
        recent = WindowStep.of(self.layers.get((shared or layer.layer_name) + SUFFIX), bool(shared))
        decodes = self._decodes_by_kernel(attn_metadata, query.dtype)
        plan = self._plan_decodes(attn_metadata, recent) if decodes else None
        if shared is None:
            self._store(query, key, value, kv_cache, attn_metadata, recent, decodes, plan)
        if plan is not None:
            assert self.fused is not None
            if shared is not None:
                self.fused.rotate(query, plan)
            self.fused.attend(kv_cache, plan, output, recent.ring(0, decodes) if recent else None)
        if decodes == len(attn_metadata.context):
            return output
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self.kv_cache_dtype}: a prefill is planned on the host; no CUDA graph can hold it")
        if self.prefill is not None:
            own_key, own_value = (None, None) if shared else (key, value)
            ring = None
            if recent and not shared and not attn_metadata.has_new_prompts(decodes):
                ring = recent.ring(decodes, len(attn_metadata.context))
            self.prefill.attend(query, own_key, own_value, kv_cache, attn_metadata, decodes, output, ring)
        else:
            self._attend_in_pytorch(query, key, value, kv_cache, attn_metadata, recent, decodes, output)
        if recent and shared is None:
            self._store_recent(key, value, kv_cache, attn_metadata, recent, decodes)
        return output

    def _decodes_by_kernel(self, metadata: PackedMetadata, dtype: torch.dtype) -> int:
        """How many requests, from the first on, the fused route serves."""
        if self.fused is None or not fused_serves(self.group, metadata.decode_query_len, dtype):
            return 0
        return metadata.decodes

    def _store(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        metadata: PackedMetadata, recent: WindowStep | None, decodes: int, decode_plan: DecodePlan | None,
    ) -> None:  # fmt: skip
        """Write the batch's tokens into their pages, and those of decodes by the kernel, which reads them there, into
        their rings; rotate the decodes' queries in the same launch. Prefills read what their rings had before: see
        `_store_recent`. New prompts have nothing there."""
        tokens, fused = metadata.num_actual_tokens, self.fused
        if fused is None:
            new = (metadata.slot_mapping[:tokens], key[:tokens], value[:tokens], metadata.positions[:tokens])
            self.codec.write(kv_cache, *new)
            return
        in_ring = 0
        if recent:
            in_ring = tokens if metadata.has_new_prompts(decodes) else metadata.query_starts[decodes]

        def plan() -> StorePlan | None:
            ring_slots = recent.metadata.slots[:in_ring] if recent and in_ring else None
            places = (metadata.slot_mapping[:tokens], metadata.positions[:tokens], ring_slots)
            return fused.plan_store(*places, decode_plan)

        ring = recent.layer.kv_cache if recent and in_ring else None
        planned = self._planned(metadata, recent, ("store", decodes, id(decode_plan)), plan)
        fused.store(kv_cache, key, value, planned, ring, query)

    def _store_recent(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: PackedMetadata,
        recent: WindowStep, decodes: int,
    ) -> None:  # fmt: skip
        """Write the tokens of the requests from `decodes` on into their rings, unless `_store` has."""
        rows = slice(metadata.query_starts[decodes], metadata.num_actual_tokens)
        ring, fused = recent.layer.kv_cache, self.fused
        if fused is None:
            slots = recent.metadata.slots[rows]
            write_ring(ring, slots, *self.codec.prepare(key[rows], value[rows], metadata.positions[rows]))
        elif not metadata.has_new_prompts(decodes):

            def plan() -> StorePlan | None:
                places = (metadata.slot_mapping[rows], metadata.positions[rows], recent.metadata.slots[rows])
                return fused.plan_store(*places)

            planned = self._planned(metadata, recent, ("ring", decodes), plan)
            fused.store(kv_cache, key[rows], value[rows], planned, ring, only_ring=True)

    def _planned(
        self, metadata: PackedMetadata, recent: WindowStep | None, name: tuple, plan: Callable[[], Any]
    ) -> Any:
        """What `plan` returns, for the first layer of a step with these heads and this ring; kept for the others."""
        shape = (self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v)
        name += (*shape, recent and id(recent.metadata))
        if name not in metadata.plans:
            metadata.plans[name] = plan()
        return metadata.plans[name]

    def _attend_in_pytorch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        metadata: PackedMetadata, recent: WindowStep | None, first: int, output: torch.Tensor,
        sums: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Serve the batch's requests from `first` on, one by one."""
        starts = metadata.query_starts
        newest: dict[int, RecentTokens] = {}
        if recent:
            newest = recent.recent_tokens(self.codec, key, value, metadata.positions, starts, metadata.context, first)
        for request in range(first, len(metadata.context)):
            rows = slice(starts[request], starts[request + 1])
            if rows.start < rows.stop:
                table, seq_len = metadata.block_table[request], metadata.context[request]
                batch = (table, seq_len, query[rows], self.options, newest.get(request), metadata.share)
                result, of_rows = attend(self.codec, kv_cache, *batch)
                output[rows] = result.to(output.dtype)
                if sums is not None:
                    sums[rows] = of_rows

    def _plan_decodes(
        self, metadata: PackedMetadata, recent: WindowStep | None, sums: torch.Tensor | None = None
    ) -> DecodePlan:
        """Of the batch's decodes, for the fused route."""
        fused, requests = self.fused, metadata.decodes
        assert fused is not None

        def plan() -> DecodePlan:
            return fused.plan_decodes(
                metadata.decode_tokens, metadata.block_table[:requests], metadata.query_start_loc[: requests + 1],
                metadata.stored_lens[:requests], metadata.decode_query_len,
                recent.ring(0, requests) if recent else None, sums,
            )  # fmt: skip

        # Layers with sinks may need a bias that the others do not, and these and those with a window the other kernel.
        return self._planned(metadata, recent, ("decode", fused.bias_rows is not None, fused.of_cuda is not None), plan)

    def _profile(self, name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the workspace, so that vLLM's memory profile counts it, and compile the kernels on pages and a ring of
        our own: else the first request behind a cached prefix would wait for them, 1.3 s on an H200. name: of the
        layer."""
        if self.fused is None or key is None:
            return
        self.fused.prepare()
        if self.prefill is not None:
            self.prefill.reserve(query.dtype)
        if self.ranks is not None:
            self.ranks.reserve(query, self.head_size_v)
        # PyTorch's own memory grows with the batch; FlashAttention's does not: a chunk behind a prefix will do.
        tokens = len(key) if self.prefill is None else min(2 * MICRO_BLOCK, len(key))
        new_tokens = tokens if self.prefill is None else -(-tokens // 2)
        block_size = self.config.cache_config.block_size
        if not block_size or block_size % MICRO_BLOCK:
            block_size = MICRO_BLOCK
        blocks = -(-tokens // block_size)
        page = key.new_zeros((blocks, self.num_kv_heads, block_size, self.codec.slot_bytes), dtype=torch.uint8)
        batch = PackedMetadata.of_one_request(
            tokens, new_tokens, key.device, self.share, self.num_heads * self.share.ranks, block_size
        )
        places = torch.arange(tokens, device=key.device)
        self.fused.store(page, key[:tokens], value[:tokens], self.fused.plan_store(places, places))
        output = query.new_empty((*query.shape[:2], self.head_size_v))
        if self.ranks is not None:
            self._forward_of_share(query, key, value, page, batch, self.ranks, output)
        elif self.prefill is not None:
            self.prefill.attend(query, key, value, page, batch, 0, output)
        else:
            self._attend_in_pytorch(query, key, value, page, batch, None, 0, output)
        window_layer = self.layers.get(name + SUFFIX)
        if window_layer is not None and self.prefill is not None and window_layer.ring_block_size:
            ring = window_layer.ring_of_one_request(tokens, self.num_kv_heads, self.codec.key.head_dim, key.device)
            for start in (0, tokens - new_tokens):  # a new prompt's tokens go there with pages, a chunk's afterwards
                rows = places[start:]
                planned = self.fused.plan_store(rows, rows, rows.to(torch.int32))
                self.fused.store(page, key[rows], value[rows], planned, ring.cache, only_ring=start > 0)
            self.prefill.attend(query, key, value, page, batch, 0, output, ring)
        self.fused.bound.clear()  # of these pages and this ring
        if self.prefill is not None:
            self.prefill.bound.clear()

    def _forward_of_share(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        metadata: PackedMetadata, ranks: Ranks, output: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `forward`, where each of some ranks has a share of the tokens: first all serve the rows that read pages,
        then each adds what a prefill reads raw. What decides whether they talk to each other is the same on all."""
        tokens, decodes = metadata.num_actual_tokens, self._decodes_by_kernel(metadata, query.dtype)
        by_kernel = tokens if decodes == len(metadata.context) else metadata.query_starts[decodes]
        has_prefixes = self.prefill is None or not metadata.has_new_prompts(decodes)
        read_pages = tokens if has_prefixes else by_kernel
        if not read_pages:
            assert self.prefill is not None
            self._store(query, key, value, kv_cache, metadata, None, 0, None)
            self.prefill.attend(query, key, value, kv_cache, metadata, 0, output)
            return
        queries = ranks.gather(query[:read_pages])
        over_share = queries.new_empty((*queries.shape[:2], self.head_size_v), dtype=torch.float32)
        assert metadata.sums is not None
        sums = metadata.sums[: read_pages * queries.shape[1]].view(read_pages, -1)
        plan = self._plan_decodes(metadata, None, sums[:by_kernel]) if decodes else None
        self._store(queries, key, value, kv_cache, metadata, None, decodes, plan)
        if plan is not None:
            assert self.fused is not None
            self.fused.attend(kv_cache, plan, over_share)
        if self.prefill is None:
            self._attend_in_pytorch(queries, key, value, kv_cache, metadata, None, decodes, over_share, sums)
        elif read_pages > by_kernel:
            self.prefill.attend_share(queries, kv_cache, metadata, decodes, over_share, sums)
        of_ranks = ranks.combine(over_share, sums)
        done = by_kernel if self.prefill is not None else tokens
        output[:done] = of_ranks[0][:done]
        if done == tokens:
            return
        assert self.prefill is not None
        if has_prefixes:
            self.prefill.attend_rest(query, key, value, kv_cache, metadata, decodes, output, of_ranks)
        else:
            self.prefill.attend(query, key, value, kv_cache, metadata, decodes, output)
