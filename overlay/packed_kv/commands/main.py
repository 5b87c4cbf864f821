"""The door: `packed-kv COMMAND ...`. Nothing of a command is imported before it is called."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from ..child_process import EXIT_INTERRUPTED
from .arguments import EXIT_BAD_INPUT, Parser


@dataclass(frozen=True)
class Command:
    """`module` has `main(arguments, prog)` and `parser(prog)`; `needs`: what to install where it cannot be imported."""

    name: str
    module: str
    text: str
    needs: str = ""

    def load(self, function: str) -> Callable:
        return getattr(import_module(self.module), function)


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

COMMANDS = {
    command.name: command
    for command in (
        Command("plan", "packed_kv.commands.plan", "what a model's cache holds and costs, by dtype"),
        Command("doctor", "packed_kv.commands.doctor", "check what a server needs, and say what to do"),
        Command("selftest", "packed_kv.commands.selftest", "compare this machine's kernels with the reference"),
        Command("patch", "packed_kv_patches.patcher", "patch the installed vLLM (packed-kv-patch)"),
        Command("calibrate", "tq_calibrate.cli", "write a calibration file (tq-calibrate)", "torch transformers tqdm"),
        Command("quality", "packed_kv_quality.cli", "measure what a dtype costs (packed-kv-quality)", "vllm"),
        Command("completion", "packed_kv.commands.completion", "print a script for bash, zsh or fish", "shtab"),
    )
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code of the command that was called; 2 for bad input."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        parser().parse_args(words or ["--help"])
    command = COMMANDS[words[0]]
    try:
        try:
            run = command.load("main")
        except ModuleNotFoundError as error:
            if not command.needs:
                raise
            print(f"packed-kv {command.name}: {error.name} is missing; pip install {command.needs}", file=sys.stderr)
            return EXIT_BAD_INPUT
        code = run(words[1:], prog=f"packed-kv {command.name}")
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        _discard_output()
        return 0
    except KeyboardInterrupt:
        print(f"packed-kv {command.name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename:
            raise
        print(f"packed-kv {command.name}: the output cannot be written ({error.strerror})", file=sys.stderr)
        _discard_output()
        return EXIT_BAD_INPUT


def _discard_output() -> None:
    """Discard buffered output when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> Parser:
    """A parser of the command's first word only."""
    made = Parser("packed-kv", description="KV-cache dtypes for vLLM that store keys and values in 2.5 to 4.25 bits.")
    commands = made.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS.values():
        commands.add_parser(command.name, help=command.text, add_help=False)
    return made


if __name__ == "__main__":
    sys.exit(main())
