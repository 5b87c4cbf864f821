"""Measure what KV-cache dtypes cost in quality, through the real vLLM engine, and say which of them fail.

Teacher-forced over a text: perplexity, KL divergence to the baseline (`auto`: the model's own dtype, bf16 as a rule)
over the whole vocabulary, agreement of the likeliest tokens. Recall of planted facts by depth and length. Each dtype
gets an engine of its own, in a process of its own, with the same KV memory. docs/quality.md says how to read it all.

Exit code: 0 if every dtype passes; 1 if one is the baseline by another name, equals another or exceeds its bound, or if
one of packed-kv's own dtypes was refused; 2 if the arguments are wrong or the baseline does not run.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from baseline import Baseline, BaselineError
from engines import apart, prepare_environment
from measurement import BASELINE, Measurement, Refused, Settings, made_with, measure, measure_baseline
from placebo_sweep import Limits, judge, passes
from quality_arguments import REPOSITORY, BadInput, parse_arguments, prepare
from quality_report import Report, markdown, write


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(__doc__, arguments)
    prepare_environment(small_model=options.model is None)
    try:
        settings, identity = prepare(options)
        report = run(options, settings, identity)
    except (BadInput, BaselineError) as error:
        say(str(error))
        return 2
    print(f"\n{report.run['title']}\n\n{markdown(report)}\n")
    write(report, options.output)
    if not options.no_plots:
        from quality_plots import draw  # needs matplotlib

        draw(options.output)
    say(f"results are in {options.output}")
    return 0 if passes(report.verdicts, report.refused, report.failed) else 1


def run(options: argparse.Namespace, settings: Settings, identity: dict[str, Any]) -> Report:
    """Measure the baseline, unless there is one, and every dtype, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.baseline or options.emit or Path(folder, "baseline.safetensors")
        if not options.baseline:
            say(f"{BASELINE} ...")
            try:
                apart(measure_baseline, settings, path, identity, options.top_k)
            except (Refused, BrokenProcessPool) as error:
                raise BadInput(f"{settings.model} does not run under {BASELINE}: {error}") from error
        baseline = Baseline(path)
        baseline.check(identity)
        first = Measurement.from_dict({**baseline.facts["measurement"], "losses": baseline.losses().tolist()})
        rows, refused, failed = measure_all(dict.fromkeys(options.dtypes), settings, path)
        limits = Limits(
            rounding=baseline.facts["rounding"],
            context_information=baseline.facts["context_information"],
            max_kl=options.max_kl,
            demo=(options.model, options.text, options.windows) == (None, None, 1),
        )
        first = same_recall_only(first, settings)
        return Report(
            [first, *rows], judge(first, rows, limits), refused, failed, limits, describe(settings, identity, baseline)
        )


def measure_all(
    dtypes: dict[str, None], settings: Settings, path: Path
) -> tuple[list[Measurement], dict[str, str], dict[str, str]]:
    """What was measured, why dtypes were refused, and what broke off after its engine had started."""
    rows, refused, failed = [], {}, {}
    for dtype in dtypes:
        say(f"{dtype} ...")
        started = time.monotonic()
        try:
            rows.append(apart(measure, dtype, settings, path))
        except Refused as error:
            refused[dtype] = str(error)
            say(f"{dtype} is refused: {error}")
        except Exception as error:  # the other dtypes are still worth measuring; it is reported, and exits with 1
            failed[dtype] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            say(f"{dtype} FAILED: {failed[dtype]}")
        else:
            say(f"{dtype}: KL {rows[-1].scores.kl_mean:.4f}, {time.monotonic() - started:.0f} s")
    return rows, refused, failed


def same_recall_only(baseline: Measurement, settings: Settings) -> Measurement:
    """The baseline without its recall, if that was measured by other prompts than this run's."""
    here = {(length, depth, settings.facts) for length in settings.lengths for depth in settings.depths}
    same = {(cell.length, cell.depth, cell.facts) for cell in baseline.recall} == here
    return baseline if same else replace(baseline, recall=[])


def describe(settings: Settings, identity: dict[str, Any], baseline: Baseline) -> dict[str, Any]:
    """What the run was, for whoever reads its results."""
    here = made_with()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    words = [f"{identity['windows']} x {identity['context']:,} tokens in chunks of {settings.chunk}"]
    words += [f"{settings.kv_cache_memory >> 20} MiB of KV memory", *(f"{name} {here[name]}" for name in here)]
    if baseline.facts["made_with"] != here:
        words.append(f"baseline made with {' '.join(baseline.facts['made_with'].values())}")
    if baseline.top_k:
        words.append(f"KL over the {baseline.top_k} likeliest tokens and a remainder")
    return {
        "title": f"{Path(settings.model).name}: {'; '.join(words)}",
        "command": shlex.join(["python", "scripts/quality.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "made_with": here,
        "machine": platform.machine(),
        "baseline_made_with": baseline.facts["made_with"],
        "top_k": baseline.top_k,
        "identity": identity,
        "settings": {key: value for key, value in asdict(settings).items() if key != "windows"},
    }


def say(text: str) -> None:
    """A line for the person who waits."""
    print(f"quality: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
