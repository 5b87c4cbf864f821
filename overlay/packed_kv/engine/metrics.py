"""Our lines in vLLM's `/metrics`: the packed cache, and the tokens of each route.

vLLM makes a `PackedStats` for each engine in the process that serves (entry point `vllm.stat_logger_plugins`) and hands
it each step's statistics, which it has made anyway. So the device is not asked, and layers do no extra work.
docs/commands.md has the metrics, docs/lab/commands.md where vLLM calls this.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from ..formats import FORMATS
from ..model.config_fields import BadInput
from ..model.shape import DENSE, FP8, bytes_per_token, parse
from ..settings.options import KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..formats import Format
    from ..kernels.served import Latents, Pairs, Served

logger = init_logger("vllm.packed_kv")

INFO = ("dtype", "bytes_per_token", "ratio", "recent_tokens", "calibration", "fingerprint")
ENGINE = ("model_name", "engine")
DECODE, PREFILL, PYTORCH, PREFIX_CACHE = "decode_kernel", "prefill", "pytorch", "prefix_cache"
"""Routes of docs/attention.md, as planned when the engine starts; tokens found in the prefix cache take no route."""


class Metrics(NamedTuple):
    """Prometheus' objects. A process can register them only once."""

    info: Gauge
    cache_tokens: Gauge
    tokens: Counter
    requests: Counter


@functools.cache
def metrics() -> Metrics:
    """Registered when first asked for, so that a server without a packed cache has none of them."""
    newest: dict[str, Any] = {"multiprocess_mode": "mostrecent"}  # as vLLM's own, with several API servers
    return Metrics(
        Gauge("packed_kv_info", "The packed KV cache of an engine; its value is 1.", (*ENGINE, *INFO), **newest),
        Gauge("packed_kv_cache_tokens", "Tokens that the KV cache holds, by vLLM's count.", ENGINE, **newest),
        Counter(
            "packed_kv_tokens",
            "Tokens, computed or found, by planned route.",
            (*ENGINE, "route"),
        ),
        Counter("packed_kv_requests", "Finished requests, by planned route.", (*ENGINE, "route")),
    )


class PackedStats(StatLoggerBase):
    """Does nothing for an engine whose KV cache is not packed."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.config = vllm_config
        self.fmt = FORMATS.get(vllm_config.cache_config.cache_dtype)
        if self.fmt is None:
            if engine_index == 0:
                _warn_of_options(vllm_config)
            return
        self.engine = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self.prefill, self.decode = routes(vllm_config)
        names = dict.fromkeys((self.prefill, self.decode, PREFIX_CACHE))
        self.tokens = {name: metrics().tokens.labels(*self.engine, name) for name in names}
        self.requests = {name: metrics().requests.labels(*self.engine, name) for name in names}

    def log_engine_initialized(self) -> None:
        """vLLM calls it when the engine has told this process how large its cache is."""
        if self.fmt is None:
            return
        labels = info(self.config, self.fmt)
        metrics().info.labels(*self.engine, *(labels[name] for name in INFO)).set(1)
        metrics().cache_tokens.labels(*self.engine).set(self.config.cache_config.kv_cache_size_tokens or 0)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Count a step. A token counts for the route planned for its prompt or its step; a new request's first token
        counts for the prefill."""
        if self.fmt is None or iteration_stats is None:
            return
        prompts = iteration_stats.prompt_token_stats
        self.tokens[self.prefill].inc(prompts.computed)
        self.tokens[PREFIX_CACHE].inc(prompts.cached_tokens)
        begun = len(iteration_stats.time_to_first_tokens_iter)
        self.tokens[self.decode].inc(max(0, iteration_stats.num_generation_tokens - begun))
        for finished in iteration_stats.finished_requests:
            taken = {self.prefill}
            if finished.num_generation_tokens > 1:
                taken.add(self.decode)
            if finished.num_cached_tokens:
                taken.add(PREFIX_CACHE)
            for route in taken:
                self.requests[route].inc()


def _warn_of_options(config: VllmConfig) -> None:
    """Log that options are given to an engine in which nothing is packed; packed-kv meets such an engine only here."""
    draft = config.speculative_config.kv_cache_dtype if config.speculative_config else None
    if draft not in FORMATS and isinstance(config.additional_config, dict) and KEY in config.additional_config:
        dtype = config.cache_config.cache_dtype
        logger.warning(
            "--additional-config: %s has no effect with --kv-cache-dtype %s; use one of %s",
            KEY,
            dtype,
            ", ".join(FORMATS),
        )


def routes(config: VllmConfig) -> tuple[str, str]:
    """The routes planned for prefills and decodes by an engine's configuration.

    Three cases are counted for the planned route although they run on another: heads without FlashAttention, whose
    prefill runs in PyTorch; prefill chunks as short as a decode, which the decode kernel serves; and layers that the
    CUDA kernel does not serve on a Hopper GPU but that the configuration does not show, such as sliding ones.
    """
    from ..attention.limits import longest_decode
    from ..kernels.served import PYTORCH as REFERENCE

    served = planned_kernel(config)
    if served.kernel == REFERENCE:
        return PYTORCH, PYTORCH
    return PREFILL, DECODE if longest_decode(config) <= served.longest else PREFILL


def planned_kernel(config: VllmConfig) -> Served:
    """Return the kernel of an engine's decodes, as far as its configuration tells."""
    from ..attention.limits import engine_of
    from ..kernels.served import who_serves

    return who_serves(engine_of(config), _asked(config))


def _asked(config: VllmConfig) -> Pairs | Latents:
    """Return the questions to `who_serves` about the model's layers, as far as its configuration answers them."""
    from ..kernels.cuda import LATENT
    from ..kernels.served import Latents, Pairs

    fmt, model = FORMATS[config.cache_config.cache_dtype], config.model_config
    heads = model.get_num_attention_heads(config.parallel_config)
    if not model.use_mla:
        return Pairs(fmt, model.get_head_size(), heads // model.get_num_kv_heads(config.parallel_config))
    text = model.hf_text_config
    sizes = getattr(text, "kv_lora_rank", LATENT[0]), getattr(text, "qk_rope_head_dim", LATENT[1])
    return Latents(fmt, *sizes, heads, are_picked=hasattr(text, "index_topk"))


def info(config: VllmConfig, fmt: Format) -> dict[str, str]:
    """Labels of `packed_kv_info`. Bytes are of one rank; "unknown" for a model that `model/shape.py` cannot read, and
    for a fingerprint that needs a calibration file which this process does not have."""
    from ..settings.calibration import model_folder
    from ..settings.options import AUTO, read_options
    from ..settings.self_calibration import settled_file
    from ..sharing.fingerprint import fingerprint
    from ..window.size import find_window

    stored, dense = stored_and_dense(config, fmt)
    options = read_options(config.additional_config)
    path = options.calibration
    if path is not None and str(path) == AUTO:  # only the engine's process knows the file that "auto" stands for
        path = settled_file(config)
        config = copy.copy(config)
        config.additional_config = {
            **config.additional_config, "packed_kv": {**config.additional_config["packed_kv"], "calibration": str(path)}
        }  # fmt: skip
    if path is None:
        from ..calibration_file import FILE_NAME

        path = model_folder(config.model_config.model, config.model_config.revision) / FILE_NAME
    return {
        "dtype": fmt.name,
        "bytes_per_token": str(stored or "unknown"),
        "ratio": f"{dense / stored:.2f}" if stored else "unknown",
        "recent_tokens": str(find_window(config)[0]),
        "calibration": str(path) if path.is_file() else "none",
        "fingerprint": fingerprint(config, fmt) if path.is_file() or options.calibration is None else "unknown",
    }


def stored_and_dense(config: VllmConfig, fmt: Format) -> tuple[int, int]:
    """KV bytes of a token on one rank, as stored and in 16 bits: of the first stage of a pipeline, without a draft's
    layers. 0 and 0 if the model's config cannot be read."""
    from ..settings.facts import auto_cache
    from ..settings.options import read_options

    parallel, options = config.parallel_config, read_options(config.additional_config)
    try:
        model = parse(config.model_config.hf_config.to_dict(), config.model_config.model, parallel.tensor_parallel_size)
    except BadInput:
        return 0, 0
    if model.has_latents:
        model = model.with_rope_bits(options.latent_rope_bits)
    layers = model.layers
    if parallel.pipeline_parallel_size > 1:
        first, end = config.model_config.get_layers_start_end_indices(parallel)
        layers = tuple(layer for layer in layers if first <= layer.number % model.config["num_hidden_layers"] < end)
    skipped, unpacked = set(config.cache_config.kv_cache_dtype_skip_layers), FP8 if auto_cache(config) else DENSE
    dtypes = [unpacked if skipped & {str(layer.number), f"{layer.kind}_window"} else fmt.name for layer in layers]
    stored = bytes_per_token(zip(layers, dtypes, strict=True), config.model_config.dtype.itemsize)
    return stored, bytes_per_token((layer, DENSE) for layer in layers)
