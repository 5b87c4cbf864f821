"""Rows of the tables of measured.py: `Spec` takes them from results/; functions give them the columns of a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tables
from packed_kv_quality.generation_report import accepted_ratio, tokens_a_step
from tables import (
    BASE,
    BASELINE,
    RESULTS,
    Row,
    Show,
    Table,
    figures,
    in_order,
    load,
    pivot,
    ratio,
)

CASE = ("requests", "context")
STEP = ratio("p50_ms")
OWN_WIDTHS, KEYS_ALONE = "the dtype's", "K"
MEANS = {"dtype": "ms", "means": "means of keys"}
CARDS = {"1": "one", "2": "two", "4": "four"}


@dataclass(frozen=True)
class Spec:
    """A table: its marker, and the files of its rows (with a `setting` each, if they are several).

    down: columns that name a line -> their titles. shown: what a cell shows, or title -> what its column shows.
    across: columns that name a column; without them, `shown` has titles. where: values that rows have in a column.
    prepare: what makes rows with other columns of those of the files. base: of which row ratios are.
    """

    name: str
    files: str | Mapping[str, str]
    down: Mapping[str, str]
    shown: Show | Mapping[str, Show]
    across: Sequence[str] = ()
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prepare: Callable[[list[Row]], Sequence[Row]] = in_order
    base: Mapping[str, str] = field(default_factory=lambda: BASE)

    def rows(self) -> Sequence[Row]:
        """The rows of the table, of the files in results/."""
        files = {self.files: ""} if isinstance(self.files, str) else self.files
        named = [{**row, "setting": setting} for name, setting in files.items() for row in load(name)]
        return self.chosen(tables.without_others(named))

    def chosen(self, rows: list[Row]) -> Sequence[Row]:
        """Return the rows that the table has."""
        return self.prepare([row for row in rows if all(row[key] in found for key, found in self.where.items())])

    def table(self, rows: Sequence[Row]) -> Table:
        """The table of rows."""
        if isinstance(self.shown, Mapping):
            return figures(rows, self.down, self.shown, self.base)
        return pivot(rows, self.down, self.across, self.shown, self.base)

    def block(self, up: str) -> str:
        """The text between the markers: the table and a line that says on what it was measured. `up`: from the page to
        the repository."""
        rows = self.rows()
        found = dict.fromkeys(row["file"] for row in rows)
        links = ", ".join(f"[{Path(name).name}]({up}benchmarks/results/{name})" for name in found)
        runs = f"[commits and commands]({up}benchmarks/results/runs.md)"
        return f"{self.table(rows).markdown()}\n\nMeasured on {made_on(rows)}. Rows: {links}; {runs}."


def made_on(rows: Iterable[Row]) -> str:
    """Card (or processor) and versions of rows."""
    found = []
    for row in rows:
        gpu = row.get("gpu", "").replace("none", "")
        number = "two" if "decode_ranks" in row else CARDS.get(row.get("ranks") or "1", row.get("ranks"))
        card = f"{number} {gpu}" if gpu and " x " not in gpu else gpu or row.get("cpu") or "a CPU"
        versions = [f"{name} {row[key].split('+')[0]}" for key, name in (("vllm", "vLLM"), ("torch", "PyTorch"))
                    if row.get(key)]  # fmt: skip
        found.append(", ".join([card, *versions]))
    return "; ".join(dict.fromkeys(found))


def last_options(rows: list[Row]) -> list[Row]:
    """Rows with `options`: those of the server beyond the ones that all have."""
    common = min((row["server_options"] for row in rows if "server_options" in row), key=len)
    own = [row.get("server_options", f"{common} the engine alone").removeprefix(common).strip() for row in rows]
    return in_order({**row, "options": options} for row, options in zip(rows, own, strict=True))


def in_default_mode(rows: list[Row]) -> list[Row]:
    """Rows of mixed.py in vLLM's default mode of CUDA graphs, of prompts that stand behind nothing."""
    return in_order(row for row in rows if (row.get("mode", "default"), row.get("prefix", "0")) == ("default", "0"))


FULL = {"dtype": "bf16, FULL"}
"""The base of rows in modes of CUDA graphs: bf16 in the mode that serves mixed steps best."""


def in_modes(rows: list[Row]) -> list[Row]:
    """Rows whose `dtype` has the mode of the CUDA graphs, where it is not vLLM's default."""
    named = [{**row, "name": "bf16" if row["dtype"] == BASELINE else row["dtype"]} for row in in_order(rows)]
    return [
        {**row, "dtype": row["name"] if row["mode"] == "default" else f"{row['name']}, {row['mode']}"} for row in named
    ]


def in_rounds(rows: list[Row]) -> list[Row]:
    """A row per case of mixed.py, whose `p50_ms` is the median of its rounds; `least` and `most` of them."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in in_modes(rows):
        found.setdefault(tuple(row[key] for key in ("dtype", *CASE, "prompt", "prefix")), []).append(row)
    merged = []
    for of_case in found.values():
        last, times = of_case[-1], [float(row["p50_ms"]) for row in of_case]
        behind = f" behind {int(last['prefix']):,}" if last["prefix"] != "0" else ""
        numbers = {"p50_ms": statistics.median(times), "least": min(times), "most": max(times)}
        merged.append(
            {**last, "prompt": last["prompt"] + behind, **{name: f"{number:.3f}" for name, number in numbers.items()}}
        )
    return merged


def with_columns(rows: list[Row]) -> list[Row]:
    """Name the columns, query heads per KV head times new tokens, and the kernels of a commit that had fewer numbers of
    them."""
    named = {"d3e1689a": "cuda, of 32 and 64"}
    return [
        {**row, "columns": str(int(row["group"]) * int(row["query_tokens"])),
         "kernel": named.get(row["commit"], row["kernel"])} for row in rows
    ]  # fmt: skip


def with_widths(rows: list[Row]) -> list[Row]:
    """Rows with `widths`: the bits of K's groups, in words; the last one of a case counts."""
    return in_order({**row, "widths": ", ".join(row["key_bits"].split()) or OWN_WIDTHS} for row in rows)


def with_pages(rows: list[Row]) -> list[Row]:
    """Rows with `pages`: what a calibration file changed in them, in words."""
    widths = {"64": "5, 3", "128": "5, 4, 4, 3"}
    assert all(row["key_bits"] in ("", widths[row["head_dim"]].replace(",", "")) for row in rows)
    return in_order(
        {
            **row,
            "pages": "K and V less their means" if row["means"] else "groups of 5 bits" if row["key_bits"] else "tq4",
        }
        for row in rows
    )


def with_means(rows: list[Row]) -> list[Row]:
    """Rows with `means` in words, of the CUDA kernel."""
    named = {"blocks": KEYS_ALONE, "values": "K and V"}
    return in_order({**row, "means": named[row["means"]]} for row in rows if row["kernel"] == "cuda")


def spread(row: Row, base: Row | None) -> str:
    """Show the median of rounds, its ratio, and the least and the most of them."""
    return f"{STEP(row, base)}, {float(row['least']):.2f} to {float(row['most']):.2f}"


def kernels(row: Row, base: Row | None) -> str:
    """Show the time of a step's kernels, their number, the CUDA graph, and the rest of a period where it is one."""
    rest = f", {float(row['gap_ms']):.2f} between" if row["gap_ms"] else ""
    return f"{ratio('kernel_ms')(row, base)}, {row['kernels']} in {row['graph']}{rest}"


def with_cpu_time(rows: list[Row]) -> list[Row]:
    """Rows that have CPU time beside the clock's."""
    return [row for row in rows if row["cpu_ms"]]


def by_kernel(rows: list[Row]) -> list[Row]:
    """Rows by columns; where FlashAttention 3 read pages of bf16 or fp8, this is the dtype."""
    named = [{**row, "dtype": row["dtype"] if row["kernel"] == "cuda" else f"FA3, {row['kernel']}"} for row in rows]
    return sorted(in_order(named), key=lambda row: int(row["group"]) * int(row["query_tokens"]))


def averaged(rows: list[Row]) -> list[Row]:
    """A row per dtype, means and shape, whose `p50_ms` is the mean of the medians of its runs."""
    medians: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        medians.setdefault(tuple(row[key] for key in (*MEANS, *CASE)), []).append(float(row["p50_ms"]))
    means = {case: f"{statistics.fmean(found):.3f}" for case, found in medians.items()}
    return in_order({**row, "p50_ms": means[tuple(row[key] for key in (*MEANS, *CASE))]} for row in rows)


CODINGS = {"plain": "bf16 (not coded)", "fp8": "fp8: e4m3, scale 1", "nvfp4": "NVFP4-like", "8": "RoPE at 8 bits",
           "8e4m3": "RoPE in e4m3, one scale per token", "4": "RoPE at 4 bits"}  # fmt: skip


def codings(rows: list[Row]) -> list[Row]:
    """Rows of quality/latent_quality.py with `coding` in words and `window`; of other codings than ours one each."""
    named = []
    for row in rows:
        coding, _, rope = row["coding"].partition("-rope")
        dtype, _, window = coding.partition("-window")
        if dtype not in CODINGS or row["calibrated"] == "yes":
            title = CODINGS.get(dtype, f"`{dtype}`") + (f", {CODINGS[rope]}" if rope else "")
            named.append({**row, "coding": title, "window": window or ("" if dtype in CODINGS else "0")})
    return named


SPARSE = {BASELINE: BASELINE, "rounded": "bf16, attention's outputs rounded", "dense": "bf16, all tokens read",
          "fp8_ds_mla": "`fp8_ds_mla`"}  # fmt: skip
"""Codings of quality/sparse_quality.py other than ours, in words."""


def sparse_codings(rows: list[Row]) -> list[Row]:
    """Rows of quality/sparse_quality.py with `coding` in words, the others' before ours."""

    def place(row: Row) -> tuple[int, str]:
        dtype, _, rope = row["coding"].partition("-rope")
        order = [*SPARSE, *tables.ORDER]
        return order.index(dtype), rope

    named = []
    for row in sorted(rows, key=place):
        dtype, _, rope = row["coding"].partition("-rope")
        title = SPARSE.get(dtype, f"`{dtype}`") + (f", {CODINGS[rope]}" if rope else "")
        named.append({**row, "coding": title, "calibrated": "" if dtype in SPARSE else row["calibrated"]})
    return named


def drafted(rows: list[Row]) -> list[Row]:
    """A row per dtype: `tokens` per step with n-gram drafts, and `share`, the ratio to bf16's with its error."""
    found = {row["dtype"]: row["acceptance"] for row in json.loads((RESULTS / rows[0]["file"]).read_text())["rows"]}
    shares = {dtype: accepted_ratio(of, found[BASELINE]) for dtype, of in found.items() if dtype != BASELINE}
    shown = {dtype: "{:.4f} ± {:.4f}".format(*share) for dtype, share in shares.items()}
    tokens = {dtype: f"{tokens_a_step(of):.3f}" for dtype, of in found.items()}
    return [{**row, "tokens": tokens[row["dtype"]], "share": shown.get(row["dtype"], "1")} for row in in_order(rows)]
