"""The tables of `packed-kv-quality generate`: how rows are merged, compared and kept."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkout import REPO


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with results of two files in a folder of its own."""
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import generation_tables

    monkeypatch.setattr(generation_tables, "RESULTS", tmp_path)
    (tmp_path / generation_tables.FOLDER).mkdir()
    write(tmp_path / generation_tables.FOLDER / "calibrated.json", {"auto": 0, "fp8": 0.02, "tq4": 0.005})
    write(tmp_path / generation_tables.FOLDER / "uncalibrated.json", {"auto": 0, "tq4": 0.01})
    yield generation_tables
    for name in ("generation_tables", "measured_rows", "tables", "rows"):
        sys.modules.pop(name, None)


def write(path: Path, kl: dict[str, float]) -> None:
    rows = [row(dtype, mean) for dtype, mean in kl.items()]
    run = {"made_with": {"device": "a GPU", "vllm": "1", "torch": "2"}, "commit": "abc1234", "command": "generate"}
    path.write_text(json.dumps({"rows": rows, "run": run}))


def row(dtype: str, mean: float) -> dict[str, Any]:
    """Two texts, of which the second is three times as hard; two tasks, of which the baseline solves the first."""
    continuations = [
        {"text": text, "prompt": 1000, "kl_mean": times * mean, "kl_error": times * mean / 4,
         "kl_windows": [times * mean * 0.5, times * mean * 1.5]}
        for text, times in (("a", 1), ("b", 3))
    ]  # fmt: skip
    answers = {"kind": "far", "prompt": 1000, "solved": [True, dtype != "auto"], "log_probs": [-10 * mean, -9.0]}
    return {
        "dtype": dtype, "bytes_per_token": 1000, "continuations": continuations, "answers": [answers],
        "rounding": {"1000": 0.001} if dtype == "auto" else {},
    }  # fmt: skip


def test_both_texts_count_alike(made: ModuleType) -> None:
    rows = made.shared(made.merged(made.continuations(), ("prompt",)), ("prompt",))
    found = {(row["dtype"], row["setting"]): made.kl(row, None) for row in rows}
    assert found == {
        ("fp8", made.OTHERS): "0.0400 ± 0.0079",
        ("tq4", made.CALIBRATED): "0.0100 ± 0.0020 (0.25)",
        ("tq4", made.UNCALIBRATED): "0.0200 ± 0.0040 (0.50)",
    }


def test_gains_are_paired_by_windows(made: ModuleType) -> None:
    [table] = made.gain()
    assert table.lines == [["tq4", "0.50 ± 0.00"]], "windows differ by more than that, but alike in both"
    ratio, error = made.ratio_of_means([1.0, 2.0], [2.0, 2.0])
    assert (ratio, error) == (0.75, pytest.approx(0.25))


def test_what_is_not_finite_is_said_so(made: ModuleType, tmp_path: Path) -> None:
    kl = {"auto": 0, "fp8": 0.02, "tq4": 0.005, "int4_per_token_head": math.nan}
    write(tmp_path / made.FOLDER / "calibrated.json", kl)
    assert made.by_text()[0].lines[-1] == ["int4_per_token_head", "1,000", "", made.NOT_FINITE, made.NOT_FINITE]
    assert made.planted()[0].lines[-1] == ["int4_per_token_head", "", f"100%, {made.NOT_FINITE}"]
    assert [row["dtype"] for row in made.plotted()["1,000"][0]] == ["fp8", "tq4"]


def test_goals_are_judged_by_the_figures_shown(made: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "GAINS", {"tq4": (0.5,)})
    monkeypatch.setattr(made, "SHARES", {"tq4": (0.24,)})
    monkeypatch.setattr(made, "LOSSES", {"tq4": None})
    [table] = made.goals()
    assert [line[2] for line in table.lines] == ["0.50 (0.50: reached)", "0.25 (0.24: missed)", "0.05 (0.20: reached)"]
    assert made.judged(0.504, 0.5).endswith("reached)") and made.judged(0.506, 0.5).endswith("missed)")


def test_tasks_are_those_that_the_baseline_solves(made: ModuleType) -> None:
    [table] = made.planted()
    assert table.head == ["dtype", "setting", "a number far back, 1,000 (1 of 2)"]
    assert [line[2] for line in table.lines] == ["100%, 0.20", "100%, 0.05", "100%, 0.10"]
