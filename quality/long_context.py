#!/usr/bin/env python3
"""Measure what calibration files are worth at long contexts, by position, on a CPU.

    python quality/long_context.py MODEL --text FILE... --calibration OLD.json NEW.json

Two figures, of a model of full attention that transformers runs in fp32 over windows of texts:

- the share of K's energy that is left less a file's means, in bands of 1,024 positions (median over layers, mean over
  windows), position 0 left out
- the KL divergence of 128 tokens behind a prompt from the exact model, without a file and with each. As behind a prompt
  that is prefilled whole, the tokens before them are exact, and the last ones read keys and values 64 or more behind as
  the reference codec gives them back, nearer ones raw. "bf16" and "fp8" among the dtypes are rounding keys and values
  to bf16 and to e4m3

With --output, windows measured so far are kept in a file, and a later run continues from there. --rows makes a CSV
file of the rows: mean, standard error, 99th and 99.9th percentile of the KL divergence by dtype and length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import csv_rows
import torch
import transformers
from format_error import print_table
from llama_codes import CODES, bytes_of, read_back_pair
from packed_kv import FORMATS
from packed_kv.calibration_file import Calibration, load
from packed_kv.channel_calibration import LayerCalibration
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.transform import ChannelTransform
from packed_kv.json_file import read_json
from packed_kv.kernels.cpu.gather import CpuGather
from packed_kv.kernels.cpu.store import CpuStore
from packed_kv.layout import MICRO_BLOCK, RECENT_TOKENS
from packed_kv.private_file import replace_file
from packed_kv.transformers import CACHE_ARGUMENT
from packed_kv_quality.teacher_forced import text_windows, through_e4m3, token_kl
from packed_kv_quality.uncertainty import block_means, standard_error
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.model import load_model
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

BAND, BF16, FP8 = 1024, "bf16", "fp8"
OTHERS = (BF16, FP8, *CODES)
QUERIES = 256
"""Queries whose attention is computed at once, over the tokens that the last of them sees."""
ReadBack = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Keys and values [tokens, heads, head_dim] from position 0 on -> the same as pages give them back and, unless that is
as they are, as the recent window does."""


class FarPacked:
    """A model whose attention reads keys and values `recent` or more tokens behind through the codecs of `codecs`, by
    layer; empty: as they are."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.recent = RECENT_TOKENS
        self.codecs: Mapping[int, ReadBack] = {}
        AttentionInterface.register(ATTENTION, self.attention)

    def log_probs(self, ids: torch.Tensor, cache: DynamicCache, scored: int) -> torch.Tensor:
        """Return log probabilities, fp32 [scored, vocabulary], of the tokens that follow the last `scored` of a context
        int64 [1, tokens]. The cache holds the tokens before the scored ones, and is cut to these again afterwards."""
        logits = self.model(ids[:, -scored:], **{CACHE_ARGUMENT: cache}, use_cache=True).logits[0]
        cache.crop(-scored)
        return logits.float().log_softmax(-1)

    def attention(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask, **options):
        """transformers' attention function: [1, heads, tokens, head_dim], keys and values of all tokens so far."""
        if module.layer_idx not in self.codecs:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        tokens, count = key.shape[2], query.shape[2]
        read_back = self.codecs[module.layer_idx](key[0].transpose(0, 1), value[0].transpose(0, 1))
        far_key, far_value, *near_pair = (x.transpose(0, 1)[None] for x in read_back)
        near_key, near_value = near_pair or (key, value)
        outputs = []
        for start in range(tokens - count, tokens, QUERIES):
            end = min(start + QUERIES, tokens)
            first = max(0, start - self.recent + 1) if self.recent else end  # what a window shows to any of these
            distance = torch.arange(start, end)[:, None] - torch.arange(end)
            near = (distance >= 0) & (distance < self.recent)
            seen = torch.cat((distance >= self.recent, near[:, first:]), -1)[None, None]
            keys = torch.cat((far_key[:, :, :end], near_key[:, :, first:end]), 2)
            values = torch.cat((far_value[:, :, :end], near_value[:, :, first:end]), 2)
            queries = query[:, :, start - tokens + count : end - tokens + count]
            output, _ = sdpa_attention_forward(module, queries, keys, values, seen, **{**options, "is_causal": False})
            outputs.append(output)
        return torch.cat(outputs, 1), None


def through_reference(codec: PagedCodec) -> ReadBack:
    """Reads back by the reference codec."""

    def read_back(*vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(len(vectors[0]))[:, None]
        return tuple(
            part.decode(part.encode(x, positions), positions) for part, x in zip(codec.codecs, vectors, strict=True)
        )

    return read_back


def through_kernels(codec: PagedCodec) -> ReadBack:
    """Reads back by the C++ kernels, which store pages and gather them."""
    store, gather = CpuStore(codec), CpuGather(codec)

    def read_back(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, heads, _ = key.shape
        blocks, positions = -(-tokens // MICRO_BLOCK), torch.arange(tokens)
        pages = torch.zeros(blocks, heads, MICRO_BLOCK, codec.slot_bytes, dtype=torch.uint8)
        store(pages, key, value, positions, positions)
        found = torch.empty(key.shape), torch.empty(value.shape)
        gather(pages, torch.arange(blocks, dtype=torch.int32), 0, tokens, *found)
        return found

    return read_back


CODECS = {"reference": through_reference, "kernels": through_kernels}


def through_other(code: str) -> ReadBack:
    """Reads back by a code of `OTHERS`."""
    if code in CODES:
        return lambda key, value: read_back_pair(code, key, value)
    return lambda *vectors: tuple(x.bfloat16().float() if code == BF16 else through_e4m3(x) for x in vectors)


def bytes_of_token(dtype: str, model: PreTrainedModel) -> int:
    """Bytes of the keys and values of a token in all layers."""
    config = model.config
    channels = config.head_dim
    if dtype in FORMATS:
        vector = FORMATS[dtype].vector_bytes(channels)
    else:
        vector = bytes_of(dtype, channels) if dtype in CODES else channels * (2 if dtype == BF16 else 1)
    return 2 * vector * config.num_key_value_heads * config.num_hidden_layers


def layer_codecs(
    dtype: str, cache: DynamicCache, tokens: int, file: Calibration | None, codec: str = "reference"
) -> Mapping[int, ReadBack]:
    """Make the readers of up to `tokens` keys and values of each layer of the cache, with their parts of a calibration
    file.

    codec: of `CODECS`.
    """
    if dtype in OTHERS:
        return dict.fromkeys(range(len(cache.layers)), through_other(dtype))
    fmt, found = FORMATS[dtype], {}
    for number, layer in enumerate(cache.layers):
        known = file.taken_by(fmt, file.layers[number]) if file else LayerCalibration()
        of_layer = PagedCodec(fmt, layer.keys.shape[-1], known.key, known.value, positions=tokens)
        found[number] = CODECS[codec](of_layer)
    return found


def energy_left(cache: DynamicCache, file: Calibration) -> list[float]:
    """Share of K's energy that is left without the file's means, by bands of positions, median over layers."""
    left = []
    for number, layer in enumerate(cache.layers):
        keys, known = layer.keys[0].transpose(0, 1)[1:], file.layers[number]
        means = replace(known.key, scale=None)
        transform = ChannelTransform(file.head_size, file.head_size, means, keys.device)
        rest = keys - transform.means(torch.arange(1, len(keys) + 1)[:, None])
        sizes = (x.square().sum((1, 2)).split(BAND) for x in (rest, keys))
        left.append([float(part.sum() / whole.sum()) for part, whole in zip(*sizes, strict=True)])
    return [statistics.median(band) for band in zip(*left, strict=True)]


@dataclass(frozen=True)
class Case:
    """Setting of KL divergences; `file`: the calibration's path, "" without one."""

    dtype: str
    file: str
    recent: int
    prompt: int


class Results:
    """KL divergences of the tokens scored by case and window, in a file if there is a path, which an earlier run may
    have begun."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        rows = read_json(path) if path and path.exists() else []
        self.kl: dict[tuple[Case, str], list[float]] = {(Case(**row["case"]), row["window"]): row["kl"] for row in rows}

    def add(self, case: Case, window: str, kl: list[float]) -> None:
        self.kl[case, window] = kl

    def save(self) -> None:
        if self.path:
            rows = [{"case": asdict(case), "window": window, "kl": kl} for (case, window), kl in self.kl.items()]
            lines = ",\n".join(map(json.dumps, rows))
            replace_file(self.path, f"[{lines}]\n".encode())

    def of(self, case: Case, windows: Sequence[str]) -> list[float]:
        """Mean of each window."""
        return [statistics.fmean(self.kl[case, window]) for window in windows]

    def tail(self, case: Case, windows: Sequence[str], share: float = 0.999) -> float:
        """The 99.9th percentile over all windows, or another."""
        return torch.tensor([kl for window in windows for kl in self.kl[case, window]]).quantile(share).item()

    def error(self, case: Case, windows: Sequence[str]) -> float | None:
        """The standard error of the mean, kinds of text as strata; None of too little text."""
        kinds: dict[str, list[torch.Tensor]] = {}
        for window in windows:
            kinds.setdefault(window.rpartition(" ")[0], []).append(torch.tensor(self.kl[case, window]))
        return standard_error([block_means(found) for found in kinds.values()])


def ratio(ours: Sequence[float], others: Sequence[float]) -> str:
    """Return the ratio of two means of pairs, with its standard error if there are several."""
    found = statistics.fmean(ours) / statistics.fmean(others)
    if len(ours) < 2:
        return f"{found:.2f}"
    left = [one - found * other for one, other in zip(ours, others, strict=True)]
    return f"{found:.2f} ± {statistics.stdev(left) / len(left) ** 0.5 / statistics.fmean(others):.2f}"


def prefill(model: PreTrainedModel, ids: Sequence[int]) -> DynamicCache:
    """The cache of a prompt, fp32 whatever the model's dtype."""
    cache = DynamicCache()
    with torch.inference_mode():
        model.base_model(torch.tensor([ids]), **{CACHE_ARGUMENT: cache}, use_cache=True)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
    return cache


def measure(
    run: FarPacked, cache: DynamicCache, ids: torch.Tensor, codecs: Iterable[tuple[int, Mapping[int, ReadBack]]]
) -> Iterator[list[float]]:
    """KL divergences of the tokens of int64 [1, tokens] behind a prompt's cache, for each recent window and codecs."""
    scored = ids.shape[1] - cache.get_seq_length()
    with torch.inference_mode():
        run.codecs = {}
        exact = run.log_probs(ids, cache, scored)
        for run.recent, run.codecs in codecs:
            yield token_kl(exact, run.log_probs(ids, cache, scored)).tolist()
    run.codecs = {}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="folder")
    add("--text", nargs="+", required=True, metavar="FILE")
    add("--calibration", nargs="+", required=True, metavar="FILE")
    add("--dtypes", nargs="+", choices=[*FORMATS, *OTHERS], default=["tq4", "isoquant4", "tq3"], metavar="DTYPE")
    add("--lengths", nargs="+", type=int, default=[1000, 3500, 7500], metavar="N", help="tokens of prompts")
    add("--windows", type=int, default=1, help="of each text (default: %(default)s)")
    add("--scored", type=int, default=128, help="tokens behind a prompt (default: %(default)s)")
    add("--recent", nargs="+", type=int, default=[RECENT_TOKENS], metavar="N",
        help="tokens that are read as they are (default: %(default)s)")  # fmt: skip
    add("--files-only", action="store_true", help="do not measure our dtypes without a file, too")
    add("--codec", choices=CODECS, default="reference")
    add("--prompt-dtype", default="float32", metavar="T", help="what prompts are prefilled in (default: %(default)s)")
    add("--output", type=Path, metavar="FILE")
    add("--markdown", action="store_true")
    csv_rows.add_options(parser)
    options = parser.parse_args(arguments)
    files: dict[str, Calibration | None] = {"": None, **{path: load(path) for path in options.calibration}}
    Collector()  # registers the attention that the model is loaded with
    run = FarPacked(load_model(options.model, ATTENTION, "float32", torch.device("cpu")))
    prompts = run.model
    if options.prompt_dtype != "float32":
        prompts = load_model(options.model, ATTENTION, options.prompt_dtype, torch.device("cpu"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    windows: dict[str, list[int]] = {}
    tokens = max(options.lengths) + options.scored + 1
    for path in options.text:
        pieces = text_windows(tokenizer, Path(path).read_text(encoding="utf-8"), tokens, options.windows)
        windows |= {f"{Path(path).stem} {number}": piece for number, piece in enumerate(pieces)}

    def cases(length: int) -> list[Case]:
        """Return the cases of our dtypes, then the cases of other codes, which have neither file nor window."""
        of_ours = [
            Case(dtype, file, recent, length)
            for dtype in options.dtypes for file in files for recent in options.recent
            if dtype not in OTHERS and (file or not options.files_only)
        ]  # fmt: skip
        return [*of_ours, *(Case(dtype, "", 0, length) for dtype in options.dtypes if dtype in OTHERS)]

    results = Results(options.output)
    left: dict[str, list[list[float]]] = {path: [] for path in options.calibration}
    lengths = sorted(options.lengths, reverse=True)  # a prompt's cache is cut to each
    for name, window in windows.items():
        wanted = {length: [case for case in cases(length) if (case, name) not in results.kl] for length in lengths}
        if not any(wanted.values()):
            continue
        cache = prefill(prompts, window[: max(length for length, found in wanted.items() if found)])
        for length, missing in wanted.items():
            if not missing:
                continue
            if behind := cache.get_seq_length() - length:
                cache.crop(-behind)
            if length == lengths[0]:
                for path in options.calibration:
                    left[path].append(energy_left(cache, load(path)))
            ids = torch.tensor([window[: length + options.scored]])
            codecs = ((case.recent, layer_codecs(case.dtype, cache, ids.shape[1], files[case.file], options.codec))
                      for case in missing)  # fmt: skip
            for case, kl in zip(missing, measure(run, cache, ids, codecs), strict=True):
                results.add(case, name, kl)
                results.save()
            print(f"{name}, {length:,}", flush=True)
    rows = [
        [path, *(f"{statistics.mean(x):.2f}" for x in zip(*found, strict=True))]
        for path, found in left.items()
        if found
    ]
    if rows:
        print_table(["energy left from", *(f"{BAND * at:,}" for at in range(len(rows[0]) - 1))], rows, options.markdown)
    print_results(options, results, list(windows), {length: cases(length) for length in options.lengths})
    if options.rows:
        measured = [case for length in options.lengths for case in cases(length)]
        of_cases = [row_of(results, case, list(windows), run.model) for case in measured]
        csv_rows.write(options.rows, of_cases, options.beside)


def row_of(results: Results, case: Case, windows: Sequence[str], model: PreTrainedModel) -> dict[str, str]:
    """The row of a case in a CSV file."""
    error = results.error(case, windows)
    mean = statistics.fmean(kl for window in windows for kl in results.kl[case, window])
    fp8 = Case(FP8, "", 0, case.prompt)
    compared = case != fp8 and all((fp8, window) in results.kl for window in windows)
    share = mean / statistics.fmean(kl for window in windows for kl in results.kl[fp8, window]) if compared else ""
    return {
        "dtype": case.dtype, "calibration": "calibrated" if case.file else "no file", "window": str(case.recent),
        "prompt": f"{case.prompt:,}", "bytes": f"{bytes_of_token(case.dtype, model):,}",
        "tokens": f"{sum(len(results.kl[case, window]) for window in windows):,}",
        "kl_mean": f"{mean:.6f}", "kl_error": "" if error is None else f"{error:.6f}", "kl_share": str(share),
        "kl_p99": f"{results.tail(case, windows, 0.99):.6f}", "kl_tail": f"{results.tail(case, windows):.6f}",
        "gpu": "none", "torch": torch.__version__,
    }  # fmt: skip


def print_results(
    options: argparse.Namespace, results: Results, windows: Sequence[str], cases: Mapping[int, Sequence[Case]]
) -> None:
    """KL divergence by prompt length, and its ratios to the KL divergences without a file, with the first file, and of
    fp8."""
    first, rows = options.calibration[0], []
    several = len(options.calibration) > 1
    for line in zip(*cases.values(), strict=True):
        found = [results.of(case, windows) for case in line]
        cells = [f"{statistics.fmean(kl):.4f}" for kl in found]
        cells += [f"{results.tail(case, windows):.4f}" for case in line]
        if not options.files_only:
            cells += [
                ratio(kl, results.of(replace(case, file=""), windows)) for kl, case in zip(found, line, strict=True)
            ]
        if several:
            cells += [
                ratio(kl, results.of(replace(case, file=first), windows)) if case.file else ""
                for kl, case in zip(found, line, strict=True)
            ]
        if FP8 in options.dtypes:
            cells += [
                ratio(kl, results.of(Case(FP8, "", 0, case.prompt), windows))
                for kl, case in zip(found, line, strict=True)
            ]
        rows.append([line[0].dtype, line[0].file or "no file", str(line[0].recent), *cells])
    lengths = [f"{length:,}" for length in cases]
    titles = ["KL at", "p99.9 at", *([] if options.files_only else ["of no file's at"])]
    titles += [f"of {first}'s at"] if several else []
    titles += ["of fp8's at"] if FP8 in options.dtypes else []
    header = ["dtype", "file", "window", *(f"{title} {length}" for title in titles for length in lengths)]
    print_table(header, rows, options.markdown)


if __name__ == "__main__":
    main()
