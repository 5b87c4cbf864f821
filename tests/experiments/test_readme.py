"""experiments/README.md has a line for each experiment, and its links lead somewhere."""

from __future__ import annotations

import re

from checkout import REPO

FOLDER = REPO / "experiments"


def test_every_experiment_has_a_line() -> None:
    named = set(re.findall(r"`(\w+\.py)", (FOLDER / "README.md").read_text()))
    assert named == {path.name for path in FOLDER.glob("*.py")}


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)", (FOLDER / "README.md").read_text())
    assert links and all((FOLDER / link).is_file() for link in links)
