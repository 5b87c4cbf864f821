"""The recent window: the newest tokens of a request, once more, in 8 bits; attention reads them there.

Every packed layer gets a companion, a pseudo-layer with a KV cache of its own: a ring of a few blocks a request
(`ring_cache.py`), with the bytes of `codecs/ring.py`. The packed pages hold all tokens as without it, so nothing
ages, and the prefix cache, offloading and preemption know nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import vllm.v1.kv_cache_interface as kv_cache_interface
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from ..codecs.ring import Ring, read, round_trip
from ..layout import ring_slot_bytes
from .active_blocks import RecentTokens
from .options import OptionError, read_options
from .recent_plan import plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from ..codecs.pages import PagedCodec
    from .metadata import PackedMetadata

logger = init_logger("vllm.packed_kv")

SUFFIX = ".recent"
"""Of a companion's name, behind that of its layer."""
DEFAULT_TOKENS = 64
"""docs/quality.md has the figures by window."""
SAFE_CONNECTORS = ("OffloadingConnector",)
"""KV connectors that were seen to leave groups alone that take no part in the prefix cache."""


def recent_tokens(config: VllmConfig) -> int:
    """Tokens of the recent window, 0: none; the log says which. Raises OptionError where it was asked for and cannot
    be."""
    tokens, reason = find_window(config)
    if reason:
        logger.info_once("KV cache: no recent window with %s", reason, scope="local")
    elif tokens:
        logger.info_once("KV cache: the last %d tokens of a request are also kept at 8 bits", tokens, scope="local")
    return tokens


def find_window(config: VllmConfig) -> tuple[int, str]:
    """Tokens of the recent window, 0: none; and why there is none where nobody asked for that, or "". Raises
    OptionError."""
    asked = read_options(config.additional_config).recent_tokens
    if asked == 0 or config.model_config.runner_type == "draft":
        return 0, ""
    if reason := _without(config):
        if asked:
            raise OptionError(
                f"--additional-config: packed_kv.recent_tokens {asked} is not possible with {reason}; write 0"
            )
        return 0, reason
    longest = config.model_config.max_model_len
    sliding = config.model_config.get_sliding_window()
    bound = min(longest, sliding or longest)
    if asked is not None and asked > bound:
        what = f"the model's context of {longest}" if bound == longest else f"its sliding window of {sliding}"
        raise OptionError(
            f"--additional-config: packed_kv.recent_tokens {asked} is more than {what} tokens; write at most {bound}"
        )
    return min(asked or DEFAULT_TOKENS, bound), ""


def _without(config: VllmConfig) -> str | None:
    """Why this engine can have no recent window."""
    if not hasattr(kv_cache_interface, "CircularBufferSpec"):
        return "this version of vLLM, which has no KV-cache groups for rings (0.32 has)"
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return "--disable-hybrid-kv-cache-manager (some KV connectors imply it)"
    connector = config.kv_transfer_config.kv_connector if config.kv_transfer_config else None
    if connector and connector not in SAFE_CONNECTORS:
        return f"KV connector {connector}"
    if config.cache_config.kv_cache_dtype_skip_layers:
        return "--kv-cache-dtype-skip-layers (vLLM would pad the packed pages to the skipped layers')"
    speculative = config.speculative_config
    if speculative and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        return f"speculative method {speculative.method}, whose draft layers have no ring"
    if config.model_config.attention_chunk_size:
        return "chunked attention, whose layers see a request as one of each chunk"
    if config.model_config.is_hybrid:
        return "state layers, beside which a ring would take two of their large pages"
    return None


class RecentLayer(AttentionLayerBase):
    """The companion of an attention layer.

    Args:
        layer_name: its own.
        layer: whose tokens it keeps.
        window: tokens that a query reads here.
        slack: tokens of a decode, drafts included.
    """

    def __init__(self, layer_name: str, layer: Any, window: int, slack: int) -> None:
        self.layer_name, self.layer, self.window, self.slack = layer_name, layer, window, slack
        self.kv_cache = torch.tensor([])
        self.views: dict[int, RecentTokens] = {}
        """Of the step's prefills, in PyTorch: for layers that share this one's cache, as the ring has moved on."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RecentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        from .ring_cache import RingSpec

        # vLLM lets the backend customize a spec only after the layer has returned it.
        packed = self.layer.get_attn_backend().customize_spec(self.layer.get_kv_cache_spec(vllm_config))
        slot_bytes = ring_slot_bytes(packed.head_size)
        fit = max(1, packed.page_size_bytes // (packed.num_kv_heads * slot_bytes))
        return RingSpec(
            # It divides the packed block: the scheduler works in their least common multiple.
            block_size=max(n for n in range(1, fit + 1) if packed.block_size % n == 0),
            num_kv_heads=packed.num_kv_heads,
            head_size=packed.head_size,
            dtype=torch.uint8,  # a second dtype would let vLLM zero all new blocks
            state_content_bytes=slot_bytes,
            window=self.window,
            slack=self.slack,
        )


@dataclass
class RecentMetadata(AttentionMetadata):
    """A batch's rings. `slots` int32 [tokens] and `first` int32 [requests] are those of `recent_plan.plan`; they and
    `block_table`, int32 [requests, blocks], are on the device. `rows` keeps those of some requests."""

    block_table: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass
class RecentStep:
    """One layer's ring in the step that is under way. `is_shared`: it is that of the layer whose cache is shared."""

    companion: RecentLayer
    metadata: RecentMetadata
    is_shared: bool

    @classmethod
    def of(cls, companion: RecentLayer | None, is_shared: bool) -> RecentStep | None:
        if companion is None:
            return None
        metadata = get_forward_context().attn_metadata
        assert isinstance(metadata, dict), "vLLM's micro-batches are not supported"
        return cls(companion, metadata[companion.layer_name], is_shared)

    def ring(self, first: int, end: int) -> Ring:
        """What attention of the batch's requests `first` .. `end` - 1 reads."""
        rows = self.metadata.rows
        if (first, end) not in rows:  # once a step for all layers
            rows[first, end] = self.metadata.block_table[first:end], self.metadata.first[first:end]
        return Ring(self.companion.kv_cache, *rows[first, end], self.companion.window)

    def views(
        self, codec: PagedCodec, key: torch.Tensor, value: torch.Tensor, batch: PackedMetadata, first: int
    ) -> dict[int, RecentTokens]:
        """Of the requests from `first` on, what their rings hold and, behind it, the batch's own tokens.

        To be asked before these are written. A layer that shares the ring gets the views of the layer that has it.
        """
        if not self.is_shared:
            rows = slice(batch.query_starts[first], batch.num_actual_tokens)
            prepared = codec.prepare(key[rows], value[rows], batch.positions[rows])
            own = [round_trip(x).transpose(0, 1) for x in prepared]
            self.companion.views = {}
            for request in range(first, len(batch.context)):
                start, end = (batch.query_starts[i] - rows.start for i in (request, request + 1))
                view = self._view(request, batch.context[request], [x[:, start:end] for x in own])
                self.companion.views[request] = view
        return self.companion.views

    def _view(self, request: int, seq_len: int, own: list[torch.Tensor]) -> RecentTokens:
        cache, table = self.companion.kv_cache, self.metadata.block_table[request]
        start = seq_len - own[0].shape[1]
        first = min(int(self.metadata.first[request]), start)
        places = torch.arange(first, start, device=cache.device)
        slots = table[places // cache.shape[2]].long() * cache.shape[2] + places % cache.shape[2]
        held = (x.transpose(0, 1) for x in read(cache, slots))
        key, value = (torch.cat(parts, dim=1) for parts in zip(held, own, strict=True))
        return RecentTokens(first, self.companion.window, key, value)


class RecentMetadataBuilder(AttentionMetadataBuilder[RecentMetadata]):
    """Plans the rings, once a step for all layers; into memory that outlives the step, for CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        self.sizes = {
            "block_size": spec.block_size,
            "ring_blocks": spec.ring_blocks,
            "window": spec.window,
            "longest_decode": spec.slack if device.type == "cuda" else 0,  # in PyTorch a batch's own tokens are raw
        }
        scheduler = vllm_config.scheduler_config
        tokens = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * spec.slack
        self.slots = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self.first = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.plan = plan
        if device.type == "cuda":
            from ..kernels.ring import plan_ring

            self.plan = plan_ring

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RecentMetadata:
        common = common_attn_metadata
        slots, first = self.slots[: common.num_actual_tokens], self.first[: common.num_reqs]
        table = common.block_table_tensor
        self.plan(common.query_start_loc, common.seq_lens[: common.num_reqs], table, slots, first, **self.sizes)
        return RecentMetadata(table, slots, first)


class RecentBackend(AttentionBackend):
    """Of the companions: pages and metadata, no attention."""

    @staticmethod
    def get_name() -> str:
        return "PACKED_KV_RECENT"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("a companion layer has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[RecentMetadataBuilder]:
        return RecentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls):  # -> tuple[KVCacheLayout, ...]
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
