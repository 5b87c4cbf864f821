"""Steps with prompts as whole CUDA graphs (`attention/mixed.py`), in vLLM: prompts of many lengths, behind hits of the
prefix cache and new, beside decodes. CI has no GPU; `scripts/gpu_tests.sh` runs these."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from harness import count_preemptions, engine
from packed_kv.attention.metadata import PackedMetadataBuilder
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
TEXT = topics["assignment"] + topics["class"] + topics["comparisons"] + topics["operator-summary"]
PREFIXES, NEW = (0, 16, 1200), (1, 2, 15, 16, 17, 128, 500)
STEP_TOKENS, TOKENS = 320, 24
ALMOST = 0.1
"""Nats of lead below which rounding may choose another token: products of padded rows round otherwise."""
OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True, "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 16, "recent_tokens": None,
    "enforce_eager": False, "max_model_len": 2048,
}  # fmt: skip
Line = list[tuple[int, float]]
"""Tokens of a request, each with its logarithm of a probability."""


def graphs(mode: str) -> dict[str, Any]:
    return {"mode": 3, "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}


def serve(llm: LLM, **options: Any) -> tuple[list[Line], list[list[float]]]:
    """Return what follows all prompts behind all prefixes, and each token's lead over the next likeliest."""
    ids = llm.get_tokenizer().encode(TEXT)
    assert llm.reset_prefix_cache()
    llm.generate({"prompt_token_ids": ids[: PREFIXES[-1]]}, SamplingParams(max_tokens=1), use_tqdm=False)
    prompts = [
        {"prompt_token_ids": ids[:prefix] + ids[37 * i + 50 : 37 * i + 50 + new]}
        for i, (prefix, new) in enumerate((prefix, new) for prefix in PREFIXES for new in NEW)
    ]
    sampling = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 2, **options})
    lines, leads = [], []
    for request in llm.generate(prompts, sampling, use_tqdm=False):
        for result in request.outputs:
            found = [sorted((x.logprob for x in of_token.values()), reverse=True) for of_token in result.logprobs or ()]
            chosen = zip(result.token_ids, result.logprobs or (), strict=True)
            lines.append([(token, of_token[token].logprob) for token, of_token in chosen])
            leads.append([first - second for first, second, *_ in found])
    return lines, leads


def check_alike(lines: list[Line], expected: list[Line], leads: list[list[float]]) -> None:
    """Check that requests have the same tokens up to where two are almost alike, and most of them to the end."""
    equal = 0
    for ours, theirs, lead in zip(lines, expected, leads, strict=True):
        differ = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a[0] != b[0]), None)
        equal += differ is None
        assert differ is None or lead[differ] < ALMOST, (differ, lead[differ], ours[differ], theirs[differ])
        assert all(abs(a[1] - b[1]) < ALMOST for a, b in zip(ours[:differ], theirs[:differ], strict=True))
    assert equal > len(lines) / 2, f"{equal} of {len(lines)}"


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Tokens and requests of the graphs of mixed steps that are replayed, counted."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    found: Counter[tuple[int, int]] = Counter()
    run = ModelCudaGraphManager.run_fullgraph

    def count(self: Any, desc: Any) -> Any:
        if desc.uniform_token_count is None:
            found[desc.num_tokens, desc.num_reqs] += 1
        return run(self, desc)

    monkeypatch.setattr(ModelCudaGraphManager, "run_fullgraph", count)
    return found


def read_tables_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps with prompts that run eagerly take the route of graphs."""
    build = PackedMetadataBuilder.build

    def with_tables(self: PackedMetadataBuilder, *arguments: Any, **options: Any) -> Any:
        metadata = build(self, *arguments, **options)
        if metadata.decodes == len(metadata.context):
            return metadata
        return replace(metadata, is_mixed_graph=True, decode_query_len=self.reorder_batch_threshold or 1)

    monkeypatch.setattr(PackedMetadataBuilder, "build", with_tables)


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_tokens(name: str, demo_model: str, replayed: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the ordinary route, and of the graphs' own without graphs; again and again with the same bits."""
    with engine(demo_model, name, compilation_config=graphs("FULL_AND_PIECEWISE"), **OPTIONS) as llm:
        lines, _ = serve(llm)
        assert sum(replayed.values()) > 20 and len(replayed) > 3, replayed
        for _ in range(10):
            assert serve(llm)[0] == lines
    off = {"additional_config": {"packed_kv": {"mixed_graphs": False}}}
    before = replayed.copy()
    with engine(demo_model, name, compilation_config=graphs("FULL_AND_PIECEWISE"), **OPTIONS, **off) as llm:
        ordinary = serve(llm)
    assert replayed == before
    check_alike(lines, *ordinary)
    with (
        monkeypatch.context() as patches,
        engine(demo_model, name, compilation_config=graphs("NONE"), **OPTIONS) as llm,
    ):
        read_tables_always(patches)
        check_alike(lines, *serve(llm))


@pytest.mark.parametrize(
    "more",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
        {"kv_cache_memory_bytes": 4 << 20},
        {"kv_cache_dtype_skip_layers": ["0", "3"]},
    ],
    ids=["drafts", "preemption", "skipped"],
)
def test_engines(
    more: dict[str, Any], demo_model: str, replayed: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Drafts of unequal lengths, preempted requests and layers in bf16; with two continuations of each request, so cold
    that only tokens almost alike are drawn."""
    found = []
    for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"):
        with engine(demo_model, "tq4", compilation_config=graphs(mode), **OPTIONS | more) as llm:
            preempted = count_preemptions(llm, monkeypatch)
            found.append(serve(llm, n=2, temperature=0.005, seed=0))
            assert bool(preempted) == ("kv_cache_memory_bytes" in more)
    assert replayed
    check_alike(found[0][0], *found[1])


def test_loras_and_the_option_leave_graphs_out(demo_model: str, replayed: Counter) -> None:
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with engine(demo_model, "tq4", compilation_config=graphs("FULL_AND_PIECEWISE"), **OPTIONS, **lora) as llm:
        serve(llm)
    assert not replayed
