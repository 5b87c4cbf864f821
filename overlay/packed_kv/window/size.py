"""How many of a request's newest tokens an engine keeps at 8 bits, and why it keeps none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..layout import RECENT_TOKENS
from ..settings.options import OptionError, read_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.packed_kv")

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
    draft_dtype = speculative and speculative.kv_cache_dtype
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
