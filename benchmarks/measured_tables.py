"""The tables of docs/measured.md and README.md, from the rows of results/. `DOCS` and `README` name them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import generation_tables
import tables
from measured_kernels import KERNELS, LONG_CONTEXT
from measured_rows import RESULTS, file_named, in_order, is_baseline, load, load_quality
from tables import Row, Show, Table, figures, pivot, ratio, text

MEANS_CASE = ("dtype", "means", "requests", "context")
REFERENCES = (tables.BASELINE, "fp8")
"""What verify steps are compared with."""


def bf16(table: Table) -> Table:
    """Names the baseline, whose model was in bf16."""
    lines = [["bf16" if cell == tables.BASELINE else cell for cell in cells] for cells in table.lines]
    return Table(table.head, table.names, lines, table.rows)


def steps(*names: str) -> list[Table]:
    """Decode steps: ms, p50."""
    found = [bf16(tables.by_case(in_order(load(name)), "p50_ms", "ms", ("requests", "context"))) for name in names]
    return found


def recent_window() -> list[Table]:
    rows = [{**row, "window": row["recent_tokens"]} for row in load("recent_window.csv")]
    plain = {(row["requests"], row["context"]): row for row in rows if row["window"] == "0"}

    def show(row: Row, _: Row | None) -> str:
        base = float(plain[row["requests"], row["context"]]["p50_ms"])
        step = float(row["p50_ms"])
        return f"{step:.2f}" if row["window"] == "0" else f"{step:.2f} ({step / base:.3f})"

    rows.sort(key=lambda row: int(row["window"]))
    return [pivot(rows, ("dtype", "window"), ("requests", "context"), show, ["ms", "tokens of the window"])]


def means() -> list[Table]:
    """Steps with means of keys by blocks, their ratio to those without a file; each the mean of its rows' medians."""
    rows = load("means.csv")
    medians: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        medians.setdefault(tuple(row[key] for key in MEANS_CASE), []).append(float(row["p50_ms"]))

    def show(row: Row, _: Row | None) -> str:
        cases = row, {**row, "means": "none"}
        step, base = (statistics.fmean(medians[tuple(case[key] for key in MEANS_CASE)]) for case in cases)
        return f"{step:.2f}" if row["means"] == "none" else f"{step:.2f} ({step / base:.3f})"

    rows.sort(key=lambda row: row["means"] != "none")
    return [pivot(in_order(rows), ("dtype", "means"), ("requests", "context"), show, ["ms", "means of keys"])]


def prefill(name: str) -> list[Table]:
    return [bf16(tables.by_case(in_order(load(name)), "tokens_s", "tokens/s", ("tokens",)))]


def throughput() -> list[Table]:
    titles = {"fit": "requests that fit", "output_tokens_s": "output tokens/s, whole wave",
              "decode_tokens_s": "output tokens/s, while all decode"}  # fmt: skip
    columns = {title: ratio(column) for column, title in titles.items()}
    return [bf16(figures(in_order(load("throughput.csv")), {"dtype": "dtype"}, columns))]


def mixed(name: str) -> list[Table]:
    return [bf16(tables.mixed(load(name)))]


def server() -> list[Table]:
    rows = in_order(load("serve.csv"))
    return [bf16(tables.by_case(rows, column, unit, ("concurrency",))) for column, unit in SERVER]


SERVER = (("output_tokens_s", "output tokens/s"), ("p50_ttft_ms", "TTFT, ms"), ("p50_tpot_ms", "TPOT, ms"))


def server_settings() -> list[Table]:
    """96 requests at once: the engine alone, and servers by their further options."""
    rows = [{**row, "server": "none: the engine alone"} for row in in_order(load("async.csv"))]
    common = min((row["server_options"] for row in load("serve_96.csv")), key=len)
    for row in in_order(load("serve_96.csv")):
        options = row["server_options"].removeprefix(common).strip()
        rows.append({**row, "server": f"`{options}`" if options else "as it comes"})
    columns = {unit: ratio(column) for column, unit in SERVER}
    return [bf16(_against_the_server(figures(rows, {"dtype": "dtype", "server": "server"}, columns), rows))]


def _against_the_server(table: Table, rows: Sequence[Row]) -> Table:
    """Ratios to bf16's server for servers with options, which bf16 was not run with."""
    (base,) = (row for row in rows if is_baseline(row) and row["server"] == "as it comes")
    show = [ratio(column) for column, _ in SERVER]
    for cells, used in zip(table.lines, table.rows, strict=True):
        if cells[1].startswith("`"):
            cells[table.names :] = [one(used[0], base) for one in show]
    return table


def prefixes() -> list[Table]:
    rows = load("prefixes.csv")
    common = min((row["server_options"] for row in rows), key=len)
    named = [{**row, "options": row["server_options"].removeprefix(common).strip()} for row in rows]
    return [_hits([{**row, "options": f"`{row['options']}`" if row["options"] else ""} for row in named], "p99")]


def trace() -> list[Table]:
    return [_hits([{**row, "options": ""} for row in in_order(load("trace.csv"))], "p90")]


def _hits(rows: Sequence[Row], tail: str) -> Table:
    columns = {
        "hit rate": text("hit_rate"),
        "TTFT p50, s": text("p50_ttft_ms", ".2f", 1e-3),
        f"TTFT {tail}, s": text(f"{tail}_ttft_ms", ".2f", 1e-3),
        "TPOT p50, ms": text("p50_tpot_ms", ".2f"),
        "output tokens/s": text("output_tokens_s", ".0f"),
    }
    return bf16(figures(rows, {"dtype": "dtype", "options": "options"}, columns))


def agents(offload: float) -> list[Table]:
    return [bf16(tables.agentic(in_order(load("agentic.csv")), offload))]


def reasoning() -> list[Table]:
    return [bf16(tables.reasoning(in_order(load("reasoning.csv"))))]


def tensor_parallel() -> list[Table]:
    rows = load("tensor_parallel_one.csv") + load("tensor_parallel.csv")
    show = ratio("p50_ms")
    return [bf16(pivot(rows, ("ranks", "dtype"), ("requests", "context"), show, ["GPUs", "ms"]))]


def verify() -> list[Table]:
    """Steps of shapes with many query heads a KV head, and with drafts: ms, and the ratios to bf16's and to fp8's."""
    case = ("model", "tokens", "requests", "context")
    rows = [{**row, "tokens": str(1 + int(row["drafts"]))} for row in load("verify.csv")]
    found = {(row["dtype"], *(row[key] for key in case)): float(row["p50_ms"]) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))

    def show(row: Row, _: Row | None) -> str:
        step = float(row["p50_ms"])
        bases = [found.get((dtype, *(row[key] for key in case))) for dtype in REFERENCES]
        ratios = [f"{step / base:.2f}" if base else "not run" for base in bases]
        return f"{step:.2f}" if row["dtype"] in REFERENCES else f"{step:.2f} ({', '.join(ratios)})"

    rows.sort(key=lambda row: (models.index(row["model"]), int(row["tokens"])))
    head = ["ms", "tokens of a step", "dtype"]
    return [bf16(pivot(rows, ("model", "tokens", "dtype"), ("requests", "context"), show, head))]


def startup() -> list[Table]:
    seconds = {"first_token_s": "s to the first token", "profile_s": "profiling run", "warm_up_s": "warm-up",
               "kernels_compiled": "kernels compiled", "compile_s": "their s, summed"}  # fmt: skip
    down = {
        "dtype": "dtype", "caches": "caches", "torch_compile": "torch.compile", "cpus": "CPU cores", "commit": "tree",
    }  # fmt: skip
    columns: dict[str, Show] = {title: text(name) for name, title in seconds.items()}

    def beside_auto(row: Row, auto: Row | None) -> str:
        return f"{float(row['first_token_s']) - float(auto['first_token_s']):+.1f}" if auto else "not run"

    return [figures(load("startup.csv"), down, {**columns, "s beside auto": beside_auto})]


def copies() -> list[Table]:
    """GB/s by block size: to host memory / back."""
    rows = load("offload_copies.csv")
    cells = {(row["dtype"], row["block"], row["direction"], row["method"]): row for row in rows}
    methods = {"vLLM": "vLLM", "DMA": "DMA alone", "kernel": "kernel alone", "whole": "one copy of all"}
    titles = {"dtype": "dtype", "block": "tokens of a block", "piece_bytes": "bytes of a piece"}
    table = Table([*titles.values(), *methods.values(), "back by vLLM in"], 3)
    for dtype, block, piece in dict.fromkeys((row["dtype"], row["block"], row["piece_bytes"]) for row in rows):
        used = [cells[dtype, block, way, method] for method in methods for way in ("store", "load")]
        pairs = [f"{one['gb_s']} / {two['gb_s']}" for one, two in zip(used[::2], used[1::2], strict=True)]
        back = f"{float(cells[dtype, block, 'load', 'vLLM']['p50_ms']):.1f} ms"
        table.add([dtype, block, f"{int(piece):,}", *pairs, back], used)
    return [bf16(table)]


def contexts() -> list[Table]:
    """Time to the first token by where the context is."""
    show = text("p50_ms", ".0f")
    head = ["ms", "tokens of a block"]
    return [bf16(pivot(load("offload_contexts.csv"), ("dtype", "block"), ("source",), show, head))]


def peers() -> list[Table]:
    rows = [{**row, "ranks": f"{row['prefill_ranks']} to {row['decode_ranks']}"} for row in load("peers.csv")]
    columns = {"bytes a prompt": text("bytes", ",.0f"), "descriptors": text("descriptors", ",.0f"),
               "ms to read": text("transfer_ms", ".1f"), "GB/s": text("GB_s", ".1f")}  # fmt: skip
    return [bf16(figures(rows, {"dtype": "dtype", "ranks": "ranks"}, columns))]


SMOLLM2 = "quality-smollm2-h200"
CALIBRATED, UNCALIBRATED, NO_WINDOW = "calibrated, window 64", "uncalibrated, window 64", "calibrated, no window"
SMOLLM2_FILES: Sequence[tuple[str, str, Sequence[str] | None]] = (
    ("calibrated-window-64-f759513.json", CALIBRATED, ("fp8", "int4_per_token_head")),
    ("turboquant-nc.json", CALIBRATED, ("turboquant_4bit_nc", "turboquant_3bit_nc")),
    ("calibrated-window-64.json", CALIBRATED, None),
    ("calibrated-window-64-29533ae.json", CALIBRATED, None),
    ("uncalibrated-window-64.json", UNCALIBRATED, None),
    ("uncalibrated-window-64-29533ae.json", UNCALIBRATED, None),
    ("calibrated-no-window-88355a4.json", NO_WINDOW, ("planarquant4",)),
    ("calibrated-no-window.json", NO_WINDOW, None),
    ("calibrated-no-window-29533ae.json", NO_WINDOW, None),
)
"""File, setting and the dtypes taken from it (None: all). Of a dtype in a setting the last file counts."""
RECALL_FILE = f"{SMOLLM2}/calibrated-window-64-f759513.json"


def smollm2() -> list[Row]:
    """The quality rows of SmolLM2 on an H200, one a dtype and setting."""
    found = {}
    for name, setting, dtypes in SMOLLM2_FILES:
        for row in load_quality(f"{SMOLLM2}/{name}", setting):
            if dtypes is None or row["dtype"] in dtypes:
                found[row["dtype"], setting] = {**row, "token": f"{token_bytes(row):,.0f}"}
    return in_order([row for row in found.values() if not is_baseline(row) and row["dtype"] != "fp8-storage"])


def token_bytes(row: Row) -> float:
    """KV bytes of a token: of vLLM's turboquant dtypes, which keep some layers in bf16, memory over tokens, as the
    harness of that run gave every layer the first one's bytes."""
    mixed_layers = row["dtype"].startswith("turboquant_")
    return float(row["kv_bytes"]) / float(row["kv_tokens"]) if mixed_layers else float(row["bytes"])


def kl(row: Row, _: Row | None) -> str:
    """Mean KL, its standard error, and in brackets the ratio to fp8's storage of the same run."""
    error = row.get("kl_error", "None")
    bar = "" if error == "None" else f" ± {float(error):.4f}"
    share = float(row["kl_ratio"] or 0)
    compared = f" ({share:.{1 if share >= 10 else 2}f})" if share else ""
    return f"{float(row['kl_mean']):.4f}{bar}{compared}"


def quality() -> list[Table]:
    window = {row["dtype"]: int(row["request_bytes"]) for row in smollm2() if row["setting"] == CALIBRATED}
    rows = [
        {**row, "window": f"{window[row['dtype']] / 1024:,.0f}" if window[row["dtype"]] else ""} for row in smollm2()
    ]
    head = ["dtype", "KV bytes/token", "KiB of a request's window"]
    return [pivot(rows, ("dtype", "token", "window"), ("setting",), kl, head)]


def recall() -> list[Table]:
    columns = {"recalled": text("recalled", ".1%"), "answer's log-probability, nats": text("answer", ".3f")}
    return [bf16(figures(in_order(load_quality(RECALL_FILE)), {"dtype": "dtype"}, columns))]


def quality_cpu() -> list[Table]:
    named = {"calibrated-window-64.json": "bf16", "calibrated-window-64-float32.json": "fp32"}
    return [_kl_by_setting("quality-smollm2-cpu", named)]


def quality_kbias() -> list[Table]:
    named = {"calibrated-window-64.json": "window 64", "calibrated-no-window.json": "no window"}
    return [_kl_by_setting("quality-kbias-cpu", named)]


def _kl_by_setting(folder: str, named: Mapping[str, str]) -> Table:
    rows = [row for name, setting in named.items() for row in load_quality(f"{folder}/{name}", setting)]
    return pivot(
        in_order([row for row in rows if not is_baseline(row)]), ("dtype",), ("setting",), kl, ["mean KL, nats"]
    )


def demo_model() -> list[Table]:
    columns = {
        "KV bytes/token": text("bytes", ",.0f"),
        "perplexity": text("perplexity", ".2f"),
        "KL mean": text("kl_mean", ".4f"),
        "KL p99": text("kl_p99", ".3f"),
        "top-1": text("top1", ".1%"),
        "top-5": text("top5", ".1%"),
        "recall": text("recalled", ".0%"),
    }
    return [bf16(figures(in_order(load_quality("quality-cpu/quality.json")), {"dtype": "dtype"}, columns))]


def transformers() -> list[Table]:
    engine = next(row for row in load("transformers-cpu/engine.csv") if row["dtype"] == "tq4")
    found = json.loads((RESULTS / "transformers-cpu" / "packed_cache.json").read_text())
    (run,) = file_named("transformers-cpu/packed_cache.json").runs
    made_with = f"{found['made_with']['torch']}, transformers {found['made_with']['transformers']}"
    cache = {**found["rows"]["tq4"], **run, "file": "transformers-cpu/packed_cache.json", "torch": made_with}
    table = Table(["tq4 in", "mean KL, nats", "top-1"], 1)
    for name, row in (("`PackedCache`, transformers", cache), ("vLLM's CPU engine", engine)):
        table.add([name, f"{float(row['kl_mean']):.5f}", f"{float(row['top1']):.1%}"], [row])
    return [table]


def gpu_tests() -> list[Table]:
    columns = ("result", "gpu", "vllm", "torch", "triton", "commit")
    table = Table(["command", "result", "card", "vLLM", "PyTorch", "Triton", "commit"], 7)
    for row in load("gpu_tests.csv"):
        table.add([f"`{row['command']}`", *(row[key] for key in columns)], [])
    return [table]


def readme_speed() -> str:
    """Three shapes of decode.csv for bf16, fp8 and two of ours."""
    dtypes = ("auto", "fp8", "tq4", "turboquant25")
    rows = [row for row in in_order(load("decode.csv")) if row["dtype"] in dtypes]
    rows = [row for shape in LONG_CONTEXT for row in rows if (row["requests"], row["context"]) == shape]
    return bf16(tables.by_case(rows, "p50_ms", "ms", ("requests", "context"))).markdown() + _measured_on(
        rows, "decode-steps"
    )


def readme_quality() -> str:
    """Some of ours, calibrated, and two of vLLM's, behind prompts of three lengths."""
    rows = generation_tables.readme_rows()
    return generation_tables.readme_table().markdown() + _measured_on(rows, "quality-behind-prompts")


def _measured_on(rows: Sequence[Row], section: str) -> str:
    """A line below a table: card and versions of its rows, and where docs/measured.md has their runs."""
    made = {(row["gpu"], row["vllm"], row["torch"].split("+")[0]) for row in rows}
    found = "; ".join(f"one {gpu}, vLLM {vllm}, PyTorch {torch}" for gpu, vllm, torch in sorted(made))
    link = f"[docs/measured.md](docs/measured.md#{section})"
    return f"\n\nMeasured on {found}. Commits, commands, other dtypes, loads and cards: {link}."


README: Mapping[str, Callable[[], str]] = {"speed": readme_speed, "quality": readme_quality}
DOCS: Mapping[str, Callable[[], Sequence[Table]]] = {
    "steps": partial(steps, "decode.csv"),
    "steps-h100": partial(steps, "h100/decode.csv"),
    "steps-by-context": partial(steps, "before_window/decode.csv"),
    "recent-window": recent_window,
    "means": means,
    "prefill": partial(prefill, "prefill.csv"),
    "throughput": throughput,
    "mixed": partial(mixed, "mixed.csv"),
    "mixed-h100": partial(mixed, "h100/mixed.csv"),
    "server": server,
    "server-settings": server_settings,
    "prefixes": prefixes,
    "trace": trace,
    "agents": partial(agents, 0),
    "agents-host-memory": partial(agents, 28),
    "reasoning": reasoning,
    "gpt-oss": partial(steps, "gpt_oss.csv"),
    "tensor-parallel": tensor_parallel,
    **KERNELS,
    "verify": verify,
    "latent-steps": partial(steps, "glm_flash.csv"),
    "latent-prefill": partial(prefill, "glm_flash_prefill.csv"),
    "startup": startup,
    "copies": copies,
    "contexts": contexts,
    "peers": peers,
    **generation_tables.GENERATION,
    "quality": quality,
    "recall": recall,
    "quality-cpu": quality_cpu,
    "quality-kbias": quality_kbias,
    "demo-model": demo_model,
    "transformers": transformers,
    "gpu-tests": gpu_tests,
}
