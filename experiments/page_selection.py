#!/usr/bin/env python3
"""What a decode loses that reads only the pages that matter: KL divergence and tasks, by page size, budget and rule.

    page_selection.py --model FOLDER --text FILE... [--length N] [--stretch 4] [--csv FILE]

A Llama in PyTorch: prompts are prefilled whole, then a known text is forced behind them, and each of its tokens reads
keys and values as a packed dtype stores them, the last 64 as they are ("fp8" as e4m3 without scales; "fp8 attention"
the last 64, too, and queries and weights, as vLLM's FlashAttention 3 does). Of the pages before those it reads the
first 64 tokens' and those with the largest estimate of their attention, up to a budget of tokens; the query heads of a
KV head read the same pages. Statistics of a page's keys are kept by channel in the rotated basis, 8 bits each:

    gaussian   mean and standard deviation; a page's estimate is log E exp(q.k) = q.mean + sum(q^2 std^2) / 2 of
               normally distributed keys
    mean       the mean alone
    bounds     minimum and maximum; the estimate is the largest q.k that they allow (Quest, arXiv 2406.10774)

Positions are independent of each other, so all forced tokens of a prompt run as one batch, layer by layer.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from packed_kv import FORMATS
from packed_kv.codecs.pages import PagedCodec
from packed_kv_quality.tasks import KINDS, Task, tasks
from packed_kv_quality.teacher_forced import text_windows, token_kl
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NEAR = 64
"""Tokens of the recent window, and of the beginning of a request, which are always read."""
RULES = ("gaussian", "mean", "bounds")
FP8_ATTENTION = "fp8 attention"
Tensors = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Keys and values by layer."""


@dataclass(frozen=True)
class Reading:
    """How keys and values are read: a dtype of `FORMATS`, "fp8", "fp8 attention" or "bf16", all of them (`budget` 0)
    or, of pages of `page` tokens, `budget` tokens chosen by `rule`."""

    dtype: str
    page: int = 0
    budget: int = 0
    rule: str = ""


class Llama:
    """The model of a folder. `stretch`: by which factor YaRN lengthens its context; 1: not at all."""

    def __init__(self, folder: Path, device: str, stretch: float = 1) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.device, self.context = device, int(config.max_position_embeddings * stretch)
        kind = "default"
        if stretch > 1:
            kind = "yarn"
            config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": stretch,
                                      "original_max_position_embeddings": config.max_position_embeddings}  # fmt: skip
            config.max_position_embeddings = self.context
        if kind == "default":
            theta = config.rope_parameters["rope_theta"]
            frequencies, factor = theta ** (-torch.arange(0, self.size, 2).double() / self.size), 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        angles = torch.outer(torch.arange(self.context).double(), frequencies.double()).repeat(1, 2)
        self.cos, self.sin = ((f(angles) * factor).float().to(device) for f in (torch.cos, torch.sin))
        self.weights = {name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()}

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[name])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weights[name].float(), self.eps).bfloat16()

    def qkv(self, layer: int, hidden: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of tokens from position `start` on: [heads, tokens, size], [KV heads, tokens, size] twice, bf16."""
        x, prefix = (
            self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight"),
            f"model.layers.{layer}.self_attn",
        )
        q, k, v = (
            self._linear(x, f"{prefix}.{name}_proj.weight").unflatten(-1, (-1, self.size)).transpose(0, 1)
            for name in "qkv"
        )
        cos, sin = (table[start : start + len(x)] for table in (self.cos, self.sin))

        def turn(y: torch.Tensor) -> torch.Tensor:
            low, high = y.float().chunk(2, -1)
            return (y.float() * cos + torch.cat((-high, low), -1) * sin).bfloat16()

        return turn(q), turn(k), v

    def rest(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer behind its attention, whose output is [heads, tokens, size]."""
        prefix = f"model.layers.{layer}"
        hidden = hidden + self._linear(
            attended.transpose(0, 1).flatten(1).bfloat16(), f"{prefix}.self_attn.o_proj.weight"
        )
        x = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (self._linear(x, f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        return hidden + self._linear(functional.silu(gate) * up, f"{prefix}.mlp.down_proj.weight")

    def embed(self, ids: list[int]) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"][torch.tensor(ids, device=self.device)]

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        name = "lm_head.weight" if "lm_head.weight" in self.weights else "model.embed_tokens.weight"
        return self._linear(self._norm(hidden, "model.norm.weight"), name).float().log_softmax(-1)

    def prefill(self, ids: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Keys and values of a prompt by layer, and the log-probabilities behind its last token [vocabulary]."""
        hidden, keys, values = self.embed(ids), [], []
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, hidden, 0)
            attended = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=True
            )
            hidden = self.rest(layer, hidden, attended[0])
            keys.append(k)
            values.append(v)
        return keys, values, self.log_probs(hidden[-1:])[0]


class Store:
    """What reading back a stored key or value gives, and the rotation under which pages keep statistics of keys."""

    def __init__(self, dtype: str, size: int, device: str) -> None:
        self.dtype = dtype
        self.codec = PagedCodec(FORMATS[dtype], size, device=torch.device(device)) if dtype in FORMATS else None

    def key(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same, bf16."""
        return x if self.codec is None and self.dtype == "bf16" else self._read(x, "key")

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same, bf16."""
        return x if self.codec is None and self.dtype == "bf16" else self._read(x, "value")

    def _read(self, x: torch.Tensor, role: str) -> torch.Tensor:
        if self.codec is None:
            return to_fp8(x)
        codec = getattr(self.codec, role)
        return codec.decode(codec.encode(x.float())).to(x.dtype)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [..., size], rotated as keys are."""
        return x if self.codec is None else self.codec.key.rotate(x)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def forced(model: Llama, prompt: tuple[Tensors, Tensors], ids: list[int], store: Store, how: Reading) -> torch.Tensor:
    """Log-probabilities fp32 [tokens, vocabulary] behind each of `ids`, which follow the prompt with these keys and
    values (of every layer: as they are, and as they are read back)."""
    (near_keys, near_values), (far_keys, far_values) = prompt
    start = near_keys[0].shape[1]
    hidden = model.embed(ids)
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, hidden, start)
        raw_keys = torch.cat((near_keys[layer][:, max(0, start - NEAR) :], k), 1).float()
        raw_values = torch.cat((near_values[layer][:, max(0, start - NEAR) :], v), 1).float()
        stored_keys = torch.cat((far_keys[layer], store.key(k)), 1).float()
        stored_values = torch.cat((far_values[layer], store.value(v)), 1).float()
        hidden = model.rest(
            layer, hidden, attend(q.float(), stored_keys, stored_values, raw_keys, raw_values, start, store, how)
        )
    return model.log_probs(hidden)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, raw_keys: torch.Tensor, raw_values: torch.Tensor,
    start: int, store: Store, how: Reading,
) -> torch.Tensor:  # fmt: skip
    """Attention of queries [heads, tokens, size] at positions `start` on over stored keys and values [KV heads, all
    tokens, size], and raw ones of the last tokens in place of those: fp32 [heads, tokens, size]."""
    kv_heads, total, size = keys.shape
    group = len(q) // kv_heads
    is_fp8 = how.dtype == FP8_ATTENTION
    if is_fp8:
        q = to_fp8(q)
    q = q.unflatten(0, (kv_heads, group)) * size**-0.5
    position = torch.arange(start, total, device=q.device)[:, None]
    token = torch.arange(total, device=q.device)
    is_near = (position - token < NEAR) & (not is_fp8)
    first_raw = total - raw_keys.shape[1]
    scores = q @ keys[:, None].transpose(-1, -2)
    raw = q @ raw_keys[:, None].transpose(-1, -2)
    scores[..., first_raw:] = torch.where(is_near[:, first_raw:], raw, scores[..., first_raw:])
    visible = (token <= position).expand(kv_heads, -1, -1)
    if how.budget:
        visible = visible & (is_near | (token < NEAR) | chosen(q, keys, start, store, how))
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
    if is_fp8:  # the weights of FlashAttention are divided by their sum behind the product with V
        largest = weights.amax(-1, keepdim=True)
        weights = to_fp8(weights / largest) * largest
    near = weights[..., first_raw:] * is_near[:, first_raw:]
    return ((weights * ~is_near) @ values[:, None] + near @ raw_values[:, None]).flatten(0, 1)


def chosen(q: torch.Tensor, keys: torch.Tensor, start: int, store: Store, how: Reading) -> torch.Tensor:
    """Which tokens lie in the chosen pages: bool [KV heads, tokens, all tokens]. q: scaled, [KV heads, group, tokens,
    size]."""
    pages = keys.shape[1] // how.page
    paged = store.rotate(keys[:, : pages * how.page]).unflatten(1, (pages, how.page))
    estimates = estimate(store.rotate(q), paged, how.rule)
    # The estimate of a page beside the others' of its head: heads of a group have scores of different scales.
    position = torch.arange(start, keys.shape[1], device=q.device)[:, None]
    end = torch.arange(1, pages + 1, device=q.device) * how.page
    candidate = (end > NEAR) & (end <= position - NEAR + how.page)
    estimates = estimates.masked_fill(~candidate, -math.inf).log_softmax(-1).amax(1)
    count = min(pages, (how.budget - 2 * NEAR) // how.page)
    best = estimates.nan_to_num(nan=-math.inf).topk(count, dim=-1)
    picked = torch.zeros_like(estimates, dtype=torch.bool).scatter_(-1, best.indices, best.values > -math.inf)
    tokens = picked.repeat_interleave(how.page, -1)
    return functional.pad(tokens, (0, keys.shape[1] - tokens.shape[-1]))


def estimate(q: torch.Tensor, paged: torch.Tensor, rule: str) -> torch.Tensor:
    """Of each page's attention, in nats up to a constant: q [KV heads, group, tokens, size], paged [KV heads, pages,
    tokens of a page, size] -> [KV heads, group, tokens, pages]."""
    if rule == "bounds":
        low, high = (eight_bits(found).transpose(-1, -2)[:, None] for found in (paged.amin(2), paged.amax(2)))
        return q.clamp(min=0) @ high + q.clamp(max=0) @ low
    mean = eight_bits(paged.mean(2)).transpose(-1, -2)[:, None]
    if rule == "mean":
        return q @ mean
    deviation = eight_bits(paged.std(2, correction=0)).transpose(-1, -2)[:, None]
    return q @ mean + q.square() @ deviation.square() / 2


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """[..., size], rounded to 255 steps of its largest magnitude."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


def stored(store: Store, found: list[torch.Tensor], role: str) -> list[torch.Tensor]:
    return [getattr(store, role)(x) for x in found]


def readings(options: argparse.Namespace) -> Iterator[Reading]:
    for dtype in options.dtypes:
        yield Reading(dtype)
        for page, budget, rule in itertools.product(options.pages, options.budgets, options.rules):
            yield Reading(dtype, page, budget, rule)


@torch.inference_mode()
def main() -> int:
    options = parse_arguments()
    torch.set_float32_matmul_precision("high")
    model = Llama(options.model, options.device, options.stretch)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    stores = {name: Store(name, model.size, options.device) for name in ("bf16", "fp8", FP8_ATTENTION, *options.dtypes)}
    all_readings = [Reading("bf16"), Reading("fp8"), Reading(FP8_ATTENTION), *readings(options)]
    found: dict[Reading, dict[str, list[torch.Tensor]]] = {
        how: {name: [] for name in ("kl", "kl_full", "top1", "solved", "answer")} for how in all_readings
    }
    windows = [
        window
        for path in options.text
        for window in text_windows(
            tokenizer, path.read_text(encoding="utf-8"), options.length + options.tokens + 1, options.windows
        )
    ]
    asked = tasks(tokenizer, options.kinds, options.tasks, options.length, seed=0)
    asked = [task for first in range(options.tasks) for task in asked[first :: options.tasks]]  # the kinds in turn
    ends = time.monotonic() + options.seconds
    for window in windows:
        if time.monotonic() > ends:
            break
        prompt, ids = window[: options.length], window[options.length : -1]
        for how, log_probs, full in run(model, stores, prompt, ids, all_readings):
            exact = full[Reading("bf16")]
            found[how]["kl"].append(token_kl(exact, log_probs).cpu())
            found[how]["kl_full"].append(token_kl(full[Reading(how.dtype)], log_probs).cpu())
            found[how]["top1"].append((exact.argmax(-1) == log_probs.argmax(-1)).float().cpu())
        print(f"a window of {len(prompt)} tokens", file=sys.stderr, flush=True)
    kinds: list[str] = []
    for task in asked:
        if time.monotonic() > ends + options.seconds:
            break
        for how, solved, log_prob in answers(model, stores, task, all_readings):
            found[how]["solved"].append(torch.tensor([float(solved)]))
            found[how]["answer"].append(torch.tensor([log_prob]))
        kinds.append(task.kind)
        print(f"a task: {task.kind}", file=sys.stderr, flush=True)
    report(options, found, kinds)
    return 0


def run(
    model: Llama, stores: dict[str, Store], prompt: list[int], ids: list[int], all_readings: list[Reading]
) -> Iterator[tuple[Reading, torch.Tensor, dict[Reading, torch.Tensor]]]:
    """The log-probabilities of `ids` by each way of reading, and those of reading all, by dtype."""
    keys, values, _ = model.prefill(prompt)
    full: dict[Reading, torch.Tensor] = {}
    for dtype, group in itertools.groupby(all_readings, key=lambda how: how.dtype):
        store = stores[dtype]
        caches = (keys, values), (stored(store, keys, "key"), stored(store, values, "value"))
        for how in group:
            log_probs = forced(model, caches, ids, store, how)
            if not how.budget:
                full[how] = log_probs
            yield how, log_probs, full


def answers(
    model: Llama, stores: dict[str, Store], task: Task, all_readings: list[Reading]
) -> Iterator[tuple[Reading, bool, float]]:
    """Whether greedy decoding would write the answer, and its log-probability; its first token is the prefill's."""
    keys, values, first = model.prefill(task.token_ids)
    answer = torch.tensor(task.answer_ids, device=first.device)
    for dtype, group in itertools.groupby(all_readings, key=lambda how: how.dtype):
        store = stores[dtype]
        caches = (keys, values), (stored(store, keys, "key"), stored(store, values, "value"))
        for how in group:
            log_probs = first[None]
            if behind := task.answer_ids[:-1]:
                log_probs = torch.cat((log_probs, forced(model, caches, behind, store, how)))
            solved = torch.equal(log_probs.argmax(-1), answer)
            yield how, solved, log_probs.gather(-1, answer[:, None]).sum().item()


def report(options: argparse.Namespace, found: dict[Reading, dict[str, list[torch.Tensor]]], kinds: list[str]) -> None:
    """A line a way of reading, and rows for --csv: tasks are those that bf16 solves."""
    known = torch.cat(found[Reading("bf16")]["solved"]).bool() if kinds else torch.zeros(0, dtype=torch.bool)
    rows = []
    for how, values in found.items():
        row: dict[str, object] = {**how.__dict__, "length": options.length, "stretch": options.stretch}
        if values["kl"]:
            kl, kl_full = torch.cat(values["kl"]), torch.cat(values["kl_full"])
            row |= {"positions": len(kl), "kl": f"{kl.mean():.5f}", "kl_p99": f"{kl.quantile(0.99):.4f}"}
            row |= {"kl_to_full": f"{kl_full.mean():.5f}", "top1": f"{torch.cat(values['top1']).mean():.4f}"}
        if known.any():
            solved, lost = torch.cat(values["solved"])[known], torch.cat(found[Reading("bf16")]["answer"])[known]
            row |= {"tasks": int(known.sum()), "solved": f"{solved.mean():.4f}",
                    "nats_lost": f"{(lost - torch.cat(values['answer'])[known]).mean():.4f}"}  # fmt: skip
            for kind in options.kinds:
                of_kind = torch.tensor([k == kind for k in kinds])[known]
                row[kind] = f"{int(solved[of_kind].sum())}/{int(of_kind.sum())}"
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.csv:
        is_new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, [*dict.fromkeys(name for row in rows for name in row), "made_with"])
            if is_new:
                writer.writeheader()
            device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
            made = {"device": device, "torch": torch.__version__, "model": options.model.name, "commit": options.commit}
            writer.writerows({**row, "made_with": json.dumps(made)} for row in rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a Llama, such as SmolLM2-135M-Instruct")
    add("--text", type=Path, nargs="*", default=[], help="UTF-8 texts to score")
    add("--length", type=int, default=7500, help="tokens of a prompt (default: %(default)s)")
    add("--tokens", type=int, default=192, help="forced behind it (default: %(default)s)")
    add("--windows", type=int, default=4, help="of each text (default: %(default)s)")
    add("--stretch", type=float, default=1, help="by YaRN (default: %(default)g)")
    add("--dtypes", nargs="+", choices=FORMATS, default=["tq4", "turboquant25"], help="default: %(default)s")
    add("--pages", type=int, nargs="+", default=[16, 32, 64], help="tokens of a page (default: %(default)s)")
    add("--budgets", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens read (default: %(default)s)")
    add("--rules", nargs="+", choices=RULES, default=list(RULES), help="default: %(default)s")
    add("--tasks", type=int, default=8, help="of each kind; 0: none (default: %(default)s)")
    add("--kinds", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != "json"])
    add("--seconds", type=float, default=math.inf, help="for texts, and again for tasks: no new one begins then")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--csv", type=Path)
    add("--commit", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
