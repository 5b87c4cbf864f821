"""Rows of SmolLM2's quality: which ones count, of what, and in which setting."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tables
from tables import BASELINE, NOT_FINITE, RESULTS, Row, in_order, made_by

CALIBRATED, UNCALIBRATED, NO_WINDOW = "calibrated", "no file", "calibrated, no window"
FOLDER, H200 = "generate-smollm2", "quality-smollm2-h200"
BEHIND = {f"{FOLDER}/calibrated.json": CALIBRATED, f"{FOLDER}/uncalibrated.json": UNCALIBRATED}
"""Prompts of 1,000 to 7,500 tokens, with the recent window of 64 tokens."""
TEXT = {
    f"{H200}/calibrated-window-64-f759513.json": CALIBRATED, f"{H200}/turboquant-nc.json": CALIBRATED,
    f"{H200}/calibrated-window-64.json": CALIBRATED, f"{H200}/calibrated-window-64-29533ae.json": CALIBRATED,
    f"{H200}/uncalibrated-window-64.json": UNCALIBRATED,
    f"{H200}/uncalibrated-window-64-29533ae.json": UNCALIBRATED,
    f"{H200}/calibrated-no-window-88355a4.json": NO_WINDOW, f"{H200}/calibrated-no-window.json": NO_WINDOW,
    f"{H200}/calibrated-no-window-29533ae.json": NO_WINDOW,
}  # fmt: skip
"""Teacher-forced text of up to 2,048 tokens. Of a dtype in a setting the last file counts."""
TAKEN = {"calibrated-window-64-f759513.json": ("fp8", "int4_per_token_head"), "turboquant-nc.json": (
    "turboquant_4bit_nc", "turboquant_3bit_nc"), "calibrated-no-window-88355a4.json": ("planarquant4",)}  # fmt: skip
"""File of `TEXT` -> the dtypes that are taken of it, if not all."""


def forced(rows: list[Row]) -> list[Row]:
    """Rows of `TEXT` that count, without bf16's and those of the rounding to fp8."""
    return [row for row in in_order(rows) if row["dtype"] not in (BASELINE, "fp8-storage")
            and row["dtype"] in TAKEN.get(Path(row["file"]).name, (row["dtype"],))]  # fmt: skip


def kept_of(base: dict[str, Any], part: dict[str, Any]) -> list[tuple[bool, float, float]]:
    """Return, of each task that the baseline solves, whether a dtype solves it, and the answer's log-probability by the
    baseline and by the dtype."""
    both = zip(base["solved"], part["solved"], base["log_probs"], part["log_probs"], strict=True)
    return [(solved, before, after) for is_solvable, solved, before, after in both if is_solvable]


def kept_tasks(name: str) -> list[Row]:
    """A row per dtype, kind of task and length, of the tasks that the baseline solves: how many of how many (`kept`),
    the share that the dtype solves, and the nats lost per answer with their standard error."""
    found = json.loads((RESULTS / name).read_text())
    known = {(part["kind"], part["prompt"]): part for row in found["rows"] if row["dtype"] == BASELINE
             for part in row["answers"] if any(part["solved"])}  # fmt: skip
    rows = []
    for row in found["rows"]:
        for part in row["answers"] if row["dtype"] != BASELINE else ():
            base = known.get((part["kind"], part["prompt"]))
            if base is None:
                continue
            kept = kept_of(base, part)
            losses = [before - after for _, before, after in kept]
            lost = statistics.fmean(losses)
            has_error = len(losses) > 1 and math.isfinite(lost)
            rows.append({
                "dtype": row["dtype"], "task": part["kind"], "prompt": f"{part['prompt']:,}",
                "kept": f"{len(kept)} of {len(part['solved'])}",
                "solved": f"{statistics.fmean(solved for solved, *_ in kept):.0%}",
                "lost": (f"{lost:.2f}" if math.isfinite(lost) else NOT_FINITE)
                + (f" ± {statistics.stdev(losses) / math.sqrt(len(losses)):.2f}" if has_error else ""),
                **made_by(name, found["run"]),
            })  # fmt: skip
    return rows


def solvable(name: str) -> dict[str, list[tuple[bool, float, float]]]:
    """Return `kept_of` of all tasks, by dtype."""
    found = {row["dtype"]: row["answers"] for row in json.loads((RESULTS / name).read_text())["rows"]}
    base = found.pop(BASELINE)
    return {dtype: [*chain(*map(kept_of, base, parts))] for dtype, parts in found.items()}


def paired_tasks(rows: list[Row]) -> Sequence[Row]:
    """A row per dtype and file: how many tasks are `solved` of those that the baseline solves, and the nats that an
    answer has `regained` since the first file, paired by task."""
    answers = {name: solvable(name) for name in dict.fromkeys(row["file"] for row in rows)}
    first = next(iter(answers.values()))
    made: dict[tuple[str, str], Row] = {}
    for row in rows:
        if (dtype := row["dtype"]) != BASELINE:
            ours = answers[row["file"]][dtype]
            more = [log_prob - before for (*_, log_prob), (*_, before) in zip(ours, first[dtype], strict=True)]
            error = statistics.stdev(more) / math.sqrt(len(more))
            made[dtype, row["file"]] = {
                **row, "solved": f"{sum(solved for solved, *_ in ours)} of {len(ours)}",
                "regained": f"{statistics.fmean(more):+.2f} ± {error:.2f}" if any(more) else "",
            }  # fmt: skip
    return in_order(list(made.values()))


def behind(*places: str, dtypes: Sequence[str] = ()) -> Callable[[list[Row]], Sequence[Row]]:
    """Rows of prompts with `kl_share` at the same `places`: the mean of the texts, unless `places` has them.

    Other dtypes than ours know neither file nor window, and have no setting. With `dtypes`, those in this order.
    """

    def prepare(rows: list[Row]) -> Sequence[Row]:
        rows = [row for row in rows if row["dtype"] != BASELINE]
        named = [{**row, "setting": row["setting"] if row["dtype"] in tables.ORDER[3:] else ""} for row in rows]
        found = tables.shared(tables.merged(in_order(named), ("dtype", "setting", *places)), places)
        return [row for name in dtypes for row in found if row["dtype"] == name] if dtypes else found

    return prepare


def gains(rows: list[Row]) -> list[Row]:
    """A row per dtype and length: `gain`, the KL with a file over that without, paired by windows."""
    found = {(row["dtype"], row["prompt"], row["setting"]): row for row in behind("prompt")(rows)}
    made = []
    for (dtype, prompt, setting), row in found.items():
        if setting == CALIBRATED:
            pair = (json.loads(one["windows"]) for one in (row, found[dtype, prompt, UNCALIBRATED]))
            made.append({**row, "gain": "{:.2f} ± {:.2f}".format(*tables.ratio_of_means(*pair))})
    return made


OTHER_CODES = {
    "q8_0_rotated": "q8_0, rotated", "q5_0_rotated": "q5_0, rotated", "q4_0_rotated": "q4_0, rotated",
    "q8_0_interleaved": "q8_0, halves of K interleaved", "q5_0_interleaved": "q5_0, halves of K interleaved",
    "q4_0_interleaved": "q4_0, halves of K interleaved", "turbo2_tcq_64": "turbo2_tcq over 64 channels",
}  # fmt: skip
"""Codes of quality/llama_codes.py in words, whose names do not say it."""


def beside_others(rows: list[Row]) -> Sequence[Row]:
    """Rows of quality/long_context.py with codes in words, those of most bytes first."""
    named = [{**row, "dtype": OTHER_CODES.get(row["dtype"], row["dtype"])} for row in rows]
    return sorted(named, key=lambda row: int(row["bytes"].replace(",", "")), reverse=True)


def tasks(rows: list[Row]) -> list[Row]:
    """A row per dtype, kind of task and length: `shown`, the share that it solves and the nats lost per answer."""
    settings = dict.fromkeys((row["file"], row["setting"]) for row in rows)
    found = [{**row, "setting": setting, "shown": f"{row['solved']}, {row['lost']}"}
             for name, setting in settings for row in kept_tasks(name)]  # fmt: skip
    return in_order(tables.without_others(found))
