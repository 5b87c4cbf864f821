"""`"calibration": "auto"`: an engine without a calibration file has one made before it starts, once for a model.

Not by the engine itself: when its model is loaded its layers have their codecs (made in `Attention.__init__`), vLLM
runs the model before serving only without attention or over pages of these codecs, and no plugin is asked in between;
docs/calibration.md names the places. So `tq-calibrate --engine vllm` runs first, in a process that takes the devices'
memory with it when it ends. The engine core does so, before it starts its workers; these are told the file's path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.config.quantization import resolve_quantization_config
from vllm.logger import init_logger

from ..calibration_content import VERSION
from ..calibration_file import FILE_NAME, CalibrationError, load
from .calibration import model_folder
from .options import AUTO, KEY, given_options

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.packed_kv")

CONTEXT = 2048
"""Tokens of a sequence that tq-calibrate runs, unless the engine serves fewer."""
STATISTICS = 2
"""Version of tq-calibrate's statistics: increment it when its choices change, so that engines have their files
regenerated. 2: keys are weighed by the attention that they get."""
MODEL_OPTIONS = (
    "tokenizer", "tokenizer_mode", "tokenizer_revision", "revision", "code_revision", "trust_remote_code",
    "quantization", "quantization_config", "hf_overrides", "hf_config_path", "config_format", "model_impl",
)  # fmt: skip
"""Arguments of an engine that decide what its model computes; with its dtype and `load_format`."""
PROGRESS = ("loading ", "calibrating: ", "choosing: ")
"""Beginnings of the lines in which tq-calibrate tells how far it is."""
TOKENIZERS = ("tokenizer", "vocab", "tekken", "tiktoken", "spiece", "sentencepiece", "qwen.tiktoken", "spm")
"""Beginnings of the names of a tokenizer's files; "tokenizer" also begins tokenizer.json and tokenizer.model."""
SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".tiktoken", ".py"}
"""Suffixes of the files of a folder that make a model."""


def resolve_auto(config: VllmConfig) -> None:
    """Put the path of the file in place of "auto": that of the model's folder, or one in the user's cache.

    Makes the latter if it is not there; of several processes one makes it, the others wait. Raises CalibrationError.
    """
    options = given_options(config.additional_config)
    if options.get("calibration") != AUTO:
        return
    path = settled_file(config)
    if path.name != FILE_NAME:
        _ensure(path, config)
    config.additional_config = {**config.additional_config, KEY: {**options, "calibration": str(path)}}


def settled_file(config: VllmConfig) -> Path:
    """The file that "auto" stands for: that of the model's folder, or else one in the user's cache, there or not."""
    path = model_folder(config.model_config.model, config.model_config.revision) / FILE_NAME
    return path if path.is_file() else cached_file(config)


def cached_file(config: VllmConfig) -> Path:
    """Path of the cached file of an engine's model: below vLLM's own folder in the user's cache, under the model's name
    and a digest of all that decides the file: weights, tokenizer, arguments, context, version of the file and of the
    statistics that it is made from."""
    model = config.model_config
    decides = {
        "version": VERSION,
        "statistics": STATISTICS,
        "files": _identity(model),
        "options": _model_options(config),
        "dtype": _dtype(model),
        "context": min(CONTEXT, model.max_model_len),
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]+", "-", model.model.rstrip("/").rpartition("/")[2])
    return Path(vllm.envs.VLLM_CACHE_ROOT) / "packed_kv" / f"{name}-{digest}.json"


def _identity(model: ModelConfig) -> list[Any]:
    """Identity of a model's files: the commit of the Hub, or sizes and times of a folder's files."""
    path = Path(model.model)
    if not path.exists():
        return [model.model, model_folder(model.model, model.revision).name]
    files = [path] if path.is_file() else sorted(path.iterdir())
    states = [(file.name, file.stat()) for file in files if file.suffix in SUFFIXES and file.name != FILE_NAME]
    return [str(path.resolve()), *([name, state.st_size, state.st_mtime_ns] for name, state in states)]


def _model_options(config: VllmConfig) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` with which another engine runs the same model. Raises CalibrationError."""
    model = config.model_config
    found = {name: getattr(model, name, None) for name in MODEL_OPTIONS}
    found["load_format"] = config.load_config.load_format
    if found["quantization_config"] == resolve_quantization_config(model.quantization, None):
        del found["quantization_config"]  # a name says it all
    options = {name: value for name, value in found.items() if value and (name, value) != ("tokenizer", model.model)}
    for name, value in options.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise CalibrationError(
                f'packed_kv.calibration "auto" is not possible with {name} {value!r}, which only this process knows; '
                "write the path of a file"
            ) from error
    return options


def _dtype(model: ModelConfig) -> str:
    return str(model.dtype).removeprefix("torch.")


def _ensure(path: Path, config: VllmConfig) -> None:
    """Have the file made, unless it is there. Raises CalibrationError."""
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path.with_suffix(".lock")) as lock:
                if not path.is_file():
                    _calibrate(path, config, lock)
    except OSError as error:
        raise CalibrationError(
            f'packed_kv.calibration "auto": {path.parent} cannot be written ({error.strerror}); VLLM_CACHE_ROOT or '
            "XDG_CACHE_HOME names another folder"
        ) from error
    try:
        load(path)
    except CalibrationError as error:
        raise CalibrationError(f"{error}, or delete it: it is a file of the cache") from error


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[int]:
    """Wait for a lock and hold it. Yields its file descriptor: the lock is free when all copies of it are closed."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("KV cache calibration: another process is making %s; waiting", path.with_suffix(".json"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _check_tokenizer(model: ModelConfig) -> None:
    """Raise CalibrationError for a folder without a tokenizer, of which several libraries would say much else."""
    folder = Path(model.tokenizer or model.model)
    if folder.is_dir() and not any(file.name.startswith(TOKENIZERS) for file in folder.iterdir()):
        raise CalibrationError(
            f'packed_kv.calibration "auto" runs the model over text, and {folder}: the folder has no tokenizer; '
            "--tokenizer names one"
        )


def _calibrate(path: Path, config: VllmConfig, lock: int) -> None:
    """Run tq-calibrate, with its progress in the log. It holds `lock` too, and ends when this process does.

    Raises CalibrationError.
    """
    model, parallel = config.model_config, config.parallel_config
    options = _model_options(config) | {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "download_dir": config.load_config.download_dir,
    }
    command = [
        *(sys.executable, "-P", "-m", "tq_calibrate", "model", model.model, "--engine", "vllm", "--out", str(path)),
        *("--dtype", _dtype(model), "--context", str(min(CONTEXT, model.max_model_len))),
        *("--engine-options", json.dumps({name: value for name, value in options.items() if value is not None})),
        *("--parent", str(os.getpid())),
    ]
    _check_tokenizer(model)
    logger.info("KV cache calibration: none for %s yet; making %s, once", model.model, path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_DP_")}
    environment = {"TQDM_MININTERVAL": "5", "PYTHONWARNINGS": "ignore", **environment}
    reason = "tq-calibrate said nothing; its output is above"
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True, errors="replace",
        pass_fds=(lock,),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        try:
            for line in map(str.strip, process.stderr):
                if line.startswith("tq-calibrate: "):
                    reason = line.removeprefix("tq-calibrate: ")
                elif line.startswith(PROGRESS):
                    logger.info("KV cache calibration: %s", line)
                elif line:
                    print(line, file=sys.stderr)
        except BaseException:  # told to stop: leave no orphan that holds the devices
            process.terminate()
            raise
    if process.returncode:
        raise CalibrationError(
            f'packed_kv.calibration "auto": {reason} (exit code {process.returncode}); without this option the '
            "engine starts uncalibrated"
        )
