"""Decode kernels that the plan names, and up to how many new tokens."""

from __future__ import annotations

import pytest
from packed_kv.model.shape import parse
from packed_kv.planning import cache, cards
from packed_kv.planning.plan import Demand, assumptions
from packed_kv.planning.weights import weights
from shape_8b import SHAPE_8B


@pytest.mark.parametrize(
    ("gpu", "heads", "ranks", "change", "said"),
    [
        ("H200", 32, 1, {}, "4 query heads per KV head; the CUDA kernel takes steps of up to 64 new tokens"),
        ("L4", 32, 1, {}, "4 query heads per KV head; the Triton kernel takes steps of up to 16 new tokens"),
        ("H200", 128, 2, {}, "16 query heads per KV head; the CUDA kernel takes steps of up to 16 new tokens"),
        # Of 64 heads and 8 KV heads on 16 ranks, a rank has 4 and 1.
        ("A100", 64, 16, {}, "4 query heads per KV head; the Triton kernel takes steps of up to 16 new tokens"),
        ("H100", 32, 1, {"head_dim": 96}, "the Triton kernel"),
        ("H100", 32, 1, {"model_type": "gemma2", "sliding_window": 512}, "the Triton kernel"),
        ("H100", 1024, 1, {}, "128 query heads per KV head; the Triton kernel takes steps of up to 1 new tokens"),
    ],
)
def test_the_plan_names_the_kernel_of_decodes(gpu: str, heads: int, ranks: int, change: dict, said: str) -> None:
    shape = parse({**SHAPE_8B, "num_attention_heads": heads, **change}, "8B", ranks)
    demand = Demand(shape, cache.Serving(8192), weights(shape, None, None), cards.find(gpu), 20 << 30)
    (line,) = [line for line in assumptions(demand, []) if line.startswith("decodes of packed pages")]
    assert said in line
