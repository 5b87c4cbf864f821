"""`packed-kv selftest`: table, JSON and exit codes; the processes that it starts are real where they can be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkout import REPO
from packed_kv.commands import card_report, selftest
from packed_kv.commands.main import main
from packed_kv.formats import FORMATS

MACHINE = {"pytorch": "2.11.0", "threads": "8", "device": "NVIDIA L4", "capability": "8.9", "cuda": "13.0"}


def row(name: str, decode_kernel: str = "auto", **changed: Any) -> dict[str, Any]:
    parts = {
        "store": {"cases": 20, "error": 0.0, "bound": 0.0},
        "gather": {"cases": 32, "error": 9e-4, "bound": 4e-3},
        "decode": {"cases": 53, "error": 1.2e-3, "bound": 2e-3},
    }
    found = {
        "dtype": name, "decode_kernel": decode_kernel, "kernel": "Triton", "latents_kernel": "Triton", "parts": parts,
        "wrong": [], "repeats": 412, "differ": 0, "microseconds": 40.0, "bf16_microseconds": 80.0,
        "fp8_microseconds": 60.0, "is_right": True, "seconds": 2.5,
    }  # fmt: skip
    return found | changed


WRONG = row("tq4", is_right=False, wrong=["decode, 8/2 heads of 128: 5.0e-02 relative error, 2.0e-03 allowed"])


START = subprocess.Popen


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Lets each process that loads vLLM be a script of the shell; the list has what each was asked."""
    asked: list[dict[str, Any]] = []

    def give(*scripts: str) -> list[dict[str, Any]]:
        waiting = list(scripts)

        def popen(command: list[str], **options: Any) -> subprocess.Popen:
            asked.append(json.loads(command[-1]))
            return START(["bash", "-c", waiting.pop(0)], **options)

        monkeypatch.setattr(selftest.subprocess, "Popen", popen)
        versions = {"vllm": "vllm 0.33.0", "triton": "triton 3.6.0", "packed_kv": "packed-kv 0.1.0", "commit": "abc"}
        monkeypatch.setattr(selftest, "versions", lambda: versions)
        return asked

    return give


def says(*events: dict[str, Any]) -> str:
    return "\n".join(f"echo '{json.dumps(event)}'" for event in events)


def test_a_table(process, capsys: pytest.CaptureFixture[str]) -> None:
    rows = row("tq4", kernel="CUDA", microseconds=30.0), row("tq4", "triton")
    asked = process(says({"machine": MACHINE}, {"begin": ["tq4", "auto"]}, *({"row": one} for one in rows), {"end": 2}))
    assert main(["selftest", "--dtypes", "tq4", "--device", "cuda:1"]) == 0
    assert asked == [{"dtypes": ["tq4"], "device": "cuda:1", "done": [], "parent": os.getpid()}]
    first, heads, by_cuda, by_triton, *_, last = capsys.readouterr().out.splitlines()
    assert first == "packed-kv selftest on NVIDIA L4; the first run compiles kernels for one to four minutes"
    words = [" ".join(line.split()) for line in (heads, by_cuda, by_triton)]
    assert words == [
        "dtype kernel compared largest error and its bound differ us / bf16",
        "tq4 CUDA 105 decode 1.2e-03 of 2.0e-03 0 of 412 30 0.38",
        "tq4 Triton 105 decode 1.2e-03 of 2.0e-03 0 of 412 40 0.50",
    ]
    assert last == (
        "packed-kv 0.1.0 (commit abc), vllm 0.33.0, torch 2.11.0, triton 3.6.0, NVIDIA L4 (compute capability 8.9): "
        "2 rows right"
    )


def test_a_line_says_which_setting_to_take(process, capsys: pytest.CaptureFixture[str]) -> None:
    by_cuda = {"decode_kernel": "cuda", "kernel": "CUDA", "latents_kernel": None}
    rows = [
        row("tq4"), row("tq4", **by_cuda, microseconds=24.0), row("tq3"), row("tq3", **by_cuda, microseconds=44.0),
        row("turboquant25", is_right=False, microseconds=None), row("turboquant25", **by_cuda),
        row("isoquant4"), WRONG | by_cuda | {"dtype": "isoquant4"},
    ]  # fmt: skip
    process(says({"machine": MACHINE}, *({"row": one} for one in rows), {"end": 8}))
    assert main(["selftest"]) == 1
    assert (
        'on this card set decode_kernel to "cuda" for tq4 (0.60 of Triton\'s time), turboquant25 (not timed); leave '
        "decode_kernel out for tq3 (1.10 of Triton's time), isoquant4 (wrong)"
    ) in capsys.readouterr().out.splitlines()
    assert [kernel["kernel"] for kernel in card_report.content(MACHINE, {}, rows[:2])["kernels"]] == ["Triton", "CUDA"]
    assert selftest.setting([row("tq4", kernel="CUDA"), row("tq4", "triton")]) == ""


def test_a_difference_is_exit_code_1(process, capsys: pytest.CaptureFixture[str]) -> None:
    process(says({"machine": MACHINE}, {"row": WRONG}, {"row": row("tq3")}, {"end": 2}))
    assert main(["selftest", "--dtypes", "tq4", "tq3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  WRONG decode, 8/2 heads of 128: 5.0e-02 relative error, 2.0e-03 allowed" in lines
    assert lines[-2].startswith("1 of 2 right.") and lines[-1].endswith(": tq4 by Triton wrong")


def test_a_process_that_dies_is_a_difference(process, capsys: pytest.CaptureFixture[str]) -> None:
    """The next process goes on behind the row."""
    machine = {"machine": MACHINE}
    asked = process(
        says(machine, {"row": row("tq3")}, {"begin": ["tq4", "auto"]}) + "\necho illegal access >&2; kill -SEGV $$",
        says(machine, {"begin": ["tq4", "triton"]}, {"row": row("tq4", "triton")}, {"end": 1}),
    )
    assert main(["selftest", "--dtypes", "tq3", "tq4"]) == 1
    assert [one["done"] for one in asked] == [[], [["tq3", "auto"], ["tq4", "auto"]]]
    out = capsys.readouterr().out
    assert "  WRONG it failed: illegal access" in out and "2 of 3 right." in out
    assert out.count("packed-kv selftest on") == 1


def test_a_process_that_hangs_is_a_difference(process, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(selftest, "SILENT_SECONDS", 0.5)
    machine = {"machine": MACHINE}
    process(says(machine, {"begin": ["tq4", "auto"]}) + "\nexec sleep 60", says(machine, {"end": 0}))
    assert main(["selftest", "--dtypes", "tq4"]) == 1
    assert "  WRONG it failed: it said nothing" in capsys.readouterr().out


KEYS = {"exit_code", "cannot", "machine", "timed", "rows", "paste"}
TIMED = {"requests": 32, "context": 8192, "block_size": 16, "query_heads": 32, "kv_heads": 8, "head_dim": 128,
         "window": 64, "copy_rate": 2.7e11}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "code"),
    [({"row": row("tq4")}, 0), ({"row": WRONG}, 1), ({"cannot": "--device auto: 0.2 GiB of memory are free"}, 2)],
)
def test_json(event: dict[str, Any], code: int, process, capsys: pytest.CaptureFixture[str]) -> None:
    process(says({"machine": MACHINE}, event, {"end": 1}))
    assert main(["selftest", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert {*found} == KEYS and found["exit_code"] == code
    assert found["cannot"] == event.get("cannot")
    assert found["rows"] == ([event["row"]] if "row" in event else [])


def test_what_cannot_run_is_one_line(process, capsys: pytest.CaptureFixture[str]) -> None:
    process(says({"cannot": "--device cuda: Tesla T4, compute capability 7.5: packed pages need 8.0 or later"}))
    assert main(["selftest", "--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("packed-kv selftest: --device cuda: Tesla T4") and captured.err.count("\n") == 1
    assert not captured.out


def test_a_vllm_that_does_not_load(process, capsys: pytest.CaptureFixture[str]) -> None:
    process("echo ImportError: libcudart.so.13 >&2; exit 1")
    assert main(["selftest"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "packed-kv selftest: vLLM does not load (ImportError: libcudart.so.13); packed-kv doctor says what to do\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dtypes", "tq5"), "argument --dtypes: invalid choice: 'tq5' (choose from 'isoquant3'"),
        (("--device", "gpu0"), "argument --device: expected cpu, cuda or cuda:N, got 'gpu0'"),
    ],
)
def test_bad_arguments(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["selftest", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1


def test_without_vllm(bare, tmp_path: Path) -> None:
    run = bare("selftest")
    assert run.returncode == 2 and run.stderr == (
        "packed-kv selftest: torch is not installed; it comes with vLLM: pip install vllm; packed-kv doctor says which "
        "versions are served\n"
    )
    (tmp_path / "packages" / "torch").mkdir()
    run = bare("selftest", "--json")
    assert run.returncode == 2 and json.loads(run.stdout)["cannot"].startswith("vllm is not installed; pip install")


def test_a_report(process, tmp_path: Path) -> None:
    """Every field of it: what the machine told beyond them is not in it."""
    spoiled = {
        "device": "NVIDIA L4 at /home/me",
        "compiler": "/home/me/c++ 12",
        "kernels": "none: me@host",
        "cuda": "/usr",
    }
    parts = {"decode": {"cases": 3, "error": None, "bound": 2e-3}, "store": {"cases": 3, "error": 0.0, "bound": 0.0}}
    rows = (
        row("tq4", kernel="CUDA", microseconds=30.04),
        row("tq3", is_right=False, parts=parts, differ=2, wrong=["decode, /home/me: 5"], microseconds=None,
            bf16_microseconds=None, fp8_microseconds=None),
        {"dtype": "tq3", "decode_kernel": "triton", "is_right": False, "wrong": ["it failed: host: /home/me/x.so"]},
    )  # fmt: skip
    process(says({"machine": MACHINE | spoiled}, {"timed": TIMED}, *({"row": one} for one in rows), {"end": 3}))
    file = tmp_path / "report.json"
    file.write_text("an older one")
    assert main(["selftest", "--report", str(file)]) == 1
    timed = {name: TIMED[name] for name in card_report.TIMED}
    named = {"dtype": "tq3", "is_right": False, "ms": None, "bf16_ms": None, "fp8_ms": None}
    assert json.loads(file.read_text()) == {
        "form": 1, "card": "NVIDIA L4 at ?home?me", "capability": "8.9", "commit": "unknown", "timed": timed,
        "versions": {"vllm": "vllm 0.33.0", "pytorch": "2.11.0", "triton": "triton 3.6.0",
                     "packed_kv": "packed-kv 0.1.0", "cuda": "unknown"},
        "copy_GB_s": 270.0,
        "kernels": [
            {"dtype": "tq4", "decode_kernel": "auto", "kernel": "CUDA", "latents_kernel": "Triton", "is_right": True,
             "wrong": [], "ms": 0.03, "bf16_ms": 0.08, "fp8_ms": 0.06},
            named | {"decode_kernel": "auto", "kernel": "Triton", "latents_kernel": "Triton",
                     "wrong": ["decode", "repeated launches"]},
            named | {"decode_kernel": "triton", "kernel": None, "latents_kernel": None, "wrong": ["it failed"]},
        ],
    }  # fmt: skip


def test_a_commit_is_reported(process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("f2456679+", "f2456679"):
        process(says({"machine": MACHINE}, {"timed": TIMED}, {"row": row("tq4")}, {"end": 1}))
        versions = {"vllm": "vllm 0.33.0", "triton": "no triton", "packed_kv": "packed-kv 0.1.0", "commit": commit}
        monkeypatch.setattr(selftest, "versions", lambda versions=versions: versions)
        assert main(["selftest", "--report", str(tmp_path / "report.json")]) == 0
        found = json.loads((tmp_path / "report.json").read_text())
        assert found["commit"] == commit and found["versions"]["triton"] == "no triton"


@pytest.mark.parametrize(
    ("name", "said"),
    [("none/report.json", "none is not a folder; make it first"), (".", " is a folder; name a file, such as"),
     ("a" * 256, "cannot be written (File name too long)")],
)  # fmt: skip
def test_a_report_that_cannot_be_written_is_told_before(
    name: str, said: str, process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = process()
    with pytest.raises(SystemExit) as ended:
        main(["selftest", "--report", f"{tmp_path}/{name}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1 and not asked


def test_a_folder_that_goes_meanwhile(process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    process(f"rmdir {folder}\n" + says({"machine": MACHINE}, {"row": row("tq4")}, {"end": 1}))
    assert main(["selftest", "--report", str(folder / "report.json")]) == 2
    assert capsys.readouterr().err.endswith("report.json cannot be written: No such file or directory\n")


def test_no_report_of_what_cannot_run(process, tmp_path: Path) -> None:
    process(says({"machine": MACHINE}, {"cannot": "--device auto: 0.2 GiB of memory are free"}))
    assert main(["selftest", "--report", str(tmp_path / "report.json")]) == 2
    assert not list(tmp_path.iterdir())


def test_the_whole_command(tmp_path: Path) -> None:
    """As a user runs it, on the device that vLLM is for here."""
    file = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "packed_kv.commands.main",
        "selftest",
        "--dtypes",
        "tq4",
        "--json",
        "--report",
        file,
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr + run.stdout
    found = json.loads(run.stdout)
    assert {*found} == KEYS and {"device", "pytorch", "vllm", "triton", "packed_kv", "commit"} <= {*found["machine"]}
    assert {one["dtype"] for one in found["rows"]} == {"tq4"} and all(one["is_right"] for one in found["rows"])
    assert "vllm" in found["paste"] and found["paste"].endswith("right")
    assert {*row("tq4")} == {*found["rows"][0]}, "what the other tests take for a row"
    assert {*TIMED} == {*found["timed"]} and found["timed"]["copy_rate"] > 1e8
    text = file.read_text()
    report, mine = json.loads(text), (socket.gethostname(), str(tmp_path), str(REPO), str(Path.home()), sys.prefix)
    assert not [name for name in mine if name in text] and "/" not in text
    assert all(kernel["is_right"] and kernel["ms"] > 0 and kernel["bf16_ms"] > 0 for kernel in report["kernels"])
    assert report["copy_GB_s"] > 0.1 and report["commit"] == found["machine"]["commit"]
    assert report["card"] == found["machine"]["device"] and "unknown" not in report["versions"].values()


def test_every_dtype_by_default() -> None:
    assert selftest.parser().parse_args([]).dtypes == list(FORMATS)
