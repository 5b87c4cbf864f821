"""Questions of tests of the recent window to an engine."""

from __future__ import annotations

from harness import scheduler
from packed_kv.window.cache_group import RingSpec
from vllm import LLM


def ring_specs(llm: LLM) -> list[RingSpec]:
    groups = scheduler(llm).kv_cache_config.kv_cache_groups
    return [group.kv_cache_spec for group in groups if isinstance(group.kv_cache_spec, RingSpec)]


def layout(llm: LLM) -> str:
    return llm.llm_engine.vllm_config.cache_config.kv_cache_layout
