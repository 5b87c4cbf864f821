#!/usr/bin/env python3
"""What a decode loses that reads only the pages that matter: KL divergence, greedy text and questions, by page size,
budget and rule.

    page_selection.py --model FOLDER --text FILE... [--length N] [--stretch 4] [--calibration FILE] [--out FILE]

Behind prompts that are prefilled whole and exactly, tokens are forced: the text's own, bf16's greedy ones, and
questions with their answers (page_tasks.py). They read keys and values as a packed dtype stores them, the last 64 as
they are ("fp8" as e4m3 without scales; "fp8 attention" the last 64, too, and queries and weights, as vLLM's
FlashAttention 3 does). Of the pages before those they read the first 64 tokens' and those with the largest estimate of
their attention, up to a budget of tokens; the query heads of a KV head read the same pages. Statistics of a page's keys
are kept by channel as they are stored, centred, scaled and rotated, 8 bits each:

    gaussian   mean and standard deviation; a page's estimate is log E exp(q.k) = q.mean + sum(q^2 std^2) / 2 of
               normally distributed keys
    mean       the mean alone
    bounds     minimum and maximum; the estimate is the largest q.k that they allow (Quest, arXiv 2406.10774)
    oracle     the attention itself: no rule can choose pages better by it

Results are printed at the end and, after each prompt, written to --out.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from packed_kv import FORMATS
from packed_kv.calibration_file import Calibration, load
from packed_kv_quality.teacher_forced import token_kl
from page_model import FP8_ATTENTION, RULES, Llama, Prompt, Reading, Rows, Store, forced
from page_tasks import KINDS, Question, prompts
from transformers import AutoTokenizer

EXACT = Reading("bf16")
RANKED = 3
"""A question counts for its log-probability if bf16 has each token of the answer among its so many likeliest."""


@dataclass
class Found:
    """What one way of reading gave, position by position, window by window, question by question."""

    kl: list[torch.Tensor] = field(default_factory=list)
    kl_to_all: list[torch.Tensor] = field(default_factory=list)
    top1: list[torch.Tensor] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    solved: list[bool] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    ranked: list[bool] = field(default_factory=list)


class Measurement:
    """The ways of reading, and what each has given so far."""

    def __init__(self, model: Llama, options: argparse.Namespace, file: Calibration | None) -> None:
        self.model, self.options = model, options
        dtypes = ["bf16", "fp8", FP8_ATTENTION, *options.dtypes]
        self.stores = {dtype: Store(dtype, model, file if dtype in FORMATS else None) for dtype in dtypes}
        self.found = {Reading(dtype): Found() for dtype in dtypes[:3]} | {how: Found() for how in self.readings()}
        self.kinds: list[str] = []
        self.windows = 0

    def readings(self) -> Iterator[Reading]:
        options = self.options
        for dtype in options.dtypes:
            yield Reading(dtype)
            for page, budget, rule in itertools.product(options.pages, options.budgets, options.rules):
                yield Reading(dtype, page, budget, rule)

    def each(self, ids: list[int], texts: list[list[int]]) -> Iterator[tuple[Reading, torch.Tensor]]:
        """Log-probabilities behind each token of texts that follow a prompt, by each way of reading."""
        keys, values = self.model.prefill(ids)
        rows = Rows.of(texts, len(ids), self.model.device)
        for dtype, ways in itertools.groupby(self.found, key=lambda how: how.dtype):
            prompt = Prompt(keys, values, self.stores[dtype])
            for how in ways:
                yield how, forced(self.model, prompt, rows, how)

    def window(self, ids: list[int], tokens: int) -> None:
        """Score the last `tokens` tokens of a text, and as many greedy ones from the first of them on."""
        ids, text = ids[:-tokens], ids[-tokens:]
        greedy = self.model.greedy(*self.model.prefill(ids), text[0], tokens)
        all_read: dict[str, torch.Tensor] = {}
        for how, log_probs in self.each(ids, [text, [text[0], *greedy[:-1]]]):
            of_text, of_greedy = log_probs.split(tokens)
            if not how.budget:
                all_read[how.dtype] = of_text
            found, exact = self.found[how], all_read["bf16"]
            found.kl.append(token_kl(exact, of_text).cpu())
            found.kl_to_all.append(token_kl(all_read[how.dtype], of_text).cpu())
            found.top1.append((exact.argmax(-1) == of_text.argmax(-1)).float().cpu())
            pairs = zip(of_greedy.argmax(-1).tolist(), greedy, strict=True)
            found.greedy.append(next((at for at, (a, b) in enumerate(pairs) if a != b), tokens))
        self.windows += 1

    def ask(self, ids: list[int], questions: list[Question]) -> None:
        starts = list(itertools.accumulate((len(question.ids) - 1 for question in questions), initial=0))
        device = self.model.device
        for how, log_probs in self.each(ids, [question.ids[:-1] for question in questions]):
            found = self.found[how]
            for start, question in zip(starts, questions, strict=False):
                rows = log_probs[[start + place - 1 for place in question.answers]]
                answer = torch.tensor([question.ids[place] for place in question.answers], device=device)
                given = rows.gather(-1, answer[:, None])
                found.solved.append(bool((rows.argmax(-1) == answer).all()))
                found.ranked.append(bool(((rows > given).sum(-1) < RANKED).all()))
                found.nats.append(given.sum().item())
        self.kinds += [question.kind for question in questions]

    def rows(self) -> list[dict[str, object]]:
        """A row a way of reading. Questions are those that bf16 solves, and nats those that it ranks well."""
        solvable, ranked = (torch.tensor(x, dtype=torch.bool) for x in (self._exact.solved, self._exact.ranked))
        rows = []
        for how, found in self.found.items():
            row: dict[str, object] = {**asdict(how), "length": self.options.length, "windows": self.windows}
            if found.kl:
                kl, kl_to_all, top1 = (torch.cat(x) for x in (found.kl, found.kl_to_all, found.top1))
                row |= {"kl": f"{kl.mean():.5f}", "kl_error": f"{_error(found.kl):.5f}"}
                row |= {"kl_p99": f"{kl.quantile(0.99):.4f}", "kl_to_all": f"{kl_to_all.mean():.5f}"}
                row |= {"top1": f"{top1.mean():.4f}", "greedy": f"{sum(found.greedy) / len(found.greedy):.1f}"}
            if solvable.any():
                solved = torch.tensor(found.solved)
                row |= {"solved": f"{int(solved[solvable].sum())}/{int(solvable.sum())}"}
                for kind in KINDS:
                    of_kind = solvable & torch.tensor([k == kind for k in self.kinds])
                    row[kind] = f"{int(solved[of_kind].sum())}/{int(of_kind.sum())}"
            if ranked.any():
                lost = (torch.tensor(self._exact.nats) - torch.tensor(found.nats))[ranked]
                row |= {"ranked": f"{int(ranked.sum())} of {len(self.kinds)}", "nats_lost": f"{lost.mean():.4f}"}
            rows.append(row)
        return rows

    @property
    def _exact(self) -> Found:
        return self.found[EXACT]


def _error(windows: list[torch.Tensor]) -> float:
    """Standard error of a mean over windows of equal size."""
    means = torch.stack([window.mean() for window in windows])
    return float(means.std(correction=1) / len(means) ** 0.5) if len(means) > 1 else math.nan


def pieces(tokenizer, text: str, tokens: int, scored: int, most: int) -> list[list[int]]:
    """Up to `most` pieces of a text, `tokens` tokens each with the one that a prompt begins with, spread evenly. They
    overlap where the text is short, but not in their last `scored` tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    size = tokens - 1
    room = len(ids) - size
    number = min(most, room // scored + 1) if room >= 0 else 0
    starts = [room * i // max(1, number - 1) for i in range(number)]
    return [[tokenizer.bos_token_id, *ids[at : at + size]] for at in starts]


def save(file: Path, rows: list[dict[str, object]], made: dict[str, object]) -> None:
    with file.open("w", newline="") as output:
        writer = csv.DictWriter(output, [*dict.fromkeys(name for row in rows for name in row), *made])
        writer.writeheader()
        writer.writerows({**row, **made} for row in rows)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_float32_matmul_precision("high")
    model = Llama(options.model, options.device, options.stretch)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    measurement = Measurement(model, options, load(str(options.calibration)) if options.calibration else None)
    texts = [path.read_text(encoding="utf-8") for path in options.text]
    size = options.length + options.tokens
    by_text = [pieces(tokenizer, text, size, options.tokens, options.windows) for text in texts]
    windows = [window for same in itertools.zip_longest(*by_text) for window in same if window]
    asked = prompts(tokenizer, texts, options.length, options.prompts, options.each)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
    made = {"model": options.model.name, "stretch": options.stretch, "calibrated": bool(options.calibration),
            "gpu": gpu, "torch": torch.__version__, "commit": options.commit}  # fmt: skip
    began = time.monotonic()
    for window, question in itertools.zip_longest(windows, asked):
        if window and time.monotonic() - began < options.seconds:
            measurement.window(window, options.tokens)
        if question and time.monotonic() - began < options.seconds:
            measurement.ask(*question)
        rows = measurement.rows()
        if options.out:
            save(options.out, rows, made)
        print(f"{time.monotonic() - began:.0f} s: {rows[-1]}", file=sys.stderr, flush=True)
    for row in measurement.rows():
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a Llama, such as SmolLM2-135M-Instruct")
    add("--calibration", type=Path, help="file of tq-calibrate, made with the same stretch")
    add("--text", type=Path, nargs="+", required=True, help="UTF-8 texts to score, and to hide facts in")
    add("--length", type=int, default=8000, help="tokens of a prompt, whole pages (default: %(default)s)")
    add("--tokens", type=int, default=192, help="forced behind it (default: %(default)s)")
    add("--windows", type=int, default=4, help="of each text at most (default: %(default)s)")
    add("--stretch", type=float, default=1, help="by YaRN (default: %(default)g)")
    add("--dtypes", nargs="+", choices=FORMATS, default=["tq4", "turboquant25"], help="default: %(default)s")
    add("--pages", type=int, nargs="+", default=[16, 32, 64], help="tokens of a page (default: %(default)s)")
    add("--budgets", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens read (default: %(default)s)")
    add("--rules", nargs="+", choices=RULES, default=["gaussian", "bounds"], help="default: %(default)s")
    add("--prompts", type=int, default=4, help="with facts, and as many of common words (default: %(default)s)")
    add("--each", type=int, default=12, help="questions of a kind in a prompt (default: %(default)s)")
    add("--seconds", type=float, default=math.inf, help="no prompt begins afterwards")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="CSV file")
    add("--commit", default="", help="of this checkout, for the file")
    options = parser.parse_args(arguments)
    if any(options.length % page for page in options.pages):
        parser.error(f"--length {options.length} is not whole pages of {options.pages} tokens")
    return options


if __name__ == "__main__":
    sys.exit(main())
