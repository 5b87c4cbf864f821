"""Models with state layers: pages are packed, and neither batches nor the prefix cache change a result.

On the CPU, vLLM serves Mamba 2 in fp32, so that tokens have to be equal. (Mamba 1 does not run there, gated delta nets
do in bf16 alone, and short convolutions of a batch differ from those of a request with `auto`, too.) On a GPU all run
in bf16, in graphs, and results may differ as far as rounding makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from coverage_models import MODELS
from harness import HYBRIDS, Start, scheduler
from packed_kv.formats import FORMATS
from vllm import LLM, SamplingParams
from vllm.v1.kv_cache_interface import MambaSpec

ON_GPU = torch.cuda.is_available()
ON_CPU = "GraniteMoeHybridForCausalLM"
UNIT, VOCABULARY = 16, 256
IDS = torch.randint(3, 250, (900,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [IDS[:100] + IDS[first : first + length] for first, length in ((200, 10), (300, 130), (500, 201))]
QUESTION = IDS[800:850]
DRAFTED = {
    "Qwen3NextForCausalLM": {"num_nextn_predict_layers": 1},
    "NemotronHForCausalLM": {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"},
}
"""Hybrids that draft for themselves, by MTP, and what their configurations then say."""
SAMPLING = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False, logprobs=VOCABULARY)


@dataclass
class Answer:
    """Greedy tokens, probabilities [tokens, vocabulary] of what could be said instead, tokens found in the cache."""

    tokens: list[int]
    probabilities: torch.Tensor
    cached: int

    def distance(self, other: Answer) -> float:
        """Mean total variation of the distributions that have the same tokens before them."""
        equal = [i for i in range(len(self.tokens)) if self.tokens[:i] == other.tokens[:i]]
        return (self.probabilities - other.probabilities)[equal].abs().sum(-1).mean().item() / 2


def ask(llm: LLM, prompts: list[list[int]]) -> list[Answer]:
    """Answers to prompts that run together."""
    answers = []
    for result in llm.generate([{"prompt_token_ids": ids} for ids in prompts], SAMPLING, use_tqdm=False):
        (output,) = result.outputs
        logprobs = [[step[token].logprob for token in range(VOCABULARY)] for step in output.logprobs]
        answers.append(Answer(list(output.token_ids), torch.tensor(logprobs).exp(), result.num_cached_tokens))
    return answers


def ask_alone(llm: LLM, prompts: list[list[int]]) -> list[Answer]:
    """Answers to prompts that run one after the other, nothing of them in the cache."""
    answers = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        answers += ask(llm, [prompt])
    llm.reset_prefix_cache()
    return answers


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_batches_and_prefixes_change_no_answer(architecture: str, start: Start) -> None:
    """With `--mamba-cache-mode align --prefix-match-unit 16`: a second turn finds all of the first but its answer."""
    if not ON_GPU and architecture != ON_CPU:
        pytest.skip("vLLM's CPU backend does not serve it in fp32")
    options = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "prefix_match_unit": UNIT}
    options |= {"max_logprobs": VOCABULARY, "dtype": "bfloat16" if ON_GPU else "float32", "max_num_seqs": 4}
    with start(architecture, "tq4", **options) as llm:
        check_pages(llm)
        alone = ask_alone(llm, PROMPTS)
        together = ask(llm, PROMPTS)
        turns = [prompt + answer.tokens + QUESTION for prompt, answer in zip(PROMPTS, together, strict=True)]
        behind_hits = ask(llm, turns)
        fresh = ask_alone(llm, turns)
    assert [answer.cached for answer in alone + fresh] == [0] * 6
    for prompt, answer in zip(PROMPTS, behind_hits, strict=True):
        assert len(prompt) - 1 - UNIT < answer.cached < len(prompt)
        assert answer.cached % UNIT == 0
    if not ON_GPU:
        assert [answer.tokens for answer in alone + fresh] == [answer.tokens for answer in together + behind_hits]
    pairs = list(zip(alone + fresh, together + behind_hits, strict=True))
    found = [ours.distance(theirs) for ours, theirs in pairs]
    other = [alone[i].distance(alone[i - 1]) for i in range(3)]
    print(f"{architecture}: batched {found[:3]}, behind hits {found[3:]}; of other prompts {other}")
    assert max(found) < (0.3 if ON_GPU else 1e-4) * min(other)


@pytest.mark.skipif(not ON_GPU, reason="on a CPU vLLM keeps the states of rejected drafts, with auto as well")
@pytest.mark.parametrize("architecture", DRAFTED)
def test_mtp_behind_hits_at_every_offset(architecture: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """First turns of every length within a unit of the prefix cache, and second turns behind hits: with drafts, they
    differ from those without as far as rounding makes them. (A turn without a hit reads its prompt raw.)"""
    for name, value in DRAFTED[architecture].items():
        monkeypatch.setitem(MODELS[architecture], name, value)
    options = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "prefix_match_unit": UNIT}
    options |= {"max_logprobs": VOCABULARY, "dtype": "bfloat16", "max_num_seqs": 4}
    prompts = [IDS[7 * i : 7 * i + 96 + i] for i in range(UNIT + 1)]
    turns: list[list[int]] = []

    def behind_hits(llm: LLM) -> list[Answer]:
        answers = []
        for prompt, turn in zip(prompts, turns, strict=True):
            llm.reset_prefix_cache()
            ask(llm, [prompt])
            answers += ask(llm, [turn])
        return answers

    with start(architecture, "tq4", **options) as llm:
        alone = ask_alone(llm, prompts)
        turns += [prompt + answer.tokens + QUESTION for prompt, answer in zip(prompts, alone, strict=True)]
        fresh, plain = ask_alone(llm, turns), behind_hits(llm)
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    with start(architecture, "tq4", speculative_config=speculation, **options) as llm:
        drafted, hits = ask_alone(llm, prompts), behind_hits(llm)
    cached = [answer.cached for answer in hits]
    found = [ours.distance(theirs) for ours, theirs in zip(alone + plain, drafted + hits, strict=True)]
    other = [fresh[i].distance(fresh[i - 1]) for i in range(len(fresh))]
    print(f"{architecture}: cached {cached}; drafted {found[: len(alone)]}, behind hits {found[len(alone) :]}; {other}")
    assert all(count % UNIT == 0 for count in cached) and min(cached) > 0
    assert max(found) < 0.3 * min(other)


def check_pages(llm: LLM) -> None:
    """Attention's pages are bytes of packed tokens; its blocks are as large as a state, not a token larger."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    attending = [layer for layer in layers if getattr(layer, "kv_cache_dtype", None) in FORMATS]
    assert attending
    for layer in attending:
        assert layer.get_attn_backend().get_name() == "PACKED_KV_TQ4"
        assert layer.kv_cache.dtype == torch.uint8
        assert layer.kv_cache.shape[-1] == FORMATS["tq4"].slot_bytes(layer.head_size)
    specs = [group.kv_cache_spec for group in scheduler(llm).kv_cache_config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    pages = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    assert states and pages
    assert {spec.page_size_bytes for spec in states} == {spec.page_size_bytes for spec in pages}
    assert {spec.page_size_bytes for spec in pages} == {spec.real_page_size_bytes for spec in pages}


def test_skipped_layers_beside_states_are_refused(start: Start) -> None:
    """Blocks of one size would make packed pages as large as those of the skipped layer."""
    with (
        pytest.raises(ValueError, match="these skipped layers: --kv-cache-dtype-skip-layers 3, with which") as error,
        start("JambaForCausalLM", "tq4", kv_cache_dtype_skip_layers=["3"]),
    ):
        pass
    assert "leave out --kv-cache-dtype-skip-layers" in str(error.value)
