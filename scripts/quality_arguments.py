"""The command line of the quality harness, and all of it that can be checked without an engine."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from engines import DEMO_MODEL, memory
from measurement import BASELINE, BATCHED_TOKENS, Settings
from packed_kv import FORMATS
from recall import ANSWER_TOKENS, PROSE, recall_prompts
from teacher_forced import scored_tokens, text_windows

REPOSITORY = Path(__file__).resolve().parents[1]
TEXTS = (PROSE, REPOSITORY / "LICENSE")
"""The default text: prose and a licence."""
CHUNK, FACTS = 64, 2
DEPTHS = (0, 25, 50, 75, 100)
MAX_CONTEXT = 2048
MAX_BASELINE_BYTES = 8 << 30


class BadInput(ValueError):
    """Arguments that cannot be run with; the message is one line."""


def parse_arguments(description: str, arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quality.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder or Hugging Face name (default: the embedded demo model)")
    add("--dtypes", nargs="*", metavar="DTYPE", default=list(FORMATS),
        help=f"any that vLLM knows (default: {' '.join(FORMATS)}); none: the baseline alone")  # fmt: skip
    add("--text", type=Path, metavar="FILE", help="to score (default: the recall prose and the LICENSE)")
    add("--context", type=int, metavar="N",
        help=f"tokens of a window of the text (default: what the model has, {MAX_CONTEXT} at most)")  # fmt: skip
    add("--windows", type=int, default=1, metavar="N", help="windows of the text to score (default: %(default)s)")
    add("--chunk", type=int, default=CHUNK, metavar="N",
        help="tokens of a prefill chunk (default: %(default)s); positions behind the first chunk are scored. "
        "1: decode, in which every key and value is read from the cache")  # fmt: skip
    add("--emit", type=Path, metavar="FILE", help="keep the baseline's predictions (safetensors)")
    add("--baseline", type=Path, metavar="FILE", help="compare with these instead of running the baseline")
    add("--top-k", type=int, metavar="K",
        help="store K likeliest tokens of a position and one remainder, instead of the whole vocabulary")  # fmt: skip
    add("--lengths", type=int, nargs="+", metavar="N",
        help="lengths of recall prompts in tokens (default: quarters of the context)")  # fmt: skip
    add("--depths", type=float, nargs="+", metavar="PERCENT", default=list(DEPTHS),
        help=f"of the facts, in percent of the prompt (default: {' '.join(map(str, DEPTHS))})")  # fmt: skip
    add("--facts", type=int, default=FACTS, metavar="N",
        help="recall prompts at each length and depth (default: %(default)s)")  # fmt: skip
    add("--skip-recall", action="store_true", help="measure no recall")
    add("--max-kl", type=float, metavar="NATS", help="bound of every dtype's mean KL divergence")
    add("--kv-cache-memory", type=memory, metavar="SIZE",
        help="KV memory of each engine, such as 512M or 4G (default: 96M, or 2G with --model)")  # fmt: skip
    add("--calibration", type=Path, metavar="PATH", help="turboquant_kv.json for packed-kv's dtypes")
    add("--seed", type=int, default=0, help="of the facts (default: %(default)s)")
    add("--output", type=Path, metavar="DIR", default=Path("results/quality"),
        help="for quality.json, quality.csv, pareto.png and recall.png (default: %(default)s)")  # fmt: skip
    add("--no-plots", action="store_true", help="draw nothing; matplotlib is not needed then")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """Check all that can be checked without an engine: the settings, and the identity of their baseline."""
    if not options.no_plots and importlib.util.find_spec("matplotlib") is None:
        raise BadInput("matplotlib is missing; pip install 'packed-kv[plots]', or pass --no-plots")
    check_dtypes(options.dtypes)
    check_numbers(options)
    if options.emit and options.baseline:
        raise BadInput("--emit and --baseline exclude each other")
    for path in (options.text, options.baseline, options.calibration):
        if path and not path.exists():
            raise BadInput(f"{path} does not exist")
    model = options.model or str(DEMO_MODEL)
    config, tokenizer = load_config(model)
    longest = getattr(config.get_text_config(), "max_position_embeddings", MAX_CONTEXT)
    context = options.context or min(longest - ANSWER_TOKENS, MAX_CONTEXT) // 128 * 128
    lengths = options.lengths or [context * quarter // 4 for quarter in range(1, 5)]
    if options.skip_recall:
        lengths = []
    for name, value in [("--context", context + 1), *(("--lengths", length + ANSWER_TOKENS) for length in lengths)]:
        if value > longest:
            raise BadInput(f"{name} needs {value:,} tokens with the answer, but {model} has a context of {longest:,}")
    if not 1 <= options.chunk <= min(BATCHED_TOKENS, context - 2):
        raise BadInput(f"--chunk must be 1 to {min(BATCHED_TOKENS, context - 2)}, got {options.chunk}")
    texts = [options.text] if options.text else TEXTS
    try:
        text = "\n".join(path.read_text() for path in texts)
        windows = text_windows(tokenizer, text, context, options.windows)
    except (OSError, ValueError) as error:
        raise BadInput(f"--text {' '.join(map(str, texts))}: {error}") from error
    try:
        if lengths:
            count = len(options.depths) * options.facts
            recall_prompts(lambda text: len(tokenizer.encode(text)), count, min(lengths), options.seed)
    except ValueError as error:
        raise BadInput(f"--lengths {min(lengths)}: {error}") from error
    vocabulary = config.get_text_config().vocab_size
    size = 2 * scored_tokens(windows, options.chunk) * vocabulary
    if not options.top_k and size > MAX_BASELINE_BYTES:
        raise BadInput(f"the baseline would take {size / 2**30:.1f} GiB; pass --top-k 1000, or fewer --windows")
    settings = Settings(
        model=model,
        windows=windows,
        chunk=options.chunk,
        lengths=sorted(set(lengths)),
        depths=sorted({depth / 100 for depth in options.depths}),
        facts=options.facts,
        seed=options.seed,
        kv_cache_memory=options.kv_cache_memory or memory("2G" if options.model else "96M"),
        calibration=str(options.calibration.resolve()) if options.calibration else None,
    )
    identity = {
        "model": model_digest(model, config),
        "vocabulary": vocabulary,
        "chunk": options.chunk,
        "context": context,
        "windows": options.windows,
        "tokens": digest(json.dumps(windows)),
    }
    return settings, identity


def check_dtypes(dtypes: list[str]) -> None:
    """Raises BadInput for a dtype that this vLLM does not know."""
    import vllm.config.cache as cache_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    known = getattr(cache_config, "KV_CACHE_DTYPES", None)
    if known is None:
        raise BadInput("this vLLM is not patched for packed-kv; run: packed-kv-patch apply")
    unknown = [dtype for dtype in dtypes if dtype not in known]
    if unknown:
        raise BadInput(f"unknown dtype {', '.join(unknown)}; vLLM knows {', '.join(known)}")
    if BASELINE in dtypes:
        raise BadInput(f"{BASELINE} is the baseline, which always runs; leave it out of --dtypes")


def check_numbers(options: argparse.Namespace) -> None:
    """Raises BadInput for numbers out of range."""
    positive = {
        "--context": options.context, "--windows": options.windows, "--top-k": options.top_k, "--facts": options.facts,
        "--kv-cache-memory": options.kv_cache_memory, "--lengths": min(options.lengths or [1]),
    }  # fmt: skip
    for name, value in positive.items():
        if value is not None and value < 1:
            raise BadInput(f"{name} must be 1 or more, got {value}")
    if not all(0 <= depth <= 100 for depth in options.depths):
        raise BadInput(f"--depths must be 0 to 100, got {options.depths}")


def load_config(model: str) -> tuple[Any, Any]:
    """Configuration and tokenizer of a model. Raises BadInput if there is none."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise BadInput(f"model {model} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def model_digest(model: str, config: Any) -> str:
    """Short digest of what a model is: its commit on the hub, or sizes and last bytes of the files of a folder."""
    parts = [getattr(config, "_commit_hash", None) or ""]
    for path in sorted(Path(model).glob("*.safetensors")) or sorted(Path(model).glob("*.bin")):
        with path.open("rb") as file:
            file.seek(-min(path.stat().st_size, 1 << 16), 2)
            parts.append(f"{path.name} {path.stat().st_size} {digest(file.read())}")
    return f"{Path(model).name} {digest(json.dumps(parts))}"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
