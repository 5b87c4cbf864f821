"""The number of a request's newest tokens that an engine keeps at 8 bits, and the reason for none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from ..layout import RECENT_TOKENS
from ..refusals.table import no_window
from ..settings.facts import engine_facts
from ..settings.options import OptionError, read_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.packed_kv")


def log_window(config: VllmConfig) -> None:
    """Log how many tokens the window has, or why there is none, once per engine: `before_engine` calls this. Raises
    OptionError where a window was asked for but is not possible."""
    tokens, reason = find_window(config)
    if reason:
        logger.info("KV cache: no recent window with %s", reason)
    elif tokens:
        logger.info("KV cache: the last %d tokens of a request are also kept at 8 bits", tokens)


def find_window(config: VllmConfig) -> tuple[int, str]:
    """Tokens of the recent window (0: none), and the reason if there is none although nobody asked for 0, or "". Raises
    OptionError."""
    asked = read_options(config.additional_config).recent_tokens
    if asked == 0 or config.model_config.runner_type == "draft":
        return 0, ""
    if reason := no_window(engine_facts(config)):
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
