"""KL behind hits of the prefix cache, by two routes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from pydoc_data.topics import topics

import behind_hits
import pytest
from checkout import DEMO_MODEL


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> int:
    (folder / "text.txt").write_text(text)
    options = ["--prefixes", "200", "300", "--prompts", "4", "--kv-bytes", "64M", "--rows", str(folder / "rows.csv")]
    monkeypatch.setattr(sys, "argv", ["x", str(DEMO_MODEL), "--text", str(folder / "text.txt"), *options])
    return behind_hits.main()


def test_routes_are_alike_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each prompt finds its prefix alone (the script says if not), and what is packed costs something."""
    assert run(monkeypatch, tmp_path, topics["assignment"] + topics["class"]) == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prefix"] for row in rows] == ["200", "300"]
    for row in rows:
        assert 1e-4 < float(row["graphs"]) == float(row["ordinary"]) < 0.1 and float(row["ratio"]) == 1


def test_a_short_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "short")
    assert "give a text of at least 308" in capsys.readouterr().err
