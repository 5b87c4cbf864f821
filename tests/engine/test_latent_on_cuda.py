"""Latent attention (MLA) on CUDA: stored, gathered and attended to by kernels, in graphs, with drafts.

CI has no GPU; `scripts/gpu_tests.sh` runs these.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import calibration_files
import pytest
import tiny_models
import torch
from harness import engine, mean_kl, teacher_forced_logits
from packed_kv_quality.engines import attention_layers
from test_latent import TOKEN_IDS, coded
from tiny_models import true_logits
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SAMPLING = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
LENGTHS = (3, 17, 64, 129, 200)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny_models.deepseek_v2(qk_nope_head_dim=128, v_head_dim=128)  # as DeepSeek's, for FlashAttention
    return tiny_models.save(config, tmp_path_factory.mktemp("deepseek_v2"))


@pytest.fixture
def latent_engine(model: str, demo_model: str) -> Callable:
    def start(name: str, **options: object):
        given = {"dtype": "float16", "tokenizer": demo_model, "max_model_len": 512, **options}
        return engine(model, name, **given)

    return start


def greedy(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": TOKEN_IDS[:length]} for length in LENGTHS]
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, SAMPLING, use_tqdm=False)]


def graphs(mode: str, tokens_each: int = 1) -> dict:
    sizes = [tokens_each * n for n in (1, 2, 4, len(LENGTHS), 8)]
    return {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes},
    }


@pytest.mark.parametrize("name", ["tq4", "isoquant3", "turboquant25"])
def test_logits_are_those_of_the_codec(name: str, model: str, latent_engine) -> None:
    """Decodes read all from pages, and lose what the codec does. Chunks of 37 tokens see their own latents raw, so they
    are nearer to the truth.

    The engine's fp16 moves latents across borders between codes, so its errors are partly others than those of the
    codec in transformers, which has fp32. vLLM's CPU engine in fp16 has 0.20 (turboquant25) to 0.26 (tq4) of the
    loss, too.
    """
    truth = true_logits(model, TOKEN_IDS)
    expected = true_logits(model, TOKEN_IDS, latents=coded(name))
    with latent_engine(name) as llm:
        decodes, chunks = (teacher_forced_logits(llm, TOKEN_IDS, chunk).cpu() for chunk in (1, 37))
    error, loss = mean_kl(expected, decodes), mean_kl(truth, expected)
    own, of_chunks = mean_kl(truth, decodes), mean_kl(truth, chunks)
    print(f"{name}: KL {error:.1e} from the codec in transformers, which costs {loss:.4f}, ours {own:.4f}")
    assert error < loss / 3
    assert abs(own / loss - 1) < 0.05 and of_chunks < loss


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_the_window(kernel: str, model: str, latent_engine) -> None:
    """As long as the text, it leaves little to pay for, in decodes, drafts' lengths and chunks; a shorter one some."""
    truth = true_logits(model, TOKEN_IDS)
    options = {"additional_config": {"packed_kv": {"decode_kernel": kernel}}}
    costs = {}
    for window in (0, 64, 256):
        with latent_engine("turboquant25", recent_tokens=window, **options) as llm:
            costs[window] = [mean_kl(truth, teacher_forced_logits(llm, TOKEN_IDS, n).cpu()) for n in (1, 37)]
    print(f"{kernel}: KL by window, of decodes and chunks {costs}")
    assert all(cost < costs[0][0] / 50 for cost in costs[256])
    assert costs[64][0] < costs[0][0] * 0.7


@pytest.mark.parametrize("window", [0, None])
@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_graphs_give_eager_tokens(name: str, window: int | None, latent_engine) -> None:
    with latent_engine(name, recent_tokens=window) as llm:
        eager = greedy(llm)
    with latent_engine(name, recent_tokens=window, **graphs("FULL_DECODE_ONLY")) as llm:
        assert greedy(llm) == eager


def test_a_calibrated_dtype_in_graphs(latent_engine, tmp_path: Path) -> None:
    """Decodes in CUDA graphs give the logits of eager ones, also after prompts that were stored outside graphs."""
    file = calibration_files.write(tmp_path, calibration_files.content(3, 1, 512, 128, version=2))
    options = {"additional_config": {"packed_kv": {"calibration": str(file)}}, "recent_tokens": 0}
    with latent_engine("tq4", **options) as llm:
        expected = teacher_forced_logits(llm, TOKEN_IDS, 1).cpu()
    with latent_engine("tq4", **options, **graphs("FULL_DECODE_ONLY")) as llm:
        greedy(llm)
        llm.reset_prefix_cache()  # the prompts begin as that text does
        decodes = teacher_forced_logits(llm, TOKEN_IDS, 1).cpu()
    error = mean_kl(expected, decodes)
    print(f"KL {error:.1e} from the decodes without graphs")
    assert error < 1e-3


def test_rope_at_8_bits(model: str, latent_engine) -> None:
    options = {"additional_config": {"packed_kv": {"latent_rope_bits": 8}}}
    truth = true_logits(model, TOKEN_IDS)
    expected = true_logits(model, TOKEN_IDS, latents=coded("tq4", rope_bits=8))
    with latent_engine("tq4", **options) as llm:
        decodes = teacher_forced_logits(llm, TOKEN_IDS, 1).cpu()
        llm.reset_prefix_cache()  # the prompts begin as that text does
        eager = greedy(llm)
    error, loss, own = mean_kl(expected, decodes), mean_kl(truth, expected), mean_kl(truth, decodes)
    print(f"KL {error:.1e} from the codec in transformers, which costs {loss:.4f}, ours {own:.4f}")
    assert error < loss / 3 and abs(own / loss - 1) < 0.05
    with latent_engine("tq4", **options, **graphs("FULL_DECODE_ONLY")) as llm:
        assert greedy(llm) == eager


@pytest.mark.parametrize("window", [0, None])
def test_drafts_in_graphs_change_no_token(window: int | None, latent_engine) -> None:
    """Of random weights many tokens are all but equally likely, so one other first token of the five is let pass."""
    options = {"recent_tokens": window}
    with latent_engine("tq4", **options) as llm:
        plain = greedy(llm)
    with latent_engine("tq4", speculative_config=NGRAM, **options, **graphs("FULL_DECODE_ONLY", 4)) as llm:
        drafted = greedy(llm)
    same = sum(ours == expected for ours, expected in zip(drafted, plain, strict=True))
    print(f"{same} of {len(plain)} requests alike")
    assert same >= len(plain) - 1


def test_prefix_hits_and_weights_loaded_again(latent_engine) -> None:
    """What a hit reads back is compared by the chunks of `test_logits_are_those_of_the_codec`: random weights make so
    many tokens all but equally likely that greedy ones say nothing."""
    with latent_engine("tq4", **graphs("FULL_DECODE_ONLY")) as llm:
        prompt = {"prompt_token_ids": TOKEN_IDS}
        first, again = (llm.generate(prompt, SAMPLING, use_tqdm=False)[0] for _ in range(2))
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens > 100
        for layer in attention_layers(llm):
            addresses = layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()
            layer.process_weights_after_loading(torch.float16)
            assert addresses == (layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr())
        (reloaded,) = llm.generate(prompt, SAMPLING, use_tqdm=False)
        assert list(reloaded.outputs[0].token_ids) == list(again.outputs[0].token_ids)
