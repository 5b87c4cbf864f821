"""`packed-kv plan`'s KV tokens are vLLM's own, for layers of each kind, skipped and shared ones, and two ranks."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import plan_tokens
import pytest
import torch
from packed_kv.formats import FORMATS, Format
from packed_kv.model.shape import parse
from packed_kv.planning.cache import Serving, capacity
from packed_kv.window.cache_group import RingSpec, ring_spec
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

SHAPE_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
COUNTED = [name for name, case in plan_tokens.CASES.items() if case.on_gpu or name in plan_tokens.ONE_OF_A_KIND]


@pytest.mark.parametrize("name", COUNTED)
def test_kv_tokens_are_those_that_vllm_counts(name: str) -> None:
    """vLLM builds the layers and plans their cache, without a start; `plan_tokens.py --start` starts engines."""
    case, dtypes = plan_tokens.CASES[name], ("auto", "tq4")
    for dtype, (tokens, in_flight) in zip(dtypes, plan_tokens.counted(case, dtypes), strict=True):
        assert plan_tokens.planned(case, dtype, in_flight) == pytest.approx(tokens, rel=0.02), dtype


class WithoutPrefixCache(plan_tokens.Case):
    """A case without a prefix cache, which vLLM's CPU platform turns off for latents."""

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"enable_prefix_caching": False}


def test_kv_tokens_of_latents_beside_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-Linear's own layers, which need CUDA to run, and not to be laid out. (`auto` is not served on a CPU.)"""
    monkeypatch.setitem(sys.modules, "numba", None)  # vLLM 0.32 starts no engine in a process that has loaded it
    from vllm.models.kimi_k3.nvidia import model

    monkeypatch.setattr(model, "maybe_init_gemm_rs_ar", lambda *_layers, **_options: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    case, dtypes = WithoutPrefixCache("KimiLinearForCausalLM"), ("tq4", "turboquant25")
    parsed = parse(case.config, "Kimi-Linear", recurrent_dtype=plan_tokens.RECURRENT)
    for dtype, (tokens, in_flight) in zip(dtypes, plan_tokens.counted(case, dtypes), strict=True):
        serving = Serving(
            plan_tokens.CONTEXT, in_flight_tokens=in_flight, block_size=plan_tokens.BLOCK, keeps_prefixes=False
        )
        assert capacity(parsed, dtype, serving, plan_tokens.MEMORY).tokens == tokens, dtype


def specs_of_8b(fmt: Format, skipped: int) -> dict[str, KVCacheSpec]:
    """The cache specs of layers and of their rings, by name. The first `skipped` layers stay in bf16, and blocks are
    as long as vLLM makes them beside these (`_align_heterogeneous_kv_block_size`)."""
    dense = FullAttentionSpec(block_size=1, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    packed = replace(dense, dtype=torch.uint8, state_content_bytes=fmt.slot_bytes(128))
    block_size = 16 * math.ceil(dense.page_size_bytes / packed.page_size_bytes)
    dense, packed = (replace(spec, block_size=block_size) for spec in (dense, packed))
    layers: dict[str, KVCacheSpec] = {f"layers.{i}": dense if i < skipped else packed for i in range(36)}
    ring = ring_spec(packed, 64, 1, one_size=False, side_by_side=True)
    return layers | {f"layers.{i}.recent": ring for i in range(skipped, 36)}


def bytes_of_request(layers: dict[str, KVCacheSpec], context: int) -> int:
    """Bytes of the pool that a request takes, by vLLM's own planner: whole blocks, a ring buffer's too."""
    planner: Any = kv_cache_utils
    if not hasattr(planner, "get_kv_cache_groups"):  # 0.33 and later
        planner = importlib.import_module("vllm.v1.core.kv_cache_planning")
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC, mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    groups = planner.get_kv_cache_groups(config, layers)
    blocks = 0
    for group in groups:
        spec: Any = group.kv_cache_spec
        spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        if isinstance(spec, RingSpec):
            blocks += math.ceil(spec.ring_blocks / spec.ring_blocks_a_block)
        else:
            blocks += math.ceil(context / spec.block_size)
    return blocks * planner._pool_bytes_per_block(config, groups)


@pytest.mark.parametrize("dtype", ["tq4", "turboquant25"])
@pytest.mark.parametrize("skipped", [2, 4])
def test_rings_beside_skipped_layers_of_the_8b_shape(dtype: str, skipped: int) -> None:
    """On a GPU, at a context where rings cost 7 to 12 % of the tokens (docs/attention.md)."""
    context, memory = 2048, 20 << 30
    request = bytes_of_request(specs_of_8b(FORMATS[dtype], skipped), context)
    serving = Serving(context, skip_layers=frozenset(range(36 - skipped, 36)))
    planned = capacity(parse(SHAPE_8B, "8B"), dtype, serving, memory)
    assert planned.tokens == pytest.approx(memory / request * context, rel=0.002)
