"""The window layer: a pseudo-layer beside each packed layer, whose KV cache is a ring buffer of its newest tokens.

A ring has a few blocks a request (`cache_group.py`) and the bytes of `codecs/ring.py`. The packed pages hold all tokens
anyway, so no token has to be moved, and the prefix cache, offloading and preemption need not know the window.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf, subclass_attention_backend
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..codecs.ring import Ring
from ..layout import ring_slot_bytes
from ..settings.facts import is_draft
from .cache_group import RingSpec, cut_into_ring_blocks, ring_spec
from .metadata import ChunkedWindowMetadataBuilder, WindowMetadataBuilder, slot_filler
from .size import find_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

SUFFIX = ".recent"
"""Ending of a window layer's name, after the name of the layer whose tokens it keeps."""


class WindowLayer(AttentionLayerBase):
    """The window layer of an attention layer.

    Args:
        layer_name: its own, that of the layer whose tokens it keeps and `SUFFIX`.
        window: tokens that a query reads here.
        slack: tokens of a decode, drafts included.
        config: of the engine.
    """

    def __init__(self, layer_name: str, window: int, slack: int, config: VllmConfig) -> None:
        self.layer_name, self.window, self.slack = layer_name, window, slack
        self.config = config
        self.spec: RingSpec | None = None
        """Spec of the cache that vLLM lays out, once it has asked."""
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        side_by_side = _lie_side_by_side(self.config, _specs(self.config))
        backend = MixedPagesWindowBackend if side_by_side else WindowBackend
        layer = self.config.compilation_config.static_forward_context[self.layer_name.removesuffix(SUFFIX)]
        chunk_size = getattr(layer, "attention_chunk_size", None)
        return _of_chunks(backend, chunk_size) if chunk_size else backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        self.spec = self.find_spec(vllm_config)
        return self.spec

    @cached_property
    def sharers(self) -> int:
        """Layers of the model that share the packed layer's cache, and so this ring. To be called in steps, when the
        model has all its layers."""
        packed = self.layer_name.removesuffix(SUFFIX)
        layers = self.config.compilation_config.static_forward_context.values()
        return sum(getattr(layer, "kv_sharing_target_layer_name", None) == packed for layer in layers)

    @property
    def ring_block_size(self) -> int:
        """Tokens of a ring block; 0 as long as vLLM has not asked."""
        return 0 if self.spec is None else self.spec.ring_block_size

    def find_spec(self, vllm_config: VllmConfig) -> RingSpec | None:
        """Return the spec of `get_kv_cache_spec`, without a change to the layer. None: it has no cache."""
        specs = _specs(vllm_config)
        packed = specs[self.layer_name.removesuffix(SUFFIX)]
        side_by_side = _lie_side_by_side(vllm_config, specs)
        one_size = not side_by_side and _have_one_size(specs)
        return ring_spec(packed, self.window, self.slack, one_size=one_size, side_by_side=side_by_side)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Keep vLLM's view of the cache as uint8 [ring blocks, KV heads, ring_block_size, ring_slot_bytes]."""
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        self.kv_cache = cut_into_ring_blocks(kv_cache, self.ring_block_size, layout.is_block_outermost)

    def ring_of_one_request(self, tokens: int, kv_heads: int, head_dim: int, device: torch.device) -> Ring:
        """A ring of zeros in the layer's layout, for a request with all of its tokens in it."""
        blocks = -(-tokens // self.ring_block_size)
        shape = (blocks, kv_heads, self.ring_block_size, ring_slot_bytes(head_dim))
        table = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
        return Ring(torch.zeros(shape, dtype=torch.uint8, device=device), table, table.new_zeros(1), self.window)

    def fill_slots_of_one_request(self, ring: Ring) -> None:
        """Launch, for a `ring_of_one_request`, what a step's metadata launch."""
        starts = torch.arange(2, dtype=torch.int32, device=ring.cache.device)
        fill, sizes = slot_filler(self.spec, ring.cache.device)
        fill(starts, starts[1:].clone(), ring.block_table, starts[:1].clone(), ring.first, **sizes)


class FillerLayer(WindowLayer):
    """A window layer that nothing reads, beside a draft model with pages like the target's.

    vLLM deals the layers of each kind out to groups of one number of layers, by the kind that has the fewest. With
    fewer rings than packed layers it would split the packed layers into two groups; the draft's layers would be in
    both, but vLLM requires them to be in one. Fillers take no memory: a block holds the pages of the largest group.

    number: of the filler; see `WindowLayer` for the rest.
    """

    def __init__(self, layer_name: str, window: int, slack: int, config: VllmConfig, number: int) -> None:
        super().__init__(layer_name, window, slack, config)
        self.number = number

    def find_spec(self, vllm_config: VllmConfig) -> RingSpec | None:
        """Return the spec, or None if the filler is not needed: there are as many rings as packed layers without it, or
        layers of several kinds."""
        specs = _specs(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context.values()
        missing = len(specs) - sum(type(layer) is WindowLayer for layer in layers)
        return super().find_spec(vllm_config) if len({*specs.values()}) == 1 and self.number < missing else None


def window_tokens_of_model(config: VllmConfig) -> int:
    """Tokens of the recent window of the model that is being built; 0 for a draft. Raises OptionError."""
    layers = config.compilation_config.static_forward_context.values()
    has_windows = any(isinstance(layer, WindowLayer) for layer in layers)  # of the target, built before its draft
    return 0 if has_windows or is_draft(config) else find_window(config)[0]


def add_window_layer(impl: object, window: int, slack: int, config: VllmConfig) -> WindowLayer:
    """Return the window layer of the layer whose `impl` it is, and add it unless it is there: weights may be loaded
    again. To be called when they are: vLLM has named all layers then, and has not yet asked for their caches.

    window, slack: see `WindowLayer`.
    """
    layers = config.compilation_config.static_forward_context
    name = next(name for name, layer in layers.items() if getattr(layer, "impl", None) is impl) + SUFFIX
    if name not in layers:
        draft = config.speculative_config
        if draft and draft.uses_draft_model() and not any(isinstance(layer, WindowLayer) for layer in layers.values()):
            for number in range(draft.draft_model_config.get_num_layers(draft.draft_parallel_config)):
                layers[f"{name}-{number}"] = FillerLayer(name, window, slack, config, number)
        layers[name] = WindowLayer(name, window, slack, config)
    return layers[name]


def _specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Specs of all layers except the window layers."""
    specs = {}
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        shares = getattr(layer, "kv_sharing_target_layer_name", None)
        if not isinstance(layer, WindowLayer) and not shares and (spec := layer.get_kv_cache_spec(config)):
            # vLLM lets the backend customize a spec only after the layer has returned it.
            specs[name] = layer.get_attn_backend().customize_spec(spec) if isinstance(spec, AttentionSpec) else spec
    return specs


def _have_one_size(specs: dict[str, KVCacheSpec]) -> bool:
    return len({spec.page_size_bytes for spec in specs.values()}) == 1


def _lie_side_by_side(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> bool:
    """True if pages differ in size and vLLM would nevertheless keep all in one group without rings: skipped layers, a
    draft's layers of another shape. With rings there are two groups, and then the layout LBHNC pads all pages to the
    largest; BLHNC packs pages of any size side by side. A pipeline's stage does not see the layers of the others, so
    there it is so beside any skipped layers."""
    if config.parallel_config.pipeline_parallel_size > 1 and config.cache_config.kv_cache_dtype_skip_layers:
        return True
    return not _have_one_size(specs) and UniformTypeKVCacheSpecs.is_uniform_type(specs)


class WindowBackend(AttentionBackend):
    """Backend of the window layers: pages and metadata, no attention."""

    @staticmethod
    def get_name() -> str:
        return "PACKED_KV_RECENT"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("a window layer has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[WindowMetadataBuilder]:
        return WindowMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


class MixedPagesWindowBackend(WindowBackend):
    """Backend for pages of different sizes in one block: see `_lie_side_by_side`."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)


@cache
def _of_chunks(backend: type[WindowBackend], chunk_size: int) -> type[AttentionBackend]:
    """The backend beside layers of chunked attention; one class of each kind, by which vLLM tells them apart."""
    builder = type("Builder", (ChunkedWindowMetadataBuilder,), {"chunk_size": chunk_size})
    return subclass_attention_backend(f"Chunks{chunk_size}", backend, builder)
