"""The kernel's source files, as they lie in the package."""

from __future__ import annotations

from importlib import resources

MAIN = "decode.cu"
HEADERS = (
    "ptx.cuh", "codes.cuh", "columns.cuh", "attend.cuh", "ring.cuh", "combine.cuh", "finish.cuh", "pages.cuh",
    "narrow.cuh", "team.cuh", "wide.cuh",
)  # fmt: skip


def read_sources() -> dict[str, str]:
    """Return the text of `MAIN` and `HEADERS` by name."""
    folder = resources.files(__package__)
    return {name: folder.joinpath(name).read_text() for name in (MAIN, *HEADERS)}
