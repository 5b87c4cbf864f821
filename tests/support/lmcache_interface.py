"""LMCache 0.5.6 for machines without that package: its interface as published, as far as `packed_kv.lmcache` uses it.

`install` leaves a real package alone.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class Serializer:
    """serialize(src, dst, key) -> bytes written; estimate_serialized_size(layout_desc) -> bytes to allocate."""


class Deserializer:
    """deserialize(src, dst, key)."""


class AsyncSerdeProcessor:
    """Runs a serializer and a deserializer; here only keeps them, under the names that LMCache's has."""

    def __init__(self, serializer: Serializer, deserializer: Deserializer, max_workers: int = 1) -> None:
        self._serializer, self._deserializer, self.max_workers = serializer, deserializer, max_workers

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        return self._serializer.estimate_serialized_size(layout_desc)

    def close(self) -> None: ...


REGISTRY: dict[str, Any] = {}


def register_serde_factory(name: str, factory: Any) -> None:
    if name in REGISTRY:
        raise ValueError(f"Serde type already registered: {name!r}")
    REGISTRY[name] = factory


def install() -> None:
    """Make the modules importable, if LMCache is not."""
    if importlib.util.find_spec("lmcache") is not None:
        return
    serde = dict(
        AsyncSerdeProcessor=AsyncSerdeProcessor, Serializer=Serializer, Deserializer=Deserializer,
        SerdeProcessor=AsyncSerdeProcessor, register_serde_factory=register_serde_factory,
    )  # fmt: skip
    for name, content in {
        "lmcache": {}, "lmcache.v1": {}, "lmcache.v1.distributed": {}, "lmcache.v1.distributed.serde": serde,
        "lmcache.v1.distributed.api": dict(MemoryLayoutDesc=object, ObjectKey=object),
        "lmcache.v1.memory_management": dict(MemoryObj=object),
    }.items():  # fmt: skip
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
