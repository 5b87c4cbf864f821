"""docs/cards.md and docs/lab/cards.md: their states, the reports that it takes, its commands, and its shapes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import cards
from packed_kv.commands import card_report, plan
from packed_kv.gpu_generations import GENERATIONS
from packed_kv.planning.cards import CARDS

MACHINE = {
    "device": "NVIDIA GeForce RTX 3090", "capability": "8.6", "pytorch": "2.14.0+cu130", "vllm": "vllm 0.33.0",
    "triton": "triton 3.8.0", "packed_kv": "packed-kv 0.1.0", "cuda": "13.0", "commit": "f2cc9614",
}  # fmt: skip
TIMED = dict.fromkeys(card_report.TIMED, 8) | {"copy_rate": 8.4e11}


def row(name: str, microseconds: float | None = 100.0, **changed: Any) -> dict[str, Any]:
    return {
        "dtype": name, "decode_kernel": "auto", "kernel": "Triton", "latents_kernel": "Triton", "is_right": True,
        "microseconds": microseconds, "bf16_microseconds": microseconds and 200.0, "fp8_microseconds": None, **changed,
    }  # fmt: skip


def written(folder: Path, *rows: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Write a report into a folder, changed after it was made."""
    report = card_report.content(MACHINE, TIMED, rows) | changed
    card_report.write(folder / "rtx-3090.json", report)
    return report


def test_a_report_is_a_row(tmp_path: Path) -> None:
    written(tmp_path, row("tq4"), row("turboquant25", 50.0), row("tq3", None, is_right=False, differ=3))
    found = cards.reports(tmp_path)
    assert cards.reports_table("../", found).splitlines()[2:] == [
        "| [rtx-3090.json](../benchmarks/results/cards/rtx-3090.json) | NVIDIA GeForce RTX 3090 (8.6) | vllm 0.33.0, "
        "PyTorch 2.14.0+cu130, triton 3.8.0, packed-kv 0.1.0 | f2cc9614 | 2 of 3; **wrong**: tq3 by Triton "
        "| 840 | 200 |  | 0.50 (Triton) | 0.25 (Triton) |"
    ]
    ampere = next(one for one in GENERATIONS if one.capability == (8, 6))
    of_ampere = [CARDS["A10"], CARDS["RTX-3090"]]
    assert cards.state(ampere, of_ampere, {}, "../") == "compiles; speed **expected by arithmetic**"
    assert cards.state(ampere, of_ampere, found, "../") == (
        "**seen** on RTX-3090: [rtx-3090.json](../benchmarks/results/cards/rtx-3090.json)"
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"host": "box"}, "host is not as packed-kv selftest --report writes it"),
        ({"card": "/home/me/3090"}, "card is not as"), ({"commit": "mine"}, "commit is not as"),
        ({"versions": MACHINE}, "versions is not as"), ({"form": 0}, "form is not as"),
        ({"kernels": []}, "its kernels are not as"),
        ({"kernels": [card_report.kernel_of(row("tq4")) | {"note": "mine"}]}, "its kernels are not as"),
        ({"kernels": [card_report.kernel_of(row("tq5"))]}, "its kernels are not as"),
    ],
)  # fmt: skip
def test_what_the_self_test_did_not_write_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    written(tmp_path, row("tq4"), **changed)
    with pytest.raises(ValueError, match=said):
        cards.reports(tmp_path)


def test_no_report_is_no_row(tmp_path: Path) -> None:
    assert cards.reports_table("", cards.reports(tmp_path)) == cards.NONE_YET


def test_what_is_said_to_compile_is_compiled() -> None:
    text = (REPO / "tests" / "kernels" / "test_compile.py").read_text()
    (found,) = re.findall(r"^GENERATIONS = \(([\d, ]+)\)", text, re.MULTILINE)
    assert tuple(map(int, found.split(","))) == cards.COMPILED


def test_states() -> None:
    """Hopper alone was seen; every card of the table is in a line; older ones are refused."""
    lines = cards.generations("").splitlines()[2:]
    states = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert [name for name, line in states.items() if "**seen**" in line] == ["9.0"]
    by_request = [name for name, line in states.items() if "| Triton; CUDA by request |" in line]
    assert by_request == [name for name, line in states.items() if "up to 32 columns, **not seen**" in line]
    assert by_request == ["10.0", "12.0"]
    assert "**refused**" in states["below 8.0"] and "not compiled" in states["8.7"]
    assert all(sum(card in re.split(r"[ ,|]+", line) for line in lines) == 1 for card in CARDS)
    assert cards.seen() == {"H200": ["release/decode.csv", "kernels.csv"],
                            "H100": ["release/h100/decode.csv", "h100/kernels.csv"]}  # fmt: skip


@pytest.mark.parametrize(("shape", "card"), [("8b", "RTX-3090"), ("qwen3.8-27b", "RTX-5090")])
def test_a_row_is_what_its_command_says(
    shape: str, card: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    pages = "".join((REPO / "docs" / name).read_text() for name in ("cards.md", "lab/cards.md"))
    line = next(line for line in pages.splitlines() if f"shapes/{shape} --gpu {card} " in line)
    asked, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    assert plan.main([*asked.strip("`").split()[2:], "--json"]) == 0
    found = {one["dtype"]: one for one in json.loads(capsys.readouterr().out)["dtypes"]}
    assert cells[:4] == [f"{found[name]['requests']:,}" for name in cards.SHOWN]
    assert cells[4:6] == [f"{found[name]['kv_tokens']:,}" for name in ("bf16", "tq4")]
    assert [cell.split()[0] for cell in cells[6:]] == [f"{found[name]['step_ms']:.1f}" for name in cards.SHOWN]


def test_the_shape_of_27b_holds_what_was_found_of_its_model() -> None:
    """On a 4090, beside 15 GiB of weights, at 262,144 tokens."""
    words = ["--gpu", "4090", "--weights", "15GiB", "--context", "262144"]
    demand, _ = plan.demand_of(plan.parser().parse_args([str(cards.SHAPES / "qwen3.8-27b"), *words]))
    rows = {one.dtype: one.requests for one in plan.estimate(demand)}
    assert [rows[name] for name in ("bf16", "fp8", "tq4", "turboquant35")] == [0, 0, 0, 1]


def test_the_template_names_the_command_and_the_folder() -> None:
    text = (REPO / ".github" / "ISSUE_TEMPLATE" / "card-report.yml").read_text()
    assert "packed-kv selftest --report report.json" in text and "benchmarks/results/cards/" in text
    assert not cards.REPORTS.exists() or cards.reports()
