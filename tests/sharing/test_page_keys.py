"""Pages that leave an engine are found again by engines of the same page format only."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields, replace
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import tiny_models
import torch
import transformers
from block_store import BlockStore
from calibration_files import ORDERS, OUTLIERS, content, write
from checkout import DEMO_MODEL
from harness import engine
from packed_kv import formats
from packed_kv.calibration_file import CalibrationError
from packed_kv.channel_calibration import MIXES_NEIGHBOURS
from packed_kv.engine import registration
from packed_kv.formats import FORMATS
from packed_kv.refusals import rules
from packed_kv.settings.model_options import MODEL_OPTIONS, TOKENIZER_OPTIONS, keep_numbers, model_numbers
from packed_kv.sharing.fingerprint import fingerprint
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config import ModelConfig, MultiModalConfig
from vllm.config.cache import kv_cache_page_format
from vllm.distributed.kv_transfer.kv_connector.utils import kv_postprocess_blksize_on_receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash as nixl_hash
from vllm.engine.arg_utils import EngineArgs

LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 3, 2, 64, 16
PROMPT = torch.randint(tiny_models.VOCAB, (4 * BLOCK + 2,), generator=torch.Generator().manual_seed(1)).tolist()


def generate(model: Path, folder: Path) -> tuple[int, list[int]]:
    """Tokens of `PROMPT` that a new engine found in the store `folder`, and those that it goes on with."""
    connector = {
        "kv_connector": BlockStore.__name__,
        "kv_connector_module_path": BlockStore.__module__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "max_model_len": 256}
    options |= {"block_size": BLOCK, "tokenizer": str(DEMO_MODEL), "kv_transfer_config": connector}
    with engine(str(model), "turboquant25", **options) as llm:
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        (result,) = llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
    return result.num_cached_tokens, list(result.outputs[0].token_ids)


def test_engines_share_pages_of_one_format_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = f"{BlockStore.__module__}.{BlockStore.__name__}"
    monkeypatch.setattr(rules, "CONNECTORS", (*rules.CONNECTORS, connector))
    plain = Path(tiny_models.save(tiny_models.llama(), tmp_path / "plain"))
    calibrated = Path(shutil.copytree(plain, tmp_path / "calibrated"))
    write(calibrated, content(LAYERS, KV_HEADS, HEAD_DIM))
    store = tmp_path / "store"
    store.mkdir()
    found, tokens = generate(calibrated, store)
    assert found == 0
    assert generate(calibrated, store) == (4 * BLOCK, tokens)
    found, other_tokens = generate(plain, store)
    assert found == 0
    assert other_tokens != tokens
    other_weights = Path(shutil.copytree(plain, tmp_path / "other_weights"))
    (weights,) = other_weights.glob("*.safetensors")
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    assert generate(other_weights, store)[0] == 0
    moved = plain.rename(tmp_path / "moved")
    assert generate(moved, store) == (4 * BLOCK, other_tokens)
    monkeypatch.setattr(formats, "FORMAT_VERSION", formats.FORMAT_VERSION + 1)
    assert generate(calibrated, store) == (0, tokens)


def settings(model: Path, kv_cache_dtype: str, *, skip: list[str] | None = None, file: Path | None = None) -> Any:
    """Stand-in for a VllmConfig, as far as a fingerprint depends on it."""
    model_config = SimpleNamespace(
        model=str(model), revision=None, dtype="bfloat16", use_mla=False, hf_text_config=SimpleNamespace(),
        hf_config={}, architecture="LlamaForCausalLM",
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model_config,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype=kv_cache_dtype, kv_cache_dtype_skip_layers=skip or []),
        additional_config={"packed_kv": {"calibration": str(file)}} if file else {},
    )


def fingerprints(*args: Any, **options: Any) -> dict[str, str]:
    return {name: fingerprint(settings(*args, name, **options), fmt) for name, fmt in FORMATS.items()}


def differ(some: dict[str, str], others: dict[str, str]) -> set[str]:
    return {name for name in FORMATS if some[name] != others[name]}


def test_fingerprint_of_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fingerprints(tmp_path)
    assert len({*plain.values()}) == len(FORMATS)
    assert all(len(digits) == 16 and int(digits, 16) for digits in plain.values())
    (tmp_path / "other").mkdir()
    assert plain == fingerprints(tmp_path / "other")
    assert differ(plain, fingerprints(tmp_path, skip=["0"])) == {*FORMATS}
    assert fingerprints(tmp_path, skip=["0", "2"]) == fingerprints(tmp_path, skip=["2", "0"])
    monkeypatch.setattr(formats, "FORMAT_VERSION", formats.FORMAT_VERSION + 1)
    assert differ(plain, fingerprints(tmp_path)) == {*FORMATS}


def test_fingerprint_of_the_bits_of_rope(tmp_path: Path) -> None:
    """Of latents alone."""
    found = {}
    for bits, is_latent in ((16, True), (8, True), (8, False)):
        config = settings(tmp_path, "tq4")
        config.additional_config = {"packed_kv": {"latent_rope_bits": bits}}
        config.model_config.use_mla = is_latent
        found[bits, is_latent] = fingerprint(config, FORMATS["tq4"])
    assert found[16, True] == found[8, False] == fingerprints(tmp_path)["tq4"] != found[8, True]


def test_fingerprint_of_rows(tmp_path: Path) -> None:
    """Latents of sparse attention lie otherwise than those of dense attention."""
    plain, config = fingerprints(tmp_path)["tq4"], settings(tmp_path, "tq4")
    config.model_config.hf_text_config.index_topk = 2048
    assert fingerprint(config, FORMATS["tq4"]) == plain, "of latents alone"
    config.model_config.use_mla = True
    assert fingerprint(config, FORMATS["tq4"]) != plain
    config.model_config.hf_text_config.index_topk = None
    assert fingerprint(config, FORMATS["tq4"]) == plain


def test_fingerprint_of_a_calibration(tmp_path: Path) -> None:
    """Of every channel list that a dtype uses, in the last layer and head too; of no other thing in the file."""
    plain = fingerprints(tmp_path)
    file = content(LAYERS, KV_HEADS, HEAD_DIM)
    calibrated = fingerprints(tmp_path, file=write(tmp_path, file))
    with_outliers = {name for name, fmt in FORMATS.items() if fmt.outlier_bits}
    with_order = {name for name, fmt in FORMATS.items() if fmt.rotation in MIXES_NEIGHBOURS}
    assert differ(plain, calibrated) == with_outliers | with_order
    (tmp_path / "other").mkdir()
    for field, users in [*((field, with_outliers) for field in OUTLIERS), *((field, with_order) for field in ORDERS)]:
        changed = deepcopy(file)
        rows = changed["layers"][f"model.layers.{LAYERS - 1}.self_attn"][field]
        rows[-1] = list(range(len(rows[-1])))
        assert differ(calibrated, fingerprints(tmp_path, file=write(tmp_path / "other", changed))) == users
    renamed = file | {"model_name": "another model", "calibration": {"num_prompts": 5}}
    assert fingerprints(tmp_path, file=write(tmp_path / "other", renamed)) == calibrated
    by_position = content(LAYERS, KV_HEADS, HEAD_DIM, version=3)
    calibrated = fingerprints(tmp_path, file=write(tmp_path, by_position))
    for pair, interleaved in ((31, False), (0, True)):
        changed = deepcopy(by_position)
        changed["ropes"][0]["interleaved"] = interleaved
        changed["ropes"][0]["frequencies"][pair] += 1e-9
        assert differ(calibrated, fingerprints(tmp_path, file=write(tmp_path / "other", changed))) == {*FORMATS}
    for entry in file["layers"].values():
        for field in ORDERS:
            del entry[field]
    assert differ(plain, fingerprints(tmp_path, file=write(tmp_path / "other", file))) == with_outliers


def test_a_named_file_that_is_not_there_has_no_fingerprint(tmp_path: Path) -> None:
    """As that of an engine without calibration it would find wrong pages."""
    with pytest.raises(CalibrationError, match=r"missing\.json"):
        fingerprint(settings(tmp_path, "tq4", file=tmp_path / "missing.json"), FORMATS["tq4"])


def test_fingerprint_of_weights(tmp_path: Path) -> None:
    """Any tensor's, by content: not by path, time, or files that say nothing of the weights."""
    model = Path(tiny_models.save(tiny_models.llama(), tmp_path / "model"))
    known = fingerprints(model)
    copied = Path(shutil.copytree(model, tmp_path / "copied", copy_function=shutil.copyfile))
    (copied / "README.md").write_text("words")
    (copied / "tokenizer.json").write_text("{}")
    assert fingerprints(copied) == known
    (weights,) = copied.glob("*.safetensors")
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, weights, {"format": "pt"})
        assert differ(known, fingerprints(copied)) == {*FORMATS}, name
    save_file(tensors, weights, {"format": "pt"})
    assert fingerprints(copied) == known
    description = copied / "config.json"
    description.write_text(description.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert differ(known, fingerprints(copied)) == {*FORMATS}


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, b"\2" + bytes(7) + b"{}", b"\4" + bytes(7) + b'[{"]'])
def test_fingerprint_of_weights_of_unknown_kind(header: bytes, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(header + bytes(100_000))
        before = fingerprints(folder)
        (folder / name).write_bytes(header + bytes(50_000) + b"\1" * 50_000)
        assert differ(before, fingerprints(folder)) == {*FORMATS}


def test_fingerprint_of_a_commit_of_the_hub(tmp_path: Path) -> None:
    """Known before the weights are loaded, and the same in an engine that is offline."""
    commits = [tmp_path / name / "snapshots" / (digit * 40) for name, digit in (("a", "1"), ("b", "1"), ("a", "2"))]
    for folder in commits:
        folder.mkdir(parents=True)
    (commits[0] / "model.safetensors").write_bytes(b"downloaded")
    first, same, other = map(fingerprints, commits)
    assert first == same
    assert differ(first, other) == {*FORMATS}


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose RoPE has other factors for engines of more than 192 tokens."""
    half = 32
    config = transformers.Phi3Config(
        **tiny_models.SMALL | {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 1024},
        original_max_position_embeddings=192, pad_token_id=0,
        rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * half, "long_factor": [8.0] * half},
    )  # fmt: skip
    return Path(tiny_models.save(config, tmp_path_factory.mktemp("longrope") / "model"))


def engine_fingerprint(model: Path, **options: Any) -> str:
    """Of an engine that is started with these arguments."""
    given = {"tokenizer": str(DEMO_MODEL), "max_model_len": 160, **options}
    return fingerprint(EngineArgs(str(model), kv_cache_dtype="tq4", **given).create_engine_config(), FORMATS["tq4"])


OTHER_ROPE = {"rope_type": "longrope", "short_factor": [2.0] * 32, "long_factor": [8.0] * 32, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 256},
        {"hf_overrides": {"rope_parameters": OTHER_ROPE}},
        {"hf_overrides": {"sliding_window": 64}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": {"final_logit_softcapping": 30.0}},
        {"hf_overrides": lambda config: config.update({"embedding_multiplier": 2.0}) or config},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"model_impl": "transformers"},
        {"load_format": "dummy"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_fingerprint_of_numbers(options: dict[str, Any], longrope: Path) -> None:
    """Each way to change a model's numbers without its weights changes the fingerprint."""
    assert engine_fingerprint(longrope, **options) != engine_fingerprint(longrope)


def test_fingerprint_of_equal_models(longrope: Path, tmp_path: Path) -> None:
    """Wherever they lie, and whatever else differs: with one length of RoPE, and values that are the config's own."""
    plain = engine_fingerprint(longrope)
    copied = Path(shutil.copytree(longrope, tmp_path / "copied"))
    assert engine_fingerprint(copied, max_model_len=192, trust_remote_code=True, load_format="safetensors") == plain
    own = {"rms_norm_eps": json.loads((copied / "config.json").read_text())["rms_norm_eps"]}
    assert engine_fingerprint(longrope, hf_overrides=own, hf_config_path=str(copied)) == plain
    other = copied / "config.json"
    other.write_text(other.read_text().replace("8.0", "4.0"))
    assert engine_fingerprint(longrope, hf_config_path=str(copied)) != plain


def test_two_functions_of_one_name_are_two_overrides(longrope: Path) -> None:
    """`hf_overrides` may be a function, of which a name tells nothing."""
    found = {
        engine_fingerprint(
            longrope, hf_overrides=lambda config, eps=eps: config.update({"rms_norm_eps": eps}) or config
        )
        for eps in (1e-2, 1e-3)
    }
    assert len(found) == 2


def test_fingerprint_stays_when_a_model_is_loaded(longrope: Path) -> None:
    """Classes of models change their config, vLLM shortens the length; a worker has a copy of both."""
    config = EngineArgs(str(longrope), tokenizer=str(DEMO_MODEL), max_model_len=256).create_engine_config()
    before = fingerprint(config, FORMATS["tq4"])
    keep_numbers(config)
    config.model_config.hf_config.rms_norm_eps = 1.0
    config.model_config.max_model_len = 128
    assert fingerprint(deepcopy(config), FORMATS["tq4"]) == fingerprint(config, FORMATS["tq4"]) == before


@pytest.mark.parametrize(("given", "length", "tuned"), [(None, 40_000, True), (None, 128, False), (True, 128, True)])
def test_fingerprint_of_tuned_queries(given: bool | None, length: int, tuned: bool) -> None:
    """vLLM's Llama 4 decides by its length, or by a generation config."""
    config = settings(Path("none"), "tq4")
    model = config.model_config
    model.architecture, model.max_model_len = "Llama4ForConditionalGeneration", length
    model.try_get_generation_config = dict
    model.override_generation_config = {} if given is None else {"attn_temperature_tuning": given}
    assert model_numbers(config)["length"] == {"tuning": tuned}


TEXTS_ALONE = {*TOKENIZER_OPTIONS, "skip_tokenizer_init"}
NUMBERS_OTHERWISE = {"model", "model_weights", "dtype", "seed", "max_model_len", "hf_config", "generation_config",
                     "override_generation_config", "multimodal_config"}  # fmt: skip
"""Fields that `model_identity` has otherwise."""
NO_NUMBERS = {
    "runner", "convert", "hf_text_config", "is_submodel_config", "word_embeddings_untied_by_checkpoint",
    "allowed_local_media_path", "allowed_media_domains", "spec_target_max_model_len", "allow_deprecated_quantization",
    "enforce_eager", "return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "enable_trace_replay",
    "disable_cascade_attn", "enable_prompt_embeds", "served_model_name", "hf_token", "enable_sleep_mode",
    "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph",
    "enable_nccl_comm_suspend", "enable_cumem_allocator", "logits_processors", "io_processor_plugin",
    "renderer_num_workers", "pooler_config", "language_model_only", "limit_per_prompt", "enable_mm_embeds",
    "mm_device_do_normalize", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm",
    "mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin", "interleave_mm_strings",
    "skip_mm_profiling", "mm_tensor_ipc", "allow_missing_mm_embeddings", "mm_ipc_gpu_memory_gb",
}  # fmt: skip
"""Fields of vLLM's configs that change no key and no value of a model: where it runs, how fast, what is sampled."""


def test_each_option_of_a_model_is_judged() -> None:
    """A field that a vLLM has and nobody has thought of here."""
    fields_of = {field.name for config in (ModelConfig, MultiModalConfig) for field in fields(config)}
    assert not fields_of - {*MODEL_OPTIONS} - TEXTS_ALONE - NUMBERS_OTHERWISE - NO_NUMBERS
    assert not {*MODEL_OPTIONS} & (TEXTS_ALONE | NUMBERS_OTHERWISE | NO_NUMBERS)


def test_what_vllm_asks(tmp_path: Path) -> None:
    registration.register_formats()
    assert kv_cache_page_format(settings(tmp_path, "tq4")) == f"-tq4-{fingerprints(tmp_path)['tq4']}"
    assert kv_cache_page_format(settings(tmp_path, "auto")) == ""


def test_nixl_refuses_a_peer_with_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message names both fingerprints."""
    model = tiny_models.save(tiny_models.llama(), tmp_path)
    file = write(tmp_path, content(LAYERS, KV_HEADS, HEAD_DIM)).rename(tmp_path / "other.json")
    plain = EngineArgs(model, tokenizer=str(DEMO_MODEL), kv_cache_dtype="isoquant4").create_engine_config()
    calibrated = replace(plain, additional_config={"packed_kv": {"calibration": str(file)}})
    hashes = [nixl_hash(config, "PACKED_KV_ISOQUANT4") for config in (plain, calibrated)]
    found = [fingerprint(config, FORMATS["isoquant4"]) for config in (plain, calibrated)]
    assert found[0] != found[1]
    larger = deepcopy(plain)
    larger.cache_config.block_size *= 2
    merges_tokens_first = "# use physical order" in getsource(kv_postprocess_blksize_on_receive)  # before 0.32
    assert (nixl_hash(larger, "PACKED_KV_ISOQUANT4") != hashes[0]) == merges_tokens_first
    worker = MagicMock(_is_csa_linear=False, enforce_compat_hash=True, compat_hash=hashes[0])
    worker.transfer_topo.handshake_target_ranks.return_value = [0]
    payload = NixlHandshakePayload(compatibility_hash=hashes[1], agent_metadata_bytes=b"")
    peer = MagicMock()
    peer.recv_multipart.return_value = [msgspec.msgpack.encode(payload), msgspec.msgpack.encode(0.0)]
    monkeypatch.setattr(base_worker, "zmq_ctx", lambda *_args: nullcontext(peer))
    with pytest.raises(RuntimeError, match=f"Local: .*-isoquant4-{found[0]}(-\\d+)?, Remote: .*-isoquant4-{found[1]}"):
        base_worker.NixlBaseConnectorWorker._nixl_handshake(worker, "host", 1, 1, "engine")
