"""The commands that run engines: the baseline first, then every dtype, each in a process of its own."""

from __future__ import annotations

import argparse
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from packed_kv.private_file import temporary_folder

from .arguments import BadInput, check_settings
from .baseline import Baseline
from .engines import CHECKOUT, apart
from .measurement import (
    BASELINE,
    Measurement,
    Recall,
    Refused,
    Settings,
    made_with,
    measure,
    measure_baseline,
    measure_recall,
)
from .placebo_sweep import Limits, judge, passes
from .report import RecallReport, Report, markdown, recall_markdown, write, write_recall

if TYPE_CHECKING:
    from .generation import GenerationSettings

Row = TypeVar("Row")


@dataclass(frozen=True)
class Outcome(Generic[Row]):
    """Rows of the dtypes that ran, reasons of those refused, and errors of those that failed after their engine had
    started."""

    rows: list[Row]
    refused: dict[str, str]
    failed: dict[str, str]


def run_text(options: argparse.Namespace) -> int:
    """Run `run`, `sweep` or `teacher-forced`. Returns the exit code."""
    settings, identity = check_settings(options)
    report = measure_text(options, settings, identity)
    print(f"\n{report.run['title']}\n\n{markdown(report)}\n")
    kept = write(report, options.output)
    finish(options, kept)
    judged = {} if report.verdicts is None else report.verdicts
    return 0 if kept and passes(judged, report.refused, report.failed) else 1


def measure_text(options: argparse.Namespace, settings: Settings, identity: dict[str, Any]) -> Report:
    """Measure the baseline, unless one is given, and every dtype."""
    with temporary_folder(anywhere=True) as (folder, _):
        path = options.baseline or options.emit or folder / "baseline.safetensors"
        if not options.baseline:
            say_how_many(options, baseline=True)
            run_baseline(measure_baseline, settings, path, identity, options.top_k)
        baseline = Baseline(path)
        baseline.check(identity)
        if options.baseline:
            say_how_many(options, baseline=False)
        stored = [baseline.facts["measurement"], baseline.facts["storage"]]
        first, storage = (same_recall_only(Measurement.from_dict(found), settings) for found in stored)
        found = measure_all(options, lambda dtype: apart(measure, dtype, settings, path), describe_row)
        window = settings.additional_config.get("packed_kv", {}).get("recent_tokens") != 0
        limits = Limits(
            rounding=baseline.facts["rounding"],
            context_information=baseline.facts["context_information"],
            max_kl=getattr(options, "max_kl", None),
            demo=not window and (options.model, options.text, options.windows) == (None, None, 1),
            window=window,
        )
        verdicts = None if options.command == "teacher-forced" else judge(first, found.rows, limits)
        facts = describe(options, settings, identity, baseline)
        return Report([first, storage, *found.rows], verdicts, found.refused, found.failed, limits, facts)


def run_recall(options: argparse.Namespace) -> int:
    """Run `recall`, without text and baseline file. Returns the exit code."""
    settings, identity = check_settings(options)
    say_how_many(options, baseline=True)
    baseline: list[Recall] = run_baseline(measure_recall, BASELINE, settings)
    found = measure_all(options, lambda dtype: apart(measure_recall, dtype, settings), describe_recall)
    rows = [*baseline, *(row for rows in found.rows for row in rows)]
    report = RecallReport(
        rows, found.refused, found.failed, describe(options, settings, {"model": identity["model"]}, None)
    )
    print(f"\n{report.run['title']}\n\n{recall_markdown(report)}\n")
    kept = write_recall(report, options.output)
    finish(options, kept)
    return 0 if kept and passes({}, found.refused, found.failed) else 1


def say_how_many(options: argparse.Namespace, *, baseline: bool) -> None:
    """Say how many engines start; each one that has run reports how long it took."""
    number = len(dict.fromkeys(options.dtypes)) + baseline
    at_once = f", {options.parallel} at a time" if options.parallel > 1 else ", one after the other"
    say(f"{number} engines will start{at_once}; how long that takes here, each says that has run")


def run_baseline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a process of its own. Raises BadInput if the baseline does not run."""
    say(f"{BASELINE} ...")
    started = time.monotonic()
    try:
        result = apart(function, *arguments)
    except (Refused, BrokenProcessPool) as error:
        raise BadInput(f"the model does not run under {BASELINE}: {error}") from error
    say(f"{BASELINE}: {time.monotonic() - started:.0f} s")
    return result


def measure_all(
    options: argparse.Namespace, function: Callable[[str], Row], describe_one: Callable[[Row], str]
) -> Outcome[Row]:
    """Call `function` for every dtype, `--parallel` of them at a time."""
    outcome: Outcome[Row] = Outcome([], {}, {})
    dtypes, begun, done = dict.fromkeys(options.dtypes), time.monotonic(), 0

    def left() -> str:
        nonlocal done
        done += 1
        seconds = (time.monotonic() - begun) / done * (len(dtypes) - done)
        return f"; {len(dtypes) - done} left, about {seconds / 60:.1f} min" if done < len(dtypes) else ""

    def one(dtype: str) -> Row | None:
        say(f"{dtype} ...")
        started = time.monotonic()
        try:
            row = function(dtype)
        except Refused as error:
            outcome.refused[dtype] = str(error)
            say(f"{dtype} is refused: {error}{left()}")
        except Exception as error:  # the other dtypes are still measured; the error is reported, and the exit code is 1
            outcome.failed[dtype] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            say(f"{dtype} FAILED: {outcome.failed[dtype]}{left()}")
        else:
            say(f"{dtype}: {describe_one(row)}, {time.monotonic() - started:.0f} s{left()}")
            return row
        return None

    rows: Iterable[Row | None]
    if options.parallel > 1:
        with ThreadPoolExecutor(options.parallel) as threads:
            rows = list(threads.map(one, dtypes))
    else:
        rows = map(one, dtypes)
    outcome.rows.extend(row for row in rows if row is not None)
    return outcome


def describe_row(row: Measurement) -> str:
    return f"KL {row.scores.kl_mean:.4f}"


def describe_recall(rows: list[Recall]) -> str:
    return f"{sum(cell.recalled for row in rows for cell in row.recall)} facts recalled"


def same_recall_only(found: Measurement, settings: Settings) -> Measurement:
    """The measurement, without its recall if that used other prompts than this run's."""
    facts = settings.recall.facts
    here = {(length, depth, facts) for length in settings.recall.lengths for depth in settings.recall.depths}
    same = {(cell.length, cell.depth, cell.facts) for cell in found.recall} == here
    return found if same else replace(found, recall=[])


def describe(
    options: argparse.Namespace, settings: Settings, identity: Mapping[str, Any], baseline: Baseline | None
) -> dict[str, Any]:
    """The description of the run that goes into its results."""
    recall, words, more = settings.recall, [], {}
    if settings.windows:
        texts = " and ".join(f"{settings.texts.count(name)} x {name}" for name in dict.fromkeys(settings.texts))
        words.append(f"windows of {identity['context']:,} tokens ({texts}) in chunks of {settings.chunk}")
    if recall.lengths:
        kind = "chat" if recall.chat else "plain"
        words.append(f"{len(recall.lengths) * len(recall.depths) * recall.facts} {kind} recall prompts")
    if baseline:
        more = {"baseline_made_with": baseline.facts["made_with"], "top_k": baseline.top_k}
        if baseline.facts["made_with"] != made_with():
            words.append(f"baseline made with {' '.join(baseline.facts['made_with'].values())}")
        if baseline.top_k:
            words.append(f"KL over the {baseline.top_k} likeliest tokens and a remainder")
    return description(options, settings, identity, words, **more)


def description(
    options: argparse.Namespace,
    settings: Settings | GenerationSettings,
    identity: Mapping[str, Any],
    words: list[str],
    **more: Any,
) -> dict[str, Any]:
    """Description of a run, for its results. `words`: its contents, for the title; `more`: further entries."""
    here = made_with()
    words = [*words, f"{settings.kv_cache_memory >> 20} MiB of KV memory", *(f"{name} {here[name]}" for name in here)]
    large = ("windows", "texts", "tasks")
    return {
        "title": f"{Path(settings.model).name}: {'; '.join(words)}",
        "command": shlex.join(["packed-kv-quality", *sys.argv[1:]]),
        "commit": options.commit or commit(),
        "made_with": here,
        "machine": platform.machine(),
        **more,
        "identity": identity,
        "settings": {key: value for key, value in asdict(settings).items() if key not in large},
    }


def commit() -> str:
    """The commit of the checkout that this file lies in; empty elsewhere."""
    if not (CHECKOUT / ".git").exists():
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False).stdout.strip()


def finish(options: argparse.Namespace, kept: bool) -> None:
    """Draw the plots unless --no-plots is given, and print where the results are, if they are `kept` in files."""
    if not kept:
        return
    if not options.no_plots:
        from .plots import draw  # needs matplotlib

        draw(options.output)
    say(f"results are in {options.output}")


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"packed-kv-quality: {text}", file=sys.stderr, flush=True)
