"""The benchmarks' rows as Markdown tables, each cell with its ratio to bf16 (`auto`), for the README and results/.

    python benchmarks/tables.py FOLDER

Reads decode.csv, prefill.csv, throughput.csv, serve.csv, mixed.csv, agentic.csv and reasoning.csv of FOLDER, as far as
they are there. Of rows of the same case the last one counts. What arithmetic says stands behind what was measured.
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
    shapes = list(dict.fromkeys(key[:2] for key in cells))
    cases = sorted(dict.fromkeys(key[:3] for key in cells), key=lambda key: shapes.index(key[:2]))
    for requests, context, dtype in cases:
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


AGENTIC = ("hit_rate", "ttft_p50_s", "ttft_p90_s", "turns_s", "output_tokens_s", "recomputed_tokens")


def agentic_table(rows: list[dict[str, str]], offload: float) -> str:
    """Agents and dtypes down, figures across; `offload` GiB of host memory behind the cache."""
    chosen = {
        (row["engine"], row["agents"], row["dtype"]): row for row in rows if float(row["offload_gib"]) == offload
    }  # fmt: skip
    memory = f", {offload:g} GiB of host memory" if offload else ""
    lines = [f"| agents{memory} | dtype | " + " | ".join(AGENTIC) + " |", "| ---: | --- |" + " ---: |" * len(AGENTIC)]
    measured = [(int(agents), dtype) for engine, agents, dtype in chosen if engine == "vllm"]
    for agents, dtype in sorted(measured, key=lambda case: case[0]):
        cells = []
        for column in AGENTIC:
            row, expected = (chosen.get((engine, str(agents), dtype)) for engine in ("vllm", "arithmetic"))
            cells.append(row[column] + (f" ({expected[column]})" if expected else ""))
        lines.append(f"| {agents} | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


REASONING = ("output_tokens_s", "mean_requests", "ended", "preemptions", "first_half_tokens_s", "second_half_tokens_s")


def reasoning_table(rows: list[dict[str, str]]) -> str:
    """Dtypes and ways down, figures across, with the ratio of output tokens a second to bf16."""
    found = {(row["engine"], row["dtype"]): row for row in rows}
    lines = ["| reasoning | dtype | " + " | ".join(REASONING) + " |", "| --- | --- |" + " ---: |" * len(REASONING)]
    for (engine, dtype), row in found.items():
        cells = [row[column] for column in REASONING]
        base = found.get((engine, BASELINE))
        if base and dtype != BASELINE:
            cells[0] += f" ({float(row[REASONING[0]]) / float(base[REASONING[0]]):.2f})"
        lines.append(f"| {engine} | {dtype} | " + " | ".join(cells) + " |")
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
    if (folder / "agentic.csv").exists():
        points = read(folder / "agentic.csv")
        found += [agentic_table(points, offload) for offload in sorted({float(row["offload_gib"]) for row in points})]
    if (folder / "reasoning.csv").exists():
        found.append(reasoning_table(read(folder / "reasoning.csv")))
    if not found:
        parser.error(f"{folder} has none of the files: run benchmarks/decode.py --out there")
    print("\n\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
