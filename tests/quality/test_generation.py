"""`packed-kv-quality generate` without engines: its tasks, its figures and the arguments that it refuses."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from packed_kv_quality import generation_command
from packed_kv_quality.baseline import BaselineWriter, Positions
from packed_kv_quality.cli import EXIT_INTERRUPTED, main, parser
from packed_kv_quality.engines import DEMO_MODEL
from packed_kv_quality.generation import Answers, Continuation, Generation, first_difference
from packed_kv_quality.generation_report import (
    GenerationReport,
    accepted_ratio,
    kept,
    markdown,
    tokens_a_step,
    write,
)
from packed_kv_quality.recall import PROSE
from packed_kv_quality.tasks import ASKED, HOPS, KINDS, MANY, tasks
from transformers import AutoTokenizer, PreTrainedTokenizerBase

MADE_WITH = {"packed-kv": "0", "vllm": "0", "torch": "0", "device": "none"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_length_and_hold_the_answer(kind: str, tokenizer: PreTrainedTokenizerBase) -> None:
    made = tasks(tokenizer, [kind], 5, 700, seed=3)
    assert [len(task.token_ids) for task in made] == [700] * 5
    assert len({tuple(task.token_ids) for task in made}) == 5
    assert made == tasks(tokenizer, [kind], 5, 700, seed=3) != tasks(tokenizer, [kind], 5, 700, seed=4)
    for task in made:
        prompt, answer = tokenizer.decode(task.token_ids), tokenizer.decode(task.answer_ids)
        words = [
            word for word in answer.replace('"', " ").replace(",", " ").split() if word.isdigit() or kind == "json"
        ]
        assert all(word.strip("{}:") in prompt for word in words)


def test_kinds_plant_what_they_say(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = {task.kind: tokenizer.decode(task.token_ids) for task in tasks(tokenizer, list(KINDS), 1, 700)}
    planted = {kind: prompt.count("Remember this") for kind, prompt in prompts.items()}
    assert planted == {
        "single": 1, "far": 1, "multi_key": MANY, "multi_value": ASKED, "multi_query": MANY, "variables": 0,
        "common_words": 0, "json": 1,
    }  # fmt: skip
    assert prompts["variables"].count("VAR X") == HOPS + (HOPS - 1) + 2, "assigned, referred to, asked for"
    starts = [tokenizer.decode(task.token_ids).index("Remember") for task in tasks(tokenizer, ["far"], 9, 1500)]
    assert len(set(starts)) > 1 and max(starts) < 1500 * 5 / 15, "characters, of which a token has up to 5"
    answer = tokenizer.decode(tasks(tokenizer, ["common_words"], 1, 700)[0].answer_ids).strip()
    words = prompts["common_words"].split("Question")[0].split()
    assert max(set(words), key=words.count) == answer


def test_a_prompt_too_short_for_its_facts_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="longer than the tokens asked for"):
        tasks(tokenizer, ["multi_key"], 1, 60)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) == 3
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([], []) == 0


def generation(dtype: str, solved: list[bool], log_probs: list[float], kl: float = 0.01) -> Generation:
    found = Continuation("prose", 1000, 192, 9.5, kl, None, 0.1, 0.2, 0.03, [4, 128], [kl, kl])
    return Generation(dtype, 1632.0, [found], [Answers("single", 1000, solved, log_probs)], [[30, 10]], {"1000": 0.001})


def test_tasks_are_kept_to_those_that_the_baseline_solves() -> None:
    baseline = generation("auto", [True, False, True], [-0.1, -5.0, -0.3])
    [found] = kept(generation("tq4", [True, True, False], [-0.2, -0.1, -2.2]), baseline)
    assert (found.tasks, found.share) == (2, 0.5)
    assert found.loss == pytest.approx(((0.2 - 0.1) + (2.2 - 0.3)) / 2)
    assert not list(kept(baseline, replace(baseline, answers=[Answers("single", 1000, [False] * 3, [-1.0] * 3)])))


def test_ratio_of_tokens_a_step_is_of_all_prompts_and_its_error_of_pairs() -> None:
    """Steps of a long prompt weigh more; what moves all dtypes alike is no error."""
    base = [[40, 10], [20, 10], [90, 30]]
    assert tokens_a_step(base) == 3.0
    half = [[20, 10], [10, 10], [45, 30]]
    assert accepted_ratio(half, base) == (0.5, 0.0)
    ratio, error = accepted_ratio([[20, 10], [20, 10], [90, 30]], base)
    assert ratio == pytest.approx(130 / 150)
    moves = [(20 / 130 - 40 / 150), (20 / 130 - 20 / 150), (90 / 130 - 90 / 150)]
    assert error == pytest.approx(ratio * (3 / 2 * sum(move * move for move in moves)) ** 0.5)


def test_report_files(tmp_path: Path) -> None:
    baseline, ours = generation("auto", [True], [-0.1]), generation("tq4", [True], [-0.2], kl=0.02)
    run = {"title": "demo", "made_with": MADE_WITH, "settings": {"model": "demo"}}
    report = GenerationReport([baseline, ours], {}, {"tq3": "broke off"}, run)
    write(report, tmp_path)
    found = json.loads((tmp_path / "generate.json").read_text())
    assert [Generation.from_dict(row) for row in found["rows"]] == [baseline, ours]
    with (tmp_path / "generate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["dtype"], row["text"], row["task"]) for row in rows] == [
        ("auto", "prose", ""), ("auto", "", "single"), ("auto", "", ""), ("tq4", "prose", ""), ("tq4", "", "single"),
        ("tq4", "", ""), ("tq3", "", ""),
    ]  # fmt: skip
    assert float(rows[3]["kl_mean"]) == 0.02
    assert float(rows[4]["log_prob_loss"]) == pytest.approx(0.1)
    assert "tq3 FAILED: broke off" in markdown(report)
    assert main(["plots", str(tmp_path)]) == 0
    assert (tmp_path / "generate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lengths", "1900"], "--lengths must be 1 to 1,854"),
        (["--lengths", "0"], "--lengths must be 1 or more, got 0"),
        (["--lengths", "100"], "--lengths 100: a fact and its question are"),
        (["--windows", "0"], "--windows must be 1 or more, got 0"),
        (["--tasks", "-1"], "--tasks must be 0 or more, got -1"),
        (["--dtypes", "tq5"], "unknown dtype tq5"),
        (["--text", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--text", str(PROSE), "--windows", "400", "--lengths", "1000"], f"--text {PROSE}: the text has"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--no-plots", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"packed-kv-quality: {expected}"), error


def test_figures_of_windows_are_cut_where_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from packed_kv_quality import generation as module

    windows = [module.Window("a", 2, [0] * 6), module.Window("b", 2, [0] * 6), module.Window("a", 4, [0] * 8)]
    settings = module.GenerationSettings("model", windows, [], 0, 0, 1, {})
    kl = torch.arange(9.0)
    monkeypatch.setattr(module, "bytes_per_token", lambda llm: 1.0)
    positions = Positions(kl, kl, torch.ones(9), torch.ones(9))
    found = module._generation("tq4", None, settings, positions, [[]] * 3, [[]] * 3, lambda tokens: None, {})
    assert [(part.text, part.prompt, part.kl_mean) for part in found.continuations] == [
        ("a", 2, 1.0), ("b", 2, 4.0), ("a", 4, 7.0),
    ]  # fmt: skip
    assert settings.max_model_len() == 9
    assert asdict(found)["continuations"][0]["positions"] == 3
    assert [part.kl_windows for part in found.continuations] == [[1.0], [4.0], [7.0]]


def test_defaults_fit_the_model() -> None:
    options = parser().parse_args(["generate", "--no-plots", "--tasks", "1"])
    settings, identity = generation_command.check_settings(options)
    assert identity["lengths"] == [1000]
    assert settings.max_model_len() <= 2048


def test_a_run_that_breaks_off_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kept baseline, which must be of the same tasks."""
    options = ["generate", "--no-plots", "--windows", "1", "--lengths", "200", "--dtypes", "tq4", "tq3"]
    _, identity = generation_command.check_settings(parser().parse_args([*options, "--tasks", "1"]))
    writer, path = BaselineWriter(), tmp_path / "base.safetensors"
    writer.append(torch.zeros(1, 8).log_softmax(-1), torch.zeros(1, dtype=torch.long))
    writer.save(path, identity, {"generation": asdict(generation("auto", [True], [-0.1])), "greedy": []})

    def apart(function: object, dtype: str, *arguments: object) -> Generation:
        if dtype == "tq3":
            raise KeyboardInterrupt
        return generation(dtype, [True], [-0.2])

    monkeypatch.setattr(generation_command, "apart", apart)
    options += ["--baseline", str(path), "--output", str(tmp_path)]
    assert main([*options, "--tasks", "1"]) == EXIT_INTERRUPTED
    found = json.loads((tmp_path / "generate.json").read_text())
    assert [row["dtype"] for row in found["rows"]] == ["auto", "tq4"]
    assert main([*options, "--tasks", "2"]) == 2


def test_a_plot_has_a_panel_for_each_length(tmp_path: Path) -> None:
    from packed_kv_quality.plots import Point, pareto_by_length

    points = [Point("bf16", 1000, 0), Point("tq4", 300, 0.01, 0.001), Point("fp8", 500, 0.02)]
    sizes = []
    for number in (1, 3):
        panels = {f"{length} tokens": (points, [Point("tq4", 300, 0.015)], 0.001) for length in range(number)}
        pareto_by_length(panels, "a model", tmp_path / "plot.png")
        sizes.append(int.from_bytes((tmp_path / "plot.png").read_bytes()[16:20]))
    assert sizes[1] == 3 * sizes[0]
