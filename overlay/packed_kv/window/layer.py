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
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

from ..attention.active_blocks import RecentTokens
from ..codecs.ring import Ring, read, round_trip
from ..layout import RECENT_TOKENS, ring_slot_bytes
from ..settings.options import OptionError, read_options
from .slots import plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from ..attention.metadata import PackedMetadata
    from ..codecs.pages import PagedCodec
    from .cache_group import RingSpec

logger = init_logger("vllm.packed_kv")

SUFFIX = ".recent"
"""Of a companion's name, behind that of its layer."""
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
    return min(asked or RECENT_TOKENS, bound), ""


def _without(config: VllmConfig) -> str | None:
    """Why this engine can have no recent window."""
    if not hasattr(kv_cache_interface, "CircularBufferSpec"):
        return "this version of vLLM, which has no KV-cache groups for rings (0.32 has)"
    if config.parallel_config.decode_context_parallel_size > 1:
        return "decode context parallelism, which deals a request's tokens out to ranks"
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return "--disable-hybrid-kv-cache-manager (some KV connectors imply it)"
    connector = config.kv_transfer_config.kv_connector if config.kv_transfer_config else None
    if connector and connector not in SAFE_CONNECTORS:
        return f"KV connector {connector}"
    if reason := _without_beside_others(config):
        return reason
    if config.model_config.attention_chunk_size:
        return "chunked attention, whose layers see a request as one of each chunk"
    return None


def _without_beside_others(config: VllmConfig) -> str | None:
    """Why layers of other kinds than the target's packed ones allow no rings here."""
    cache, speculative = config.cache_config, config.speculative_config
    draft_dtype = speculative and getattr(speculative, "kv_cache_dtype", None)
    others = []
    if cache.kv_cache_dtype_skip_layers or draft_dtype not in (None, cache.cache_dtype):
        if current_platform.is_cpu():
            return "layers of another KV-cache dtype on a CPU, which do not name a layout for mixed pages"
        others.append("layers of another KV-cache dtype")
    if speculative and speculative.uses_draft_kv_cache():
        others.append("a draft's layers")
    if others and config.parallel_config.pipeline_parallel_size > 1:
        return f"pipeline parallelism beside {others[0]}, whose stages would lay out their pages differently"
    if config.model_config.is_hybrid:
        others.append("state layers")
    if others and config.kv_transfer_config:
        return f"KV connector {config.kv_transfer_config.kv_connector} beside {others[0]}"
    return None


def _specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Of all layers but the companions."""
    specs = {}
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        shares = getattr(layer, "kv_sharing_target_layer_name", None)
        if not isinstance(layer, RecentLayer) and not shares and (spec := layer.get_kv_cache_spec(config)):
            # vLLM lets the backend customize a spec only after the layer has returned it.
            specs[name] = layer.get_attn_backend().customize_spec(spec) if isinstance(spec, AttentionSpec) else spec
    return specs


def _have_one_size(specs: dict[str, KVCacheSpec]) -> bool:
    return len({spec.page_size_bytes for spec in specs.values()}) == 1


def _need_block_outermost(specs: dict[str, KVCacheSpec]) -> bool:
    """Whether pages differ in size and vLLM would nevertheless keep all in one group without rings: skipped layers, a
    draft's layers of another shape. With rings there are two groups, and then the layout LBHNC pads all pages to the
    largest; BLHNC packs pages of any size side by side."""
    return not _have_one_size(specs) and UniformTypeKVCacheSpecs.is_uniform_type(specs)


class RecentLayer(AttentionLayerBase):
    """The companion of an attention layer.

    Args:
        layer_name: its own, that of the layer whose tokens it keeps and `SUFFIX`.
        window: tokens that a query reads here.
        slack: tokens of a decode, drafts included.
        config: of the engine.
    """

    def __init__(self, layer_name: str, window: int, slack: int, config: VllmConfig) -> None:
        self.layer_name, self.window, self.slack = layer_name, window, slack
        self.config = config
        self.ring_block_size = 0
        self.kv_cache = torch.tensor([])
        self.views: dict[int, RecentTokens] = {}
        """Of the step's prefills, in PyTorch: for layers that share this one's cache, as the ring has moved on."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RecentBackendOfMixedPages if _need_block_outermost(_specs(self.config)) else RecentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = self.find_spec(vllm_config)
        self.ring_block_size = spec.ring_block_size  # of the cache that vLLM is about to lay out
        return spec

    def find_spec(self, vllm_config: VllmConfig) -> RingSpec:
        """As `get_kv_cache_spec`, for who only wants to know."""
        from .cache_group import ring_spec

        specs = _specs(vllm_config)
        packed = specs[self.layer_name.removesuffix(SUFFIX)]
        connected = vllm_config.kv_transfer_config is not None  # a connector would take ring blocks for blocks
        sizes = {"one_size": _have_one_size(specs) and not connected, "side_by_side": _need_block_outermost(specs)}
        return ring_spec(packed, self.window, self.slack, **sizes)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Keep vLLM's view of the cache as uint8 [ring blocks, KV heads, ring_block_size, ring_slot_bytes]."""
        from .cache_group import cut_into_ring_blocks

        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        self.kv_cache = cut_into_ring_blocks(kv_cache, self.ring_block_size, layout.is_block_outermost)


def ring_of_one_request(
    companion: RecentLayer, tokens: int, kv_heads: int, head_dim: int, device: torch.device
) -> Ring:
    """A ring of zeros as the layer's will be, for a request that has all of its tokens there."""
    blocks = -(-tokens // companion.ring_block_size)
    shape = (blocks, kv_heads, companion.ring_block_size, ring_slot_bytes(head_dim))
    table = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
    return Ring(torch.zeros(shape, dtype=torch.uint8, device=device), table, table.new_zeros(1), companion.window)


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
            "block_size": spec.ring_block_size,
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
            from ..kernels.triton.ring import plan_ring

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


class RecentBackendOfMixedPages(RecentBackend):
    """Where the pages of a block differ in size: see `_need_block_outermost`."""

    @classmethod
    def supported_kv_cache_layouts(cls):  # -> tuple[KVCacheLayout, ...]
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.BLHNC,)
