#!/usr/bin/env python3
"""Measure ways to store keys and values that did not become dtypes, beside the dtypes: the figures of docs/tried.md.

A real model in fp32 by transformers, teacher-forced; every key and value that a query reads went through the code of
the row, its own token's included, unless a row says otherwise. The figure is the mean KL divergence of the next token
to the unquantized model, in nats, with its standard error over blocks of 128 positions. What a row knows of the model
(means, scales, channels, centroids, widths) comes from other text, Python's help topics.

In the names of rows, W64 says that a query reads the last 64 tokens, its own included, as fp16 (or rotated int8 or
fp8), and "centred" that keys are stored minus their mean (the first token: minus its own) and scaled by channel.

The rows of TriAttention need the package aither-kvcache, outside of the environment (it brings a vLLM plugin):

    pip install --no-deps --target DIR aither-kvcache==2.4.1 && PYTHONPATH=DIR python experiments/tried.py ...

Results are saved to --output after each row, and a later run continues from there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from format_error import print_table
from tq_calibrate.errors import UserError
from tq_calibrate.model import load_config, shape_of
from tq_calibrate.text import load_tokenizer, read_text, token_sequences
from tried_codes import Dtype, Float8, Grouped, Int8, Qjl, Raw, Spectral, Widths
from tried_model import Facts, Method, Observer, Run, allocate, load, sensitivities
from tried_rounding import Joint, Trellis

BLOCK, LINE_END = 128, 1.1
WIDTH_TOKENS = 256
"""Tokens of the calibration text that tell how much each layer's width matters."""
TQ3, TQ4 = Dtype("tq3"), Dtype("tq4")
ALL: dict[str, Any] = {"offset": "mean and first", "scaled": True}
"""What a row calls centred: the first token has a mean of its own, and channels are scaled."""
CENTRED = ", centred, W64 int8"
BEHIND_A_WINDOW: dict[str, Any] = {"scaled": True, "window": 64, "ring": Int8()}
WEIGHED: dict[str, Any] = {"offset": "weighed", **BEHIND_A_WINDOW}
PACKAGE = "aither_kvcache"
Costs = dict[str, dict[tuple[int, str], float]]
"""`sensitivities` of keys as they are (under ""), and of keys centred and scaled (under `CENTRED`)."""


def rows(costs: Costs) -> dict[str, Method]:
    """Every row: what it says in the table -> the method."""
    calibrated = {name: Dtype(name, True) for name in ("isoquant4", "turboquant35", "turboquant25")}
    references = {"tq4": TQ4, "tq3": TQ3, **{f"{name}, calibrated": code for name, code in calibrated.items()}}
    both = {f"{name}": Method(code, code) for name, code in references.items()}
    both["fp8 e4m3, scale 1"] = Method(Float8(), Float8())
    found = {**both, "K tq3, V raw": Method(TQ3, Raw()), "K raw, V tq3": Method(Raw(), TQ3)}
    for name, code in (("tq3", TQ3), ("tq4", TQ4)):
        found[f"{name}, K less its mean"] = Method(code, code, offset="mean")
        found[f"{name}, K less its mean, scaled"] = Method(code, code, offset="mean", scaled=True)
        found[f"{name}, centred"] = Method(code, code, **ALL)
    for name, code in (("tq3", TQ3), ("tq4", TQ4), ("isoquant4, calibrated", calibrated["isoquant4"])):
        found[f"{name}, V scaled" + CENTRED] = Method(code, code, value_scaled=True, window=64, ring=Int8(), **ALL)
    found["isoquant4, calibrated" + CENTRED] = Method(
        calibrated["isoquant4"], calibrated["isoquant4"], window=64, ring=Int8(), **ALL
    )
    return found | windows(calibrated["turboquant35"]) | others() | widths(costs) | encoders(references)


def windows(turboquant35: Dtype) -> dict[str, Method]:
    """Recent tokens kept raw: how many, as what, and which bits beside them."""
    found = {f"tq3, W{window}": Method(TQ3, TQ3, window=window) for window in (1, 4, 16, 64, 128)}
    found["tq4, W64"] = Method(TQ4, TQ4, window=64)
    for name, code in (("tq3", TQ3), ("tq4", TQ4)):
        for content, ring in (("int8", Int8()), ("fp8", Float8(rotated=True))):
            found[f"{name}, W64 {content}"] = Method(code, code, window=64, ring=ring)
    for name, key, value in (
        ("tq4", TQ4, TQ4), ("K tq4, V tq3", TQ4, TQ3), ("turboquant35, calibrated", turboquant35, turboquant35),
        ("tq3", TQ3, TQ3),
    ):  # fmt: skip
        if key != value:
            found[name] = Method(key, value)
        found.setdefault(f"{name}, centred", Method(key, value, **ALL))
        found.setdefault(f"{name}, W64", Method(key, value, window=64))
        for window in (16, 32, 64, 128) if key == value else (64,):
            found[f"{name}, centred, W{window} int8"] = Method(key, value, window=window, ring=Int8(), **ALL)
    return found


def others() -> dict[str, Method]:
    """What is no dtype and no window."""
    found = {
        "TriAttention keys, 12 pairs of 4 bits; V tq3": Method(Spectral(12), TQ3),
        "TriAttention keys, 8 pairs of 8 bits; V tq3": Method(Spectral(8, 8), TQ3),
        "TriAttention keys, all 32 pairs of 4 bits; V tq3": Method(Spectral(32), TQ3),
        "TriAttention keys and values, 12 pairs of 4 bits": Method(Spectral(12), Spectral(12)),
        "TriAttention keys, 16 pairs of 4 bits; V tq4": Method(Spectral(16), TQ4),
    }
    if importlib.util.find_spec(PACKAGE) is None:
        found = {}
    for bits, name, code in ((3, "tq3", TQ3), (4, "tq4", TQ4)):
        found[f"QJL keys, {bits - 1} + 1 bits, unbiased; V {name}"] = Method(Qjl(bits), code)
        found[f"QJL keys, {bits - 1} + 1 bits, least squares; V {name}"] = Method(Qjl(bits, True), code)
    found["tq3, V less its mean"] = Method(TQ3, TQ3, value_mean=True)
    for sinks in (1, 4):
        found[f"tq3, first {sinks} raw"] = Method(TQ3, TQ3, sinks=sinks)
        found[f"tq3, centred, first {sinks} raw"] = Method(TQ3, TQ3, sinks=sinks, **ALL)
    for bits, group in ((3, 16), (3, 64), (4, 16), (4, 64)):
        found[f"tq{bits}, groups of {group}"] = Method(Grouped(bits, group), Grouped(bits, group))
    found["tq3, K less nearest of 256 centroids"] = Method(TQ3, TQ3, offset="centroids")
    nearest: dict[str, Any] = {"offset": "centroids", "scaled": True}
    found["tq3, K less nearest of 256 centroids, scaled"] = Method(TQ3, TQ3, **nearest)
    found["tq3, K less nearest of 256 centroids, scaled, W64 int8"] = Method(
        TQ3, TQ3, window=64, ring=Int8(), **nearest
    )
    return found


def encoders(references: dict[str, Dtype]) -> dict[str, Method]:
    """What calibration and an encoder may do with the same bytes and the same decoder, and a trellis."""
    found = {}
    for name in ("tq4", "tq3", "isoquant4", "isoquant3", "planarquant4", "planarquant3"):
        code, longer = Dtype(name), Dtype(name, longer=True)
        found[f"{name}, W64 int8"] = Method(code, code, window=64, ring=Int8())
        found[f"{name}, W64 int8, V longer"] = Method(code, longer, window=64, ring=Int8())
    for name, code in references.items():
        longer = replace(code, longer=True)
        found[f"{name}{CENTRED}"] = Method(code, code, "mean and first", **BEHIND_A_WINDOW)
        found[f"{name}, weighed, W64 int8"] = Method(code, code, **WEIGHED)
        found[f"{name}, weighed, W64 int8, V longer"] = Method(code, longer, **WEIGHED)
    for name, code in ((name, references[name]) for name in ("tq4", "tq3", "turboquant25, calibrated")):
        longer, trellis = replace(code, longer=True), Trellis(code.name, code.calibrated)
        key, value = Joint(code.name, code.calibrated), Joint(code.name, code.calibrated, longer=True)
        for kind, offset in (("centred", "mean and first"), ("weighed", "weighed")):
            found[f"{name}, {kind}"] = Method(code, code, offset, scaled=True)
            found[f"{name}, {kind}, V longer"] = Method(code, longer, offset, scaled=True)
        found[f"{name}{CENTRED}, V longer"] = Method(code, longer, "mean and first", **BEHIND_A_WINDOW)
        found[f"{name}{CENTRED}, far scores right in sum"] = Method(
            code, code, "mean and first", oracle=True, **BEHIND_A_WINDOW
        )
        found[f"{name}, weighed, W64 int8, V longer, K and V rounded jointly"] = Method(key, value, **WEIGHED)
        jointly, single = f"{name}, weighed, W64 int8, V longer, K rounded jointly", replace(key, sweeps=1)
        found[jointly] = Method(key, longer, **WEIGHED)
        found[f"{jointly}, rank 4"] = Method(replace(key, rank=4), longer, **WEIGHED)
        found[f"{jointly}, one sweep"] = Method(single, longer, **WEIGHED)
        found[f"{jointly}, within groups"] = Method(replace(key, grouped=True), longer, **WEIGHED)
        found[f"{jointly}, one sweep within groups"] = Method(replace(single, grouped=True), longer, **WEIGHED)
        found[f"{name}, weighed, W64 int8, K and V on a trellis"] = Method(trellis, trellis, **WEIGHED)
    return found


def widths(costs: Costs) -> dict[str, Method]:
    """3 bits on average, given to the places that need them; chosen for keys as they are stored in the row."""
    found = {"K 4 bits, V 2 bits": Method(Grouped(4), Grouped(2))}
    together = {kind: {layer: c[layer, "key"] + c[layer, "value"] for layer, _ in c} for kind, c in costs.items()}
    options: dict[str, dict[str, Any]] = {"": {}, CENTRED: {"window": 64, "ring": Int8(), **ALL}}
    for kind, how in options.items():
        by_layer, apart = (allocate(found_costs.get(kind, {}), 3) for found_costs in (together, costs))
        alike = {(layer, role): bits for layer, bits in by_layer.items() for role in ("key", "value")}
        for name, bits in (("tq3, layer widths", alike), ("tq3, layer widths, K and V apart", apart)):
            found[name + kind] = Method(Widths(bits, "key"), Widths(bits, "value"), **how)
    return found


def prose_windows(files: list[str], tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """`count` windows of `tokens` tokens of each file, evenly spaced. Raises UserError for a file that is too short."""
    found = []
    for name in files:
        text = read_text([name])
        for at in range(1, count + 1):
            start = len(text) * at // (count + 1)
            ids = tokenizer.encode(text[start : start + 16 * tokens])[:tokens]
            if len(ids) < tokens:
                raise UserError(
                    f"--text {name} has fewer than {tokens} tokens behind character {start}; lower --tokens"
                )
            found.append(ids)
    return found


class Results:
    """Rows measured so far, in a JSON file that belongs to one identity: model, windows and calibration text."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self.content = path, {"identity": identity, "rows": {}}
        if path.is_file():
            self.content = json.loads(path.read_text())
            if self.content["identity"] != identity:
                raise UserError(f"{path} holds another run's rows ({self.content['identity']}); name another --output")

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return self.content["rows"]

    def add(self, name: str, slot_bytes: float, kl: torch.Tensor) -> None:
        blocks = torch.stack([block.mean() for block in kl.split(BLOCK)])
        error = float(blocks.std() / len(blocks) ** 0.5)
        row = {"slot_bytes": slot_bytes, "kl": float(kl.mean()), "standard_error": error, "blocks": blocks.tolist()}
        self.rows[name] = row
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def line(rows: dict[str, dict[str, Any]], slot_bytes: float) -> float:
    """KL divergence at `slot_bytes` on the straight line through tq3 and tq4, in bytes and log KL divergence."""
    low, high = rows["tq3"], rows["tq4"]
    share = (slot_bytes - low["slot_bytes"]) / (high["slot_bytes"] - low["slot_bytes"])
    return low["kl"] * (high["kl"] / low["kl"]) ** share


def base_of(name: str) -> str:
    """The row that a row is compared with: as centred, and with a window of 64, as it is, and nothing else; of one that
    is rounded jointly, the row that is not."""
    if jointly := re.search(", K( and V)? rounded jointly", name):
        return name[: jointly.start()]
    parts = name.split(", ")
    dtype = itertools.takewhile(lambda part: part not in ("centred", "weighed", "W64 int8"), parts)
    calibrated = ["centred"] * bool({"centred", "weighed"} & {*parts})
    return ", ".join([*dtype, *calibrated, *["W64 int8"] * ("W64 int8" in parts)])


def of_base(rows: dict[str, dict[str, Any]], name: str) -> str:
    """KL divergence over that of the row's base, with the standard error of the paired difference; empty where there is
    no other row."""
    base = base_of(name)
    if base == name or base not in rows:
        return ""
    found, other = (torch.tensor(rows[row]["blocks"]) for row in (name, base))
    error = (found - other).std() / len(other) ** 0.5
    return f"{found.mean() / other.mean():.2f} ± {error / other.mean():.2f}"


def print_rows(results: Results, names: list[str], markdown: bool) -> None:
    """The table, without columns that are empty; `of the line`: KL divergence over `line` at the row's bytes, where
    those are not far above tq4's; `of the base`: see `of_base`."""
    rows, cells = results.rows, []
    for name in names:
        size, kl = rows[name]["slot_bytes"], rows[name]["kl"]
        near = {"tq3", "tq4"} <= {*rows} and size <= LINE_END * rows["tq4"]["slot_bytes"]
        share = f"{kl / line(rows, size):.2f}" if near else ""
        figure = f"{kl:.4f} ± {rows[name]['standard_error']:.4f}"
        cells.append((name, f"{size:g}", figure, share, of_base(rows, name)))
    columns = zip(*(("keys and values", "bytes", "KL", "of the line", "of the base"), *cells), strict=True)
    header, *lines = zip(*(column for column in columns if any(column[1:])), strict=True)
    print_table(header, lines, markdown)


def observe(options: argparse.Namespace, model: Any, sequences: list[list[int]], identity: dict[str, Any]) -> Facts:
    """The facts of the calibration text, from --output if they are there."""
    path = options.output / "facts.pt"
    facts = Facts.load(path, identity)
    if facts is None:
        start = time.perf_counter()
        facts = Observer().run(model, sequences)
        facts.save(path, identity)
        print(f"calibrated on {sum(map(len, sequences)):,} tokens in {time.perf_counter() - start:.0f} s", flush=True)
    return facts


def costs_of_widths(options: argparse.Namespace, model: Any, facts: Facts, ids: list[int]) -> Costs:
    """`sensitivities`, from --output if they are there."""
    path = options.output / "sensitivities.json"
    if not path.is_file():
        run = Run(model, facts, [ids])
        measured = {"": sensitivities(run), CENTRED: sensitivities(run, **ALL)}
        path.write_text(json.dumps([[kind, *at, kl] for kind, found in measured.items() for at, kl in found.items()]))
    costs: Costs = {"": {}, CENTRED: {}}
    for kind, layer, role, kl in json.loads(path.read_text()):
        costs[kind][layer, role] = kl
    return costs


def measure(options: argparse.Namespace) -> None:
    tokenizer, shape = load_tokenizer(options.model), shape_of(load_config(options.model))
    windows = prose_windows(options.text, tokenizer, options.tokens, options.windows)
    sequences = token_sequences(read_text([]), tokenizer, options.calibration_tokens, options.tokens, seed=0)
    known = {"model": Path(options.model).name, "calibration": [len(sequence) for sequence in sequences]}
    digest = hashlib.sha256(json.dumps(windows).encode()).hexdigest()[:16]
    files = [Path(name).name for name in options.text]
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output / "tried.json", known | {"files": files, "windows": digest})
    model = load(options.model)
    facts = observe(options, model, sequences, known)
    wanted = [name for name in rows({}) if re.search(options.rows, name)]
    missing = [name for name in wanted if name not in results.rows]
    needs_costs = any("layer widths" in name for name in missing)
    methods = rows(costs_of_widths(options, model, facts, sequences[0][:WIDTH_TOKENS]) if needs_costs else {})
    run = Run(model, facts, windows) if missing else None
    for name in missing:
        start = time.perf_counter()
        assert run is not None
        results.add(name, methods[name].slot_bytes(shape.head_size), run.kl(methods[name]))
        print(f"{name}: {results.rows[name]['kl']:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    versions = f"PyTorch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
    print(f"\n{known['model']}, {len(windows)} x {options.tokens} tokens of {', '.join(files)}; {versions}; bytes of K "
          f"and V of a token and KV head of {shape.head_size} channels\n")  # fmt: skip
    print_rows(results, wanted, options.markdown)
    if importlib.util.find_spec(PACKAGE) is None:
        print(f"no rows of TriAttention: the package {PACKAGE} is not there (--help says how to get it)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder of a Llama-like model")
    add("--text", required=True, nargs="+", metavar="FILE", help="to score, a kind of text each")
    add("--tokens", type=int, default=1024, help="of a window (default: %(default)s)")
    add("--windows", type=int, default=1, help="of each file (default: %(default)s)")
    add("--calibration-tokens", type=int, default=16384, help="default: %(default)s")
    add("--rows", default="", metavar="REGEX", help="rows to measure (default: all)")
    add("--output", type=Path, default=Path("results/tried"), help="folder (default: %(default)s)")
    add("--markdown", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        measure(options)
    except UserError as error:
        parser.exit(2, f"tried.py: {error}\n")


if __name__ == "__main__":
    main()
