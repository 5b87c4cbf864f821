"""What `packed-kv plan` says that dtypes cost, KL and recall, against the tables that are published."""

from __future__ import annotations

import re

from checkout import REPO
from packed_kv.formats import FORMATS
from packed_kv.planning import measured


def test_kl_is_that_of_the_published_table() -> None:
    """The numbers in brackets of docs/measured.md's table of SmolLM2 on an H200, else those of docs/quality.md."""
    elsewhere = kl_on_a_cpu()
    page = (REPO / "docs" / "measured.md").read_text()
    head = "| dtype | KV bytes/token | KiB of a request's window | calibrated, window 64 | uncalibrated, window 64 |"
    table = page[page.index(head) :].split("\n\n")[0]
    places = {3: ("window", "calibrated"), 4: ("window", "uncalibrated"), 5: ("no_window", "calibrated")}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] not in (*FORMATS, "fp8"):
            continue
        for column, (window, state) in places.items():
            found = re.search(r"\(([\d.]+)\)", cells[column])
            if cells[0] != "fp8":
                expected = float(found[1]) if found else elsewhere[window, state, cells[0]]
                assert measured.KL[window][state][cells[0]] == expected, line
            elif found:
                assert {measured.KL[w][s]["fp8"] for w in ("window", "no_window") for s in measured.KL[w]} == {1.51}
    for window, state in (*places.values(), ("no_window", "uncalibrated")):
        for dtype in FORMATS:
            assert measured.KL[window][state][dtype] > 0, "no question marks in a plan"
            if (window, state) not in places.values():
                assert measured.KL[window][state][dtype] == elsewhere[window, state, dtype]


def test_recall_is_that_of_the_published_table() -> None:
    """The last column of docs/measured.md's table of planted numbers: far back in 7,500 tokens."""
    page = (REPO / "docs" / "measured.md").read_text()
    lines = page[page.index("<!-- measured: generate-planted -->") :].split("\n\n")[1].splitlines()
    column = [cell.strip() for cell in lines[0].strip("|").split("|")].index("a number far back, 7,500 (15 of 16)")
    found = {}
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[1], cells[0]] = int(cells[column].split("%")[0])
    fp8 = {"bf16": 100, "fp8": found["", "fp8"]}
    for state, setting in (("calibrated", "calibrated"), ("uncalibrated", "no file")):
        assert measured.RECALL[state] == fp8 | {dtype: found[setting, dtype] for dtype in FORMATS}, state
    assert measured.recall("tq4", True, True) == found["calibrated", "tq4"]
    assert measured.recall("tq4", False, True) is measured.recall("tq4", True, True, 16) is None
    assert measured.recall("fp8", False, True) == fp8["fp8"]


def kl_on_a_cpu() -> dict[tuple[str, str, str], float]:
    """By window, state and dtype: the ratios to fp8's of docs/quality.md's table of prompts."""
    page = (REPO / "docs" / "quality.md").read_text()
    head = "| dtype | file | window | KL at 1,900 | of no file's at 1,900 | of fp8's at 1,900 |"
    found = {}
    for line in page[page.index(head) :].split("\n\n")[0].splitlines()[2:]:
        dtype, file, window, _, _, share = (cell.strip() for cell in line.strip("|").split("|"))
        state = "uncalibrated" if file == "no file" else "calibrated"
        found["window" if window == "64" else "no_window", state, dtype] = float(share.split(" ")[0])
    return found
