"""`tq-calibrate model`: runs a model over text and writes the file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packed_kv.calibration_file import FILE_NAME, heads_in_words
from tqdm import tqdm

from .choose import LayerChoice, choose
from .errors import UnsupportedError, UserError
from .judge import check, judge
from .latents import rank_of
from .model import SEQUENCE_LENGTH, load_config, model_folder, shape_of
from .ropes import why_none
from .statistics import Statistics, check_head_size
from .sums import Sums
from .text import held_out_sequences, read_text, sha256, token_sequences
from .transformers_engine import TransformersModel
from .values import LEAST_GAIN, held_out_gain
from .weights import estimate
from .widths import held_out_gains, key_widths, weigh_from_afar
from .write import check_writable, file_content, write_file

if TYPE_CHECKING:
    from .vllm_engine import VllmModel


def calibrate(options: argparse.Namespace) -> None:
    """Run the command with the options of `cli.parse`. Raises UserError."""
    start = time.perf_counter()
    if options.weights_only:
        config = load_config(options.model)
        if rank_of(config.get_text_config()):
            raise UserError(f"{options.model} has latent attention (MLA), whose weights alone say too little; run it")
        check_head_size(shape_of(config).head_size)
        out = _out(options)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        statistics, held = estimate(config, model_folder(options.model), _context(options, longest)), None
    else:
        out, statistics, held = _observe_by_an_engine(options)
    # neither latents nor weights alone show attention to distant keys
    has_widths = not options.no_key_widths and all(x.far_key_weight is not None for x in statistics.layers.values())
    if has_widths:
        weigh_from_afar(statistics.layers)
    has_value_means = not options.no_value_means and all(x.value_mean is not None for x in statistics.layers.values())
    choices = _choose(statistics, options.recipe, centres_values=has_value_means)
    verdicts = []
    if has_value_means and held:
        keeps_means, verdict = _means_verdict(held_out_gain(held, choices))
        verdicts.append(verdict)
        if not keeps_means:
            choices = _choose(statistics, options.recipe, centres_values=False)
    named = " ".join(("--text", *options.text)) if options.text else ""
    if held and (warning := check(judge(held, statistics.layers, choices), named)):
        print(f"tq-calibrate: {warning}", file=sys.stderr)
    name = Path(options.model).resolve().name if Path(options.model).exists() else options.model
    mode = 0o600 if options.parent else 0o666  # an engine loads no file that others can write
    key_bits, on_widths = _key_widths(statistics, held, choices) if has_widths else ({}, [])
    write_file(out, file_content(statistics, choices, options.recipe, name, key_bits), mode)
    seen = f"{statistics.tokens:,} tokens" if statistics.tokens else "weights alone, so without means of keys"
    heads = heads_in_words(statistics.kv_heads, *statistics.head_sizes)
    summary = f"{out}: {len(choices)} layers, {heads}, from {seen}, {time.perf_counter() - start:.0f} s"
    print("\n".join([summary, *verdicts, *on_widths]))


def _choose(statistics: Statistics, recipe: str, *, centres_values: bool) -> dict[int, LayerChoice]:
    choosing = tqdm(statistics.layers.items(), unit=" layers", desc="choosing")
    return {layer: choose(found, recipe, centres_values=centres_values) for layer, found in choosing}


def _means_verdict(gain: float) -> tuple[bool, str]:
    """Return whether the file gets means of V, which must gain on held-out text, and a line that says so."""
    found = "values less their means" if gain < LEAST_GAIN else "no means of values"
    return gain < LEAST_GAIN, f"{found} (error of outputs on held-out text {gain:.2f} of that without)"


def _key_widths(
    statistics: Statistics, held: Sums | None, choices: dict[int, LayerChoice]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the bits of K's groups for dtypes that lose less with them on held-out text as well, and a line for each
    dtype."""
    widths = key_widths(statistics.layers, choices)
    gains = held_out_gains(widths, held, choices) if held and widths else dict.fromkeys(widths, 0.0)
    told = []
    for name, bits in widths.items():
        found = f" (error of scores on held-out text {gains[name]:.2f} of that with its own)" if held else ""
        verdict = f"{', '.join(map(str, bits))} bits" if gains[name] < 1 else "its own widths"
        told.append(f"{name}: {verdict} in groups of keys{found}")
    return {name: bits for name, bits in widths.items() if gains[name] < 1}, told


def _observe_by_an_engine(options: argparse.Namespace) -> tuple[Path, Statistics, Sums]:
    """The output path, and statistics and sums over held-out text from the chosen engine, or from vLLM if transformers
    cannot load the model."""
    if options.engine != "vllm":
        try:
            return _observe(
                options, TransformersModel(options.model, options.dtype, options.device, options.batch_size)
            )
        except UnsupportedError as error:
            if options.engine or options.device != "auto" or find_spec("vllm") is None:
                without = "" if options.device == "auto" else f" without --device {options.device}"
                raise UserError(f"{error}; vLLM may load it: --engine vllm{without}") from error
            print(f"{error}, so vLLM runs it", file=sys.stderr)
    from .vllm_engine import VllmModel

    return _observe(options, VllmModel(options.model, options.dtype, options.engine_options))


def _observe(options: argparse.Namespace, model: TransformersModel | VllmModel) -> tuple[Path, Statistics, Sums]:
    """The output path, the model's statistics over the text, and its sums over held-out text."""
    out = _out(options)
    context = _context(options, model.longest)
    text = read_text(options.text)
    tokenizer = model.tokenizer()
    sequences = token_sequences(text, tokenizer, options.tokens, context, options.seed)
    held = held_out_sequences(options.text, tokenizer, options.tokens, context, options.seed)
    if not rank_of(model.text_config) and (reason := why_none(model.text_config)):
        print(
            f"{options.model}: {reason}, so keys get one mean for all positions, right for contexts of {context:,} "
            "tokens; --context sets how many",
            file=sys.stderr,
        )
    print(f"loading {options.model} ...", file=sys.stderr)
    with tqdm(total=options.tokens + sum(map(len, held)), unit=" tokens", unit_scale=True, desc="calibrating") as bar:
        statistics, sums = model.run(sequences, held, bar.update)
    statistics.source |= {
        "method": "packed_kv_activations_v3",
        "objective": "score_and_output_error",
        "num_prompts": len(sequences),
        "max_seq_len": context,
        "prompts_sha256": sha256(sequences),
    }
    return out, statistics, sums


def _out(options: argparse.Namespace) -> Path:
    """The output path. Raises UserError if it is not writable."""
    out = Path(os.path.expanduser(options.out)).resolve() if options.out else model_folder(options.model) / FILE_NAME
    check_writable(out)
    return out


def _context(options: argparse.Namespace, longest: int | None) -> int:
    """Tokens of a sequence: `--context`, or 2,048, at most the model's context. Raises UserError."""
    context = options.context or min(SEQUENCE_LENGTH, longest or SEQUENCE_LENGTH)
    if longest is not None and context > longest:
        raise UserError(f"--context {context:,} is more than the {longest:,} tokens that {options.model} reads")
    if options.context and context > options.tokens and not options.weights_only:
        raise UserError(f"--context {context:,} needs at least as many --tokens, got {options.tokens:,}")
    return context
