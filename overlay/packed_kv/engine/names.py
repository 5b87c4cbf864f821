"""Names by which vLLM knows the backend of a format."""

from __future__ import annotations

from ..formats import Format

LATENT, SPARSE = "LATENT_", "SPARSE_LATENT_"
"""Kinds of backends beside those of pairs."""


def registry_name(fmt: Format, kind: str = "") -> str:
    """Return the name in vLLM's registry of attention backends, which `get_name` of the backend returns, too."""
    return f"PACKED_KV_{kind}{fmt.name.upper()}"


def class_name(fmt: Format) -> str:
    """Name of the class in `backend.py`."""
    return f"{fmt.name.capitalize()}Backend"
