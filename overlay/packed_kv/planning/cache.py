"""Tokens and requests that a KV cache holds, counted as vLLM 0.32 and 0.33 count them.

The rules are in `v1/core/kv_cache_utils.py` (0.32) and `kv_cache_planning.py` (0.33), which need torch and a started
engine. The rules that concern our backends are reimplemented here. Blocks of all groups come from one pool, in which
every block has room for the layers of the largest group:

    block of the pool:   | page of layer 0 | page of layer 1 | ...      layers of one group

Pages of all groups have one size (`LBHNC`). The exception: where only skipped layers differ from packed layers with
rings, pages of any size lie one behind the other (`BLHNC`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..formats import FORMATS
from ..layout import MICRO_BLOCK, RECENT_TOKENS, choose_ring_block
from ..model.config_fields import BadInput
from ..model.shape import DENSE, FP8, Model, ModelLayer, recent_slot_bytes, slot_bytes
from ..model.shape import bytes_per_token as sum_over_layers
from ..refusals.facts import Cache, Engine, Facts, Latents, Pages
from ..refusals.table import no_window, refuse

DTYPES = (DENSE, FP8, *FORMATS)
LATENT_ALIGNMENT = 128
"""Step in tokens by which vLLM enlarges blocks of latents beside states, for kernels of other backends."""


INDEX_BLOCK = 64
"""Tokens of a block of vLLM's indexer on CUDA, and so of the model's blocks."""


@dataclass(frozen=True)
class Serving:
    """Options with which the model is served.

    `context`: tokens of a request. `recent_tokens`: tokens of the packed dtypes' recent window, None: their default.
    `in_flight_tokens`: concurrent batches times tokens of a batch; sliding layers keep blocks for these. `skip_layers`:
    numbers of layers that stay dense. `block_size`: of attention layers, in tokens. `on_gpu`: False for vLLM's CPU
    platform, which enlarges no blocks beside skipped layers and has no layout for rings there. `drafts`: tokens that a
    step drafts, of which each has a state and a place in the recent window.
    """

    context: int
    recent_tokens: int | None = None
    in_flight_tokens: int = 2 * 8192
    skip_layers: frozenset[int] = frozenset()
    block_size: int = MICRO_BLOCK
    keeps_prefixes: bool = True
    on_gpu: bool = True
    drafts: int = 0


@dataclass(frozen=True)
class Spec:
    """vLLM's KVCacheSpec of a layer: `page` bytes hold `block_size` tokens or one of a request's `states` states;
    `shape` distinguishes specs that differ otherwise."""

    kind: str
    block_size: int
    page: int
    window: int = 0
    shape: tuple[int, ...] = ()
    states: int = 0
    ring_block: int = 0

    def blocks(self, serving: Serving) -> int:
        """Blocks of a request of `serving.context` tokens."""
        if self.kind == "state":
            return (self.states if serving.keeps_prefixes else 1) + serving.drafts
        if self.kind == "ring":  # the window and the token being generated
            ring_blocks = -(-(self.window + 1) // self.ring_block) + 1
            return -(-ring_blocks // (self.block_size // self.ring_block))
        tokens, more = serving.context, 0
        if self.kind == "sliding":
            tokens, more = min(self.window - 1 + serving.in_flight_tokens, tokens), 1
        if self.kind == "chunked":
            tokens = min(self.window + serving.in_flight_tokens, tokens)
        return -(-tokens // self.block_size) + more


@dataclass(frozen=True)
class Capacity:
    """Contents of a cache of some bytes. `tokens` is vLLM's figure: requests that the blocks hold, times their
    context."""

    tokens: int
    requests: int
    request_bytes: int


def bytes_per_token(model: Model, dtype: str, serving: Serving) -> int:
    """KV bytes of a token on one rank, as the engine's start-up line counts them."""
    layers = [(layer, dtype_of(dtype, layer, serving)) for layer in model.layers]
    return sum_over_layers(layers)


def dtype_of(dtype: str, layer: ModelLayer, serving: Serving) -> str:
    return DENSE if layer.number in serving.skip_layers else dtype


def recent_window(model: Model, dtype: str, serving: Serving) -> tuple[int, str]:
    """Tokens of the recent window, and the reason if there is none."""
    if dtype not in FORMATS or serving.recent_tokens == 0:
        return 0, ""
    platform = "cuda" if serving.on_gpu else "cpu"
    facts = Facts(
        Engine(platform=platform),
        Latents(is_mla=model.has_latents, is_sparse=model.picks_tokens),
        Cache(has_other_dtypes=bool(serving.skip_layers)),
    )
    if reason := no_window(facts):
        return 0, reason
    tokens = RECENT_TOKENS if serving.recent_tokens is None else serving.recent_tokens
    return min([tokens, serving.context, *_sliding_windows(model)]), ""


def _sliding_windows(model: Model) -> list[int]:
    return [layer.window for layer in model.attention if layer.kind == "sliding"]


def check_window(model: Model, serving: Serving) -> None:
    """Raise BadInput for recent tokens with which an engine would not start (`find_window` of window/size.py). The
    engine serves the model's context, or `context` if that is more."""
    asked, (_, reason) = serving.recent_tokens, recent_window(model, next(iter(FORMATS)), serving)
    if asked and reason:
        raise BadInput(f"--recent-tokens {asked:,} is not possible with {reason}; give 0")
    longest = max(model.max_len, serving.context)
    most = min([longest, *_sliding_windows(model)])
    if asked and asked > most:
        what = "the model's context" if most == longest else "the sliding window"
        raise BadInput(f"--recent-tokens {asked:,} is more than {what} of {most:,} tokens; give 0 to {most:,}")


def capacity(model: Model, dtype: str, serving: Serving, memory: int) -> Capacity:
    """Capacity of `memory` bytes of KV cache on each rank. Raises Refused."""
    if dtype in FORMATS and model.has_latents:
        refuse(Facts(Latents(is_mla=True), Cache(skip_layers=_skipped(serving))), dtype)
    groups = _groups(_specs(model, dtype, serving))
    if dtype in FORMATS and serving.skip_layers:
        for page in _packed_pages(model, dtype, groups):
            refuse(Facts(Cache(skip_layers=_skipped(serving)), page), dtype)
    bytes_per_block = max(sum(spec.page for spec in group) for group in groups)
    blocks = sum(max(spec.blocks(serving) for spec in group) for group in groups)
    number = memory // bytes_per_block
    # vLLM counts the null block among its tokens; no request gets it.
    return Capacity(int(number / blocks * serving.context), max(0, number - 1) // blocks, blocks * bytes_per_block)


def _specs(model: Model, dtype: str, serving: Serving) -> list[Spec]:
    """Specs of all layers with a cache of their own, then specs of rings."""
    attention_block, shared_page = _block_and_page(model, dtype, serving)
    window, _ = recent_window(model, dtype, serving)
    found, rings = [], []
    for layer in model.layers:
        if layer.kind == "state":
            size = (layer.state_bytes,)
            found.append(Spec("state", serving.context, shared_page, shape=size, states=layer.states))
        elif not layer.is_shared:
            name = dtype_of(dtype, layer, serving)
            slot, block_size = slot_bytes(name, layer), attention_block
            page, shape = layer.kv_heads * slot * block_size, (layer.kv_heads, layer.head_size, slot)
            if layer.kind == "sliding" and serving.skip_layers and serving.on_gpu:
                tokens = shared_page // (layer.kv_heads * slot)
                page, block_size = shared_page, max(MICRO_BLOCK, tokens // MICRO_BLOCK * MICRO_BLOCK)
            found.append(Spec(layer.kind, block_size, page, layer.window, shape))
            if layer.index_bytes:
                shape = (1, layer.index_bytes, layer.index_bytes)
                found.append(Spec(layer.kind, block_size, layer.index_bytes * block_size, shape=shape))
            if window and name in FORMATS:
                rings.append((layer, block_size, page))
    one_size = len({spec.page for spec in found}) == 1
    is_cut = one_size or _is_uniform(found)
    return found + [_ring(*ring, window + serving.drafts, one_size, is_cut) for ring in rings]


def _block_and_page(model: Model, dtype: str, serving: Serving) -> tuple[int, int]:
    """Tokens of a block of attention, and bytes of its page, that hold a state and the smallest page of a skipped
    layer: `_align_hybrid_block_size` and `_align_heterogeneous_kv_block_size` of vLLM's `platforms/interface.py`.

    Both ask the first layer's backend for the size of a token; if that layer is skipped, its backend takes packed bytes
    for elements.
    """
    layer, block_size = model.attention[0], serving.block_size
    if model.has_latents and model.is_hybrid:
        block_size = max(block_size, LATENT_ALIGNMENT)
    if model.picks_tokens and serving.on_gpu:
        block_size = max(block_size, INDEX_BLOCK)
    is_counted = layer.number not in serving.skip_layers or dtype not in FORMATS or not serving.on_gpu
    token = layer.kv_heads * (slot_bytes(dtype, layer) if is_counted else 2 * layer.head_size)
    held = [max((layer.state_bytes for layer in model.layers if layer.kind == "state"), default=0)]
    if serving.skip_layers and serving.on_gpu:
        held.append(MICRO_BLOCK * layer.kv_heads * slot_bytes(DENSE, layer))
    for page in held:
        block_size *= max(1, -(-page // (block_size * token)))
    return block_size, block_size * token


def _is_uniform(specs: Sequence[Spec]) -> bool:
    """True if vLLM would keep all layers in one group, whatever their page sizes."""
    return len({(spec.kind, spec.block_size, spec.window) for spec in specs}) == 1


def _ring(layer: ModelLayer, block_size: int, page: int, window: int, one_size: bool, is_cut: bool) -> Spec:
    """Return the spec that `window/cache_group.ring_spec` makes: a block that `is_cut` has several ring blocks.
    `window`: tokens, drafts included, beside the one being generated."""
    token = layer.kv_heads * recent_slot_bytes(layer)
    block, count = choose_ring_block(page, token, block_size, window + 1, is_cut=is_cut)
    tokens = block * count
    shape = (layer.kv_heads, layer.head_size, window)
    return Spec("ring", tokens, page if one_size else tokens * token, window, shape, ring_block=block)


def _groups(specs: Sequence[Spec]) -> list[list[Spec]]:
    """Groups of layers that share a block table: `get_kv_cache_groups`."""
    if _is_uniform(specs):
        return [list(specs)]
    rings = [spec for spec in specs if spec.kind == "ring"]
    others = [spec for spec in specs if spec.kind != "ring"]
    if rings and _is_uniform(others) and len({spec.page for spec in others}) > 1:  # side by side
        sizes = {spec.block_size for spec in rings}
        return [others] + [[spec for spec in rings if spec.block_size == size] for size in sizes]
    largest = max(spec.page for spec in specs)
    layers = Counter(_with_page(spec, largest) for spec in specs)
    fewest, most = min(layers.values()), max(layers.values())
    size = most if most < 1.5 * fewest else fewest
    return [
        [spec] * len(range(first, number, count))
        for spec, number in layers.items()
        for count in [-(-number // size)]
        for first in range(count)
    ]


def _with_page(spec: Spec, page: int) -> Spec:
    """Return the spec with more tokens in a page, or with padding: vLLM's `unify_kv_cache_spec_page_size`."""
    if spec.kind == "state" or page % spec.page:
        return replace(spec, page=page)
    return replace(spec, page=page, block_size=spec.block_size * (page // spec.page))


def packed_pages(model: Model, dtype: str, serving: Serving) -> list[Pages]:
    """Sizes of a packed dtype's pages for `refuse`, where layers of several kinds share a pool; empty: they do not."""
    return _packed_pages(model, dtype, _groups(_specs(model, dtype, serving)))


def _packed_pages(model: Model, dtype: str, groups: Sequence[Sequence[Spec]]) -> list[Pages]:
    found, slots = [], {slot_bytes(dtype, layer) for layer in model.attention}
    for spec in {spec for group in groups for spec in group} if len(groups) > 1 else ():
        if spec.kind != "state" and spec.shape[2] in slots:
            heads, _, slot = spec.shape
            found.append(Pages(size=(spec.page, heads * slot * spec.block_size)))
    return found


def _skipped(serving: Serving) -> tuple[str, ...]:
    return tuple(map(str, sorted(serving.skip_layers)))
