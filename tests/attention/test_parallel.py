"""Engines of two ranks: what they answer is what one answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from harness import engine, kv_tokens, mean_kl
from packed_kv.attention import context_parallel as ranks
from packed_kv.attention.context_shard import ContextShard
from packed_kv.attention.plain import PlainAttention
from vllm import SamplingParams
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

PROMPTS = [
    [(7 * i * i + 3 * i + start) % tiny_models.VOCAB for i in range(n)] for start, n in ((0, 60), (5, 37), (9, 1))
]
TWO_PROCESSES: dict[str, Any] = {"distributed_executor_backend": "mp"}


def run(model: str, **options: Any) -> tuple[torch.Tensor, list[list[int]], int]:
    """Log-probabilities of all positions, prompts in chunks of up to 48 tokens; tokens generated; KV tokens."""
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_logprobs": tiny_models.VOCAB}
    sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    with engine(model, "turboquant25", dtype="float32", skip_tokenizer_init=True, **sizes, **options) as llm:
        llm.llm_engine.model_executor.execute_dummy_batch()  # without one, vLLM's second stage fails on a CPU
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
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


def test_decode_context_parallel(model: str, alone: tuple[torch.Tensor, list[list[int]], int]) -> None:
    """Tokens dealt out to two ranks: those of one rank's memory twice, and the same answers. There is no window, as
    nobody asks for one by name."""
    logprobs, generated, tokens = run(
        model, tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=4,
        worker_extension_cls="dealt_out.Extension", recent_tokens=None, **TWO_PROCESSES,
    )  # fmt: skip
    assert mean_kl(alone[0], logprobs) < 1e-6
    assert generated == alone[1]
    assert tokens == 2 * alone[2]


def test_pipeline_parallel(model: str, alone: tuple[torch.Tensor, list[list[int]], int]) -> None:
    """Layers dealt out to two stages, with a recent window, which each stage has of its own layers."""
    stages = {"pipeline_parallel_size": 2, "async_scheduling": False, "recent_tokens": None}
    logprobs, generated, _ = run(model, **stages, **TWO_PROCESSES)
    expected = run(model, recent_tokens=None)
    assert torch.equal(logprobs, expected[0]) and generated == expected[1]
    assert not torch.equal(logprobs, alone[0]), "no window"


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


def config(**changes: Any) -> Any:
    """What `ranks.refuse` looks at."""
    parallel = {"decode_context_parallel_size": 2, "dcp_comm_backend": changes.pop("dcp_comm_backend", "ag_rs")}
    model = {"is_hybrid": changes.pop("is_hybrid", False), "attention_chunk_size": changes.pop("chunk", None)}
    parts = {"speculative_config": None, "kv_transfer_config": None, **changes}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=SimpleNamespace(**model), **parts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dcp_comm_backend": "a2a"}, "--dcp-comm-backend a2a"),
        ({"speculative_config": object()}, "drafts"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="OffloadingConnector")}, "OffloadingConnector"),
        ({"is_hybrid": True}, "state layers"),
        ({"chunk": 8192}, "chunked attention"),
        ({"cpu": True}, "CPU"),
    ],
)
def test_what_cannot_be_dealt_out(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = dict(changes)
    monkeypatch.setattr(ranks, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    ranks.refuse(config(), "tq4")
    if changes.pop("cpu", False):
        monkeypatch.undo()
    with pytest.raises(ValueError, match=f"with .*{words}.*; use --decode-context-parallel-size 1$"):
        ranks.refuse(config(**changes), "tq4")


@pytest.mark.parametrize(
    ("layer", "words"), [((64, False, False), "window"), ((None, True, False), "sinks"), ((None, False, True), "cache")]
)
def test_layers_that_cannot_be_dealt_out(layer: tuple[int | None, bool, bool], words: str) -> None:
    ranks.refuse_layer(ContextShard(), "tq4", *layer)
    ranks.refuse_layer(ContextShard(2), "tq4", None, False, False)
    with pytest.raises(ValueError, match=words):
        ranks.refuse_layer(ContextShard(2), "tq4", *layer)


def test_a_step_without_requests_computes_no_attention(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data-parallel rank without requests takes such steps with the others. The profiling run takes one, too."""
    profiled: list[object] = []
    monkeypatch.setattr(PlainAttention, "profile", lambda *arguments: profiled.append(arguments))
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
