"""`tq-calibrate model`: from a model and text to the file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import transformers
from packed_kv.outliers import FILE_NAME
from tqdm import tqdm

from .choose import choose
from .collect import ATTENTION, Collector
from .errors import UserError
from .model import SEQUENCE_LENGTH, context_length, load_config, load_model, model_folder, shape_of
from .statistics import Statistics, check_head_size
from .text import load_tokenizer, read_text, sha256, token_sequences
from .weights import estimate
from .write import check_writable, file_content, write_file


def calibrate(options: argparse.Namespace) -> None:
    """Run the command with the options of `cli.parse`. Raises UserError."""
    start = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = load_config(options.model)
    check_head_size(shape_of(config).head_size)
    out = options.out.expanduser().resolve() if options.out else model_folder(options.model) / FILE_NAME
    check_writable(out)
    context = _context(options, config)
    if options.weights_only:
        statistics = estimate(config, model_folder(options.model), context)
    else:
        statistics = _observe(options, context)
    choosing = tqdm(statistics.layers.items(), unit=" layers", desc="choosing")
    choices = {layer: choose(found, options.recipe) for layer, found in choosing}
    name = Path(options.model).resolve().name if Path(options.model).is_dir() else options.model
    write_file(out, file_content(statistics, choices, options.recipe, name))
    heads, channels = statistics.shape
    seen = f"{statistics.tokens:,} tokens" if statistics.tokens else "weights alone, so without means of keys"
    print(
        f"{out}: {len(choices)} layers, {heads} KV heads of {channels} channels, from {seen}, "
        f"{time.perf_counter() - start:.0f} s"
    )


def batches(sequences: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of up to `size` sequences of equal length."""
    for _, alike in groupby(sequences, key=len):
        equal = list(alike)
        yield from (equal[at : at + size] for at in range(0, len(equal), size))


def _context(options: argparse.Namespace, config: transformers.PretrainedConfig) -> int:
    """Tokens of a sequence: what `--context` says, or 2,048 or what the model reads if that is less."""
    if options.context is None:
        return context_length(config, SEQUENCE_LENGTH)
    longest = context_length(config, options.context)
    if options.context > longest:
        raise UserError(f"--context {options.context:,} is more than the {longest:,} tokens that {options.model} reads")
    if options.context > options.tokens and not options.weights_only:
        raise UserError(f"--context {options.context:,} needs at least as many --tokens, got {options.tokens:,}")
    return options.context


def _observe(options: argparse.Namespace, context: int) -> Statistics:
    """Statistics of the model over the text."""
    device = _device(options.device)
    text = read_text(options.text)
    tokenizer = load_tokenizer(options.model)
    sequences = token_sequences(text, tokenizer, options.tokens, context, options.seed)
    collector = Collector()
    print(f"loading {options.model} ...", file=sys.stderr)
    model = load_model(options.model, ATTENTION, _dtype(options.dtype, device), device)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    largest = max(map(max, sequences))
    if largest >= vocabulary:
        raise UserError(f"{options.model}: its tokenizer gives token {largest}, its vocabulary has {vocabulary}")
    with tqdm(total=options.tokens, unit=" tokens", unit_scale=True, desc="calibrating") as bar:
        collector.run(model, batches(sequences, options.batch_size), bar.update)
    statistics = collector.statistics()
    statistics.source = {
        "method": "packed_kv_activations_v1",
        "objective": "score_and_output_error",
        "num_prompts": len(sequences),
        "max_seq_len": context,
        "batch_size": options.batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device.type,
        "prompts_sha256": sha256(sequences),
    }
    return statistics


def _dtype(name: str, device: torch.device) -> str:
    """On CPUs bf16 takes several times as long as fp32, so it is not chosen there because the checkpoint has it."""
    return "float32" if name == "auto" and device.type == "cpu" else name


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} is not there; use cpu, cuda or cuda:N") from error
    return device
