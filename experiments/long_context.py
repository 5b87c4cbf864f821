#!/usr/bin/env python3
"""Measure what calibration files are worth at long contexts, by position, on a CPU.

    python experiments/long_context.py MODEL --text FILE... --calibration OLD.json NEW.json

Two figures, of a model of full attention that transformers runs in fp32 over windows of texts:

- the share of K's energy that is left less a file's means, in bands of 1,024 positions (median over layers, mean over
  windows), position 0 left out
- the KL divergence of the last 128 tokens of a context from the exact model, without a file and with each. As behind a
  prompt that is prefilled whole, the tokens before them are exact, and the last ones read keys and values 64 or more
  behind as the reference codec gives them back, nearer ones raw
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from format_error import print_table
from packed_kv import FORMATS
from packed_kv.calibration_file import Calibration, fields_for, load
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.transform import ChannelTransform
from packed_kv.layout import RECENT_TOKENS
from packed_kv_quality.teacher_forced import text_windows, token_kl
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.model import load_model
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

BAND = 1024


class FarPacked:
    """A model whose attention reads keys and values `RECENT_TOKENS` or more behind through the codecs of `codecs`, by
    layer; empty: as they are."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.codecs: dict[int, PagedCodec] = {}
        AttentionInterface.register(ATTENTION, self.attention)

    def log_probs(self, ids: torch.Tensor, cache: DynamicCache, scored: int) -> torch.Tensor:
        """Of the tokens that follow the last `scored` of a context int64 [1, tokens], fp32 [scored, vocabulary]. The
        cache holds those before them, and afterwards again."""
        logits = self.model(ids[:, -scored:], past_key_values=cache, use_cache=True).logits[0]
        cache.crop(-scored)
        return logits.float().log_softmax(-1)

    def attention(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask, **options):
        """transformers' attention function: [1, heads, tokens, head_dim], keys and values of all tokens so far."""
        if module.layer_idx not in self.codecs:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        codec, tokens, count = self.codecs[module.layer_idx], key.shape[2], query.shape[2]
        positions = torch.arange(tokens)[:, None]
        far_key, far_value = (
            part.decode(part.encode(x[0].transpose(0, 1), positions), positions).transpose(0, 1)[None]
            for part, x in ((codec.key, key), (codec.value, value))
        )
        distance = torch.arange(tokens - count, tokens)[:, None] - torch.arange(tokens)
        near = (distance >= 0) & (distance < RECENT_TOKENS)
        both = torch.cat((distance >= RECENT_TOKENS, near), -1)[None, None]  # each token twice, and seen once
        keys, values = (torch.cat(pair, 2) for pair in ((far_key, key), (far_value, value)))
        return sdpa_attention_forward(module, query, keys, values, both, **{**options, "is_causal": False})


def layer_codecs(dtype: str, cache: DynamicCache, file: Calibration | None) -> dict[int, PagedCodec]:
    """A codec for each layer of the cache, with what it takes of a calibration file."""
    return {
        number: PagedCodec(
            FORMATS[dtype],
            layer.keys.shape[-1],
            **({name: getattr(file.layers[number], name) for name in fields_for(FORMATS[dtype])} if file else {}),
        )
        for number, layer in enumerate(cache.layers)
    }


def energy_left(cache: DynamicCache, file: Calibration) -> list[float]:
    """By bands of positions: the share of K's energy less the file's means, median over layers."""
    left = []
    for number, layer in enumerate(cache.layers):
        keys, known = layer.keys[0].transpose(0, 1)[1:], file.layers[number]
        transform = ChannelTransform(
            file.head_size, file.head_size, known.key_mean, None, known.key_first_mean, keys.device, known.key_rope
        )
        rest = keys - transform.means(torch.arange(1, len(keys) + 1)[:, None])
        sizes = (x.square().sum((1, 2)).split(BAND) for x in (rest, keys))
        left.append([float(part.sum() / whole.sum()) for part, whole in zip(*sizes, strict=True)])
    return [statistics.median(band) for band in zip(*left, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--calibration", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--dtypes", nargs="+", choices=list(FORMATS), default=["tq4", "isoquant4", "tq3"],
                        metavar="DTYPE")  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[1000, 3500, 7500], metavar="N")
    parser.add_argument("--windows", type=int, default=1, help="of each text (default: %(default)s)")
    parser.add_argument("--scored", type=int, default=128, help="tokens at the end (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    files = {None: None, **{path: load(path) for path in options.calibration}}
    Collector()  # registers the attention that the model is loaded with
    run = FarPacked(load_model(options.model, ATTENTION, "float32", torch.device("cpu")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    windows = []
    for path in options.text:
        with open(path, encoding="utf-8") as text:
            windows += text_windows(tokenizer, text.read(), max(options.lengths), options.windows)

    left: dict[str, list[list[float]]] = {path: [] for path in options.calibration}
    kl: dict[tuple[str, str | None, int], list[float]] = {}
    for window in windows:
        for length in sorted(options.lengths, reverse=True):
            ids, cache = torch.tensor([window[:length]]), DynamicCache()
            with torch.inference_mode():
                run.codecs = {}
                run.model.base_model(ids[:, : -options.scored], past_key_values=cache, use_cache=True)
                exact = run.log_probs(ids, cache, options.scored)
                for dtype in options.dtypes:
                    for path, file in files.items():
                        run.codecs = layer_codecs(dtype, cache, file)
                        found = token_kl(exact, run.log_probs(ids, cache, options.scored)).mean().item()
                        kl.setdefault((dtype, path, length), []).append(found)
                if length == max(options.lengths):
                    for path in options.calibration:
                        left[path].append(energy_left(cache, load(path)))
    bands = [f"{BAND * at:,}" for at in range(len(next(iter(left.values()))[0]))]
    rows = [[path, *(f"{statistics.mean(x):.2f}" for x in zip(*found, strict=True))] for path, found in left.items()]
    print_table(["energy left from", *bands], rows, options.markdown)
    rows = [
        [dtype, path or "no file"]
        + [f"{statistics.mean(kl[dtype, path, length]):.4f}" for length in options.lengths]
        + [f"{sum(kl[dtype, path, n]) / sum(kl[dtype, None, n]):.2f}" for n in options.lengths]
        for dtype in options.dtypes
        for path in files
    ]
    lengths = [f"{length:,}" for length in options.lengths]
    print_table(["dtype", "file", *(f"KL at {n}" for n in lengths), *(f"ratio at {n}" for n in lengths)], rows,
                options.markdown)  # fmt: skip


if __name__ == "__main__":
    main()
