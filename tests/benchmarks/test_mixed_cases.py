"""benchmarks/mixed.py and workers.py without an engine: the cases, the modes, the kernels' times and the turns."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest
from checkout import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import bench_engine
import mixed
import rows
import step_kernels
import workers

SCRIPT = """
import argparse, sys
sys.path.insert(0, {benchmarks!r})
import workers

def measure(name, options):
    if not options.together and not workers.wait_for_device():
        return
    if options.together and not workers.wait_for_device():
        return
    for case in range(2):
        if options.together and not workers.hand_over():
            return
        if name == "fails" and case == 1:
            sys.exit("as it should")
        workers.emit("cases.csv", {{"dtype": name, "case": case}})

parser = argparse.ArgumentParser()
parser.add_argument("--dtypes", nargs="+")
parser.add_argument("--together", action="store_true")
workers.add_arguments(parser, timeout=60)
options = parser.parse_args()
sys.exit(workers.run(__file__, options, measure, options.together))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(benchmarks=str(REPO / "benchmarks")))
    return path


def measured(script: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    """The exit code, and the cases in the order of their rows."""
    out = script.parent / "rows"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments, "--out", str(out)])
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--together", action="store_true")
    workers.add_arguments(parser, timeout=60)
    options = parser.parse_args([*arguments, "--out", str(out), "--commit", "abc1234"])
    code = workers.run(str(script), options, lambda *_: None, options.together)
    return code, [row["dtype"] + row["case"] for row in rows.read(out / "cases.csv")]


def test_engines_take_turns(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case each in turns; one that fails leaves its turns to the others. Without --together one ends first."""
    code, found = measured(script, monkeypatch, "--dtypes", "a", "fails", "b", "--together")
    assert (code, found) == (1, ["a0", "fails0", "b0", "a1", "b1"])
    (script.parent / "rows" / "cases.csv").unlink()
    assert measured(script, monkeypatch, "--dtypes", "a", "b") == (0, ["a0", "a1", "b0", "b1"])


def test_prefixes_stand_before_prompts_that_fit_a_step() -> None:
    prompts = ["--prompts", "0", "128", "2041", "12000"]
    options = mixed.parse_arguments(["--shapes", "8x1024", "--prefixes", "0", "8192", *prompts])
    alone = [(8, 1024, prompt, 0) for prompt in (0, 128, 2041, 12000)]
    assert mixed.cases(options) == [*alone, (8, 1024, 128, 8192)]
    options.step_tokens = 2049
    assert mixed.cases(options)[4:] == [(8, 1024, 128, 8192), (8, 1024, 2041, 8192)]


def test_a_dtype_carries_a_mode() -> None:
    options = mixed.parse_arguments(["--dtypes", "auto", "fp8:FULL"])
    assert [workers.split_mode(name) for name in options.dtypes] == [("auto", ""), ("fp8", "FULL")]
    assert workers.options_of_mode("FULL") == ("FULL", {})
    assert workers.options_of_mode("UNMIXED") == ("", {"packed_kv": {"mixed_graphs": False}})
    assert workers.options_of_mode("MIXED") == ("", {"packed_kv": {"mixed_graphs": True}})
    sizes = list(mixed.GRAPH_SIZES)
    assert mixed.compilation("", options) == {"cudagraph_capture_sizes": sizes}
    assert mixed.compilation("FULL", options) == {"cudagraph_capture_sizes": sizes, "cudagraph_mode": "FULL"}
    options.no_compile = True
    assert mixed.compilation("", options)["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert (mixed.compilation("FULL", options)["cudagraph_mode"], mixed.compilation("", options)["mode"]) == ("FULL", 0)


def test_graphs_fit_the_steps_of_the_goals() -> None:
    """64 or 32 decodes beside 128, 256 and 512 tokens: at most 1.07 times their tokens in the graph."""
    for tokens in (64, 32, 64 + 128, 64 + 256, 64 + 512, 32 + 128, 32 + 512):
        assert min(size for size in mixed.GRAPH_SIZES if size >= tokens) <= 1.07 * tokens


def test_times_of_kernels() -> None:
    """Two steps: a launch of one kernel, a graph of three, of which two overlap, another launch; then the same."""
    step = [(1, 0, 4), (2, 10, 20), (2, 15, 30), (2, 32, 40), (3, 50, 51)]
    kernels = [*step, *((launch + 3, start + 100, end + 100) for launch, start, end in step)]
    found = step_kernels.kernel_times(kernels, 2, is_whole=True)
    assert found.seconds == pytest.approx(38e-6) and found.kernels == 5
    assert (found.graph, found.between) == pytest.approx((30e-6, 70e-6))
    pieces = step_kernels.kernel_times(kernels, 2, is_whole=False)
    assert (pieces.seconds, pieces.kernels) == (found.seconds, 5) and math.isnan(pieces.graph + pieces.between)
    apart = [(i, start, end) for i, (_, start, end) in enumerate(kernels)]
    assert math.isnan(step_kernels.kernel_times(apart, 2, is_whole=True).graph), "no launch has most of the kernels"
    assert math.isnan(step_kernels.kernel_times(step, 1, is_whole=True).between)


def test_the_graph_of_most_steps() -> None:
    steps = [bench_engine.RecordedStep([1], graph, padded) for graph, padded in
             (("NONE", 3), ("NONE", 3), ("NONE", 3), ("FULL", 8), ("FULL", 8), ("FULL", 16))]  # fmt: skip
    found = bench_engine.MixedSteps([], [], steps, None)
    assert (found.graph(), found.graph(2)) == ("NONE 3", "FULL 8")
    assert (mixed.milliseconds(0.0012345), mixed.milliseconds(float("nan"))) == ("1.234", "")


def test_a_folders_table_of_mixed_steps_is_of_one_mode_and_no_prefix(tmp_path: Path) -> None:
    """`measured.py --of` shows neither a mode nor a prefix: rows of others do not stand in their place."""
    import measured

    case = {"requests": 8, "context": 64, "prompt": 16}
    for mode, prefix, milliseconds in (("default", 0, 1), ("default", 256, 2), ("FULL", 0, 3)):
        row = {"dtype": "auto", "mode": mode, **case, "prefix": prefix, "p50_ms": milliseconds}
        rows.append(tmp_path / "mixed.csv", row)
    assert next(iter(measured.printed(tmp_path))).endswith("| 8 | 64 | bf16 | 1 |")
