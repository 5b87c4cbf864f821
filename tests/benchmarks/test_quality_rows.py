"""Rows of `packed-kv-quality generate`: how they are merged, compared and kept."""

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
    import quality_rows
    import tables

    for module in (quality_rows, tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / quality_rows.FOLDER).mkdir()
    write(tmp_path / quality_rows.FOLDER / "calibrated.json", {"auto": 0, "fp8": 0.02, "tq4": 0.005})
    write(tmp_path / quality_rows.FOLDER / "uncalibrated.json", {"auto": 0, "tq4": 0.01})
    yield quality_rows
    for name in ("quality_rows", "tables", "rows"):
        sys.modules.pop(name, None)


def write(path: Path, kl: dict[str, float]) -> None:
    rows = [row(dtype, mean) for dtype, mean in kl.items()]
    run = {"made_with": {"device": "a GPU", "vllm": "1", "torch": "2"}, "commit": "abc1234", "command": "generate"}
    path.write_text(json.dumps({"rows": rows, "run": run}))


def row(dtype: str, mean: float) -> dict[str, Any]:
    """Two texts, of which the second is three times as hard; two tasks, of which the baseline solves the first."""
    continuations = [
        {"text": text, "prompt": 1000, "kl_mean": times * mean, "kl_error": times * mean / 4,
         "kl_p999": 3 * times * mean, "kl_windows": [times * mean * 0.5, times * mean * 1.5]}
        for text, times in (("a", 1), ("b", 3))
    ]  # fmt: skip
    answers = {"kind": "far", "prompt": 1000, "solved": [True, dtype != "auto"], "log_probs": [-10 * mean, -9.0]}
    return {"dtype": dtype, "bytes_per_token": 1000, "continuations": continuations, "answers": [answers]}


def loaded(made: ModuleType) -> list[dict[str, str]]:
    import tables

    tables.files.cache_clear()
    (tables.RESULTS / "runs.toml").write_text(f'[[file]]\nname = "{made.FOLDER}/"\nwhat = ""\n')
    files = made.BEHIND.items()
    return [{**row, "setting": setting} for name, setting in files for row in tables.load(name)]


def test_both_texts_count_alike(made: ModuleType) -> None:
    import tables

    rows = made.behind("prompt")(loaded(made))
    assert {(row["dtype"], row["setting"]): tables.kl(row) for row in rows} == {
        ("fp8", ""): "0.0400 ± 0.0079",
        ("tq4", made.CALIBRATED): "0.0100 ± 0.0020 (0.25)",
        ("tq4", made.UNCALIBRATED): "0.0200 ± 0.0040 (0.50)",
    }


def test_gains_are_paired_by_windows(made: ModuleType) -> None:
    import tables

    [row] = made.gains(loaded(made))
    assert row["gain"] == "0.50 ± 0.00", "windows differ by more than that, but alike in both"
    ratio, error = tables.ratio_of_means([1.0, 2.0], [2.0, 2.0])
    assert (ratio, error) == (0.75, pytest.approx(0.25))


def test_tasks_of_two_files_are_paired(made: ModuleType) -> None:
    """Only those count that the baseline solves."""
    rows = [row for row in loaded(made) if row["dtype"] in ("auto", "tq4")]
    for name, log_probs in zip(made.BEHIND, ([-1.0, -2.0, -50.0], [-0.5, -3.0, -1.0]), strict=True):
        found = json.loads((made.RESULTS / name).read_text())
        solved = {"auto": [True, True, False], "tq4": [True, log_probs[1] == -2.0, True]}
        for row in found["rows"]:
            if row["dtype"] in solved:
                answers = {"kind": "far", "prompt": 1000, "solved": solved[row["dtype"]], "log_probs": log_probs}
                row["answers"] = [answers]
        found["rows"] = [row for row in found["rows"] if row["dtype"] in solved]
        (made.RESULTS / name).write_text(json.dumps(found))
    before, after = made.paired_tasks(rows)
    assert (before["solved"], before["regained"]) == ("2 of 2", "")
    assert (after["solved"], after["regained"]) == ("1 of 2", "-0.25 ± 0.75"), "of +0.5 and -1"


def test_what_is_not_finite_is_said_so(made: ModuleType, tmp_path: Path) -> None:
    import tables

    kl = {"auto": 0, "fp8": 0.02, "int4_per_token_head": math.nan}
    write(tmp_path / made.FOLDER / "calibrated.json", kl)
    assert tables.kl(made.behind("text", "prompt")(loaded(made))[-1]) == tables.NOT_FINITE
    assert made.kept_tasks(f"{made.FOLDER}/calibrated.json")[-1]["lost"] == tables.NOT_FINITE


def test_tasks_are_those_that_the_baseline_solves(made: ModuleType) -> None:
    rows = made.tasks(loaded(made))
    assert {(row["task"], row["prompt"], row["kept"]) for row in rows} == {("far", "1,000", "1 of 2")}
    assert [row["shown"] for row in rows] == ["100%, 0.20", "100%, 0.05", "100%, 0.10"]


def test_other_codes_are_named_and_lie_by_their_bytes(made: ModuleType) -> None:
    rows = [{"dtype": name, "bytes": size} for name, size in
            (("fp8", "11,520"), ("turbo2_tcq_64", "3,420"), ("q8_0_rotated", "12,240"), ("tq4", "6,120"))]  # fmt: skip
    assert [row["dtype"] for row in made.beside_others(rows)] == [
        "q8_0, rotated", "fp8", "tq4", "turbo2_tcq over 64 channels"
    ]  # fmt: skip


def test_mean_and_tail_in_one_cell(made: ModuleType) -> None:
    """The tail is the larger one of the two texts."""
    import tables

    cells = {row["dtype"]: tables.kl_and_tail(row) for row in made.behind("prompt", dtypes=("tq4", "fp8"))(
             [row for row in loaded(made) if row["setting"] == made.CALIBRATED])}  # fmt: skip
    assert cells == {"tq4": "0.0100 ± 0.0020 (0.25); 0.045", "fp8": "0.0400 ± 0.0079; 0.180"}
