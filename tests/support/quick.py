"""Choice of the tests that `pytest --quick` runs: all but those of `tests/only_in_all.txt`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from checkout import REPO

LIST = REPO / "tests" / "only_in_all.txt"


class Quick:
    """The lines of the list. A line is the id of a test, `*` in it for anything; `!` before it takes tests back."""

    def __init__(self, text: str) -> None:
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        self.patterns = {line: re.compile(re.escape(line.removeprefix("!")).replace(r"\*", ".*")) for line in lines}

    def runs(self, test: str) -> bool:
        """True if the last line that fits an id, if any, takes it back."""
        return next((line.startswith("!") for line, at in reversed(self.patterns.items()) if at.fullmatch(test)), True)

    def stale(self, tests: Iterable[str]) -> list[str]:
        """Lines that fit no test of their file, of those files that `tests` has in whole."""
        tests = list(tests)
        files = {test.split("::")[0] for test in tests}
        return [
            line
            for line, pattern in self.patterns.items()
            if line.removeprefix("!").split("::")[0] in files and not any(map(pattern.fullmatch, tests))
        ]
