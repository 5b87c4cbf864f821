"""`"calibration": "auto"`: a file is found or made, once, before the engine's workers start."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
from calibration_files import content, write
from checkout import DEMO_MODEL
from harness import engine
from packed_kv import FORMATS
from packed_kv.calibration_file import CalibrationError, load
from packed_kv.engine import metrics
from packed_kv.settings import self_calibration
from packed_kv.settings.self_calibration import cached_file, resolve_auto
from self_calibrating import OPTIONS, copies, instead, replace_popen, resolved, settings
from vllm.config import VllmConfig

pytestmark = pytest.mark.usefixtures("cache")


def test_an_engine_calibrates_its_model_once(
    model: str, cache: Path, log: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: the engine core asks, tq-calibrate runs, the layers have the means; the next engine finds the file.

    Where new files are writable by a group, too: by a umask of 002, the default of several Linux distributions.
    """
    umask = os.umask(0o002)
    request.addfinalizer(lambda: os.umask(umask))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    short = ("--tokens", "512")  # the command's own number takes too long for a test
    replace_popen(monkeypatch, lambda command, **how: subprocess.Popen([*command, *short], **how))
    with engine(model, "tq4", **OPTIONS) as llm:
        config = llm.llm_engine.vllm_config
        path = Path(config.additional_config["packed_kv"]["calibration"])
        assert path.parent == cache and all(layer.key.mean for layer in load(path).layers.values())
        layer = config.compilation_config.static_forward_context["model.layers.0.self_attn.attn"]
        assert layer.impl.calibration.file == load(path)
    assert log[0] == f"KV cache calibration: none for {model} yet; making {path}, once"
    assert any("calibrating: 100%" in line for line in log)
    assert not [other for other in cache.iterdir() if other.suffix not in (".json", ".lock")]
    commands = instead(monkeypatch, "sys.exit(1)")
    assert resolved(settings(model)) == path and not commands


def test_an_engine_of_latents_calibrates_its_model(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_models.deepseek_v2(vocab_size=4096, num_hidden_layers=1, kv_lora_rank=256)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    replace_popen(monkeypatch, lambda command, **how: subprocess.Popen([*command, "--tokens", "512"], **how))
    options = {**OPTIONS, "compilation_config": {"custom_ops": ["none"]}}
    with engine(tiny_models.save(config, tmp_path / "model"), "tq4", **options) as llm:
        config = llm.llm_engine.vllm_config
        path = Path(config.additional_config["packed_kv"]["calibration"])
        assert path.parent == cache
        layer = config.compilation_config.static_forward_context["model.layers.0.self_attn.attn"]
        (mean,) = load(path).layers[0].key.mean
        assert (
            layer.impl.kernels.prefix.codec.latent.transform.mean.tolist() == pytest.approx(mean)
            and layer.impl.weights.constant is not None
        )


def test_one_of_several_processes_calibrates(
    model: str, tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of one file descriptor excludes those of other threads as it does those of other processes."""
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    configs = [settings(model) for _ in range(3)]
    threads = [threading.Thread(target=resolve_auto, args=[config]) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(commands) == 1 and len({resolved(config) for config in configs}) == 1
    assert sum("another process is making" in line for line in log) == 2


ENGINE = """\
import subprocess, sys
from types import SimpleNamespace
from packed_kv.private_file import new_name
from packed_kv.settings import self_calibration
from vllm.engine.arg_utils import EngineArgs

_, child, pid_file, model, tokenizer = sys.argv
config = EngineArgs(
    model, tokenizer=tokenizer, dtype="float32", max_model_len=512, kv_cache_dtype="tq4",
    additional_config={"packed_kv": {"calibration": "auto"}},
).create_engine_config()
popen = lambda command, **how: subprocess.Popen([sys.executable, "-c", child, pid_file, *command[4:]], **how)
self_calibration.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL, Popen=popen)
self_calibration.resolve_auto(config)
"""
"""A process that calibrates as an engine core does, by the given script in place of `python -m tq_calibrate`."""
WORK = """\
import os, sys, time

def work(options):
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(300)
"""
COMMAND = (
    f"{WORK}\nimport tq_calibrate.cli, tq_calibrate.run as r; r.calibrate = work; tq_calibrate.cli.main(sys.argv[2:])"
)
"""tq-calibrate, but for the calibration itself."""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_locked(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize(("child", "ends"), [(COMMAND, True), (f"{WORK}\nwork(None)", False)], ids=["command", "deaf"])
def test_a_calibration_does_not_outlive_a_killed_engine(
    child: str, ends: bool, model: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tq-calibrate` ends with the engine. While a calibration runs on all the same, none but it has the lock."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pid_file = tmp_path / "pid"
    started = subprocess.Popen([sys.executable, "-c", ENGINE, child, pid_file, model, DEMO_MODEL])
    try:
        assert wait_for(lambda: pid_file.exists() and pid_file.read_text() != "", 120)
        pid = int(pid_file.read_text())
    finally:
        started.kill()
        started.wait()
    (lock,) = cache.glob("*.lock")
    try:
        assert wait_for(lambda: is_gone(pid), 10 if ends else 1) == ends
        assert is_locked(lock) != ends
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not is_locked(lock), 10)


def test_files_next_to_the_model_and_by_name_come_first(model: str, tmp_path: Path) -> None:
    other = write(tmp_path, content(1))
    assert resolved(settings(model, additional_config={"packed_kv": {"calibration": str(other)}})) == other
    beside = write(Path(model), content(1))
    config = settings(model, additional_config={"packed_kv": {"calibration": "auto", "recent_tokens": 7}, "other": 1})
    assert resolved(config) == beside
    assert config.additional_config["packed_kv"]["recent_tokens"] == 7 and config.additional_config["other"] == 1


def test_the_metrics_of_a_server_name_the_file_that_its_engine_has_made(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model)
    fmt = FORMATS["tq4"]
    assert metrics.info(config, fmt)["calibration"] == "none"
    instead(monkeypatch, copies(write(tmp_path, content(1))))
    path = resolved(settings(model))
    labels = metrics.info(config, fmt)
    assert labels["calibration"] == str(path)
    assert config.additional_config["packed_kv"]["calibration"] == "auto"


def test_the_command_runs_the_model_as_the_engine_does(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    path = resolved(settings(model, hf_overrides={"rope_theta": 5e5}, gpu_memory_utilization=0.5))
    (command,) = commands
    assert command[1:] == [
        *("-P", "-m", "tq_calibrate", "model", model, "--engine", "vllm", "--out", str(path)),
        *("--dtype", "float32", "--context", "512", "--engine-options", command[-3], "--parent", str(os.getpid())),
    ]
    for part in (f'"tokenizer": "{DEMO_MODEL}"', '"rope_theta": 500000.0', '"gpu_memory_utilization": 0.5'):
        assert part in command[-3]


def test_what_decides_a_file_is_in_its_name(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = settings(model)
    assert cached_file(plain) == cached_file(settings(model, tensor_parallel_size=1, seed=7, block_size=32))
    others = [
        settings(model, max_model_len=256),
        settings(model, dtype="bfloat16"),
        settings(model, hf_overrides={"rope_theta": 5e5}),
        settings(model, load_format="dummy"),
        settings(model, dtype="bfloat16", quantization="int8_per_channel_weight_only"),
        settings(model, revision="branch"),
    ]
    names = {cached_file(config) for config in (plain, *others)}
    weights = Path(model) / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    names.add(cached_file(plain))
    write(Path(model), content(1))
    names.add(cached_file(plain))  # its own file is not what decides
    monkeypatch.setattr(self_calibration, "VERSION", self_calibration.VERSION + 1)
    names.add(cached_file(plain))
    upgraded = Path(shutil.copytree(str(resources.files("tq_calibrate")), tmp_path / "tq_calibrate"))
    (upgraded / "widths.py").write_text("# chooses otherwise")
    with monkeypatch.context() as patches:
        patches.setattr(resources, "files", lambda _name: upgraded)
        self_calibration._calibrator.cache_clear()
        names.add(cached_file(plain))
    self_calibration._calibrator.cache_clear()
    assert len(names) == 1 + len(others) + 3


def refusal(config: VllmConfig) -> str:
    with pytest.raises(CalibrationError) as error:
        resolve_auto(config)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('tq-calibrate: heads of 7', file=sys.stderr); sys.exit(2)", "heads of 7 (exit code 2)"),
        ("sys.exit(9)", "tq-calibrate said nothing; its output is above (exit code 9)"),
    ],
)
def test_a_model_that_cannot_be_calibrated_stops_the_start(
    script: str, reason: str, model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, script)
    assert refusal(settings(model)) == (
        f'packed_kv.calibration "auto": {reason}; without this option the engine starts uncalibrated'
    )
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_link_that_leads_nowhere_does_not_stop_the_start(model: str) -> None:
    plain = cached_file(settings(model))
    (Path(model) / "notes.json").symlink_to("nowhere")
    (Path(model) / "round.json").symlink_to("round.json")
    assert cached_file(settings(model)) == plain


def test_a_file_of_another_rope_is_passed_over(
    model: str, tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's folder has a file that was made without the overrides of this engine."""
    beside = write(Path(model), content(1, version=3))
    assert resolved(settings(model)) == beside
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    config = settings(model, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    path = resolved(config)
    assert path == cached_file(config) and len(commands) == 1
    assert log[0].startswith(f"KV cache calibration: {beside} is passed over: made for another RoPE: ")


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 32, "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 2048,
}  # fmt: skip


def test_an_engine_of_long_factors_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses longrope's factors by max_model_len, which tq-calibrate is told."""
    config = tiny_models.llama(
        vocab_size=4096, num_hidden_layers=1, max_position_embeddings=8192, rope_parameters=LONGROPE
    )
    model = tiny_models.save(config, tmp_path / "model")
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    paths = [resolved(settings(model, max_model_len=length)) for length in (2048, 4096, 8192)]
    assert paths[0] != paths[1] == paths[2]
    short, long = commands
    assert '"max_model_len": 2048' in short[-3] and '"max_model_len": 4096' in long[-3]


def test_a_damaged_file_of_the_cache_stops_the_start(model: str, cache: Path) -> None:
    """By the engine itself, before its model is loaded."""
    path = cached_file(settings(model))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(CalibrationError) as error, engine(model, "tq4", **OPTIONS):
        pass
    line = str(error.value)
    assert line.startswith(f"{path}: is not JSON") and line.endswith("or delete it: it is a file of the cache")


def test_options_that_no_other_process_knows_are_refused(model: str) -> None:
    config = settings(model)
    config.model_config.hf_overrides = lambda config: config
    assert "is not possible with hf_overrides <function" in refusal(config)


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    """Before anything runs; a model's own files of any kind of tokenizer will do."""
    model = SimpleNamespace(model=str(tmp_path), tokenizer=str(tmp_path))
    (tmp_path / "config.json").touch()
    with pytest.raises(CalibrationError, match="the folder has no tokenizer; --tokenizer names one"):
        self_calibration._check_tokenizer(model)
    model.tokenizer = str(DEMO_MODEL)
    self_calibration._check_tokenizer(model)
    model.tokenizer = str(tmp_path)
    for name in ("tokenizer.json", "tekken.json", "vocab.txt"):
        (tmp_path / name).touch()
        self_calibration._check_tokenizer(model)
        (tmp_path / name).unlink()
    model.tokenizer = "an/id of the Hub"
    self_calibration._check_tokenizer(model)
