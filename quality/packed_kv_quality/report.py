"""The results of the quality harness as Markdown tables, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from packed_kv.private_file import replace_file

from .measurement import Measurement, Recall
from .placebo_sweep import Limits, Verdict
from .recall_map import answer_log_prob, recalled_share
from .uncertainty import ratio

Line = Sequence[str]


@dataclass(frozen=True)
class Report:
    """All results of a run. `rows` begins with the baseline and fp8's storage; no `verdicts` were asked for if
    they are None; `refused` and `failed` say why."""

    rows: Sequence[Measurement]
    verdicts: Mapping[str, Verdict] | None
    refused: Mapping[str, str]
    failed: Mapping[str, str]
    limits: Limits
    run: Mapping[str, Any]


@dataclass(frozen=True)
class RecallReport:
    """All results of `recall`."""

    rows: Sequence[Recall]
    refused: Mapping[str, str]
    failed: Mapping[str, str]
    run: Mapping[str, Any]


def markdown(report: Report) -> str:
    """The tables in Markdown, with a line for each dtype that did not run."""
    baseline, storage, *_ = report.rows
    head = ["dtype", "KV bytes/token", "+ KiB/request", "KV tokens", "perplexity", "KL mean", f"of {storage.dtype}",
            "KL p99", "KL max", "top-1", "top-5"]  # fmt: skip
    head += RECALL_HEAD if baseline.recall else []
    head += ["differs", "unique", "verdict"] if report.verdicts is not None else []
    text = table([head, *(_values(report, row) for row in report.rows)])
    if len(baseline.texts) > 1:
        by_text = [["KL mean", *baseline.texts]]
        by_text += [
            [row.dtype, *(with_error(found.kl_mean, found.kl_error) for found in row.texts.values())]
            for row in report.rows[1:]
        ]
        text += "\n\n" + table(by_text)
    return text + not_run(report)


def recall_markdown(report: RecallReport) -> str:
    """The table of `recall`."""
    lines = [
        [row.dtype, f"{row.bytes_per_token:,.0f}", *recall_values(row.recall, report.rows[0].recall)]
        for row in report.rows
    ]
    return table([["dtype", "KV bytes/token", *RECALL_HEAD], *lines]) + not_run(report)


RECALL_HEAD = ["recall", "of auto", "answer log-prob"]


def recall_values(cells: Sequence, baseline: Sequence) -> list[str]:
    """Facts recalled, as a share of the facts that the baseline recalls, and the answers' mean log-probability."""
    share, known, log_prob = recalled_share(cells), recalled_share(baseline), answer_log_prob(cells)
    if share is None or log_prob is None:
        return ["", "", ""]
    return [f"{100 * share:.1f} %", f"{100 * share / known:.1f} %" if known else "", f"{log_prob:.3f}"]


def with_error(value: float, error: float | None, digits: int = 4) -> str:
    """A figure and its standard error, if there is one."""
    return f"{value:.{digits}f}" if error is None else f"{value:.{digits}f} ± {error:.{digits}f}"


def table(lines: Sequence[Line]) -> str:
    """A Markdown table; the first line is its head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


class Ran(Protocol):
    """Fields that the reports of all commands have."""

    @property
    def refused(self) -> Mapping[str, str]: ...
    @property
    def failed(self) -> Mapping[str, str]: ...
    @property
    def run(self) -> Mapping[str, Any]: ...


def not_run(report: Ran) -> str:
    """A line for each dtype that did not run."""
    lines = [("refused", *item) for item in report.refused.items()]
    lines += [("FAILED", *item) for item in report.failed.items()]
    return "".join(f"\n{dtype} {word}: {reason}" for word, dtype, reason in lines)


def _values(report: Report, row: Measurement) -> list[str]:
    baseline, storage, *_ = report.rows
    scores, compared = row.scores, row is not baseline
    kl = ["", "", "", ""]
    if compared:
        of_storage = with_error(*ratio(row.kl_blocks(), storage.kl_blocks()), digits=2)
        kl = [with_error(scores.kl_mean, scores.kl_error), of_storage, f"{scores.kl_p99:.4f}", f"{scores.kl_max:.4f}"]
    values = [
        row.dtype,
        f"{row.bytes_per_token:,.0f}",
        f"{row.bytes_per_request / 1024:,.0f}" if row.bytes_per_request else "",
        f"{baseline.bytes_per_token / row.bytes_per_token:.2f} x",  # a baseline from a file may have had other memory
        f"{scores.perplexity:.2f}",
        *kl,
        *(f"{100 * value:.1f} %" if compared else "" for value in (scores.top1, scores.top5)),
    ]
    if baseline.recall:
        values += recall_values(row.recall, baseline.recall)
    if report.verdicts is not None:
        verdict = report.verdicts.get(row.dtype)
        values += _verdict(verdict) if verdict else ["", "", "reference" if compared else "baseline"]
    return values


def _verdict(verdict: Verdict) -> list[str]:
    unique = f"= {verdict.equals}" if verdict.equals else "yes" if verdict.differs else ""
    return ["yes" if verdict.differs else "NO", unique, verdict.text]


def write(report: Report, folder: Path) -> bool:
    """Write quality.json (all but the losses) and quality.csv (one row per dtype). Returns what `keep` does."""
    rows = [{key: value for key, value in asdict(row).items() if key != "losses"} for row in report.rows]
    verdicts = {dtype: asdict(verdict) for dtype, verdict in (report.verdicts or {}).items()}
    contents = {"limits": asdict(report.limits), "rows": rows, "verdicts": verdicts}
    kept = write_json(report, contents, folder / "quality.json")
    return write_csv(report, [_columns(report, row) for row in report.rows], folder / "quality.csv") and kept


def write_recall(report: RecallReport, folder: Path) -> bool:
    """Write recall.json and recall.csv (one row per dtype). Returns what `keep` does."""
    kept = write_json(report, {"rows": [asdict(row) for row in report.rows]}, folder / "recall.json")
    lines = [
        {"dtype": row.dtype, "kv_bytes_per_token": f"{row.bytes_per_token:g}",
         **_recall_columns(row.recall, report.rows[0].recall)}
        for row in report.rows
    ]  # fmt: skip
    return write_csv(report, lines, folder / "recall.csv") and kept


def write_json(report: Ran, contents: Mapping[str, Any], path: Path) -> bool:
    """Write `contents` with what the run was, and what did not run."""
    contents = {"run": report.run, **contents, "refused": report.refused, "failed": report.failed}
    return keep(path, json.dumps(contents, indent=1) + "\n")


def write_csv(report: Ran, lines: Sequence[Mapping[str, str]], path: Path) -> bool:
    """Write a row a dtype, those that did not run last, each with versions and device."""
    made_with = report.run["made_with"]
    text = io.StringIO()
    names = list(dict.fromkeys([*lines[0], "verdict", *made_with]))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({**line, **made_with})
    for word, errors in (("refused", report.refused), ("failed", report.failed)):
        for dtype, reason in errors.items():
            writer.writerow({"dtype": dtype, "verdict": f"{word}: {reason}", **made_with})
    return keep(path, text.getvalue())


def keep(path: Path, text: str) -> bool:
    """Write a file of results in place of what has its name; what cannot be written, after hours of measurement, is
    printed. Returns whether it is written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        print(f"packed-kv-quality: {path} cannot be written ({error.strerror}), so it is printed:", file=sys.stderr)
        print(text)
        return False
    return True


def _columns(report: Report, row: Measurement) -> dict[str, str]:
    baseline, storage, *_ = report.rows
    verdict = (report.verdicts or {}).get(row.dtype)
    of_storage = error = None
    if row is not baseline:
        of_storage, error = ratio(row.kl_blocks(), storage.kl_blocks())
    columns = {
        "dtype": row.dtype,
        "kv_bytes_per_token": f"{row.bytes_per_token:g}",
        "kv_bytes_per_request": str(row.bytes_per_request),
        "kv_tokens": str(row.kv_tokens),
        **{name: _number(value) for name, value in asdict(row.scores).items()},
        "kl_of_fp8_storage": _number(of_storage),
        "kl_of_fp8_storage_error": _number(error),
        **{f"kl_{name}": _number(text.kl_mean) for name, text in row.texts.items()},
        **_recall_columns(row.recall, baseline.recall),
        "kl_bound": _number(verdict.bound if verdict else None),
    }
    if report.verdicts is not None:
        columns["verdict"] = verdict.text if verdict else "baseline" if row is baseline else "reference"
    return columns


def _recall_columns(cells: Sequence, baseline: Sequence) -> dict[str, str]:
    share, known = recalled_share(cells), recalled_share(baseline)
    return {
        "recall": _number(share),
        "recall_of_baseline": _number(share / known if share is not None and known else None),
        "answer_log_prob": _number(answer_log_prob(cells)),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
