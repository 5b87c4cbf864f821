"""The tables of docs/cards.md: generations, reports, what to expect and what fits. `measured.py` puts them in.

They are made from the table of cards that `packed-kv plan` has, the record of generations, the reports that
`packed-kv selftest --report` wrote (results/cards/), the rows of results/, and `packed-kv plan` itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from packed_kv.commands import card_report, plan
from packed_kv.formats import FORMATS
from packed_kv.gpu_generations import GENERATIONS, KIB, Generation, generation_of
from packed_kv.kernels.served import Engine, Pairs, who_serves
from packed_kv.model.shape import parse
from packed_kv.planning.cache import Serving
from packed_kv.planning.cards import CARDS, Card, of_device
from packed_kv.planning.measured import step_seconds
from packed_kv.planning.plan import Row as PlanRow
from packed_kv.planning.plan import estimate
from packed_kv.planning.weights import weights
from packed_kv.refusals.table import refusals_of_model
from rows import read
from tables import BASELINE, RESULTS, Row, Table, load

REPORTS = RESULTS / "cards"
SHAPES = RESULTS.parent / "shapes"
COMPILED = (80, 86, 89, 90, 100, 120)
"""Architectures for which tests/kernels/test_compile.py compiles the decode kernel."""
EVIDENCE = ("release/decode.csv", "release/h100/decode.csv", "kernels.csv", "h100/kernels.csv")
"""Files of rows that show that a card was seen: steps of an engine, and kernels."""
STEPS = {**dict.fromkeys(EVIDENCE[:2], "8b"), "qwen3.8-27b.csv": "qwen3.8-27b"}
"""Files of steps -> the shape that they are of."""
TILE_TOKENS = 32
"""Tokens of a tile of Triton's decode kernel."""
SHOWN = ("bf16", "fp8", "tq4", "turboquant25")
FITS: Mapping[str, tuple[str, str]] = {
    "8b": ("", "--context 8k --users 8"),
    "qwen3.8-27b": ("--weights 15GiB ", "--context 32k --users 4"),
}
"""Folder of shapes/ -> options of its plan: weights, and requests."""
NONE_YET = "No report has been sent in yet."


def reports(folder: Path = REPORTS) -> dict[str, Mapping[str, Any]]:
    """The reports of a folder by file name. Raises ValueError for one that the self-test did not write so."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text())
        if wrong := why_not_a_report(report):
            raise ValueError(f"{file}: {wrong}")
        found[file.name] = report
    return found


def why_not_a_report(report: Mapping[str, Any]) -> str:
    """Say what of a file is not as the self-test writes it; "": nothing."""
    told = {"device": "card", "capability": "capability", "commit": "commit"}
    machine = {name: report.get(key) or "" for name, key in told.items()} | report.get("versions", {})
    again = card_report.content(machine, report.get("timed", {}), ())
    again |= {key: report.get(key) for key in ("copy_GB_s", "kernels")}
    if other := [key for key in {*report, *again} if key not in report or report[key] != again.get(key)]:
        return f"{sorted(other)[0]} is not as packed-kv selftest --report writes it"
    kernel = {*card_report.kernel_of({"dtype": "", "decode_kernel": "", "is_right": True})}
    rows = report["kernels"]
    if not rows or any({*row} != kernel or row["dtype"] not in FORMATS for row in rows):
        return "its kernels are not as packed-kv selftest --report writes them"
    return ""


@cache
def seen() -> dict[str, list[str]]:
    """Names of cards of which results/ has rows -> the files of `EVIDENCE` with them."""
    found: dict[str, list[str]] = {}
    for name in EVIDENCE:
        for gpu in dict.fromkeys(row["gpu"] for row in read(RESULTS / name)):
            if card := of_device(gpu):
                found.setdefault(card.name, []).append(name)
    return found


def reported(card: Card, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Files of the reports of a card."""
    return [name for name, report in found.items() if of_device(report["card"]) == card]


def capability_text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def generations(up: str) -> str:
    """Return a table of generations: their SMs, cards and decode kernels, and what is known of them."""
    table = Table(["compute capability", "cards", "warps of 128 registers, shared KiB of an SM", "decode kernel",
                   "state"], 5)  # fmt: skip
    (refused,) = refusals_of_model(json.loads((SHAPES / "8b" / "config.json").read_text()), capability=(7, 5))
    table.lines.append(["below 8.0", "", "", "", f"**refused**: {refused.sentence()}"])
    of_reports = reports()
    for generation in GENERATIONS:
        cards = [card for card in CARDS.values() if card.capability and generation_of(card.capability) == generation]
        options = {option: Engine("cuda", generation.capability, option, is_here=False) for option in ("auto", "cuda")}
        kernels = {option: who_serves(engine, Pairs(None, 128, 4)).kernel for option, engine in options.items()}
        table.lines.append([
            capability_text(generation.capability),
            ", ".join(card.name + of_other(card, generation) for card in cards),
            f"{generation.resident_warps(128)}, {generation.shared_bytes // KIB}",
            kernels["auto"] + ("; CUDA by request" if kernels["cuda"] != kernels["auto"] else ""),
            state(generation, cards, of_reports, up),
        ])  # fmt: skip
    return table.markdown()


def of_other(card: Card, generation: Generation) -> str:
    """The compute capability of a card, if it is later than that of its generation."""
    return "" if card.capability in (None, generation.capability) else f" ({capability_text(card.capability)})"


def state(generation: Generation, cards: Iterable[Card], of_reports: Mapping[str, Mapping[str, Any]], up: str) -> str:
    """Say what is known of a generation: seen, with files; compiles; or neither."""
    lines = []
    for card in cards:
        links = [f"[{name}]({up}benchmarks/results/{name})" for name in seen().get(card.name, ())]
        links += [f"[{name}]({up}benchmarks/results/cards/{name})" for name in reported(card, of_reports)]
        if links:
            lines.append(f"{card.name}: {', '.join(links)}")
    if lines:
        return f"**seen** on {'; '.join(lines)}"
    major, minor = generation.capability
    if 10 * major + minor in COMPILED:
        unseen = f"; the CUDA kernel: compiles up to {generation.cuda_columns} columns, **not seen**"
        return f"compiles; speed **expected by arithmetic**{unseen if generation.cuda_columns else ''}"
    return "not compiled by a test, and not run"


def reports_table(up: str, found: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Return a table of the reports: versions, kernels that are right, the copy, and steps as shares of bf16's."""
    found = reports() if found is None else found
    if not found:
        return NONE_YET
    names = ("fp8", "tq4", "turboquant25")
    table = Table(["report", "card", "versions", "commit", "right", "copy, GB/s", "bf16, µs", *names], 5)
    for name, report in found.items():
        kernels, versions = report["kernels"], report["versions"]
        right = [kernel for kernel in kernels if kernel["is_right"]]
        wrong = [f"{kernel['dtype']} by {kernel['kernel'] or kernel['decode_kernel']}" for kernel in kernels
                 if not kernel["is_right"]]  # fmt: skip
        table.lines.append([
            f"[{name}]({up}benchmarks/results/cards/{name})",
            report["card"] + (f" ({report['capability']})" if report["capability"] else ""),
            ", ".join(f"PyTorch {version}" if name == "pytorch" else version
                      for name, version in versions.items() if name != "cuda"),
            report["commit"], f"{len(right)} of {len(kernels)}" + (f"; **wrong**: {', '.join(wrong)}" if wrong else ""),
            f"{report['copy_GB_s']:,.0f}" if report["copy_GB_s"] else "",
            _range([1e3 * kernel["bf16_ms"] for kernel in right if kernel["bf16_ms"]], ",.0f"),
            *(_shares(dtype, right) for dtype in names),
        ])  # fmt: skip
    return table.markdown()


def _range(numbers: Sequence[float], form: str) -> str:
    """The least and the most of numbers."""
    return " to ".join(dict.fromkeys(format(x, form) for x in (min(numbers), max(numbers)))) if numbers else ""


def _shares(dtype: str, kernels: Iterable[Mapping[str, Any]]) -> str:
    """The time of a dtype's step as a share of bf16's beside it, by kernel; of fp8 the range over all rows."""
    shown = []
    if dtype == "fp8":
        return _range([x["fp8_ms"] / x["bf16_ms"] for x in kernels if x["fp8_ms"] and x["bf16_ms"]], ".2f")
    for kernel in kernels:
        if kernel["dtype"] == dtype and kernel["ms"] and kernel["bf16_ms"]:
            shown.append(f"{kernel['ms'] / kernel['bf16_ms']:.2f} ({kernel['kernel']})")
    return ", ".join(shown)


def command(shape: str, card: Card) -> str:
    """The command of a row of `fits`."""
    form, asked = FITS[shape]
    return f"packed-kv plan benchmarks/shapes/{shape} --gpu {card.name} {form}{asked}"


@cache
def planned(shape: str, card: Card) -> Mapping[str, PlanRow]:
    """Return the plan of a row, by dtype."""
    words = command(shape, card).split()[2:]
    words[0] = str(SHAPES / shape)
    demand, _ = plan.demand_of(plan.parser().parse_args(words))
    return {row.dtype: row for row in estimate(demand)}


def fits(shape: str) -> Callable[[str], str]:
    """Return what makes a table of all cards: what fits beside the weights of a shape, and its step by arithmetic."""

    def table(_up: str) -> str:
        made = Table(["command", *(f"requests, {name}" for name in SHOWN), "tokens, bf16", "tokens, tq4",
                      *(f"ms, {name}" for name in SHOWN)], 1)  # fmt: skip
        for card in CARDS.values():
            rows = planned(shape, card)
            users = int(FITS[shape][1].split()[-1])
            made.lines.append([
                f"`{command(shape, card)}`", *(f"{rows[name].requests:,}" for name in SHOWN),
                *(f"{rows[name].kv_tokens:,}" for name in ("bf16", "tq4")),
                *(_step(rows[name], users) for name in SHOWN),
            ])  # fmt: skip
        return made.markdown()

    return table


def _step(row: PlanRow, users: int) -> str:
    """A step, and of how many requests it is where not all fit."""
    if not row.step_ms:
        return "none fits"
    return f"{row.step_ms:.1f}" + (f" (of {row.requests_in_step})" if row.requests_in_step < users else "")


def differences(file: str, card: Card) -> Iterator[tuple[str, float]]:
    """Dtype, and by how much of the measured step the arithmetic is off, of a file's steps; without steps whose p80
    exceeds their p20 by more than a quarter."""
    shape = STEPS[file]
    model = parse(json.loads((SHAPES / shape / "config.json").read_text()), shape)
    for row in read(RESULTS / file):
        dtype = "bf16" if row["dtype"] == BASELINE else row["dtype"]
        if dtype not in SHOWN or float(row["p80_ms"]) > 1.25 * float(row["p20_ms"]):
            continue
        serving = Serving(int(row["context"]))
        found = step_seconds(model, dtype, serving, weights(model, None, None), int(row["requests"]), card)
        yield dtype, found * 1e3 / float(row["p50_ms"]) - 1


def checked(up: str) -> str:
    """Return a table of how far the arithmetic is off where steps were measured, as `plan` has them and by the rule of
    the other cards."""
    table = Table(["card", "shape", "rule", "steps", *(f"{name}, least to most" for name in SHOWN), "median of all"], 3)
    for file, shape in STEPS.items():
        (gpu,) = {row["gpu"] for row in read(RESULTS / file)}
        card = of_device(gpu)
        assert card is not None, gpu
        other = replace(card, name="another card of this bandwidth")
        found: list[tuple[str, float]] = []
        for rule, asked in {"as `plan` has it": card, "as for other cards": other}.items():
            before, found = found, list(differences(file, asked))
            if found == before:
                continue
            by_dtype = ([100 * off for dtype, off in found if dtype == name] for name in SHOWN)
            table.lines.append([
                f"[{card.name}]({up}benchmarks/results/{file})", shape, rule, str(len(found)),
                *(f"{min(of):+.1f} to {max(of):+.1f} %" for of in by_dtype),
                f"{statistics.median(abs(100 * off) for _, off in found):.1f} %",
            ])  # fmt: skip
    return table.markdown()


COUNTS = "triton_counts.csv"
SCHEDULERS = 4
BOUND_ON = ("A100-80GB", "A10", "RTX-3090", "L4", "L40S", "RTX-4090")
CHECKED_ON = ("H200", "H100")
"""Cards whose decode kernel was measured."""
PRODUCTS_OF_HMMA = 16 * 8 * 16
"""Multiplications of an `mma.m16n8k16`."""


def cycles(row: Row, card: Card) -> dict[str, float]:
    """Return the cycles of an SM that each thing needs for a tile: memory's bytes, and a warp's instructions by pipe.

    row: of triton_counts.csv. A scheduler issues an instruction a cycle and has 32 lanes of fp32, of fp16 pairs, or 16,
    16 of integers and 4 of special functions, by the throughputs in the CUDA programming guide.
    """
    is_a100, has_wide_halves = card.capability == (8, 0), card.capability in ((8, 0), (9, 0))
    counts = {name: int(row[name]) / SCHEDULERS for name in ("instructions", "alu", "imad", "fp32", "half", "special")}
    return {
        "memory": int(row["tile_bytes"]) / card.bytes_per_cycle,
        "issue": counts["instructions"],
        "integers": 2 * counts["alu"],
        "multiply-adds": 2 * counts["imad"] + (2 if is_a100 else 1) * counts["fp32"],
        "fp16": (1 if has_wide_halves else 2) * counts["half"],
        "tensor cores": int(row["tensor"]) * PRODUCTS_OF_HMMA / card.products,
        "special": 8 * counts["special"],
    }


def counts_table(_up: str) -> str:
    """Return a table of the counts: a line a variant and architecture."""
    table = Table(["variant", "sm", "registers", "spills in the loop", "programs of an SM", "tile, bytes",
                   "instructions a token", "of these integer", "tensor"], 1)  # fmt: skip
    for row in load(COUNTS):
        table.lines.append([
            variant_name(row), row["sm"], row["registers"], row["spills_in_loop"], row["programs"],
            f"{int(row['tile_bytes']):,}", f"{int(row['instructions']) / TILE_TOKENS:.1f}",
            f"{int(row['alu']) / TILE_TOKENS:.1f}", f"{int(row['tensor']) / TILE_TOKENS:.1f}",
        ])  # fmt: skip
    return table.markdown()


def variant_name(row: Row) -> str:
    """A variant in words."""
    ring = ", recent window" if row["ring"] == "yes" else ""
    return f"`{row['dtype']}`, heads of {row['head_dim']}, {row['columns']} columns{ring}"


def bounds(names: Sequence[str]) -> Callable[[str], str]:
    """Return what makes a table of what bounds each variant on some cards, and what is next: cycles of an SM a tile."""

    def table(_up: str) -> str:
        cards = [CARDS[name] for name in names]
        heads = [f"{card.name}, {card.bytes_per_cycle:.1f} bytes a cycle" for card in cards]
        made: dict[str, list[str]] = {}
        of_sm: dict[tuple[str, str], Row] = {}
        for row in load(COUNTS):
            of_sm[variant_name(row), row["sm"]] = row
        for variant, _ in of_sm:
            cells = [_bound(of_sm.get((variant, sm_of(card))), card) for card in cards]
            if any(cells):
                made[variant] = cells
        lines = [[variant, *cells] for variant, cells in made.items()]
        return Table(["variant", *heads], 1, lines).markdown()

    return table


def sm_of(card: Card) -> str:
    """The architecture of a card, as in the rows."""
    major, minor = card.capability or (0, 0)
    return str(10 * major + minor)


def _bound(row: Row | None, card: Card) -> str:
    if row is None:
        return ""
    (first, most), (second, less) = sorted(cycles(row, card).items(), key=lambda item: -item[1])[:2]
    return f"{first if first == 'memory' else f'**{first}**'} {most:,.0f}; {second} {less:,.0f}"


TABLES: Mapping[str, Callable[[str], str]] = {
    "card-generations": generations, "card-reports": reports_table, "card-checked": checked,
    "card-bounds": bounds(BOUND_ON), "card-bounds-checked": bounds(CHECKED_ON), "card-counts": counts_table,
    **{f"card-fits-{shape}": fits(shape) for shape in FITS},
}  # fmt: skip
"""Marker -> what makes its table; its argument leads from the page to the repository."""
