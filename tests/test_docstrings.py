"""Docstrings begin with their subject or a verb, those of attributes (a text below an assignment) included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from checkout import REPO

ROOMS = (
    "overlay", "calibration", "quality", "vllm_patches", "scripts", "benchmarks", "examples",
    "tests/support", "tests/soak",
)  # fmt: skip
NO_SUBJECT = re.compile(
    r"\s*(Of|That|Those|What|Whether|Where|Which|Why|How|As|With|Without|To|For|By|From|And|Under|Up|More)\b"
)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: statements that are a string, wherever they stand."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_begin_with_their_subject() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line}: {text.split(chr(10))[0]}"
        for room in ROOMS
        for path in sorted((REPO / room).rglob("*.py"))
        for line, text in texts(path.read_text())
        if NO_SUBJECT.match(text)
    ]
    assert not found, "begin with the subject or a verb:\n" + "\n".join(found)


def test_all_kinds_of_docstrings_are_read() -> None:
    source = (
        '"""Of A."""\nclass B:\n    """That B."""\n    c = 1\n    """How C."""\n    def d(self):\n        "Where D."\n'
    )
    assert [text.split()[0] for _, text in texts(source)] == ["Of", "That", "How", "Where"]
    assert all(NO_SUBJECT.match(text) for _, text in texts(source)) and not NO_SUBJECT.match("Offsets of a page.")
