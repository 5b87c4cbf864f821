"""vLLM's engine in this process, with access to its scheduler and model for measurements and tests."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from packed_kv.commands.arguments import size

if TYPE_CHECKING:
    import torch
    from vllm import LLM

Result = TypeVar("Result")
CHECKOUT = Path(__file__).resolve().parents[2]
"""The repository's root, if this file lies in a checkout; the wheel has no models."""
DEMO_MODEL = CHECKOUT / "models" / "demo-7m"
KV_CACHE_BYTES = 64 << 20
atexit.register(gc.unfreeze)  # else nanobind lists what `engine` froze as leaked


def prepare_environment(small_model: bool) -> None:
    """Set environment variables for a quiet vLLM in this process, before it is imported. Variables already set stay.

    With `small_model`, one CPU thread and no network: the demo model gains nothing from a second thread and loses much
    beside another program.
    """
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # tokens are greedy, and the package may be missing
    }
    if small_model:
        defaults |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def apart(function: Callable[..., Result], *arguments: object) -> Result:
    """Call `function` in a new process, whose end frees an engine's memory. Raises what it raises."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@contextlib.contextmanager
def engine(model: str, kv_cache_dtype: str, **options: Any) -> Iterator[LLM]:
    """An in-process, eager engine with a small cache; `options` override any argument of `LLM`."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "gpu_memory_utilization": 0.1,  # only this much has to be free; the size of the cache is given
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
        "seed": 0,
    }
    with _collect_only_what_is_new():
        llm = LLM(model, kv_cache_dtype=kv_cache_dtype, **{**defaults, **options})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _collect_only_what_is_new() -> Iterator[None]:
    """Keep what exists now out of garbage collections, also where vLLM unfreezes it.

    An engine's start and end collect seven times, 0.4 s each over all that is imported.
    """
    gc.collect()  # earlier engines that a caller still held when they ended
    gc.freeze()
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):
        yield


def scheduler(llm: LLM) -> Any:
    """The scheduler of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def model_runner(llm: LLM) -> Any:
    """The model runner of an in-process engine."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def model_of(llm: LLM) -> torch.nn.Module:
    """The model of an in-process engine."""
    return model_runner(llm).get_model()


def attention_layers(llm: LLM) -> list[Any]:
    """The attention modules of an in-process engine, each with its `impl` and its `kv_cache`."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "impl")]


def kv_tokens(llm: LLM) -> int:
    """KV tokens that the cache holds, by the engine's count."""
    return llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens


def bytes_per_token(llm: LLM) -> float:
    """KV bytes of a token in all layers, by the engine's page sizes, without the recent window."""
    return sum(spec.page_size_bytes / spec.block_size for spec in _layer_specs(llm, window=False))


def bytes_per_request(llm: LLM) -> int:
    """KV bytes of the recent window of a request in all layers; they do not grow with its length."""
    config = llm.llm_engine.vllm_config
    return sum(spec.max_memory_usage_bytes(config) for spec in _layer_specs(llm, window=True))


def _layer_specs(llm: LLM, window: bool) -> Iterator[Any]:
    """The KV-cache spec of each layer: of layers that grow with a request, or of rings, which take no part in the
    prefix cache. The specs are the runner's: the scheduler has the first layer's spec for a whole group, also
    where dtypes skip layers. It names layers, too, that read another's cache and have none."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for group in model_runner(llm).kv_cache_config.kv_cache_groups:
        if getattr(group.kv_cache_spec, "prefix_cacheable", True) != window:
            one = dict.fromkeys(group.layer_names, group.kv_cache_spec)
            for name, spec in getattr(group.kv_cache_spec, "kv_cache_specs", one).items():
                if getattr(layers.get(name), "kv_sharing_target_layer_name", None) is None:
                    yield spec


def memory(text: str) -> int:
    """Bytes of `96M`, `4G` or a plain number."""
    return int(size(text))
