"""vLLM's folder of compiled models: each setting of ours has an entry of its own."""

from __future__ import annotations

from typing import Any

from vllm.engine.arg_utils import EngineArgs

SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "tq4": {"kv_cache_dtype": "tq4"},
    "turboquant25": {"kv_cache_dtype": "turboquant25"},
    "no window": {"kv_cache_dtype": "tq4", "additional_config": {"packed_kv": {"recent_tokens": 0}}},
    "a shorter window": {"kv_cache_dtype": "tq4", "additional_config": {"packed_kv": {"recent_tokens": 32}}},
    "Triton": {"kv_cache_dtype": "tq4", "additional_config": {"packed_kv": {"decode_kernel": "triton"}}},
    "a skipped layer": {
        "kv_cache_dtype": "tq4", "kv_cache_dtype_skip_layers": ["0"],
        "additional_config": {"packed_kv": {"recent_tokens": 0}},
    },
    "float16": {"kv_cache_dtype": "tq4", "dtype": "float16"},
}  # fmt: skip


def test_each_setting_has_a_key_of_its_own(demo_model: str) -> None:
    """The key is vLLM's hash of the configuration; the same setting has the same key again."""
    keys = {}
    for name, options in SETTINGS.items():
        found = {EngineArgs(demo_model, **options).create_engine_config().compute_hash() for _ in range(2)}
        assert len(found) == 1, name
        keys[name] = found.pop()
    assert len(set(keys.values())) == len(keys), keys
