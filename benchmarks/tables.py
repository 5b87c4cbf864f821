"""Rows of the benchmarks, and Markdown tables of them; `measured.py` says which tables there are.

A row is a mapping of text, from a CSV file or a JSON of the quality harness, with `file`, `commit` and `command`. Of
rows of the same case the last one counts.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rows import read

BASELINE, REFERENCE = "auto", "fp8"
"""bf16, and vLLM's dtype with which ours are compared."""
ORDER = ("auto", "fp8", "fp8_e5m2", "tq4", "isoquant4", "planarquant4", "turboquant35", "tq3", "isoquant3",
         "planarquant3", "turboquant25")  # fmt: skip
"""Order of dtypes in a table; others follow in the order of their rows."""
RESULTS = Path(__file__).resolve().parent / "results"
NOT_FINITE = "not finite"
"""Stands for a figure that an engine gave as nan."""
Row = Mapping[str, str]
Show = Callable[[Row, Row | None], str]
"""The text of a cell, from its row and the base's row of the same case (None if there is none), by default bf16's."""


@dataclass
class Table:
    """A Markdown table: the first `names` columns name a case, the others are figures."""

    head: Sequence[str]
    names: int
    lines: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table's text, without a line feed at its end."""
        rule = ["---"] * self.names + ["---:"] * (len(self.head) - self.names)
        lines = [self.head, rule, *(["bf16" if cell == BASELINE else cell for cell in line] for line in self.lines)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(cell: str) -> str:
    """A row's figure: thousands with commas, fractions with two digits."""
    return f"{float(cell):.2f}" if "." in cell else f"{int(cell):,}"


def rounded(cell: str) -> str:
    """A row's figure as a whole number, thousands with commas."""
    return f"{float(cell):,.0f}"


def ratio(column: str, form: Callable[[str], str] = number, digits: int = 2) -> Show:
    """Shows a column, and after it in brackets its ratio to the base's with so many digits. A time that is not there is
    one of a shape that does not fit the KV cache."""

    def show(row: Row, base: Row | None) -> str:
        if not row[column]:
            return "does not fit"
        if not math.isfinite(float(row[column])) or not base or base is row or not base[column]:
            return form(row[column])
        return f"{form(row[column])} ({float(row[column]) / float(base[column]):.{digits}f})"

    return show


def text(column: str, form: str = "", scale: float = 1) -> Show:
    """Shows a column as a number in a format, or as it is; nothing if the row has none."""

    def show(row: Row, _: Row | None) -> str:
        cell = row.get(column) or ""
        return format(float(cell) * scale, form) if form and cell else cell

    return show


BASE = {"dtype": BASELINE}
"""Values that a row's base has in these columns; in the others of a case it has the row's own."""


def is_number(cell: str) -> bool:
    """Return True if a cell is a number, such as 16 or 28.0."""
    return cell.replace(".", "", 1).isdigit()


def _grouped(names: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Names of lines, each once, sorted by their parts in turn: numbers by size, others as they appear."""
    once = list(dict.fromkeys(names))
    seen = [list(dict.fromkeys(parts)) for parts in zip(*once, strict=True)]
    seen = [sorted(parts, key=float) if all(map(is_number, parts)) else parts for parts in seen]
    return sorted(once, key=lambda name: [parts.index(part) for part, parts in zip(name, seen, strict=True)])


def pivot(rows: Sequence[Row], down: Mapping[str, str], across: Sequence[str], show: Show,
          base: Mapping[str, str] = BASE) -> Table:  # fmt: skip
    """Cases of the columns `down` (column -> title) as lines, those of `across` as columns."""
    found = {tuple(row[key] for key in (*down, *across)): row for row in rows}
    columns = list(dict.fromkeys(key[len(down) :] for key in found))
    table = Table([*down.values(), *(" x ".join(column) for column in columns)], len(down))
    for name in _grouped(key[: len(down)] for key in found):
        of_base = tuple(base.get(key, value) for key, value in zip(down, name, strict=True))
        cells = [
            show(row, found.get((*of_base, *column))) if (row := found.get((*name, *column))) else "not run"
            for column in columns
        ]
        table.lines.append([*name, *cells])
    return table


def figures(rows: Sequence[Row], down: Mapping[str, str], columns: Mapping[str, Show],
            base: Mapping[str, str] = BASE) -> Table:  # fmt: skip
    """Cases of the columns `down` (column -> title) as lines, and `columns` (title -> what to show of a row)."""
    found = {tuple(row[key] for key in down): row for row in rows}
    table = Table([*down.values(), *columns], len(down))
    for name in _grouped(found):
        row = found[name]
        of_base = found.get(tuple(base.get(key, value) for key, value in zip(down, name, strict=True)))
        table.lines.append([*name, *(show(row, of_base) for show in columns.values())])
    return table


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows by dtype in `ORDER`."""
    return sorted(rows, key=lambda row: ORDER.index(row["dtype"]) if row["dtype"] in ORDER else len(ORDER))


def without_others(rows: Sequence[Row]) -> list[Row]:
    """Rows without those of isoquant and planarquant where tq4 was measured, too: docs/choose.md has them."""
    own = [row.get("dtype") or row.get("coding", "") for row in rows]
    if not any(name.startswith("tq4") for name in own):
        return list(rows)
    return [row for row, name in zip(rows, own, strict=True)
            if not name.startswith(("isoquant", "planarquant")) or row.get("kernel") in ("bf16", "fp8")
            or "kills" in row]  # fmt: skip


@cache
def files(results: Path = RESULTS) -> dict[str, Mapping]:
    """The entries of runs.toml by name.

    An entry has `what` and `runs`: each a commit, a command, and `where`, the values of its rows in some columns. In a
    folder (its name ends in `/`) the files say commit and command themselves.
    """
    return {entry["name"]: entry for entry in tomllib.loads((results / "runs.toml").read_text())["file"]}


def run_of(name: str, row: Row) -> Mapping:
    """The first run of a file that fits a row (of any commit if rows have none). Raises KeyError if none does."""
    for run in files()[name].get("runs", ()):
        same = run["commit"] == row.get("commit", run["commit"])
        if same and all(row[column] in values for column, values in run.get("where", {}).items()):
            return run
    raise KeyError(f"results/runs.toml has no run for {name} at {row.get('commit')!r}")


def load(name: str) -> list[Row]:
    """The rows of a file of results/: a CSV file, a JSON of `packed-kv-quality`, or another report, which is a row."""
    path = RESULTS / name
    if path.suffix == ".csv":
        runs = files()[name].get("runs")
        return [{**row, **(run_of(name, row) if runs else {}), "file": name} for row in read(path)]
    found = json.loads(path.read_text())
    if not isinstance(found.get("rows"), list):
        return [{**{key: str(value) for key, value in found.items()}, **run_of(name, {}), "file": name}]
    return list(_generated(found, name) if "continuations" in found["rows"][0] else _harness(found, name))


def made_by(name: str, run: Mapping) -> dict[str, str]:
    """The columns that say what made the rows of a JSON of the quality harness, from its `run`."""
    made_with = run["made_with"]
    device = made_with["device"]
    folder = files().get(f"{name.split('/')[0]}/", {})
    return {
        "file": name, "gpu": "" if device == "cpu" else device, "vllm": made_with["vllm"], "torch": made_with["torch"],
        "commit": run["commit"] or folder["runs"][0]["commit"], "command": run["command"],
    }  # fmt: skip


def _harness(found: Mapping, name: str) -> Iterator[Row]:
    """A row per dtype of a teacher-forced text; `kl_share` is the ratio to fp8's storage in the same run."""
    run = found["run"]
    storage = next((row["scores"]["kl_mean"] for row in found["rows"] if row["dtype"] == "fp8-storage"), None)
    for row in found["rows"]:
        # vLLM's turboquant dtypes keep some layers in bf16, and the harness gave every layer the first one's bytes
        mixed = row["dtype"].startswith("turboquant_")
        token = run["settings"]["kv_cache_memory"] / row["kv_tokens"] if mixed else row["bytes_per_token"]
        facts = sum(cell["facts"] for cell in row["recall"])
        answers = sum(cell["facts"] * cell.get("log_prob", 0) for cell in row["recall"])
        yield {
            "dtype": row["dtype"], "bytes": f"{token:,.0f}", "window": f"{row.get('bytes_per_request', 0) / 1024:,.0f}",
            **{key: str(value) for key, value in row["scores"].items()},
            "kl_error": str(row["scores"].get("kl_error") or ""),
            "kl_share": str(row["scores"]["kl_mean"] / storage) if storage else "",
            "recalled": str(sum(cell["recalled"] for cell in row["recall"]) / facts) if facts else "",
            "answer": str(answers / facts) if facts else "",
            **made_by(name, run),
        }  # fmt: skip


def _generated(found: Mapping, name: str) -> Iterator[Row]:
    """A row per dtype, text and length of prompts of a JSON of `packed-kv-quality generate`."""
    for row in found["rows"]:
        for part in row["continuations"]:
            yield {
                "dtype": row["dtype"], "bytes": f"{row['bytes_per_token']:,.0f}", "text": part["text"],
                "prompt": f"{part['prompt']:,}", "kl_mean": str(part["kl_mean"]), "kl_tail": str(part["kl_p999"]),
                "kl_error": str(part["kl_error"] or ""), "windows": json.dumps(part["kl_windows"]),
                **made_by(name, found["run"]),
            }  # fmt: skip


def merged(rows: Sequence[Row], kept: Sequence[str]) -> list[Row]:
    """The mean of the rows that are alike in `kept`, with its standard error and all windows; the largest tail."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in kept), []).append(row)
    return [
        {**found[0], "kl_mean": str(statistics.fmean(float(row["kl_mean"]) for row in found)),
         "kl_error": str(math.hypot(*(float(row["kl_error"]) for row in found)) / len(found))
         if all(row["kl_error"] for row in found) else "",
         "kl_tail": str(max(float(row["kl_tail"]) for row in found)) if "kl_tail" in found[0] else "",
         "windows": json.dumps([kl for row in found for kl in json.loads(row["windows"])])}
        for found in groups.values()
    ]  # fmt: skip


def shared(rows: Sequence[Row], places: Sequence[str]) -> list[Row]:
    """The rows with `kl_share`, the ratio to the reference's of the same `places` ("" if it has none there)."""
    found = {tuple(row[at] for at in places): float(row["kl_mean"]) for row in rows if row["dtype"] == REFERENCE}
    bases = [found.get(tuple(row[at] for at in places)) if row["dtype"] != REFERENCE else None for row in rows]
    return [
        {**row, "kl_share": str(float(row["kl_mean"]) / base) if base else ""}
        for row, base in zip(rows, bases, strict=True)
    ]


def kl(row: Row, _: Row | None = None) -> str:
    """Mean KL, its standard error, and in brackets the ratio to the reference's."""
    if not math.isfinite(float(row["kl_mean"])):
        return NOT_FINITE
    error = f" ± {float(row['kl_error']):.4f}" if row["kl_error"] else ""
    share = float(row["kl_share"] or 0)
    compared = f" ({share:.{1 if share >= 10 else 2}f})" if share else ""
    return f"{float(row['kl_mean']):.4f}{error}{compared}"


def kl_and_tail(row: Row, _: Row | None = None) -> str:
    """Mean KL as `kl` shows it, and behind it the 99.9th percentile."""
    return f"{kl(row)}; {thousandths(row['kl_tail'])}"


def thousandths(cell: str) -> str:
    """A percentile of KL."""
    return f"{float(cell):.3f}" if math.isfinite(float(cell)) else NOT_FINITE


def ratio_of_means(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The ratio of two means of pairs, with its standard error by linearization (0 of one pair)."""
    found = statistics.fmean(ours) / statistics.fmean(others)
    if len(ours) < 2:
        return found, 0.0
    left = [one - found * other for one, other in zip(ours, others, strict=True)]
    return found, statistics.stdev(left) / math.sqrt(len(left)) / statistics.fmean(others)
