"""A result does not depend on how the scheduler cut, batched, cached or preempted the request.

Activations are fp32. Matrix products are done in float64 and rounded to fp32: a GEMM of 1 row and one of 88 rows round
a row differently, by an ulp, now and then an ulp moves a value over a code's threshold, and a 2-bit code that flips
in layer 1 has changed every later layer. That is vLLM's arithmetic, not our paging; without it results must be equal.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import exact_products
import pytest
import torch
from harness import count_preemptions, engine, scheduler
from packed_kv.model.rope import Rope
from vllm import LLM, SamplingParams

TEXT = topics["assignment"] + topics["class"] + topics["comparisons"]
HEAD_DIM = 128
CENTRED = ("tq4", "turboquant25")
"""Served with means by position and scales: each token must find its own mean, however the request was cut."""
TRANSFORMS = {
    "key_mean": torch.linspace(-2, 2, HEAD_DIM),
    "key_scale": torch.logspace(1, -1, HEAD_DIM, base=2),
    "key_rope": Rope(tuple(10000.0 ** (-pair / 64) for pair in range(64))),
    "key_first_mean": torch.linspace(1, -3, HEAD_DIM),
    "value_scale": torch.logspace(-1, 1, HEAD_DIM, base=2),
}
SAMPLING = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def prompts(llm: LLM) -> list[dict]:
    """Seven prompts of ragged lengths, 210 to 630 tokens; all but one share a prefix of 200."""
    ids = llm.get_tokenizer().encode(TEXT)
    shared, rest = ids[:200], ids[200:]
    lengths = (10, 233, 311, 64, 430, 129)
    requests = [shared + rest[97 * i : 97 * i + length] for i, length in enumerate(lengths)]
    return [{"prompt_token_ids": ids} for ids in (*requests, rest[1000:1300])]


CASES = [("tq4", 0), ("turboquant25", 0), ("planarquant3", 0), ("tq4", 64)]
"""(dtype, recent tokens): one width and two, each with means by position; and codes alone. What the other dtypes write
and read, the tests of codecs and kernels hold; the scheduler sees only how large their pages are."""


@pytest.mark.parametrize(("name", "recent_tokens"), CASES)
def test_batched_chunked_cached_preempted_equals_alone(
    name: str, recent_tokens: int, demo_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a recent window: without the prefix cache, as tokens before a hit are in no ring."""
    exact_products.install(monkeypatch, **(TRANSFORMS if name in CENTRED else {}))
    # 48 blocks of 32 tokens hold two thirds of what the seven requests need at once. Rings take 4 to 6 blocks each.
    options = {"num_gpu_blocks_override": 48 + (30 if recent_tokens else 0), "enable_prefix_caching": not recent_tokens}
    with engine(
        demo_model, name, dtype="float32", block_size=32, max_model_len=1024, recent_tokens=recent_tokens,
        scheduler_reserve_full_isl=False, **options,
    ) as llm:  # fmt: skip
        requests = prompts(llm)
        alone = []
        for request in requests:
            llm.reset_prefix_cache()
            (result,) = llm.generate(request, SAMPLING, use_tqdm=False)
            assert not result.num_cached_tokens
            alone.append(result.outputs[0].token_ids)

        llm.reset_prefix_cache()
        preempted = count_preemptions(llm, monkeypatch)
        monkeypatch.setattr(scheduler(llm), "max_num_scheduled_tokens", 88)
        together = llm.generate(requests, SAMPLING, use_tqdm=False)
        assert preempted, "nothing was preempted: the cache is too large for this test"
        if not recent_tokens:
            assert sum(result.num_cached_tokens for result in together) >= 200, "no prefix was cached"
        assert [result.outputs[0].token_ids for result in together] == alone
        pool = scheduler(llm).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are lost"
