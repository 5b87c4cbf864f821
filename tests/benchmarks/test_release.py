"""The release measurement: what ended well is not repeated, and rows of a file are of one commit and card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
SCRIPT = """
import sys
from pathlib import Path
arguments = sys.argv
given = {name: arguments[arguments.index(name) + 1] for name in ("--dtypes", "--out", "--commit")}
if given["--dtypes"] == "fp8" and not Path("works").exists():
    sys.exit(3)
row = f"dtype,gpu,vllm,torch,triton,commit\\n{given['--dtypes']},card,1,2,3,{given['--commit']}\\n"
(Path(given["--out"]) / "decode.csv").write_text(row)
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import release

    (tmp_path / "fake.py").write_text(SCRIPT)
    monkeypatch.setattr(release, "HERE", tmp_path)
    monkeypatch.setattr(release, "PARTS", {"steps": release.Part("fake.py", "", ("auto", "fp8", "tq4"))})
    monkeypatch.chdir(tmp_path)
    return release


def call(release: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["release.py", "--out", "out", *options])
    return release.main()


def dtypes(file: Path) -> list[str]:
    import rows

    return [row["dtype"] for row in rows.read(file)]


def test_a_run_that_failed_is_made_again(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert call(release, monkeypatch, "--cards", "0", "1", "--commit", "abc") == 1
    assert "failed or not begun: steps fp8. Call it again" in capsys.readouterr().out
    assert dtypes(tmp_path / "out" / "decode.csv") == ["auto", "tq4"]
    (tmp_path / "works").touch()
    (tmp_path / "out/runs/steps-auto/decode.csv").write_text(
        "dtype,gpu,vllm,torch,triton,commit\nkept,card,1,2,3,abc\n"
    )
    assert call(release, monkeypatch, "--commit", "abc") == 0
    assert dtypes(tmp_path / "out" / "decode.csv") == ["kept", "fp8", "tq4"]


def test_nothing_starts_after_its_time(release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert call(release, monkeypatch, "--seconds", "0") == 1
    assert not list((tmp_path / "out" / "runs").iterdir())


def test_another_commit_is_refused_before_anything_is_measured(
    release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    call(release, monkeypatch, "--dtypes", "auto", "--commit", "abc")
    with pytest.raises(SystemExit):
        call(release, monkeypatch, "--dtypes", "tq4", "--commit", "abd")
    assert "has runs of commit abc, and this is abd" in capsys.readouterr().err
    assert not (tmp_path / "out/runs/steps-tq4").exists()


def test_rows_of_two_cards_are_refused(release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of different files are compared, too."""
    call(release, monkeypatch, "--dtypes", "auto", "--commit", "abc")
    rows = (tmp_path / "out/runs/steps-auto/decode.csv").read_text()
    (tmp_path / "out/runs/steps-auto/prefill.csv").write_text(rows.replace("card", "other"))
    with pytest.raises(ValueError, match=r"has rows of .*card.*other"):
        call(release, monkeypatch, "--dtypes", "auto", "--commit", "abc")


def test_a_shape_that_does_not_fit_is_no_end(release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(script.read_text() + 'print("tq4: 32x8192 does not fit the KV cache")\n')
    assert call(release, monkeypatch, "--dtypes", "tq4", "--commit", "abc") == 1
    assert not (tmp_path / "out/runs/steps-tq4/done").exists()
