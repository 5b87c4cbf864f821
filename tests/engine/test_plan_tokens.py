"""`packed-kv plan`'s KV tokens are vLLM's own, for layers of each kind, skipped and shared ones, and two ranks."""

from __future__ import annotations

import check_plan
import pytest


@pytest.mark.parametrize("name", check_plan.ONE_OF_A_KIND)
def test_kv_tokens_are_those_that_vllm_counts(name: str) -> None:
    """vLLM builds the layers and plans their cache, without a start; scripts/check_plan.py --start starts engines."""
    case, dtypes = check_plan.CASES[name], ("auto", "tq4")
    for dtype, (tokens, in_flight) in zip(dtypes, check_plan.counted(case, dtypes), strict=True):
        assert check_plan.planned(case, dtype, in_flight) == pytest.approx(tokens, rel=0.02), dtype
