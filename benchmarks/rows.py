"""Rows of the benchmarks' CSV files: the measured columns, then what they were measured with."""

from __future__ import annotations

import csv
import importlib
import statistics
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MACHINE = ("gpu", "vllm", "torch", "triton", "commit")


def machine(with_vllm: bool = True) -> dict[str, str]:
    """Device name and versions; the caller adds the commit."""
    import torch

    try:
        triton = version("triton")
    except PackageNotFoundError:  # the CPU platform may lack it
        triton = ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    engine = {"vllm": importlib.import_module("vllm").__version__} if with_vllm else {}
    return {"gpu": gpu, **engine, "torch": torch.__version__, "triton": triton}


def processor() -> str:
    """The name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def commit_here() -> str:
    """The checkout's commit, with `+` if it has changes; empty where there is no git history."""
    root = Path(__file__).resolve().parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def percentiles(seconds: list[float]) -> dict[str, str]:
    """p20, p50 and p80 in milliseconds; "" of no seconds."""
    cuts = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    places = {"p20_ms": 1, "p50_ms": 4, "p80_ms": 7}
    return {name: f"{cuts[i] * 1e3:.3f}" if cuts else "" for name, i in places.items()}


def percentile(values: list[float], percent: int) -> float:
    """A percentile from 1 to 99, between the two values around it. Raises ValueError if there is none."""
    if not values:
        raise ValueError("no values")
    return statistics.quantiles(values * 2 if len(values) == 1 else values, n=100, method="inclusive")[percent - 1]


def append(file: Path, row: dict[str, object]) -> None:
    """Add a row to `file`, with a header if the file is new. Raises ValueError if the file has other columns."""
    new = not file.exists()
    if not new:
        with file.open(newline="") as old:
            header = next(csv.reader(old))
        if header != list(row):
            raise ValueError(f"{file} has the columns {header}, not {list(row)}; move it away")
    with file.open("a", newline="") as target:
        writer = csv.DictWriter(target, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def read(file: Path) -> list[dict[str, str]]:
    """The rows of `file`."""
    with file.open(newline="") as source:
        return list(csv.DictReader(source))


def has(file: Path, values: Mapping[str, object]) -> bool:
    """Return True if `file` is there and has a row with these values in their columns."""
    wanted = {name: str(value) for name, value in values.items()}
    return file.exists() and any(wanted.items() <= row.items() for row in read(file))
