"""Engines of two ranks: what they answer is what one answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import calibration_files
import cpu_ranks
import pytest
import tiny_models
import torch
from harness import engine, keep_chunks, kv_tokens, mean_kl
from packed_kv.attention import impl
from packed_kv.reference.context_shard import ContextShard
from packed_kv.refusals import table as refusals
from packed_kv_quality.engines import scheduler
from vllm import SamplingParams
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

PROMPTS = [
    [(7 * i * i + 3 * i + start) % tiny_models.VOCAB for i in range(n)] for start, n in ((0, 60), (5, 37), (9, 1))
]
TWO_PROCESSES: dict[str, Any] = {"distributed_executor_backend": "mp"}


def run(model: str, prompts: list[list[int]] = PROMPTS, **options: Any) -> tuple[torch.Tensor, list[list[int]], int]:
    """Log-probabilities of all positions, prompts in chunks of up to 48 tokens; tokens generated; KV tokens."""
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_logprobs": tiny_models.VOCAB}
    sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    with engine(model, "turboquant25", dtype="float32", skip_tokenizer_init=True, **sizes, **options) as llm:
        llm.llm_engine.model_executor.execute_dummy_batch()  # without one, vLLM's second stage fails on a CPU
        scheduler(llm).max_num_scheduled_tokens = 48  # vLLM's CPU platform raises it for latents
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        tokens = kv_tokens(llm)
    rows = [row for x in results for row in (*x.prompt_logprobs[1:], *x.outputs[0].logprobs)]
    logprobs = torch.tensor([[row[token].logprob for token in range(tiny_models.VOCAB)] for row in rows])
    return logprobs, [list(x.outputs[0].token_ids) for x in results], tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One KV head, so that two ranks replicate it."""
    return tiny_models.save(tiny_models.llama(num_key_value_heads=1), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: str) -> tuple[torch.Tensor, list[list[int]], int]:
    return run(model)


def test_decode_context_parallel(
    model: str, alone: tuple[torch.Tensor, list[list[int]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens dealt out to two ranks: those of one rank's memory twice, and the same answers. There is no window, as
    nobody asks for one by name."""
    monkeypatch.setattr(refusals, "RULES", cpu_ranks.rules())  # `dealt_out` does so in the workers
    logprobs, generated, tokens = run(
        model, tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=4,
        worker_extension_cls="dealt_out.Extension", recent_tokens=None, **TWO_PROCESSES,
    )  # fmt: skip
    assert mean_kl(alone[0], logprobs) < 1e-6
    assert generated == alone[1]
    assert tokens == 2 * alone[2]


def test_decode_context_parallel_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents, which all ranks have whole otherwise. With means, which are added once; and with a prefix that
    `dealt_out` makes workers read in several parts."""
    model = tiny_models.save(tiny_models.deepseek_v2(), tmp_path / "model")
    file = calibration_files.write(tmp_path, calibration_files.content(3, 1, 512, 128, version=2))
    monkeypatch.setattr(refusals, "RULES", cpu_ranks.rules())
    keep_chunks(monkeypatch)
    options: dict[str, Any] = {
        "compilation_config": {"custom_ops": ["none"]}, "block_size": 16,
        "prompts": [[(7 * i * i + 3 * i) % tiny_models.VOCAB for i in range(170)], *PROMPTS[1:]],
        "additional_config": {"packed_kv": {"calibration": str(file)}},
    }  # fmt: skip
    alone = run(model, **options)
    logprobs, generated, tokens = run(
        model, **options, tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=4,
        worker_extension_cls="dealt_out.Extension", recent_tokens=None, **TWO_PROCESSES,
    )  # fmt: skip
    assert mean_kl(alone[0], logprobs) < 1e-6
    assert generated == alone[1]
    assert tokens == 2 * alone[2]


def test_pipeline_parallel_beside_a_skipped_layer(tmp_path: Path) -> None:
    """Layers dealt out to two stages, with a recent window, which each stage has of its own layers. The layer is one
    stage's, and both lay out their pages alike."""
    model = tiny_models.save(tiny_models.llama(num_key_value_heads=1, num_hidden_layers=4), tmp_path / "model")
    options: dict[str, Any] = {"recent_tokens": 40, "kv_cache_dtype_skip_layers": ["2"]}
    expected = run(model, **options)
    stages = {"pipeline_parallel_size": 2, "async_scheduling": False}
    logprobs, generated, _ = run(model, **stages, **options, **TWO_PROCESSES)
    assert torch.equal(logprobs, expected[0]) and generated == expected[1]
    assert not torch.equal(logprobs, run(model, **{**options, "recent_tokens": 0})[0]), "no window"


@pytest.mark.parametrize(
    "shard",
    [ContextShard(), ContextShard(2, 0, 1), ContextShard(2, 1, 1), ContextShard(3, 1, 4), ContextShard(4, 3, 16)],
)
def test_a_shard_is_what_vllm_places_on_a_rank(shard: ContextShard) -> None:
    for tokens in range(150):
        of_vllm = get_dcp_local_seq_lens(torch.tensor([tokens]), shard.ranks, shard.rank, shard.run)
        assert shard.count(tokens) == int(of_vllm) == int(shard.count(torch.tensor([tokens])))
        positions = shard.position(torch.arange(shard.count(tokens))).tolist()
        assert positions == [i for i in range(tokens) if i // shard.run % shard.ranks == shard.rank]


DCP_LAYERS = {"a sliding window": {"sliding_window": 64}, "attention sinks": {"sinks": torch.zeros(4)},
              "another layer's KV cache": {"kv_sharing_target_layer_name": "layers.0"}}  # fmt: skip


@pytest.mark.parametrize("what", DCP_LAYERS)
def test_layers_that_cannot_be_dealt_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine must not have beside context parallelism, tests/refusals/test_refusal_table.py has."""
    monkeypatch.setattr(impl, "get_current_vllm_config", lambda: MagicMock())
    monkeypatch.setattr(impl, "shard_of", lambda _config: ContextShard(2))
    with pytest.raises(ValueError, match=f"--decode-context-parallel-size with {what}: 2 ranks"):
        impl.PackedAttentionImpl(4, 64, 0.125, num_kv_heads=2, kv_cache_dtype="tq4", **DCP_LAYERS[what])


def test_a_step_without_requests_computes_no_attention(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data-parallel rank without requests takes such steps with the others. The profiling run takes one, too."""
    profiled: list[object] = []
    monkeypatch.setattr(impl.PackedAttentionImpl, "_profile", lambda *arguments: profiled.append(arguments))
    with engine(model, "turboquant25", skip_tokenizer_init=True, max_model_len=256) as llm:
        executor = llm.llm_engine.model_executor
        runner = executor.driver_worker.worker.model_runner
        profiled.clear()
        executor.execute_dummy_batch()
        assert not profiled
        caches = {layer: layer.kv_cache for layer in runner.compilation_config.static_forward_context.values()}
        for layer in caches:
            layer.kv_cache = torch.tensor([])  # as while vLLM profiles
        executor.execute_dummy_batch()
        for layer, cache in caches.items():
            layer.kv_cache = cache
        assert len(profiled) == tiny_models.SMALL["num_hidden_layers"]
