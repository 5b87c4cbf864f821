"""vLLM 0.28 seeds block hashes at random unless it is told a seed; later versions have a constant one."""

import pytest
from vllm.v1.core import kv_cache_utils


@pytest.fixture(autouse=True)
def shared_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        monkeypatch.setenv("PYTHONHASHSEED", "0")
