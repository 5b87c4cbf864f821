"""Makes the tables of README.md and docs/, results/runs.md and planning/measured.json from the rows in results/.

    python benchmarks/measured.py              # rewrites what stands between the markers
    python benchmarks/measured.py --check      # changes nothing; exit code 1 if a file differs from its rows
    python benchmarks/measured.py --of FOLDER  # prints the tables of the CSV files of FOLDER, for a run of one's own

`SPECS` of table_specs.py lists the tables. A table stands between `<!-- measured: NAME -->` and `<!-- end -->`, and a
line below it says on what it was measured; results/runs.md has the commits and commands, from results/runs.toml.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import plan_figures
import tables
from rows import MACHINE, read
from table_rows import Spec, made_on
from table_specs import APART, GENERATED, OLDER, RELEASE, SPECS
from tables import RESULTS, Row, Table, load

REPO = RESULTS.parents[1]
MARKED = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
RUNS = """# Runs

What each file here is, on what it was measured, and with which commit and command; `python benchmarks/measured.py`
makes this page from the rows and from [runs.toml](runs.toml). A command names scripts as its commit has them.
"""


def made_with(rows: Iterable[Row]) -> set[tuple[str, ...]]:
    """Cards, versions and commits of rows."""
    return {tuple(row.get(key, "") for key in MACHINE) for row in rows}


def older(specs: Sequence[Spec], up: str) -> str:
    """The table of tables of a page and of its page in docs/lab that the release did not measure: on what they were,
    and why they are not of it."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for spec in specs:
        rows = spec.rows()
        names = [name for name in dict.fromkeys(row["file"] for row in rows) if not name.startswith(f"{RELEASE}/")]
        if names:
            links = ", ".join(f"[{name}]({up}benchmarks/results/{name})" for name in names)
            lines.setdefault((links, APART[spec.name]), []).extend(rows)
    table = Table(["rows", "measured on", "commits", "why not of the release"], 4)
    for (links, why), rows in lines.items():
        commits = dict.fromkeys(row["commit"] for row in rows)
        table.lines.append([links, made_on(rows), ", ".join(commits), why])
    return table.markdown()


def runs() -> str:
    """The content of results/runs.md: each file with what made it, a line per commit and command."""
    table = Table(["file", "what it is", "measured on", "commit", "command"], 5)
    for name, entry in tables.files().items():
        link, what = f"[{name}]({name})", entry["what"]
        names = sorted(path.name for path in (RESULTS / name).glob("*.json")) if name.endswith("/") else [""]
        rows = [row for one in names if (name + one).endswith((".csv", ".json")) and name != "models.json"
                for row in load(name + one)]  # fmt: skip
        made: dict[tuple[str, str], list[Row]] = {
            (run.get("commit", ""), run.get("command", "")): [] for run in entry.get("runs", ()) if "command" in run
        }
        for row in rows:
            made.setdefault((row["commit"], row.get("command", "")), []).append(row)
        for (commit, command), found in made.items() or [(("", ""), [])]:
            table.lines.append([link, what, made_on(found), commit, f"`{command}`" if command else ""])
            link = what = ""
    return f"{RUNS}\n{table.markdown()}\n"


def made() -> dict[Path, str]:
    """Each file with what it should have. Raises ValueError if a page's markers and its tables are not the same."""
    pages = {RESULTS / "runs.md": runs(), plan_figures.FILE: plan_figures.content()}
    for name in {**SPECS, **GENERATED}:
        text, specs = (REPO / name).read_text(), SPECS.get(name, ())
        up = "../" * name.count("/")
        blocks = {spec.name: spec.block(up) for spec in specs}
        blocks |= {marker: make(up) for marker, make in GENERATED.get(name, {}).items()}
        if f"<!-- measured: {OLDER} -->" in text:
            blocks[OLDER] = older([*SPECS.get(name.replace("/lab/", "/"), ()), *specs], up)
        markers = [match[2] for match in MARKED.finditer(text)]
        if sorted(markers) != sorted(blocks):
            raise ValueError(f"{name}: markers {sorted(markers)}, but tables {sorted(blocks)}")
        for marker, block in blocks.items():
            around = re.compile(rf"(<!-- measured: {marker} -->\n).*?(<!-- end -->)", re.DOTALL)
            text = around.sub(lambda match, block=block: f"{match[1]}\n{block}\n\n{match[2]}", text)
        pages[REPO / name] = text
    return pages


def printed(folder: Path) -> Iterable[str]:
    """The tables of the CSV files of a folder, a marker's once for each file name."""
    seen = set()
    for spec in (spec for specs in SPECS.values() for spec in specs):
        names = [spec.files] if isinstance(spec.files, str) else list(spec.files)
        file = folder / Path(names[0]).name
        if spec.where or len(names) > 1 or file in seen or not file.exists():
            continue
        seen.add(file)
        yield spec.table(spec.chosen(read(file))).markdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table differs from its rows")
    parser.add_argument("--of", type=Path, metavar="FOLDER", help="print the tables of this folder's CSV files")
    options = parser.parse_args()
    if options.of:
        if not (found := list(printed(options.of))):
            parser.error(f"{options.of} has none of the files: run benchmarks/decode.py --out there")
        print("\n\n".join(found))
        return 0
    pages = made()
    stale = [page for page, content in pages.items() if not page.exists() or page.read_text() != content]
    for page in () if options.check else stale:
        page.write_text(pages[page])
    if stale:
        names = ", ".join(sorted(str(page.relative_to(REPO)) for page in stale))
        print(f"{'stale, run benchmarks/measured.py' if options.check else 'rewritten'}: {names}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
