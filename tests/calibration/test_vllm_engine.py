"""`tq-calibrate --engine vllm` finds what transformers finds, and runs what transformers cannot load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import tiny_models
import torch
from checkout import DEMO_MODEL
from safetensors.torch import load_file, save_file
from tq_calibrate.cli import main
from tq_calibrate.errors import UserError
from tq_calibrate.vllm_engine import VllmModel, check_passes, current_platform

GROUP = 64
NUMBERS = (
    "key_channel_mean_before_rope", "key_first_token_mean", "key_channel_scale", "value_channel_scale",
    "value_channel_rms",
)  # fmt: skip


def calibrate(model: Path, out: Path, *options: str) -> dict[str, Any]:
    """The file that the command writes."""
    arguments = ["model", str(model), "--tokens", "512", "--context", "128", "--out", str(out), *options]
    assert main(arguments) == 0
    return json.loads(out.read_text())


def assert_same(one: dict, two: dict, tolerance: float, numbers: tuple[str, ...] = NUMBERS) -> None:
    """Numbers within a tolerance of their layer's root mean square; of V's outliers nearly all.

    Which of K's channels are outliers is not compared: behind its scale a channel's energy is its weight, so many
    choices are equally good.
    """
    assert one["calibration"]["prompts_sha256"] == two["calibration"]["prompts_sha256"]
    assert one["layers"].keys() == two["layers"].keys() and one["ropes"] == two["ropes"]
    for name, layer in one["layers"].items():
        for field in numbers:
            ours, theirs = (torch.tensor(entry[field], dtype=torch.float64) for entry in (layer, two["layers"][name]))
            error = (ours - theirs).abs().max() / theirs.square().mean().sqrt()
            assert error < tolerance, (name, field, error)
        heads = zip(*(entry["value_high_precision_indices"] for entry in (layer, two["layers"][name])), strict=True)
        assert all(len({*ours} & {*theirs}) >= 0.9 * len(ours) for ours, theirs in heads)


def test_statistics_are_those_of_transformers(tmp_path: Path) -> None:
    ours = calibrate(DEMO_MODEL, tmp_path / "vllm.json", "--engine", "vllm")
    theirs = calibrate(DEMO_MODEL, tmp_path / "transformers.json", "--engine", "transformers")
    assert ours["calibration"]["engine"].startswith("vllm ")
    assert theirs["calibration"]["engine"].startswith("transformers ")
    assert_same(ours, theirs, 2e-4)  # numbers have five digits


def means_of(model: str, tokens: int, **options: int) -> torch.Tensor:
    """Means of keys as the cache holds them, after a run over sequences of this many tokens."""
    sequences = [[(7 * i + j) % 200 for i in range(tokens)] for j in range(2)]
    found, _ = VllmModel(model, "float32", {"tokenizer": str(DEMO_MODEL), **options}).run(sequences, [], lambda _: None)
    return found.layers[0].key_mean


def test_longrope_is_run_with_the_factors_of_the_server(tmp_path: Path) -> None:
    """vLLM takes the long ones where max_model_len is more than the original context, however short a request is."""
    factors = {"short_factor": [1.0] * 32, "long_factor": [16.0] * 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    config = tiny_models.llama(
        num_hidden_layers=1, max_position_embeddings=512, original_max_position_embeddings=64, rope_parameters=rope
    )
    model = tiny_models.save(config, tmp_path / "model")
    assert VllmModel(model, "float32", {}).longest == 512, "--context goes as far as the model reads"
    short, long = means_of(model, 48), means_of(model, 48, max_model_len=512)
    assert torch.equal(short, means_of(model, 48, max_model_len=64))
    assert (long - short).norm() > 0.1 * short.norm()


def test_latents_are_those_of_transformers(tmp_path: Path) -> None:
    config = tiny_models.deepseek_v2(vocab_size=4096, kv_lora_rank=256, num_hidden_layers=2)
    model = Path(small_models.save(config, tmp_path / "model"))
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, model)
    ours, theirs = (calibrate(model, tmp_path / f"{name}.json", "--engine", name) for name in ("vllm", "transformers"))
    assert_same(ours, theirs, 2e-4, ("key_channel_scale", "value_channel_rms"))
    # Means are small here, 0.07 of what is averaged: 3e-5 of that, which builds of PyTorch differ by, is 4e-4 of them.
    assert_same(ours, theirs, 1e-3, ("key_channel_mean",))


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 15, eight rows in one of int32."""
    words = sum(row << (4 * at) for at, row in enumerate(numbers.long().unflatten(0, (-1, 8)).unbind(1)))
    return words.to(torch.int32).contiguous()  # wraps: the highest bit is the sign


def gptq(folder: Path) -> tuple[Path, Path]:
    """The demo model with 4-bit projections as GPTQ writes them, and with the same weights unpacked."""
    packed, plain = {}, {}
    for name, weight in load_file(DEMO_MODEL / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            packed[name] = plain[name] = weight
            continue
        groups = weight.float().t().unflatten(0, (-1, GROUP))  # [groups, inputs, outputs]
        scales = (groups.abs().amax(1) / 7).half()
        numbers = (groups / scales[:, None]).round().clamp(-8, 7)
        plain[name] = (numbers * scales[:, None]).flatten(0, 1).t().contiguous()
        layer = name.removesuffix(".weight")
        packed[f"{layer}.qweight"] = pack(numbers.flatten(0, 1) + 8)
        packed[f"{layer}.qzeros"] = pack(torch.full_like(scales.t(), 7)).t().contiguous()
        packed[f"{layer}.scales"] = scales
        packed[f"{layer}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    folders = folder / "packed", folder / "plain"
    for path, tensors, more in zip(folders, (packed, plain), ({"quantization_config": quantization}, {}), strict=True):
        shutil.copytree(DEMO_MODEL, path)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | more))
    return folders


def test_vllm_runs_a_packed_checkpoint_that_transformers_cannot_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPTQ's, with nothing installed for it. vLLM runs it in bf16."""
    if current_platform.is_cpu() and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("vLLM's kernel of 4-bit weights on a CPU (cpu_gemm_wna16) is built with AVX-512 alone")
    packed, plain = gptq(tmp_path)
    ours = calibrate(packed, tmp_path / "packed.json")
    assert f"{packed} cannot be loaded (Loading a GPTQ quantized model requires" in capsys.readouterr().err
    assert ours["calibration"]["engine"].startswith("vllm ")
    theirs = calibrate(plain, tmp_path / "plain.json")
    assert_same(ours, theirs, 0.1)
    with pytest.raises(AssertionError):  # so the weights were vLLM's own, those of 4 bits
        assert_same(ours, calibrate(DEMO_MODEL, tmp_path / "demo.json"), 0.1)
    assert main(["model", str(packed), "--engine", "transformers"]) == 2
    assert capsys.readouterr().err.endswith("; vLLM may load it: --engine vllm\n")
    assert main(["model", str(packed), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.endswith("; vLLM may load it: --engine vllm without --device cpu\n")


@pytest.mark.parametrize(("tokens", "passes"), [(100, 3), (100, 1), (104, 2)], ids=["cut", "joined", "padded"])
def test_sequences_that_vllm_did_not_run_as_they_are_are_refused(tokens: int, passes: int) -> None:
    sums = SimpleNamespace(layers={0: SimpleNamespace(tokens=tokens, first_tokens=passes)})
    with pytest.raises(UserError, match=rf"layer 0 saw {tokens} tokens in {passes} passes instead of 100 in 2"):
        check_passes("model", sums, [[1] * 60, [1] * 40])
    good = SimpleNamespace(layers={0: SimpleNamespace(tokens=100, first_tokens=2)})
    check_passes("model", good, [[1] * 60, [1] * 40])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "vllm", "--weights-only"], "--weights-only runs no engine; leave --engine out"),
        (["--weights-only", "--engine", "transformers"], "--weights-only runs no engine; leave --engine out"),
        (["--weights-only", "--text", "a", "--device", "auto", "--seed", "0"], "leave --text, --device, --seed out"),
        (["--engine", "vllm", "--device", "cpu"], "--device cpu is for transformers"),
        (["--engine", "vllm", "--batch-size", "4"], "--batch-size is for transformers"),
        (
            ["--engine", "vllm", "--engine-options", '{"model": "another"}'],
            "--engine-options: MODEL sets model; leave it out",
        ),
        (["--engine-options", '{"seed": 1}'], "--engine-options are vLLM's; give --engine vllm"),
        (["--engine", "vllm", "--engine-options", "[]"], "expected a JSON object, got '[]'"),
        (["--engine", "llama.cpp"], "invalid choice: 'llama.cpp'"),
    ],
)
def test_options_that_exclude_each_other(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["model", str(DEMO_MODEL), *options])
    assert exit_code.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "abacus"}, "vLLM cannot run"),
        ({"abacus": 1}, "unexpected keyword argument 'abacus'"),
        ({"dtype": "int3"}, "vLLM cannot run"),
    ],
    ids=str,
)
def test_what_vllm_refuses_is_told_in_one_line(
    options: dict, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--engine", "vllm", "--engine-options", json.dumps(options), "--out", str(tmp_path / "out.json")]
    assert main(["model", str(DEMO_MODEL), *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tq-calibrate: ")]
    assert len(lines) == 1 and message in lines[0] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("cpu", [True, False])
def test_vllm_is_told_its_cache_and_profiles_no_memory(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    """Profiling fails on a GPU where another process frees memory meanwhile."""
    given: dict[str, Any] = {}

    def engine(model: str, options: dict[str, Any]) -> None:
        given.update(options)
        raise RuntimeError("not started")

    model = VllmModel(str(DEMO_MODEL), "float32", {})
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: cpu)
    monkeypatch.setattr("tq_calibrate.vllm_engine._engine", engine)
    with pytest.raises(UserError, match="not started"):
        model.run([[1, 2, 3]], [[1, 2]], lambda tokens: None)
    assert given["kv_cache_memory_bytes"] > (1 << 26 if cpu else 1 << 30)
