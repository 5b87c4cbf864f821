"""Print a script that completes packed-kv's commands and options in a shell.

bash: eval "$(packed-kv completion bash)"     zsh: eval "$(packed-kv completion zsh)"     (after compinit)
fish: packed-kv completion fish | source
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import shtab

from .arguments import Parser

SHELLS = ("bash", "zsh", "fish")


def main(arguments: Sequence[str] | None = None, prog: str = "packed-kv completion") -> int:
    """Run the command. Returns its exit code."""
    print(shtab.complete(parser_of_all(), parser(prog).parse_args(arguments).shell))
    return 0


def parser(prog: str = "packed-kv completion") -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("shell", choices=SHELLS)
    return made


def parser_of_all() -> argparse.ArgumentParser:
    """A parser of `packed-kv` with all commands and their options.

    A command that cannot be imported gets no options; a line on stderr names it."""
    from .main import COMMANDS

    made = argparse.ArgumentParser("packed-kv")
    commands = made.add_subparsers()
    for command in COMMANDS.values():
        try:
            parents = [command.load("parser")(f"packed-kv {command.name}")]
        except ModuleNotFoundError as error:
            print(f"packed-kv completion: no options of {command.name} ({error.name} is missing)", file=sys.stderr)
            parents = []
        part = commands.add_parser(command.name, help=command.text, parents=parents, add_help=not parents)
        _complete_files(part)
    return made


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Complete file names where an argument takes any text or a path."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                _complete_files(part)
        elif action.nargs != 0 and not action.choices and action.type in (None, Path):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
