"""Print a script that completes the words of packed-kv in a shell, made from the commands' own arguments.

bash: source <(packed-kv completion bash)     zsh: source <(packed-kv completion zsh)
fish: packed-kv completion fish | source
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from .arguments import Parser

SHELLS = ("bash", "zsh", "fish")
Words = dict[tuple[str, ...], list[str]]

BASH = """\
_packed_kv() {{
    local words key="" index
    for ((index = 1; index < COMP_CWORD; index++)); do
        [[ ${{COMP_WORDS[index]}} == -* ]] || key+="${{COMP_WORDS[index]}} "
    done
    while :; do
        case "${{key% }}" in
{cases}
        esac
        [[ $key == *" "* ]] || return 0
        key="${{key% }}"; [[ $key == *" "* ]] && key="${{key% *}} " || key=""
    done
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _packed_kv packed-kv
"""


def main(arguments: Sequence[str] | None = None, prog: str = "packed-kv completion") -> int:
    """The command. Returns its exit code."""
    shell = parser(prog).parse_args(arguments).shell
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](words_of_all()), end="")
    return 0


def parser(prog: str = "packed-kv completion") -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("shell", choices=SHELLS)
    return made


def words_of_all() -> Words:
    """Words before -> words that may follow, for each command and its own commands. What cannot be imported here is
    completed by its name alone."""
    from .main import COMMANDS

    found: Words = {(): list(COMMANDS)}
    for command in COMMANDS.values():
        try:
            made = command.load("parser")(f"packed-kv {command.name}")
        except ModuleNotFoundError as error:
            print(f"packed-kv completion: no options of {command.name} ({error.name} is missing)", file=sys.stderr)
            continue
        found |= dict(_words(made, (command.name,)))
    return found


def _words(parser: argparse.ArgumentParser, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            for name, part in action.choices.items():
                yield from _words(part, (*before, name))
        elif action.option_strings:
            words += [option for option in action.option_strings if option.startswith("--")]
        elif action.choices:
            words += map(str, action.choices)
    yield before, words


def bash(words: Words) -> str:
    """A function that looks up the longest run of words that it knows; files where it knows none."""
    case = '            "{}") words="{}"; break ;;'
    return BASH.format(cases="\n".join(case.format(" ".join(key), " ".join(found)) for key, found in words.items()))


def zsh(words: Words) -> str:
    """zsh runs bash's."""
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{bash(words)}"


def fish(words: Words) -> str:
    """A line for each run of words."""
    lines = ["complete -c packed-kv -e"]
    for key, found in words.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in key) or "__fish_use_subcommand"
        deeper = {k[len(key)] for k in words if len(k) > len(key) and k[: len(key)] == key} if key else set()
        if deeper:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(sorted(deeper))}"
        plain = " ".join(word for word in found if not word.startswith("-"))
        if plain:
            lines.append(f"complete -c packed-kv -n '{seen}' -a '{plain}'")
        lines += [f"complete -c packed-kv -n '{seen}' -l {word[2:]}" for word in found if word.startswith("--")]
    return "\n".join(lines) + "\n"
