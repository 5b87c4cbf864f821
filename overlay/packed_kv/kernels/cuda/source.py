"""The kernels' source files, as they lie in the package."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple


class Source(NamedTuple):
    """A source file, the files that it includes, the architecture that it is compiled for, and its kernels."""

    main: str
    headers: tuple[str, ...]
    architecture: str
    entries: tuple[str, ...]


DECODE = Source(
    "decode.cu",
    ("ptx.cuh", "copies.cuh", "codes.cuh", "columns.cuh", "attend.cuh", "ring.cuh", "combine.cuh", "finish.cuh",
     "pages.cuh", "narrow.cuh", "team.cuh", "team_mma.cuh", "wide.cuh"),
    "sm_90",
    ("decode",),
)  # fmt: skip
UNPACKED = Source(
    DECODE.main,
    (*DECODE.headers, "wgmma.cuh", "roles_tiles.cuh", "roles_unpack.cuh", "roles_attend.cuh", "roles.cuh"),
    "sm_90a",
    DECODE.entries,
)
"""`DECODE` for variants that have warps that only unpack."""
LATENT = Source(
    "latent.cu",
    (
        "ptx.cuh",
        "copies.cuh",
        "codes.cuh",
        "wgmma.cuh",
        "latent_runs.cuh",
        "latent_tile.cuh",
        "latent_pages.cuh",
        "latent_picks.cuh",
        "latent_queries.cuh",
        "latent_attend.cuh",
        "latent_narrow.cuh",
    ),
    "sm_90a",
    ("latent_decode", "latent_merge"),
)
LATENT_RING = Source("latent_ring.cu", ("ptx.cuh",), "sm_90", ("attend_latent_ring",))


def read_sources(source: Source) -> dict[str, str]:
    """Return the text of a source's files by name."""
    folder = resources.files(__package__)
    return {name: folder.joinpath(name).read_text() for name in (source.main, *source.headers)}
