"""Measure what KV-cache dtypes cost in quality, through the real vLLM engine. docs/quality.md explains the results.

Each dtype runs in its own engine and process, with the same KV memory.

Exit code: 0 if all is well; 1 if a dtype fails or one of packed-kv's own was refused, in `run` and `sweep` also if one
is the baseline by another name, equals another or exceeds its bound; 2 if the arguments are wrong or the baseline does
not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from packed_kv.child_process import EXIT_INTERRUPTED
from packed_kv.commands.arguments import EXIT_BAD_INPUT, LONGEST_LINE, Parser
from packed_kv.json_file import printable

from .engines import prepare_environment

COMMANDS = {
    "run": "everything: teacher-forced text, recall of planted facts, verdicts, plots",
    "teacher-forced": "perplexity of texts, KL divergence and agreement with the unquantized baseline; no verdicts",
    "recall": "facts planted in prose, asked for at the end, by depth and length",
    "sweep": "which dtypes do nothing, equal another or are broken: teacher-forced text and verdicts",
}


def main(arguments: Sequence[str] | None = None, prog: str = "packed-kv-quality") -> int:
    """Run the command. Returns its exit code."""
    try:
        from .arguments import BadInput
        from .baseline import BaselineError

        options = parser(prog).parse_args(arguments)
        return options.run(options)
    except ModuleNotFoundError as error:
        print(f"{prog}: {error.name} is missing; pip install vllm", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (BadInput, BaselineError) as error:
        print(printable(f"{prog}: {error}", LONGEST_LINE), file=sys.stderr)
        return EXIT_BAD_INPUT


def parser(prog: str = "packed-kv-quality") -> argparse.ArgumentParser:
    """The arguments of the command."""
    from .arguments import add_run_arguments
    from .generation_command import add_generation_arguments

    formatter = argparse.RawDescriptionHelpFormatter
    made = Parser(prog=prog, description=__doc__, formatter_class=formatter)
    commands = made.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        usage = f"{prog} {name} [options]   (docs/quality.md says what they are for)"
        command = commands.add_parser(name, help=text, description=text, usage=usage, formatter_class=_wide)
        add_run_arguments(command, name)
        command.set_defaults(run=_run)
    text = "as servers generate: whole prompts, then forced text and greedy answers; tasks with known answers"
    usage = f"{prog} generate [options]   (docs/quality.md says what they are for)"
    command = commands.add_parser("generate", help=text, description=text, usage=usage, formatter_class=_wide)
    add_generation_arguments(command)
    command.set_defaults(run=_generate)
    plots = commands.add_parser("plots", help="draw a run's plots again", description="Draw a run's plots again.")
    plots.add_argument("folder", type=Path, metavar="DIR|FILE.json",
        help="the --output folder of a run, or its JSON file")  # fmt: skip
    plots.set_defaults(run=_plots)
    return made


def _wide(prog: str) -> argparse.HelpFormatter:
    """Room for the longest option beside its help."""
    return argparse.HelpFormatter(prog, max_help_position=28)


# The commands import what they need: `plots` and `--help` load no engine.


def _run(options: argparse.Namespace) -> int:
    prepare_environment(small_model=options.model is None)
    from .run import run_recall, run_text

    return run_recall(options) if options.command == "recall" else run_text(options)


def _generate(options: argparse.Namespace) -> int:
    prepare_environment(small_model=options.model is None)
    from .generation_command import run_generation

    return run_generation(options)


def _plots(options: argparse.Namespace) -> int:
    from .arguments import BadInput

    try:
        from .plots import draw
    except ModuleNotFoundError as error:
        raise BadInput(f"{error.name} is missing; pip install 'packed-kv[plots]'") from error
    draw(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
