#!/usr/bin/env python3
"""Pages that leave for host memory or disk at fewer bits than are served: KL of a conversation that comes back.

    python experiments/tier_precision.py MODEL --text fiction.txt technical.txt [--calibration FILE]

A prompt is read by the plain model in fp32, by transformers. Then its keys and values become what pages at rest would
give back: encoded in the served dtype, decoded, encoded in the dtype at rest, decoded, and encoded in the served dtype
again, as the engine's kernels read no other. The text behind it is decoded token by token, teacher-forced. A query
reads the last 64 tokens, its own included, raw (8 bits cost nearly nothing, docs/tried.md), but of a prompt that came
back all tokens from its pages, as the recent window is not moved; older new tokens are read in the served dtype.

The figure is the mean KL divergence of the next token to the plain model, in nats, over the first 64 new tokens and
over all, with its standard error over blocks of 64. All cases are rows of one batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from packed_kv import FORMATS
from packed_kv.calibration_file import Calibration, load
from packed_kv.codecs.codec import Codec
from packed_kv.layout import RECENT_TOKENS
from packed_kv.transformers import _Settings
from packed_kv_quality.teacher_forced import text_windows, token_kl
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

BLOCK = 64
CASES: dict[str, tuple[str | None, str | None, bool]] = {
    "plain": (None, None, False),
    "tq4, stays": ("tq4", None, False),
    "tq4, comes back": ("tq4", None, True),
    "tq4, at rest turboquant35": ("tq4", "turboquant35", True),
    "tq4, at rest tq3": ("tq4", "tq3", True),
    "tq4, at rest turboquant25": ("tq4", "turboquant25", True),
    "turboquant25, stays": ("turboquant25", None, False),
    "turboquant25, comes back": ("turboquant25", None, True),
}
"""Row: served dtype, dtype at rest if another, whether the prompt came back from a tier."""


class Dtypes:
    """Round trips of a layer's keys and values, [.., KV heads, tokens, head_dim], through dtypes."""

    def __init__(self, calibration: Calibration | None) -> None:
        self.calibration = calibration
        self.made: dict[tuple[str, int], tuple[Codec, Codec]] = {}

    def codecs(self, name: str, layer: int, like: torch.Tensor) -> tuple[Codec, Codec]:
        if (name, layer) not in self.made:
            paged = _Settings(FORMATS[name], 0, self.calibration, None).codec(layer, like, like)
            self.made[name, layer] = paged.key, paged.value
        return self.made[name, layer]

    def round_trip(self, name: str, layer: int, vectors: torch.Tensor, role: int, first: int) -> torch.Tensor:
        """`vectors` of K (role 0) or V (1) of tokens from position `first` on."""
        codec = self.codecs(name, layer, vectors)[role]
        positions = torch.arange(first, first + vectors.shape[-2])[:, None]
        by_token = vectors.transpose(-2, -3)
        return codec.decode(codec.encode(by_token, positions), positions).transpose(-2, -3)


def measure(model: Any, ids: torch.Tensor, prompt: int, dtypes: Dtypes) -> torch.Tensor:
    """KL [cases, windows, new tokens] for ids [windows, tokens]."""
    windows, cases = len(ids), len(CASES)
    cache = DynamicCache()
    with torch.inference_mode():
        model(ids[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
        raw = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        packed = [tuple(x.repeat(cases, 1, 1, 1) for x in pair) for pair in raw]
        for row, (served, rest, _) in enumerate(CASES.values()):
            rows = slice(row * windows, (row + 1) * windows)
            for number, pair in enumerate(packed):
                for role, vectors in enumerate(pair):
                    for name in (served, rest, served if rest else None):
                        if name:
                            vectors[rows] = dtypes.round_trip(name, number, vectors[rows], role, 0)
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = (x.clone() for x in packed[number])
            for row, (_, _, returned) in enumerate(CASES.values()):
                if not returned:  # the recent window
                    rows, recent = slice(row * windows, (row + 1) * windows), slice(prompt - RECENT_TOKENS + 1, prompt)
                    layer.keys[rows, :, recent], layer.values[rows, :, recent] = (x[:, :, recent] for x in raw[number])
        kl = []
        for at in range(prompt, ids.shape[1]):
            logits = model(ids[:, at].repeat(cases)[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
            rows_of = logits.float().log_softmax(-1).view(cases, windows, -1)
            kl.append(torch.stack([token_kl(rows_of[0], x) for x in rows_of]))
            leaving = at - RECENT_TOKENS + 1  # of the window, before the next query
            for number, layer in enumerate(cache.layers):
                for row, (served, _, _) in enumerate(CASES.values()):
                    rows = slice(row * windows, (row + 1) * windows)
                    for role, held in enumerate((layer.keys, layer.values)):
                        if served and leaving >= prompt:
                            one = held[rows, :, leaving : leaving + 1]
                            held[rows, :, leaving : leaving + 1] = dtypes.round_trip(served, number, one, role, leaving)
                        elif served and leaving >= 0:
                            held[rows, :, leaving] = packed[number][role][rows, :, leaving]
    return torch.stack(kl, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=256, help="tokens behind it (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=2, help="pieces of each text (default: %(default)s)")
    parser.add_argument("--calibration", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    found = []
    for path in options.text:
        pieces = text_windows(
            tokenizer, path.read_text(encoding="utf-8"), options.prompt + options.new, options.windows
        )
        calibration = load(options.calibration) if options.calibration else None
        found.append(measure(model, torch.tensor(pieces), options.prompt, Dtypes(calibration)))
        print(path.name, flush=True)
    kl = torch.cat(found, 1)
    config = model.config
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    print(f"| row | bytes at rest | KL, first {BLOCK} | KL, all {options.new} |\n|---|---:|---:|---:|")
    for row, (name, (served, rest, _)) in enumerate(CASES.items()):
        blocks = kl[row].unflatten(-1, (-1, BLOCK)).mean(-1)
        first, every = blocks[:, 0], blocks.flatten()
        bytes_at_rest = FORMATS[rest or served].slot_bytes(size) if served else 4 * size
        figures = (f"{x.mean():.4f} ± {x.std() / len(x) ** 0.5:.4f}" for x in (first, every))
        print(f"| {name} | {bytes_at_rest} |", " | ".join(figures), "|")
    used = {name: version(name) for name in ("packed-kv", "torch", "transformers")}
    print(json.dumps({"made_with": used, "machine": platform.machine(), "tokens": kl[0].numel()}))


if __name__ == "__main__":
    main()
