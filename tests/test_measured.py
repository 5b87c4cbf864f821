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
import measured
import table_specs
from rows import MACHINE, read

RELEASE = REPO / "benchmarks" / "results" / "release"
RELEASED = ("README.md", "docs/speed.md", "docs/server.md", "docs/lab/speed.md", "docs/lab/server.md")
PAGES = ("README.md", "docs/index.md", "docs/speed.md", "docs/server.md",
         *(f"docs/lab/{name}.md" for name in ("speed", "server", "internals")),
         "benchmarks/README.md", "benchmarks/results/README.md")  # fmt: skip
MADE = (*measured.SPECS, *measured.GENERATED, "overlay/packed_kv/planning/measured.json")
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
        ("release/decode.csv", "\ntq4,128,2048,", "\ntq4,128,2049,", "README.md, docs/lab/cards.md, docs/speed.md"),
        ("h100/kernels.csv", ",NVIDIA H100", ",NVIDIA H200",
         "benchmarks/results/runs.md, docs/cards.md, docs/lab/internals.md"),
        ("generate-smollm2/calibrated.json", '"kl_mean": 0.0024', '"kl_mean": 0.0074',
         "README.md, docs/lab/quality.md, docs/quality.md"),
        ("generate-smollm2/calibrated.json", '"kl_p999": 0.04', '"kl_p999": 0.09',
         "README.md, docs/lab/quality.md, docs/quality.md"),
        ("quality-smollm2-h200/calibrated-window-64-29533ae.json", '"kl_mean": 0.00487974', '"kl_mean": 0.00787974',
         "docs/lab/quality.md, overlay/packed_kv/planning/measured.json"),
        ("release/h100/tensor_parallel.csv", "auto,1,32768,32,5.503,5.566", "auto,1,32768,32,5.503,5.666",
         "docs/speed.md, overlay/packed_kv/planning/measured.json"),
        ("release/h100/means.csv", "\ntq4,32,8192,", "\ntq4,32,8191,", "docs/lab/speed.md"),
        ("soak_restarts_cpu.json", '"errors": 0', '"errors": 1', "docs/lab/reliability.md"),
        ("latent_quality.csv", "tq4,yes,400,0.000556", "tq4,yes,400,0.000656",
         "docs/lab/quality.md, overlay/packed_kv/planning/measured.json"),
        ("runs.toml", "benchmarks/store.py --csv", "benchmarks/shop.py --csv", "benchmarks/results/runs.md"),
    ],
    ids=["step", "card", "quality", "tail", "teacher-forced", "collective", "mean of two runs", "soak", "latents",
         "command"],
)  # fmt: skip
def test_changed_row_is_noticed(copy: Path, file: str, old: str, new: str, pages: str) -> None:
    path = copy / "benchmarks" / "results" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = check(copy)
    assert (done.returncode, done.stdout) == (1, f"stale, run benchmarks/measured.py: {pages}\n"), done.stderr


def test_rows_of_a_released_file_are_of_one_commit_card_and_environment() -> None:
    """Files of results/release/, which `benchmarks/release.py` wrote."""
    files = {
        str(file.relative_to(RELEASE)): {tuple(row[name] for name in MACHINE) for row in read(file)}
        for file in RELEASE.rglob("*.csv")
    }
    assert {"throughput.csv", "decode.csv", "prefill.csv"} <= set(files)
    assert {name: made for name, made in files.items() if len(made) != 1} == {}


def test_rows_of_a_table_are_of_one_commit_card_and_environment() -> None:
    """But for those of `SEVERAL`, none of which the release made."""
    specs = [spec for page in RELEASED for spec in measured.SPECS[page]]
    assert set(table_specs.SEVERAL) <= {spec.name for spec in specs}
    for spec in specs:
        rows = spec.rows()
        is_released = any(row["file"].startswith("release/") for row in rows)
        made = measured.made_with(rows)
        assert len(made) == 1 or (spec.name in table_specs.SEVERAL and not is_released), (spec.name, made)


def test_older_tables_say_why_they_are_not_of_the_release() -> None:
    """A page's table of these is in its page of docs/lab."""
    for page in RELEASED[1:]:
        older = {spec.name for spec in measured.SPECS[page]
                 if not all(row["file"].startswith("release/") for row in spec.rows())}  # fmt: skip
        assert older <= set(measured.APART)
    for page in RELEASED[3:]:
        assert "<!-- measured: older -->" in (REPO / page).read_text()


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
