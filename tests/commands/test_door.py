"""`packed-kv`: one door, its help, its completion, and what it needs."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packed_kv.commands import completion
from packed_kv.commands.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
LINES = 40
"""Of a screen."""


def all_commands() -> list[tuple[str, ...]]:
    """`packed-kv` and every command and command of a command."""
    return list(completion.words_of_all())


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
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
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
    ],
)
def test_bash_completes(line: str, completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "completion.bash").write_text(completion.bash(completion.words_of_all()))
    script = (
        f'source {tmp_path}/completion.bash; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); '
        '_packed_kv; printf "%s\\n" "${COMPREPLY[@]}"'
    )  # fmt: skip
    run = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == completed


def test_fish_gets_a_line_for_each_word() -> None:
    words = completion.words_of_all()
    lines = completion.fish(words).splitlines()
    assert "complete -c packed-kv -n '__fish_seen_subcommand_from plan' -l gpu" in lines
    assert sum(" -l " in line for line in lines) == sum(w.startswith("--") for found in words.values() for w in found)


def test_plan_needs_the_standard_library_alone(bare) -> None:
    run = bare("plan", str(ROOT / "models" / "demo-7m"), "--gpu", "L4")
    assert run.returncode == 0, run.stderr
    assert "turboquant25" in run.stdout


def test_what_is_missing_is_named(bare) -> None:
    run = bare("quality", "run")
    assert run.returncode == 2
    assert run.stderr.startswith("packed-kv quality: ") and run.stderr.endswith(" is missing; pip install vllm\n")
    run = bare("plan", "someone/model", "--gpu", "L4")
    assert run.returncode == 2
    assert "to look on the Hugging Face Hub: pip install huggingface_hub" in run.stderr
    run = bare("plan", str(ROOT / "models" / "demo-7m"), "--gpu", "L4", "--plot", "x.png")
    assert run.returncode == 2
    assert run.stderr == "packed-kv plan: --plot needs matplotlib; pip install 'packed-kv[plots]'\n"


def test_completion_leaves_out_the_options_of_what_cannot_be_imported(bare) -> None:
    run = bare("completion", "bash")
    assert run.returncode == 0
    assert run.stderr.startswith("packed-kv completion: no options of quality (") and run.stderr.count("\n") == 1
    assert '"plan")' in run.stdout and '"quality run")' not in run.stdout
