"""scripts/demo.py: what vLLM logs before an engine starts is not shown."""

from __future__ import annotations

import logging

import demo
import pytest


@pytest.mark.parametrize(("level", "shown"), [("error", False), ("WARNING", True)])
def test_warnings_of_imports_follow_vllms_level(level: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that Triton has no CPU backend, which a module of vLLM logs."""
    of_vllm = logging.getLogger("vllm")
    before = of_vllm.level
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    try:
        demo.quiet_imports()
        assert logging.getLogger("vllm.triton_utils.importing").isEnabledFor(logging.WARNING) == shown
    finally:
        of_vllm.setLevel(before)
