"""A result does not depend on how the scheduler cut, batched, cached or preempted the request."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
from harness import engine, scheduler
from vllm import LLM, SamplingParams

from packed_kv.formats import FORMATS

TEXT = topics["assignment"] + topics["class"] + topics["comparisons"]
SAMPLING = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def prompts(llm: LLM) -> list[dict]:
    """Seven prompts of ragged lengths, 210 to 930 tokens; all but one share a prefix of 200."""
    ids = llm.get_tokenizer().encode(TEXT)
    shared, rest = ids[:200], ids[200:]
    lengths = (10, 333, 511, 64, 730, 129)
    requests = [shared + rest[97 * i : 97 * i + length] for i, length in enumerate(lengths)]
    return [{"prompt_token_ids": ids} for ids in (*requests, rest[1000:1500])]


@pytest.mark.parametrize("name", FORMATS)
def test_batched_chunked_cached_preempted_equals_alone(
    name: str, demo_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 70 blocks of 32 tokens hold a third of what the seven requests need at once.
    with engine(demo_model, name, dtype="float32", block_size=32, num_gpu_blocks_override=70) as llm:
        requests = prompts(llm)
        alone = []
        for request in requests:
            llm.reset_prefix_cache()
            (result,) = llm.generate(request, SAMPLING, use_tqdm=False)
            assert result.num_cached_tokens == 0
            alone.append(result.outputs[0].token_ids)

        llm.reset_prefix_cache()
        preempted = count_preemptions(llm, monkeypatch)
        monkeypatch.setattr(scheduler(llm), "max_num_scheduled_tokens", 88)
        together = llm.generate(requests, SAMPLING, use_tqdm=False)
        assert preempted, "nothing was preempted: the cache is too large for this test"
        assert sum(result.num_cached_tokens for result in together) >= 200, "no prefix was cached"
        assert [result.outputs[0].token_ids for result in together] == alone


def count_preemptions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that the ids of preempted requests are added to."""
    preempted: list[str] = []
    preempt = scheduler(llm)._preempt_request

    def record(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler(llm), "_preempt_request", record)
    return preempted
