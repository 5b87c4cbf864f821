"""The benchmarks' rows as Markdown tables, with ratios to bf16 (`auto`).

    python benchmarks/tables.py FOLDER

Reads decode.csv, prefill.csv, throughput.csv, serve.csv, mixed.csv, agentic.csv and reasoning.csv of FOLDER, as far as
they are there. Of rows of the same case the last one counts. In brackets stand ratios to bf16, and what arithmetic says
of agents. `measured.py` makes the tables of the docs from the same functions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rows import read

BASELINE = "auto"
Row = Mapping[str, str]
Show = Callable[[Row, Row | None], str]
"""The text of a cell, from its row and bf16's row of the same case (None if there is none)."""


@dataclass
class Table:
    """A Markdown table: the first `names` columns name a case, the others are figures. `rows` has, for each line, the
    rows that its figures come from."""

    head: Sequence[str]
    names: int
    lines: list[list[str]] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)

    def add(self, cells: list[str], rows: list[Row]) -> None:
        """Append a line."""
        self.lines.append(cells)
        self.rows.append(rows)

    def markdown(self) -> str:
        """The table's text, without a line feed at its end."""
        rule = "| " + " | ".join(["---"] * self.names + ["---:"] * (len(self.head) - self.names)) + " |"
        return "\n".join([_line(self.head), rule, *map(_line, self.lines)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(cell: str) -> str:
    """A row's figure: thousands with commas, fractions with two digits."""
    return f"{float(cell):.2f}" if "." in cell else f"{int(cell):,}"


def ratio(column: str, form: Callable[[str], str] = number) -> Show:
    """Shows a column, and behind it its ratio to bf16."""

    def show(row: Row, base: Row | None) -> str:
        compared = base is not None and row["dtype"] != BASELINE
        return form(row[column]) + (f" ({float(row[column]) / float(base[column]):.2f})" if base and compared else "")

    return show


def text(column: str, form: str = "", scale: float = 1) -> Show:
    """Shows a column as a number in a format, or as it is; nothing if the row has none."""

    def show(row: Row, _: Row | None) -> str:
        cell = row.get(column) or ""
        return format(float(cell) * scale, form) if form and cell else cell

    return show


def pivot(rows: Sequence[Row], down: Sequence[str], across: Sequence[str], show: Show, head: Sequence[str],
          case: Callable[..., str] = lambda *values: " x ".join(values)) -> Table:  # fmt: skip
    """Cases named by the columns `down` as lines, those named by `across` as columns under `head` and `case`."""
    found = {tuple(row[key] for key in (*down, *across)): row for row in rows}
    columns = list(dict.fromkeys(key[len(down) :] for key in found))
    table = Table([*head, *(case(*column) for column in columns)], len(down))
    for name in dict.fromkeys(key[: len(down)] for key in found):
        base = tuple(BASELINE if column == "dtype" else value for column, value in zip(down, name, strict=True))
        cells, used = list(name), []
        for column in columns:
            row = found.get((*name, *column))
            cells.append("not run" if row is None else show(row, found.get((*base, *column))))
            used += [] if row is None else [row]
        table.add(cells, used)
    return table


def figures(rows: Sequence[Row], down: Mapping[str, str], columns: Mapping[str, Show]) -> Table:
    """Cases named by the columns `down` (column -> title) as lines, and `columns` (title -> what to show of a row)."""
    found = {tuple(row[key] for key in down): row for row in rows}
    table = Table([*down.values(), *columns], len(down))
    for name, row in found.items():
        base = tuple(BASELINE if column == "dtype" else value for column, value in zip(down, name, strict=True))
        table.add([*name, *(show(row, found.get(base)) for show in columns.values())], [row])
    return table


TABLES = (
    ("decode.csv", "p50_ms", "ms", ("requests", "context")),
    ("prefill.csv", "tokens_s", "tokens/s", ("tokens",)),
    ("throughput.csv", "fit", "requests that fit", ("input", "output")),
    ("throughput.csv", "output_tokens_s", "tokens/s, whole wave", ("input", "output")),
    ("throughput.csv", "decode_tokens_s", "tokens/s, while all decode", ("input", "output")),
    ("serve.csv", "output_tokens_s", "tokens/s", ("concurrency",)),
    ("serve.csv", "p50_ttft_ms", "TTFT ms", ("concurrency",)),
    ("serve.csv", "p50_tpot_ms", "TPOT ms", ("concurrency",)),
)
"""(file, column shown, its unit, columns that name a case)"""


def by_case(rows: Sequence[Row], value: str, unit: str, case: Sequence[str]) -> Table:
    """Dtypes down, cases across; without the rows of several ranks, which have a file of their own."""
    rows = [row for row in rows if row.get("ranks", "1") == "1"]
    return pivot(rows, ("dtype",), case, ratio(value), [f"{unit}, {' x '.join(case)}:"])


def mixed(rows: Sequence[Row]) -> Table:
    """Steps of one kind of GPU: decodes and dtypes down, prompts across; ms of a step / of launching, and the ratio."""
    step = ratio("p50_ms", lambda cell: f"{float(cell):.1f}")

    def show(row: Row, base: Row | None) -> str:
        time, *compared = step(row, base).split(" ")
        return " ".join([f"{time} / {float(row['launch_ms']):.0f}", *compared])

    shapes = list(dict.fromkeys((row["requests"], row["context"]) for row in rows))
    ordered = sorted(rows, key=lambda row: shapes.index((row["requests"], row["context"])))
    named = [{**row, "decodes": f"{row['requests']} x {row['context']}"} for row in ordered]
    head = [f"{rows[0]['gpu']}, decodes", "dtype"]
    return pivot(named, ("decodes", "dtype"), ("prompt",), show, head, lambda p: "none" if p == "0" else f"+{p}")


AGENTIC = ("hit_rate", "ttft_p50_s", "ttft_p90_s", "turns_s", "output_tokens_s", "recomputed_tokens")


def agentic(rows: Sequence[Row], offload: float) -> Table:
    """Agents and dtypes down, figures across, arithmetic's in brackets; `offload` GiB of host memory behind it."""
    chosen = [row for row in rows if float(row["offload_gib"]) == offload]
    expected = {(row["agents"], row["dtype"]): row for row in chosen if row["engine"] == "arithmetic"}
    measured = sorted((row for row in chosen if row["engine"] == "vllm"), key=lambda row: int(row["agents"]))
    memory = f", {offload:g} GiB of host memory" if offload else ""

    def column(name: str) -> Show:
        def show(row: Row, _: Row | None) -> str:
            other = expected.get((row["agents"], row["dtype"]))
            return row[name] + (f" ({other[name]})" if other else "")

        return show

    table = figures(measured, {"agents": f"agents{memory}", "dtype": "dtype"}, {name: column(name) for name in AGENTIC})
    for used in table.rows:
        used += [expected[key] for row in used[:1] if (key := (row["agents"], row["dtype"])) in expected]
    return table


REASONING = ("output_tokens_s", "mean_requests", "ended", "preemptions", "first_half_tokens_s", "second_half_tokens_s")


def reasoning(rows: Sequence[Row]) -> Table:
    """Dtypes and ways down, figures across, with the ratio of output tokens a second to bf16."""
    plain: dict[str, Show] = {name: lambda row, _, name=name: row[name] for name in REASONING[1:]}
    columns = {REASONING[0]: ratio(REASONING[0], str), **plain}
    return figures(rows, {"engine": "reasoning", "dtype": "dtype"}, columns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the CSV files are")
    folder = parser.parse_args().folder
    found = [by_case(read(folder / name), *rest) for name, *rest in TABLES if (folder / name).exists()]
    if (folder / "mixed.csv").exists():
        rows = read(folder / "mixed.csv")
        for gpu in dict.fromkeys(row["gpu"] for row in rows):
            found.append(mixed([row for row in rows if row["gpu"] == gpu]))
    if (folder / "agentic.csv").exists():
        points = read(folder / "agentic.csv")
        found += [agentic(points, offload) for offload in sorted({float(row["offload_gib"]) for row in points})]
    if (folder / "reasoning.csv").exists():
        found.append(reasoning(read(folder / "reasoning.csv")))
    if not found:
        parser.error(f"{folder} has none of the files: run benchmarks/decode.py --out there")
    print("\n\n".join(table.markdown() for table in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
