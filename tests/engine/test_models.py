"""Model variety: heads, head sizes, windows, soft caps, sinks, skipped and shared layers, activations, block sizes.

The truth is transformers in float64, with K and V sent through the public codec. The engine stores, pages, chunks and
reads them back, and has to come to the same logits: its own arithmetic is fp32, and a code that flips because of that
costs orders of magnitude less than quantising.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import tiny_models
import torch
from fake_codecs import register_null_format
from harness import engine, mean_kl, model_of, scheduler, teacher_forced_logits
from packed_kv.engine import capacity
from packed_kv.formats import FORMATS
from packed_kv.reference import attention as active_blocks
from packed_kv_quality.engines import bytes_per_token
from tiny_models import true_logits
from vllm import SamplingParams

MODELS = {
    "gqa": tiny_models.llama,
    "mha": partial(tiny_models.llama, num_key_value_heads=4),
    "head_dim_80": partial(tiny_models.llama, head_dim=80),
    "head_dim_96": partial(tiny_models.llama, head_dim=96),
    "head_dim_192": partial(tiny_models.llama, head_dim=192),
    "head_dim_256": partial(tiny_models.llama, head_dim=256),
    "sliding_window": tiny_models.mistral,
    "soft_cap": tiny_models.gemma2,
    "interleaved": tiny_models.gemma3,
    "head_sizes_and_shared_layers": tiny_models.gemma4,
    "attention_sinks": tiny_models.gpt_oss,
    "chunked_attention": tiny_models.llama4,
}
TOKEN_IDS = torch.randint(VOCAB := tiny_models.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNK = 37
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 512}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: tiny_models.save(make(), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 200 tokens take several tiles, and a tile several turns of rows."""
    monkeypatch.setattr(active_blocks, "KV_TILE", 64)
    monkeypatch.setattr(active_blocks, "MAX_SCORES", 4 * 64 * 10)


@pytest.fixture
def tiny_engine(demo_model: str):
    defaults = {**ENGINE, "tokenizer": demo_model}
    return lambda model, kv_cache_dtype, **options: engine(model, kv_cache_dtype, **{**defaults, **options})


def logits(tiny_engine, model: str, kv_cache_dtype: str, **options: object) -> torch.Tensor:
    with tiny_engine(model, kv_cache_dtype, **options) as llm:
        return teacher_forced_logits(llm, TOKEN_IDS, CHUNK)


def check_dtype(ours: torch.Tensor, model: str, kv_cache_dtype: str, skip_layers: tuple[int, ...] = ()) -> None:
    """Check that logits are those of the codec and not of plain K and V (which are 100 times farther away at least)."""
    plain = true_logits(model, TOKEN_IDS)
    expected = true_logits(model, TOKEN_IDS, kv_cache_dtype, skip_layers)
    error, loss = mean_kl(expected, ours), mean_kl(plain, expected)
    print(f"{kv_cache_dtype}: KL {error:.1e} from the codec in transformers, of {loss:.4f} that the codec costs")
    assert error < loss / 100


@pytest.mark.parametrize("name", MODELS)
def test_null_codec_is_as_exact_as_vllm(name: str, folder_of, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our path on fp32 pages and vLLM's own attention make errors of one size."""
    model = folder_of[name]
    truth = true_logits(model, TOKEN_IDS)
    theirs = (logits(tiny_engine, model, "auto") - truth).abs().max()
    register_null_format(monkeypatch, "null_fp32")
    ours = (logits(tiny_engine, model, "null_fp32") - truth).abs().max()
    print(f"{name}: largest error {ours:.1e}, vLLM's {theirs:.1e}")
    assert ours < 3 * theirs


@pytest.mark.parametrize(("name", "kv_cache_dtype"), list(zip(MODELS, [*FORMATS] * 2, strict=False)))
def test_dtype_equals_its_codec(name: str, kv_cache_dtype: str, folder_of, tiny_engine) -> None:
    with tiny_engine(folder_of[name], kv_cache_dtype) as llm:
        assert bytes_per_token(llm) == capacity.bytes_per_token(llm.llm_engine.vllm_config)[0]
        check_dtype(teacher_forced_logits(llm, TOKEN_IDS, CHUNK), folder_of[name], kv_cache_dtype)


@pytest.mark.parametrize("skip_layers", [(0,), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("name", ["gqa", "sliding_window"])
def test_skipped_layers_stay_plain(name: str, skip_layers: tuple[int, ...], folder_of, tiny_engine) -> None:
    model = folder_of[name]
    with tiny_engine(model, "tq4", kv_cache_dtype_skip_layers=[str(layer) for layer in skip_layers]) as llm:
        assert bytes_per_token(llm) == capacity.bytes_per_token(llm.llm_engine.vllm_config)[0]
        check_dtype(teacher_forced_logits(llm, TOKEN_IDS, CHUNK), model, "tq4", skip_layers)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int, folder_of, tiny_engine) -> None:
    model = folder_of["interleaved"]
    with tiny_engine(model, "isoquant3", block_size=block_size) as llm:
        groups = scheduler(llm).kv_cache_config.kv_cache_groups
        assert {group.kv_cache_spec.block_size for group in groups} == {block_size}
        check_dtype(teacher_forced_logits(llm, TOKEN_IDS, CHUNK), model, "isoquant3")


@pytest.mark.parametrize("activations", ["float16", "bfloat16"])
def test_activation_types(activations: str, folder_of, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision costs our path no more than vLLM's own, and a dtype still costs what its codec costs."""
    model = folder_of["gqa"]
    truth = true_logits(model, TOKEN_IDS)
    theirs = mean_kl(truth, logits(tiny_engine, model, "auto", dtype=activations))
    with monkeypatch.context() as patch:
        register_null_format(patch, "null_fp32")
        ours = mean_kl(truth, logits(tiny_engine, model, "null_fp32", dtype=activations))
    with tiny_engine(model, "isoquant4", dtype=activations) as llm:
        packed = mean_kl(truth, teacher_forced_logits(llm, TOKEN_IDS, 1))  # a longer chunk attends to itself as it is
    expected = mean_kl(truth, true_logits(model, TOKEN_IDS, "isoquant4"))
    print(f"{activations}: KL {ours:.1e}, vLLM's {theirs:.1e}; isoquant4 {packed:.4f}, its codec {expected:.4f}")
    assert ours < 2 * theirs
    assert packed == pytest.approx(expected, rel=0.25)


def test_ngram_speculation_changes_no_token(folder_of, demo_model: str) -> None:
    """In a process of its own: vLLM 0.32 starts no other engine in a process that has loaded numba for drafting."""
    model, prompt, tokens = folder_of["interleaved"], TOKEN_IDS[:30] * 3, 100
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        found = process.submit(generate_with_ngram, model, demo_model, prompt, tokens).result()
    plain, plain_steps, drafted, steps = found
    truth = true_logits(model, prompt + plain, "planarquant4")[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert plain == truth
    assert drafted == truth
    assert plain_steps == tokens
    assert steps < tokens, "no draft token was accepted"


def generate_with_ngram(
    model: str, tokenizer: str, prompt: list[int], tokens: int, name: str = "planarquant4", **options: object
) -> list:
    """Greedy tokens and forward passes, without and with n-gram speculation."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    found: list = []
    for speculation in (None, ngram):
        given = {**ENGINE, "tokenizer": tokenizer, "speculative_config": speculation, **options}
        with engine(model, name, **given) as llm:
            passes: list[object] = []
            model_of(llm).register_forward_hook(lambda *_args, passes=passes: passes.append(None))
            sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            (result,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        found += [list(result.outputs[0].token_ids), len(passes)]
    return found
