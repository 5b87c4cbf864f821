"""Counts of `/metrics` by route. tests/engine/test_server.py scrapes a server; here are routes that a CPU has not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from packed_kv.attention import limits
from packed_kv.engine import metrics
from packed_kv.formats import FORMATS
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerBase


def config(
    name: str, dtype: torch.dtype = torch.bfloat16, heads: int = 32, drafts: int = 0, use_mla: bool = False,
    kernel: str = "auto", head_size: int = 128,
) -> SimpleNamespace:  # fmt: skip
    """Return a config with what routes and labels depend on; 8 KV heads."""
    speculative = SimpleNamespace(parallel_drafting=False, num_speculative_tokens=drafts) if drafts else None
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="tq4"),
        model_config=SimpleNamespace(
            dtype=dtype,
            attention_chunk_size=None,
            enforce_eager=True,
            use_mla=use_mla,
            served_model_name=name,
            get_num_attention_heads=lambda _parallel: heads,
            get_num_kv_heads=lambda _parallel: 8,
            get_head_size=lambda: head_size,
            hf_text_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64),
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192),
        speculative_config=speculative,
        additional_config={"packed_kv": {"decode_kernel": kernel}},
    )


def step(generated: int, begun: int, computed: int, cached: int, *finished: tuple[int, int]) -> SimpleNamespace:
    """vLLM's IterationStats; of each finished request the generated and the cached tokens."""
    return SimpleNamespace(
        num_generation_tokens=generated,
        time_to_first_tokens_iter=[0.1] * begun,
        prompt_token_stats=SimpleNamespace(computed=computed, cached_tokens=cached),
        finished_requests=[SimpleNamespace(num_generation_tokens=g, num_cached_tokens=c) for g, c in finished],
    )


def value(what: str, name: str, route: str) -> float | None:
    return REGISTRY.get_sample_value(f"packed_kv_{what}_total", {"model_name": name, "engine": "0", "route": route})


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: (8, 0))
    monkeypatch.setattr(limits, "current_platform", platform)


def test_tokens_and_requests_by_route() -> None:
    stats = metrics.PackedStats(config("a"), 0)
    assert isinstance(stats, StatLoggerBase)
    stats.record(None, step(2, 2, 300, 0))  # two prompts, each with its first token
    stats.record(None, step(3, 1, 36, 64, (2, 0)))  # two decodes, one ends; a prompt that the prefix cache has in part
    stats.record(None, step(1, 0, 0, 0, (2, 0), (1, 64)))
    stats.record(None, None)
    assert [value("tokens", "a", route) for route in ("prefill", "decode_kernel", "prefix_cache")] == [336, 3, 64]
    assert [value("requests", "a", route) for route in ("prefill", "decode_kernel", "prefix_cache")] == [3, 2, 1]
    assert value("tokens", "a", "pytorch") is None


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ("prefill", "decode_kernel")),
        ({"dtype": torch.float32}, ("pytorch", "pytorch")),
        ({"drafts": 7}, ("prefill", "decode_kernel")),
        ({"heads": 128, "drafts": 7}, ("prefill", "prefill")),  # 16 query heads a KV head, 8 tokens: 128 columns
        ({"heads": 128, "drafts": 7, "use_mla": True}, ("prefill", "decode_kernel")),
    ],
)
def test_routes_are_those_of_the_layers(options: dict, found: tuple[str, str]) -> None:
    assert metrics.routes(config("b", **options)) == found


@pytest.mark.parametrize("draft", [None, "auto", "tq4"])
def test_options_of_an_engine_that_packs_nothing(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda line, *words: lines.append(line % words))
    plain = config("c")
    plain.cache_config.cache_dtype, plain.speculative_config = "fp8", SimpleNamespace(kv_cache_dtype=draft)
    metrics.PackedStats(plain, 0)
    said = "--additional-config: packed_kv has no effect with --kv-cache-dtype fp8; use one of isoquant3, "
    assert [line.startswith(said) for line in lines] == [True] * (draft != "tq4")
    plain.additional_config = {"other": 1}
    metrics.PackedStats(plain, 0)
    assert len(lines) == (draft != "tq4")


@pytest.mark.parametrize(
    ("kernel", "head_size", "decode"),
    [("auto", 128, "decode_kernel"), ("triton", 128, "prefill"), ("auto", 80, "prefill")],
)
def test_on_hopper_the_kernel_decides(
    kernel: str, head_size: int, decode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 columns: only the CUDA kernel takes them, and not of heads of 80 channels."""
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(limits.current_platform, "get_device_capability", lambda: (9, 0))
    assert metrics.routes(config("b", heads=128, drafts=7, kernel=kernel, head_size=head_size)) == ("prefill", decode)


def test_what_is_planned_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell: what an engine is refused for before its workers start."""
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(limits.current_platform, "get_device_capability", lambda: (12, 0))
    assert metrics.planned_kernel(config("b", heads=32, kernel="cuda", head_size=128)).kernel == "CUDA"
    refused = metrics.planned_kernel(config("b", heads=32, kernel="cuda", head_size=256))
    assert refused.reason == "the CUDA kernel does not support head size 256 on compute capability 12.0 (only 9.0)"


def test_on_a_cpu_the_compiler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True, get_device_capability=lambda: None)
    monkeypatch.setattr(limits, "current_platform", platform)
    assert metrics.routes(config("b")) == ("prefill", "decode_kernel")
    assert metrics.routes(config("b", use_mla=True)) == ("prefill", "decode_kernel")
    assert metrics.routes(config("b", dtype=torch.float32)) == ("pytorch", "pytorch")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert metrics.routes(config("b")) == ("pytorch", "pytorch")


LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENTS = {"model_type": "deepseek_v3", "hidden_size": 256, "num_attention_heads": 4, "kv_lora_rank": 512,
           "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}  # fmt: skip


def sized(fields: dict, dtype: torch.dtype = torch.bfloat16, stages: int = 1, **options: object) -> SimpleNamespace:
    """Return a config with what bytes of a token depend on: a model of four layers, on the first of `stages`."""
    fields = {"num_hidden_layers": 4, "quantization_config": options.pop("quantization", None), **fields}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=stages),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: fields, quantization_config=fields["quantization_config"]),
            model="four",
            dtype=dtype,
            get_layers_start_end_indices=lambda _parallel: (0, 4 // stages),
        ),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=options.pop("skip_layers", [])),
        additional_config={"packed_kv": options},
    )


@pytest.mark.parametrize(("dtype", "plain"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_skipped_layers_count_in_the_dtype_of_the_model(dtype: torch.dtype, plain: int) -> None:
    """Layers of 2 KV heads of 64 channels, the second of four skipped."""
    stored, dense = metrics.stored_and_dense(sized(LLAMA, dtype, skip_layers=["1"]), FORMATS["tq4"])
    assert (stored, dense) == (6 * FORMATS["tq4"].slot_bytes(64) + 2 * 2 * 64 * plain, 4 * 2 * 2 * 64 * 2)


def test_skipped_layers_of_a_checkpoint_that_asks_for_fp8() -> None:
    fp8 = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    stored, _ = metrics.stored_and_dense(sized(LLAMA, quantization=fp8, skip_layers=["1"]), FORMATS["tq4"])
    assert stored == 6 * FORMATS["tq4"].slot_bytes(64) + 2 * 2 * 64


def test_skipped_sliding_layers() -> None:
    sliding = {**LLAMA, "model_type": "mistral", "sliding_window": 64}
    stored, _ = metrics.stored_and_dense(sized(sliding, skip_layers=["sliding_window"]), FORMATS["tq4"])
    assert stored == 4 * 2 * 2 * 64 * 2


STATES = {"mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1}
ONE_STAGE = {
    "attention": (LLAMA, 1), "attention beside states": ({**LLAMA, **STATES, "model_type": "falcon_h1"}, 1),
    "layers that run twice": ({**LLAMA, "model_type": "ouro", "total_ut_steps": 2}, 2),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "runs"), ONE_STAGE.values(), ids=ONE_STAGE)
def test_a_stage_of_a_pipeline_has_some_of_the_layers(fields: dict, runs: int) -> None:
    tq4, whole = FORMATS["tq4"], metrics.stored_and_dense(sized(fields), FORMATS["tq4"])
    half = runs * 4 * tq4.slot_bytes(64), runs * 2 * 2 * 2 * 64 * 2
    assert metrics.stored_and_dense(sized(fields, stages=2), tq4) == half
    assert whole == (2 * half[0], 2 * half[1])


@pytest.mark.parametrize(("options", "a_layer"), [({}, 400), ({"latent_rope_bits": 8}, 338)])
def test_bits_of_rope_count(options: dict, a_layer: int) -> None:
    assert metrics.stored_and_dense(sized(LATENTS, **options), FORMATS["tq4"]) == (4 * a_layer, 4 * 1152)


def test_an_engine_without_a_packed_cache_has_none() -> None:
    plain = config("c")
    plain.cache_config.cache_dtype = "fp8"
    stats = metrics.PackedStats(plain, 0)
    stats.log_engine_initialized()
    stats.record(None, step(2, 2, 300, 0))
    assert value("tokens", "c", "prefill") is None
