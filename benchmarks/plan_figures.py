"""Figures of `packed-kv plan`: steps, KL and recall in planning/measured.json, made from the rows in results/."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from statistics import mean

import quality_rows
import tables
from bench_engine import MODEL_8B
from packed_kv.formats import FORMATS
from packed_kv.model.shape import parse
from packed_kv.planning.cache import Serving, bytes_per_token
from packed_kv.planning.cards import CARDS
from packed_kv.planning.weights import weights
from quality_rows import BEHIND, CALIBRATED, NO_WINDOW, TEXT, UNCALIBRATED
from tables import BASELINE, RESULTS, load

FILE = RESULTS.parents[1] / "overlay" / "packed_kv" / "planning" / "measured.json"
GPU = "H200"
"""The card of the steps, by its name in planning/cards.py."""
DTYPES = tables.ORDER[3:]
BF16_AND_FP8: dict[str, float] = {"bf16": 0, "fp8": 1}
SETTINGS = {("window", "calibrated"): CALIBRATED, ("window", "uncalibrated"): UNCALIBRATED,
            ("no_window", "calibrated"): NO_WINDOW, ("no_window", "uncalibrated"): ""}  # fmt: skip
"""Key of a table of KL -> its setting in `TEXT`; "" was not run on the H200."""
KL_SOURCE = ("docs/lab/quality.md: SmolLM2-135M on one H200, decoded token by token, in units of fp8's rounding "
             "(fp8-storage); what was not run there: docs/lab/quality.md, on a CPU")  # fmt: skip
LATENTS_SOURCE = ("docs/lab/quality.md: mla-demo, a small model with DeepSeek-V3's latents, on a CPU, by the codec; in "
                  "units of what fp8 costs there")  # fmt: skip
RECALL_SOURCE = ("docs/lab/quality.md: of {} numbers far back in 7,500 tokens that bf16 answers, SmolLM2-135M "
                 "on one {}, window of 64")  # fmt: skip


def content() -> str:
    """The text of the file: tables of numbers stand in one line each."""
    found = {"step": step(), "kl": {"source": KL_SOURCE, **kl(), "latents": {"source": LATENTS_SOURCE, **latents()}},
             "recall": recall()}  # fmt: skip
    return re.sub(r"\{[^{}]*\}", lambda match: re.sub(r"\s+", " ", match[0]), json.dumps(found, indent=1)) + "\n"


def step() -> dict[str, object]:
    """The terms of a decode step (planning/measured.py) that the 8B shape's steps give.

    A dtype's share of the card's bandwidth is the slope between 1,024 and 8,192 tokens of 32 requests, the mean of all
    dtypes of its width: one kernel reads their pages, and steps of several engines differ by noise. `request_ms` is the
    slope of bf16 from 32 requests to 128 of a quarter of their tokens, `fixed_ms` what is left of its step, and
    `collective_ms` what is left of its step on two H100s, which are taken to reach the same share of their bandwidth.
    """
    rows = load("release/decode.csv")
    (made_by,) = {(row["gpu"], row["vllm"], row["commit"]) for row in rows if row["dtype"] == BASELINE}
    ms = {(row["dtype"], row["requests"], row["context"]): float(row["p50_ms"]) for row in rows}
    shape, serving = parse(MODEL_8B, "8B"), Serving(8192)
    slopes: dict[tuple[int, int | None] | str, list[float]] = {}
    for name in ("bf16", "fp8", *DTYPES):
        dtype = BASELINE if name == "bf16" else name
        slopes.setdefault(width(name), []).append(ms[dtype, "32", "8192"] - ms[dtype, "32", "1024"])
    share = {}
    for name in ("bf16", "fp8", *DTYPES):
        read = 32 * (8192 - 1024) * bytes_per_token(shape, name, serving)
        share[name] = round(read / mean(slopes[width(name)]) * 1e3 / CARDS[GPU].bandwidth, 4)

    def reading_ms(requests: int, context: int, ranks: int, gpu: str = GPU) -> float:
        rank = parse(MODEL_8B, "8B", ranks)
        read = weights(rank, None, None).read(requests) / ranks
        read += requests * context * bytes_per_token(rank, "bf16", Serving(context))
        return 1e3 * read / (share["bf16"] * CARDS[gpu].bandwidth)

    request = (ms[BASELINE, "128", "2048"] - ms[BASELINE, "32", "8192"]) / (128 - 32)
    fixed = ms[BASELINE, "32", "8192"] - reading_ms(32, 8192, ranks=1) - 32 * request
    two = next(row for row in load("release/h100/tensor_parallel.csv")
               if (row["dtype"], row["ranks"], row["requests"]) == (BASELINE, "2", "1"))  # fmt: skip
    left = float(two["p50_ms"]) - reading_ms(1, int(two["context"]), 2, "H100") - fixed - request / 2
    gpu, vllm, commit = made_by
    return {
        "source": f"benchmarks/results/release/decode.csv: one {gpu.removeprefix('NVIDIA ')}, vLLM {vllm}, 8B shape, "
        f"commit {commit} (docs/lab/commands.md)",
        "gpu": GPU, "fixed_ms": digits(fixed), "request_ms": digits(request),
        "collective_ms": digits(left / (2 * MODEL_8B["num_hidden_layers"])), "share": share,
    }  # fmt: skip


def width(name: str) -> tuple[int, int | None] | str:
    """Bits of a packed dtype's channels, or the name of another dtype."""
    return (FORMATS[name].bits, FORMATS[name].outlier_bits) if name in FORMATS else name


def digits(number: float) -> float:
    """A number with five digits."""
    return float(f"{number:.5g}")


def kl() -> dict[str, dict[str, dict[str, float]]]:
    """Mean KL in units of fp8's rounding, by window, calibration and dtype. What the H200 did not run is of a CPU."""
    shares = {(row["setting"], row["dtype"]): round(float(row["kl_share"]), 2) for name, setting in TEXT.items()
              for row in quality_rows.forced([{**row, "setting": setting} for row in load(name)])
              if row["kl_share"]}  # fmt: skip
    on_cpu = {(row["window"], row["calibration"], row["dtype"]): float(row["of_fp8"])
              for row in load("prompts_cpu.csv")}  # fmt: skip
    found: dict[str, dict[str, dict[str, float]]] = {"window": {}, "no_window": {}}
    for (window, state), setting in SETTINGS.items():
        at = ("64" if window == "window" else "0", UNCALIBRATED if state == "uncalibrated" else CALIBRATED)
        ours = {dtype: shares[setting, dtype] if (setting, dtype) in shares else on_cpu[*at, dtype] for dtype in DTYPES}
        found[window][state] = {"bf16": 0, "fp8": shares[CALIBRATED, "fp8"], **ours}
    return found


def latents() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Mean KL of latents in units of fp8's, by window, bits of RoPE, calibration and dtype."""
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for window, file, suffix in (("window", "latent_window.csv", "-window64"), ("no_window", "latent_quality.csv", "")):
        kls = {(row["coding"], row["calibrated"]): float(row["kl"]) for row in load(file)}
        found[window] = {
            bits: {state: BF16_AND_FP8 | {dtype: round(kls[dtype + suffix + rope, has_file] / kls["fp8", "yes"], 2)
                                          for dtype in DTYPES}
                   for state, has_file in (("calibrated", "yes"), ("uncalibrated", "no"))}
            for bits, rope in (("16", ""), ("8", "-rope8"))
        }  # fmt: skip
    return found


def recall() -> Mapping[str, object]:
    """Percent of the numbers far back that a dtype answers, of those that bf16 answers, by calibration."""
    found: dict[str, object] = {}
    fp8: dict[str, int] = {}
    cards: list[str] = []
    for (name, setting), state in zip(BEHIND.items(), ("calibrated", "uncalibrated"), strict=True):
        rows = [row for row in quality_rows.kept_tasks(name) if (row["task"], row["prompt"]) == ("far", "7,500")]
        solved = {row["dtype"]: int(row["solved"].rstrip("%")) for row in rows}
        cards.append(rows[0]["gpu"].split()[1])
        if setting == CALIBRATED:
            kept = rows[0]["kept"].split()[0]
            fp8 = {"fp8": solved["fp8"]}
        found[state] = {"bf16": 100, **fp8, **{dtype: solved[dtype] for dtype in DTYPES}}
    return {"source": RECALL_SOURCE.format(kept, " and, without a file, ".join(dict.fromkeys(cards))), **found}
