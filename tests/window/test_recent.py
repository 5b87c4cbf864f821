"""The recent window in real engines: what it is worth, which models have it, and what is refused."""

from __future__ import annotations

import gc
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import tiny_models
import torch
from harness import engine, kv_tokens, mean_kl, newest_logits, teacher_forced_logits
from packed_kv.layout import RECENT_TOKENS
from packed_kv.reference.attention import RecentVectors
from packed_kv.settings.options import OptionError
from packed_kv.window.step import WindowStep
from packed_kv_quality import lockstep
from packed_kv_quality.engines import attention_layers, bytes_per_request
from packed_kv_quality.teacher_forced import logits
from vllm import SamplingParams

TEXT = topics["assignment"] + topics["class"]


def test_nearest_tokens_cost_most(demo_model: str) -> None:
    """The default window takes nine tenths off the cost, and a longer one more. Rings are as large as they say.

    docs/lab/quality.md has a real model's figures.
    """
    with engine(demo_model, "auto") as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)[:400]
        bf16 = teacher_forced_logits(llm, token_ids, 8)
    costs, tokens = {}, {}
    for window in (0, None, 200):
        with engine(demo_model, "turboquant25", recent_tokens=window, block_size=16) as llm:
            costs[window] = mean_kl(bf16, teacher_forced_logits(llm, token_ids, 8))
            tokens[window] = kv_tokens(llm)
            # 6 layers; blocks of 4 tokens take the packed block's bytes: 2 heads x 16 tokens x 80.
            length = RECENT_TOKENS if window is None else window
            assert bytes_per_request(llm) == (6 * (-(-(length + 1) // 4) + 1) * 2 * 16 * 80 if length else 0)
    print(f"turboquant25: KL without {costs[0]:.4f}, by default {costs[None]:.4f}, with 200 {costs[200]:.4f}")
    assert costs[None] < costs[0] / 10
    assert costs[200] < costs[None] / 3
    assert tokens[200] < tokens[None] < tokens[0]


MODELS = (tiny_models.mistral, tiny_models.gpt_oss, tiny_models.gemma4)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_models(make, tmp_path: Path) -> None:
    """Sliding and full layers, shared caches, sinks: with a window as long as the sliding one, or the text, little is
    left to pay for, in whatever chunks the text is read."""
    model = tiny_models.save(make(), tmp_path)
    token_ids = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256}
    with engine(model, "auto", **options) as llm:
        plain = teacher_forced_logits(llm, token_ids, 90)
    with engine(model, "turboquant25", **options) as llm:
        packed = mean_kl(plain, teacher_forced_logits(llm, token_ids, 7))
    with engine(model, "turboquant25", recent_tokens=None, **options) as llm:
        costs = [mean_kl(plain, teacher_forced_logits(llm, token_ids, chunk)) for chunk in (1, 7)]
    print(f"{make.__name__}: KL without a window {packed:.6f}, with {costs[0]:.6f}, {costs[1]:.6f}")
    assert max(costs) < packed / 3
    assert costs[0] == pytest.approx(costs[1], rel=0.02)


@pytest.mark.parametrize("make", [None, tiny_models.gemma4], ids=["demo", "shared"])
def test_a_step_leaves_no_recent_vectors(make, demo_model: str, tmp_path: Path, monkeypatch) -> None:
    """Prefills in PyTorch take the window as fp32 K and V of all new tokens, while a layer reads them: nothing is held
    by the next layer's turn, unless that shares the cache, and nothing after the step."""
    model = demo_model if make is None else tiny_models.save(make(max_position_embeddings=2048), tmp_path)
    before: list[int] = []
    asked = WindowStep.recent_vectors

    def recent_vectors(self, *batch):
        before.append(held_bytes())
        return asked(self, *batch)

    monkeypatch.setattr(WindowStep, "recent_vectors", recent_vectors)
    options = {} if make is None else {"skip_tokenizer_init": True}
    with engine(model, "tq4", recent_tokens=None, dtype="float32", max_model_len=2048, **options) as llm:
        prompt = {"prompt_token_ids": [3 + i % 200 for i in range(1500)]}
        llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, detokenize=False), use_tqdm=False)
        assert before and held_bytes() == 0
        shared = sum(bool(layer.kv_sharing_target_layer_name) for layer in attention_layers(llm))
    print(f"bytes of recent vectors before each layer of a step: {before}")
    assert bool(shared) == any(before) == (make is not None)


def held_bytes() -> int:
    """Bytes of all `RecentVectors` that are alive."""
    return sum(x.key.nbytes + x.value.nbytes for x in gc.get_objects() if isinstance(x, RecentVectors))


def test_chunked_attention(tmp_path: Path) -> None:
    """A window as long as a chunk of 128 tokens leaves little to pay for, also behind the first, wherever a step begins
    and ends. One of 150 tokens begins in one chunk, ends in the next, and is longer than a ring."""
    model = tiny_models.save(tiny_models.llama4(), tmp_path)
    token_ids = torch.randint(3, 250, (220,), generator=torch.Generator().manual_seed(0)).tolist()
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    options = {"skip_tokenizer_init": True, "dtype": dtype, "max_model_len": 256}
    with engine(model, "auto", **options) as llm:
        plain = teacher_forced_logits(llm, token_ids, 220)
    with engine(model, "turboquant25", **options) as llm:
        packed = mean_kl(plain[130:], teacher_forced_logits(llm, token_ids, 7)[130:])
    with engine(model, "turboquant25", recent_tokens=128, **options) as llm:
        rows = [teacher_forced_logits(llm, token_ids, chunk)[130:] for chunk in (1, 7)]
        steps = lockstep.run(llm, [token_ids], [50, 150, *[7] * 10])[0]
        rows.append(logits(llm, steps)[200:])
    costs = [mean_kl(plain[-len(one) :], one) for one in rows]
    print(f"KL without a window {packed:.6f}, with {costs}")
    assert max(costs) < packed / 3


def test_a_prefix_hit_costs_little_and_never_a_wrong_token(demo_model: str) -> None:
    """Behind a hit the first tokens find no ring for what lies before it, and read pages: no worse than without a
    window; well behind it nothing is left of that. Near tokens are of five texts: eight may fall either way. Steps have
    one token, which reads all from the cache."""
    prefix, window = 256, 32
    with engine(demo_model, "auto") as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)
        texts = [token_ids[start : start + prefix + (8 if start else 128)] for start in range(0, 1000, 200)]
        bf16 = [teacher_forced_logits(llm, text, 8)[prefix:] for text in texts]
    found = {}
    for name, recent_tokens in (("hit", window), ("fresh", window), ("pages", 0)):
        with engine(demo_model, "turboquant25", recent_tokens=recent_tokens) as llm:
            found[name] = []
            for text in texts:
                if name == "hit":
                    newest_logits(llm, text[: prefix + 1])
                found[name].append(newest_logits(llm, text, 1)[prefix - len(text) :])
    near, far = slice(0, 8), slice(3 * window, None)
    cost = {
        name: [
            mean_kl(torch.cat([of[near] for of in bf16]), torch.cat([of[near] for of in rows])),
            mean_kl(bf16[0][far], rows[0][far]),
        ]
        for name, rows in found.items()
    }
    print(f"KL near and far: {cost}")
    for hit, fresh in zip(found["hit"], found["fresh"], strict=True):
        assert not torch.equal(hit[near], fresh[near]), "the prefix was not cached"
    assert cost["hit"][0] < cost["pages"][0]
    assert cost["hit"][1] < cost["pages"][1] / 5
    assert cost["hit"][1] == pytest.approx(cost["fresh"][1], rel=0.35)


def test_conversations_hit_the_prefix_cache_as_often_as_without_a_window(demo_model: str) -> None:
    cached = []
    for recent_tokens in (0, 64):
        with engine(demo_model, "tq4", recent_tokens=recent_tokens, enable_prefix_caching=True, block_size=32) as llm:
            token_ids = llm.get_tokenizer().encode(TEXT)
            prompts = [token_ids[first : first + 90] for first in (0, 10, 20)]
            hits = []
            for turn in range(3):
                sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
                results = llm.generate([{"prompt_token_ids": x} for x in prompts], sampling, use_tqdm=False)
                hits.append([result.num_cached_tokens for result in results])
                asked = token_ids[100 + turn * 30 : 130 + turn * 30]
                prompts = [
                    x + list(result.outputs[0].token_ids) + asked for x, result in zip(prompts, results, strict=True)
                ]
        cached.append(hits)
    assert cached[0] == cached[1] and min(cached[0][2]) > 90


@pytest.mark.parametrize(
    ("recent_tokens", "options", "message"),
    [
        (-1, {}, "packed_kv.recent_tokens is -1; write a whole number, or 0 for no window"),
        ("64", {}, "packed_kv.recent_tokens is '64'; write a whole number"),
        (True, {}, "packed_kv.recent_tokens is True; write a whole number"),
        (300, {}, "packed_kv.recent_tokens 300 is more than the model's context of 256 tokens; write at most 256"),
        (64, {"disable_hybrid_kv_cache_manager": True}, "64 is not possible with --disable-hybrid-kv-cache-manager"),
    ],
)
def test_refused(recent_tokens: object, options: dict, message: str, demo_model: str) -> None:
    given = {"additional_config": {"packed_kv": {"recent_tokens": recent_tokens}}, **options}
    with (
        pytest.raises((OptionError, ValueError, RuntimeError), match=message),
        engine(demo_model, "tq4", max_model_len=256, load_format="dummy", **given),
    ):
        pass


def test_what_cannot_have_a_window_runs_without_one(demo_model: str) -> None:
    with engine(demo_model, "tq4", disable_hybrid_kv_cache_manager=True, recent_tokens=None) as llm:
        assert bytes_per_request(llm) == 0
