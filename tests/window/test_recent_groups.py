"""Rings beside other caches in vLLM's pool: state layers, a draft's layers, layers that are not packed."""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path

import coverage_engine
import exact_products
import pytest
import tiny_models
import torch
from coverage_models import MODELS
from harness import count_preemptions, engine, mean_kl, scheduler, teacher_forced_logits
from packed_kv.window.layer import SUFFIX
from packed_kv_quality import lockstep
from packed_kv_quality.teacher_forced import logits
from recent_windows import layout, ring_specs
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

DTYPE, WINDOW = "turboquant25", 40
ENGINE = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512, "enable_prefix_caching": False}


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def test_rings_of_several_requests_in_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks are large, as beside state layers: batched, chunked and preempted equal alone, and none is lost."""
    exact_products.install(monkeypatch)
    model = tiny_models.save(tiny_models.llama(num_hidden_layers=2), tmp_path)
    prompts = [random_tokens(length, seed=length) for length in (100, 120, 150, 110)]
    options = {**ENGINE, "max_model_len": 256, "block_size": 128, "num_gpu_blocks_override": 11}
    with engine(model, DTYPE, recent_tokens=WINDOW, **options) as llm:
        (spec,) = ring_specs(llm)
        assert spec.ring_blocks > spec.ring_blocks_a_block > 1
        alone = [generate(llm, [prompt], 30)[0] for prompt in prompts]
        preempted = count_preemptions(llm, monkeypatch)
        monkeypatch.setattr(scheduler(llm), "max_num_scheduled_tokens", 48)
        assert generate(llm, prompts, 30) == alone
        assert preempted, "nothing was preempted: the cache is too large for this test"
        pool = scheduler(llm).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_state_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba 2 and attention in every layer; a block holds the rings of four requests. Three texts at once."""
    exact_products.install(monkeypatch)
    monkeypatch.setattr(DummyModelLoader, "load_weights", coverage_engine.set_weights)
    coverage_engine.register("FalconH1ForCausalLM")
    Path(tmp_path, "config.json").write_text(json.dumps(MODELS["FalconH1ForCausalLM"]))
    texts = [random_tokens(length, seed=length) for length in (120, 90, 100)]
    found = {}
    for name, window in (("auto", 0), (DTYPE, 0), (DTYPE, WINDOW)):
        with engine(str(tmp_path), name, recent_tokens=window, load_format="dummy", **ENGINE) as llm:
            found[name, window] = logits(llm, torch.cat(lockstep.run(llm, texts, repeat(7))))
            alone = torch.cat([teacher_forced_logits(llm, text, 16) for text in texts])
            assert [spec.ring_blocks_a_block >= 4 * spec.ring_blocks for spec in ring_specs(llm)] == [True] * bool(
                window
            )
    truth = found.pop(("auto", 0))
    pages, ring = (mean_kl(truth, rows) for rows in found.values())
    print(f"KL without a window {pages:.4f}, with {ring:.4f}")
    assert ring < pages / 3
    torch.testing.assert_close(found[DTYPE, WINDOW], alone, rtol=0, atol=1e-3)


def test_draft_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's layers keep their rings, and drafts that are rejected leave no trace in them.

    47 tokens and the one that is sampled fill six ring blocks, so that there is no room for drafts but what is made.
    """
    window, drafts = 47, 8
    exact_products.install(monkeypatch)
    config = tiny_models.llama()
    model = tiny_models.save(config, tmp_path)
    prompts = [random_tokens(90), [7] * 60]
    with engine(model, DTYPE, recent_tokens=window, **ENGINE) as llm:
        plain = generate(llm, prompts, 30)
    for kv_heads, head_dim, expected in ((2, 64, "LBHNC"), (1, 96, "BLHNC")):
        draft = tiny_models.eagle(tmp_path / expected, kv_heads, head_dim, config)
        speculation = {"method": "eagle", "model": draft, "num_speculative_tokens": drafts}
        with engine(model, DTYPE, recent_tokens=window, speculative_config=speculation, **ENGINE) as llm:
            counts = count_drafts(llm, monkeypatch)
            assert generate(llm, prompts, 30) == plain
            (spec,) = ring_specs(llm)
            assert (spec.window, spec.slack, spec.ring_block_size) == (window, 1 + drafts, 8)
            assert layout(llm) == expected
            layers = [name for group in scheduler(llm).kv_cache_config.kv_cache_groups for name in group.layer_names]
            assert sum(name.endswith(SUFFIX) for name in layers) == config.num_hidden_layers
            assert len(layers) == 2 * config.num_hidden_layers + 1
        rejected = sum(drafted - accepted for drafted, accepted in counts)
        print(f"{rejected} drafts rejected, {sum(accepted for _, accepted in counts)} accepted")
        assert rejected > 40
        assert any(accepted for _, accepted in counts)


DRAFT_MODELS = {
    "one layer": (1, {}, 1), "two layers": (2, {}, 2), "as many layers": (3, {}, 3),
    "other heads": (2, {"num_key_value_heads": 1}, 0),
}  # fmt: skip
"""Layers of a draft, its options, and the window layers that are added to the target's."""


@pytest.mark.parametrize(("layers", "options", "fillers"), DRAFT_MODELS.values(), ids=DRAFT_MODELS)
def test_draft_models(
    layers: int, options: dict, fillers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps both models' layers in one group if they are alike, and the rings in another."""
    exact_products.install(monkeypatch)
    config = tiny_models.llama()
    model = tiny_models.save(config, tmp_path / "model")
    draft = tiny_models.save(tiny_models.llama(num_hidden_layers=layers, **options), tmp_path / "draft")
    prompts = [random_tokens(90), [7] * 60]
    with engine(model, DTYPE, recent_tokens=WINDOW, **ENGINE) as llm:
        plain = generate(llm, prompts, 30)
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    with engine(model, DTYPE, recent_tokens=WINDOW, speculative_config=speculation, **ENGINE) as llm:
        counts = count_drafts(llm, monkeypatch)
        assert generate(llm, prompts, 30) == plain
        assert counts
        groups = [group.layer_names for group in scheduler(llm).kv_cache_config.kv_cache_groups]
        names = [name for group in groups for name in group]
        assert sum(name.endswith(SUFFIX) for name in names) == config.num_hidden_layers
        assert sum(f"{SUFFIX}-" in name for name in names) == fillers
        assert len(names) == 2 * config.num_hidden_layers + layers + fillers
        if fillers:
            assert [len(group) for group in groups] == [config.num_hidden_layers + layers] * 2


def test_a_sliding_draft_model_gets_no_fillers(tmp_path: Path) -> None:
    """Three kinds of layers, a group each. Tokens are not compared: with such a draft vLLM 0.32.0 answers differently
    on a CPU, with any KV-cache dtype."""
    sliding = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3}
    model, draft = (tiny_models.save(tiny_models.llama(**options), tmp_path / name)
                    for name, options in (("model", {}), ("draft", sliding)))  # fmt: skip
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    with engine(model, DTYPE, recent_tokens=WINDOW, speculative_config=speculation, **ENGINE) as llm:
        groups = [group.layer_names for group in scheduler(llm).kv_cache_config.kv_cache_groups]
        assert [len(names) for names in groups] == [3, 3, 3]
        assert not any(f"{SUFFIX}-" in name for names in groups for name in names)


def count_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that, of each request and step, the numbers of drafts and of accepted ones are added to."""
    counts: list[tuple[int, int]] = []
    update = scheduler(llm).update_from_output

    def count(scheduled, output):
        drafted = scheduled.scheduled_spec_decode_tokens
        for request, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if request in drafted:
                counts.append((len(drafted[request]), len(tokens) - 1))
        return update(scheduled, output)

    monkeypatch.setattr(scheduler(llm), "update_from_output", count)
    return counts


def test_skipped_layers(tmp_path: Path) -> None:
    """Pages of several sizes lie side by side."""
    model = tiny_models.save(tiny_models.llama(), tmp_path)
    text = random_tokens(120)
    with engine(model, "auto", **ENGINE) as llm:
        plain = teacher_forced_logits(llm, text, 120)
    costs = {}
    for window in (0, 120):
        with engine(model, DTYPE, recent_tokens=window, kv_cache_dtype_skip_layers=["1"], **ENGINE) as llm:
            costs[window] = mean_kl(plain, teacher_forced_logits(llm, text, 7))
            assert layout(llm) == ("BLHNC" if window else "LBHNC")
            assert len(ring_specs(llm)) == bool(window)
    print(f"KL by window: {costs}")
    assert costs[120] < costs[0] / 100
