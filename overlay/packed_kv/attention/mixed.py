"""Steps with prompts that run as whole CUDA graphs: the graphs' sizes, and the reasons for none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from ..formats import FORMATS
from ..kernels.cuda import LARGE_HEAD
from .limits import lacks_mixed_graphs, longest_decode
from .passes import GRAPH_TOKENS, most_passes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .passes import PassLimits

TOKENS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 576, 640, 768, GRAPH_TOKENS)
"""Tokens of the graphs. Longer steps wait for the GPU, not for the host."""
REQUESTS = (16, 72, 256)
"""Requests of a graph, by its number of tokens: grids have a block for each request and KV head, needed or not."""
NO_READER = "no kernel reads the prefixes of all layers in the pages"


def mixed_shapes(config: VllmConfig) -> tuple[list[tuple[int, int]], str]:
    """Return tokens and requests of an engine's graphs for steps with prompts, or no graphs and the reason in words."""
    layers = packed_layers(config)
    if reason := _lacks(config, layers):
        return [], reason
    scheduler, longest = config.scheduler_config, longest_decode(config)
    limits = _limits(layers)
    found = set()
    for tokens in TOKENS:
        if longest < tokens <= min(scheduler.max_num_batched_tokens, limits.rows):
            for requests in REQUESTS:
                count = min(requests, tokens, scheduler.max_num_seqs, _most_requests(tokens, longest, limits))
                found.add((tokens, count))
    return sorted(found), "" if found else f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}"


def _most_requests(tokens: int, longest: int, limits: PassLimits) -> int:
    """Return the number of requests for which the kernel has enough passes."""
    fitting = (n for n in range(tokens, 1, -1) if most_passes(tokens, n, longest, limits.tokens) <= limits.total)
    return next(fitting, 1)


def _limits(layers: list[Any]) -> PassLimits:
    """Return the passes that all layers serve, which have as many query tokens."""
    found = [layer.attention.kernels.decode.pass_limits for layer in layers]
    return found[0]._replace(total=min(one.total for one in found), rows=min(one.rows for one in found))


def _lacks(config: VllmConfig, layers: list[Any]) -> str:
    """Return why no step with prompts can be a whole graph, or ""."""
    if lacking := lacks_mixed_graphs(config):
        return lacking
    if len(layers) < sum(hasattr(layer, "impl") for layer in _attention_layers(config)):
        return "attention of some layers is not packed"
    kernels = [layer.attention.kernels for layer in layers if layer.attention is not None]
    lacking = next(filter(None, map(layer_lacks, kernels)), "") if kernels else NO_READER
    if lacking:
        return lacking
    if len({made.decode.pass_limits.tokens for made in kernels}) > 1:
        return "layers differ in their query heads per KV head"
    return "layers share caches" if any(layer.kv_sharing_target_layer_name is not None for layer in layers) else ""


def layer_lacks(kernels: Any) -> str:
    """Return why a layer's steps with prompts are not part of whole graphs, or "". kernels: its `PairKernels`."""
    if kernels.decode is None or kernels.decode.pass_limits is None:
        return NO_READER
    if kernels.codec.key.head_dim == LARGE_HEAD:
        return f"over heads of {LARGE_HEAD} channels long chunks take too many passes"
    return "no FlashAttention serves the prompts" if kernels.prefill is None else ""


def _attention_layers(config: VllmConfig) -> list[Any]:
    return list(get_layers_from_vllm_config(config, AttentionLayerBase).values())


def packed_layers(config: VllmConfig) -> list[Any]:
    """Return the implementations of attention of an engine's packed layers."""
    return [layer.impl for layer in _attention_layers(config) if getattr(layer, "kv_cache_dtype", None) in FORMATS]
