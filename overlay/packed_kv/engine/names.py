"""Names by which vLLM knows the backend of a format."""

from __future__ import annotations

from ..formats import Format


def registry_name(fmt: Format) -> str:
    """Return the name in vLLM's registry of attention backends, which `get_name` of the backend returns, too."""
    return f"PACKED_KV_{fmt.name.upper()}"


def class_name(fmt: Format) -> str:
    """Name of the class in `backend.py`."""
    return f"{fmt.name.capitalize()}Backend"


def latent_registry_name(fmt: Format) -> str:
    """Result of `get_name` of the format's backends of latent attention."""
    return f"PACKED_KV_LATENT_{fmt.name.upper()}"


def sparse_registry_name(fmt: Format) -> str:
    """The same of sparse attention over latents."""
    return f"PACKED_KV_SPARSE_LATENT_{fmt.name.upper()}"
