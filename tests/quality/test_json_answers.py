"""Figures of answers in JSON: valid, equal, and how far alike; and rows of CSV files."""

from __future__ import annotations

import csv
from argparse import ArgumentParser
from pathlib import Path

import csv_rows
import json_answers
import pytest

VALID = '{"name":"Anna","year":1850}'


def answer(text: str, tokens: list[int], reason: str = "stop") -> dict[str, object]:
    return {"text": text, "tokens": tokens, "reason": reason, "cached": 16}


def test_figures() -> None:
    """The first schema asks for a name and a year."""
    assert list(json_answers.schema_of(0)[1]["properties"]) == ["name", "year"]
    expected = [answer(VALID, [1, 2, 3, 4])]
    for text, tokens, reason, valid, equal, alike in (
        (VALID, [1, 2, 3, 4], "stop", 1, 1, 1.0),
        (VALID.replace("1850", "1851"), [1, 2, 9, 4], "stop", 1, 0, 0.5),
        (VALID.replace("1850", "18500"), [1, 2, 3, 9], "stop", 0, 0, 0.75),
        (VALID[:-1], [9], "stop", 0, 0, 0.0),
        (VALID, [1, 2, 3, 4], "length", 0, 1, 1.0),
    ):
        found = json_answers.figures([answer(text, tokens, reason)], expected)
        assert (found["valid"], found["equal"], found["tokens before the first that differs"]) == (valid, equal, alike)


def test_rows_have_what_stands_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    csv_rows.add_options(parser)
    options = parser.parse_args(["--rows", str(tmp_path / "rows.csv"), "--beside", "cpu=AMD EPYC", "commit=1=2"])
    csv_rows.write(options.rows, [{"dtype": "tq4", "valid": 39}, {"dtype": "fp8", "valid": 40}], options.beside)
    with options.rows.open(newline="") as source:
        first, second = csv.DictReader(source)
    assert first == {"dtype": "tq4", "valid": "39", "cpu": "AMD EPYC", "commit": "1=2"} and second["valid"] == "40"
    with pytest.raises(SystemExit):
        parser.parse_args(["--beside", "commit"])
    assert "commit" in capsys.readouterr().err
