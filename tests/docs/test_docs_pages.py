"""Links of pages, and pages that sources name, lead to files and headings that exist; pages for users stay short."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from checkout import REPO

LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
"""A relative link: path, and heading."""
NAMED = re.compile(r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?")
"""A page that a docstring, a comment, a log line or a refusal names."""
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
SOURCES = {".py", ".cu", ".cuh", ".h", ".cpp", ".sh", ".toml", ".yml", ".patch"}
FOLDERS = (".github", "benchmarks", "calibration", "docs", "examples", "models", "overlay", "quality", "scripts",
           "tests", "vllm_patches")  # fmt: skip
LONG = {"formats", "models", "speed"}
"""Pages for users that may have more than `LINES` lines."""
LINES, WORDS = 250, 32_000


def files(suffixes: set[str]) -> list[str]:
    """Files of the repository with these suffixes."""
    found = [*REPO.iterdir(), *(path for folder in FOLDERS for path in (REPO / folder).rglob("*"))]
    return sorted(str(path.relative_to(REPO)) for path in found if path.suffix in suffixes and path.is_file())


@cache
def headings(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as the site makes them."""
    found = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower() for title in found)
    return frozenset(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title)) for title in plain)


@pytest.mark.parametrize("page", files({".md"}))
def test_links_lead_to_files_and_headings(page: str) -> None:
    here = REPO / page
    broken = []
    for path, heading in LINK.findall(re.sub(r"`[^`]*`", "", FENCE.sub("", here.read_text()))):
        target = (here.parent / path).resolve() if path else here
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(f"{path}#{heading}" if heading else path)
    assert broken == []


def test_sources_name_pages_and_headings_that_exist() -> None:
    broken = []
    for source in [*files(SOURCES), "overlay/packed_kv/planning/measured.json"]:
        for page, heading in NAMED.findall((REPO / source).read_text(errors="replace")):
            if not (REPO / page).exists() or (heading and heading not in headings(REPO / page)):
                broken.append(f"{source}: {page}#{heading}" if heading else f"{source}: {page}")
    assert broken == []


def test_pages_for_users_are_short() -> None:
    """How things were measured is in docs/lab/."""
    texts = {page.stem: page.read_text() for page in REPO.glob("docs/*.md")}
    lines = {name: len(text.splitlines()) for name, text in texts.items() if name not in LONG}
    assert {name: count for name, count in lines.items() if count > LINES} == {}
    assert sum(len(text.split()) for text in texts.values()) <= WORDS


def test_each_lab_page_is_linked_from_its_page() -> None:
    """And each page of the laboratory from some page for users."""
    linked = {path for page in REPO.glob("docs/*.md") for path, _ in LINK.findall(page.read_text())}
    for lab in REPO.glob("docs/lab/*.md"):
        page = REPO / "docs" / lab.name
        assert f"lab/{lab.name}" in ({path for path, _ in LINK.findall(page.read_text())} if page.exists() else linked)


def column(page: str, title: str) -> dict[str, str]:
    """Dtype -> cell in the column of this title, in a page's table whose first column names dtypes."""
    found: dict[str, str] = {}
    at = 0
    for line in (REPO / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if title in cells and line.startswith("|"):
            at = cells.index(title)
        elif at and line.startswith("| `"):
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[at])
        elif not line.startswith("|"):
            at = 0
    return found


def test_readme_choose_and_formats_have_the_same_figures() -> None:
    formats = column("docs/formats.md", "bf16 / slot")
    for page in ("README.md", "docs/choose.md"):
        shown = column(page, "KV tokens, \N{MULTIPLICATION SIGN} bf16")
        assert {"tq4", "turboquant35", "turboquant25"} <= shown.keys()
        assert shown.items() <= formats.items()
    bits = column("docs/choose.md", "bits per channel")
    assert column("README.md", "bits per channel").items() <= bits.items()
