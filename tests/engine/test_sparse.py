"""Engines of sparse attention over latents (DeepSeek V3.2's kind), on the CPU, with an exact indexer in PyTorch."""

from __future__ import annotations

from functools import partial

import pytest
import sparse_models
import tiny_models
import torch
from fake_codecs import register_null_format
from harness import engine, keep_chunks, kv_tokens, mean_kl, teacher_forced_logits
from packed_kv.engine import capacity
from packed_kv_quality.engines import attention_layers
from test_latent import coded
from tiny_models import true_logits
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the indexer is patched into the CPU platform")

TOKEN_IDS = torch.randint(tiny_models.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNK = 40
MEMORY = 16 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tiny_models.deepseek_v32(), tmp_path_factory.mktemp("deepseek_v32"))


@pytest.fixture
def tiny_engine(monkeypatch: pytest.MonkeyPatch, demo_model: str):
    sparse_models.install(monkeypatch)
    keep_chunks(monkeypatch)
    return partial(
        engine, dtype="float32", kv_cache_memory_bytes=MEMORY, block_size=sparse_models.BLOCK_SIZE, max_model_len=512,
        max_num_seqs=4, tokenizer=demo_model, compilation_config={"custom_ops": ["none"]},
    )  # fmt: skip


def greedy(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Greedy tokens, and tokens found in the cache, of prompts that run together."""
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [(list(result.outputs[0].token_ids), result.num_cached_tokens) for result in results]


def test_the_null_codec_is_exact(model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks, whose first ones are attended to densely, and decodes; rotated, centred and scaled."""
    register_null_format(monkeypatch, "null_fp32")
    truth = true_logits(model, TOKEN_IDS)
    with tiny_engine(model, "null_fp32") as llm:
        errors = {n: (teacher_forced_logits(llm, TOKEN_IDS, n) - truth).abs().max().item() for n in (200, CHUNK, 16, 1)}
    print(f"largest error by tokens of a step: {errors}, logits {truth.std():.1f}")
    assert max(errors.values()) < 2e-3
