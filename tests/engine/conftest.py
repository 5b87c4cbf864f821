"""Fixtures of the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo-7m"


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Folder of the embedded demo model."""
    return str(DEMO_MODEL)
