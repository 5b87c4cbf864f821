"""Makes the tables of README.md, benchmarks/results/README.md and docs/ (measured.md, tried.md, reliability.md,
quality.md) from the rows in results/.

    python benchmarks/measured.py            # rewrites what stands between the markers
    python benchmarks/measured.py --check    # changes nothing; exit code 1 if a file differs from its rows
    python benchmarks/measured.py --plot     # draws results/quality.png, the README's plot, too; needs matplotlib

A table stands between `<!-- measured: NAME -->` and `<!-- end -->`; `measured_tables.py`, `measured_kernels.py` and
`measured_experiments.py` have a function a NAME. Behind the tables of a marker comes one of their runs: card, versions,
commit and command, taken from the rows and from results/runs.toml.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import generation_tables
from measured_experiments import QUALITY, RELIABILITY
from measured_rows import RESULTS, RUN_COLUMNS, files, run_of
from measured_tables import DOCS, README
from tables import Table

REPO = RESULTS.parents[1]
MARKED = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Run = tuple[str, ...]


def with_runs(tables: Sequence[Table]) -> str:
    """The tables, and behind them their runs. Where there are several, the last column says which ones a line is of."""
    runs: dict[Run, int] = {}
    for table in tables:
        for row in (row for rows in table.rows for row in rows):
            runs.setdefault(run_of(row), len(runs) + 1)
    if not runs:
        return "\n\n".join(table.markdown() for table in tables)
    text = [(_numbered(table, runs) if len(runs) > 1 else table).markdown() for table in tables]
    listed = Table(["run", *RUN_COLUMNS], 1 + len(RUN_COLUMNS))
    for run, index in runs.items():
        listed.add([str(index), *run], [])
    return "\n\n".join([*text, listed.markdown()])


def _numbered(table: Table, runs: Mapping[Run, int]) -> Table:
    lines = [
        [*cells, ", ".join(map(str, sorted({runs[run_of(row)] for row in rows})))]
        for cells, rows in zip(table.lines, table.rows, strict=True)
    ]
    return Table([*table.head, "run"], table.names, lines, table.rows)


def index() -> str:
    """What each file of results/ is, with the commits and commands of its rows."""
    table = Table(["file", "what it is", "commit", "command"], 4)
    for file in files():
        link, what = f"[{file.name}]({file.name})", file.what
        for commit, command in file.commands() or [("", "")]:
            table.add([link, what, commit, f"`{command}`" if command else ""], [])
            link = what = ""
    return table.markdown()


def pages() -> dict[Path, Mapping[str, Callable[[], str]]]:
    """Each page with tables: marker -> its text."""
    return {
        REPO / "README.md": {name: make for name, make in README.items()},
        **{
            REPO / "docs" / page: {name: partial(_made, make) for name, make in tables.items()}
            for page, tables in (
                ("measured.md", DOCS),
                ("reliability.md", RELIABILITY),
                ("quality.md", QUALITY),
            )
        },
        RESULTS / "README.md": {"files": index},
    }


def _made(make: Callable[[], Sequence[Table]]) -> str:
    return with_runs(make())


def filled(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """`text` with its marked tables made again. Raises ValueError if markers and tables are not the same."""
    names = [match[2] for match in MARKED.finditer(text)]
    if sorted(names) != sorted(blocks):
        raise ValueError(f"markers {sorted(names)}, but tables {sorted(blocks)}")
    return MARKED.sub(lambda match: f"{match[1]}\n{blocks[match[2]]()}\n\n{match[3]}", text)


def plot(path: Path) -> None:
    """Draws KL divergence against bytes of SmolLM2 behind prompts of each length, with the recent window."""
    from packed_kv_quality.plots import Point, pareto_by_length

    panels = {}
    for length, (calibrated, plain, rounding, baseline_bytes) in generation_tables.plotted().items():
        points, others = (
            [
                Point(row["dtype"], float(row["bytes"]), float(row["kl_mean"]), float(row["kl_error"] or 0))
                for row in rows
            ]
            for rows in (calibrated, plain)
        )
        panels[f"prompts of {length} tokens"] = [Point("bf16", baseline_bytes, 0), *points], others, rounding
    pareto_by_length(panels, "SmolLM2-135M-Instruct, calibrated, window of 64 tokens", path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table differs from its rows")
    parser.add_argument("--plot", action="store_true", help="draw the README's plot, too")
    options = parser.parse_args()
    check = options.check
    stale = []
    for page, blocks in pages().items():
        text = page.read_text()
        made = filled(text, blocks)
        if made != text:
            stale.append(str(page.relative_to(REPO)))
            if not check:
                page.write_text(made)
    if options.plot:
        plot(RESULTS / "quality.png")
    if stale:
        print(f"{'stale, run benchmarks/measured.py' if check else 'rewritten'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
