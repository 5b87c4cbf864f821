"""`"calibration": "auto"`: an engine without a calibration file has one made before it starts, once for a model.

Not by the engine itself: when its model is loaded its layers have their codecs (made in `Attention.__init__`), vLLM
runs the model before serving only without attention or over pages of these codecs, and no plugin is asked in between;
docs/lab/calibration.md names the places. So `tq-calibrate --engine vllm` runs first, in a process that takes the
devices' memory with it when it ends. The engine core does so, before it starts its workers; these are told the file's
path.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.resources
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.config.quantization import resolve_quantization_config
from vllm.logger import init_logger

from ..calibration_content import VERSION
from ..calibration_file import FILE_NAME, CalibrationError, load
from ..model.rope import rope_parameters
from ..private_file import Untrusted, locked, open_own, own_folder, sweep, temporary_folder, why_not_replaced
from .calibration import model_folder
from .model_options import MODEL_OPTIONS, TOKENIZER_OPTIONS, model_numbers, options_of
from .options import AUTO, KEY, given_options

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.packed_kv")

CONTEXT = 2048
"""Tokens of a sequence that tq-calibrate runs, unless the engine serves fewer."""
PROGRESS = ("loading ", "calibrating: ", "choosing: ")
"""Beginnings of the lines in which tq-calibrate tells how far it is."""
TOKENIZERS = ("tokenizer", "vocab", "tekken", "tiktoken", "spiece", "sentencepiece", "qwen.tiktoken", "spm")
"""Beginnings of the names of a tokenizer's files; "tokenizer" also begins tokenizer.json and tokenizer.model."""
ANOTHER = "VLLM_CACHE_ROOT or XDG_CACHE_HOME names another folder"
WAITING = "KV cache calibration: another process is making %s; waiting"
UNTIL_EXIT = contextlib.ExitStack()
"""Holds the folder of a file that is for this process alone."""
atexit.register(UNTIL_EXIT.close)
SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".tiktoken", ".py"}
"""Suffixes of the files of a folder that make a model."""


def resolve_auto(config: VllmConfig) -> None:
    """Replace "auto" by the path of a file: the one in the model's folder, or one in the user's cache.

    The cached file is made if it is missing; one of several processes makes it, the others wait. Raises
    CalibrationError.
    """
    options = given_options(config.additional_config)
    if options.get("calibration") != AUTO:
        return
    path = settled_file(config)
    if path.name != FILE_NAME:
        path = _ensure(path, config)
    config.additional_config = {**config.additional_config, KEY: {**options, "calibration": str(path)}}


def settled_file(config: VllmConfig) -> Path:
    """The file that "auto" stands for: the one in the model's folder, unless it was made for another RoPE; else one in
    the user's cache, which may not exist yet."""
    model = config.model_config
    path = model_folder(model.model, model.revision) / FILE_NAME
    if not path.is_file():
        return cached_file(config)
    try:
        fault = load(path).other_rope(rope_parameters(model.hf_text_config))
    except CalibrationError:
        return path  # the engine says what is wrong with it
    if fault:
        logger.info("KV cache calibration: %s is passed over: %s", path, fault)
    return cached_file(config) if fault else path


def cached_file(config: VllmConfig) -> Path:
    """Path of the cached file of an engine's model: below vLLM's own folder in the user's cache, under the model's name
    and a digest of all that decides the file: weights, tokenizer, arguments, context, version of the file, and
    tq-calibrate's code, which may choose otherwise after an upgrade."""
    model = config.model_config
    decides = {
        "version": VERSION,
        "calibrator": _calibrator(),
        "files": _identity(model),
        "options": _model_options(config),
        "numbers": model_numbers(config),
        "dtype": _dtype(model),
        "context": min(CONTEXT, model.max_model_len),
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]+", "-", model.model.rstrip("/").rpartition("/")[2])
    return Path(vllm.envs.VLLM_CACHE_ROOT) / "packed_kv" / f"{name}-{digest}.json"


@functools.cache
def _calibrator() -> str:
    """Digest of tq-calibrate's code."""
    files = (file for file in importlib.resources.files("tq_calibrate").iterdir() if file.name.endswith(".py"))
    code = [file.read_bytes() for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256(b"\0".join(code)).hexdigest()


def _identity(model: ModelConfig) -> list[Any]:
    """Identity of a model's files: the commit of the Hub, or sizes and times of a folder's files."""
    path = Path(model.model)
    if not path.exists():
        return [model.model, model_folder(model.model, model.revision).name]
    files = [path] if path.is_file() else sorted(path.iterdir())
    counted = [file for file in files if file.suffix in SUFFIXES and file.name != FILE_NAME]
    states = [(file.name, file.stat()) for file in counted if os.path.exists(file)]  # a link may lead nowhere
    return [str(path.resolve()), *([name, state.st_size, state.st_mtime_ns] for name, state in states)]


def _model_options(config: VllmConfig) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` with which another engine runs the same model. Raises CalibrationError."""
    model = config.model_config
    found = {**options_of(config, (*MODEL_OPTIONS, *TOKENIZER_OPTIONS)), "load_format": config.load_config.load_format}
    if found.get("quantization_config") == resolve_quantization_config(model.quantization, None):
        found.pop("quantization_config", None)  # a name says it all
    options = {name: value for name, value in found.items() if (name, value) != ("tokenizer", model.model)}
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


def _ensure(path: Path, config: VllmConfig) -> Path:
    """Return the path of the file, making it if it is missing: `path` or, where others can write the cache or nobody
    can, a file of this process below TMPDIR. Raises CalibrationError."""
    try:
        with own_folder(path.parent, ANOTHER) as folder:
            if not _is_there(folder, path):
                with locked(folder, path.with_suffix(".lock"), lambda: logger.info(WAITING, path)) as lock:
                    _make(folder, path, config, lock)
    except (Untrusted, OSError) as error:
        logger.warning("KV cache calibration: none is kept, and one is made at each start: %s", error)
        try:
            made, lock = UNTIL_EXIT.enter_context(temporary_folder())
        except OSError as full:
            raise CalibrationError(
                f'packed_kv.calibration "auto": {error}; nor can TMPDIR be used ({full}); '
                "name a folder of your own as TMPDIR"
            ) from full
        path = made / path.name
        _calibrate(path, config, lock)
    try:
        load(path)
    except CalibrationError as error:
        raise CalibrationError(f"{error}, or delete it: it is a file of the cache") from error
    return path


def _is_there(folder: int, path: Path) -> bool:
    """Return whether the cache has a file of this user's."""
    try:
        os.close(open_own(folder, path))
    except (FileNotFoundError, Untrusted):
        return False
    return True


def _make(folder: int, path: Path, config: VllmConfig, lock: int) -> None:
    """Have the file made, unless another process was faster. First delete a file there that another user owns. Raises
    CalibrationError, Untrusted and OSError."""
    sweep(path.parent)
    try:
        os.close(open_own(folder, path))
        return
    except FileNotFoundError:
        pass
    except Untrusted as error:
        try:
            os.unlink(path.name, dir_fd=folder)
        except IsADirectoryError:
            raise error from None
        logger.warning("KV cache calibration: %s; it was deleted and is made again", error.reason)
    if reason := why_not_replaced(path):
        raise Untrusted(reason, ANOTHER)
    _calibrate(path, config, lock)


def _check_tokenizer(model: ModelConfig) -> None:
    """Raise CalibrationError for a folder without a tokenizer, for which several libraries would give misleading
    errors."""
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
        "max_model_len": model.max_model_len,
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
