"""The results of `packed-kv-quality generate` as Markdown tables, CSV and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .generation import Answers, Continuation, Generation
from .report import not_run, table, with_error, write_csv, write_json


@dataclass(frozen=True)
class GenerationReport:
    """Everything that one run found. `rows` begins with the baseline; `refused` and `failed` say why."""

    rows: Sequence[Generation]
    refused: Mapping[str, str]
    failed: Mapping[str, str]
    run: Mapping[str, Any]


@dataclass(frozen=True)
class Kept:
    """Tasks of one kind and length that the baseline solves: how many there are, which share of them a dtype solves,
    and by how many nats the mean log-probability of their answers is below the baseline's."""

    kind: str
    prompt: int
    tasks: int
    share: float
    loss: float


def kept(row: Generation, baseline: Generation) -> Iterator[Kept]:
    """Yield what is kept of the baseline, by kind and length; nothing where the baseline solves no task."""
    for ours, theirs in zip(row.answers, baseline.answers, strict=True):
        pairs = [pair for pair in zip(_single(ours), _single(theirs), strict=True) if pair[1][0]]
        if pairs:
            share = statistics.fmean(ours_solved for (ours_solved, _), _ in pairs)
            loss = statistics.fmean(theirs_log - ours_log for (_, ours_log), (_, theirs_log) in pairs)
            yield Kept(ours.kind, ours.prompt, len(pairs), share, loss)


def _single(answers: Answers) -> list[tuple[bool, float]]:
    return list(zip(answers.solved, answers.log_probs, strict=True))


def markdown(report: GenerationReport) -> str:
    """The tables for people, with a line for each dtype that did not run."""
    parts = [_continuations(report)]
    if report.rows[0].answers:
        parts.append(_answers(report))
    if report.rows[0].acceptance is not None:
        parts.append(_accepted(report))
    return "\n\n".join(parts) + not_run(report)


def tokens_a_step(acceptance: Sequence[Sequence[int]]) -> float:
    """Tokens per step of all prompts together."""
    return sum(tokens for tokens, _ in acceptance) / sum(steps for _, steps in acceptance)


def accepted_ratio(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Our tokens a step over theirs, and the standard error (linearised; the same prompts are pairs)."""
    ratio, moves = tokens_a_step(ours) / tokens_a_step(theirs), [0.0] * len(ours)
    for sign, acceptance in ((1, ours), (-1, theirs)):
        mean, steps = tokens_a_step(acceptance), sum(steps for _, steps in acceptance)
        moves = [
            move + sign * (tokens / mean - own) / steps for move, (tokens, own) in zip(moves, acceptance, strict=True)
        ]
    count = len(moves)
    error = ratio * (count / (count - 1) * sum(move * move for move in moves)) ** 0.5 if count > 1 else float("nan")
    return ratio, error


def _accepted(report: GenerationReport) -> str:
    baseline = report.rows[0].acceptance or []
    rows = []
    for row in report.rows:
        if row.acceptance is not None:
            ratio, error = accepted_ratio(row.acceptance, baseline)
            rows.append([row.dtype, f"{tokens_a_step(row.acceptance):.3f}", f"{ratio:.3f} ± {error:.3f}"])
    return table([["dtype", "tokens per step with n-gram drafts", "of the baseline's"], *rows])


def _continuations(report: GenerationReport) -> str:
    baseline, *others = report.rows
    head = [
        "dtype",
        "KV bytes/token",
        "text",
        "prompt",
        "KL mean",
        "KL p99",
        "KL p99.9",
        "other top-1",
        "greedy tokens alike",
    ]
    lines = [
        [baseline.dtype, f"{baseline.bytes_per_token:,.0f}", "", length, f"(rounding {floor:.4f})", "", "", "", ""]
        for length, floor in baseline.rounding.items()
    ]
    lines += [
        [row.dtype, f"{row.bytes_per_token:,.0f}", found.text, str(found.prompt),
         with_error(found.kl_mean, found.kl_error),
         f"{found.kl_p99:.4f}", f"{found.kl_p999:.4f}", f"{100 * found.top1_loss:.1f} %",
         f"{statistics.median(found.divergence):g}"]
        for row in others for found in row.continuations
    ]  # fmt: skip
    return table([head, *lines])


def _answers(report: GenerationReport) -> str:
    baseline, *others = report.rows
    head = ["dtype", "tasks", "prompt", "solved by the baseline", "of these solved", "nats lost an answer"]
    lines = [
        [row.dtype, found.kind, str(found.prompt), str(found.tasks), f"{100 * found.share:.0f} %", f"{found.loss:.3f}"]
        for row in others
        for found in kept(row, baseline)
    ]
    return table([head, *lines])


def write(report: GenerationReport, folder: Path) -> bool:
    """Write generate.json with everything, and generate.csv with a row a dtype, text and length, and a dtype, kind and
    length. Returns what `keep` does."""
    is_kept = write_json(report, {"rows": [asdict(row) for row in report.rows]}, folder / "generate.json")
    baseline = report.rows[0]
    lines = []
    for row in report.rows:
        of_row = {"dtype": row.dtype, "kv_bytes_per_token": f"{row.bytes_per_token:g}"}
        lines += [{**of_row, **_columns(found)} for found in row.continuations]
        lines += [
            {**of_row, "task": found.kind, "prompt": str(found.prompt), "solved_by_baseline": str(found.tasks),
             "share_of_these": f"{found.share:.6g}", "log_prob_loss": f"{found.loss:.6g}"}
            for found in kept(row, baseline)
        ]  # fmt: skip
        if row.acceptance is not None:
            lines.append({**of_row, "tokens_a_step": f"{tokens_a_step(row.acceptance):.6g}"})
    names = dict.fromkeys(name for line in lines for name in line)
    lines = [{name: line.get(name, "") for name in names} for line in lines]
    return write_csv(report, lines, folder / "generate.csv") and is_kept


def _columns(found: Continuation) -> dict[str, str]:
    lists = ("divergence", "kl_windows")
    columns = {name: value for name, value in asdict(found).items() if name not in ("text", "prompt", *lists)}
    return {
        "text": found.text,
        "prompt": str(found.prompt),
        **{name: "" if value is None else f"{value:.6g}" for name, value in columns.items()},
        "greedy_alike_median": f"{statistics.median(found.divergence):g}",
    }
