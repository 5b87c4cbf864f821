#!/usr/bin/env python3
"""Measure what unequal widths of K's sections, V's mean, queries weighed from afar and a trellis are worth, on a CPU.

    python quality/section_widths.py MODEL --text FILE... --windows 4 --output kl.json
    python quality/section_widths.py MODEL --text FILE... --widths turboquant25+twos turboquant25+joined

KL divergence of the next token from the exact model, as `long_context.py` measures it, with every key and value that is
64 or more tokens behind read back through a code, nearer ones through the ring's. Nothing is packed, so what no dtype
has can be measured: sections of 32 channels of K, sorted by the cost of their errors, each rotated on its own and with
a width of its own (1 bit by evenly spaced magnitudes), or trellis codes (`tail_biting.py`) in place of today's.
A row and its dtype of today have the same bytes.

Means, scales and orders are chosen as `tq-calibrate` does, on Python's help topics. With --output, windows measured so
far are kept in a file, and a later run continues from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from format_error import print_table
from long_context import FP8, Case, FarPacked, ReadBack, Results, measure, prefill, ratio, through_other
from packed_kv import FORMATS
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs import ring, scalar
from packed_kv.codecs.rotations import Hadamard
from packed_kv.codecs.transform import ChannelTransform
from packed_kv.formats import CODES, GROUP_SIZE, MAX_SCALE_BYTE, runs
from packed_kv.layout import RECENT_TOKENS
from packed_kv_quality.teacher_forced import text_windows
from tail_biting import round_trip
from tq_calibrate.attended import NEAR, STRIDE
from tq_calibrate.choose import outlier_channels
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.model import load_model
from tq_calibrate.ropes import ModelRope, before_rope, sums_before_rope, turned_squares
from tq_calibrate.scales import channel_scale
from tq_calibrate.statistics import LayerStatistics
from tq_calibrate.text import load_tokenizer, read_text, token_sequences
from transformers import DynamicCache

CPU = torch.device("cpu")
SEARCH = {1: (0, 20)}
"""bits -> scale bytes tried above and below absmax's byte, for the widths that no dtype has."""
BLOCKS = 8
"""Blocks of consecutive tokens of a window, over which standard errors are taken."""


TRELLISES = {"twos": 2, "threes": 3, "joined": 3}
"""Groups that have trellis codes -> their most bits. A chain has the groups of one width; joined, of all widths."""
KEY_LANE, VALUE_LANE, SHORTEST_CHAIN = 8, 4, 8
"""Channels of a group that a lane of the decode kernels has, which a chain can hold; shorter chains gain nothing."""


@dataclass(frozen=True)
class Row:
    """A dtype of today, with V less its mean, K's scales and order by queries weighed from afar, K's widths, and a
    trellis."""

    dtype: str
    value_mean: bool = False
    from_afar: bool = False
    key_bits: tuple[int, ...] = ()
    trellis: str = ""

    def __str__(self) -> str:
        changes = ["V less mean"] * self.value_mean + ["from afar"] * self.from_afar
        changes += [f"K {self.key_bits}"] * bool(self.key_bits) + [f"trellis {self.trellis}"] * bool(self.trellis)
        return ", ".join([self.dtype, *changes])

    def less_last_change(self) -> Row:
        if self.trellis:
            return replace(self, trellis="")
        if self.key_bits:
            return replace(self, key_bits=())
        return replace(self, from_afar=False) if self.from_afar else Row(self.dtype)


def rows(widths: Mapping[str, Sequence[tuple[tuple[int, ...], str]]]) -> list[Row]:
    """Each dtype of `widths` as it is today, with each change, and with each list of widths of K and trellis on top."""
    found = []
    for dtype, changes in widths.items():
        found += [Row(dtype), Row(dtype, True), Row(dtype, True, True)]
        for bits, trellis in changes:
            found.append(Row(dtype, True, True, bits))
            found.append(Row(dtype, True, True, bits, trellis) if trellis else Row(dtype, True, False, bits))
    return list(dict.fromkeys(found))


@dataclass
class Moments:
    """Statistics of a layer that no calibration file holds today; float64 [KV heads, channels].

    value_mean, value_first_mean: mean of V behind position 0, and at it.
    value_variance: mean square of V less those.
    far_weight: mean square of the queries, each weighed by the sum of its squared attention weights of the keys that
        are `NEAR` or more behind it.
    """

    value_mean: torch.Tensor
    value_first_mean: torch.Tensor
    value_variance: torch.Tensor
    far_weight: torch.Tensor


class MomentCollector(Collector):
    """A `Collector` that also gathers `Moments`. Batches must be of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[int, dict[str, torch.Tensor]] = {}

    def attention(self, module: Any, query, key, value, attention_mask, **options):
        output = super().attention(module, query, key, value, attention_mask, **options)
        ropes = [rope for rope, *_ in self.sums.layers[module.layer_idx].ropes]
        asked, heads = torch.arange(NEAR, key.shape[2], STRIDE), key.shape[1]
        behind = asked[:, None] - torch.arange(key.shape[2])
        queries = query[0, :, asked]
        scores = queries.unflatten(0, (heads, -1)) @ key[0, :, None].transpose(-1, -2) * options["scaling"]
        attention = scores.masked_fill_(behind < 0, -torch.inf).softmax(-1).masked_fill_(behind < NEAR, 0)
        weights = attention[..., 1:].square().sum(-1).flatten(0, 1).T.double()  # [queries, heads]
        by_token, later = queries.transpose(0, 1).double(), value[0, :, 1:].double()
        before = [sums_before_rope(before_rope(by_token, asked, rope), rope, weights) for rope in ropes]
        added = {
            "queries": torch.stack([sums.unflatten(0, (heads, -1)).sum(1) for sums in before]),
            "attention": weights.sum(0).unflatten(0, (heads, -1)).sum(1),
            "value": later.sum(1),
            "squares": later.square().sum(1),
            "first": value[0, :, 0].double(),
            "tokens": torch.tensor([later.shape[1], 1]),
        }
        sums = self.added.setdefault(module.layer_idx, {})
        sums |= {name: x + sums[name] if sums else x for name, x in added.items()}
        return output

    def moments(self, layer: int, rope: ModelRope) -> Moments:
        """The means so far of a layer with a RoPE of the model."""
        sums = self.added[layer]
        tokens, sequences = sums["tokens"].tolist()
        mean = sums["value"] / tokens
        queries = sums["queries"][self.sums.layers[layer].ropes.index(rope)] / sums["attention"][:, None]
        variance = sums["squares"] / tokens - mean.square()
        return Moments(mean, sums["first"] / sequences, variance, turned_squares(queries, rope))


class Sections:
    """K or V of one layer as pages and the ring give it back: sections of channels, each rotated on its own.

    Args:
        means: what is subtracted before and added afterwards.
        scale: of each channel, float64 [heads, channels].
        order: of the channels as they are stored, int64 [heads, channels].
        widths: (bits, groups of 32 channels) of each section.
        longer: decoded vectors are multiplied by `Code.value_gain`, as V is.
        trellis: of `TRELLISES`.
    """

    def __init__(
        self,
        means: ChannelTransform,
        scale: torch.Tensor,
        order: torch.Tensor,
        widths: Sequence[tuple[int, int]],
        longer: bool,
        trellis: str = "",
    ) -> None:
        self.means, self.scale, self.order, self.longer = means, scale.float(), order, longer
        self.trellis, self.lane = trellis, VALUE_LANE if longer else KEY_LANE
        self.bits = [bits for bits, _ in widths]
        self.sizes = [GROUP_SIZE * groups for _, groups in widths]
        self.rotations = [Hadamard(size, CPU) for size in self.sizes]

    def read_back(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors fp32 [tokens, heads, channels] from position 0 on, as pages and as the ring give them back."""
        means = self.means.means(torch.arange(len(x))[:, None])
        order = self.order.expand_as(x)
        parts = ((x - means) * self.scale).gather(-1, order).split(self.sizes, -1)
        rotated = [rotation.forward(part) for rotation, part in zip(self.rotations, parts, strict=True)]
        far = self.decoded(rotated)
        near = [ring.round_trip(part) for part in rotated]

        def restored(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            back = torch.cat([r.inverse(part) for r, part in zip(self.rotations, parts, strict=True)], -1)
            return torch.empty_like(x).scatter_(-1, order, back) / self.scale + means

        return restored(far), restored(near)

    def decoded(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sections of rotated vectors, fp32 [..., channels] each, as their codes give them back."""
        groups = torch.cat([part.unflatten(-1, (-1, GROUP_SIZE)) for part in parts], -2)
        bits = [b for b, size in zip(self.bits, self.sizes, strict=True) for _ in range(size // GROUP_SIZE)]
        found, chains = torch.empty_like(groups), self.chains(bits)
        for chain in chains:
            found[..., chain, :] = round_trip(groups[..., chain, :], [bits[i] for i in chain], self.lane, self.longer)
        for i in set(range(len(bits))).difference(*chains):
            found[..., i, :] = self.scalar_codes(groups[..., i, :], bits[i])
        return list(found.flatten(-2).split(self.sizes, -1))

    def chains(self, bits: Sequence[int]) -> list[list[int]]:
        """The groups of each trellis chain."""
        if not self.trellis:
            return []
        of_widths: dict[int, list[int]] = {}
        for i, width in enumerate(bits):
            if width <= TRELLISES[self.trellis]:
                of_widths.setdefault(0 if self.trellis == "joined" else width, []).append(i)
        return [groups for groups in of_widths.values() if len(groups) * self.lane >= SHORTEST_CHAIN]

    def scalar_codes(self, groups: torch.Tensor, bits: int) -> torch.Tensor:
        if bits not in CODES:
            return evenly_spaced(groups, bits)
        gain = CODES[bits].value_gain if self.longer else 1.0
        return scalar.dequantize(*scalar.quantize(groups, bits), bits, gain)


def evenly_spaced(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Groups fp32 [..., 32], as signs and magnitudes of 1/2, 3/2, ... steps give them back, with the e5m3 step of least
    error among those of `SEARCH`."""
    magnitude, levels = groups.abs(), 1 << bits - 1
    start = (magnitude.amax(-1) / (levels - 0.5)).half().view(torch.int16) >> 7
    best, least = torch.zeros_like(groups), torch.full_like(groups[..., :1], torch.inf)
    for offset in range(-SEARCH[bits][1], SEARCH[bits][0] + 1):
        step = scalar.decode_scale((start + offset).clamp(0, MAX_SCALE_BYTE).to(torch.uint8)).unsqueeze(-1)
        found = ((magnitude / step).nan_to_num().floor().clamp(max=levels - 1) + 0.5) * step
        error = (magnitude - found).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return torch.where(groups < 0, -best, best)


def through_row(row: Row, layer: LayerStatistics, moments: Moments, tokens: int) -> ReadBack:
    """Reads back a layer's keys and values of up to `tokens` tokens, each as pages and as the ring hold them."""
    assert layer.rope is not None and layer.key_mean is not None
    fmt, channels = FORMATS[row.dtype], layer.key_energy.shape[-1]
    today = runs(fmt.group_bits(channels))
    key_means = ChannelCalibration(mean=layer.key_mean, first_mean=layer.key_first_mean, rope=layer.rope.rope)
    value_means, value_energy = ChannelCalibration(), layer.value_energy
    if row.value_mean:
        value_means = ChannelCalibration(mean=moments.value_mean, first_mean=moments.value_first_mean)
        value_energy = moments.value_variance
    key_weight = moments.far_weight if row.from_afar else layer.key_weight
    key_scale, value_scale = channel_scale(layer.key_variance, key_weight), torch.ones_like(value_energy)
    count = fmt.outlier_channels(channels)
    key_order = value_order = torch.arange(channels).expand_as(key_scale)
    if count:
        value_scale = channel_scale(value_energy, layer.value_weight)
        value_order = outliers_first(value_energy, layer.value_weight, value_scale, count)
        key_order = outliers_first(layer.key_variance, key_weight, key_scale, count)
    if row.key_bits:
        key_order = (layer.key_variance * key_weight).argsort(-1, descending=True)
    widths = [(bits, 1) for bits in row.key_bits] or today
    of_key = Sections(transform(channels, key_means, tokens), key_scale, key_order, widths, False, row.trellis)
    of_value = Sections(transform(channels, value_means, tokens), value_scale, value_order, today, True, row.trellis)

    def read_back(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (far_key, near_key), (far_value, near_value) = of_key.read_back(key), of_value.read_back(value)
        return far_key, far_value, near_key, near_value

    return read_back


def outliers_first(energy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, count: int) -> torch.Tensor:
    """All channels, the outlier channels of scaled vectors first; [heads, channels] of each argument but `count`."""
    chosen = outlier_channels(energy * scale.square(), weight / scale.square(), count)
    is_outlier = torch.zeros_like(energy, dtype=torch.bool).scatter_(-1, chosen, True)
    return (~is_outlier).int().argsort(dim=-1, stable=True)


def transform(channels: int, means: ChannelCalibration, tokens: int) -> ChannelTransform:
    return ChannelTransform(channels, channels, means, CPU, positions=tokens)


def statistics_of(
    model: Any, tokenizer: Any, sequences: int, length: int
) -> dict[int, tuple[LayerStatistics, Moments]]:
    """Statistics of each layer from Python's help topics. Ends the program if a layer has no RoPE."""
    collector = MomentCollector()
    pieces = token_sequences(read_text([]), tokenizer, sequences * length, length, seed=0)
    collector.run(model, [[ids] for ids in pieces], lambda _tokens: None)
    layers = collector.statistics().layers
    if without := [number for number, layer in layers.items() if layer.rope is None]:
        raise SystemExit(f"section_widths: layers {without} have no RoPE that is known; such models are not measured")
    return {number: (layer, collector.moments(number, layer.rope)) for number, layer in layers.items() if layer.rope}


def bits_of(row: Row | None, channels: int) -> float:
    """Bits a channel of K and V, scales among them; None: fp8."""
    return 8.0 if row is None else FORMATS[row.dtype].vector_bytes(channels) * 8 / channels


def widths_of(text: str) -> tuple[str, tuple[tuple[int, ...], str]]:
    """DTYPE=BITS,BITS,..., DTYPE=BITS,BITS,...+TRELLIS or DTYPE+TRELLIS of the command line."""
    named, _, trellis = text.partition("+")
    dtype, _, numbers = named.partition("=")
    if dtype not in FORMATS or FORMATS[dtype].rotation != "hadamard":
        raise argparse.ArgumentTypeError(f"{dtype} is no dtype with Hadamard rotation")
    if trellis and trellis not in TRELLISES:
        raise argparse.ArgumentTypeError(f"{trellis} is none of {', '.join(TRELLISES)}")
    bits = tuple(map(int, numbers.split(","))) if numbers else ()
    if unknown := set(bits) - {*CODES, *SEARCH}:
        raise argparse.ArgumentTypeError(f"there is no code of {unknown.pop()} bits")
    return dtype, (bits, trellis)


def lengths_of(text: str) -> tuple[int, int]:
    """PROMPT:SCORED of the command line."""
    prompt, _, scored = text.partition(":")
    return int(prompt), int(scored)


HEADS_OF_64 = ("tq4=5,3", "turboquant35=5,2", "tq3=4,2", "turboquant25=4,1")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="folder")
    add("--text", nargs="+", required=True, type=Path, metavar="FILE")
    add("--widths", nargs="+", type=widths_of, default=[widths_of(text) for text in HEADS_OF_64],
        metavar="DTYPE=BITS+TRELLIS",
        help="of K's sections, by dtype of the same bytes, and which groups of K and V have trellis codes: "
             f"{', '.join(TRELLISES)} (default: {' '.join(HEADS_OF_64)})")  # fmt: skip
    add("--tests", nargs="+", type=lengths_of, default=[(0, 1024), (3500, 192)], metavar="PROMPT:SCORED",
        help="tokens of the exact prompt, and behind it those that are scored (default: 0:1024 3500:192)")  # fmt: skip
    add("--windows", type=int, default=2, help="of each text (default: %(default)s)")
    add("--sequences", type=int, default=16, help="to choose scales by (default: %(default)s)")
    add("--sequence-tokens", type=int, default=1024, help="of each (default: %(default)s)")
    add("--output", type=Path, metavar="FILE")
    add("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    widths: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for dtype, change in options.widths:
        widths.setdefault(dtype, []).append(change)
    wanted: list[Row | None] = [None, *rows(widths)]

    Collector()  # registers the attention that the model is loaded with
    model, tokenizer = load_model(options.model, ATTENTION, "float32", CPU), load_tokenizer(options.model)
    for dtype, (bits, _trellis) in options.widths:
        of_dtype = FORMATS[dtype].group_bits(model.config.head_dim)
        if bits and (len(bits), sum(bits)) != (len(of_dtype), sum(of_dtype)):
            parser.error(f"K of {bits} bits has not the bytes of {dtype}, which has {of_dtype} in this model")
    chosen_by = statistics_of(model, tokenizer, options.sequences, options.sequence_tokens)
    run, results = FarPacked(model), Results(options.output)

    def layers(row: Row | None, tokens: int) -> tuple[int, dict[int, ReadBack]]:
        if row is None:
            return 0, dict.fromkeys(chosen_by, through_other(FP8))
        return RECENT_TOKENS, {number: through_row(row, *of_layer, tokens) for number, of_layer in chosen_by.items()}

    for prompt, scored in options.tests:
        windows: dict[str, list[int]] = {}
        for path in options.text:
            pieces = text_windows(tokenizer, path.read_text(encoding="utf-8"), prompt + scored, options.windows)
            windows |= {f"{path.stem} {number}": piece for number, piece in enumerate(pieces)}
        case = Case("", "", RECENT_TOKENS, prompt)
        for name, ids in sorted(windows.items(), key=lambda window: window[0].split()[-1]):
            missing = [row for row in wanted if (replace(case, dtype=title(row)), name) not in results.kl]
            if not missing:
                continue
            cache = prefill(model, ids[:prompt]) if prompt else DynamicCache()
            measured = measure(run, cache, torch.tensor([ids]), (layers(row, len(ids)) for row in missing))
            for row, kl in zip(missing, measured, strict=True):
                results.add(replace(case, dtype=title(row)), name, kl)
                results.save()
            print(f"{name}, {prompt:,} + {scored:,}", flush=True)
        print_rows(results, case, list(windows), wanted, model.config.head_dim, options.markdown)


def title(row: Row | None) -> str:
    return "fp8 e4m3" if row is None else str(row)


def print_rows(
    results: Results, case: Case, windows: Sequence[str], wanted: Sequence[Row | None], channels: int, markdown: bool
) -> None:
    """KL divergence of each row, with its standard error over blocks of windows, and its ratios to others, paired."""

    def kl(row: Row | None) -> list[float]:
        of_windows = [results.kl[replace(case, dtype=title(row)), window] for window in windows]
        blocks = (block for kl in of_windows for block in torch.tensor(kl).tensor_split(BLOCKS))
        return [float(block.mean()) for block in blocks]

    found = []
    for row in wanted:
        ours = kl(row)
        cells = [title(row), f"{bits_of(row, channels):g}", f"{fmean(ours):.5f} ± {stdev(ours) / len(ours) ** 0.5:.5f}"]
        others = [Row(row.dtype), row.less_last_change(), None] if row else []
        cells += ["" if row == other else ratio(ours, kl(other)) for other in others] or [""] * 3
        found.append(cells)
    scored = sum(len(results.kl[replace(case, dtype=title(None)), window]) for window in windows)
    print(f"\n{len(windows)} windows, prompts of {case.prompt:,} tokens, {scored:,} tokens scored\n")
    print_table(["K and V", "bits", "KL", "of today's", "of it less the last change", "of fp8's"], found, markdown)


if __name__ == "__main__":
    main()
