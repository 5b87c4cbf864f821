"""Engines of Hy4 on the CPU: picked latents beside attention sinks, with an exact indexer in PyTorch.

vLLM's own model runs, against transformers'.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparse_models
import tiny_models
import torch
from fake_codecs import register_null_format
from harness import engine, keep_chunks, kv_tokens, mean_kl, teacher_forced_logits
from packed_kv.engine import capacity, latent_backend, registration
from packed_kv.refusals.facts import Facts, Latents
from packed_kv_quality.engines import attention_layers
from safetensors.torch import load_file, save_file
from test_latent import coded
from test_sparse import (
    CHUNK,
    MEMORY,
    OPTIONS,
    TOKEN_IDS,
    check_chunks_prefix_hits_and_batches,
    greedy,
    with_pairs_of_rope,
)
from tiny_models import true_logits
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the indexer is patched into the CPU platform")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tiny_models.hy_v4(), tmp_path_factory.mktemp("hy_v4"))


@pytest.fixture
def tiny_engine(monkeypatch: pytest.MonkeyPatch, demo_model: str):
    sparse_models.install(monkeypatch)
    keep_chunks(monkeypatch)
    return partial(engine, **{**OPTIONS, "tokenizer": demo_model})


def test_the_null_codec_is_exact(model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks and decodes; rotated, centred and scaled. A layer without an indexer has the picks of the
    one before it. Faults are seen: sinks that are left out, or that meet centred scores."""
    register_null_format(monkeypatch, "null_fp32")
    truth = true_logits(model, TOKEN_IDS)
    with tiny_engine(model, "null_fp32") as llm:
        layers = attention_layers(llm)
        for layer in layers:
            assert layer.impl.is_sparse and layer.prefill_backend is None
            assert torch.equal(layer.impl.sinks, torch.linspace(-3, 6, 4))
        assert [layer.impl._indexer is None for layer in layers] == [False, True, False]
        errors = {n: (teacher_forced_logits(llm, TOKEN_IDS, n) - truth).abs().max().item() for n in (200, CHUNK, 8, 1)}
        print(f"largest error by tokens of a step: {errors}, logits {truth.std():.1f}")
        assert max(errors.values()) < 1e-3
        kernels = layers[1].impl.kernels
        with monkeypatch.context() as patch:
            patch.setattr(kernels.layer.codec, "stored_mean", lambda: None)
            faults = [(teacher_forced_logits(llm, TOKEN_IDS, n) - truth).abs().max().item() for n in (CHUNK, 1)]
        monkeypatch.setattr(kernels, "layer", replace(kernels.layer, sinks=None))
        faults += [(teacher_forced_logits(llm, TOKEN_IDS, n) - truth).abs().max().item() for n in (CHUNK, 1)]
    print(f"largest error by fault: {faults}")
    assert min(faults) > 0.02


def test_chunks_prefix_hits_and_batches_change_no_token(
    model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_null_format(monkeypatch, "null_fp32")
    check_chunks_prefix_hits_and_batches(model, tiny_engine)


def test_a_dtype(model: str, tiny_engine) -> None:
    """Decodes lose what the codec does; a whole prompt nothing. KV tokens are those of the bytes of rows, and of index
    keys in the layers that have an indexer."""
    truth = true_logits(model, TOKEN_IDS)
    with tiny_engine(model, "tq4") as llm:
        config = llm.llm_engine.vllm_config
        a_token = 3 * 400 + 2 * 132
        assert capacity.bytes_per_token(config) == (a_token, 3 * 1152 + 2 * 132)
        block = config.cache_config.block_size
        assert kv_tokens(llm) == pytest.approx(MEMORY / a_token, abs=block)
        whole, decodes = (teacher_forced_logits(llm, TOKEN_IDS, n) for n in (200, 1))
    assert (whole - truth).abs().max() < 2e-3
    expected = true_logits(model, TOKEN_IDS, latents=with_pairs_of_rope(coded("tq4")))
    error, loss = mean_kl(expected, decodes), mean_kl(truth, expected)
    print(f"KL {error:.1e} from the codec in transformers, of {loss:.4f}")
    assert error < loss / 20


def changed(model: str, folder: Path, **fields: object) -> str:
    """The model with other fields in its config."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(f"{model}/model.safetensors")
    config = json.loads(Path(model, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)


def test_dense_layers_with_sinks_are_refused(
    model: str, tiny_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the config, before a layer is made; and by the layer, if the config did not tell: vLLM takes no other backend
    for it, which would leave the sinks out."""
    dense = changed(model, tmp_path / "dense", layer_types=["indexed_attention", "full_attention", "indexed_attention"])
    words = "dense latent attention .MLA. with attention sinks: HYV4ForCausalLM, some of whose layers read all tokens"
    with pytest.raises(ValueError, match=words), tiny_engine(dense, "tq4"):
        pass
    facts = registration.engine_facts
    monkeypatch.setattr(
        registration, "engine_facts", lambda config: Facts(*facts(config).records, Latents(has_dense_layers=False))
    )
    words = "these options of an attention layer: sinks, which the packed backends do not know"
    with pytest.raises(ValueError, match=words), tiny_engine(dense, "tq4"):
        pass


def test_plain_layers_are_served_on_cuda(model: str, tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are not: their store may lie in a CUDA graph apart from their attention."""
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: None)
    monkeypatch.setattr(registration, "current_platform", platform)
    monkeypatch.setattr(registration, "version_without_rows", lambda: "")
    with tiny_engine(model, "tq4") as llm:
        assert all(layer.impl.kernels is not None for layer in attention_layers(llm))


def test_every_backend_takes_sinks() -> None:
    """Else vLLM's Hy4 would drop them with a warning."""
    for make in (latent_backend.latent_backend_of, latent_backend.sparse_latent_backend_of):
        assert make("tq4", 512, 64, 16).supports_sink()


def drafted(model: str, tokenizer: str) -> list[list[tuple[list[int], int]]]:
    """Greedy tokens without drafts and with those of MTP."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        sparse_models.install(patch)
        keep_chunks(patch)
        register_null_format(patch, "null_fp32")
        for config in (None, {"method": "mtp", "num_speculative_tokens": 2}):
            options = {**OPTIONS, "tokenizer": tokenizer, "speculative_config": config}
            with engine(model, "null_fp32", **options) as llm:
                assert [layer.impl.sinks.tolist() for layer in attention_layers(llm)] == [[-3, 0, 3, 6]] * (
                    3 if config is None else 4
                )
                found.append(greedy(llm, [TOKEN_IDS[:n] for n in (60, 30, 5)]))
    return found


def test_drafts_change_no_token(model: str, demo_model: str, tmp_path: Path) -> None:
    """MTP, whose layer has sinks and picks of its own. In a process of its own; see the test of n-grams."""
    weights = load_file(f"{model}/model.safetensors")
    last = {name: x for name, x in weights.items() if name.startswith("model.layers.2.") and ".hc_" not in name}
    draft = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in last.items()}
    draft |= {f"model.layers.3.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "final_layernorm")}
    draft["model.layers.3.eh_proj.weight"] = torch.cat([torch.zeros(64, 64), torch.eye(64)], dim=1)
    with_draft = changed(model, tmp_path / "mtp", num_nextn_predict_layers=1)
    Path(with_draft, "model.safetensors").unlink()
    save_file(weights | draft, Path(with_draft, "model.safetensors"), {"format": "pt"})
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        plain, found = process.submit(drafted, with_draft, demo_model).result()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]


def test_without_sinks(model: str, tiny_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that turns them off: prompts of up to 24 tokens are attended to densely again."""
    register_null_format(monkeypatch, "null_fp32")
    plain, silent = (changed(model, tmp_path / name, learnable_sink=name == "silent") for name in ("plain", "silent"))
    weights = load_file(f"{model}/model.safetensors")
    sinks = {name for name in weights if "sink" in name}
    of_silent = {name: x - 1e9 if name in sinks else x for name, x in weights.items()}
    of_plain = {name: x for name, x in weights.items() if name not in sinks}
    for folder, kept in ((silent, of_silent), (plain, of_plain)):
        Path(folder, "model.safetensors").unlink()
        save_file(kept, Path(folder, "model.safetensors"), {"format": "pt"})
    truth = true_logits(silent, TOKEN_IDS[:60])
    with tiny_engine(plain, "null_fp32") as llm:
        assert all(layer.impl.sinks is None and layer.prefill_backend for layer in attention_layers(llm))
        errors = [(teacher_forced_logits(llm, TOKEN_IDS[:60], n) - truth).abs().max().item() for n in (60, 20, 1)]
    print(f"largest errors {errors}")
    assert max(errors) < 1e-3
