"""Engines with `"calibration": "auto"`, and scripts in the place of tq-calibrate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import DEMO_MODEL
from packed_kv.settings import self_calibration
from packed_kv.settings.self_calibration import resolve_auto
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

AUTO: dict[str, Any] = {"additional_config": {"packed_kv": {"calibration": "auto"}}}
OPTIONS: dict[str, Any] = {"tokenizer": str(DEMO_MODEL), "dtype": "float32", "max_model_len": 512, **AUTO}


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
