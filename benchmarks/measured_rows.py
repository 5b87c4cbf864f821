"""The rows in results/, each with the file it is from and the run that made it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rows import read
from tables import BASELINE, Row

RESULTS = Path(__file__).resolve().parent / "results"
ORDER = (
    "auto", "fp8", "fp8_e5m2", "tq4", "isoquant4", "planarquant4", "turboquant35", "tq3", "isoquant3", "planarquant3",
    "turboquant25",
)  # fmt: skip
"""Of dtypes in a table; others follow in the order of their rows."""
RUN_COLUMNS = ("rows", "card", "vLLM", "PyTorch", "Triton", "commit", "command")


@dataclass(frozen=True)
class File:
    """An entry of runs.toml. A run has a commit, a command, and `where`: the values that its rows have in some columns.
    A folder (its name ends in `/`) has JSON of the quality harness, which names commit and command itself."""

    name: str
    what: str
    runs: Sequence[Mapping]

    def run(self, row: Row) -> Mapping:
        """The first entry that fits a row (of any commit if rows have no commit). Raises KeyError if none does."""
        for run in self.runs:
            same = run["commit"] == row.get("commit", run["commit"])
            if same and all(row[column] in values for column, values in run.get("where", {}).items()):
                return run
        raise KeyError(f"results/runs.toml has no run for {self.name} at {row.get('commit')!r}")

    def commands(self) -> list[tuple[str, str]]:
        """(commit, command) of all runs."""
        if not self.name.endswith("/"):
            return list(dict.fromkeys((run.get("commit", ""), run.get("command", "")) for run in self.runs))
        named = [json.loads(path.read_text())["run"] for path in sorted((RESULTS / self.name).glob("*.json"))]
        return [(run["commit"] or self.runs[0]["commit"], run["command"]) for run in named]


@cache
def files() -> tuple[File, ...]:
    """All entries of runs.toml, in its order."""
    entries = tomllib.loads((RESULTS / "runs.toml").read_text())["file"]
    return tuple(File(entry["name"], entry["what"], entry.get("runs", ())) for entry in entries)


def file_named(name: str) -> File:
    """The entry of a file. Raises KeyError if there is none."""
    for file in files():
        if file.name == name:
            return file
    raise KeyError(f"results/runs.toml does not name {name}")


def load(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file, with `file`, and `commit` and `command` where they do not say them."""
    file = file_named(name)
    rows = read(RESULTS / name)
    return [{**row, **(file.run(row) if file.runs else {}), "file": name} for row in rows]


def load_quality(name: str, setting: str = "") -> list[dict[str, str]]:
    """The rows of a JSON of the quality harness behind the baseline's; figures are text, and `kl_ratio` is that to
    fp8's storage in the same run ("" if it has no such row). `setting` is kept as a column."""
    path = RESULTS / name
    found = json.loads(path.read_text())
    run = found["run"]
    kl = {row["dtype"]: row["scores"]["kl_mean"] for row in found["rows"]}
    return [
        {
            "dtype": row["dtype"],
            "setting": setting,
            "bytes": str(row["bytes_per_token"]),
            "request_bytes": str(row.get("bytes_per_request", "")),
            "kv_tokens": str(row["kv_tokens"]),
            "kv_bytes": str(run["settings"]["kv_cache_memory"]),
            **{key: str(value) for key, value in row["scores"].items()},
            "kl_ratio": str(row["scores"]["kl_mean"] / kl["fp8-storage"]) if "fp8-storage" in kl else "",
            **_recall(row["recall"]),
            **made_by(name, run),
        }
        for row in found["rows"]
    ]


def made_by(name: str, run: Mapping) -> dict[str, str]:
    """The columns that say what made the rows of a JSON of the quality harness, from its `run`."""
    made_with = run["made_with"]
    return {
        "file": name,
        "gpu": "" if made_with["device"] == "cpu" else made_with["device"],
        "vllm": made_with["vllm"],
        "torch": made_with["torch"],
        "commit": run["commit"] or file_named(f"{name.split('/')[0]}/").runs[0]["commit"],
        "command": run["command"],
    }


def _recall(cells: Sequence[Mapping]) -> dict[str, str]:
    facts = sum(cell["facts"] for cell in cells)
    if not facts:
        return {}
    found = {"recalled": str(sum(cell["recalled"] for cell in cells) / facts), "facts": str(facts)}
    if "log_prob" in cells[0]:
        found["answer"] = str(sum(cell["facts"] * cell["log_prob"] for cell in cells) / facts)
    return found


def run_of(row: Row) -> tuple[str, ...]:
    """A row's run, as `RUN_COLUMNS` say it. What arithmetic says has no versions."""
    card = row.get("gpu") or ("arithmetic, no GPU" if row.get("engine", "").startswith("arithmetic") else "none (CPU)")
    name = row["file"]
    versions = (row.get(key) or "" for key in ("vllm", "torch", "triton"))
    return (f"[{name}](../benchmarks/results/{name})", card, *versions, row["commit"], f"`{row['command']}`")


def is_baseline(row: Row) -> bool:
    """Whether a row is bf16's."""
    return row["dtype"] == BASELINE


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by dtype in `ORDER`."""
    return sorted(rows, key=lambda row: ORDER.index(row["dtype"]) if row["dtype"] in ORDER else len(ORDER))
