"""The benchmarks' rows as Markdown tables, each cell with its ratio to bf16 (`auto`), for the README and results/.

    python benchmarks/tables.py FOLDER

Reads decode.csv, prefill.csv, throughput.csv and serve.csv of FOLDER, as far as they are there. Of rows of the same
case the last one counts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rows import read

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
BASELINE = "auto"


def table(file: Path, value: str, unit: str, case: tuple[str, ...]) -> str:
    """One table: dtypes down, cases across; without the rows of several ranks, which have a file of their own."""
    rows = [row for row in read(file) if row.get("ranks", "1") == "1"]
    cells = {(row["dtype"], *(row[key] for key in case)): row[value] for row in rows}
    dtypes, cases = dict.fromkeys(key[0] for key in cells), dict.fromkeys(key[1:] for key in cells)
    names = [" x ".join(key) for key in cases]
    lines = [f"| {unit}, {' x '.join(case)}: | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for dtype in dtypes:
        line = []
        for key in cases:
            cell, base = cells.get((dtype, *key)), cells.get((BASELINE, *key))
            if cell is None:
                line.append("not run")
            else:
                number = f"{float(cell):.2f}" if "." in cell else f"{int(cell):,}"
                line.append(number + (f" ({float(cell) / float(base):.2f})" if base and dtype != BASELINE else ""))
        lines.append(f"| {dtype} | " + " | ".join(line) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the CSV files are")
    folder = parser.parse_args().folder
    found = [(folder / name, *rest) for name, *rest in TABLES if (folder / name).exists()]
    if not found:
        parser.error(f"{folder} has none of the files: run benchmarks/decode.py --out there")
    print("\n\n".join(table(*entry) for entry in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
