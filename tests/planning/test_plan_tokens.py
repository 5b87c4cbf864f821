"""`packed-kv plan`'s KV tokens are vLLM's own, for layers of each kind, skipped and shared ones, and two ranks."""

from __future__ import annotations

import sys
from typing import Any

import plan_tokens
import pytest
import torch
import window_memory
from packed_kv.formats import FORMATS
from packed_kv.model.shape import parse
from packed_kv.planning.cache import Serving, capacity
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


@pytest.mark.parametrize("dtype", ["tq4", "turboquant25"])
@pytest.mark.parametrize("skipped", [2, 4])
def test_rings_beside_skipped_layers_of_the_8b_shape(dtype: str, skipped: int) -> None:
    """On a GPU, at a context where rings cost 7 to 12 % of the tokens (docs/attention.md)."""
    context, memory = 2048, 20 << 30
    layers = window_memory.specs(window_memory.Model(36, 8, 128, skipped=skipped), FORMATS[dtype], window=64)
    (request,) = window_memory.bytes_of_request(layers, KVCacheLayout.BLHNC, (context,), counts_whole=True)
    serving = Serving(context, skip_layers=frozenset(range(36 - skipped, 36)))
    planned = capacity(parse(SHAPE_8B, "8B"), dtype, serving, memory)
    assert planned.tokens == pytest.approx(memory / request * context, rel=0.002)
