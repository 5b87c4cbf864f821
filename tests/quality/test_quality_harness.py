"""The quality harness without engines: scores against a baseline file, verdicts, and refused arguments."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from calibration_files import content
from checkout import REPO
from packed_kv.calibration_file import FILE_NAME
from packed_kv_quality import run as commands
from packed_kv_quality.baseline import Baseline, BaselineError, BaselineWriter, Comparison, Positions, Scores
from packed_kv_quality.cli import main
from packed_kv_quality.engines import DEMO_MODEL
from packed_kv_quality.measurement import Measurement, Recall, Refused, Settings
from packed_kv_quality.placebo_sweep import DEMO_KL, DEMO_MARGIN, Limits, gaussian_error, judge, passes
from packed_kv_quality.recall_map import Cell, RecallSettings
from packed_kv_quality.report import Report, keep, markdown, write
from packed_kv_quality.teacher_forced import through_e4m3
from packed_kv_quality.uncertainty import block_means, ratio, standard_error

VOCABULARY, ROWS, SLICES = 500, 20, 3
LIMITS = Limits(rounding=0.001, context_information=4.0)


def predictions(noise: float) -> list[torch.Tensor]:
    """Slices of log-probabilities, fp64: the same ones with more or less noise."""
    logits = 3 * torch.randn(SLICES, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits += noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(logits.log_softmax(-1))


TARGETS = list(torch.randint(VOCABULARY, (SLICES, ROWS), generator=torch.Generator().manual_seed(2)))


def written(path: Path, top_k: int | None = None) -> Path:
    writer = BaselineWriter(top_k)
    for log_probs, targets in zip(predictions(0), TARGETS, strict=True):
        writer.append(log_probs.float(), targets)
    writer.save(path, {"model": "a", "chunk": 64}, {"fact": 1})
    return path


def compared(path: Path, noise: float) -> Scores:
    comparison = Comparison(Baseline(path))
    for log_probs, targets in zip(predictions(noise), TARGETS, strict=True):
        comparison.append(log_probs.float(), targets)
    return comparison.positions().scores()


def true_kl(noise: float) -> torch.Tensor:
    p, q = torch.cat(predictions(0)), torch.cat(predictions(noise))
    return (p.exp() * (p - q)).sum(-1)


class TestBaseline:
    def test_full_vocabulary(self, tmp_path: Path) -> None:
        scores, kl = compared(written(tmp_path / "file"), 0.3), true_kl(0.3)
        p, q = torch.cat(predictions(0)), torch.cat(predictions(0.3))
        loss = -q.gather(-1, torch.cat(TARGETS)[:, None])
        top = (x.topk(5).indices.tolist() for x in (p, q))
        both = [len(set(a) & set(b)) for a, b in zip(*top, strict=True)]
        assert scores.positions == SLICES * ROWS
        assert scores.perplexity == pytest.approx(loss.mean().exp().item(), rel=1e-5)
        assert scores.kl_mean == pytest.approx(kl.mean().item(), abs=1e-5)
        assert scores.kl_max == pytest.approx(kl.max().item(), abs=1e-4)
        assert scores.kl_p99 == pytest.approx(kl.quantile(0.99).item(), abs=1e-4)
        assert scores.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
        assert scores.top5 == pytest.approx(sum(both) / 5 / len(both))

    def test_itself(self, tmp_path: Path) -> None:
        scores = compared(written(tmp_path / "file"), 0)
        assert (scores.top1, scores.top5) == (1, 1)
        assert scores.kl_mean == pytest.approx(0, abs=2e-6), "half precision costs more than the docstring says"

    def test_top_k_is_a_bound_from_below_and_much_smaller(self, tmp_path: Path) -> None:
        full, most, few = (written(tmp_path / str(k), k) for k in (None, 100, 5))
        kl = [compared(path, 0.3).kl_mean for path in (few, most)]
        assert 0 < kl[0] < kl[1] < true_kl(0.3).mean()
        assert kl[1] == pytest.approx(true_kl(0.3).mean().item(), rel=0.2)
        assert most.stat().st_size < 0.75 * full.stat().st_size

    def test_context_information(self, tmp_path: Path) -> None:
        """The mean KL divergence of the mean prediction from the predictions."""
        writer = BaselineWriter()
        for log_probs, targets in zip(predictions(0), TARGETS, strict=True):
            writer.append(log_probs.float(), targets)
        p = torch.cat(predictions(0))
        expected = (p.exp() * (p - p.exp().mean(0).log())).sum(-1).mean().item()
        assert writer.context_information() == pytest.approx(expected, rel=1e-4)

    def test_ruled_out_tokens(self, tmp_path: Path) -> None:
        """A model that gives some tokens no probability at all."""
        log_probs = predictions(0)[0].float()
        log_probs[:, 7] = -torch.inf
        targets = torch.zeros(ROWS, dtype=torch.int64)
        writer = BaselineWriter()
        writer.append(log_probs, targets)
        writer.save(tmp_path / "file", {}, {})
        comparison = Comparison(Baseline(tmp_path / "file"))
        comparison.append(log_probs, targets)
        assert comparison.positions().scores().kl_mean < 0.002
        assert writer.context_information() > 0

    def test_of_something_else(self, tmp_path: Path) -> None:
        baseline = Baseline(written(tmp_path / "file"))
        baseline.check({"model": "a", "chunk": 64})
        with pytest.raises(BaselineError, match="was made with chunk 64, this run has 1;"):
            baseline.check({"model": "a", "chunk": 1})


def measurement(dtype: str, kl: float, seed: int = 0, share: float = 0.0) -> Measurement:
    """A dtype whose losses are apart from the baseline's as far as its KL divergence tells; `share` of that is one
    direction for all seeds."""
    noise, common = (torch.randn(1000, generator=torch.Generator().manual_seed(s)) for s in (seed + 1, 0))
    losses = (2 * kl) ** 0.5 * ((1 - share) * noise + share * common)
    return Measurement(dtype, 100.0, 1000, Scores(1000, 10.0, kl, kl, kl, 0.9, 0.9), [], losses.tolist(), {})


def verdicts(*found: Measurement, limits: Limits = LIMITS) -> dict[str, str]:
    return {dtype: v.text.split(" ")[0] for dtype, v in judge(measurement("auto", 0.0), found, limits).items()}


class TestUncertainty:
    def test_blocks_of_windows(self) -> None:
        """A block never reaches into the next window, and blocks of a window are nearly equal."""
        windows = [torch.zeros(600), torch.ones(100)]
        assert block_means(windows) == [0, 0, 0, 1]

    def test_standard_error_covers_the_truth(self) -> None:
        """Of 400 samples of two kinds of text with blocks of known spread, about 68 % lie within the standard error."""
        generator = torch.Generator().manual_seed(0)
        within = 0
        for _ in range(400):
            strata = [
                (1 + 0.3 * torch.randn(12, generator=generator)).tolist(),
                (5 + 0.9 * torch.randn(24, generator=generator)).tolist(),
            ]
            mean = sum(map(sum, strata)) / 36
            within += abs(mean - (12 * 1 + 24 * 5) / 36) < standard_error(strata)
        assert 0.6 < within / 400 < 0.76

    def test_few_blocks_tell_no_error(self) -> None:
        assert standard_error([[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 1.0]]) is None
        assert standard_error([]) is None

    def test_ratio_of_pairs(self) -> None:
        """What both share of a block's difficulty is no error of their ratio."""
        theirs = [[1.0, 3.0, 4.0, 2.0], [2.0, 9.0, 1.0, 8.0]]
        assert ratio([[2 * x for x in blocks] for blocks in theirs], theirs) == pytest.approx((2.0, 0.0))
        found, error = ratio([[4.0, 3.0, 4.0, 2.0], [2.0, 9.0, 1.0, 8.0]], theirs)
        assert found == pytest.approx(1.1) and error is not None and error > 0.05


def test_e4m3_storage() -> None:
    """Rounded to three bits behind the point, to multiples of 2**-9 below 2**-6, and never beyond 448."""
    x = torch.tensor([1.06, 1.07, -17.0, 0.003, 500.0, -1e4], dtype=torch.bfloat16)
    expected = torch.tensor([1.0, 1.125, -16.0, 0.00390625, 448.0, -448.0], dtype=torch.bfloat16)
    assert torch.equal(through_e4m3(x), expected)
    assert through_e4m3(None) is None


class TestVerdicts:
    """Verdicts by the general rules, but where a test says `demo`."""

    def in_line(self) -> list[Measurement]:
        return [measurement(name, 5 * gaussian_error(name), seed) for seed, name in enumerate(DEMO_KL)]

    def test_errors_in_line_pass(self) -> None:
        assert set(verdicts(*self.in_line()).values()) == {"ok"}

    def test_placebo(self) -> None:
        assert verdicts(measurement("tq4", 0.0), measurement("fp8", 0.0029)) == dict.fromkeys(
            ("tq4", "fp8"), "IDENTICAL"
        )

    def test_placebo_with_a_window(self) -> None:
        limits = Limits(0.001, 4.0, window=True)
        assert verdicts(measurement("tq4", 0.0014), limits=limits) == {"tq4": "IDENTICAL"}
        assert verdicts(measurement("tq4", 0.0016), measurement("fp8", 0.0029, 1), limits=limits) == {
            "tq4": "ok",
            "fp8": "IDENTICAL",
        }

    def test_placebo_beside_others_does_not_tighten_their_bounds(self) -> None:
        rows = [row for row in self.in_line() if row.dtype != "tq4"]
        found = verdicts(*rows, measurement("tq4", 0.0))
        assert found.pop("tq4") == "IDENTICAL"
        assert set(found.values()) == {"ok"}

    def test_equal_dtypes(self) -> None:
        found = verdicts(measurement("fp8", 0.1, 1), measurement("other", 0.1, 1), measurement("third", 0.1, 2))
        assert found == {"fp8": "EQUAL", "other": "EQUAL", "third": "ok"}
        almost = verdicts(measurement("fp8", 0.1, 1, share=0.9), measurement("other", 0.1, 2, share=0.9))
        assert set(almost.values()) == {"EQUAL"}
        related = verdicts(measurement("fp8", 0.1, 1, share=0.5), measurement("other", 0.1, 2, share=0.5))
        assert set(related.values()) == {"ok"}

    def test_one_dtype_out_of_line(self) -> None:
        rows = [row for row in self.in_line() if row.dtype != "isoquant3"]
        found = verdicts(*rows, measurement("isoquant3", 25 * gaussian_error("isoquant3"), 9))
        assert found.pop("isoquant3") == "TOO"
        assert set(found.values()) == {"ok"}

    @pytest.mark.parametrize("kl", [1.1, float("nan"), float("inf")])
    def test_lost_context(self, kl: float) -> None:
        assert verdicts(measurement("fp8", kl)) == {"fp8": "TOO"}

    def test_users_bound(self) -> None:
        limits = Limits(0.001, 4.0, max_kl=0.05)
        assert verdicts(measurement("fp8", 0.06), limits=limits) == {"fp8": "TOO"}
        assert verdicts(measurement("fp8", 0.04), limits=limits) == {"fp8": "ok"}

    @pytest.mark.parametrize("name", DEMO_KL)
    def test_demo_bounds(self, name: str) -> None:
        limits = Limits(0.0001, 4.0, demo=True)
        factors = {0.9: "ok", DEMO_MARGIN + 0.01: "TOO", 0.19: "IDENTICAL"}
        for factor, expected in factors.items():
            assert verdicts(measurement(name, factor * DEMO_KL[name]), limits=limits) == {name: expected}

    def test_exit_code(self) -> None:
        good = judge(measurement("auto", 0.0), self.in_line(), LIMITS)
        bad = judge(measurement("auto", 0.0), [measurement("tq4", 0.0)], LIMITS)
        assert passes(good, {"fp8": "not here"}, {})
        assert not passes(good, {"tq4": "not here"}, {}), "a sweep that refuses our dtypes has tested nothing"
        assert not passes(good, {}, {"fp8": "crashed"})
        assert not passes(bad, {}, {})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> path of what arguments name."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "short.txt").write_text("A few words.")
    (folder / "no.safetensors").write_text("no")
    os.mkfifo(folder / "fifo")
    written(folder / "other.safetensors")
    for name, file in {"rope": content(layers=6, head_size=128, version=3, theta=5.0), "sizes": content(6)}.items():
        (folder / f"{name}.json").write_text(json.dumps(file))
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["quality.json", "quality.csv", "pareto.png", "generate.json"])
def test_results_are_checked_before_an_engine_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for make, reason in ((os.mkdir, "a folder"), (os.mkfifo, "not a regular file")):
        make(tmp_path / name)
        assert main(["run", "--skip-recall", "--output", str(tmp_path)]) == 2
        assert f"--output: {tmp_path / name} is {reason}; give another" in capsys.readouterr().err
        (os.rmdir if reason == "a folder" else os.unlink)(tmp_path / name)


def test_results_that_cannot_be_written_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of measurement are not lost where the disk is full by then."""
    path = tmp_path / "quality.json"
    assert keep(path, "first") and path.read_text() == "first"

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert not keep(path, "second")
    shown = capsys.readouterr()
    assert shown.out == "second\n" and f"{path} cannot be written (No space left on device)" in shown.err
    assert os.listdir(tmp_path) == ["quality.json"] and path.read_text() == "first"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtypes", "isoquant5", "fp8"], "unknown dtype isoquant5; vLLM knows auto, "),
        (["--dtypes", "auto"], "auto is measured in any case; leave it out"),
        (["--dtypes", "fp8-storage"], "fp8-storage is measured in any case; leave it out"),
        (["--model", "nobody/nothing-here"], "nobody/nothing-here is neither a folder nor a file"),
        (["--text", "{short}"], "tokens, but 1 x 1,920 are to be scored"),
        (["--text", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--baseline", "{no}"], "cannot be read"),
        (["--baseline", "{other}"], "was made with model a, this run has demo-7m"),
        (["--baseline", "nowhere"], "nowhere does not exist"),
        (["--baseline", "{other}", "--emit", "x"], "exclude each other"),
        (["--calibration", "nowhere.json"], "nowhere.json does not exist"),
        (["--context", "4096"], "--context needs 4,097 tokens with the answer"),
        (["--lengths", "100", "2048"], "--lengths needs 2,055 tokens with the answer"),
        (["--lengths", "20"], "longer than the tokens asked for"),
        (["--chunk", "1919"], "--chunk must be 1 to 1918, got 1919"),
        (["--chunk", "0"], "--chunk must be 1 to 1918, got 0"),
        (["--windows", "0"], "--windows must be 1 or more, got 0"),
        (["--depths", "0", "101"], "--depths must be 0 to 100"),
        (["--parallel", "0"], "--parallel must be 1 or more, got 0"),
        (["--recall-chunk", "4096"], "--recall-chunk must be 1 to 2048, got 4096"),
        (["--graphs", "--skip-recall", "--chunk", "64"], "--graphs is for decoding: pass --chunk 1"),
        (["--prompts", "chat"], "the tokenizer of demo-7m has no chat template"),
        (["--text", "{short}", "{short}", "--context", "4", "--chunk", "1"], "two files have the name short"),
        (["--output", "{no}"], "no.safetensors is a file; give another"),
        (["--emit", "{no}/deeper/x"], "no.safetensors is a file; give another"),
        (["--emit", "."], "--emit: . is a folder; give another"),
        (["--emit", "{fifo}"], "fifo is not a regular file; give another"),
        (["--calibration", "{no}", "--additional-config", '{"packed_kv": {"calibration": "x"}}'], "both name a calib"),
        (["--calibration", "{no}"], "no.safetensors: is not JSON"),
        (["--calibration", "{rope}"], "made for another RoPE"),
        (["--calibration", "{sizes}"], "made for another model: head_size 64, this model has 128"),
        (["--additional-config", '{"packed_kv": {"calibration": "x.json"}}'], "x.json: cannot be read"),
        (["--additional-config", '{"packed_kv": {"recent": 64}}'], "no option 'recent'; write recent_tokens"),
        (["--additional-config", '{"packed_kv": 1}'], "packed_kv is 1; write an object"),
        (["--calibration", "{no}", "--dtypes", "fp8"], "--calibration is for dtypes of packed-kv, and --dtypes has"),
        (["--additional-config", '{"a": 1}', "--dtypes"], "--additional-config is for dtypes of packed-kv"),
        (["--baseline", "{other}", "--top-k", "10"], "--top-k is for a baseline that is made"),
        (["--top-k", "4096"], "--top-k must be less than the vocabulary, 4,096, got 4,096"),
        (["--skip-recall", "--facts", "2", "--seed", "0"], "measures no recall; leave --facts, --seed out"),
        (["--facts", "10001"], "--facts must be 10,000 at most, got 10,001"),
        (["--seed", "-1"], "--seed must be 0 or more, got -1"),
        (["--context", "2"], "--context must be 3 or more, got 2"),
        (["--text", "nowhere.txt", "--text", "{short}"], "nowhere.txt does not exist"),
        (["--context", "64", "--skip-recall", "--chunk", "8"], "texts of 64 tokens fit the recent window of 64, which"),
        (["--additional-config", '{"packed_kv": {"recent_tokens": 1920}}'], "fit the recent window of 1920, which"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input(
    arguments: list[str], message: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [re.sub(r"\{(\w+)\}", lambda name: files[name[1]], argument) for argument in arguments]
    assert main(["run", *given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("packed-kv-quality:")]
    assert message in line


def test_a_model_that_is_not_there_is_refused_before_vllm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports_vllm(_dtypes: list[str]) -> None:
        raise AssertionError("too late")

    for module in ("arguments", "generation_command"):
        monkeypatch.setattr(f"packed_kv_quality.{module}.check_dtypes", imports_vllm)
    for command in ("run", "teacher-forced", "recall", "sweep", "generate"):
        assert main([command, "--model", f"{tmp_path}/none"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"packed-kv-quality: --model: {tmp_path}/none is neither a folder nor a file; give ")
        assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "teacher-forced", "recall", "sweep", "generate"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_calibration_that_engines_would_refuse_is_refused_before_one_starts(
    command: str, is_named: bool, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    named = ["--calibration", files["sizes"]] if is_named else []
    if not is_named:
        shutil.copy(files["sizes"], model / FILE_NAME)
    assert main([command, "--model", str(model), *named]) == 2
    assert "made for another model: head_size 64, this model has 128" in capsys.readouterr().err


def test_context_beside_lengths_of_recall(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recall", "--context", "512", "--lengths", "100"]) == 2
    assert "--context only sets the default of --lengths here" in capsys.readouterr().err


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before the long run, not after it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["run"]) == 2
    assert capsys.readouterr().err.strip() == (
        "packed-kv-quality: matplotlib is missing; pip install 'packed-kv[plots]', or pass --no-plots"
    )


def test_demo_bounds_name_every_dtype_of_the_table() -> None:
    from packed_kv import FORMATS

    assert set(DEMO_KL) == set(FORMATS), "measure with: packed-kv-quality sweep"
    assert DEMO_MODEL.is_dir()


def test_defaults_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The wheel has neither the demo model nor the licence in its place."""
    monkeypatch.setattr("packed_kv_quality.arguments.DEMO_MODEL", Path("nowhere"))
    assert main(["recall"]) == 2
    assert "give --model MODEL; the defaults are in a checkout" in capsys.readouterr().err
    assert main(["sweep"]) == 2
    assert "give --model MODEL and --text FILE; the defaults are in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["{", "[1]"])
def test_additional_config_is_an_object(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--additional-config", value])
    assert "--additional-config: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--max-kl", "-1"], ["--max-kl", "nan"], ["--max-kl", "0"], ["--max-kl", "inf"], ["--kv-cache-memory", "1e400G"]],
)
def test_numbers_out_of_range(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["sweep", *arguments])
    assert exit_code.value.code == 2 and f"{arguments[0]}: expected a" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "packed_kv_quality.arguments")
    monkeypatch.delitem(sys.modules, "packed_kv_quality.measurement")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["run"]) == 2
    assert capsys.readouterr().err == "packed-kv-quality: tqdm is missing; pip install vllm\n"


def test_plots_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plots", str(tmp_path)]) == 2
    assert "has neither quality.json, recall.json nor generate.json" in capsys.readouterr().err
    (tmp_path / "quality.json").write_text('{"rows": [{"dtype": "auto", "recall": []}]}')
    assert main(["plots", str(tmp_path)]) == 2
    assert "is not of this version" in capsys.readouterr().err


def test_plots_of_a_result_under_another_name(tmp_path: Path) -> None:
    results = REPO / "benchmarks" / "results" / "quality-smollm2-h200"
    shutil.copy(results / "calibrated-window-64-f759513.json", tmp_path / "mine.json")
    assert main(["plots", str(tmp_path / "mine.json")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine-pareto.png", "mine-recall.png", "mine.json"]


def recalled(dtype: str, size: float, *counts: int) -> Recall:
    cells = [Cell(100, depth / 4, count, 10, count / 10 - 1.5) for depth, count in enumerate(counts)]
    return Recall(dtype, size, cells)


def test_recall_is_reported_as_a_share_of_the_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_engines(_function: object, dtype: str, _settings: Settings) -> list[Recall]:
        if dtype == "auto":
            return [recalled("auto", 100, 8, 8), recalled("fp8-storage", 50, 8, 7)]
        if dtype == "tq4":
            return [recalled(dtype, 27, 8, 4)]
        raise Refused("not on this machine")

    monkeypatch.setattr(commands, "apart", without_engines)
    arguments = ["recall", "--lengths", "100", "--depths", "0", "25", "--facts", "10", "--output", str(tmp_path)]
    assert main([*arguments, "--dtypes", "tq4", "fp8", "--parallel", "2"]) == 0, "others' dtypes may be refused"
    with (tmp_path / "recall.csv").open() as file:
        rows = {row["dtype"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["auto", "fp8-storage", "tq4", "fp8"]
    assert [rows[name]["recall_of_baseline"] for name in ("auto", "fp8-storage", "tq4")] == ["1", "0.9375", "0.75"]
    assert (rows["tq4"]["recall"], rows["tq4"]["answer_log_prob"]) == ("0.6", "-0.9")
    assert rows["fp8"]["verdict"] == "refused: not on this machine"
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--dtypes", "isoquant4"]) == 1, "ours may not"


def test_texts_are_reported_each(tmp_path: Path) -> None:
    """Two windows of an easy text and two of a hard one, without verdicts."""
    shared = {"kv_cache_memory": 0, "additional_config": {}, "recall": RecallSettings([], [], 0, False, 1, 0)}
    settings = Settings("m", [[0] * 610] * 4, ["easy", "easy", "hard", "hard"], chunk=9, **shared)
    ones, steps = torch.ones(2400), torch.arange(2400) % 600
    kl = torch.tensor([0.1, 0.4]).repeat_interleave(1200) * (1 + (steps >= 300))
    positions = Positions(ones, kl, ones, ones)
    texts = settings.by_text(positions)
    assert {name: text.kl_mean for name, text in texts.items()} == pytest.approx({"easy": 0.15, "hard": 0.6})
    assert [len(text.kl_blocks) for text in texts.values()] == [6, 6]
    rows = [Measurement(name, 10.0, 9, positions.scores(), [], [], texts) for name in ("auto", "fp8-storage", "tq4")]
    report = Report(rows, None, {}, {}, LIMITS, {"made_with": {"vllm": "1"}})
    head, *_, tq4 = markdown(report).splitlines()
    assert "verdict" not in head
    assert tq4.split("|")[1].strip() == "tq4" and "0.1500 ± " in tq4 and "0.6000 ± " in tq4
    write(report, tmp_path)
    with (tmp_path / "quality.csv").open() as file:
        row = list(csv.DictReader(file))[2]
    assert (row["kl_easy"], row["kl_hard"], row["kl_of_fp8_storage"], row["verdict"]) == ("0.15", "0.6", "1", "")


def test_how_many_engines_start_and_how_long_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(dtypes=["tq4", "tq3", "tq4"], parallel=1)
    commands.say_how_many(options, baseline=True)
    found = commands.measure_all(options, len, lambda row: f"{row} letters")
    assert found.rows == [3, 3]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("packed-kv-quality: 3 engines will start, one after the other; how long")
    (first, last) = (line for line in lines if "letters" in line)
    assert first == "packed-kv-quality: tq4: 3 letters, 0 s; 1 left, about 0.0 min"
    assert last == "packed-kv-quality: tq3: 3 letters, 0 s"
