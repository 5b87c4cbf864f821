"""The tables of docs/measured.md about kernels alone, from the rows of results/. `KERNELS` names them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench_engine import MODEL_8B
from measured_rows import in_order, load
from tables import Row, Table, figures, pivot, text

LONG_CONTEXT = (("32", "8192"), ("128", "2048"), ("8", "32768"))
"""The requests and contexts of the README's table."""
SHAPES = {*LONG_CONTEXT, ("1", "32768")}
"""Those that all dtypes ran."""
LATENT_CASE = ("heads", "queries", "spread", "requests", "context", "commit")
LLAMA = Path(__file__).with_name("shapes") / "llama-70b-tp4" / "config.json"
VERIFIED = {"8b": MODEL_8B, "llama-70b-tp4": json.loads(LLAMA.read_text())}
"""Configs of the shapes whose steps with drafts have bounds."""


def kernels(name: str) -> list[Table]:
    """Attention of a layer at the four shapes that all dtypes ran."""
    rows = [row for row in load(name) if (row["requests"], row["context"]) in SHAPES and row["spread"] == "0"]
    return [pivot(in_order(rows), ("dtype", "kernel"), ("requests", "context"), _kernel, ["dtype", "kernel"])]


def _kernel(row: Row, _: Row | None) -> str:
    return f"{float(row['p50_us']):.0f}; {row['attention_p50_us']} us, {float(row['bandwidth']):.0%}"


def columns() -> list[Table]:
    """Attention of a layer by query heads per KV head and new tokens of a request, and that of FlashAttention 3 over
    bf16 and fp8 pages."""
    case = ("dtype", "group", "query_tokens", "recent", "requests", "context")
    rows = load("columns.csv")
    found = {(row["kernel"], *(row[key] for key in case)): row["attention_p50_us"] for row in rows}

    def show(row: Row, _: Row | None) -> str:
        times = [found.get((kernel, *(row[key] for key in case)), "not run") for kernel in ("cuda", "bf16", "fp8")]
        return " / ".join(times) if set(times[1:]) != {"not run"} else times[0]

    ours = [
        {**row, "columns": str(int(row["group"]) * int(row["query_tokens"]))} for row in rows if row["kernel"] == "cuda"
    ]
    ours.sort(key=lambda row: int(row["columns"]))
    head = ["us: packed / bf16 / fp8", "query heads", "new tokens", "columns", "window"]
    down = ("dtype", "group", "query_tokens", "columns", "recent")
    return [pivot(in_order(ours), down, ("requests", "context"), show, head)]


def verify_bounds() -> list[Table]:
    """What attention leaves to gain in steps with drafts: the share of bf16's step that isoquant4's takes, and would
    take if bf16's attention were replaced by the packed kernel's time, and by its time for one new token. Kernels were
    timed with 8 KV heads; fewer take that part of it."""
    times = {
        (row["kernel"], row["group"], row["query_tokens"], row["requests"], row["context"]): row
        for row in load("columns.csv")
        if row["dtype"] == "isoquant4" and row["recent"] == row["spread"] == "0" and row["means"] == "none"
    }
    steps = {
        (row["dtype"], row["model"], str(1 + int(row["drafts"])), row["requests"], row["context"]): row
        for row in load("verify.csv")
    }
    head = ["shape", "tokens of a step", "requests x context", "bf16's step, ms", "its attention", "isoquant4's share",
            "with the kernel's time", "with that for one token"]  # fmt: skip
    table = Table(head, 3)
    for (dtype, model, *case), row in sorted(steps.items(), key=lambda item: (item[0][1], int(item[0][2]))):
        # With few KV heads and short contexts, kernels wait for latency, and a part of the heads takes no part of it.
        if dtype != "isoquant4" or model not in VERIFIED or case[0] == "1" or case[2] == "2048":
            continue
        layers, heads, kv_heads = (
            VERIFIED[model][f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")
        )
        bf16 = steps["auto", model, *case]
        kernels = [times[kernel, str(heads // kv_heads), tokens, *case[1:]]
                   for kernel, tokens in (("bf16", case[0]), ("cuda", case[0]), ("cuda", "1"))]  # fmt: skip
        attention, packed, least = (float(x["attention_p50_us"]) * layers * kv_heads / 8000 for x in kernels)
        step = float(bf16["p50_ms"])
        shares = (float(row["p50_ms"]), step - attention + packed, step - attention + least)
        cells = [model, case[0], " x ".join(case[1:]), f"{step:.2f}", f"{attention:.2f}"]
        table.add([*cells, *(f"{x / step:.2f}" for x in shares)], [bf16, row, *kernels])
    return [table]


def triton_columns() -> list[Table]:
    """Of the Triton kernel, with its tiles of up to 32 columns and with those of 8."""
    tiles = {"triton_columns.csv": "up to 32", "tiles_of_8.csv": "8"}
    rows = [{**row, "tiles": tiles[name]} for name in tiles for row in load(name) if row["recent"] == "0"]
    head = ["us", "columns of a tile", "query heads", "new tokens"]
    down = ("dtype", "tiles", "group", "query_tokens")
    return [pivot(in_order(rows), down, ("requests", "context"), text("attention_p50_us"), head)]


def kernel_batches() -> list[Table]:
    """isoquant4 at other batches, and with requests of different lengths."""
    rows = [
        {**row, "lengths": "equal" if row["spread"] == "0" else f"1 ± {row['spread']} of it"}
        for row in load("kernels.csv")
        if (row["requests"], row["context"]) not in SHAPES or row["spread"] != "0"
    ]
    down = {"dtype": "dtype", "requests": "requests", "context": "context", "lengths": "lengths"}
    columns = {"all, us": text("p50_us"), "attention and merge, us": text("attention_p50_us"),
               "of a copy": text("bandwidth", ".0%")}  # fmt: skip
    return [figures([row for row in rows if row["kernel"] == "cuda"], down, columns)]


def latent_kernels(name: str) -> list[Table]:
    """Decode attention over latents; of a packed cache with the share of the better bf16 kernel's time in its run."""
    rows = load(name)
    rows.sort(key=lambda row: (int(row["heads"]), int(row["queries"]), float(row["spread"])))
    best: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row["cache"] in ("fa3", "flashmla"):
            case = tuple(row[key] for key in LATENT_CASE)
            best[case] = min(best.get(case, float("inf")), float(row["p50_us"]))

    def show(row: Row, _: Row | None) -> str:
        time, base = float(row["p50_us"]), best.get(tuple(row[key] for key in LATENT_CASE))
        is_packed = row["cache"] not in ("fa3", "flashmla")
        return f"{time:.1f}" + (f" ({time / base:.2f})" if base and is_packed else "")

    down = ("heads", "queries", "spread", "rope_bits", "recent", "cache")
    head = ["heads", "query tokens", "spread of lengths", "bits of RoPE", "recent window", "µs"]
    return [pivot(rows, down, ("requests", "context"), show, head)]


def store() -> list[Table]:
    return [pivot(in_order(load("store.csv")), ("dtype", "part"), ("tokens",), text("p50_us"), ["us, tokens:", "part"])]


KERNELS: Mapping[str, Callable[[], list[Table]]] = {
    "kernels": partial(kernels, "kernels.csv"),
    "kernels-h100": partial(kernels, "h100/kernels.csv"),
    "columns": columns,
    "verify-bounds": verify_bounds,
    "triton-columns": triton_columns,
    "kernel-batches": kernel_batches,
    "latent-kernels": partial(latent_kernels, "latent_kernels.csv"),
    "latent-kernels-h100": partial(latent_kernels, "h100/latent_kernels.csv"),
    "store": store,
}
