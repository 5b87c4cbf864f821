"""Plots of the benchmarks' rows: step time by context length and throughput by concurrency, a line for every dtype; and
quality.png, the README's, of the rows in results/.

    python benchmarks/plot.py FOLDER [--requests N] [--out FOLDER]
    python benchmarks/plot.py --quality [--out FOLDER]

Reads decode.csv and serve.csv of FOLDER, as far as they are there, and writes step_time.png (the steps of N requests;
bars from p20 to p80) and throughput.png. Of rows of the same case the last one counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import quality_rows
import rows
import tables
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def last_rows(file: Path, keys: Iterable[str]) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of `file` by the values of `keys`, in order of first appearance; later rows replace earlier ones."""
    return {tuple(row[key] for key in keys): row for row in rows.read(file)}


def new_axes(title: str, chosen: list[dict[str, str]], x_label: str, y_label: str) -> tuple[Figure, Axes]:
    row, commits = chosen[0], " ".join(dict.fromkeys(row["commit"] for row in chosen))
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.set_prop_cycle(color=[*matplotlib.colormaps["tab20"].colors[::2], *matplotlib.colormaps["tab20"].colors[1::2]])
    axes.set_title(f"{title}\n{row['gpu']}, vLLM {row['vllm']}, PyTorch {row['torch']}, {commits}", fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Figure, axes: Axes, xs: set[int], file: Path) -> None:
    axes.set_xticks(sorted(xs), [str(x) for x in sorted(xs)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)
    print(file)


def dtypes_of(chosen: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(row["dtype"] for row in chosen))


def plot_step_time(source: Path, target: Path, requests: int) -> None:
    """p50 of a step by context. Raises ValueError if no dtype has two contexts of that many requests."""
    chosen = list(last_rows(source, ("dtype", "requests", "context")).values())
    chosen = sorted((row for row in chosen if int(row["requests"]) == requests), key=lambda row: int(row["context"]))
    if len({row["context"] for row in chosen}) < 2:
        raise ValueError(f"{source} has no two contexts of {requests} requests: choose other --requests")
    figure, axes = new_axes(f"Decode step of {requests} requests", chosen, "tokens of context", "ms a step")
    for dtype in dtypes_of(chosen):
        line = [row for row in chosen if row["dtype"] == dtype]
        p20, p50, p80 = ([float(row[name]) for row in line] for name in ("p20_ms", "p50_ms", "p80_ms"))
        below = [max(middle - low, 0) for low, middle in zip(p20, p50, strict=True)]
        above = [max(high - middle, 0) for high, middle in zip(p80, p50, strict=True)]
        axes.errorbar(
            [int(row["context"]) for row in line], p50, yerr=[below, above], marker="o", markersize=4, label=dtype
        )
    save(figure, axes, {int(row["context"]) for row in chosen}, target)


def plot_throughput(source: Path, target: Path) -> None:
    """Output tokens a second of the server by concurrency."""
    chosen = list(last_rows(source, ("dtype", "concurrency")).values())
    chosen.sort(key=lambda row: int(row["concurrency"]))
    shape = f"{chosen[0]['input']} tokens in, {chosen[0]['output']} out"
    figure, axes = new_axes(f"vllm serve, {shape}", chosen, "requests at once", "output tokens a second")
    for dtype in dtypes_of(chosen):
        line = [row for row in chosen if row["dtype"] == dtype]
        axes.plot(
            [int(row["concurrency"]) for row in line], [float(row["output_tokens_s"]) for row in line], marker="o",
            markersize=4, label=dtype,
        )  # fmt: skip
    save(figure, axes, {int(row["concurrency"]) for row in chosen}, target)


def plot_quality(target: Path) -> None:
    """KL divergence against bytes of SmolLM2 by the length of prompts, with the recent window."""
    from packed_kv_quality.plots import Point, pareto_by_length

    rows = [{**row, "setting": setting} for name, setting in quality_rows.BEHIND.items() for row in tables.load(name)]
    found = [row for row in quality_rows.behind("prompt")(rows) if math.isfinite(float(row["kl_mean"]))]
    first = json.loads((tables.RESULTS / next(iter(quality_rows.BEHIND))).read_text())["rows"]
    baseline = next(row for row in first if row["dtype"] == tables.BASELINE)
    panels = {}
    for prompt, rounding in baseline["rounding"].items():
        length = f"{int(prompt):,}"
        calibrated, plain = (
            [Point(row["dtype"], float(row["bytes"].replace(",", "")), float(row["kl_mean"]),
                   float(row["kl_error"] or 0))
             for row in found if row["prompt"] == length and (row["setting"] == quality_rows.UNCALIBRATED) == is_plain]
            for is_plain in (False, True)
        )  # fmt: skip
        ours = [Point("bf16", baseline["bytes_per_token"], 0), *calibrated]
        panels[f"prompts of {length} tokens"] = ours, plain, rounding
    pareto_by_length(panels, "SmolLM2-135M-Instruct, calibrated, window of 64 tokens", target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=tables.RESULTS,
                        help="where decode.csv and serve.csv are (default: %(default)s)")  # fmt: skip
    parser.add_argument("--quality", action="store_true", help="draw quality.png alone")
    parser.add_argument("--requests", type=int, default=32, help="of the step times (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the plots (default: the same)")
    options = parser.parse_args()
    decode, serve = options.folder / "decode.csv", options.folder / "serve.csv"
    out = options.out or options.folder
    if options.quality:
        plot_quality(out / "quality.png")
        return 0
    if not decode.exists() and not serve.exists():
        parser.error(f"{options.folder} has no decode.csv or serve.csv: run benchmarks/decode.py --out there")
    out.mkdir(parents=True, exist_ok=True)
    if decode.exists():
        plot_step_time(decode, out / "step_time.png", options.requests)
    if serve.exists():
        plot_throughput(serve, out / "throughput.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
