"""`"calibration": "auto"`: a file is found or made, once, before the engine's workers start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from calibration_files import content, write
from checkout import DEMO_MODEL
from harness import engine
from packed_kv import FORMATS
from packed_kv.calibration_file import CalibrationError, load
from packed_kv.engine import metrics
from packed_kv.private_file import new_name
from packed_kv.settings import self_calibration
from packed_kv.settings.self_calibration import cached_file, resolve_auto
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

AUTO: dict[str, Any] = {"additional_config": {"packed_kv": {"calibration": "auto"}}}
OPTIONS: dict[str, Any] = {"tokenizer": str(DEMO_MODEL), "dtype": "float32", "max_model_len": 512, **AUTO}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tiny_models.save(tiny_models.llama(vocab_size=4096, num_hidden_layers=1), tmp_path / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the cache; vLLM remembers its environment once an engine has run in a process."""
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed_kv"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    add = lambda line, *args: lines.append(line % args)  # noqa: E731
    monkeypatch.setattr(self_calibration, "logger", SimpleNamespace(info=add, warning=add))
    return lines


def settings(model: str, **options: Any) -> VllmConfig:
    return EngineArgs(model, kv_cache_dtype="tq4", **{**OPTIONS, **options}).create_engine_config()


def resolved(config: VllmConfig) -> Path:
    resolve_auto(config)
    return Path(config.additional_config["packed_kv"]["calibration"])


def instead(monkeypatch: pytest.MonkeyPatch, script: str) -> list[list[str]]:
    """Run a script in place of tq-calibrate, with its arguments; returns the commands that would have been run."""
    commands: list[list[str]] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen:
        commands.append(command)
        return subprocess.Popen([sys.executable, "-c", f"import sys, time, shutil\n{script}", *command], **options)

    replace_popen(monkeypatch, popen)
    return commands


def replace_popen(monkeypatch: pytest.MonkeyPatch, popen: Callable[..., subprocess.Popen]) -> None:
    """Replace it for the module alone: vLLM starts programs, too."""
    constants = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL")}
    monkeypatch.setattr(self_calibration, "subprocess", SimpleNamespace(Popen=popen, **constants))


def copies(file: Path) -> str:
    """A script that writes a file as tq-calibrate would, after a while."""
    return f"time.sleep(0.3); shutil.copy({str(file)!r}, sys.argv[sys.argv.index('--out') + 1])"


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


def test_what_decides_a_file_is_in_its_name(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(names) == 1 + len(others) + 2


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


@pytest.fixture
def until_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this process, which ends with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmpdir"))
    (tmp_path / "tmpdir").mkdir()
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(self_calibration, "UNTIL_EXIT", stack)
        yield tmp_path / "tmpdir"
    assert os.listdir(tmp_path / "tmpdir") == []


def full(folder: Path) -> None:
    """Let the cache's file have no place."""
    folder.mkdir(parents=True)
    (folder / cached_file(settings(str(folder.parents[1] / "model"))).name).mkdir()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cache: cache.parent.touch(), "Not a directory"),
        (lambda cache: [cache.mkdir(parents=True), cache.chmod(0o777)], "others can write {cache} (mode 777)"),
        (lambda cache: [cache.mkdir(parents=True), cache.chmod(0o770)], "others can write {cache} (mode 770)"),
        (full, "Is a directory"),
    ],
    ids=["no folder", "folder of all", "folder of a group", "no file"],
)
def test_a_cache_that_is_not_this_users_alone_costs_time(
    change: Callable[[Path], object],
    reason: str,
    model: str,
    cache: Path,
    until_exit: Path,
    tmp_path: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine calibrates for itself, whatever others have put there, and one line says why."""
    change(cache)
    if reason.startswith("others"):
        write(cache, content(1, mean=30000.0, version=3)).rename(cache / cached_file(settings(model)).name)
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    path = resolved(settings(model))
    assert len(commands) == 1 and path.parent.parent == until_exit and path.parent.stat().st_mode & 0o777 == 0o700
    assert load(path).version == 1
    told = [line for line in log if "one is made at each start" in line]
    assert len(told) == 1 and reason.format(cache=cache) in told[0]
    assert not list(cache.glob("*.lock")) or reason == "Is a directory"


@pytest.fixture
def victim(cache: Path) -> Path:
    """A file of this user's in the cache, to which links lead."""
    cache.mkdir(parents=True, mode=0o700)
    (cache / "victim").write_text("precious")
    return cache / "victim"


def planted(path: Path) -> None:
    path.write_text("precious")
    os.chown(path, 1234, -1)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (planted, "{path} belongs to user 1234"),
        (lambda path: path.symlink_to("victim"), "{path} is not a regular file"),
        (os.mkfifo, "{path} is not a regular file"),
        (lambda path: [path.touch(), path.chmod(0o666)], "others can write {path} (mode 666)"),
    ],
    ids=["another user's", "link", "FIFO", "writable"],
)
def test_a_planted_file_is_not_loaded_but_replaced(
    plant: Callable[[Path], object],
    reason: str,
    model: str,
    victim: Path,
    tmp_path: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if plant is planted and os.geteuid():
        pytest.skip("only root can give a file away")
    path = cached_file(settings(model))
    plant(path)
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    assert resolved(settings(model)) == path
    assert len(commands) == 1 and not path.is_symlink() and load(path).version == 1
    assert victim.read_text() == "precious"
    assert log[0].startswith(f"KV cache calibration: {reason.format(path=path)}") and log[0].endswith(
        "it was deleted and is made again"
    )
    assert resolved(settings(model)) == path and len(commands) == 1


@pytest.mark.parametrize(
    "plant",
    [lambda path: path.symlink_to("victim"), os.mkfifo, lambda path: path.mkdir()],
    ids=["link", "FIFO", "folder"],
)
def test_a_planted_lock_harms_nothing(
    plant: Callable[[Path], object],
    model: str,
    victim: Path,
    until_exit: Path,
    tmp_path: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No file of this user's is truncated, and no FIFO is waited for."""
    lock = cached_file(settings(model)).with_suffix(".lock")
    plant(lock)
    instead(monkeypatch, copies(write(tmp_path, content(1))))
    assert resolved(settings(model)).parent.parent == until_exit
    assert victim.read_text() == "precious"
    assert f"{lock} is not a regular file; delete it" in log[0]


def test_what_a_killed_calibration_left_is_removed(
    model: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    (cache / f".{new_name()}").touch()
    instead(monkeypatch, copies(write(tmp_path, content(1))))
    path = resolved(settings(model))
    assert sorted(cache.iterdir()) == [path, path.with_suffix(".lock")]


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
