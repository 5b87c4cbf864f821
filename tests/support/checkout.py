"""Paths of the checkout."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parents[2]
DEMO_MODEL = REPO / "models" / "demo-7m"
LATENT_MODEL = REPO / "models" / "mla-demo"
