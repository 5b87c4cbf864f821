"""The command line of the quality harness, and its checks that need no engine."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packed_kv import FORMATS
from packed_kv.calibration_file import FILE_NAME, CalibrationError, load
from packed_kv.commands.arguments import given_of, number
from packed_kv.layout import RECENT_TOKENS
from packed_kv.model import config_fields
from packed_kv.model.rope import rope_parameters
from packed_kv.model.shape import parse
from packed_kv.planning import config_file
from packed_kv.private_file import open_regular, why_not_replaced
from packed_kv.settings.options import AUTO, KEY, OptionError, read_options

from .engines import CHECKOUT, DEMO_MODEL, memory
from .measurement import BASELINE, BATCHED_TOKENS, STORAGE, Settings
from .recall import ANSWER_TOKENS, PROSE
from .recall_map import CHUNK as RECALL_CHUNK
from .recall_map import RecallSettings
from .teacher_forced import scored_tokens, text_windows

TEXTS = (PROSE, CHECKOUT / "LICENSE")
"""The default text: prose and a licence."""
CHUNK, FACTS = 1, 2
DEPTHS = (0, 25, 50, 75, 100)
MAX_CONTEXT = 2048
MAX_BASELINE_BYTES = 8 << 30
LEAST = {
    "context": 3, "windows": 1, "top_k": 1, "facts": 1, "kv_cache_memory": 1, "parallel": 1,
    "tokens": 1, "greedy": 0, "tasks": 0, "drafts": 0, "batched_tokens": 1, "seed": 0,
}  # fmt: skip
"""Least sensible values of the options that are numbers."""
MOST = {"facts": 10_000, "tasks": 10_000}
"""Largest values: prompts of each length, all made before an engine starts."""
OF_RECALL: dict[str, Any] = {
    "lengths": [], "depths": [*DEPTHS], "facts": FACTS, "recall_chunk": RECALL_CHUNK, "prompts": "auto", "seed": 0,
}  # fmt: skip
"""Options that have no effect where no recall is measured, and their defaults."""
RESULTS = (
    "quality.json", "quality.csv", "recall.json", "recall.csv", "generate.json", "generate.csv",
    "pareto.png", "recall.png", "generate.png",
)  # fmt: skip
"""Files that the commands write into --output."""
CONTENTS = {"run": (True, True), "sweep": (True, False), "teacher-forced": (True, False), "recall": (False, True)}
"""Command -> whether it runs text, and whether it measures recall."""


class BadInput(ValueError):
    """Invalid arguments; the message is one line."""


def add_run_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """The options of a command that runs engines."""
    texts, recall = CONTENTS[command]
    add = parser.add_argument
    add_engine_arguments(parser)
    add("--context", type=int, metavar="N",
        help=f"tokens per window of text (default: up to {MAX_CONTEXT})")  # fmt: skip
    if texts:
        _add_text_arguments(parser)
    if recall:
        _add_recall_arguments(parser)
    if texts and recall:
        add("--skip-recall", action="store_true", help="do not measure recall")
    if command in ("run", "sweep"):
        add("--max-kl", type=number, metavar="NATS", help="largest mean KL that passes, for every dtype")
    add("--graphs", action="store_true",
        help="decode in CUDA graphs (with --chunk 1)")  # fmt: skip


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs engines: model, dtypes, engine, output."""
    add = parser.add_argument
    add("--model", help="folder or id (default: the demo model)")
    add("--dtypes", nargs="*", metavar="DTYPE", default=list(FORMATS),
        help="KV-cache dtypes of vLLM (default: ours; none: the baseline alone)")  # fmt: skip
    add("--kv-cache-memory", type=memory, metavar="SIZE",
        help="KV memory per engine (default: 2G; demo model: 96M)")  # fmt: skip
    add("--calibration", type=Path, metavar="PATH", help="calibration file for our dtypes")
    add("--additional-config", type=json_object, metavar="JSON", default={},
        help="vLLM's option of that name, for our dtypes")  # fmt: skip
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", metavar="T",
        help="the model's: auto, bfloat16, float16, float32")  # fmt: skip
    add("--parallel", type=int, default=1, metavar="N",
        help="dtypes measured at once on the device (default: %(default)s)")  # fmt: skip
    add("--output", type=Path, metavar="DIR", default=Path("results/quality"),
        help="folder for JSON, CSV and plots (default: %(default)s)")  # fmt: skip
    add("--commit", metavar="NAME", help="commit of packed-kv, if there is no git history")
    add("--no-plots", action="store_true", help="draw no plots (they need matplotlib)")


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", type=Path, nargs="+", action="extend", metavar="FILE",
        help="UTF-8 texts, one per kind (default: a checkout's)")  # fmt: skip
    add("--windows", type=int, default=1, metavar="N", help="windows per text (default: %(default)s)")
    add("--chunk", type=int, default=CHUNK, metavar="N",
        help="tokens per prefill chunk, which may read its own K and V raw (default: %(default)s)")  # fmt: skip
    add_baseline_arguments(parser)


def add_baseline_arguments(parser: argparse.ArgumentParser) -> None:
    """The options about the file of the baseline's predictions."""
    add = parser.add_argument
    add("--emit", type=Path, metavar="FILE", help="write the baseline's predictions to FILE")
    add("--baseline", type=Path, metavar="FILE", help="read the baseline's predictions from FILE")
    add("--top-k", type=int, metavar="K", help="--emit the K likeliest tokens and one remainder")


def _add_recall_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", metavar="N",
        help="tokens per prompt (default: quarters of the context)")  # fmt: skip
    add("--depths", type=float, nargs="+", metavar="P",
        help=f"depths of facts, in percent (default: {' '.join(map(str, DEPTHS))})")  # fmt: skip
    add("--facts", type=int, metavar="N",
        help=f"prompts per length and depth (default: {FACTS})")  # fmt: skip
    add("--recall-chunk", type=int, metavar="N",
        help=f"--chunk of recall prompts (default: {RECALL_CHUNK})")  # fmt: skip
    add("--prompts", choices=("auto", "chat", "plain"), metavar="P",
        help="auto, plain, or chat (with the model's template)")  # fmt: skip
    add("--seed", type=int, metavar="N", help="seed of the facts (default: 0)")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, for argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('expected an object, such as {"packed_kv": {"recent_tokens": 64}}')
    return value


def check_settings(options: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """Check the options without an engine. Returns the settings and the identity of their baseline. Raises BadInput."""
    has_text, has_recall = CONTENTS[options.command]
    skipped = not has_recall or getattr(options, "skip_recall", False)
    check_recall(options, skipped)
    check_plots(options)
    check_numbers(options)
    check_files(options, has_text)
    check_dtypes(options.dtypes)
    model = options.model or str(DEMO_MODEL)
    config, tokenizer = load_config(model)
    longest = getattr(config.get_text_config(), "max_position_embeddings", MAX_CONTEXT)
    if options.context and options.lengths and not has_text:
        raise BadInput("--context only sets the default of --lengths here; leave one of them out")
    context = options.context or min(longest - ANSWER_TOKENS, MAX_CONTEXT) // 128 * 128
    lengths = [] if skipped else options.lengths or [context * quarter // 4 for quarter in range(1, 5)]
    for name, value in [("--context", context + 1), *(("--lengths", length + ANSWER_TOKENS) for length in lengths)]:
        if value > longest:
            raise BadInput(f"{name} needs {value:,} tokens with the answer, but {model} has a context of {longest:,}")
    chunk = options.chunk if has_text else 1
    if has_text and not 1 <= chunk <= min(BATCHED_TOKENS, context - 2):
        raise BadInput(f"--chunk must be 1 to {min(BATCHED_TOKENS, context - 2)}, got {chunk}")
    texts = read_windows(options, tokenizer, context) if has_text else []
    windows = [window for _, window in texts]
    vocabulary = config.get_text_config().vocab_size
    if has_text:
        check_baseline(options, scored_tokens(windows, chunk), vocabulary)
    settings = Settings(
        model=model,
        windows=windows,
        texts=[name for name, _ in texts],
        chunk=chunk,
        recall=recall_settings(options, tokenizer, lengths),
        kv_cache_memory=kv_cache_memory(options),
        additional_config=additional_config(options, model, config),
        dtype=options.dtype,
        graphs=options.graphs,
        parallel=options.parallel,
    )
    if has_text:
        check_window(options, settings.additional_config, context)
    if options.graphs and (chunk > 1 or (lengths and settings.recall.chunk > 1)):
        raise BadInput("--graphs is for decoding: pass --chunk 1 and --recall-chunk 1, or leave recall out")
    identity = {
        "model": model_digest(model, config),
        "vocabulary": vocabulary,
        "dtype": options.dtype,
        "chunk": chunk,
        "context": context,
        "windows": len(windows),
        "tokens": digest(json.dumps(windows)),
    }
    check_results(options)
    return settings, identity


def read_windows(options: argparse.Namespace, tokenizer: Any, tokens: int) -> list[tuple[str, list[int]]]:
    """The text's name and the token ids of each window of `tokens` tokens. Raises BadInput."""
    texts: list[Sequence[Path]] = [[path] for path in options.text or []] or [TEXTS]
    names = [paths[0].stem for paths in texts]
    if len(set(names)) < len(names):
        raise BadInput(f"--text: two files have the name {max(names, key=names.count)}, which tells texts apart")
    windows: list[tuple[str, list[int]]] = []
    for name, paths in zip(names, texts, strict=True):
        try:
            text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
            windows += [(name, window) for window in text_windows(tokenizer, text, tokens, options.windows)]
        except (OSError, ValueError) as error:
            raise BadInput(f"--text {' '.join(map(str, paths))}: {error}") from error
    return windows


def recall_settings(options: argparse.Namespace, tokenizer: Any, lengths: Sequence[int]) -> RecallSettings:
    """The settings of recall; without lengths, none is measured. Raises BadInput."""
    if not lengths:
        return RecallSettings([], [], 0, False, 1, 0)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if options.prompts == "chat" and not has_template:
        raise BadInput(f"--prompts chat: the tokenizer of {options.model or DEMO_MODEL.name} has no chat template")
    settings = RecallSettings(
        lengths=sorted(set(lengths)),
        depths=sorted({depth / 100 for depth in options.depths}),
        facts=options.facts,
        chat=options.prompts == "chat" or (options.prompts == "auto" and has_template),
        chunk=options.recall_chunk,
        seed=options.seed,
    )
    try:
        settings.prompts(tokenizer, min(lengths))
    except ValueError as error:
        raise BadInput(f"--lengths {min(lengths)}: {error}") from error
    return settings


def additional_config(options: argparse.Namespace, model: str, config: Any) -> dict[str, Any]:
    """`additional_config` for the engines of packed-kv's dtypes. Raises BadInput for what these would refuse.

    A sweep turns the recent window off: its raw tokens would hide the loss of the packed ones.
    """
    has_ours = bool(FORMATS.keys() & set(options.dtypes))
    if not has_ours and (options.calibration or options.additional_config):
        given = "--calibration" if options.calibration else "--additional-config"
        raise BadInput(f"{given} is for dtypes of packed-kv, and --dtypes has none; leave it out")
    try:
        read_options(options.additional_config)
        ours = dict(options.additional_config.get(KEY, {}))
        if options.calibration:
            if "calibration" in ours:
                raise BadInput("--calibration and --additional-config both name a calibration")
            ours["calibration"] = str(options.calibration)
        if options.command == "sweep":
            ours.setdefault("recent_tokens", 0)
        if has_ours:
            check_calibration(read_options({KEY: ours}).calibration, model, config)
    except (OptionError, CalibrationError) as error:
        raise BadInput(str(error)) from error
    return {**options.additional_config, KEY: ours} if ours else options.additional_config


def check_window(options: argparse.Namespace, additional_config: dict[str, Any], context: int) -> None:
    """Raise BadInput if a recent window would hold all tokens of a text, so that no packed page is read."""
    window = additional_config.get(KEY, {}).get("recent_tokens", RECENT_TOKENS)
    if FORMATS.keys() & set(options.dtypes) and window >= context:
        raise BadInput(
            f"texts of {context} tokens fit the recent window of {window}, which hides what packed pages lose; give "
            "more as --context, or fewer as packed_kv.recent_tokens in --additional-config"
        )


def check_calibration(named: Path | None, model: str, config: Any) -> None:
    """Raise CalibrationError if engines would refuse a calibration file, named or in the model's folder."""
    fields, folder = config_file.load(model)
    path = named or (folder or Path(model)) / FILE_NAME
    if str(named) == AUTO or not (named or path.is_file()):
        return
    file = load(path)
    file.check_rope(rope_parameters(config.get_text_config()))
    try:
        parsed = parse(fields, model)
    except config_fields.BadInput:
        return  # engines refuse the model
    file.check_model(**parsed.calibrated_shape())


def kv_cache_memory(options: argparse.Namespace) -> int:
    """Bytes of each engine's KV cache."""
    return options.kv_cache_memory or memory("2G" if options.model else "96M")


def check_plots(options: argparse.Namespace) -> None:
    """Raise BadInput if plots are wanted and matplotlib is missing."""
    if not options.no_plots and importlib.util.find_spec("matplotlib") is None:
        raise BadInput("matplotlib is missing; pip install 'packed-kv[plots]', or pass --no-plots")


def check_dtypes(dtypes: list[str]) -> None:
    """Raise BadInput for a dtype that this vLLM does not know."""
    import vllm.config.cache as cache_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    known = getattr(cache_config, "KV_CACHE_DTYPES", None)
    if known is None:
        raise BadInput("this vLLM is not patched for packed-kv; run: packed-kv-patch apply")
    for name in (BASELINE, STORAGE):
        if name in dtypes:
            raise BadInput(f"{name} is measured in any case; leave it out of --dtypes")
    unknown = [dtype for dtype in dtypes if dtype not in known]
    if unknown:
        raise BadInput(f"unknown dtype {', '.join(unknown)}; vLLM knows {', '.join(known)}")


def check_recall(options: argparse.Namespace, skipped: bool) -> None:
    """Set the defaults of recall's missing options. Raises BadInput for given ones if recall is skipped."""
    given = given_of(options, OF_RECALL)
    if skipped and given:
        raise BadInput(f"--skip-recall measures no recall; leave {', '.join(given)} out")


def check_baseline(options: argparse.Namespace, positions: int, vocabulary: int) -> None:
    """Raise BadInput for a baseline that would be too large, and for `--top-k` without effect."""
    if options.top_k and options.baseline:
        raise BadInput("--top-k is for a baseline that is made; the one of --baseline has its own; leave --top-k out")
    if options.top_k and options.top_k >= vocabulary:
        raise BadInput(f"--top-k must be less than the vocabulary, {vocabulary:,}, got {options.top_k:,}")
    needed = positions * (6 * options.top_k if options.top_k else 2 * vocabulary)
    if needed > MAX_BASELINE_BYTES and not options.baseline:
        raise BadInput(f"the baseline would take {needed / 2**30:.1f} GiB; pass --top-k 1000, or fewer --windows")


def check_numbers(options: argparse.Namespace) -> None:
    """Raise BadInput for numbers out of range."""
    for name, least in LEAST.items():
        value = getattr(options, name, None)
        if value is not None and value < least:
            raise BadInput(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
    for name, most in MOST.items():
        if getattr(options, name, 0) > most:
            raise BadInput(f"--{name} must be {most:,} at most, got {getattr(options, name):,}")
    if min(getattr(options, "lengths", None) or [1]) < 1:
        raise BadInput(f"--lengths must be 1 or more, got {min(options.lengths)}")
    depths = getattr(options, "depths", [])
    if not all(0 <= depth <= 100 for depth in depths):
        raise BadInput(f"--depths must be 0 to 100, got {depths}")
    recall_chunk = getattr(options, "recall_chunk", 1)
    if not 1 <= recall_chunk <= BATCHED_TOKENS:
        raise BadInput(f"--recall-chunk must be 1 to {BATCHED_TOKENS}, got {recall_chunk}")


def check_results(options: argparse.Namespace) -> None:
    """Raise BadInput if results could not be written."""
    if (emit := getattr(options, "emit", None)) and (reason := why_not_replaced(emit)):
        raise BadInput(f"--emit: {reason}; give another")
    for name in RESULTS:
        if reason := why_not_replaced(options.output / name):
            raise BadInput(f"--output: {reason}; give another")


def check_files(options: argparse.Namespace, has_text: bool) -> None:
    """Raise BadInput for a missing file or model, and for defaults that only a checkout has."""
    emit, baseline, texts = (getattr(options, name, None) for name in ("emit", "baseline", "text"))
    if emit and baseline:
        raise BadInput("--emit and --baseline exclude each other")
    for path in (*(texts or []), baseline, options.calibration):
        if path and not path.exists():
            raise BadInput(f"{path} does not exist")
    if not DEMO_MODEL.is_dir():
        missing = [name for name, given in (("--model MODEL", options.model), ("--text FILE", texts or not has_text))
                   if not given]  # fmt: skip
        if missing:
            raise BadInput(f"give {' and '.join(missing)}; the defaults are in a checkout of packed-kv only")
    if options.model:
        try:
            config_file.load(options.model)
        except config_fields.BadInput as error:
            raise BadInput(f"--model: {error}") from error


def load_config(model: str) -> tuple[Any, Any]:
    """Configuration and tokenizer of a model. Raises BadInput if there is none."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise BadInput(f"model {model} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def model_digest(model: str, config: Any) -> str:
    """Short digest of a model's identity: its commit on the Hub, or sizes and last bytes of its files."""
    parts = [getattr(config, "_commit_hash", None) or ""]
    for path in sorted(Path(model).glob("*.safetensors")) or sorted(Path(model).glob("*.bin")):
        try:
            with open(path, "rb", opener=open_regular) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(-min(size, 1 << 16), 2)
                parts.append(f"{path.name} {size} {digest(file.read())}")
        except OSError as error:  # a link that leads nowhere
            raise BadInput(f"model {model}: {path} cannot be read ({error.strerror})") from error
    return f"{Path(model).name} {digest(json.dumps(parts))}"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
