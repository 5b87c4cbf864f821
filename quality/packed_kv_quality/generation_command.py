"""`packed-kv-quality generate`: its options, what can be checked without an engine, and its run."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from packed_kv.private_file import temporary_folder

from .arguments import (
    BadInput,
    add_baseline_arguments,
    add_engine_arguments,
    additional_config,
    check_baseline,
    check_dtypes,
    check_files,
    check_numbers,
    check_plots,
    check_results,
    digest,
    kv_cache_memory,
    load_config,
    model_digest,
    read_windows,
)
from .baseline import Baseline
from .engines import DEMO_MODEL, apart
from .generation import Generation, GenerationSettings, Window, acceptance, generate, generate_baseline
from .generation_report import GenerationReport, markdown, write
from .measurement import BASELINE
from .placebo_sweep import passes
from .run import description, finish, measure_all, run_baseline
from .tasks import KINDS, tasks

LENGTHS, TOKENS, GREEDY = (1000, 3500, 7500), 192, 128


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", action="extend", metavar="FILE",
        help="UTF-8 texts, one per kind (default: a checkout's)")  # fmt: skip
    add("--lengths", type=int, nargs="+", metavar="N",
        help="tokens per prompt (default: those of 1000 3500 7500 that fit the context)")  # fmt: skip
    add("--windows", type=int, default=4, metavar="N", help="prompts per text and length (default: %(default)s)")
    add("--tokens", type=int, default=TOKENS, metavar="N",
        help="tokens forced after each prompt (default: %(default)s)")  # fmt: skip
    add("--greedy", type=int, default=GREEDY, metavar="N",
        help="greedy tokens after each prompt (default: %(default)s)")  # fmt: skip
    add("--tasks", type=int, default=8, metavar="N",
        help="tasks per kind and length (default: %(default)s)")  # fmt: skip
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND",
        help="kinds of tasks (default: all)")  # fmt: skip
    add("--drafts", type=int, default=0, metavar="N",
        help="also measure accepted n-gram drafts of N tokens")  # fmt: skip
    add("--batched-tokens", type=int, default=GenerationSettings.batched_tokens, metavar="N",
        help="tokens per prefill step (default: %(default)s)")  # fmt: skip
    add_baseline_arguments(parser)
    add("--seed", type=int, default=0, metavar="N", help="seed of the tasks (default: %(default)s)")


def run_generation(options: argparse.Namespace) -> int:
    """The baseline first, then every dtype. Returns the exit code."""
    settings, identity = check_settings(options)
    with temporary_folder(anywhere=True) as (folder, _):
        path = options.baseline or options.emit or folder / "baseline.safetensors"
        if not options.baseline:
            run_baseline(generate_baseline, settings, path, identity, options.top_k)
        made = Baseline(path)
        made.check(identity)
        baseline = Generation.from_dict(made.facts["generation"])
        if settings.drafts:
            baseline = replace(baseline, acceptance=run_baseline(acceptance, BASELINE, settings))
        run = describe(options, settings, identity)
        so_far, writing = [baseline], Lock()

        def one(dtype: str) -> Generation:
            found = apart(generate, dtype, settings, path)
            if settings.drafts:
                found = replace(found, acceptance=apart(acceptance, dtype, settings))
            with writing:  # a run that is broken off keeps what it found
                so_far.append(found)
                write(GenerationReport(so_far, {}, {}, run), options.output)
            return found

        found = measure_all(options, one, describe_row)
    report = GenerationReport([baseline, *found.rows], found.refused, found.failed, run)
    print(f"\n{report.run['title']}\n\n{markdown(report)}\n")
    kept = write(report, options.output)
    finish(options, kept)
    return 0 if kept and passes({}, found.refused, found.failed) else 1


def check_settings(options: argparse.Namespace) -> tuple[GenerationSettings, dict[str, Any]]:
    """Check all that can be checked without an engine: the settings, and what the baseline is made from."""
    check_plots(options)
    check_numbers(options)
    check_files(options, has_text=True)
    check_dtypes(options.dtypes)
    model = options.model or str(DEMO_MODEL)
    config, tokenizer = load_config(model)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or max(LENGTHS) + TOKENS + 2
    behind = max(options.tokens, options.greedy) + 2
    lengths = sorted(set(options.lengths or [length for length in LENGTHS if length + behind <= longest]))
    if not lengths:
        lengths = [longest - behind]
    if not 0 < lengths[0] <= lengths[-1] <= longest - behind:
        raise BadInput(
            f"--lengths must be 1 to {longest - behind:,} for {model}, whose context of {longest:,} tokens holds "
            f"{behind} more after a prompt; got {' '.join(map(str, lengths))}"
        )
    windows = [
        Window(name, length, token_ids)
        for length in lengths
        for name, token_ids in read_windows(options, tokenizer, length + options.tokens + 1)
    ]
    vocabulary = config.get_text_config().vocab_size
    check_baseline(options, len(windows) * options.tokens, vocabulary)
    try:
        asked = [
            task for length in lengths for task in tasks(tokenizer, options.kinds, options.tasks, length, options.seed)
        ]
    except ValueError as error:
        raise BadInput(f"--lengths {lengths[0]}: {error}; give longer ones, or --tasks 0") from error
    settings = GenerationSettings(
        model=model,
        windows=windows,
        tasks=asked,
        greedy=options.greedy,
        drafts=options.drafts,
        kv_cache_memory=kv_cache_memory(options),
        additional_config=additional_config(options, model, config),
        dtype=options.dtype,
        parallel=options.parallel,
        batched_tokens=options.batched_tokens,
    )
    if settings.max_model_len() > longest:
        raise BadInput(
            f"a task's answer needs {settings.max_model_len():,} tokens, more than the {longest:,} of {model}"
        )
    identity = {
        "model": model_digest(model, config),
        "dtype": options.dtype,
        "lengths": lengths,
        "tokens": digest(json.dumps([window.token_ids for window in windows])),
        "tasks": digest(json.dumps([task.token_ids + task.answer_ids for task in asked])),
        "greedy": options.greedy,
    }
    check_results(options)
    return settings, identity


def describe_row(row: Generation) -> str:
    return "KL " + ", ".join(f"{found.kl_mean:.4f} ({found.text}, {found.prompt:,})" for found in row.continuations)


def describe(options: argparse.Namespace, settings: GenerationSettings, identity: dict[str, Any]) -> dict[str, Any]:
    """Description of the run, for readers of its results."""
    words = [f"{options.windows} prompts per text and length, {options.tokens} tokens forced after each"]
    if settings.tasks:
        words.append(f"{options.tasks} tasks per kind and length")
    if settings.drafts:
        words.append(f"n-gram drafts of {settings.drafts}")
    return description(options, settings, identity, words)
