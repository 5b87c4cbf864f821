"""What was measured, from `measured.json` (tests hold it to benchmarks/results/ and docs/quality.md), and the estimate
of a decode step that it gives.

    step = fixed + requests * request / ranks + collectives + reading
    reading = (weights / share of bf16 + KV / share of the dtype) / bandwidth        bytes of one rank
    collectives = 2 a layer, each `collective`, where there are several ranks

A share is that of a card's peak bandwidth at which bytes are read; `fixed` and `request` are what a step takes beside
reading: launches, sampling, the host; and arithmetic, which ranks share.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..formats import FORMATS
from ..layout import ring_slot_bytes
from .cache import DENSE, Serving, dtype_of, recent_window, slot_bytes
from .model import Model
from .weights import Weights

MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))
STEP, KL = MEASURED["step"], MEASURED["kl"]


def kl(dtype: str, has_window: bool, calibrated: bool) -> float | None:
    """Mean KL to bf16 in units of what fp8's rounding costs; None: not measured."""
    table = KL["window" if has_window else "no_window"]
    return table["calibrated" if calibrated else "uncalibrated"].get(dtype)


def step_seconds(
    model: Model, dtype: str, serving: Serving, weights: Weights, requests: int, bandwidth: float
) -> float:
    """A decode step of `requests` requests, each of `serving.context` tokens, on cards of `bandwidth` bytes/s each."""
    share = STEP["share"]
    read = weights.read(requests) / model.ranks / share[DENSE]
    window, _ = recent_window(model, dtype, serving)
    for layer in model.layers:
        if layer.kind == "state":
            read += requests * 2 * layer.state_bytes / share[DENSE]  # read and written
            continue
        tokens = min(serving.context, layer.window) if layer.window else serving.context
        name = dtype_of(dtype, layer, serving)
        read += requests * tokens * layer.kv_heads * slot_bytes(name, layer, model) / share[name]
        if name in FORMATS:
            read += requests * window * layer.kv_heads * ring_slot_bytes(layer.head_size) / share[name]
    collectives = 2 * model.config["num_hidden_layers"] if model.ranks > 1 else 0
    beside = STEP["fixed_ms"] + requests * STEP["request_ms"] / model.ranks + collectives * STEP["collective_ms"]
    return beside / 1e3 + read / bandwidth
