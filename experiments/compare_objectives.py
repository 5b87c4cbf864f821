#!/usr/bin/env python3
"""Measure the gain of calibration, by `tq-calibrate` and by simpler ways, on text that none of them saw.

Three errors of each dtype, on K and V that go through the public codec: of scores (each query's mean error is
subtracted, as softmax ignores it) and of the attention's output after the output projection, both as relative squared
error averaged over layers; and the KL divergence of the next token to the model without quantization, in nats. All by
transformers in fp32. `--markdown` prints the tables of docs/calibration.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from format_error import print_table
from packed_kv import FORMATS, get_codec
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs import Codec
from packed_kv.formats import GROUP_SIZE
from tq_calibrate.choose import LayerChoice, channel_order, choose, outlier_channels
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.model import load_config, load_model, model_folder
from tq_calibrate.statistics import LayerStatistics, Statistics
from tq_calibrate.text import load_tokenizer, read_text, token_sequences
from tq_calibrate.transformers_engine import batches
from tq_calibrate.weights import estimate
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

DEMO_MODEL = Path(__file__).resolve().parents[1] / "models" / "demo-7m"
SCORED = slice(2000, 14000)
"""Characters of the text that are scored; calibration reads the rest."""
SCORED_TOKENS, LENGTH = 1800, 2048
RECIPE = "turboquant35"


def energy(layer: LayerStatistics) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.key_energy, layer.value_energy


def magnitude(layer: LayerStatistics) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.key_max, layer.value_max


def weighted(layer: LayerStatistics) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.key_energy * layer.key_weight, layer.value_energy * layer.value_weight


RANKINGS: dict[str, Callable[[LayerStatistics], tuple[torch.Tensor, torch.Tensor]]] = {
    "largest energy": energy,
    "largest magnitude": magnitude,
    "energy x weight": weighted,
}
"""Channels ranked by a figure of their own: the first are outliers, and scale groups are cut from the ranking."""


PARTS = {"channels alone": (False, False), "channels and means": (True, False), "channels and scales": (False, True)}
"""What tq-calibrate finds, in parts: with means, with scales."""
SORTED = "the same groups, sorted"


def ranked(layer: LayerStatistics, figures: tuple[torch.Tensor, torch.Tensor]) -> LayerChoice:
    orders = [figure.argsort(dim=-1, descending=True, stable=True) for figure in figures]
    count = FORMATS[RECIPE].outlier_channels(layer.key_energy.shape[-1])
    outliers = [order[:, :count].sort(-1).values for order in orders]
    key, value = map(ChannelCalibration, outliers, orders)
    return LayerChoice(key, value)


def choices_of(seen: Statistics, alike: Statistics, weights: Statistics) -> dict[str, dict[int, LayerChoice] | None]:
    """Name -> channels of each layer; None: as they come. In `alike` all keys count the same."""
    choices: dict[str, dict[int, LayerChoice] | None] = {"none": None}
    for name, figures in RANKINGS.items():
        choices[name] = {number: ranked(layer, figures(layer)) for number, layer in seen.layers.items()}
    for name, (means, scales) in PARTS.items():
        choices[name] = {n: chosen_with(layer, means, scales) for n, layer in seen.layers.items()}
    whole = {n: choose(layer, RECIPE) for n, layer in seen.layers.items()}
    choices["tq-calibrate, one mean for all tokens"] = {
        n: dataclasses.replace(choice, key=dataclasses.replace(choice.key, first_mean=None))
        for n, choice in whole.items()
    }
    choices["tq-calibrate, all keys alike"] = {n: choose(layer, RECIPE) for n, layer in alike.layers.items()}
    choices["tq-calibrate --weights-only"] = {n: choose(layer, RECIPE) for n, layer in weights.layers.items()}
    choices["tq-calibrate"] = whole
    choices[SORTED] = {n: sorted_groups(layer, whole[n]) for n, layer in seen.layers.items()}
    return choices


def chosen_with(layer: LayerStatistics, means: bool, scales: bool) -> LayerChoice:
    """Channels of least error behind means alone, scales alone, or neither."""
    if not means:
        layer = dataclasses.replace(layer, key_variance=layer.key_energy, key_mean=None, key_first_mean=None, rope=None)
    if scales:
        return choose(layer, RECIPE)
    count = FORMATS[RECIPE].outlier_channels(layer.key_energy.shape[-1])
    key, value = (layer.key_variance, layer.key_weight), (layer.value_energy, layer.value_weight)
    return LayerChoice(
        ChannelCalibration(outlier_channels(*key, count), channel_order(*key), layer.key_mean, layer.key_first_mean),
        ChannelCalibration(outlier_channels(*value, count), channel_order(*value)),
        layer.rope,
    )


def sorted_groups(layer: LayerStatistics, choice: LayerChoice) -> LayerChoice:
    """The same scale groups, with channels of like size beside each other in them."""
    assert choice.key.scale is not None
    orders = []
    stored = layer.key_variance * choice.key.scale.square()
    for energy, order in ((stored, choice.key.channel_order), (layer.value_energy, choice.value.channel_order)):
        groups = order.unflatten(-1, (-1, GROUP_SIZE))
        by_size = energy.gather(-1, order).view_as(groups).argsort(dim=-1, descending=True)
        orders.append(groups.gather(-1, by_size).flatten(1))
    key, value = (
        dataclasses.replace(channels, channel_order=order)
        for channels, order in zip((choice.key, choice.value), orders, strict=True)
    )
    return dataclasses.replace(choice, key=key, value=value)


def codecs(dtype: str, head_size: int, choice: LayerChoice | None) -> tuple[Codec, Codec]:
    """A layer's codecs of K and V, with what the engine takes of a calibration file for this dtype."""
    if choice is None:
        return get_codec(dtype, head_size, "key"), get_codec(dtype, head_size, "value")
    fmt = FORMATS[dtype]
    key = dataclasses.replace(choice.key.taken_by(fmt, "key"), rope=choice.rope and choice.rope.rope)
    return Codec(fmt, head_size, "key", key), Codec(fmt, head_size, "value", choice.value.taken_by(fmt, "value"))


def through(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """fp32 [batch, KV heads, tokens, head_size] -> what the codec makes of it."""
    x = x.transpose(1, 2)
    positions = torch.arange(x.shape[1])[:, None]
    return codec.restore(codec.dequantize(*codec.quantize(x, positions)), positions).transpose(1, 2)


class QuantizedRun:
    """A model whose attention reads K and V through codecs, and that measures what this does to each layer."""

    def __init__(self, model: transformers.PreTrainedModel, token_ids: list[int]) -> None:
        self.model, self.ids = model, torch.tensor([token_ids])
        self.codecs: dict[int, tuple[Codec, Codec]] = {}
        self.measuring = False
        self.errors: list[tuple[float, float]] = []
        AttentionInterface.register(ATTENTION, self.attention)
        self.true_log_probs = self.log_probs()

    def log_probs(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(input_ids=self.ids, use_cache=False).logits[0].log_softmax(-1)

    def measure(self, layer_codecs: dict[int, tuple[Codec, Codec]]) -> tuple[float, float, float]:
        """Errors of scores and outputs, with true inputs of each layer, and KL with all layers quantized."""
        self.codecs, self.errors = layer_codecs, []
        self.measuring = True
        self.log_probs()
        self.measuring = False
        log_probs = self.log_probs()
        kl = (self.true_log_probs.exp() * (self.true_log_probs - log_probs)).sum(-1).mean()
        scores, outputs = torch.tensor(self.errors).mean(0)
        return float(scores), float(outputs), float(kl)

    def attention(self, module: Any, query, key, value, mask, **options):
        if module.layer_idx not in self.codecs:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        key_codec, value_codec = self.codecs[module.layer_idx]
        coded_key, coded_value = through(key_codec, key), through(value_codec, value)
        coded = sdpa_attention_forward(module, query, coded_key, coded_value, mask, **options)
        if not self.measuring:
            return coded
        true = sdpa_attention_forward(module, query, key, value, mask, **options)
        outputs = [module.o_proj(result[0].flatten(2)) for result in (true, coded)]
        self.errors.append((score_error(query, key, coded_key), relative_error(outputs[0], outputs[1])))
        return true


def score_error(query: torch.Tensor, key: torch.Tensor, coded: torch.Tensor) -> float:
    """Relative squared error of causal scores, of each query less their mean, which the softmax ignores."""
    group = query.shape[1] // key.shape[1]
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    sums = torch.zeros(2, dtype=torch.float64)
    for head in range(query.shape[1]):
        true = query[0, head] @ key[0, head // group].T
        error = query[0, head] @ (coded - key)[0, head // group].T
        for at, scores in enumerate((error, true)):
            mean = (scores * causal).sum(-1, keepdim=True) / causal.sum(-1, keepdim=True)
            sums[at] += ((scores - mean) * causal).square().sum()
    return float(sums[0] / sums[1])


def relative_error(true: torch.Tensor, coded: torch.Tensor) -> float:
    return float((coded - true).double().square().sum() / true.double().square().sum())


def matters(dtype: str, name: str, layers: dict[int, LayerChoice] | None) -> bool:
    """Whether a row says anything of a dtype: Hadamards have no orders of channels, and tq4 no outliers either."""
    if layers is None or FORMATS[dtype].rotation != "hadamard":
        return True
    transformed = any(choice.key.mean is not None or choice.key.scale is not None for choice in layers.values())
    return name != SORTED and bool(transformed or FORMATS[dtype].outlier_bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder (default: the demo model)")
    parser.add_argument("--dtypes", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="DTYPE")
    parser.add_argument("--tokens", type=int, default=32768, help="to calibrate on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the text to calibrate on")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    text, tokenizer = read_text([]), load_tokenizer(options.model)
    config = load_config(options.model)
    collector = Collector()
    model = load_model(options.model, ATTENTION, "float32", torch.device("cpu"))
    sequences = token_sequences(text[SCORED.stop :], tokenizer, options.tokens, LENGTH, options.seed)
    collector.run(model, batches(sequences, 4), lambda _tokens: None)
    seen = collector.statistics()
    alike = collector.sums.statistics(even=1.0)
    choices = choices_of(seen, alike, estimate(config, model_folder(options.model)))
    run = QuantizedRun(model, tokenizer.encode(text[SCORED])[:SCORED_TOKENS])

    figures: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, layers in choices.items():
        figures[name] = {
            dtype: run.measure(
                {n: codecs(dtype, seen.head_sizes[0], layers[n] if layers else None) for n in seen.layers}
            )
            for dtype in options.dtypes
            if matters(dtype, name, layers)
        }
    print(f"{Path(options.model).name}, PyTorch {torch.__version__}, {platform.machine()}\n")
    for at, what in enumerate(("error of scores", "error of outputs", "KL divergence")):
        rows = [
            (name, *(f"{row[dtype][at]:.4f}" if dtype in row else "" for dtype in options.dtypes))
            for name, row in figures.items()
        ]
        print_table((what, *options.dtypes), rows, options.markdown)


if __name__ == "__main__":
    main()
