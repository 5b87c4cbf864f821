"""Engines of sparse attention over latents (DeepSeek V3.2's kind), on the CPU, with an exact indexer in PyTorch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import sparse_models
import tiny_models
import torch
from fake_codecs import register_null_format
from harness import (
    count_preemptions,
    engine,
    keep_chunks,
    kv_tokens,
    mean_kl,
    scheduler,
    teacher_forced_logits,
)
from packed_kv.engine import capacity, registration
from packed_kv.formats import FORMATS
from packed_kv.sharing import fingerprint
from packed_kv.window.layer import WindowLayer
from packed_kv_quality.engines import attention_layers
from test_latent import coded
from test_models import generate_with_ngram
from tiny_models import true_logits
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the indexer is patched into the CPU platform")

TOKEN_IDS = torch.randint(tiny_models.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNK = 40
MEMORY = 16 << 20
OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory_bytes": MEMORY,
    "block_size": 16,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "compilation_config": {"custom_ops": ["none"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tiny_models.deepseek_v32(), tmp_path_factory.mktemp("deepseek_v32"))


@pytest.fixture
def tiny_engine(monkeypatch: pytest.MonkeyPatch, demo_model: str):
    sparse_models.install(monkeypatch)
    keep_chunks(monkeypatch)
    return partial(engine, **{**OPTIONS, "tokenizer": demo_model})


def with_pairs_of_rope(latents: Callable) -> Callable:
    """The same for transformers' model, whose channels that rotate together are halves apart; vLLM's are neighbours."""

    def of_halves(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        key, value, coded_rope = latents(latent, rope.unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2))
        return key, value, coded_rope.unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)

    return of_halves


def greedy(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Greedy tokens, and tokens found in the cache, of prompts that run together."""
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [(list(result.outputs[0].token_ids), result.num_cached_tokens) for result in results]


def test_the_null_codec_is_exact(model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks, of which those up to 24 tokens are attended to densely, and decodes; rotated, centred and
    scaled."""
    register_null_format(monkeypatch, "null_fp32")
    truth = true_logits(model, TOKEN_IDS)
    with tiny_engine(model, "null_fp32") as llm:
        for layer in attention_layers(llm):
            assert (
                layer.impl.is_sparse
                and not layer.impl.masked_mha_available
                and layer.impl.weights.up[1].data_ptr() == layer.W_UV.data_ptr()
            )
        errors = {n: (teacher_forced_logits(llm, TOKEN_IDS, n) - truth).abs().max().item() for n in (200, CHUNK, 8, 1)}
    print(f"largest error by tokens of a step: {errors}, logits {truth.std():.1f}")
    assert max(errors.values()) < 2e-3


def check_chunks_prefix_hits_and_batches(model: str, tiny_engine: Callable) -> None:
    """Prompts of a batch, of which the first is chunked, against each alone in transformers; then behind hits."""
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, tiny_models.VOCAB, (n,), generator=random).tolist() for n in (150, 37, 5, 90)]
    prompts.append([*prompts[0][:130], 5, 6, 7])
    with tiny_engine(model, "null_fp32") as llm:
        scheduler(llm).max_num_scheduled_tokens = CHUNK
        found = [*greedy(llm, prompts[:4]), *greedy(llm, prompts[4:])]
        assert len(scheduler(llm).kv_cache_config.kv_cache_groups) == 1
    assert [cached for _, cached in found] == [0, 0, 0, 0, 128]
    for prompt, (tokens, _) in zip(prompts, found, strict=True):
        expected = true_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tokens == expected


def test_chunks_prefix_hits_and_batches_change_no_token(
    model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_null_format(monkeypatch, "null_fp32")
    check_chunks_prefix_hits_and_batches(model, tiny_engine)


def test_preemption_changes_no_token(model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    register_null_format(monkeypatch, "null_fp32")
    prompts = [[i, *TOKEN_IDS[:n]] for i, n in enumerate((123, 125, 126, 124))]
    with tiny_engine(model, "null_fp32", num_gpu_blocks_override=34) as llm:
        alone = []
        for prompt in prompts:
            llm.reset_prefix_cache()
            alone += greedy(llm, [prompt])
        llm.reset_prefix_cache()
        preempted = count_preemptions(llm, monkeypatch)
        together = greedy(llm, prompts)
    assert preempted, "nothing was preempted: the cache is too large for this test"
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]


@pytest.mark.parametrize(("name", "rope_bits", "row_bytes"), [("tq4", 16, 400), ("turboquant25", 8, 240)])
def test_a_dtype(name: str, rope_bits: int, row_bytes: int, model: str, tiny_engine) -> None:
    """Decodes lose what the codec does; a whole prompt, which reads its own latents as they are, nothing; chunks lie
    between. KV tokens are those of the bytes of rows and index keys."""
    truth = true_logits(model, TOKEN_IDS)
    options = {"packed_kv": {"latent_rope_bits": rope_bits}}
    with tiny_engine(model, name, additional_config=options) as llm:
        config = llm.llm_engine.vllm_config
        assert capacity.bytes_per_token(config) == (3 * (row_bytes + 132), 3 * (1152 + 132))
        block = config.cache_config.block_size
        assert kv_tokens(llm) == MEMORY // (3 * (row_bytes + 132)) // block * block
        assert all(layer.kv_cache.shape[-1] == row_bytes for layer in attention_layers(llm))
        whole, chunks, decodes = (teacher_forced_logits(llm, TOKEN_IDS, n) for n in (200, CHUNK, 1))
    assert (whole - truth).abs().max() < 2e-3
    expected = true_logits(model, TOKEN_IDS, latents=with_pairs_of_rope(coded(name, rope_bits=rope_bits)))
    error, loss = mean_kl(expected, decodes), mean_kl(truth, expected)
    print(f"{name}: KL {error:.1e} from the codec in transformers, of {loss:.4f}; chunks {mean_kl(truth, chunks):.4f}")
    assert error < loss / 20
    assert 0 < mean_kl(truth, chunks) < loss


def test_bf16_is_near_fp32(model: str, tiny_engine) -> None:
    """Queries and latents of bf16 through the same kernels, by what the dtype costs."""
    truth = true_logits(model, TOKEN_IDS)
    with tiny_engine(model, "tq4", dtype="bfloat16") as llm:
        decodes = teacher_forced_logits(llm, TOKEN_IDS, 1)
    with tiny_engine(model, "tq4") as llm:
        loss = mean_kl(truth, teacher_forced_logits(llm, TOKEN_IDS, 1))
    print(f"KL {mean_kl(truth, decodes):.4f} in bf16, {loss:.4f} in fp32")
    assert mean_kl(truth, decodes) < 3 * loss


def drafted(model: str, tokenizer: str) -> list:
    """Greedy tokens and forward passes, without and with n-gram drafts."""
    with pytest.MonkeyPatch.context() as patch:
        sparse_models.install(patch)
        keep_chunks(patch)
        register_null_format(patch, "null_fp32")
        return generate_with_ngram(model, tokenizer, TOKEN_IDS[:30] * 3, 60, name="null_fp32", **OPTIONS)


def test_drafts_change_no_token(model: str, demo_model: str) -> None:
    """Each draft token has its own picks. In a process of its own: vLLM 0.32 starts no other engine in a process that
    has loaded numba for drafting."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        plain, plain_steps, tokens, steps = process.submit(drafted, model, demo_model).result()
    assert plain == tokens and plain_steps == 60 > steps


def test_a_window_that_was_asked_for_is_refused(model: str, tiny_engine) -> None:
    words = "recent_tokens 64 is not possible with sparse attention .its layers read picked tokens"
    with pytest.raises(ValueError, match=words), tiny_engine(model, "tq4", recent_tokens=64):
        pass
    with tiny_engine(model, "tq4", recent_tokens=None) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        assert not any(isinstance(layer, WindowLayer) for layer in layers.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            "sparse attention with a KV connector: OffloadingConnector, which was not tried",
        ),
        ({"enable_lora": True}, r"latent attention .MLA. with LoRA: adapters"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, r"latent attention .MLA. with skipped layers: 0, whose pages"),
    ],
    ids=["connector", "lora", "skipped layers"],
)
def test_options_that_are_refused(options: dict, words: str, model: str, tiny_engine) -> None:
    with pytest.raises(ValueError, match=words), tiny_engine(model, "tq4", **options):
        pass


def test_layers_of_cuda_that_store_themselves_are_refused(model: str, tiny_engine, monkeypatch) -> None:
    """A plain layer on CUDA, and a vLLM whose layer does not let ours store, before weights are loaded."""
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: None)
    monkeypatch.setattr(registration, "current_platform", platform)
    words = "sparse attention with this vLLM: .*, whose layers write their cache themselves; .* upgrade vLLM"
    with pytest.raises(ValueError, match=words), tiny_engine(model, "tq4"):
        pass
    monkeypatch.setattr(registration, "version_without_rows", lambda: "")
    words = "layers of their own kind: .* is a MLAAttention, which writes its cache itself"
    with pytest.raises(ValueError, match=words), tiny_engine(model, "tq4"):
        pass


def test_pages_of_rows_have_keys_of_their_own(model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the same format in micro-blocks are a miss."""
    with tiny_engine(model, "tq4") as llm:
        config = llm.llm_engine.vllm_config
        rows = fingerprint.fingerprint(config, FORMATS["tq4"])
        monkeypatch.setattr(fingerprint, "picks_tokens", lambda _config: False)
        assert fingerprint.fingerprint(config, FORMATS["tq4"]) != rows
