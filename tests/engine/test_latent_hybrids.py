"""Latent attention (MLA) beside state layers: packed latents, and neither chunks nor the prefix cache change a result.

vLLM's own models of this kind need CUDA, and its CPU platform serves no such model with `auto`; truth is transformers.
On a CPU vLLM keeps the states of rejected drafts, with `auto` as well, so drafts are not tried here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import latent_hybrids
import pytest
import torch
from fake_codecs import register_null_format
from harness import count_preemptions, engine, mean_kl, scheduler, teacher_forced_logits
from packed_kv.attention.latent import kimi
from packed_kv.engine import capacity
from packed_kv.formats import FORMATS
from packed_kv.model.shape import parse
from packed_kv.planning import cache
from packed_kv.window.layer import WindowLayer
from packed_kv_quality.engines import attention_layers, kv_tokens
from test_latent import coded
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the model is patched into vLLM's CPU platform")

IDS = torch.randint(3, 250, (900,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [IDS[:100] + IDS[first : first + length] for first, length in ((200, 10), (300, 130), (500, 201))]
QUESTION, UNIT, CHUNK, MEMORY = IDS[800:850], 16, 37, 64 << 20
hybrid_engine = partial(
    engine, dtype="float32", load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=4,
    kv_cache_memory_bytes=MEMORY, enable_prefix_caching=False,
)  # fmt: skip


@pytest.fixture(params=latent_hybrids.LAYERS)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return latent_hybrids.install(monkeypatch, tmp_path / "model", request.param)


@pytest.fixture
def kimi_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return latent_hybrids.install(monkeypatch, tmp_path / "model", "kimi")


def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Greedy tokens and tokens found in the cache, of prompts that run together."""
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [(list(result.outputs[0].token_ids), result.num_cached_tokens) for result in results]


def generate_alone(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of prompts that run one after the other, nothing of them in the cache."""
    answers = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        answers += generate(llm, [prompt])
    llm.reset_prefix_cache()
    assert not any(cached for _, cached in answers)
    return [tokens for tokens, _ in answers]


def check_pages(llm: LLM, latent_bytes: int) -> None:
    """Pages of latents are bytes of packed tokens; a state is padded to such a page, and no page is padded."""
    for layer in attention_layers(llm):
        assert layer.kv_cache.dtype == torch.uint8 and layer.kv_cache.shape[-1] == latent_bytes
    specs = [group.kv_cache_spec for group in scheduler(llm).kv_cache_config.kv_cache_groups]
    pages = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    assert len(pages) < len(specs)
    assert {spec.page_size_bytes for spec in specs} == {spec.block_size * latent_bytes for spec in pages[:1]}


def test_the_null_codec_is_exact(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks and decodes; rotated, centred and scaled, but not coded."""
    register_null_format(monkeypatch, "null_fp32")
    truth = latent_hybrids.true_logits(latent_hybrids.reference(monkeypatch), IDS[:200])
    with hybrid_engine(model, "null_fp32") as llm:
        errors = {n: (teacher_forced_logits(llm, IDS[:200], n) - truth).abs().max().item() for n in (200, CHUNK, 1)}
    print(f"largest error by tokens of a step: {errors}, logits {truth.std():.1f}")
    assert max(errors.values()) < 2e-3


def test_a_dtype(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes read all from packed pages; their bytes are those of the format, and KV tokens those of the plan."""
    reference = latent_hybrids.reference(monkeypatch)
    with hybrid_engine(model, "tq4") as llm:
        check_pages(llm, 400)
        assert capacity.bytes_per_token(llm.llm_engine.vllm_config) == (2 * 400, 2 * 1152)
        serving = cache.Serving(1024, 0, keeps_prefixes=False)
        found = parse(latent_hybrids.CONFIG, "hybrid", recurrent_dtype="float32")
        assert kv_tokens(llm) == cache.capacity(found, "tq4", serving, MEMORY).tokens
        ours = teacher_forced_logits(llm, IDS[:200], 1)
    expected = latent_hybrids.true_logits(reference, IDS[:200], coded("tq4"))
    error, loss = mean_kl(expected, ours), mean_kl(latent_hybrids.true_logits(reference, IDS[:200]), expected)
    print(f"KL {error:.1e} from the codec in transformers, of {loss:.4f} that the codec costs")
    assert error < loss / 100


@pytest.mark.parametrize("layer", latent_hybrids.LAYERS)
def test_batches_and_prefixes_change_no_token(layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--prefix-match-unit 16` a second turn finds all of the first but its answer, in a part of a block.

    Blocks are much larger than a state, so that copies of states alone would not do. They hold whole prompts: with
    longer ones vLLM's Mamba 2 ends in an IndexError on a CPU, whatever the dtype.
    """
    register_null_format(monkeypatch, "null_fp32")
    model = latent_hybrids.install(monkeypatch, tmp_path / "model", layer)
    options = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "prefix_match_unit": UNIT}
    with hybrid_engine(model, "null_fp32", block_size=512, **options) as llm:
        alone = generate_alone(llm, PROMPTS)
        together = [tokens for tokens, _ in generate(llm, PROMPTS)]
        turns = [prompt + tokens + QUESTION for prompt, tokens in zip(PROMPTS, together, strict=True)]
        behind_hits = generate(llm, turns)
        fresh = generate_alone(llm, turns)
    assert together == alone
    assert [tokens for tokens, _ in behind_hits] == fresh
    for prompt, (_, cached) in zip(PROMPTS, behind_hits, strict=True):
        assert len(prompt) - 1 - UNIT < cached < len(prompt) and cached % UNIT == 0


def test_preemption_changes_no_token(kimi_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register_null_format(monkeypatch, "null_fp32")
    prompts = [IDS[:n] for n in (100, 120, 122, 110)]
    with hybrid_engine(kimi_model, "null_fp32", num_gpu_blocks_override=14) as llm:
        alone = generate_alone(llm, prompts)
        preempted = count_preemptions(llm, monkeypatch)
        together = [tokens for tokens, _ in generate(llm, prompts)]
    assert preempted, "nothing was preempted: the cache is too large for this test"
    assert together == alone


def test_the_recent_window(kimi_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of latents has one, though Kimi's class does not ask its implementation for it; chunks and decodes
    lose less than without."""
    truth = latent_hybrids.true_logits(latent_hybrids.reference(monkeypatch), IDS[:200])
    costs = []
    for tokens in (0, None):
        with hybrid_engine(kimi_model, "turboquant25", recent_tokens=tokens) as llm:
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            windows = [name for name, layer in layers.items() if isinstance(layer, WindowLayer)]
            assert len(windows) == (0 if tokens == 0 else 2)
            costs.append([mean_kl(truth, teacher_forced_logits(llm, IDS[:200], n)) for n in (1, CHUNK)])
            alone = generate_alone(llm, PROMPTS)
            assert [tokens for tokens, _ in generate(llm, PROMPTS)] == alone
    print(f"KL of decodes and chunks, without the window and with it: {costs}")
    assert all(ours < without for ours, without in zip(costs[1], costs[0], strict=True))


def test_layers_with_rope_of_their_own_are_refused(kimi_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi's class with RoPE is that of drafts that write their context themselves."""
    monkeypatch.setattr(kimi, "is_kimi_layer", lambda _layer: False)
    words = "layers of their own kind: .* is a MultiHeadLatentAttention, which writes its cache itself; use"
    with pytest.raises(ValueError, match=words), hybrid_engine(kimi_model, "tq4"):
        pass


def test_patches_of_an_older_package_are_refused(kimi_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.interface import Platform

    monkeypatch.delattr(Platform, "_customized_page_size")
    words = "with state layers: .*, and vLLM has patches of an older packed-kv, .*; run packed-kv-patch revert"
    with pytest.raises(ValueError, match=words), hybrid_engine(kimi_model, "tq4"):
        pass


def test_dtypes_have_pages_beside_states() -> None:
    """A name of each of them is known to the plan, with blocks that hold a state."""
    found = parse(latent_hybrids.CONFIG, "hybrid")
    for name in FORMATS:
        assert cache.capacity(found, name, cache.Serving(1024, 0), MEMORY).tokens > 0
