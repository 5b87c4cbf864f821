"""Sparse attention over latents on CUDA: a cut DeepSeek V3.2 with the attention of a rank of eight, random weights.

The tests need vLLM 0.33.0 with its patches, on Hopper; `scripts/gpu_tests.sh picked` runs them. The indexer is
PyTorch's, with exact picks, but with `PACKED_KV_INDEXER=vllm` vLLM's own, which needs DeepGEMM and nvcc.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import sparse_models
import torch
from harness import engine, kv_tokens, mean_kl, teacher_forced_logits
from packed_kv.attention.latent.in_pytorch import ReferenceLatentPrefix
from packed_kv.attention.sparse.layer import SparseKernels
from packed_kv.attention.store import LatentStore, reference_latent_store
from packed_kv.engine import capacity
from packed_kv.kernels.triton.sparse_picks import CountPicksLaunch
from packed_kv_quality.engines import attention_layers
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOKEN_IDS = torch.randint(2, 1024, (2300,), generator=torch.Generator().manual_seed(1)).tolist()
SAMPLING = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False, logprobs=20)
LENGTHS = (3, 64, 300, 700, 1200, 2040, 2047, 2048, 2049, 2100, 2150, 2200, 2230, 2250, 2260, 2270)
MEMORY = 512 << 20
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def engine_of(model: str, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Starts engines of a model with random weights, and the indexer that `PACKED_KV_INDEXER` names."""
    if os.environ.get("PACKED_KV_INDEXER") != "vllm":
        sparse_models.install_on_cuda(monkeypatch)
    sparse_models.random_weights(monkeypatch)
    return partial(
        engine, model, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
        max_num_seqs=16, max_num_batched_tokens=28672, block_size=64, kv_cache_memory_bytes=MEMORY,
        gpu_memory_utilization=0.2,
    )  # fmt: skip


@pytest.fixture
def cut_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable:
    return engine_of(sparse_models.save_cut(tmp_path / "cut"), monkeypatch)


class Answer(NamedTuple):
    """Greedy tokens, log-probabilities of the 20 best at each, and tokens of the prompt that the cache had."""

    tokens: list[int]
    best: list[dict[int, float]]
    cached: int


def greedy(llm: LLM, lengths: tuple[int, ...] = LENGTHS) -> list[Answer]:
    """Answers to prompts that run together; each is stored in one step."""
    prompts = [{"prompt_token_ids": [length % 997 + 2, *TOKEN_IDS[: length - 1]]} for length in lengths]
    answers = []
    for result in llm.generate(prompts, SAMPLING, use_tqdm=False):
        rows = [{token: entry.logprob for token, entry in row.items()} for row in result.outputs[0].logprobs]
        answers.append(Answer(list(result.outputs[0].token_ids), rows, result.num_cached_tokens))
    return answers


def one_by_one(llm: LLM) -> list[Answer]:
    return [greedy(llm, (length,))[0] for length in LENGTHS]


class Distance(NamedTuple):
    """A distance of answers from others: how many are alike; mean difference of the log-probabilities of tokens up to
    where they part; and how much less likely than its best the others held the token with which an answer parts, on
    average."""

    alike: int
    mean: float
    lack: float

    @classmethod
    def of(cls, found: list[Answer], expected: list[Answer]) -> Distance:
        alike, differences, lacks = 0, [], []
        for ours, other in zip(found, expected, strict=True):
            for token, wanted, row, expected_row in zip(ours.tokens, other.tokens, ours.best, other.best, strict=True):
                differences.append(abs(row[token] - expected_row.get(token, float("-inf"))))
                if token != wanted:
                    lacks.append(expected_row[wanted] - expected_row.get(token, float("-inf")))
                    break
            alike += ours.tokens == other.tokens
        return cls(alike, sum(differences) / len(differences), sum(lacks) / max(1, len(lacks)))

    def is_rounding(self, rounding: Distance) -> bool:
        """True if answers part no further than by `rounding`."""
        return self.mean < 1.5 * rounding.mean + 0.002 and self.lack < 1.5 * rounding.lack + 0.02


def check(name: str, found: list[Answer], expected: list[Answer], rounding: Distance) -> None:
    """Random weights make the best tokens almost equally likely, so answers part by rounding: no further than those of
    requests that run alone part from those of the batch."""
    apart = Distance.of(found, expected)
    print(f"{name}: {apart} of {len(found)}; one by one {rounding}")
    assert apart.is_rounding(rounding), (apart, rounding)


def check_fault_is_seen(cut_engine: Callable, expected: list[Answer], rounding: Distance) -> None:
    """A fault must be seen: decodes that leave out half of their picks."""
    step = CountPicksLaunch.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountPicksLaunch, "step", staticmethod(lambda tokens, picks: step(tokens, picks // 2)))
        with cut_engine("tq4") as llm:
            apart = Distance.of(greedy(llm), expected)
    print(f"half of the picks left out: {apart}")
    assert not apart.is_rounding(rounding), apart


def eager_answers(llm: LLM, kept: Callable[[list[Answer]], list[Answer]] = list) -> tuple[list[Answer], Distance]:
    """Return answers of eager steps, and how far answers of requests that run alone part from them. `kept` chooses the
    answers of both."""
    plain = greedy(llm)
    llm.reset_prefix_cache()
    return kept(plain), Distance.of(kept(one_by_one(llm)), kept(plain))


def graphs(mode: str, tokens_each: int = 1) -> dict:
    sizes = [tokens_each * n for n in (1, 2, 4, 8, 16)]
    return {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes},
    }


def in_pytorch(llm: LLM) -> None:
    """Let the layers store, gather and attend in PyTorch."""
    for layer in attention_layers(llm):
        impl = layer.impl
        assert impl.kernels.decode is not None
        layout = impl.kernels.layer
        store = LatentStore(reference_latent_store(layout.codec), layout.kind)
        impl.kernels = SparseKernels(layout, store, ReferenceLatentPrefix(layout.codec))


@pytest.mark.parametrize(
    ("name", "rope_bits", "decode_kernel"),
    [("tq4", 16, "auto"), ("turboquant25", 8, "auto"), ("tq4", 16, "triton")],
)
def test_logits_are_those_of_pytorch(name: str, rope_bits: int, decode_kernel: str, cut_engine) -> None:
    """Decodes, whole prompts past `index_topk`, and chunks: dense ones, and then those behind stored tokens."""
    options = {"packed_kv": {"latent_rope_bits": rope_bits, "decode_kernel": decode_kernel}}
    found = []
    for by_reference in (False, True):
        with cut_engine(name, additional_config=options) as llm:
            for layer in attention_layers(llm):
                by = layer.impl.kernels.decode.language
                assert layer.impl.is_sparse and by == ("Triton" if decode_kernel == "triton" else "CUDA")
            if by_reference:
                in_pytorch(llm)
            logits = {chunk: teacher_forced_logits(llm, TOKEN_IDS, chunk).cpu() for chunk in (2300, 700)}
            llm.reset_prefix_cache()
            logits[1] = teacher_forced_logits(llm, TOKEN_IDS[:200], 1).cpu()
            found.append(logits)
    ours, expected = found
    loss = mean_kl(expected[2300][:200], expected[1])
    errors = {chunk: mean_kl(expected[chunk], ours[chunk]) for chunk in ours}
    past = mean_kl(expected[700][2048:], ours[700][2048:])
    print(f"{name}: KL from PyTorch's by chunk {errors}, past index_topk {past:.1e}; the codec costs {loss:.4f}")
    assert all(error < loss / 5 for error in errors.values()) and past < loss / 5


def test_decodes_past_index_topk(cut_engine) -> None:
    """Decodes that leave tokens out, against PyTorch's: log-probabilities of the same tokens."""
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for by_reference in (False, True):
        with cut_engine("tq4") as llm:
            if by_reference:
                in_pytorch(llm)
            (result,) = llm.generate({"prompt_token_ids": TOKEN_IDS}, sampling, use_tqdm=False)
            tokens = list(result.outputs[0].token_ids)
            logprobs = [row[token].logprob for row, token in zip(result.outputs[0].logprobs, tokens, strict=True)]
            found.append((tokens, torch.tensor(logprobs)))
    same = next((i for i, pair in enumerate(zip(found[0][0], found[1][0], strict=True)) if pair[0] != pair[1]), 40)
    apart = (found[0][1][:same] - found[1][1][:same]).abs().mean().item() if same else float("inf")
    print(f"{same} of 40 tokens alike; log-probabilities of these differ by {apart:.1e}")
    assert same >= 5 and apart < 0.1


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_give_eager_answers(mode: str, cut_engine) -> None:
    with cut_engine("tq4") as llm:
        eager, rounding = eager_answers(llm)
    with cut_engine("tq4", **graphs(mode)) as llm:
        captured = greedy(llm)
        again = greedy(llm)
    check(mode, captured, eager, rounding)
    if mode == "FULL_DECODE_ONLY":
        check_fault_is_seen(cut_engine, eager, rounding)
    assert all(answer.cached >= (length - 1) // 64 * 64 for answer, length in zip(again, LENGTHS, strict=True))


def test_graphs_of_bf16(cut_engine) -> None:
    """How far vLLM's own answers part, which is printed beside the others: not a test of ours."""
    with cut_engine("auto") as llm:
        eager, rounding = eager_answers(llm)
    with cut_engine("auto", **graphs("FULL_DECODE_ONLY")) as llm:
        print(f"bf16 in graphs: {Distance.of(greedy(llm), eager)}; one by one {rounding}")


def test_drafts_in_graphs(cut_engine) -> None:
    with cut_engine("tq4") as llm:
        plain, rounding = eager_answers(llm)
    with cut_engine("tq4", speculative_config=NGRAM, **graphs("FULL_DECODE_ONLY", 4)) as llm:
        check("n-grams", greedy(llm), plain, rounding)


def test_mtp_in_graphs(cut_engine, tmp_path: Path) -> None:
    """The draft's layer is of the same class, with picks of its own in the model's buffer. Random weights accept next
    to nothing, so its tokens are rejected and written over."""
    changed = {"num_nextn_predict_layers": 1, "first_k_dense_replace": 4}
    start = partial(engine, sparse_models.save_cut(tmp_path / "mtp", **changed), **cut_engine.keywords)
    with start("tq4") as llm:
        plain, rounding = eager_answers(llm)
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    with start("tq4", speculative_config=mtp, **graphs("FULL_DECODE_ONLY", 3)) as llm:
        layers = attention_layers(llm)
        assert len(layers) == 3 and all(layer.kv_cache.shape[-1] == 400 for layer in layers)
        check("MTP", greedy(llm), plain, rounding)


def test_shared_picks_in_graphs(cut_engine, tmp_path: Path) -> None:
    """A layer without an indexer reads the picks of the one before it, as most of GLM-5.2's do."""
    changed = {"num_hidden_layers": 4, "first_k_dense_replace": 4, "index_topk_freq": 4}
    model = sparse_models.save_cut(tmp_path / "shared", **changed)
    start = partial(engine, model, **cut_engine.keywords)
    with start("tq4") as llm:
        eager, rounding = eager_answers(llm)
        indexers = [getattr(layer, "indexer", None) is not None for layer in attention_layers(llm)]
        assert sorted(indexers) == [False, False, True, True]
        assert capacity.bytes_per_token(llm.llm_engine.vllm_config)[0] == 4 * 400 + 2 * 132
    with start("tq4", **graphs("FULL_DECODE_ONLY")) as llm:
        check("shared picks", greedy(llm), eager, rounding)


def test_tokens_against_fp8(cut_engine) -> None:
    """KV tokens that the cache holds, by vLLM's count: the formula within 1 %."""
    held = {}
    for name, rope_bits in (("fp8", 16), ("tq4", 16), ("tq4", 8), ("tq3", 8)):
        options = {"packed_kv": {"latent_rope_bits": rope_bits}}
        with cut_engine(name, additional_config=options) as llm:
            held[name, rope_bits] = kv_tokens(llm)
    ratios = {key: tokens / held["fp8", 16] for key, tokens in held.items()}
    print(f"tokens, times fp8_ds_mla's: {ratios}")
    for key, row in ((("tq4", 16), 400), (("tq4", 8), 352), (("tq3", 8), 288)):
        assert ratios[key] == pytest.approx((656 + 132) / (row + 132), rel=0.01)
