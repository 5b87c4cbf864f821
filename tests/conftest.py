"""Settings of every test: no network, no telemetry, quiet engines in the test's own process; what starts an engine.

One OpenMP thread, not bound to a core: the demo model is too small to gain from a second, and OpenMP's barriers
make two threads ten times slower than one as soon as anything else runs on the machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkout import DEMO_MODEL
from quick import LIST, Quick

if TYPE_CHECKING:
    from harness import Start

signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that fixtures end the servers that they started
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores, and its children
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"without the tests of tests/{LIST.name}")


@pytest.hookimpl(tryfirst=True)  # before -k leaves tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch  # which reads OMP_NUM_THREADS

    quick = Quick(LIST.read_text())
    are_whole_files = not any("::" in argument for argument in config.args)
    has_ids_of_a_cpu = not torch.cuda.is_available()
    if are_whole_files and has_ids_of_a_cpu and (stale := quick.stale(item.nodeid for item in items)):
        raise pytest.UsageError(f"tests/{LIST.name} has what is no test:\n" + "\n".join(stale))
    if config.option.quick:
        left_out = [item for item in items if not quick.runs(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if quick.runs(item.nodeid)]


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Folder of the embedded demo model."""
    return str(DEMO_MODEL)


@pytest.fixture(autouse=True)
def _models_are_inspected_in_this_process() -> None:
    """vLLM inspects each model's class in a new process, which imports vLLM again (8 s), lest CUDA be initialized in
    the first. Without CUDA, classes are inspected in this process, once a test has imported vLLM."""
    if (registry := sys.modules.get("vllm.model_executor.models.registry")) is not None:
        import torch

        if not torch.cuda.is_available():
            vars(registry)["_run_in_subprocess"] = lambda inspect: inspect()


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where an engine comes to start its workers."""
    from vllm.v1.executor.abstract import Executor

    monkeypatch.setattr(Executor, "__init__", lambda *_arguments: pytest.fail("workers are started"))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an architecture of `coverage_models`, with the weights and, on CUDA, graphs that the table has."""
    import coverage_engine
    import harness
    import torch
    from coverage_models import MODELS
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
