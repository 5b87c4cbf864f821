"""Makes the tables of README.md and docs/, results/runs.md and planning/measured.json from the rows in results/.

    python benchmarks/measured.py              # rewrites what stands between the markers
    python benchmarks/measured.py --check      # changes nothing; exit code 1 if a file differs from its rows
    python benchmarks/measured.py --of FOLDER  # prints the tables of the CSV files of FOLDER, for a run of one's own

`SPECS` lists the tables. One stands between `<!-- measured: NAME -->` and `<!-- end -->`, with a line below that says
on what it was measured; results/runs.md has the commits and commands, from results/runs.toml.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cards
import plan_figures
import tables
from packed_kv_quality.generation_report import accepted_ratio, tokens_a_step
from quality_rows import (
    BEHIND,
    CALIBRATED,
    FOLDER,
    H200,
    TEXT,
    UNCALIBRATED,
    behind,
    beside_others,
    forced,
    gains,
    tasks,
)
from rows import MACHINE, read
from tables import (
    BASE,
    BASELINE,
    RESULTS,
    Row,
    Show,
    Table,
    figures,
    in_order,
    kl,
    kl_and_tail,
    load,
    pivot,
    ratio,
    text,
)

REPO = RESULTS.parents[1]
MARKED = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CASE = ("requests", "context")
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


RELEASE = "release"
"""Folder of results/ with what benchmarks/release.py measured at one commit."""
STEP, TOKENS_S, MICROSECONDS = ratio("p50_ms"), ratio("tokens_s"), text("attention_p50_us")
STEPS = {"dtype": "ms, requests x context:"}


def with_kernels(row: Row, base: Row | None) -> str:
    """Show a step, and for how long the GPU is busy in it, if the row says that."""
    return STEP(row, base) + (f", GPU {ratio('kernels_ms')(row, base)}" if row.get("kernels_ms") else "")


LONG = {"requests": ("32", "128", "8"), "context": ("8192", "2048", "32768")}
OURS = ("tq4", "turboquant35", "turboquant25")
SHOWN = ("auto", "fp8", "tq4", "turboquant25")
OTHERS = ("int4_per_token_head",)
ROPE_BITS = {"dtype": "ms, requests x context:", "rope_bits": "bits of RoPE"}
FP8_CACHE = {"dtype": "fp8", "rope_bits": "16"}
DRAFTS = {"drafts": "drafts", "dtype": "ms"}
SERVED = {"output tokens/s": ratio("output_tokens_s", tables.rounded), "TTFT, ms": ratio("p50_ttft_ms", tables.rounded),
          "TPOT, ms": ratio("p50_tpot_ms", lambda cell: f"{float(cell):.1f}")}  # fmt: skip
HITS = {"hit rate": text("hit_rate"), "TTFT p50, s": text("p50_ttft_ms", ".2f", 1e-3),
        "TPOT p50, ms": text("p50_tpot_ms", ".2f"), "output tokens/s": text("output_tokens_s", ".0f")}  # fmt: skip
WAVE = {"requests that fit": ratio("fit"), "output tokens/s while all decode": ratio("decode_tokens_s"),
        "prompts included": ratio("output_tokens_s"), "TTFT p50, s": text("p50_ttft_ms", ".1f", 1e-3),
        "TTFT p99, s": text("p99_ttft_ms", ".1f", 1e-3)}  # fmt: skip
OPTIONS = {"dtype": "dtype", "options": "options"}
ON_THREADS = {"what": "what", "threads": "threads", "dtype": "dtype"}
CPU_TIMES = {"ms": text("ms"), "prompt tokens/s": text("tokens_a_second"), "ratio": text("ratio", ".2f"),
             "CPU ms": text("cpu_ms"), "ratio of CPU time": text("cpu_ratio", ".2f")}  # fmt: skip
MIXED = {"requests": "requests", "context": "context", "dtype": "ms, tokens of the prompt:"}
STARTED = {"s to the first token": "first_token_s", "profiling run": "profile_s", "warm-up": "warm_up_s",
           "kernels compiled": "kernels_compiled", "their s, summed": "compile_s"}  # fmt: skip
PEERS = {
    "bytes per prompt": text("bytes", ",.0f"),
    "ms to read": text("transfer_ms", ".1f"),
    "GB/s": text("GB_s", ".1f"),
}
KERNEL = {"dtype": "µs", "kernel": "kernel"}
COLUMNS = {"group": "query heads", "query_tokens": "new tokens", "dtype": "µs"}
LATENT = {"heads": "heads", "queries": "query tokens", "spread": "spread of lengths", "rope_bits": "bits of RoPE",
          "recent": "recent window", "cache": "µs"}  # fmt: skip
SOAKED = {"clients": "clients", "seconds": "seconds", "requests": "requests", "tokens": "tokens", "errors": "errors",
          "preemptions": "preemptions", "samples": "samples", "of these, other tokens": "samples_parted",
          "answers from disk": "answers_from_disk", "wrong ones": "answers_from_disk_wrong",
          "growth of host memory, MiB": "host_growth_mib", "files": "files"}  # fmt: skip
CODED = {"bytes": text("bytes"), "KL (of fp8's)": ratio("kl", lambda cell: f"{float(cell):.5f}"),
         "±": text("kl_error", ".5f"), "perplexity": text("perplexity")}  # fmt: skip
PICKED = {
    "bytes": text("bytes"), "KL (of fp8_ds_mla's)": ratio("kl", lambda cell: f"{float(cell):.5f}"),
    "±": text("kl_error", ".5f"), "KL, bf16's picks": text("kl_same_picks", ".5f"), "top-1": text("top1", ".2%"),
    "perplexity": text("perplexity", ".2f"), "picks that differ": text("picks_differ", ".2%"),
    "by layer, %": text("picks_by_layer"), "attention in picks": text("mass", ".1%"),
}  # fmt: skip
PICKS = {title: PICKED[title] for title in ("KL (of fp8_ds_mla's)", "KL, bf16's picks", "picks that differ",
         "by layer, %")}  # fmt: skip
KL = {"dtype": "dtype", "bytes": "KV bytes/token", "setting": "setting"}
AFTER = {"dtype": "mean KL, nats, prompt tokens:", "bytes": "KV bytes/token"}
BOTH = {"dtype": "mean KL; 99.9th percentile, nats, prompt tokens:", "bytes": "KV bytes/token"}
TAIL = {"dtype": "99.9th percentile, nats, prompt tokens:", "bytes": "KV bytes/token"}
TAILS = ratio("kl_tail", lambda cell: f"{float(cell):.3f}")
AGENTS = {"output tokens/s": text("output_tokens_s", ",.0f"), "hit rate": text("hit_rate", ".2f"),
          "TTFT p50, s": text("p50_ttft_ms", ".2f", 1e-3), "TTFT p99, s": text("p99_ttft_ms", ".2f", 1e-3),
          "between outputs p50, ms": text("p50_itl_ms", ".1f"), "p99, ms": text("p99_itl_ms", ".0f"),
          "steps in whole graphs": text("whole", ".1%"), "longer than graphs": text("eager", ".1%")}  # fmt: skip
WIDTHS = {"dtype": "µs, bits of K's groups:", "kernel": "kernel", "requests": "requests", "context": "context",
          "query_tokens": "new tokens", "recent": "window"}  # fmt: skip
OWN_WIDTHS = "the dtype's"
KEYS_ALONE = "K"
OF_FP8 = {"dtype": "fp8", "bytes": "11,520"}
CODES = {"dtype": "K and V", "bytes": "KV bytes/token", "window": "window"}
TASKS = {"task": "task", "prompt": "prompt", "kept": "bf16 solves", "setting": "setting"}


ROWS = {"coding": "coding", "calibrated": "file"}
FP8_ROWS = {"coding": SPARSE["fp8_ds_mla"], "calibrated": ""}
LATENTS = {"coding": "coding", "window": "window", "calibrated": "file"}
FP8 = {"coding": CODINGS["fp8"], "window": "", "calibrated": "yes"}
RUNS = """# Runs

What each file here is, on what it was measured, and with which commit and command; `python benchmarks/measured.py`
makes this page from the rows and from [runs.toml](runs.toml). A command names scripts as its commit has them.
"""


def fine_kl(row: Row, _: Row | None) -> str:
    """Show mean KL with five digits, its standard error if there is one, and in brackets the ratio to fp8's."""
    error = f" ± {float(row['kl_error']):.5f}" if row["kl_error"] else ""
    return f"{float(row['kl_mean']):.5f}{error}" + (f" ({float(row['kl_share']):.2f})" if row["kl_share"] else "")


def shows(names: Iterable[str] | Mapping[str, str]) -> dict[str, Show]:
    """Columns as they are: their titles (by default their names) -> what to show."""
    titled = names if isinstance(names, Mapping) else {name.replace("_", " "): name for name in names}
    return {title: text(name) for title, name in titled.items()}


SERVER = "release/serve.csv"
SPECS: Mapping[str, Sequence[Spec]] = {
    "README.md": (
        Spec("throughput-summary", "release/throughput.csv", {"dtype": "20 GB of KV cache"}, WAVE, where={"dtype":
             SHOWN}),
        Spec("speed", "release/decode.csv", STEPS, STEP, CASE, LONG | {"dtype": SHOWN}),
        Spec("quality", {f"{FOLDER}/calibrated.json": CALIBRATED}, BOTH, kl_and_tail, ("prompt",),
             prepare=behind("prompt", dtypes=(*OURS, "fp8"))),
    ),
    "docs/speed.md": (
        Spec("steps", "release/decode.csv", STEPS, STEP, CASE, {"dtype": ("auto", "fp8", "tq4",
             "turboquant35", "tq3", "turboquant25")}),
        Spec("steps-h100", "release/h100/decode.csv", STEPS, STEP, CASE),
        Spec("prefill", "release/prefill.csv", {"dtype": "tokens/s, tokens:"}, TOKENS_S, ("tokens",)),
        Spec("verify", "release/verify.csv", DRAFTS, STEP, CASE, {"model": ("8b",)}),
        Spec("tensor-parallel", {"release/h100/decode.csv": "", "release/h100/tensor_parallel.csv": ""}, {"ranks":
             "GPUs", "dtype": "ms"}, STEP, CASE, LONG | {"requests": ("32", "128", "8", "1"), "dtype": ("auto", "fp8",
             "tq4")}),
        Spec("gpt-oss", "release/h100/gpt_oss.csv", STEPS, STEP, CASE),
        Spec("latent-steps", "release/glm_flash.csv", STEPS, STEP, CASE),
        Spec("sparse-steps", "release/sparse.csv", ROPE_BITS, with_kernels, CASE, base=FP8_CACHE),
        Spec("kimi-steps", "release/kimi_linear.csv", STEPS, STEP, CASE),
    ),
    "docs/lab/speed.md": (
        Spec("steps-others", "release/decode.csv", STEPS, STEP, CASE, {"dtype": ("auto", *OTHERS)}),
        Spec("steps-older", "decode.csv", STEPS, STEP, CASE, LONG | {"dtype": ("auto", "turboquant_4bit_nc")}),
        Spec("prefill-h100", "release/h100/prefill.csv", {"dtype": "tokens/s, tokens:"}, TOKENS_S, ("tokens",)),
        Spec("recent-window", "release/h100/recent_window.csv", {"dtype": "ms", "recent_tokens": "window"}, STEP, CASE,
             base={"recent_tokens": "0"}),
        Spec("means", "release/h100/means.csv", MEANS, ratio("p50_ms", digits=3), CASE, prepare=averaged,
             base={"means": "none"}),
        Spec("mixed", "release/mixed.csv", MIXED, STEP, ("prompt",), prepare=in_default_mode),
        Spec("mixed-h100", "release/h100/mixed.csv", MIXED, STEP, ("prompt",), prepare=in_default_mode),
        Spec("mixed-graphs", "mixed_graphs.csv", MIXED, spread, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("mixed-graphs-long", "mixed_graphs_32x8192.csv", MIXED, spread, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("mixed-graphs-fp8", "mixed_graphs_fp8.csv", MIXED, spread, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("mixed-kernels", "mixed_graphs.csv", MIXED, kernels, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("verify-shapes", "release/h100/verify_shapes.csv", {"model": "shape"} |
             DRAFTS, STEP, CASE),
        Spec("latent-steps-h100", "release/h100/glm_flash.csv", STEPS, STEP, CASE),
        Spec("latent-prefill", "release/glm_flash_prefill.csv", {"dtype": "tokens/s, tokens:"},
             TOKENS_S, ("tokens",)),
        Spec("sparse-prefill", "release/sparse_prefill.csv", ROPE_BITS | {"dtype": "tokens/s, tokens:"}, TOKENS_S,
             ("tokens",), base=FP8_CACHE),
        Spec("kimi-steps-h100", "release/h100/kimi_linear.csv", STEPS, STEP, CASE),
        Spec("cpu", "cpu_engine.csv", {"what": "what", "dtype": "dtype"}, {"ms": text("ms"),
             "prompt tokens/s": text("tokens_a_second"), "ratio": text("ratio", ".2f")}, where={"cpu": ("AMD EPYC",),
             "cpu_ms": ("",), "reference_ms": ("",)}),
        Spec("cpu-amd", "cpu_engine.csv", ON_THREADS, CPU_TIMES, where={"cpu": ("AMD EPYC",)}, prepare=with_cpu_time),
        Spec("cpu-intel", "cpu_engine.csv", ON_THREADS, CPU_TIMES, where={"cpu": ("Intel(R) Xeon(R) Processor",)},
             prepare=with_cpu_time),
    ),
    "docs/server.md": (
        Spec("agents", "agents.csv", {"dtype": "24 agents, 12 GB of KV cache"}, AGENTS, prepare=in_modes),
        Spec("agents-load", "agents_load.csv", {"dtype": "1.5 turns/s, 12 GB of KV cache"}, AGENTS, prepare=in_modes),
        Spec("throughput", "release/throughput.csv", {"dtype": "20 GB of KV cache"}, WAVE),
        Spec("server-summary", "release/serve_96.csv", {"dtype": "96 requests at once"}, SERVED),
        Spec("prefixes", "prefixes.csv", OPTIONS, HITS, prepare=last_options),
    ),
    "docs/lab/server.md": (
        Spec("throughput-h100", "release/h100/throughput.csv", {"dtype": "20 GB of KV cache"}, WAVE),
        Spec("server", SERVER, {"concurrency": "requests at once", "dtype": "dtype"}, SERVED),
        Spec("server-settings", {"release/async.csv": "", "release/serve_96.csv": "", SERVER: ""}, OPTIONS,
             {"output tokens/s": text("output_tokens_s", ",.0f"), "TTFT, ms": text("p50_ttft_ms", ",.0f"),
              "TPOT, ms": text("p50_tpot_ms", ".1f")}, where={"concurrency": ("96",)}, prepare=last_options),
        Spec("contexts", "offload_contexts.csv", {"dtype": "ms", "block": "tokens of a block"}, text("p50_ms",
             ".0f"), ("source",)),
        Spec("peers", "peers.csv", {"dtype": "dtype", "prefill_ranks": "ranks", "decode_ranks": "to"}, PEERS),
        Spec("startup", "release/startup.csv", {"caches": "caches", "torch_compile": "torch.compile",
             "dtype": "dtype"}, shows(STARTED)),
    ),
    "docs/kernels.md": (
        Spec("kernels-summary", "kernels.csv", KERNEL, MICROSECONDS, CASE, LONG | {"dtype": OURS, "kernel": ("cuda",)}),
    ),
    "docs/lab/internals.md": (
        Spec("kernels", "kernels.csv", KERNEL, MICROSECONDS, CASE, {"spread": ("0",)}),
        Spec("kernels-h100", "h100/kernels.csv", KERNEL, MICROSECONDS, CASE),
        Spec("columns", {"columns.csv": ""}, COLUMNS, MICROSECONDS, CASE, {"means": ("none",), "recent": ("0",),
             "requests": ("32",), "context": ("8192",), "group": ("4", "8", "16"), "query_tokens": ("1", "4")},
             by_kernel),
        Spec("latent-kernels", "latent_kernels.csv", {"heads": "heads", "cache": "µs"}, ratio("p50_us"), CASE,
             {"queries": ("1",), "spread": ("0",), "rope_bits": ("16",), "recent": ("0",)}, list, {"cache": "fa3"}),
        Spec("kimi-attention", "kimi_attention.csv", {"heads": "heads", "cache": "µs"}, ratio("p50_us"), CASE,
             prepare=list, base={"cache": "fa3"}),
        Spec("latent-kernels-h100", "h100/latent_kernels.csv", LATENT, ratio("p50_us"), CASE, prepare=list),
        Spec("environment", "environment.csv", {"dtype": "ms", "torch": "PyTorch"}, STEP, CASE,
             base={"torch": "2.11.0+cu130"}),
        Spec("store", "store.csv", {"dtype": "µs, tokens:", "part": "part"}, text("p50_us"), ("tokens",)),
        Spec("key-widths", "widths.csv", WIDTHS, ratio("p50_us"), ("widths",), prepare=with_widths,
             base={"widths": OWN_WIDTHS}),
        Spec("key-widths-store", "widths_store.csv", {"dtype": "µs, tokens:", "part": "part", "widths": "K's groups"},
             text("p50_us"), ("tokens",), prepare=with_widths),
        Spec("key-widths-5", "widths_of_5.csv", {"dtype": "µs, new tokens:", "head_dim": "heads of", "widths":
             "K's groups"}, ratio("p50_us"), ("query_tokens",), {"kernel": ("cuda",)}, with_widths,
             {"widths": OWN_WIDTHS}),
        Spec("heads-of-256", "heads_of_256.csv", {"dtype": "µs, requests x context:", "kernel": "kernel"},
             ratio("p50_us"), CASE, prepare=list, base={"kernel": "bf16"}),
        Spec("heads-of-256-drafts", "heads_of_256_drafts.csv", {"dtype": "µs, new tokens:", "kernel": "kernel"},
             ratio("p50_us"), ("query_tokens",), prepare=list, base={"kernel": "bf16"}),
        Spec("gpu-tests", "gpu_tests.csv", {"command": "command", "result": "result"}, shows( {"card": "gpu",
             "vLLM": "vllm", "PyTorch": "torch", "commit": "commit"}), prepare=list),
    ),
    "docs/lab/calibration.md": (
        Spec("generate-widths", {f"{FOLDER}/own-widths.json": "the dtype's widths", f"{FOLDER}/widths.json":
             "the file's"}, KL, kl, ("text", "prompt"), prepare=behind("text", "prompt")),
        Spec("generate-widths-planted", {f"{FOLDER}/own-widths.json": "the dtype's widths", f"{FOLDER}/widths.json":
             "the file's"}, TASKS, text("shown"), ("dtype",), prepare=tasks),
        Spec("generate-file", {f"{FOLDER}/four-bits.json": "to 4 bits, V whole", f"{FOLDER}/five-bits-and-means.json":
             "to 5 bits, V less its mean"}, KL, kl, ("text", "prompt"), prepare=behind("text", "prompt")),
        Spec("cpu-files", "cpu_files.csv", {"pages": "ms, requests x tokens, channels:"}, text("packed_ms", ".2f"),
             ("requests", "tokens", "head_dim"), prepare=with_pages),
        Spec("value-means", "value_means.csv", {"dtype": "µs, query heads x new tokens:", "means": "means of"},
             ratio("p50_us"), ("group", "query_tokens"), prepare=with_means, base={"means": KEYS_ALONE}),
    ),
    "docs/lab/reliability.md": (
        Spec("soak-restarts", {"soak_restarts_h200.json": "H200", "soak_restarts_cpu.json": "CPU"},
             {"model": "model", "setting": "on", "dtype": "dtype"}, shows(SOAKED), prepare=list),
    ),
    "docs/quality.md": (
        Spec("quality-summary", {f"{FOLDER}/calibrated.json": CALIBRATED}, AFTER, kl, ("prompt",),
             prepare=behind("prompt", dtypes=(*OURS, "fp8"))),
        Spec("quality-tail", {f"{FOLDER}/calibrated.json": CALIBRATED}, TAIL, TAILS, ("prompt",),
             prepare=behind("prompt", dtypes=(*OURS, "fp8")), base=OF_FP8),
    ),
    "docs/lab/quality.md": (
        Spec("generate", BEHIND, KL, kl, ("text", "prompt"), prepare=behind("text", "prompt")),
        Spec("generate-tail", BEHIND, KL, TAILS, ("text", "prompt"),
             prepare=behind("text", "prompt"), base=OF_FP8 | {"setting": ""}),
        Spec("generate-gain", BEHIND, {"dtype": "with a file / without, prompt tokens:"}, text("gain"), ("prompt",),
             prepare=gains),
        Spec("generate-repeated", {f"{FOLDER}/repeated.json": CALIBRATED}, KL, kl, ("text", "prompt"),
             prepare=behind("text", "prompt")),
        Spec("generate-no-window", {f"{FOLDER}/no-window-calibrated.json": CALIBRATED,
             f"{FOLDER}/no-window-uncalibrated.json": UNCALIBRATED}, KL, kl, ("text", "prompt"),
             prepare=behind("text", "prompt")),
        Spec("json-answers", "json_answers.csv", {"dtype": "dtype"}, shows({"valid": "valid", "equal to bf16's":
             "equal", "mean share before the first other token": "tokens_before_the_first_that_differs"})),
        Spec("generate-yarn", {f"{FOLDER}/yarn-calibrated.json": CALIBRATED,
             f"{FOLDER}/yarn-uncalibrated.json": UNCALIBRATED}, KL, kl, ("text", "prompt"), prepare=behind("text",
             "prompt")),
        Spec("generate-planted", BEHIND, TASKS, text("shown"), ("dtype",), prepare=tasks),
        Spec("generate-tasks", {f"{FOLDER}/tasks.json": CALIBRATED}, TASKS, text("shown"), ("dtype",), prepare=tasks),
        Spec("generate-drafts", f"{FOLDER}/drafts.json", {"dtype": "dtype"}, shows({"tokens per step": "tokens",
             "of bf16's": "share"}), prepare=drafted),
        Spec("quality", TEXT, AFTER | {"dtype": "mean KL, nats"}, kl, ("setting",), prepare=forced),
        Spec("recall", f"{H200}/calibrated-window-64-f759513.json", {"dtype": "dtype"}, {"recalled": text("recalled",
             ".1%"), "answer's log-probability, nats": text("answer", ".3f")}),
        Spec("biased-keys", {"quality-kbias-cpu/calibrated-window-64.json": "window 64",
             "quality-kbias-cpu/calibrated-no-window.json": "no window"}, AFTER | {"dtype": "mean KL, nats"}, kl,
             ("setting",), prepare=forced),
        Spec("prompts-cpu", "prompts_cpu.csv", {"dtype": "dtype", "calibration": "file", "window": "window"},
             shows({"KL": "kl", "of no file's": "of_no_file", "of fp8's": "of_fp8", "±": "of_fp8_error"})),
        Spec("llama-codes", "llama_codes.csv", CODES, {"mean KL, nats (of fp8's)": fine_kl, "99th percentile":
             text("kl_p99", ".4f"), "99.9th percentile": text("kl_tail", ".4f"), "tokens": text("tokens")},
             prepare=beside_others),
        Spec("demo-model", "quality-cpu/quality.json", {"dtype": "dtype", "bytes": "KV bytes/token"},
             {"perplexity": text("perplexity", ".2f"), "KL mean": text("kl_mean", ".4f"), "top-1": text("top1",
             ".1%"), "recall": text("recalled", ".0%")}),
        Spec("latents", "latent_quality.csv", LATENTS, CODED, prepare=codings, base=FP8),
        Spec("latents-sparse", "sparse_quality.csv", ROWS, PICKED, where={"index_keys": ("fp8",)},
             prepare=sparse_codings, base=FP8_ROWS),
        Spec("latents-sparse-fp32", "sparse_quality.csv", ROWS, PICKS, where={"index_keys": ("fp32",)},
             prepare=sparse_codings, base=FP8_ROWS),
        Spec("latents-window", "latent_window.csv", LATENTS, CODED, prepare=codings, base=FP8),
    ),
}  # fmt: skip
"""Page -> its tables."""
CARDS_PAGE = ("card-generations", "card-reports", "card-fits-8b")
GENERATED: Mapping[str, Mapping[str, Callable[[str], str]]] = {
    "docs/cards.md": {name: make for name, make in cards.TABLES.items() if name in CARDS_PAGE},
    "docs/lab/cards.md": {name: make for name, make in cards.TABLES.items() if name not in CARDS_PAGE},
}
"""Page -> marker -> what makes a table that is not one of rows alone."""


APART = {
    "cpu": "a CPU", "cpu-amd": "a CPU", "cpu-intel": "a CPU",
    **dict.fromkeys(("mixed-graphs", "mixed-graphs-long", "mixed-graphs-fp8", "mixed-kernels", "agents", "agents-load"),
                    "engines take turns on a card"),
    "steps-older": "wants FlashAttention 2, which the release's environment lacked",
    "prefixes": "minutes of a server per dtype", "contexts": "needs host memory and a disk", "peers": "several GPUs",
}  # fmt: skip
"""Table of the pages on speed and servers, or of theirs in docs/lab -> why its rows are not the release's."""
SEVERAL = ("steps-older", "contexts", "agents-load")
"""Tables of these pages that may have rows of several commits or cards until their parts are measured again, or because
each row is an engine of its own setting. All others have one commit, card and environment."""
OLDER = "older"


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
