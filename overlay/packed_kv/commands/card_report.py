"""The file of `packed-kv selftest --report FILE`: what a card does, without the names of its machine.

`content` takes only the fields that are listed here, and texts only in the form of a version, a commit or a card's
name, so that a report can be published as it is. `benchmarks/cards.py` reads such files for docs/cards.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..private_file import replace_file, why_not_replaced

FORM = 1
"""Increment when a field changes its meaning."""
CARD = re.compile(r"[^\w .,()@+-]")
"""A character that no name of a card or processor has."""
VERSION = re.compile(r"(?:[a-z][a-z-]* )?[0-9][0-9A-Za-z.+]*|no [a-z_]+")
COMMIT = re.compile(r"[0-9a-f]{7,40}\+?")
LONGEST_NAME = 80
TIMED = ("requests", "context", "block_size", "query_heads", "kv_heads", "head_dim", "window")
"""Numbers that name the layer and the batch that are timed."""
VERSIONS = ("vllm", "pytorch", "triton", "packed_kv", "cuda")
MS = {"ms": "microseconds", "bf16_ms": "bf16_microseconds", "fp8_ms": "fp8_microseconds"}
"""Name of a time in a report's row -> its name in the self-test's row."""
UNKNOWN = "unknown"


def check_file(text: str) -> Path:
    """Check that a report can be written at a path, for argparse, and return the path."""
    path = Path(text)
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {path.parent} is not a folder; make it first")
    if reason := why_not_replaced(path):
        raise argparse.ArgumentTypeError(f"{reason}; name a file, such as report.json")
    return path


def content(
    machine: Mapping[str, str], timed: Mapping[str, float], rows: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a report made from the self-test's output: the card, the versions, and each kernel.

    machine, timed, rows: as `selftest/__main__.py` has them; `copy_GB_s` counts bytes read and written.
    """
    commit = machine.get("commit", "")
    return {
        "form": FORM,
        "card": CARD.sub("?", machine.get("device", UNKNOWN))[:LONGEST_NAME],
        "capability": capability if re.fullmatch(r"\d{1,2}\.\d", capability := machine.get("capability", "")) else None,
        "versions": {name: _version(machine[name]) for name in VERSIONS if name in machine},
        "commit": commit if COMMIT.fullmatch(commit) else UNKNOWN,
        "timed": {name: int(timed[name]) for name in TIMED if name in timed},
        "copy_GB_s": round(timed["copy_rate"] / 1e9, 1) if "copy_rate" in timed else None,
        "kernels": [kernel_of(row) for row in rows],
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report, replacing a file of this name. Raises OSError."""
    kernels = ",\n".join(f"  {json.dumps(kernel)}" for kernel in report["kernels"])
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in report.items() if key != "kernels"]
    replace_file(path, ("{\n" + ",\n".join([*lines, f' "kernels": [\n{kernels}\n ]']) + "\n}\n").encode())


def _version(text: str) -> str:
    return text if VERSION.fullmatch(text) else UNKNOWN


def kernel_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's fields for a report: the kernel, whether and where it is wrong, and its times."""
    parts = row.get("parts", {})
    wrong = [name for name, part in parts.items() if part["error"] is None or part["error"] > part["bound"]]
    wrong += ["repeated launches"] if row.get("differ") else []
    return {
        "dtype": row["dtype"],
        "decode_kernel": row["decode_kernel"],
        "kernel": row.get("kernel"),
        "latents_kernel": row.get("latents_kernel"),
        "is_right": row["is_right"],
        "wrong": [] if row["is_right"] else wrong or ["it failed"],
        **{ms: round(row[us] / 1e3, 4) if row.get(us) else None for ms, us in MS.items()},
    }
