"""What tests of the recent window ask of an engine, and let it have on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import scheduler
from packed_kv.window import size
from packed_kv.window.cache_group import RingSpec
from vllm import LLM
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout


def ring_specs(llm: LLM) -> list[RingSpec]:
    groups = scheduler(llm).kv_cache_config.kv_cache_groups
    return [group.kv_cache_spec for group in groups if isinstance(group.kv_cache_spec, RingSpec)]


def layout(llm: LLM) -> str:
    return llm.llm_engine.vllm_config.cache_config.kv_cache_layout


def pages_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let skipped layers have a recent window beside them on a CPU, too. There is none there, as the CPU's own
    attention does not name the layout; it serves it nevertheless, which tests use."""
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    monkeypatch.setattr(CPUAttentionBackend, "supported_kv_cache_layouts", classmethod(lambda cls: layouts))
    facts = size.engine_facts
    monkeypatch.setattr(size, "engine_facts", lambda config: replace(facts(config), platform="cuda"))
