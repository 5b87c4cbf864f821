"""The plan of a model: what each dtype holds and costs, what was assumed, and a recommendation."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from ..formats import FORMATS, ROPE_BITS
from ..kernels.served import CUDA, Engine, Pairs, who_serves
from ..model.cache_scheme import describe_cache_scheme
from ..model.config_fields import MODEL_BYTES, BadInput, nested, whole
from ..model.shape import DENSE, FP8, Model
from ..refusals.table import Refused
from .cache import DTYPES, INDEX_BLOCK, Serving, bytes_per_token, capacity, recent_window
from .cards import Card
from .measured import KL, RECALL, STEP, is_measured_h100, kl, recall, step_seconds
from .weights import Weights

GIB = 1 << 30
WORTH_SAYING = 0.95
"""Share of bf16's step time above which a faster dtype is not mentioned."""


@dataclass(frozen=True)
class Row:
    """One dtype. Bytes are on one rank; `step_ms` is for `requests_in_step` requests of the context.

    `kl`, `kl_uncalibrated`: in units of fp8's rounding; `recall`, `recall_uncalibrated`: percent; None: not measured.
    `refused`: why the engine would not start.
    """

    dtype: str
    bytes_per_token: int
    recent_tokens: int
    kv_tokens: int = 0
    requests: int = 0
    request_bytes: int = 0
    requests_in_step: int = 0
    step_ms: float | None = None
    kl: float | None = None
    kl_uncalibrated: float | None = None
    recall: int | None = None
    recall_uncalibrated: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class Demand:
    """Requirements of a plan. `users`: requests at once, None: not given. `kv_memory`: bytes of KV cache per card."""

    model: Model
    serving: Serving
    weights: Weights
    card: Card
    kv_memory: int
    users: int | None = None


def cache_memory(card: Card, weights: Weights, ranks: int, utilization: float, reserve: int) -> int:
    """Bytes that a card has for its KV cache. Raises BadInput where the weights leave none."""
    left = int(card.memory * utilization - weights.total / ranks - reserve)
    if left <= 0:
        raise BadInput(
            f"{weights.total / ranks / GIB:.1f} GiB of weights per card ({weights.source}) and {reserve / GIB:g} GiB "
            f"for the rest do not fit {utilization:g} of {card.memory / GIB:.1f} GiB; give a larger --gpu, "
            "--tensor-parallel N or --weights fp8"
        )
    return left


def estimate(demand: Demand) -> list[Row]:
    """A row for bf16, fp8 and every packed dtype."""
    users = demand.users or max(1, capacity(demand.model, DENSE, demand.serving, demand.kv_memory).requests)
    return [_row(demand, dtype, users) for dtype in DTYPES]


def _row(demand: Demand, dtype: str, users: int) -> Row:
    model, serving = demand.model, demand.serving
    window, _ = recent_window(model, dtype, serving)
    known = (dtype, bytes_per_token(model, dtype, serving), window)
    try:
        holds = capacity(model, dtype, serving, demand.kv_memory)
    except Refused as error:
        return Row(*known, refused=error.refusal.sentence())
    number, step = min(users, holds.requests), None
    if number and demand.card.bandwidth and dtype in STEP["share"] and not model.has_latents:
        seconds = step_seconds(model, dtype, serving, demand.weights, number, demand.card)
        step = round(seconds * 1e3, 3)
    calibrated, without = ((dtype, window > 0, state, model.rope_bits) for state in (True, False))
    return Row(
        *known, holds.tokens, holds.requests, holds.request_bytes, number, step,
        kl(*calibrated), kl(*without), recall(*calibrated), recall(*without),
    )  # fmt: skip


def recommend(demand: Demand, rows: list[Row]) -> str:
    """Recommend a dtype for the demand, with the reason, in one sentence."""
    started = {row.dtype: row for row in rows if not row.refused}
    if not any(row.requests for row in started.values()):
        context = f"{demand.serving.context:,} tokens"
        return f"none: no dtype holds one request of {context}; give a shorter --context, or more memory."
    return _most_room(demand, started) if demand.users is None else _least_loss(demand, started, demand.users)


def _most_room(demand: Demand, rows: dict[str, Row]) -> str:
    """Recommend bf16 if it holds all requests that vLLM serves at once; else the dtype that holds most and costs no
    more than fp8's rounding."""
    at_once, held = demand.card.served_at_once, rows[DENSE].requests
    if held >= at_once:
        return (
            f"{DENSE}: it suffices, as it holds {held:,} requests of {demand.serving.context:,} tokens, and vLLM "
            f"serves {at_once:,} at once (--max-num-seqs; if you serve more, give --users)."
        )
    best = max((row for row in rows.values() if _cost(row) <= 1), key=lambda row: (row.requests, -_cost(row)))
    if best.dtype == DENSE:
        return f"{DENSE}: every dtype that holds more has a larger KL than rounding to fp8."
    return (
        f"{best.dtype}, calibrated: the most requests of {demand.serving.context:,} tokens ({best.requests}; bf16 "
        f"{rows[DENSE].requests}, fp8 {rows[FP8].requests}) at a KL no larger than that of fp8's rounding "
        f"({best.kl:g} of it)."
    )


def _least_loss(demand: Demand, rows: dict[str, Row], users: int) -> str:
    """Recommend the dtype with the least loss that holds this many requests."""
    dense, wanted = rows[DENSE], f"{users} requests of {demand.serving.context:,} tokens"
    enough = [row for row in rows.values() if row.requests >= users]
    if not enough:
        most = max(rows.values(), key=lambda row: row.requests)
        return (
            f"none: {most.dtype} holds the most, {most.requests} of {wanted}; give more cards (--tensor-parallel), "
            "fewer --users or a shorter --context."
        )
    best = min(enough, key=lambda row: (_cost(row), -row.requests))
    if best is not dense:
        calibrated = "" if best.dtype == FP8 else ", calibrated"
        return (
            f"{best.dtype}{calibrated}: of the dtypes that hold {wanted}, it has the least KL ({_cost(best):g} of "
            f"fp8's rounding); bf16 holds {dense.requests}, fp8 {rows[FP8].requests}."
        )
    packed = min((row for row in enough if row.dtype not in (DENSE, FP8)), key=_cost, default=dense)
    also = ""
    if packed.step_ms and dense.step_ms and packed.step_ms < WORTH_SAYING * dense.step_ms:
        also = f"; {packed.dtype} would take {packed.step_ms:.1f} ms per step instead of {dense.step_ms:.1f}"
    return f"{DENSE}: it holds the {wanted} without any loss{also}."


def _cost(row: Row) -> float:
    """KL to compare dtypes by; without a measurement, a number above any."""
    return math.inf if row.kl is None else row.kl


def assumptions(demand: Demand, said: list[str]) -> list[str]:
    """Lines under the table: values that were read, and assumptions. `said`: lines about the arguments."""
    model, serving = demand.model, demand.serving
    window, reason = recent_window(model, next(iter(FORMATS)), serving)
    lines = [
        f"{model.name}: {layers(model)}; weights {demand.weights.total / 1e9:.2f} GB ({demand.weights.source})",
        f"KV cache {demand.kv_memory / GIB:.2f} GiB per card; blocks of {serving.block_size} tokens",
        *filter(None, [describe_cache_scheme(nested(model.config, "quantization_config"))]),
        *said,
        f"recent window of {window} tokens" if window else f"no recent window{f': {reason}' if reason else ''}",
    ]
    if any(layer.kind in ("sliding", "chunked") for layer in model.layers):
        lines.append(f"sliding and chunked layers keep blocks for {serving.in_flight_tokens:,} tokens in flight")
    if not model.has_latents:
        lines.append(decodes(model, demand.card))
    if serving.skip_layers:
        lines.append("vLLM enlarges blocks if layers are skipped; by how much depends on whether the first one is")
        if len({(layer.kv_heads, layer.head_size) for layer in model.attention}) > 1:
            lines.append("not counted: how much, where layers have heads of several sizes or numbers")
    if model.is_hybrid:
        number = max(layer.states for layer in model.layers) + serving.drafts
        why = f"prefix caching, and drafts of {serving.drafts}" if serving.drafts else "prefix caching"
        lines.append(f"a request has {number} states per state layer ({why}); a page is as large as a state")
    if serving.drafts:
        lines.append("not counted: layers of the model that drafts, and what they store")
    if model.has_latents:
        number = sum(layer.rope_size > 0 for layer in model.layers)
        copies = number * _folded_bytes(model) / model.ranks
        lines.append(f"a packed dtype keeps {copies / GIB:.2f} GiB of folded weights per card in addition (kv_b_proj)")
    if model.picks_tokens:
        keys = [layer.index_bytes for layer in model.layers if layer.index_bytes]
        lines.append(
            f"index keys of {max(keys, default=0)} bytes a token in {len(keys)} of {len(model.layers)} layers, in "
            f"every dtype, and so blocks of {INDEX_BLOCK} tokens; fp8 is fp8_ds_mla"
        )
        lines.append("attention of decodes: beside fp8_ds_mla's by query heads of a rank and card, in docs/models.md")
    source = KL["latents"]["source"] if model.has_latents else KL["source"]
    lines.append(f"KL: {source}; calibrated once with packed-kv calibrate (in brackets without)")
    if window and not model.has_latents:
        lines.append(f"recall: {RECALL['source']}; likewise")
    if model.has_latents:
        lines.append("no step: not measured for latent attention (MLA)")
    elif demand.card.bandwidth:
        lines.append(f"step: {STEP['source']}")
        if model.is_hybrid:
            took = "48 of Qwen3.8-27B: 5 to 8 ms on an H200, without torch.compile"
            lines.append(f"step: without the small kernels of state layers ({took})")
        if is_measured_h100(demand.card):
            lines.append("step on H100: from the H200's; within 9 % of those measured: bf16, fp8, 4 and 2.5 bits")
        elif demand.card.name != STEP["gpu"]:
            lines.append(f"step on {demand.card.name}: not measured; shares of its bandwidth as on the {STEP['gpu']}")
        if unknown := [dtype for dtype in DTYPES if dtype not in STEP["share"]]:
            lines.append(f"no step of {', '.join(unknown)}: not measured (planning/measured.json)")
    else:
        lines.append("no step: the bandwidth of the card is not known (--bandwidth)")
    return lines


def decodes(model: Model, card: Card) -> str:
    """Name the kernel of a packed dtype's decodes, and the most new tokens of a request that it serves. With CUDA
    graphs, the layer with the smallest limit decides."""
    engine = Engine("cuda", card.capability, requests=card.served_at_once, is_here=False)
    served = []
    for layer in model.attention:
        group = max(1, model.query_heads(layer) // model.ranks // layer.kv_heads)
        window = None if layer.kind == "full" else layer.window
        asked = Pairs(
            None, layer.head_size, group, layer.value_size or None, window, model.config.get("attn_logit_softcapping")
        )
        served.append((who_serves(engine, asked), group))
    longest, group = min((of_layer.longest, group) for of_layer, group in served)
    kernel = "CUDA" if all(of_layer.kernel == CUDA for of_layer, _ in served) else "Triton"
    return (
        f"decodes of packed pages: {group} query heads per KV head; the {kernel} kernel takes steps of up to "
        f"{longest} new tokens per request (drafts included), {group * longest} columns; others run outside CUDA graphs"
    )


def _folded_bytes(model: Model) -> int:
    """Bytes of one layer's up-projections from latents to K and V, in the model's dtype, on all ranks."""
    channels = sum(whole(model.config, name) for name in ("qk_nope_head_dim", "v_head_dim"))
    return model.config["num_attention_heads"] * channels * whole(model.config, "kv_lora_rank") * MODEL_BYTES


def layers(model: Model) -> str:
    """The layers in words: `24 full layers of 8 KV heads of 128 channels, 24 sliding ...`."""
    kinds = Counter(
        (
            layer.kind,
            layer.kv_heads,
            layer.head_size,
            layer.value_size,
            (layer.rope_size, layer.rope_bits),
            layer.window,
            layer.state_bytes,
            layer.is_shared,
        )
        for layer in model.layers
    )
    words = []
    for (kind, heads, size, value_size, (rope_size, rope_bits), window, state, shared), number in kinds.items():
        if kind == "state":
            words.append(f"{number} state layers of {state:,} bytes")
            continue
        within = {"sliding": f" (window {window:,})", "chunked": f" (chunks of {window:,})"}.get(kind, "")
        sizes = f"{size} channels of K and {value_size} of V" if value_size else f"{size} channels"
        what = f"{number} {kind} layers{within} of {heads} KV heads of {sizes}"
        if rope_size:
            rope = f"{rope_size} of RoPE{'' if rope_bits == ROPE_BITS[0] else f' at {rope_bits} bits'}"
            what = f"{number} layers of latents of {size} channels and {rope}"
        words.append(f"{what}{' that read the pages of others' if shared else ''}")
    return ", ".join(words) + (f", on each of {model.ranks} cards" if model.ranks > 1 else "")


def as_json(demand: Demand, rows: list[Row], said: list[str]) -> dict[str, Any]:
    """The plan for programs: the same rows, recommendation and assumptions."""
    return {
        "model": demand.model.name,
        "gpu": demand.card.name,
        "context": demand.serving.context,
        "users": demand.users,
        "tensor_parallel": demand.model.ranks,
        "kv_cache_bytes": demand.kv_memory,
        "weights_bytes": demand.weights.total,
        "dtypes": [asdict(row) for row in rows],
        "recommendation": recommend(demand, rows),
        "assumed": assumptions(demand, said),
    }
