"""Set-up of an engine in a process of its own before it starts, in tests of transfers: `prepare` of a `Peer`."""

from __future__ import annotations

from typing import Any

import coverage_engine
from packed_kv.window.cache_group import RingManager
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator


def behind_a_hit_as_behind_a_transfer() -> None:
    """Let a request behind a hit of its own prefix cache read what it would behind a transfer of the same pages. NIXL
    brings the prompt's last token, too, which is computed again, so the window begins behind it. And with drafts, vLLM
    computes the last block of a hit again."""
    add, begin = RingManager.add_local_computed_blocks, KVCacheCoordinator.__init__

    def add_last_token(self: RingManager, request_id: str, new: Any, local: int, external: int) -> None:
        add(self, request_id, new, local + 1 if local else 0, external)

    def begin_without_drop(self: KVCacheCoordinator, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.eagle_group_ids = set()

    RingManager.add_local_computed_blocks = add_last_token
    KVCacheCoordinator.__init__ = begin_without_drop


class RegisterHybrid:
    """Make an architecture of `coverage_models` known, with the weights of its engine tests."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def __call__(self) -> None:
        DummyModelLoader.load_weights = coverage_engine.set_weights
        coverage_engine.register(self.architecture)
