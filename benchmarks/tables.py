"""The benchmarks' rows as Markdown tables, each cell with its ratio to bf16 (`auto`), for the README and results/.

    python benchmarks/tables.py FOLDER

Reads decode.csv, prefill.csv, throughput.csv, serve.csv and mixed.csv of FOLDER, as far as they are there. Of rows of
the same case the last one counts.
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


def mixed_table(rows: list[dict[str, str]]) -> str:
    """Steps of one kind of GPU: decodes and dtypes down, prompts across; ms of a step / of launching, and the ratio."""
    cells = {(row["requests"], row["context"], row["dtype"], row["prompt"]): row for row in rows}
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    titles = ["none" if prompt == "0" else f"+{prompt}" for prompt in prompts]
    lines = [f"| {rows[0]['gpu']}, decodes | dtype | " + " | ".join(titles) + " |"]
    lines.append("| --- | --- |" + " ---: |" * len(prompts))
    for requests, context, dtype in dict.fromkeys(key[:3] for key in cells):
        line = []
        for prompt in prompts:
            row, base = (cells.get((requests, context, name, prompt)) for name in (dtype, BASELINE))
            if row is None:
                line.append("not run")
                continue
            step = float(row["p50_ms"])
            ratio = f" ({step / float(base['p50_ms']):.2f})" if base and dtype != BASELINE else ""
            line.append(f"{step:.1f} / {float(row['launch_ms']):.0f}{ratio}")
        lines.append(f"| {requests} x {context} | {dtype} | " + " | ".join(line) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the CSV files are")
    folder = parser.parse_args().folder
    found = [table(folder / name, *rest) for name, *rest in TABLES if (folder / name).exists()]
    if (folder / "mixed.csv").exists():
        mixed = read(folder / "mixed.csv")
        for gpu in dict.fromkeys(row["gpu"] for row in mixed):
            found.append(mixed_table([row for row in mixed if row["gpu"] == gpu]))
    if not found:
        parser.error(f"{folder} has none of the files: run benchmarks/decode.py --out there")
    print("\n\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
