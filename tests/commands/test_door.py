"""`packed-kv`: one door, its help, its completion, and what it needs."""

from __future__ import annotations

import argparse
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import shtab
from checkout import DEMO_MODEL, REPO
from packed_kv.commands import completion
from packed_kv.commands.main import COMMANDS, main

LINES = 40
"""Lines of a screen."""


def all_commands() -> list[tuple[str, ...]]:
    """The words after `packed-kv` of every command and command of a command; the first has none."""

    def below(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, part in action.choices.items():
                    yield from below(part, (*words, name))

    return list(below(completion.parser_of_all(), ()))


def test_every_command_is_found() -> None:
    assert {words[0] for words in all_commands() if words} == {*COMMANDS}
    assert ("calibrate", "model") in all_commands() and ("patch", "revert") in all_commands()


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_help_fits_a_screen(words: tuple[str, ...], capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert text.startswith(f"usage: {' '.join(('packed-kv', *words))} ")
    assert len(text.splitlines()) <= LINES


def test_the_old_names_are_names_of_the_same() -> None:
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    old = {"packed-kv-patch": "patch", "tq-calibrate": "calibrate", "packed-kv-quality": "quality"}
    for script, name in old.items():
        assert scripts[script] == f"{COMMANDS[name].module}:main"
    assert scripts["packed-kv"] == "packed_kv.commands.main:main"


def test_bad_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pla"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("packed-kv: argument COMMAND: invalid choice: 'pla'") and error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("patch", "aply"),
        ("patch", "verify", "--whels"),
        ("calibrate", "model"),
        ("calibrate", "model", "m", "--tokens", "two\nlines"),
        ("calibrate", "model", "m", "--engine", "vllm", "--weights-only"),
        ("quality", "rum"),
        ("quality", "run", "--context", "x"),
        ("quality", "generate", "--kinds", "none"),
        ("plan",),
        ("doctor", "--no-such-option"),
        ("completion", "csh"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"packed-kv {words[0]}") and error.endswith(" --help lists the options\n")
    assert error.count("\n") == 1


def test_arguments_and_exit_codes_pass_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "show", "/no/such/file"]) == 2
    assert capsys.readouterr().err.startswith("packed-kv calibrate: /no/such/file")
    assert main(["patch", "status", "--target", "/no/such/folder"]) == 5
    assert capsys.readouterr().err.startswith("packed-kv patch: vllm is not installed in /no/such/folder")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("packed-kv pla", ["plan"]),
        ("packed-kv plan --gpu-", ["--gpu-memory", "--gpu-memory-utilization"]),
        ("packed-kv plan /a/model --gpu H200 --us", ["--users"]),
        ("packed-kv patch ver", ["verify"]),
        ("packed-kv calibrate model m --engine-", ["--engine-options"]),
        ("packed-kv quality run --kv", ["--kv-cache-memory"]),
        ("packed-kv completion f", ["fish"]),
        ("packed-kv doctor --x", []),
        ("packed-kv plan mo", ["model"]),
        ("packed-kv calibrate show mo", ["model"]),
    ],
)
def test_bash_completes(line: str, completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "completion.bash").write_text(shtab.complete(completion.parser_of_all(), "bash"))
    (tmp_path / "model").touch()
    script = (
        f'source completion.bash; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); '
        '_shtab_packed_kv packed-kv "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )  # fmt: skip
    run = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == completed


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_script_of_each_shell_has_the_options_of_all_commands(shell: str, capsys) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    options = {"plan": "gpu-memory", "doctor": "tiers", "patch": "target", "quality": "kv-cache-memory"}
    for command, option in (options | {"calibrate": "engine-options"}).items():
        assert command in text and option in text


def test_plan_needs_the_standard_library_alone(bare) -> None:
    run = bare("plan", str(DEMO_MODEL), "--gpu", "L4")
    assert run.returncode == 0, run.stderr
    assert "turboquant25" in run.stdout


def test_what_is_missing_is_named(bare) -> None:
    run = bare("quality", "run")
    assert run.returncode == 2
    assert run.stderr.startswith("packed-kv quality: ") and run.stderr.endswith(" is missing; pip install vllm\n")
    run = bare("plan", "someone/model", "--gpu", "L4")
    assert run.returncode == 2
    assert "to look on the Hugging Face Hub: pip install huggingface_hub" in run.stderr


def test_completion_leaves_out_the_options_of_what_cannot_be_imported(bare, tmp_path: Path) -> None:
    run = bare("completion", "bash")
    assert run.returncode == 2
    assert run.stderr == "packed-kv completion: shtab is missing; pip install shtab\n"
    (tmp_path / "packages" / "shtab").symlink_to(Path(shtab.__file__).parent)
    run = bare("completion", "bash")
    assert run.returncode == 0
    assert run.stderr.startswith("packed-kv completion: no options of quality (") and run.stderr.count("\n") == 1
    assert "--gpu-memory" in run.stdout and "--kv-cache-dtype" not in run.stdout
