"""The kernel's source, as it lies in the package."""

from __future__ import annotations

from importlib import resources

MAIN = "decode.cu"
HEADERS = ("ptx.cuh", "codes.cuh", "attend.cuh", "ring.cuh", "combine.cuh")


def read_source(name: str) -> str:
    """One of the files."""
    return resources.files(__package__).joinpath(name).read_text()
