"""`packed-kv plan`'s KV tokens are vLLM's own, for layers of each kind, skipped and shared ones, and two ranks."""

from __future__ import annotations

import plan_tokens
import pytest
import window_memory
from packed_kv.formats import FORMATS
from packed_kv.model_shape import parse
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
