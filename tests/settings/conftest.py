"""A model whose engine calibrates itself, its cache folder, and the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
from packed_kv.settings import self_calibration
from vllm import envs


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tiny_models.save(tiny_models.llama(vocab_size=4096, num_hidden_layers=1), tmp_path / "model")


@pytest.fixture
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
