"""The tables of README.md and docs/, results/runs.md and planning/measured.json are those that their rows give."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
from rows import MACHINE, read

RELEASE = REPO / "benchmarks" / "results" / "release"
PAGES = ("README.md", "docs/index.md", *(f"docs/{name}.md" for name in ("speed", "server", "internals")),
         "benchmarks/README.md", "benchmarks/results/README.md")  # fmt: skip
MADE = ("README.md", *(f"docs/{name}.md" for name in ("speed", "server", "internals", "quality", "reliability")),
        "overlay/packed_kv/planning/measured.json")  # fmt: skip
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")


def check(repo: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repo / "benchmarks" / "measured.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the tables are made from, and of the pages with them."""
    shutil.copytree(REPO / "benchmarks", tmp_path / "benchmarks")
    for page in MADE:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / page, tmp_path / page)
    return tmp_path


def test_tables_are_those_of_the_rows() -> None:
    done = check(REPO)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "pages"),
    [
        ("release/decode.csv", "tq4,32,8192,32,8.069,8.103", "tq4,32,8192,32,8.069,8.203", "README.md, docs/speed.md"),
        ("decode.csv", ",NVIDIA H200", ",NVIDIA H100",
         "benchmarks/results/runs.md, docs/speed.md, overlay/packed_kv/planning/measured.json"),
        ("generate-smollm2/calibrated.json", '"kl_mean": 0.00297', '"kl_mean": 0.00797', "README.md, docs/quality.md"),
        ("quality-smollm2-h200/calibrated-window-64-29533ae.json", '"kl_mean": 0.00487974', '"kl_mean": 0.00787974',
         "docs/quality.md, overlay/packed_kv/planning/measured.json"),
        ("tensor_parallel.csv", "auto,1,32768,24,4.453,4.586", "auto,1,32768,24,4.453,4.686",
         "docs/speed.md, overlay/packed_kv/planning/measured.json"),
        ("means.csv", "tq4,32,8192,48,8.754,8.833", "tq4,32,8192,48,8.754,8.933", "docs/speed.md"),
        ("soak_restarts_cpu.json", '"errors": 0', '"errors": 1', "docs/reliability.md"),
        ("latent_quality.csv", "tq4,yes,400,0.000556", "tq4,yes,400,0.000656",
         "docs/quality.md, overlay/packed_kv/planning/measured.json"),
        ("runs.toml", "benchmarks/store.py --csv", "benchmarks/shop.py --csv", "benchmarks/results/runs.md"),
    ],
    ids=["step", "card", "quality", "teacher-forced", "collective", "mean of two runs", "soak", "latents", "command"],
)  # fmt: skip
def test_changed_row_is_noticed(copy: Path, file: str, old: str, new: str, pages: str) -> None:
    path = copy / "benchmarks" / "results" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = check(copy)
    assert (done.returncode, done.stdout) == (1, f"stale, run benchmarks/measured.py: {pages}\n"), done.stderr


def test_rows_of_a_release_are_of_one_commit_card_and_environment() -> None:
    """Files of results/release/, which `benchmarks/release.py` wrote."""
    made = {file.name: {tuple(row[name] for name in MACHINE) for row in read(file)} for file in RELEASE.glob("*.csv")}
    assert made and len(set().union(*made.values())) == 1, made


def test_rows_without_a_command_are_refused(copy: Path) -> None:
    """A row whose commit runs.toml does not name."""
    path = copy / "benchmarks" / "results" / "store.csv"
    path.write_text(path.read_text().replace("06b2a1e", "1234abc", 1))
    assert "runs.toml has no run for store.csv at '1234abc'" in check(copy).stderr


def test_pages_are_short_and_name_commits_in_tables_only() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= 150
    for page in PAGES:
        lines = (REPO / page).read_text().splitlines()
        prose = [line for line in lines if not line.startswith("|")]
        assert [line for line in prose if COMMIT.search(line)] == [], page
