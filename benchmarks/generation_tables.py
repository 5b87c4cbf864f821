"""The tables of `packed-kv-quality generate` on SmolLM2, from its JSON in results/. `GENERATION` names them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from measured_rows import RESULTS, in_order, is_baseline, made_by
from packed_kv import FORMATS
from packed_kv_quality.generation_report import accepted_ratio, tokens_a_step
from tables import Row, Table, pivot

FOLDER = "generate-smollm2"
CALIBRATED, UNCALIBRATED, OTHERS = "calibrated", "no file", ""
FILES = {"calibrated": CALIBRATED, "uncalibrated": UNCALIBRATED}
"""File of the folder -> its setting of our dtypes (of others it is `OTHERS`). With the window of 64 tokens."""
NO_WINDOW = {"no-window-calibrated": CALIBRATED, "no-window-uncalibrated": UNCALIBRATED}
STRETCHED = {"yarn-calibrated": CALIBRATED, "yarn-uncalibrated": UNCALIBRATED}
"""The model stretched by YaRN, with the window."""
HARDER = {"tasks": CALIBRATED}
"""RULER's other tasks, with the window."""
REPEATED = {"repeated": CALIBRATED}
"""Of a prompt whose first token stands there twice and once, with the window."""
DRAFTS = {"drafts": CALIBRATED}
"""n-gram drafts, with the window."""
REFERENCE = "fp8"
"""vLLM's own, of which the tables give ratios. It knows neither file nor window."""
NOT_FINITE = "not finite"
"""Stands for a KL or a log-probability that an engine gave as nan."""
README_DTYPES = ("tq4", "turboquant35", "tq3", "turboquant25", REFERENCE, "int4_per_token_head")
PLACES = ("text", "prompt")
TASKS = {
    "single": "a number",
    "far": "a number far back",
    "multi_key": "one of several names",
    "multi_value": "several numbers of a name",
    "multi_query": "several names",
    "variables": "variables",
    "common_words": "the commonest word",
    "json": "JSON",
}
GAINS = {
    "tq4": (0.75, 0.65, 0.75),
    "isoquant4": (0.55, 0.45, 0.60),
    "tq3": (0.55, 0.55, 0.52),
    "turboquant25": (0.36, 0.36, 0.42),
}
"""Goals at the three lengths, at most: KL with a file, of that without."""
SHARES = {
    "tq4": (0.22, 0.20, 0.20),
    "isoquant4": (0.30, 0.30, 0.35),
    "turboquant35": (0.35, 0.30, 0.35),
    "tq3": (0.6, 0.5, 0.55),
    "turboquant25": (1.2, 1.0, 1.1),
}
"""Goals at the three lengths, at most: KL with a file, of the reference's."""
STRETCHED_GAIN = 0.8
"""Goal of the stretched model, below: KL with a file, of that without, of each dtype of `GAINS`."""
NO_WINDOW_KL = {"fiction": 0.0173, "technical": 0.0277}
"""Goals of tq4 without a window at the last length, at most: half of what a file of version 2 had."""
LOSSES: Mapping[str, float | None] = {"tq4": None, "turboquant35": None, "tq3": 0.2, "turboquant25": 0.4}
"""Goals far back at the last length, at most: nats lost an answer. None: less than the reference loses."""


def continuations(files: Mapping[str, str] = FILES) -> list[Row]:
    """A row a dtype, setting, text and length of prompts."""
    found = [
        {**columns, "text": part["text"], "prompt": str(part["prompt"]), "kl_mean": str(part["kl_mean"]),
         "kl_error": str(part["kl_error"] or ""), "windows": json.dumps(part["kl_windows"])}
        for row, columns in _rows(files)
        for part in row["continuations"]
    ]  # fmt: skip
    return in_order([row for row in found if not is_baseline(row)])


def _rows(files: Mapping[str, str] = FILES) -> Iterator[tuple[Mapping, dict[str, str]]]:
    """Each row of the files, with the columns that its lines in tables share."""
    for file, setting in files.items():
        name = f"{FOLDER}/{file}.json"
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
    if not math.isfinite(float(row["kl_mean"])):
        return NOT_FINITE
    error = f" ± {float(row['kl_error']):.4f}" if row["kl_error"] else ""
    share = f" ({float(row['kl_share']):.2f})" if row["kl_share"] and row["dtype"] != REFERENCE else ""
    return f"{float(row['kl_mean']):.4f}{error}{share}"


def _tokens(length: str) -> str:
    return f"{int(length):,}"


def by_text(files: Mapping[str, str] = FILES) -> list[Table]:
    """Texts and lengths across."""
    rows = shared(continuations(files), PLACES)
    head = ["dtype", "KV bytes/token", "setting"]
    return [pivot(rows, ("dtype", "token", "setting"), PLACES, kl, head, lambda text, n: f"{text}, {_tokens(n)}")]


def gain(files: Mapping[str, str] = FILES) -> list[Table]:
    """Lengths across: the KL with a file, of that without, paired by windows."""
    found = _pairs(files)
    lengths = list(dict.fromkeys(prompt for dtype in found.values() for prompt in dtype))
    table = Table(["calibrated / no file", *map(_tokens, lengths)], 1)
    for dtype, by_prompt in found.items():
        pairs = [by_prompt.get(prompt, {}) for prompt in lengths]
        if any({CALIBRATED, UNCALIBRATED} <= {*pair} for pair in pairs):
            table.add([dtype, *map(_ratio, pairs)], [row for pair in pairs for row in pair.values()])
    return [table]


def _pairs(files: Mapping[str, str] = FILES) -> dict[str, dict[str, dict[str, Row]]]:
    """Dtype -> length -> setting -> the row of both texts."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in merged(continuations(files), ("prompt",)):
        found.setdefault(row["dtype"], {}).setdefault(row["prompt"], {})[row["setting"]] = row
    return found


def _ratio(pair: Mapping[str, Row]) -> str:
    if not {CALIBRATED, UNCALIBRATED} <= {*pair}:
        return "not run"
    ratio, error = _gain_of(pair)
    return f"{ratio:.2f} ± {error:.2f}"


def _gain_of(pair: Mapping[str, Row]) -> tuple[float, float]:
    return ratio_of_means(*(json.loads(pair[name]["windows"]) for name in (CALIBRATED, UNCALIBRATED)))


def ratio_of_means(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The ratio of two means of pairs, with its standard error by linearization (0 of one pair)."""
    ratio = statistics.fmean(ours) / statistics.fmean(others)
    if len(ours) < 2:
        return ratio, 0.0
    left = [one - ratio * other for one, other in zip(ours, others, strict=True)]
    return ratio, statistics.stdev(left) / math.sqrt(len(left)) / statistics.fmean(others)


def shares() -> list[Table]:
    """KL of all texts and lengths in units of the reference's."""
    rows = [row for row in shared(merged(continuations(), ()), ()) if row["dtype"] in FORMATS]
    return [pivot(rows, ("dtype",), ("setting",), lambda row, _: f"{float(row['kl_share']):.2f}", ["KL / fp8's"])]


def goals() -> list[Table]:
    """Each goal with what was measured, lengths across."""
    found, places = _pairs(), ("prompt",)
    of_reference = {
        (row["dtype"], row["prompt"]): row
        for row in shared(merged(continuations(), places), places)
        if row["setting"] == CALIBRATED
    }
    lengths = list(found[REFERENCE])
    table = Table(["calibrated: goal at most", "dtype", *map(_tokens, lengths)], 2)
    for dtype, limits in GAINS.items():
        pairs = [found[dtype][prompt] for prompt in lengths]
        cells = [judged(_gain_of(pair)[0], limit) for pair, limit in zip(pairs, limits, strict=True)]
        table.add(["of no file's KL", dtype, *cells], [row for pair in pairs for row in pair.values()])
    for dtype, limits in SHARES.items():
        rows = [of_reference[dtype, prompt] for prompt in lengths]
        cells = [judged(float(row["kl_share"]), limit) for row, limit in zip(rows, limits, strict=True)]
        table.add(["of fp8's KL", dtype, *cells], rows)
    lost = {
        row["dtype"]: row
        for row in kept_tasks()
        if (row["task"], row["prompt"]) == (TASKS["far"], _tokens(lengths[-1])) and row["setting"] != UNCALIBRATED
    }
    for dtype, limit in LOSSES.items():
        bound = float(lost[REFERENCE]["lost"]) if limit is None else limit
        cells = ["no goal"] * (len(lengths) - 1) + [judged(float(lost[dtype]["lost"]), bound)]
        table.add(["nats lost, a number far back", dtype, *cells], [lost[dtype]])
    return [table]


def no_window_goals() -> list[Table]:
    """tq4's goals, texts across."""
    rows = [row for row in continuations(NO_WINDOW) if row["dtype"] == "tq4" and row["setting"] == CALIBRATED]
    last = max(int(row["prompt"]) for row in rows)
    rows = [row for row in rows if int(row["prompt"]) == last]
    table = Table(
        ["KL, no window, calibrated: goal at most", *(f"{row['text']}, {_tokens(row['prompt'])}" for row in rows)], 1
    )
    cells = [judged(float(row["kl_mean"]), NO_WINDOW_KL[row["text"]], 4) for row in rows]
    table.add(["tq4", *cells], rows)
    return [table]


def stretched_goals() -> list[Table]:
    """Lengths across: the KL with a file, of that without."""
    found = _pairs(STRETCHED)
    lengths = list(found["tq4"])
    table = Table(["calibrated / no file: goal below", *map(_tokens, lengths)], 1)
    for dtype in GAINS:
        pairs = [found[dtype][prompt] for prompt in lengths]
        cells = [judged(_gain_of(pair)[0], STRETCHED_GAIN - 0.01) for pair in pairs]
        table.add([dtype, *cells], [row for pair in pairs for row in pair.values()])
    return [table]


def judged(value: float, limit: float, digits: int = 2) -> str:
    """A figure, its goal, and whether it is reached, by the figure as it is shown."""
    return f"{value:.{digits}f} ({limit:.{digits}f}: {'reached' if round(value, digits) <= limit else 'missed'})"


def kept_tasks(files: Mapping[str, str] = FILES) -> list[Row]:
    """A row a dtype, setting, kind of task and length, of the tasks that the baseline solves: how many of how many
    (`kept`), the share that the dtype solves, and the nats lost an answer with their standard error. None where the
    baseline solves no task."""
    known: dict[tuple[str, int], Mapping] = {}
    rows = []
    for row, columns in _rows(files):
        for part in row["answers"]:
            at = part["kind"], part["prompt"]
            if is_baseline(columns):
                known[at] = part
            elif any(known[at]["solved"]):
                pairs = zip(known[at]["solved"], known[at]["log_probs"], part["solved"], part["log_probs"], strict=True)
                kept = [(solved, before - after) for theirs, before, solved, after in pairs if theirs]
                losses = [lost for _, lost in kept]
                lost = statistics.fmean(losses)
                has_error = len(losses) > 1 and math.isfinite(lost)
                error = statistics.stdev(losses) / math.sqrt(len(losses)) if has_error else None
                rows.append({
                    **columns, "task": TASKS[at[0]], "prompt": _tokens(at[1]),
                    "kept": f"{len(kept)} of {len(part['solved'])}",
                    "share": f"{statistics.fmean(solved for solved, _ in kept):.0%}",
                    "lost": f"{lost:.2f}" if math.isfinite(lost) else NOT_FINITE,
                    "error": "" if error is None else f" ± {error:.2f}",
                })  # fmt: skip
    return in_order(rows)


def planted(files: Mapping[str, str] = FILES) -> list[Table]:
    """Tasks by kind and length."""
    rows = [{**row, "shown": f"{row['share']}, {row['lost']}{row['error']}"} for row in kept_tasks(files)]

    def case(task: str, prompt: str, kept: str) -> str:
        return f"{task}, {prompt} ({kept})"

    across = ("task", "prompt", "kept")
    down = ("dtype", "setting")
    return [pivot(rows, down, across, lambda row, _: row["shown"], list(down), case)]


def harder() -> list[Table]:
    """RULER's other tasks, dtypes across."""
    rows = [{**row, "shown": f"{row['share']}, {row['lost']}{row['error']}"} for row in kept_tasks(HARDER)]
    down, head = ("task", "prompt", "kept"), ["tasks", "prompt", "bf16 answers"]
    return [pivot(rows, down, ("dtype",), lambda row, _: row["shown"], head)]


def accepted() -> list[Table]:
    """Tokens a step with n-gram drafts, and the ratio to bf16's with its standard error."""
    found = list(_rows(DRAFTS))
    whole = next(row["acceptance"] for row, columns in found if is_baseline(columns))
    table = Table(["dtype", "tokens a step", "of bf16's"], 1)
    for row, columns in found:
        share, error = accepted_ratio(row["acceptance"], whole)
        name = "bf16" if is_baseline(columns) else row["dtype"]
        ours = "1" if is_baseline(columns) else f"{share:.4f} ± {error:.4f}"
        table.add([name, f"{tokens_a_step(row['acceptance']):.3f}", ours], [columns])
    return [table]


def readme_rows() -> list[Row]:
    """Of the README's dtypes, calibrated: a row a length."""
    rows = shared(merged(continuations(), ("prompt",)), ("prompt",))
    return [
        row for name in README_DTYPES for row in rows if row["dtype"] == name and row["setting"] in (CALIBRATED, OTHERS)
    ]


def readme_table() -> Table:
    """Lengths across."""
    head = ["mean KL, nats, behind prompts of", "KV bytes/token"]
    return pivot(readme_rows(), ("dtype", "token"), ("prompt",), kl, head, lambda n: f"{_tokens(n)} tokens")


def plotted() -> dict[str, tuple[list[Row], list[Row], float, float]]:
    """By length: rows with a file and others', rows without, the KL of bf16's rounding, and bf16's KV bytes a token."""
    baseline = next(row for row, columns in _rows() if is_baseline(columns))
    rows = merged(continuations(), ("prompt",))
    found = {}
    for prompt, rounding in baseline["rounding"].items():
        of_length = [row for row in rows if row["prompt"] == prompt]
        plain = [row for row in of_length if row["setting"] == UNCALIBRATED]
        others = [row for row in of_length if row["setting"] != UNCALIBRATED and math.isfinite(float(row["kl_mean"]))]
        found[_tokens(prompt)] = others, plain, rounding, baseline["bytes_per_token"]
    return found


GENERATION: Mapping[str, Callable[[], Sequence[Table]]] = {
    "generate": by_text,
    "generate-gain": gain,
    "generate-goals": goals,
    "generate-shares": shares,
    "generate-planted": planted,
    "generate-repeated": lambda: by_text(REPEATED),
    "generate-no-window": lambda: by_text(NO_WINDOW),
    "generate-no-window-gain": lambda: gain(NO_WINDOW),
    "generate-no-window-goals": no_window_goals,
    "generate-yarn": lambda: by_text(STRETCHED),
    "generate-yarn-goals": stretched_goals,
    "generate-tasks": harder,
    "generate-drafts": accepted,
}
