#!/usr/bin/env python3
"""Test which architectures of vLLM a packed dtype serves: the table of docs/lab/models.md.

Each architecture runs as a tiny random model in a process of its own, in bf16 (`auto`) and then with the packed dtype:
4 prompts of 200 random tokens in chunks of 64, then 24 greedy tokens each; on a GPU with CUDA graphs for decodes. A
process that crashes or takes too long gives a row as well.

    python scripts/architectures/model_coverage.py --parallel 12 --out models.json  # as many engines at once
    python scripts/architectures/model_coverage.py --out some.json --into models.json  # runs nothing: puts rows into it
    python scripts/architectures/model_coverage.py --out models.json --markdown PAGE  # runs nothing: writes the table

Columns; of two numbers, the first is the packed dtype's and the second, in brackets, that of `auto`:

KV tokens: the cache's capacity over that in bf16, both by vLLM's own count, at a context of 4,096.
difference: mean absolute difference of log-probabilities from bf16's over the last 64 tokens of each prompt, in percent
    of the difference that another random prefix makes (100 %: as bad as no cache). In brackets: bf16 with two prompts
    at a time instead of four, which shows the effect of rounding.
tokens: share of the greedy tokens before the first that differs from bf16's. In random models the best two tokens are
    often almost equally likely; in brackets, the effect of rounding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coverage_models import MODELS
from packed_kv_quality.engines import prepare_environment

PRELOADED = ["coverage_engine", "vllm.entrypoints.llm", "transformers"]
BEGIN, END = "<!-- table of scripts/architectures/model_coverage.py -->", "<!-- end of the table -->"
HEADER = (
    "architecture", "attention", "heads (query/KV of size)", "result", "KV tokens", "backends", "graphs", "difference",
    "tokens",
)  # fmt: skip
LONGEST_REASON = 160
COLUMNS = 118
"""Width of the page's lines."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--architectures", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help="default: all")
    add("--dtype", default="tq4", help="what is compared with auto (default: %(default)s)")
    add("--parallel", type=int, default=1, help="processes at a time (default: %(default)s)")
    add("--new-tokens", type=int, default=24, help="greedy tokens behind a prompt (default: %(default)s)")
    add("--timeout", type=float, default=100, help="seconds a model may take (default: %(default)s)")
    add("--out", type=Path, default=Path("models.json"), help="file of the results (default: %(default)s)")
    add("--logs", type=Path, help="folder for what the engines print (default: none is kept)")
    add("--commit", default="", help="for the results")
    add("--markdown", type=Path, metavar="PAGE", help="put the table of --out into a page, and run nothing")
    add("--into", type=Path, metavar="FILE", help="put the rows of --out into FILE, with their commit and PyTorch's "
        "version, and run nothing")  # fmt: skip
    options = parser.parse_args(arguments)
    for alone in ("markdown", "into"):
        others = {name: value for name, value in vars(options).items() if name not in (alone, "out")}
        idle = [f"--{name.replace('_', '-')}" for name, value in others.items() if value != parser.get_default(name)]
        if getattr(options, alone) and idle:
            parser.error(f"--{alone} runs nothing, so that {', '.join(idle)} would have no effect; leave one out")
    return options


def main() -> int:
    options = parse_arguments()
    if options.markdown:
        page = options.markdown.read_text()
        options.markdown.write_text(with_table(page, json.loads(options.out.read_text())))
        return 0
    if options.into:
        results = with_rows(json.loads(options.into.read_text()), json.loads(options.out.read_text()))
        options.into.write_text(as_text(results))
        return 0
    prepare_environment(small_model=True)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # tokens are greedy
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, options.logs or Path(folder))
    for result in sorted({row["result"] for row in rows}):
        print(f"{result}: {sum(row['result'] == result for row in rows)}")
    return 0


@dataclass
class Job:
    """An architecture that is being measured."""

    architecture: str
    process: Any
    results: Path
    started: float


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all architectures, `options.parallel` at a time; rows are written as they come."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # so that vLLM is imported once
    waiting = list(options.architectures)
    running: list[Job] = []
    rows: list[dict[str, Any]] = []
    while waiting or running:
        while waiting and len(running) < options.parallel:
            running.append(begin(context, waiting.pop(0), options, folder))
        time.sleep(0.1)
        for job in list(running):
            seconds = time.monotonic() - job.started
            if job.process.is_alive() and seconds < options.timeout:
                continue
            late = job.process.is_alive()
            job.process.kill()
            job.process.join()
            running.remove(job)
            ended = f"more than {options.timeout:g} s" if late else f"exit code {job.process.exitcode}"
            row = row_of(job.architecture, options.dtype, read_events(job.results), "timeout" if late else "", ended)
            rows.append({**row, "seconds": round(seconds, 1)})
            print(f"{job.architecture}: {row['result']}, {seconds:.0f} s  {row.get('reason', '')}", flush=True)
            rows.sort(key=in_order)
            options.out.write_text(as_text({**machine(options), "rows": rows}))
    return rows


def in_order(row: dict[str, Any]) -> int:
    """Return the place of a row's architecture in `MODELS`."""
    return list(MODELS).index(row["architecture"])


def as_text(results: dict[str, Any]) -> str:
    """Return the content of a file of results."""
    return json.dumps(results, indent=1, ensure_ascii=False) + "\n"


def with_rows(results: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return `results` with the rows of a later run, of some architectures, each with that run's commit and PyTorch."""
    made_with = {"commit": later["commit"], "torch": later["torch"]}
    rows = {row["architecture"]: row for row in results["rows"]}
    rows |= {row["architecture"]: {**row, **made_with} for row in later["rows"]}
    return {**results, "rows": sorted(rows.values(), key=in_order)}


def begin(context: Any, architecture: str, options: argparse.Namespace, folder: Path) -> Job:
    from coverage_engine import run

    results, log = folder / f"{architecture}.jsonl", folder / f"{architecture}.log"
    for file in (results, log):
        file.unlink(missing_ok=True)
    dtypes = ["auto", options.dtype]
    process = context.Process(target=run, args=(architecture, dtypes, options.new_tokens, str(results), str(log)))
    process.start()
    return Job(architecture, process, results, time.monotonic())


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the card, versions, commit and dtype that the results were made with."""
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    made_with = {"gpu": gpu, "vllm": vllm.__version__, "torch": torch.__version__}
    return {**made_with, "transformers": version("transformers"), "commit": options.commit, "dtype": options.dtype}


def read_events(results: Path) -> dict[str, dict[str, Any]]:
    """Dtype -> what coverage_engine.py wrote of it."""
    found: dict[str, dict[str, Any]] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        event = json.loads(line)
        found.setdefault(event.pop("dtype"), {}).update(event)
    return found


def row_of(
    architecture: str, dtype: str, found: dict[str, dict[str, Any]], late: str = "", ended: str = "exit code 0"
) -> dict[str, Any]:
    """A row of the results.

    `result` is "works"; "refused", with our line; "fails with auto", an error of vLLM's; "fails", "crash" or
    "timeout", with what is known.
    """
    auto, packed = found.get("auto", {}), found.get(dtype, {})
    row: dict[str, Any] = {"architecture": architecture, "auto": auto, "packed": packed}
    error = packed if auto.get("done") else auto
    if packed.get("done") and packed.get("heads") and not any("PACKED_KV" in name for name in packed["backends"]):
        return {**row, "result": "fails", "reason": "no layer is packed"}
    if packed.get("done"):
        return {**row, "result": "works"}
    reason = f"{dtype if auto.get('done') else 'auto'}: {ended}"
    if "error" in error:
        reason = one_line(error["error"], error["message"])
    if late:
        return {**row, "result": late, "reason": reason}
    if not auto.get("done"):
        return {**row, "result": "fails with auto", "reason": reason}
    if "error" not in error:
        return {**row, "result": "crash", "reason": reason}
    return {**row, "result": "refused" if f"--kv-cache-dtype {dtype} " in reason else "fails", "reason": reason}


def one_line(error: str, message: str) -> str:
    """The line of an error that says most: ours, or its last that is no reference to a page of the web."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "https://" not in line] or [""]
    ours = [line for line in lines if "--kv-cache-dtype" in line]
    return ours[0] if ours else f"{error}: {lines[0]}"


def with_table(page: str, results: dict[str, Any]) -> str:
    """`page` with the table of `results` between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}{END}{rest.split(END)[1]}"


def table(results: dict[str, Any]) -> str:
    """Markdown: counts, the table, and what was not reached."""
    rows = sorted(results["rows"], key=lambda row: row["architecture"].lower())
    counts = {result: sum(row["result"] == result for row in rows) for result in {row["result"] for row in rows}}
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    said = ", ".join(f"{number} {result}" for result, number in ordered)
    made_with = (
        f"{len(rows)} architectures: {said}. {results['gpu']}, vLLM {results['vllm']}, PyTorch {results['torch']}, "
        f"transformers {results['transformers']}, commit {results['commit']}, dtype `{results['dtype']}`."
    )
    lines = [
        *textwrap.wrap(made_with, COLUMNS),
        "",
        f"| {' | '.join(HEADER)} |",
        "|" + "---|" * len(HEADER),
    ]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    if missing := sorted(set(MODELS) - {row["architecture"] for row in rows}):
        lines += ["", *textwrap.wrap(f"Not reached in the time of the run: {', '.join(missing)}.", COLUMNS)]
    return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row's cells, in the order of `HEADER`."""
    auto, packed = row["auto"], row["packed"]
    head_sizes = ", ".join(map(str, auto.get("head_sizes", [])))
    found = [f"`{row['architecture']}`", ", ".join(auto.get("kinds", []))]
    found.append(f"{', '.join(auto['heads'])} of {head_sizes}" if head_sizes else "")
    if row["result"] != "works":
        return [*found, f"{row['result']}: {short(row['reason'])}", *[""] * (len(HEADER) - len(found) - 1)]
    ratio = packed["kv_tokens"] / auto["kv_tokens"] if auto["kv_tokens"] else 0
    scale = auto["other_prefix"] or 1
    works = "works" if head_sizes else "works: no keys and values"
    return [
        *found,
        f"{works} ({of_run(row)})" if "commit" in row else works,
        f"{ratio:.2f}",
        ", ".join(name.removeprefix("PACKED_KV_") for name in packed["backends"]),
        "yes" if packed["graphs"] == auto["graphs"] != "NONE" else f"{packed['graphs']} ({auto['graphs']})",
        f"{packed['distance'] / scale:.1%} ({auto['distance'] / scale:.1%})",
        f"{packed['equal_tokens']:.0%} ({auto['equal_tokens']:.0%})",
    ]


def of_run(row: dict[str, Any]) -> str:
    """Return what a row of a later run was made with."""
    return f"{row['commit']}, PyTorch {row['torch'].split('+')[0]}" if "torch" in row else row["commit"]


def short(reason: str) -> str:
    """A reason as the cell of a table holds it: without what is said in every row."""
    said_always = r"^--kv-cache-dtype \w+ (cannot serve this model here: )?|; use --kv-cache-dtype auto.*"
    reason = re.sub(said_always, "", reason).replace("|", "\\|")
    return reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON].rsplit(" ", 1)[0] + " …"


if __name__ == "__main__":
    sys.exit(main())
