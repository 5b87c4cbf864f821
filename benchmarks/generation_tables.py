"""The tables of `packed-kv-quality generate` on SmolLM2, from its JSON in results/. `GENERATION` names them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from measured_rows import RESULTS, in_order, is_baseline, made_by
from packed_kv import FORMATS
from tables import Row, Table, pivot

FOLDER = "generate-smollm2"
CALIBRATED, UNCALIBRATED, OTHERS = "calibrated", "no file", ""
WINDOW, NO_WINDOW, STRETCHED, RULER, DRAFTS = "window of 64", "no window", "stretched", "tasks", "drafts"
FILES = (
    ("calibrated", WINDOW, CALIBRATED),
    ("uncalibrated", WINDOW, UNCALIBRATED),
    ("no-window-calibrated", NO_WINDOW, CALIBRATED),
    ("no-window-uncalibrated", NO_WINDOW, UNCALIBRATED),
    ("yarn-calibrated", STRETCHED, CALIBRATED),
    ("yarn-uncalibrated", STRETCHED, UNCALIBRATED),
    ("tasks", RULER, CALIBRATED),
    ("drafts", DRAFTS, CALIBRATED),
)
"""Files of the folder, the kind of run that each is of, and its setting of our dtypes (of others it is `OTHERS`)."""
REFERENCE = "fp8"
"""vLLM's own, of which the tables give ratios. It knows neither file nor window."""
README_DTYPES = ("tq4", "turboquant35", "tq3", "turboquant25", REFERENCE, "int4_per_token_head")
PLACES = ("text", "prompt")
TASKS = {
    "single": "a number", "far": "a number far back", "multi_key": "one of several",
    "multi_value": "several of one name", "multi_query": "several names", "variables": "variables",
    "common_words": "most frequent word", "json": "JSON",
}  # fmt: skip


def continuations(kind: str) -> list[Row]:
    """A row a dtype, setting, text and length of prompts. The reference is in every kind: its run with a window has the
    same prompts as that without."""
    found = [
        {**columns, "text": part["text"], "prompt": str(part["prompt"]), "kl_mean": str(part["kl_mean"]),
         "kl_error": str(part["kl_error"] or ""), "windows": json.dumps(part["kl_windows"])}
        for row, columns in _rows(kind)
        for part in row["continuations"]
    ]  # fmt: skip
    if found and kind == NO_WINDOW:
        found += [row for row in continuations(WINDOW) if row["dtype"] == REFERENCE]
    return in_order([row for row in found if not is_baseline(row)])


def _rows(kind: str) -> Iterator[tuple[Mapping, dict[str, str]]]:
    """Each row of the files of a kind, with the columns that its lines in tables share."""
    for file, of, setting in FILES:
        name = f"{FOLDER}/{file}.json"
        if of == kind and (RESULTS / name).exists():
            found = json.loads((RESULTS / name).read_text())
            for row in found["rows"]:
                dtype = row["dtype"]
                own = {"dtype": dtype, "setting": setting if dtype in FORMATS else OTHERS}
                yield row, {**own, "bytes": str(row["bytes_per_token"]),
                             "token": f"{row['bytes_per_token']:,.0f}", **made_by(name, found["run"])}  # fmt: skip


def merged(rows: Sequence[Row], kept: Sequence[str]) -> list[Row]:
    """The mean of the rows of a dtype and setting that are alike in `kept`, with its standard error and all windows."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in ("dtype", "setting", *kept)), []).append(row)
    return [
        {**found[0], "kl_mean": str(statistics.fmean(float(row["kl_mean"]) for row in found)),
         "kl_error": str(math.hypot(*(float(row["kl_error"]) for row in found)) / len(found))
         if all(row["kl_error"] for row in found) else "",
         "windows": json.dumps([kl for row in found for kl in json.loads(row["windows"])])}
        for found in groups.values()
    ]  # fmt: skip


def shared(rows: Sequence[Row], places: Sequence[str]) -> list[Row]:
    """The rows with `kl_share`, the ratio to the reference's of the same `places` ("" if it has none there)."""

    def at(row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in places)

    found = {at(row): float(row["kl_mean"]) for row in rows if row["dtype"] == REFERENCE}
    return [
        {**row, "kl_share": str(float(row["kl_mean"]) / found[at(row)]) if at(row) in found else ""} for row in rows
    ]


def kl(row: Row, _: Row | None) -> str:
    """Mean KL, its standard error, and in brackets the ratio to the reference's."""
    error = f" ± {float(row['kl_error']):.4f}" if row["kl_error"] else ""
    share = f" ({float(row['kl_share']):.2f})" if row["kl_share"] and row["dtype"] != REFERENCE else ""
    return f"{float(row['kl_mean']):.4f}{error}{share}"


def _tokens(length: str) -> str:
    return f"{int(length):,}"


def by_text(kind: str) -> list[Table]:
    """Texts and lengths across."""
    rows = shared(continuations(kind), PLACES)
    head = ["dtype", "KV bytes/token", "setting"]
    return [
        pivot(rows, ("dtype", "token", "setting"), PLACES, kl, head, lambda text, n: f"{text}, {_tokens(n)}")
    ] if rows else []  # fmt: skip


def gain(kind: str) -> list[Table]:
    """Lengths across: the KL with a file, of that without, paired by windows."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in merged(continuations(kind), ("prompt",)):
        found.setdefault(row["dtype"], {}).setdefault(row["prompt"], {})[row["setting"]] = row
    lengths = list(dict.fromkeys(prompt for dtype in found.values() for prompt in dtype))
    table = Table(["calibrated / no file", *map(_tokens, lengths)], 1)
    for dtype, by_prompt in found.items():
        pairs = [by_prompt.get(prompt, {}) for prompt in lengths]
        if any({CALIBRATED, UNCALIBRATED} <= {*pair} for pair in pairs):
            table.add([dtype, *map(_ratio, pairs)], [row for pair in pairs for row in pair.values()])
    return [table] if table.lines else []


def _ratio(pair: Mapping[str, Row]) -> str:
    if not {CALIBRATED, UNCALIBRATED} <= {*pair}:
        return "not run"
    ratio, error = ratio_of_means(*(json.loads(pair[name]["windows"]) for name in (CALIBRATED, UNCALIBRATED)))
    return f"{ratio:.2f} ± {error:.2f}"


def ratio_of_means(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The ratio of two means of pairs, with its standard error by linearization (0 of one pair)."""
    ratio = statistics.fmean(ours) / statistics.fmean(others)
    if len(ours) < 2:
        return ratio, 0.0
    left = [one - ratio * other for one, other in zip(ours, others, strict=True)]
    return ratio, statistics.stdev(left) / math.sqrt(len(left)) / statistics.fmean(others)


def shares() -> list[Table]:
    """KL of all texts and lengths in units of the reference's; what `packed-kv plan` shows."""
    rows = [
        {**row, "run_of": f"{kind}, {row['setting']}"}
        for kind in (WINDOW, NO_WINDOW)
        for row in shared(merged(continuations(kind), ()), ())
        if row["dtype"] in FORMATS
    ]

    def show(row: Row, _: Row | None) -> str:
        return f"{float(row['kl_share']):.2f}" if row["kl_share"] else "not run"

    return [pivot(in_order(rows), ("dtype",), ("run_of",), show, ["KL / fp8's"])] if rows else []


def kept_tasks(kind: str) -> list[Row]:
    """A row a dtype, setting, kind of task and length, of the tasks that the baseline solves: how many of how many
    (`kept`), the share that the dtype solves, and the nats lost an answer. None where it solves no task."""
    known: dict[tuple[str, int], Mapping] = {}
    rows = []
    for row, columns in _rows(kind):
        for part in row["answers"]:
            at = part["kind"], part["prompt"]
            if is_baseline(columns):
                known[at] = part
            elif any(known[at]["solved"]):
                pairs = zip(known[at]["solved"], known[at]["log_probs"], part["solved"], part["log_probs"], strict=True)
                kept = [(solved, before - after) for theirs, before, solved, after in pairs if theirs]
                rows.append({
                    **columns, "task": TASKS[at[0]], "prompt": _tokens(at[1]),
                    "kept": f"{len(kept)} of {len(part['solved'])}",
                    "share": f"{statistics.fmean(solved for solved, _ in kept):.0%}",
                    "lost": f"{statistics.fmean(lost for _, lost in kept):.2f}",
                })  # fmt: skip
    return in_order(rows)


def planted() -> list[Table]:
    """Numbers planted once, by where and length."""
    rows = [{**row, "shown": f"{row['share']}, {row['lost']}"} for row in kept_tasks(WINDOW)]

    def case(task: str, prompt: str, kept: str) -> str:
        return f"{task}, {prompt} ({kept})"

    across = ("task", "prompt", "kept")
    down = ("dtype", "setting")
    return [pivot(rows, down, across, lambda row, _: row["shown"], list(down), case)] if rows else []


def ruler() -> list[Table]:
    """Tasks of other kinds across, dtypes and lengths down."""
    rows = [{**row, "shown": f"{row['share']} of {row['kept'].split()[0]}, {row['lost']}"} for row in kept_tasks(RULER)]
    head = ["dtype", "tokens"]
    return [pivot(rows, ("dtype", "prompt"), ("task",), lambda row, _: row["shown"], head)] if rows else []


def drafts() -> list[Table]:
    """Tokens a step with n-gram drafts, the baseline's first."""
    table = Table(["dtype", "tokens a step"], 1)
    for row, columns in _rows(DRAFTS):
        name = "bf16" if is_baseline(columns) else row["dtype"]
        table.add([name, f"{row['acceptance']:.2f}"], [columns])
    return [table] if table.lines else []


def readme_rows() -> list[Row]:
    """Of the README's dtypes, calibrated: a row a length."""
    rows = shared(merged(continuations(WINDOW), ("prompt",)), ("prompt",))
    return [
        row for name in README_DTYPES for row in rows if row["dtype"] == name and row["setting"] in (CALIBRATED, OTHERS)
    ]


def readme_table() -> Table:
    """Lengths across."""
    head = ["mean KL, nats, behind prompts of", "KV bytes/token"]
    return pivot(readme_rows(), ("dtype", "token"), ("prompt",), kl, head, lambda n: f"{_tokens(n)} tokens")


def plotted() -> dict[str, tuple[list[Row], list[Row], float, float]]:
    """By length: rows with a file and others', rows without, the KL of bf16's rounding, and bf16's KV bytes a token."""
    baseline = next(row for row, columns in _rows(WINDOW) if is_baseline(columns))
    rows = merged(continuations(WINDOW), ("prompt",))
    found = {}
    for prompt, rounding in baseline["rounding"].items():
        of_length = [row for row in rows if row["prompt"] == prompt]
        plain = [row for row in of_length if row["setting"] == UNCALIBRATED]
        others = [row for row in of_length if row["setting"] != UNCALIBRATED]
        found[_tokens(prompt)] = others, plain, rounding, baseline["bytes_per_token"]
    return found


GENERATION: Mapping[str, Callable[[], Sequence[Table]]] = {
    "generate": partial(by_text, WINDOW),
    "generate-gain": partial(gain, WINDOW),
    "generate-shares": shares,
    "generate-no-window": partial(by_text, NO_WINDOW),
    "generate-planted": planted,
    "generate-tasks": ruler,
    "generate-drafts": drafts,
    "generate-stretched": partial(by_text, STRETCHED),
    "generate-stretched-gain": partial(gain, STRETCHED),
}
