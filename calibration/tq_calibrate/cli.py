"""Find the means, scales and order of the channels of a model's keys and values, with which every dtype loses less."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packed_kv.calibration_content import RECIPES
from packed_kv.calibration_file import FILE_NAME, CalibrationError, load
from packed_kv.child_process import EXIT_INTERRUPTED, end_with
from packed_kv.commands.arguments import EXIT_BAD_INPUT, LONGEST_LINE, Parser, given_of
from packed_kv.json_file import printable
from packed_kv.model.rope import rope_parameters

from .errors import UserError
from .text import LEAST_CONTEXT, LEAST_TOKENS

ENGINES = ("transformers", "vllm")
OF_A_RUN: dict[str, Any] = {
    "engine": None, "text": [], "tokens": 32768, "engine_options": {}, "batch_size": 4, "device": "auto",
    "dtype": "auto", "seed": 0,
}  # fmt: skip
"""Options of `model` that have no effect unless a model runs, and their defaults. --context has one."""


def main(arguments: Sequence[str] | None = None, prog: str = "tq-calibrate") -> int:
    """Run the command. Returns its exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    options = parse(arguments, prog)
    try:
        options.run(options)
    except (UserError, CalibrationError) as error:
        print(printable(f"{prog}: {error}", LONGEST_LINE), file=sys.stderr)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        print(f"{prog}: {error.name} is missing; pip install torch transformers tqdm", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"{prog}: interrupted, nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def parse(arguments: Sequence[str] | None, prog: str = "tq-calibrate") -> argparse.Namespace:
    """Parse and check the arguments. Exits with code 2 if they are invalid."""
    made = parser(prog)
    options = made.parse_args(arguments)
    if options.run is _model:
        _check_engine(made, options)
    return options


def parser(prog: str = "tq-calibrate") -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = Parser(prog=prog, description=__doc__)
    commands = made.add_subparsers(required=True, metavar="COMMAND")

    model = commands.add_parser("model", help="run a model over text and write its calibration file")
    model.add_argument("model", metavar="MODEL", help="folder or id of a Hugging Face causal LM")
    model.add_argument("--text", nargs="+", action="extend", metavar="FILE",
                       help="UTF-8 text (default: Python's help topics)")  # fmt: skip
    model.add_argument("--tokens", type=_tokens, metavar="N", help="tokens to run (default 32768)")
    model.add_argument("--context", type=_context, metavar="N",
                       help="tokens per sequence (default 2048, or the model's limit if less)")  # fmt: skip
    model.add_argument("--engine", choices=ENGINES,
                       help="what runs the model (default: transformers, or vllm if that cannot load it)")  # fmt: skip
    model.add_argument("--engine-options", type=_object, metavar="JSON",
                       help='for --engine vllm: arguments of its LLM, such as {"tensor_parallel_size": 2}')  # fmt: skip
    model.add_argument("--batch-size", type=_positive, metavar="N",
                       help="sequences at once (default 4; with vllm 1)")  # fmt: skip
    model.add_argument("--device",
                       help="cpu, cuda or cuda:N (default: cuda if there is one); not with vllm")  # fmt: skip
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"),
                       help="dtype of the model (default: float32 on a CPU, else the checkpoint's)")  # fmt: skip
    model.add_argument("--recipe", choices=RECIPES, default=RECIPES[-1],
                       help=f"dtype named in the file, which serves all dtypes (default {RECIPES[-1]})")  # fmt: skip
    model.add_argument("--seed", type=_seed, metavar="N",
                       help="seed that chooses the parts of the text (default 0)")  # fmt: skip
    model.add_argument("--out", type=Path, metavar="FILE", help=f"default: {FILE_NAME} in the model's folder")
    model.add_argument("--weights-only", action="store_true",
                       help="estimate from weights, without running the model")  # fmt: skip
    model.add_argument("--no-key-widths", action="store_true", help="leave K's groups the widths of the dtypes")
    model.add_argument("--no-value-means", action="store_true", help="store V whole, not less its mean")
    model.add_argument("--parent", type=_positive, help=argparse.SUPPRESS)  # end with this process
    model.set_defaults(run=_model)

    check = commands.add_parser("check", help="say whether a calibration file is sound")
    check.add_argument("file", metavar="FILE")
    check.add_argument("--model", metavar="MODEL", help="also check that the file fits this model")
    check.set_defaults(run=_check)

    show = commands.add_parser("show", help="print a summary of a calibration file")
    show.add_argument("file", metavar="FILE")
    show.set_defaults(run=_show)

    report = commands.add_parser("report", help="draw the channels of a calibration file: PNG heat maps, an HTML page")
    report.add_argument("file", metavar="FILE")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write into")
    report.set_defaults(run=_report)
    return made


def _check_engine(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with code 2 if options of `model` exclude each other. Set the defaults of those that are not given."""
    given = given_of(options, OF_A_RUN)
    if options.weights_only and given:
        parser.error(f"--weights-only runs no engine; leave {', '.join(given)} out")
    if options.engine == "vllm" and "--device" in given:
        parser.error(f"--device {options.device} is for transformers; CUDA_VISIBLE_DEVICES tells vLLM which GPUs")
    if options.engine == "vllm" and "--batch-size" in given:
        parser.error("--batch-size is for transformers; vLLM runs one sequence at a time")
    if options.engine != "vllm" and "--engine-options" in given:
        parser.error("--engine-options are vLLM's; give --engine vllm, too")
    if "model" in options.engine_options:
        parser.error("--engine-options: MODEL sets model; leave it out")


# The commands import what they need: `check` and `--help` answer without loading torch.


def _model(options: argparse.Namespace) -> None:
    if options.parent:
        end_with(options.parent)
    from .run import calibrate

    calibrate(options)


def _check(options: argparse.Namespace) -> None:
    calibration = load(options.file)
    fits = ""
    if options.model:
        from dataclasses import asdict

        from .model import load_config, shape_of

        config = load_config(options.model)
        calibration.check_model(**asdict(shape_of(config)))
        calibration.check_rope(rope_parameters(config))
        fits = f", and fits {options.model}"
    print(f"{options.file} is sound{fits}: {len(calibration.layers)} layers, {calibration.heads}, {calibration.recipe}")


def _show(options: argparse.Namespace) -> None:
    from .show import summary

    print(summary(options.file))


def _report(options: argparse.Namespace) -> None:
    from .report import report

    print(report(options.file, options.out))


def _object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _positive(text: str) -> int:
    return _at_least(1, text)


def _tokens(text: str) -> int:
    return _at_least(LEAST_TOKENS, text)


def _context(text: str) -> int:
    return _at_least(LEAST_CONTEXT, text)


def _seed(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15) or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)
