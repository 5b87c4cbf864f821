"""Measured figures from `measured.json`, which benchmarks/plan_figures.py makes from the rows in benchmarks/results/,
and the estimate of a decode step that they give.

    step = fixed + requests * request / ranks + collectives + reading
    reading = weights / rate of bf16 + KV / rate of the dtype                        bytes of one rank
    collectives = 2 a layer, each `collective`, where there are several ranks

A rate is a measured share of a card's peak bandwidth (`rate`); `fixed` and `request` are a step's time besides
reading: launches, sampling, the host; and arithmetic, which ranks share.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..formats import FORMATS
from ..model.shape import DENSE, Model, recent_slot_bytes, slot_bytes
from .cache import Serving, dtype_of, recent_window
from .cards import CARDS, Card
from .weights import Weights

# Read at import (4 KB), by `packed-kv plan` and `doctor` alone: no engine imports this module.
MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))
STEP, KL, RECALL = MEASURED["step"], MEASURED["kl"], MEASURED["recall"]


def kl(dtype: str, has_window: bool, calibrated: bool, rope_bits: int | None = None) -> float | None:
    """Mean KL to bf16 in units of the KL of fp8's rounding; None: not measured. `rope_bits`: bits of a latent's RoPE
    channels; None for keys and values."""
    window = "window" if has_window else "no_window"
    table = KL[window] if rope_bits is None else KL["latents"][window][str(rope_bits)]
    return table["calibrated" if calibrated else "uncalibrated"].get(dtype)


def recall(dtype: str, has_window: bool, calibrated: bool, rope_bits: int | None = None) -> int | None:
    """Percent of the planted numbers answered by bf16 that a dtype also answers. None: not measured, as without a
    window and for latents. Takes the arguments of `kl`."""
    if rope_bits is not None or (dtype in FORMATS and not has_window):
        return None
    return RECALL["calibrated" if calibrated else "uncalibrated"].get(dtype)


def rate(dtype: str, card: Card) -> float:
    """Bytes per second at which a decode reads pages of a dtype (`DENSE`: also weights).

    A dtype has its share of the card's bandwidth. Only the H100's steps were measured, too: it has the H200's SMs,
    and instructions bound the narrow dtypes, so it is taken to read as many bytes as the H200, up to
    bf16's share of its bandwidth (docs/lab/commands.md has the errors). Not where another bandwidth was given.
    """
    share = STEP["share"]
    if not is_measured_h100(card):
        return share[dtype] * card.bandwidth
    return min(share[dtype] * CARDS[STEP["gpu"]].bandwidth, share[DENSE] * card.bandwidth)


def is_measured_h100(card: Card) -> bool:
    return card.name == "H100" and card.bandwidth == CARDS["H100"].bandwidth


def step_seconds(model: Model, dtype: str, serving: Serving, weights: Weights, requests: int, card: Card) -> float:
    """Time of a decode step of `requests` requests, each of `serving.context` tokens, on such cards."""
    seconds = weights.read(requests) / model.ranks / rate(DENSE, card)
    window, _ = recent_window(model, dtype, serving)
    for layer in model.layers:
        if layer.kind == "state":
            seconds += requests * 2 * layer.state_bytes / rate(DENSE, card)  # read and written
            continue
        tokens = min(serving.context, layer.window) if layer.window else serving.context
        name = dtype_of(dtype, layer, serving)
        read = tokens * slot_bytes(name, layer)
        if name in FORMATS:
            read += window * recent_slot_bytes(layer)
        seconds += requests * layer.kv_heads * read / rate(name, card)
    collectives = 2 * model.config["num_hidden_layers"] if model.ranks > 1 else 0
    beside = STEP["fixed_ms"] + requests * STEP["request_ms"] / model.ranks + collectives * STEP["collective_ms"]
    return beside / 1e3 + seconds
