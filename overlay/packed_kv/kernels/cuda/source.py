"""The kernel's source, as it lies in the package, and where what is compiled of it is kept."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

MAIN = "decode.cu"
HEADERS = ("ptx.cuh", "codes.cuh", "attend.cuh", "ring.cuh", "combine.cuh")


def read_source(name: str) -> str:
    """One of the files."""
    return resources.files(__package__).joinpath(name).read_text()


def cache_folder() -> Path:
    """Where compiled kernels are kept: PACKED_KV_CACHE, or packed_kv in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "packed_kv"
    return Path(os.environ.get("PACKED_KV_CACHE") or default)
