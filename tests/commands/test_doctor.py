"""`packed-kv doctor`: each line begins with OK or says what to do."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import calibration_files
import pytest
from checkout import DEMO_MODEL
from coverage_models import MODELS
from packed_kv.commands import doctor, plan, probe
from packed_kv.formats import FORMATS
from packed_kv.kernels import cuda
from packed_kv.kernels.cpu.compiler import best_target, find_compiler
from packed_kv.model import rope
from packed_kv.planning import config_file

H200 = {
    "torch": "2.11.0", "platform": "cuda", "registered": list(FORMATS), "devices": 2, "device": "NVIDIA H200",
    "capability": [9, 0], "memory": 140 << 30, "flash_attention": 3,
}  # fmt: skip


def test_where_nothing_is_installed_it_says_what_to_install(tmp_path: Path, bare) -> None:
    run = bare("doctor", str(DEMO_MODEL), "--tiers", str(tmp_path), str(tmp_path / "none"))
    assert run.returncode == 1, run.stderr
    python, model, torch, vllm, plugin, calibration, tier, no_tier = run.stdout.splitlines()
    assert python.startswith("OK    Python 3.")
    assert model == "OK    demo-7m: 6 full layers of 2 KV heads of 128 channels"
    assert torch == "PyTorch is not installed; it comes with vLLM: pip install vllm"
    assert vllm.startswith("vLLM is not installed; pip install one of: ") and "vllm==0.33.0" in vllm
    assert plugin.endswith("run: pip install packed-kv")
    assert calibration.startswith("OK    no calibration (optional); to lower the error: packed-kv calibrate model ")
    assert tier.startswith(f"OK    tier {tmp_path}: ")
    assert no_tier == f"--tiers {tmp_path}/none is not a folder; run: mkdir -p {tmp_path}/none"


def lines(*arguments: str) -> list[str]:
    return [str(finding) for finding in doctor.findings(doctor.parser().parse_args(arguments))]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch):
    """Let the process that loads vLLM find what is given, and record what it was asked: head size and folder."""

    def give(found: dict | str) -> list[list[str]]:
        asked: list[list[str]] = []

        def run(command: list[str], **_options: object) -> argparse.Namespace:
            asked.append(command[4:])
            if isinstance(found, str):
                return argparse.Namespace(returncode=1, stdout="", stderr=found)
            return argparse.Namespace(returncode=0, stdout=f"a line of vLLM\n{json.dumps(found)}\n", stderr="")

        monkeypatch.setattr(doctor.subprocess, "run", run)
        return asked

    monkeypatch.setattr(cuda, "missing", lambda _: None)
    return give


def test_a_healthy_machine(probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    asked = probed(H200)
    found = lines(str(DEMO_MODEL))
    assert asked == [["128", str(DEMO_MODEL)]]
    assert "OK    2 x NVIDIA H200, compute capability 9.0, 140.0 GiB" in found
    assert "OK    FlashAttention 3" in found
    assert "OK    whether these kernels are right here: packed-kv selftest" in found
    heads = "heads of 128 channels, 2 query heads per KV head"
    served = f"OK    decodes of {heads} are served by the CUDA kernel"
    assert f"{served}, to be compiled at the first start, into {tmp_path}" in found
    assert f"OK    Triton kernels: to be compiled at the first start, into {tmp_path}/triton" in found
    (tmp_path / "decode-1.cubin").touch()
    for name, source in (("ours", "site-packages/packed_kv/kernels/triton/store.py"), ("theirs", "vllm/store.py")):
        (tmp_path / "triton" / name).mkdir(parents=True)
        (tmp_path / "triton" / name / "store_kernel.ttir").write_text(f'#loc = loc("/usr/{source}":7:0)')
    large = tmp_path / "triton" / "theirs" / "long.ttir"  # is not read to its end
    large.write_text("x" * doctor.BEGINNING + '"/site-packages/packed_kv/kernels/triton/store.py"')
    (tmp_path / "triton" / "gone").mkdir()
    (tmp_path / "triton" / "gone" / "store_kernel.ttir").symlink_to(tmp_path / "nowhere")
    found = lines(str(DEMO_MODEL))
    assert f"{served}, 1 variants compiled in {tmp_path}" in found
    assert f"OK    Triton kernels: 1 variants compiled in {tmp_path}/triton" in found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"capability": [8, 9]},
            "OK    decodes of heads of 128 channels, 4 query heads per KV head are served by the T",
        ),
        ({"capability": [7, 5]}, "compute capability 7.5: packed pages need 8.0 or later; use another GPU"),
        ({"devices": 0}, "no CUDA device answers (platform cuda); look at: nvidia-smi"),
        ({"platform": "rocm"}, "no CUDA device answers (platform rocm)"),
        ({"flash_attention": None}, "install the wheel of vLLM that was built for this CUDA"),
        ({"registered": ["tq4"]}, "the plugin does not register isoquant3, isoquant4"),
    ],
)
def test_what_a_machine_lacks(changed: dict, said: str, probed) -> None:
    probed({**H200, **changed})
    (found,) = (line for line in lines() if said in line)
    assert found.startswith("OK") == said.startswith("OK")


def test_a_cpu(probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\necho my C++ 1.2\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path))
    assert find_compiler().version == "my C++ 1.2"  # asked once; `probed` answers for all programs
    probed({**H200, "platform": "cpu"})
    target = best_target().name
    served = f"OK    platform CPU: kernels in C++ for {target} by my C++ 1.2"
    assert f"{served}, to be compiled at the first start, into {tmp_path}" in lines()
    for name in (f"store-{target}-1.so", f"decode-{target}-2.so", "decode-other-3.so"):
        (tmp_path / name).touch()
    assert f"{served}, 2 libraries compiled in {tmp_path}" in lines()
    monkeypatch.setenv("CXX", "no-such-compiler")
    slow = "platform CPU: attention would run in PyTorch, many times slower: CXX=no-such-compiler: there is no such"
    assert any(line.startswith(slow) for line in lines())


def test_latent_attention(probed, tmp_path: Path) -> None:
    """FlashAttention is asked for the heads that prefill expands latents to."""
    asked = probed(H200)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["DeepseekV3ForCausalLM"]))
    found = lines(str(tmp_path))
    assert f"OK    {tmp_path.name}: 4 layers of latents of 512 channels and 64 of RoPE" in found
    kernel = "CUDA kernel: those of 512 channels"
    assert any(line.startswith(f"OK    decodes of latents are served by the {kernel}") for line in found)
    assert asked == [["192", str(tmp_path)]]


def test_a_checkpoint_that_asks_for_an_fp8_cache(probed, tmp_path: Path) -> None:
    probed(H200)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(
        json.dumps({**MODELS["LlamaForCausalLM"], "quantization_config": quantization})
    )
    said = f"OK    {tmp_path.name}: the checkpoint asks for an fp8 KV cache"
    assert any(line.startswith(said) for line in lines(str(tmp_path)))
    assert not any("asks for" in line for line in lines(str(DEMO_MODEL)))


def test_a_vllm_that_does_not_load(probed) -> None:
    probed("Traceback\nImportError: libcudart.so.13: cannot open shared object file")
    said = "vLLM does not load (ImportError: libcudart.so.13: cannot open shared object file); try: "
    assert any(line.startswith(said) for line in lines())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"unreadable": "no such type", "has_code": False},
            "demo-7m: vLLM cannot read the config (no such type); use another model",
        ),
        ({"unknown": "vLLM does not know it"}, "demo-7m: vLLM does not know it"),
        ({"unknown": "", "ropes": {}}, "OK    demo-7m: 6 full layers of 2 KV heads of 128 channels"),
    ],
)
def test_what_vllm_reads_from_a_config(found: dict, said: str, probed) -> None:
    probed(H200 | found)
    assert said in lines(str(DEMO_MODEL))
    assert not any("vLLM does not know" in line or "vLLM cannot" in line for line in lines() if "demo" not in line)


def test_the_process_reads_a_config_as_an_engine(tmp_path: Path) -> None:
    def found(**changed: object) -> dict:
        config = {**json.loads((DEMO_MODEL / "config.json").read_text()), **changed}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return probe.probe(128, str(tmp_path))

    served = found(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert served["unknown"] == "" and [rope["rope_theta"] for rope in served["ropes"].values()] == [5e5]
    assert not found(architectures=["LlamaForSequenceClassification"])["unknown"]  # of transformers
    assert found(architectures=["QWenLMHeadModel"])["unknown"].startswith("vLLM served QWenLMHeadModel up to 0.2")
    unknown = "vLLM does not know NoSuchForCausalLM; correct architectures in config.json, or use another model"
    assert found(architectures=["NoSuchForCausalLM"])["unknown"] == unknown
    assert "model type `no_such`" in found(model_type="no_such")["unreadable"]
    custom = found(model_type="no_such", architectures=["QWenLMHeadModel"], auto_map={"AutoConfig": "a.B"})
    assert custom["unknown"].startswith("vLLM served QWen") and "unreadable" in custom and custom["has_code"]
    assert not found(architectures=["NoSuchForCausalLM"], auto_map={"AutoModelForCausalLM": "a.B"})["unknown"]
    assert not found(architectures=["QWenLMHeadModel", "LlamaForCausalLM"])["unknown"]


def test_custom_code_is_no_fault(probed, tmp_path: Path) -> None:
    """The process says that there is some: where a config nests its text, that part has no auto_map."""
    probed(H200 | {"unreadable": "no", "has_code": True})
    (tmp_path / "config.json").write_text(json.dumps(MODELS["LlamaForCausalLM"]))
    assert f"OK    {tmp_path.name}: vLLM needs --trust-remote-code" in lines(str(tmp_path))


def test_a_folder_of_kernels_that_cannot_be_kept(probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed(H200)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path / "file"))
    said = (
        f"each start would compile the kernels again: [Errno 17] File exists: '{tmp_path}/file'; name a folder of your"
    )
    assert any(line.startswith(said) for line in lines())
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path / "new"))
    assert not any(line.startswith("each start") for line in lines()) and not [*(tmp_path / "new").iterdir()]
    (tmp_path / "new").chmod(0o777)
    assert any("others can write" in line and "delete it" not in line for line in lines())


def test_tiers_that_cannot_be_written(probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed(H200)
    (tmp_path / "file").touch()
    at_file, below, proc, there = lines("--tiers", f"{tmp_path}/file", f"{tmp_path}/file/x", "/proc", str(tmp_path))[
        -4:
    ]
    assert at_file == f"--tiers {tmp_path}/file: {tmp_path}/file is not a folder; name another"
    assert below == f"--tiers {tmp_path}/file/x: {tmp_path}/file is not a folder; name another"
    assert proc.startswith("--tiers: /proc cannot be written to (")
    assert there.startswith(f"OK    tier {tmp_path}: ") and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_plugins_that_are_left_out(probed, monkeypatch: pytest.MonkeyPatch) -> None:
    probed(H200)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS=other excludes the plugin; add packed_kv to it" in lines()
    probed({**H200, "registered": []})  # as vLLM has loaded no plugin
    assert not any("patch apply" in line for line in lines()) and lines()[-1].startswith("OK")


def test_calibration_is_found_and_checked(probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed(H200)
    model = tmp_path / "demo-7m"
    shutil.copytree(DEMO_MODEL, model)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    (tmp_path / "packed_kv").mkdir()
    (tmp_path / "packed_kv" / "demo-7m-0123.json").touch()
    assert f'OK    calibration of "auto" kept in {tmp_path}/packed_kv/demo-7m-0123.json' in "\n".join(lines(str(model)))
    calibration_files.write(model, calibration_files.content(6, 2, 128))
    assert f"OK    calibration of 6 layers, made for turboquant35, in {model}/turboquant_kv.json" in lines(str(model))
    assert lines(str(model / "config.json"))[1:] == lines(str(model))[1:]
    calibration_files.write(model, calibration_files.content(6, 2, 128, version=3))
    unlike = f"in {model}/turboquant_kv.json, not compared with the model's RoPE"
    assert lines(str(model))[-1].endswith(unlike)
    probed(H200 | {"ropes": {"": {**rope.DEFAULTS, "rope_theta": 5e5, "rope_type": "default"}}})
    assert 'made for another RoPE: rope_type "default", rope_theta 10000.0; this model has' in lines(str(model))[-1]
    calibration_files.write(model, calibration_files.content(6, 2, 128, version=3, theta=5e5))
    assert lines(str(model))[-1].endswith(f"in {model}/turboquant_kv.json")
    calibration_files.write(model, calibration_files.content(6, 4, 128))
    assert any("made for another model: KV heads 4, this model has 2" in line for line in lines(str(model)))


@pytest.mark.parametrize("source", [".", "config.json", "link", "link/config.json", "nobody/hub"])
def test_plan_and_doctor_name_a_model_alike(
    source: str, probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed(H200)
    folder = DEMO_MODEL
    if source.startswith("link"):
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path
    monkeypatch.setattr(config_file, "_from_hub", lambda name: (DEMO_MODEL / "config.json", False))
    monkeypatch.chdir(folder)
    name = {"link": "link", "nobody": "nobody/hub"}.get(source.partition("/")[0], "demo-7m")
    assert any(line.startswith(f"OK    {name}: 6 full layers") for line in lines(source))
    assert plan.main([source, "--gpu", "H200"]) == 0
    assert capsys.readouterr().out.startswith(f"{name} on 1 x H200")


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        (
            "Gemma4ForCausalLM",
            "layers differ in shape (layer 0: 2 KV heads of 128 channels, layer 1: 2 KV heads of 256",
        ),
        ("Llama4ForCausalLM", "keys of llama4_text in another order of channels"),
        ("PhiForCausalLM", "heads of 80 channels, and channels are chosen for two or more groups of 32"),
    ],
)
def test_no_calibration_is_advised_where_none_can_be_made(architecture: str, said: str, probed, tmp_path: Path) -> None:
    """tq-calibrate refuses such models (tests/calibration)."""
    probed(H200)
    (tmp_path / "config.json").write_text(json.dumps(MODELS[architecture]))
    last = lines(str(tmp_path))[-1]
    assert last.startswith(f"OK    no calibration, and none can be made: {said}") and "packed-kv calibrate" not in last


def test_an_unknown_model_is_a_line(probed) -> None:
    probed(H200)
    said = "/no/model is neither a folder nor a file; give the folder of a model"
    assert any(line.startswith(said) for line in lines("/no/model"))


def test_exit_code(probed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    probed(H200)
    monkeypatch.setattr(doctor, "_vllm", lambda: doctor.Finding(True, "vllm 0.33.0, patched"))
    monkeypatch.setattr(doctor, "_entry_point", lambda: doctor.Finding(True, "plugin installed"))
    assert doctor.main([]) == 0
    assert all(line.startswith("OK    ") for line in capsys.readouterr().out.splitlines())
    assert doctor.main(["--tiers", "/no/such"]) == 1
