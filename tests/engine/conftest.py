"""Fixtures of the engine tests."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import coverage_engine
import harness
import pytest
import torch
from coverage_models import MODELS

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo-7m"


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Folder of the embedded demo model."""
    return str(DEMO_MODEL)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> harness.Start:
    """Starts an architecture of `coverage_models`, with the weights and, on CUDA, graphs that the table has."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    monkeypatch.setattr(DummyModelLoader, "load_weights", coverage_engine.set_weights)

    def start(architecture: str, kv_cache_dtype: str, **options: Any) -> AbstractContextManager:
        if architecture.startswith("Qwen3_5"):
            pytest.importorskip("torchvision", reason="transformers asks for it")
        coverage_engine.register(architecture)
        folder = tmp_path / architecture
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[architecture]))
        defaults: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
        if torch.cuda.is_available():
            coverage_engine.keep_one_configuration()
            defaults |= {"enforce_eager": False, "compilation_config": coverage_engine.GRAPHS}
            defaults["additional_config"] = {"gdn_prefill_backend": "triton"}
        return harness.engine(str(folder), kv_cache_dtype, **{**defaults, **options})

    return start
