"""The release measurement: what ended well is not repeated, rows of a file are of one commit and card, and
`benchmarks/adopt.py` makes the docs' tables of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
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
    monkeypatch.setattr(release, "ESSENTIAL", ("steps",))
    monkeypatch.chdir(tmp_path)
    return release


WAITING = """
import sys, time
from pathlib import Path
arguments = sys.argv
given = {name: arguments[arguments.index(name) + 1] for name in ("--dtypes", "--out", "--commit", "--begin")}
with Path("order").open("a") as order:
    order.write(f"start {given['--dtypes']}\\n")
while not Path(given["--begin"]).exists():
    time.sleep(0.01)
with Path("order").open("a") as order:
    order.write(f"go {given['--dtypes']}\\n")
time.sleep(1)
row = f"dtype,gpu,vllm,torch,triton,commit\\n{given['--dtypes']},card,1,2,3,{given['--commit']}\\n"
(Path(given["--out"]) / "decode.csv").write_text(row)
with Path("order").open("a") as order:
    order.write(f"end {given['--dtypes']}\\n")
"""


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


def test_the_next_run_imports_while_one_measures(release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(WAITING)
    monkeypatch.setattr(release, "AHEAD", ("fake.py",))
    assert call(release, monkeypatch, "--commit", "abc") == 0
    order = (tmp_path / "order").read_text().splitlines()
    assert order.index("start fp8") < order.index("end auto") < order.index("go fp8")
    assert order.index("start tq4") < order.index("end fp8") < order.index("go tq4")


def test_a_run_that_takes_too_long_is_ended(
    release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With the processes that it has started."""
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    child = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {deaf!r}])"
    (tmp_path / "fake.py").write_text(f"{child}; open('pid', 'w').write(str(p.pid)); time.sleep(60)\n")
    monkeypatch.setattr(release, "PARTS", {"steps": release.Part("fake.py", "", ("auto",), seconds=1)})
    started = time.monotonic()
    assert call(release, monkeypatch, "--commit", "abc", "--seconds", "2") == 1
    assert time.monotonic() - started < 20 and "steps auto: stopped after 2 s" in capsys.readouterr().out
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    time.sleep(0.2)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_options_of_each_part_are_those_of_its_script() -> None:
    """Each script has the options of its parts, and each renamed file an entry."""
    import adopt
    import release

    for name, part in release.PARTS.items():
        text = (release.HERE / part.script).read_text() + (release.HERE / "workers.py").read_text()
        own = [word for word in part.options.split() if word.startswith("--")] + ["--csv" if part.csv else "--out"]
        text += (release.HERE / "made_up_calibration.py").read_text()
        assert [word for word in own if f'"{word}"' not in text] == [], name
        assert "-" not in name and {*part.files.values(), part.csv or "decode.csv"} <= {*adopt.WHAT}
    assert set(release.ESSENTIAL) <= set(release.PARTS)


def test_a_release_is_adopted(tmp_path: Path) -> None:
    """Into the files, runs.toml and the tables of a copy of the checkout; rows that are lost are named."""
    import rows

    shutil.copytree(REPO / "benchmarks", tmp_path / "benchmarks")
    for page in ("README.md", "docs", "overlay/packed_kv/planning/measured.json"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (REPO / page).is_dir() else shutil.copy)(REPO / page, tmp_path / page)
    results, out = tmp_path / "benchmarks/results/release", tmp_path / "out"
    found = {row["dtype"]: row for row in rows.read(results / "throughput.csv")}
    for dtype in ("auto", "fp8", "tq4", "turboquant25"):
        fit = {"requests": "48", "fit": "16" if dtype == "auto" else "48", "decode_tokens_s": "4321"}
        row = {**found.get(dtype, found["tq4"]), **fit, "dtype": dtype, "commit": "1234abc"}
        (out / "runs" / f"throughput-{dtype}").mkdir(parents=True)
        rows.append(out / "runs" / f"throughput-{dtype}" / "throughput.csv", row)
        (out / "runs" / f"throughput-{dtype}" / "done").write_text("1234abc")
    (out / "runs" / "mixed-auto").mkdir()  # which has not ended well
    rows.append(out / "runs" / "mixed-auto" / "mixed.csv", {"dtype": "auto"})
    others = {file: file.read_text() for file in results.rglob("*.csv") if file.name != "throughput.csv"}
    reports = {}
    for name in ("calibrated", "uncalibrated"):
        file, run = results.parent / f"generate-smollm2/{name}.json", out / "runs" / f"quality-{name}"
        reports[file] = file.read_text()
        run.mkdir()
        (run / f"{name}.json").write_text(reports[file].replace("--output ", "--output /home/somebody/"))
        file.write_text(f"{reports[file]}\n")
    (out / "runs/quality-calibrated/done").write_text("1234abc")

    def adopt() -> str:
        command = [sys.executable, str(tmp_path / "benchmarks/adopt.py"), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = adopt()
    assert "release/throughput.csv: 4 rows of turboquant25, tq4, fp8, auto" in said
    assert "generate-smollm2" not in said  # one of its two settings has not ended
    (out / "runs/quality-uncalibrated/done").write_text("1234abc")
    said += adopt()
    for file, report in reports.items():
        assert f"generate-smollm2/{file.name}" in said and file.read_text() == report
    assert "rewritten: README.md, " in said and "docs/server.md" in said
    assert "| turboquant25 | 48 (3.00) | 4,321 (1.00) |" in (tmp_path / "README.md").read_text()
    assert {file: file.read_text() for file in results.rglob("*.csv") if file.name != "throughput.csv"} == others
    runs = (tmp_path / "benchmarks/results/runs.toml").read_text()
    assert runs.count('"release/throughput.csv"') == 1 and "--parts throughput" in runs
    assert "\r" not in (results / "throughput.csv").read_text()
    (out / "runs/throughput-tq4/done").unlink()
    assert "no longer there: dtype tq4, requests 48" in adopt()
    for file in out.glob("runs/throughput-*/throughput.csv"):
        file.write_text(file.read_text().replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    before = (results / "throughput.csv").read_text()
    assert "release/h100/throughput.csv: 3 rows of turboquant25, fp8, auto" in adopt()
    assert (results / "throughput.csv").read_text() == before
    runs = (tmp_path / "benchmarks/results/runs.toml").read_text()
    assert runs.count('"release/throughput.csv"') == runs.count('"release/h100/throughput.csv"') == 1
    assert runs.count('commit = "1234abc", command = "python3 benchmarks/release.py --out DIR --parts throughput"') == 2


def test_options_of_parts_are_those_of_decode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """And each shape that they name has a config, of a model that is known."""
    import decode
    from packed_kv.model.shape import parse
    from release import PARTS

    for part in PARTS.values():
        if part.script == "decode.py":
            monkeypatch.setattr(sys, "argv", ["decode.py", *part.options.split(), "--dtypes", *part.dtypes])
            options = decode.with_drafts(decode.parse_arguments())
            if options.model:
                parse(json.loads(Path(options.model, "config.json").read_text()), Path(options.model).name)
    monkeypatch.setattr(sys, "argv", ["decode.py", "--no-search", "--budget", "0"])
    with pytest.raises(SystemExit):
        decode.parse_arguments()
    assert "--no-search makes prompts slower" in capsys.readouterr().err
