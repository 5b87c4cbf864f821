"""The docs name files that exist, and commits only in tables and in the captions of tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import REPO

PACKAGE = REPO / "overlay" / "packed_kv"
PAGES = sorted(
    [*REPO.glob("docs/**/*.md"), *(REPO / name for name in ("README.md", "CONTRIBUTING.md"))]
    + [REPO / folder / "README.md" for folder in ("benchmarks", "vllm_patches")]
)
FOLDERS = {
    path.name: path.parent
    for parent in (PACKAGE, REPO)
    for path in parent.iterdir()
    if path.is_dir() and path.name != "models" and not path.name.startswith((".", "__"))
}
"""Folders that a path in the docs may begin with -> where they lie. (`models/...` may be vLLM's.)"""
NAMED = re.compile(rf"(?<![\w/.$-])(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:cuh?|json|md|py|sh|toml|txt)\b")
COMMIT = re.compile(r"(?<![\w.-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}(?![\w.-])")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    if page.name == "internals.md":
        pytest.skip("its commands are those of its rows' commits")
    named = set(NAMED.findall(page.read_text()))
    missing = {path for path in named if not (FOLDERS[path.partition("/")[0]] / path).exists()}
    assert not missing


@pages
def test_commits_stand_in_tables_and_captions(page: Path) -> None:
    """A caption says "commit" before the hash."""
    for paragraph in page.read_text().split("\n\n"):
        prose = " ".join(line for line in paragraph.splitlines() if not line.startswith(("|", "    ")))
        prose = re.sub(r"\s+", " ", re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose))
        for found in COMMIT.finditer(prose):
            assert prose[: found.start()].endswith("commit "), (found[0], paragraph[:200])
