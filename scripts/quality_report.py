"""The results of the quality harness as a Markdown table, CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measurement import Measurement
from placebo_sweep import Limits, Verdict
from recall_map import recalled_share


@dataclass(frozen=True)
class Report:
    """Everything that one run found. `rows` begins with the baseline; `refused` and `failed` say why."""

    rows: Sequence[Measurement]
    verdicts: Mapping[str, Verdict]
    refused: Mapping[str, str]
    failed: Mapping[str, str]
    limits: Limits
    run: Mapping[str, Any]


def markdown(report: Report) -> str:
    """The table for people, with a line for each dtype that did not run."""
    head = ("dtype", "KV bytes/token", "KV tokens", "perplexity", "KL mean", "KL p99", "KL max", "top-1", "top-5",
            "recall", f"differs from {report.rows[0].dtype}", "unique", "verdict")  # fmt: skip
    cells = [list(head), *(_values(report, row) for row in report.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    text = "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    )
    for word, errors in (("refused", report.refused), ("FAILED", report.failed)):
        text += "".join(f"\n{dtype} {word}: {reason}" for dtype, reason in errors.items())
    return text


def _values(report: Report, row: Measurement) -> list[str]:
    scores, first, verdict = row.scores, report.rows[0], report.verdicts.get(row.dtype)
    share = recalled_share(row.recall)
    kl = [f"{value:.4f}" if verdict else "" for value in (scores.kl_mean, scores.kl_p99, scores.kl_max)]
    agreement = [f"{100 * value:.1f} %" if verdict else "" for value in (scores.top1, scores.top5)]
    return [
        row.dtype,
        f"{row.bytes_per_token:,.0f}",
        f"{first.bytes_per_token / row.bytes_per_token:.2f} x",  # a baseline from a file may have had other memory
        f"{scores.perplexity:.2f}",
        *kl,
        *agreement,
        "" if share is None else f"{100 * share:.0f} %",
        ("yes" if verdict.differs else "NO") if verdict else "",
        (f"= {verdict.equals}" if verdict.equals else "yes") if verdict else "",
        verdict.text if verdict else "baseline",
    ]


def write(report: Report, folder: Path) -> None:
    """quality.json with everything but the losses, and quality.csv with a row a dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{key: value for key, value in asdict(row).items() if key != "losses"} for row in report.rows]
    verdicts = {dtype: asdict(verdict) for dtype, verdict in report.verdicts.items()}
    contents = {
        "run": report.run,
        "limits": asdict(report.limits),
        "rows": rows,
        "verdicts": verdicts,
        "refused": report.refused,
        "failed": report.failed,
    }
    (folder / "quality.json").write_text(json.dumps(contents, indent=1) + "\n")
    with (folder / "quality.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *report.run["made_with"]])
        made_with = report.run["made_with"].values()
        for row in report.rows:
            verdict = report.verdicts.get(row.dtype)
            bound = "" if verdict is None or verdict.bound is None else f"{verdict.bound:.6g}"
            text = verdict.text if verdict else "baseline"
            scores = [f"{value:.6g}" for value in asdict(row.scores).values()]
            share = recalled_share(row.recall)
            recall = "" if share is None else f"{share:.4f}"
            writer.writerow(
                [row.dtype, f"{row.bytes_per_token:g}", row.kv_tokens, *scores, recall, bound, text, *made_with]
            )
        for word, errors in (("refused", report.refused), ("failed", report.failed)):
            for dtype, reason in errors.items():
                empty = [""] * (len(COLUMNS) - 2)
                writer.writerow([dtype, *empty, f"{word}: {reason}", *made_with])


COLUMNS = ("dtype", "kv_bytes_per_token", "kv_tokens", "positions", "perplexity", "kl_mean", "kl_p99", "kl_max",
           "top1", "top5", "recall", "kl_bound", "verdict")  # fmt: skip
