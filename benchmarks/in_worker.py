"""Functions that benchmarks run in an engine's workers, by `collective_rpc`: layers, pages, states and launches."""

from __future__ import annotations

import time
from typing import Any

import torch


def attention_layers(worker: Any) -> list[Any]:
    """In a worker: the layers that attend, without those that only keep recent tokens."""
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "kv_cache_dtype")]


def paged_layers(worker: Any) -> list[Any]:
    """In a worker: the layers that attend, and the caches of their indexers, which have pages of the same blocks."""
    attending = attention_layers(worker)
    indexers = (getattr(layer, "indexer", None) for layer in attending)
    return [*attending, *(indexer.k_cache for indexer in indexers if indexer is not None)]


def rows_of(ids: list[int], a_block: int, device: torch.device) -> torch.Tensor:
    """Rows of blocks in a cache that has `a_block` of them a block."""
    return (torch.tensor(ids, device=device)[:, None] * a_block + torch.arange(a_block, device=device)).flatten()


def keep_pages(worker: Any, ids: list[int], blocks: int) -> None:
    """In a worker: keep the pages of the blocks `ids`, of `blocks`, for `spread_pages`."""
    worker.kept_pages = []
    for cache in (layer.kv_cache for layer in paged_layers(worker)):
        pages = cache.view(torch.uint8)
        a_block = len(pages) // blocks  # vLLM may cut a block into several of the kernel
        worker.kept_pages.append((pages, a_block, pages[rows_of(ids, a_block, pages.device)]))


def spread_pages(worker: Any) -> None:
    """In a worker: copy the pages that are kept over all others."""
    for pages, _, source in worker.kept_pages:
        for first in range(0, len(pages), len(source)):
            target = pages[first : first + len(source)]
            target.copy_(source[: len(target)])


def spread_over(worker: Any, ids: list[int]) -> None:
    """In a worker: copy the pages that are kept over those of the blocks `ids`."""
    for pages, a_block, source in worker.kept_pages:
        rows = rows_of(ids, a_block, pages.device)
        for part in rows.split(len(source)):
            pages[part] = source[: len(part)]


def clear_states(worker: Any) -> None:
    """In a worker: fill the states of all blocks, and so the pages in their memory, with zeros."""
    for layer in worker.model_runner.vllm_config.compilation_config.static_forward_context.values():
        if isinstance(cache := getattr(layer, "kv_cache", None), (list, tuple)):
            for state in cache:
                state.zero_()


def cache_bytes(worker: Any) -> int:
    """In a worker: bytes of its KV cache."""
    return sum(layer.kv_cache.nbytes for layer in paged_layers(worker))


def attention_backends(worker: Any) -> str:
    """In a worker: see `Engine.attention`."""
    names = set()
    for layer in attention_layers(worker):
        version = getattr(layer.impl, "vllm_flash_attn_version", None) or getattr(layer.impl, "fa_version", None)
        names.add(layer.attn_backend.get_name() + (f" (FlashAttention {version})" if version else ""))
    return " + ".join(sorted(names))


def launch_seconds(worker: Any) -> list[float]:
    """In a worker: since the last call, the seconds in which each step's model was launched, waiting for nothing. The
    first call begins to keep them."""
    if not hasattr(worker, "launch_seconds"):
        execute = worker.model_runner.execute_model

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = execute(*args, **options)
            worker.launch_seconds.append(time.perf_counter() - started)
            return result

        worker.model_runner.execute_model = timed
        worker.launch_seconds = []
    seconds, worker.launch_seconds = worker.launch_seconds, []
    return seconds
